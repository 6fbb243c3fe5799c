"""Mixtures of experts: which tokens go where, and products with each expert's own rows.

Owner: numba_cpu. A step's pairs of a token and one of its experts are sorted by expert, so that
an expert's rows lie together and the products of :mod:`linear` serve them as they are: a task
finds its expert, and runs on a copy of the operation that says where this expert's weights and
rows lie. An expert's weights are read once a step, those of the others not at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.layout import LANES
from pagedllm_kernels.numba_cpu.linear import linear, product_tasks
from pagedllm_kernels.numba_cpu.rows import NORM_ROWS, ZERO, pack, vexp
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    copy,
    field,
    fma,
    get,
    hmax,
    hsum,
    jit,
    load64,
    put,
    real,
    set_field,
    splat,
    store64,
    unit,
    via,
    vload,
    vmax,
    vstore,
    widening,
)

_LEAST = np.float32(-3.4e38)
_ABREAST = 4  # experts whose scores are summed at once, since one sum waits for itself


@unit
def route(op: int, job: int, task: int, scratch: int) -> None:
    """Choose the experts of ``NORM_ROWS`` tokens, by a softmax over all in float32."""
    experts = field(op, at.R_EXPERTS)
    top = field(op, at.R_TOP)
    scores = scratch + at.WORK
    first = task * NORM_ROWS
    for t in range(first, min(first + NORM_ROWS, field(job, at.NUM_TOKENS))):
        _score(op, via(job, op, at.R_IN_AT) + t * field(op, at.R_WIDTH) * 4, scores)
        largest = splat(_LEAST)
        for i in range(0, experts, LANES):
            largest = vmax(largest, vload(scores + 4 * i, F32))
        most, total = hmax(largest), splat(ZERO)
        for i in range(0, experts, LANES):
            value = vexp(vload(scores + 4 * i, F32) - splat(most))
            vstore(value, scores + 4 * i, F32)
            total = total + value
        whole, kept = hsum(total), ZERO
        shares = via(job, op, at.R_SHARES_AT) + t * top * 4
        for j in range(top):
            best, chosen = np.float32(-1.0), 0
            for e in range(experts):
                value = get(scores + 4 * e, F32)
                if value > best:
                    best, chosen = value, e
            put(np.float32(-1.0), scores + 4 * chosen, F32)
            store64(chosen, via(job, op, at.R_CHOSEN_AT) + (t * top + j) * 8)
            put(best, shares + 4 * j, F32)
            kept += best
        if field(op, at.R_NORMALIZE):
            whole = kept
        for j in range(top):
            put(get(shares + 4 * j, F32) / whole, shares + 4 * j, F32)


@jit
def _score(op: int, x: int, scores: int) -> None:
    """Multiply a row by the router: float32, and what no expert has is the least there is."""
    experts, width = field(op, at.R_EXPERTS), field(op, at.R_WIDTH)
    vstore(splat(_LEAST), scores + 4 * (experts // LANES * LANES), F32)
    for e in range(0, experts, _ABREAST):
        weight = field(op, at.R_WEIGHT) + e * width * 4
        b = weight + min(1, experts - 1 - e) * width * 4
        c = weight + min(2, experts - 1 - e) * width * 4
        d = weight + min(3, experts - 1 - e) * width * 4
        s0, s1, s2, s3 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(0, 4 * width, 4 * LANES):
            v = vload(x + i, F32)
            s0 = fma(v, vload(weight + i, F32), s0)
            s1 = fma(v, vload(b + i, F32), s1)
            s2 = fma(v, vload(c + i, F32), s2)
            s3 = fma(v, vload(d + i, F32), s3)
        # From the last to the first, so that of two at one place the right one stays.
        put(hsum(s3), scores + 4 * min(e + 3, experts - 1), F32)
        put(hsum(s2), scores + 4 * min(e + 2, experts - 1), F32)
        put(hsum(s1), scores + 4 * min(e + 1, experts - 1), F32)
        put(hsum(s0), scores + 4 * e, F32)


@unit
def sort(op: int, job: int) -> None:
    """Sort pairs by expert: int64 counts and starts by expert, tokens by place, places by pair."""
    experts, top = field(op, at.R_EXPERTS), field(op, at.R_TOP)
    pairs = field(job, at.NUM_TOKENS) * top
    chosen, counts = via(job, op, at.R_CHOSEN_AT), via(job, op, at.M_COUNTS_AT)
    starts = via(job, op, at.M_STARTS_AT)
    for e in range(experts):
        store64(0, counts + 8 * e)
    for i in range(pairs):
        place = counts + 8 * load64(chosen + 8 * i)
        store64(load64(place) + 1, place)
    begin = 0
    for e in range(experts):
        store64(begin, starts + 8 * e)
        begin += load64(counts + 8 * e)
        store64(0, counts + 8 * e)
    for i in range(pairs):
        e = 8 * load64(chosen + 8 * i)
        place = load64(starts + e) + load64(counts + e)
        store64(load64(counts + e) + 1, counts + e)
        store64(i // top, via(job, op, at.R_ORDER_AT) + 8 * place)
        store64(place, via(job, op, at.R_PLACES_AT) + 8 * i)


@unit
def combine(op: int, job: int, task: int) -> None:
    """Add up the results of each token's experts by their shares, ``NORM_ROWS`` tokens."""
    width, top = field(op, at.R_WIDTH) * 4, field(op, at.R_TOP)
    scale = splat(real(op, at.R_SCALE))
    first = task * NORM_ROWS
    for t in range(first, min(first + NORM_ROWS, field(job, at.NUM_TOKENS))):
        target = via(job, op, at.R_OUT_AT) + t * width
        for i in range(0, width, 4 * LANES):
            total = splat(ZERO)
            for j in range(t * top, (t + 1) * top):
                place = load64(via(job, op, at.R_PLACES_AT) + 8 * j)
                share = splat(get(via(job, op, at.R_SHARES_AT) + 4 * j, F32))
                total = fma(share, vload(via(job, op, at.R_IN_AT) + place * width + i, F32), total)
            if field(op, at.R_MODE) == at.ADD:
                total = fma(total, scale, vload(target + i, F32))
            vstore(total, target + i, F32)


