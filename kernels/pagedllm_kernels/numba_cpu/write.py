"""Writing pages: norm, rotate and store a step's queries, keys and values.

Owner: numba_cpu. The layout of pages is that of :mod:`pagedllm_kernels.numba_cpu.attend`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.blocks import round_up
from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.layout import LANES
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    field,
    get,
    itemsize,
    jit,
    load64,
    put,
    real,
    unit,
    via,
    vload,
    vstore_some,
)

WIDE = FEATURES.wide

WRITE_ROWS = 4  # of a task of WRITE
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@unit
def write(op: int, job: int, task: int, scratch: int, atag: Any) -> None:
    """Norm, rotate and store the queries, keys and values of ``WRITE_ROWS`` rows."""
    tokens = field(job, at.NUM_TOKENS)
    heads = field(op, at.A_HEADS)
    kv_heads = field(op, at.A_KV_HEADS)
    group = field(op, at.A_GROUP)
    dim = field(op, at.A_DIM)
    units = field(op, at.A_UNITS)
    size = 4 if field(op, at.W_IN_F32) else itemsize(atag)
    queries = via(job, op, at.A_QUERY_AT)
    for t in range(task * WRITE_ROWS, min((task + 1) * WRITE_ROWS, tokens)):
        source = via(job, op, at.W_QUERY_AT) + field(op, at.W_QUERY_OFFSET)
        source += t * field(op, at.W_QUERY_STRIDE)
        for head in range(heads):
            _turn(op, job, t, source + head * dim * size, field(op, at.W_Q_NORM), scratch, atag)
            place = ((head // group * tokens + t) * group + head % group) * units * 4
            for d in range(0, units * 4 // itemsize(atag), LANES):
                count = min(LANES, units * 4 // itemsize(atag) - d)
                vstore_some(vload(scratch + 4 * d, F32), queries + place + d * itemsize(atag),
                            count, atag)  # fmt: skip
        source = via(job, op, at.W_KEY_AT) + field(op, at.W_KEY_OFFSET)
        source += t * field(op, at.W_KEY_STRIDE)
        for head in range(kv_heads):
            _turn(op, job, t, source + head * dim * size, field(op, at.W_K_NORM), scratch, atag)
            _write_key(op, job, t, head, scratch, atag)
        source = via(job, op, at.W_VALUE_AT) + field(op, at.W_VALUE_OFFSET)
        source += t * field(op, at.W_VALUE_STRIDE)
        value_dim = field(op, at.A_VALUE_DIM)
        for head in range(kv_heads):
            _write_value(op, job, t, head, source + head * value_dim * size, atag)


@jit
def _turn(op: int, job: int, t: int, source: int, weight: int, out: int, atag: Any) -> None:
    """Norm and rotate one head into float32 ``out``, zero up to a multiple of 16."""
    dim = field(op, at.A_DIM)
    if field(op, at.W_IN_F32):
        for d in range(dim):
            put(get(source + 4 * d, F32), out + 4 * d, F32)
    else:
        for d in range(dim):
            put(get(source + itemsize(atag) * d, atag), out + 4 * d, F32)
    for d in range(dim, round_up(dim, LANES)):
        put(_ZERO, out + 4 * d, F32)
    if weight:
        total = _ZERO
        for d in range(dim):
            x = get(out + 4 * d, F32)
            total += x * x
        factor = _ONE / np.sqrt(total / np.float32(dim) + real(op, at.W_EPS))
        for d in range(dim):
            y = get(out + 4 * d, F32) * factor * get(weight + 4 * d, F32)
            put(y, out + 4 * d, F32)
    half = field(op, at.W_HALF)
    if half:
        row = load64(field(job, at.POSITIONS) + 8 * t) * half * 4
        cosines = field(op, at.W_COS) + row
        sines = field(op, at.W_SIN) + row
        for d in range(half):
            x = get(out + 4 * d, F32)
            y = get(out + 4 * (half + d), F32)
            c = get(cosines + 4 * d, F32)
            s = get(sines + 4 * d, F32)
            put(x * c - y * s, out + 4 * d, F32)
            put(y * c + x * s, out + 4 * (half + d), F32)


@jit
def _write_key(op: int, job: int, t: int, head: int, source: int, atag: Any) -> None:
    page_size = field(job, at.PAGE_SIZE)
    slots = field(op, at.A_SLOTS)
    slot = load64(field(job, at.SLOT_MAPPING) + 8 * t)
    page = slot // page_size * field(op, at.A_KV_HEADS) + head
    place = field(op, at.A_KEYS) + page * field(op, at.A_KEY_BYTES) + slot % page_size * 4
    size = itemsize(atag)
    per = 4 // size
    for u in range(field(op, at.A_UNITS)):
        for i in range(per):
            x = get(source + 4 * (u * per + i), F32)
            put(x, place + u * slots * 4 + i * size, atag)


@jit
def _write_value(op: int, job: int, t: int, head: int, source: int, atag: Any) -> None:
    page_size = field(job, at.PAGE_SIZE)
    slot = load64(field(job, at.SLOT_MAPPING) + 8 * t)
    page = slot // page_size * field(op, at.A_KV_HEADS) + head
    size = itemsize(atag)
    per = 4 // size
    offset = slot % page_size
    row = offset // per * field(op, at.A_WIDTH) + offset % per * size
    place = field(op, at.A_VALUES) + page * field(op, at.A_VALUE_BYTES) + row
    for d in range(field(op, at.A_VALUE_DIM)):
        if field(op, at.W_IN_F32):
            put(get(source + 4 * d, F32), place + 4 * d, atag)
        else:
            put(get(source + size * d, atag), place + 4 * d, atag)