@jit
def expert_tasks(op: int, job: int) -> int:
    """Return the number of tasks of an operation, of all experts together."""
    if field(op, at.CODE) < at.EXPERT:
        blocks = (field(job, at.NUM_TOKENS) + NORM_ROWS - 1) // NORM_ROWS
        return 1 if field(op, at.CODE) == at.SORT else blocks
    total = 0
    for e in range(field(op, at.M_EXPERTS)):
        total += _tasks(op, job, load64(via(job, op, at.M_COUNTS_AT) + 8 * e))
    return total


@jit
def _tasks(op: int, job: int, rows: int) -> int:
    if field(op, at.CODE) == at.EXPERT + at.LINEAR:
        return product_tasks(op, job, rows)
    return 0 if rows < field(job, at.FEW_ROWS) else (rows + LANES - 1) // LANES


@jit
def run_experts(op: int, job: int, task: int, scratch: int, atag: Any) -> None:
    """Run one task of an operation."""
    code = field(op, at.CODE)
    if code == at.ROUTE:
        route(op, job, task, scratch)
    elif code == at.SORT:
        sort(op, job)
    elif code == at.COMBINE:
        combine(op, job, task)
    else:
        _multiply(op, job, task, scratch, atag)


@jit
def _multiply(op: int, job: int, task: int, scratch: int, atag: Any) -> None:
    """Run one task of a packing or a product."""
    e = 0
    rows = load64(via(job, op, at.M_COUNTS_AT))
    while task >= _tasks(op, job, rows):
        task -= _tasks(op, job, rows)
        e += 1
        rows = load64(via(job, op, at.M_COUNTS_AT) + 8 * e)
    start = load64(via(job, op, at.M_STARTS_AT) + 8 * e)
    # The operation as this expert has it, in the frame; after it, what the job would hold:
    # fields are found by their distance from the job, which may be any.
    copy(scratch, op, at.RECORD * at.FIELD)
    own = scratch + at.RECORD * at.FIELD
    index = (own - job) // at.FIELD
    set_field(own, 0, rows)
    panel = start // LANES + e  # of the packed rows: each expert's last panel is its own
    if field(op, at.CODE) == at.EXPERT + at.PACK:
        panel *= field(op, at.P_UNITS) * widening(atag) * at.LINE
        set_field(own, 1, via(job, op, at.P_IN_AT) + start * field(op, at.P_IN_STRIDE))
        set_field(own, 2, via(job, op, at.P_OUT_AT) + panel)
        set_field(scratch, at.P_ROWS_AT, index)
        set_field(scratch, at.P_IN_AT, index + 1)
        set_field(scratch, at.P_OUT_AT, index + 2)
        pack(scratch, job, task, scratch, atag)
        return
    panel *= field(op, at.L_UNITS) * widening(atag) * at.LINE
    set_field(own, 1, via(job, op, at.L_IN_AT) + start * field(op, at.L_IN_STRIDE))
    set_field(own, 2, via(job, op, at.L_PACKED_AT) + panel)
    set_field(own, 3, via(job, op, at.L_OUT_AT) + start * field(op, at.L_OUT_STRIDE))
    set_field(scratch, at.L_WEIGHT, field(op, at.L_WEIGHT) + e * field(op, at.M_BYTES))
    set_field(scratch, at.L_ROWS_AT, index)
    set_field(scratch, at.L_IN_AT, index + 1)
    set_field(scratch, at.L_PACKED_AT, index + 2)
    set_field(scratch, at.L_OUT_AT, index + 3)
    linear(scratch, job, task, scratch, atag)
