"""Paged attention: the layout of pages, and attending to them task by task.

Owner: numba_cpu. Pages, in units of 4 bytes (two bf16 numbers, or one fp32):

- keys ``[pages, Hkv, ceil(D / per unit), slots]``: 16 keys side by side, so that scores come
  out as vectors of 16 keys;
- values ``[pages, Hkv, ceil(slots / per unit), Dv]`` with the numbers of a unit belonging to
  consecutive keys, so that a vector of outputs gathers two keys at once.

Slots are rounded up to 16 and Dv to 16. What no token was written to may hold anything.

A task is a tile of queries times all heads of a KV head, so each page is read once for the
whole group. The softmax is online over blocks of keys (Milakov and Gimelshein, 2018; Dao et
al., "FlashAttention", 2022); where there are fewer tiles than cores, the context is split
and the parts are merged by whichever thread finishes last ("Flash-Decoding", 2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.atomics import fetch_add
from pagedllm_kernels.numba_cpu.blocks import copy, round_up
from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.layout import LANES
from pagedllm_kernels.numba_cpu.plan import visible_keys
from pagedllm_kernels.numba_cpu.rows import store_activation, strands, vexp, vtanh
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    field,
    fma,
    get,
    hmax,
    hsum,
    itemsize,
    jit,
    keep_lanes,
    load32,
    load64,
    outer,
    put,
    real,
    splat,
    store64,
    unit,
    via,
    vload,
    vmax,
    vstore,
    vstore_some,
    weigh,
)

WIDE = FEATURES.wide

_HIDDEN = np.float32(-1e30)
_VISIBLE = np.float32(-1e29)  # no score is below it
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@unit
def attend(op: int, job: int, number: int, scratch: int, atag: Any) -> None:
    """Run one task: attend, and store the output or merge the parts of one."""
    task = via(job, op, at.A_TASKS_AT) + (number + 1) * at.TASK * 8
    parts = field(task, at.T_PARTS) & 0xFFFF
    group = field(op, at.A_GROUP)
    width = field(op, at.A_WIDTH)
    rows = field(task, at.T_ROWS) * group
    # Scratch: sums, (maximum, weight) of each row, then what a block of keys needs.
    sums, stats = scratch, scratch + rows * width
    work = stats + rows * 2 * at.LINE
    _start(op, task, sums, stats, rows, group, width)
    per_block = field(op, at.A_PER_BLOCK)
    last = field(task, at.T_LAST)
    for page in range(field(task, at.T_FIRST), last, per_block):
        pages = min(per_block, last - page)
        following = task
        if page + pages == last:
            more = number + 1 < field(via(job, op, at.A_TASKS_AT), 0)
            following = task + at.TASK * 8 if more else 0
        next_page = page + pages if following == task else field(task + at.TASK * 8, at.T_FIRST)
        _block(op, job, task, page, pages, following, next_page, rows, sums, stats, work,
               atag)  # fmt: skip
    if parts == 1:
        _store(op, job, task, sums, stats, rows, group, width, atag)
        return
    part = field(task, at.T_PART)
    size = field(op, at.A_PART_BYTES)
    base = field(job, at.PARTIALS) + (number - part) * size
    copy(base + part * size, sums, rows * (width + 2 * at.LINE))
    leader = task - part * at.TASK * 8 + 8 * at.T_PARTS
    if fetch_add(leader, 1 << 32) >> 32 == parts - 1:
        _merge(base, size, parts, rows, width)
        _store(op, job, task, base, base + rows * width, rows, group, width, atag)


@jit
def _start(op: int, task: int, sums: int, stats: int, rows: int, group: int, width: int) -> None:
    sinks = field(op, at.A_SINKS)
    for i in range(0, rows * width, at.LINE):
        vstore(splat(_ZERO), sums + i, F32)
    for row in range(rows):
        highest, weight = _HIDDEN, _ZERO
        if sinks and field(task, at.T_PART) == 0:
            highest = get(sinks + 4 * (field(task, at.T_HEAD) * group + row % group), F32)
            weight = _ONE
        put(highest, stats + row * 2 * at.LINE, F32)
        put(weight, stats + row * 2 * at.LINE + at.LINE, F32)


@unit
def _block(
    op: int, job: int, task: int, page: int, pages: int, following: int, following_page: int,
    rows: int, sums: int, stats: int, work: int, atag: Any,
) -> None:  # fmt: skip
    """Attend to ``pages`` pages from ``page`` on; fetch the first of what follows meanwhile."""
    page_size = field(job, at.PAGE_SIZE)
    slots = field(op, at.A_SLOTS)
    per_page = slots // LANES
    vectors = pages * per_page
    groups = (vectors + 3) // 4
    # Addresses: keys by vector, values by page, each followed by four to fetch at its end.
    keys = work
    values = keys + (groups + 1) * 32
    scores = round_up(values + (pages + 4) * 8, at.LINE)
    stride = groups * 4 * LANES * 4
    _addresses(op, job, task, page, pages, following, following_page, keys, values)
    _scores(op, job, task, rows, groups, keys, scores, stride, atag)
    group = field(op, at.A_GROUP)
    for row in range(rows):
        first = field(task, at.T_ROW) + row // group
        low, high = visible_keys(op, job, field(task, at.T_SEQ), first, 1)
        _softmax(op, scores + row * stride, pages, per_page, page_size, low - page * page_size,
                 high - page * page_size, stats + row * 2 * at.LINE,
                 sums + row * field(op, at.A_WIDTH), atag)  # fmt: skip
    context = load32(field(job, at.CONTEXT_LENS) + 4 * field(task, at.T_SEQ))
    if page_size == slots:
        tail = min(context - (page + pages - 1) * page_size, page_size)
        _values(op, job, values, pages, tail, rows, scores, stride, sums, atag)
    else:
        # Pages with slots past their size end in units that hold anything: one at a time.
        for i in range(pages):
            tail = min(context - (page + i) * page_size, page_size)
            _values(op, job, values + 8 * i, 1, tail, rows, scores + i * slots * itemsize(atag),
                    stride, sums, atag)  # fmt: skip


@jit
def _place(op: int, job: int, task: int, page: int) -> int:
    """Return which head of which page a task's page is, counted over all pages."""
    table = field(job, at.PAGE_TABLE)
    table += 4 * (field(task, at.T_SEQ) * field(job, at.PAGE_TABLE_WIDTH) + page)
    return load32(table) * field(op, at.A_KV_HEADS) + field(task, at.T_HEAD)


@jit
def _addresses(
    op: int, job: int, task: int, page: int, pages: int, following: int, following_page: int,
    keys: int, values: int,
) -> None:  # fmt: skip
    """List a block's keys, then the first values; its values, then the first keys to follow."""
    per_page = field(op, at.A_SLOTS) // LANES
    vectors = pages * per_page
    value_size, key_size = field(op, at.A_VALUE_BYTES), field(op, at.A_KEY_BYTES)
    for i in range(pages):
        place = _place(op, job, task, page + i)
        store64(field(op, at.A_VALUES) + place * value_size, values + 8 * i)
        key = field(op, at.A_KEYS) + place * key_size
        for j in range(per_page):
            store64(key + j * at.LINE, keys + 8 * (i * per_page + j))
    for vector in range(vectors, round_up(vectors, 4)):
        store64(load64(keys + 8 * (vectors - 1)), keys + 8 * vector)
    for i in range(4):
        value = load64(values + 8 * min(i // per_page, pages - 1))
        value += i % per_page * (value_size // per_page)
        store64(value, keys + 8 * (round_up(vectors, 4) + i))
        key = load64(keys)
        if following:
            last = field(following, at.T_LAST) - 1
            place = _place(op, job, following, min(following_page + i // per_page, last))
            key = field(op, at.A_KEYS) + place * key_size + i % per_page * at.LINE
        store64(key, values + 8 * (pages + i))


@unit
def _scores(
    op: int, job: int, task: int, rows: int, groups: int, keys: int, scores: int, stride: int,
    atag: Any,
) -> None:  # fmt: skip
    """Queries times keys, float32 [rows, groups * 64], neither scaled nor masked.

    The first rows fetch, line by line, what the next group of keys reads: a processor drops
    prefetches that come faster than memory answers.
    """
    units = field(op, at.A_UNITS)
    row_bytes = units * 4
    group = field(op, at.A_GROUP)
    start = field(task, at.T_HEAD) * field(job, at.NUM_TOKENS) + field(task, at.T_ROW)
    query = via(job, op, at.A_QUERY_AT) + start * group * row_bytes
    step = field(op, at.A_SLOTS) * 4
    for g in range(groups):
        b, out = keys + 32 * g, scores + g * 4 * at.LINE
        row = 0
        while row < rows:
            a, c, left = query + row * row_bytes, out + row * stride, rows - row
            if not WIDE:
                row += _scores_narrow(a, row_bytes, b, step, units, c, stride, left, atag)
            elif row == 0:
                row = _scores_first(a, row_bytes, b, step, units, c, stride, left, atag)
            elif left >= 6:
                outer(6, 4, 0, atag, a, row_bytes, 5, b, step, units, c, stride, 0)
                row += 6
            elif left >= 4:
                outer(4, 4, 0, atag, a, row_bytes, 3, b, step, units, c, stride, 0)
                row += 4
            elif left >= 2:
                outer(2, 4, 0, atag, a, row_bytes, 1, b, step, units, c, stride, 0)
                row += 2
            else:
                outer(1, 4, 0, atag, a, row_bytes, 0, b, step, units, c, stride, 0)
                row += 1


@jit
def _scores_first(
    a: int, row_bytes: int, b: int, step: int, units: int, c: int, stride: int, left: int,
    atag: Any,
) -> int:  # fmt: skip
    """Run a tile of scores that fetches the next group of keys; return its rows."""
    if left >= 6:
        outer(6, 4, 4, atag, a, row_bytes, 5, b, step, units, c, stride, b + 32)
        return 6
    if left >= 4:
        outer(4, 4, 4, atag, a, row_bytes, 3, b, step, units, c, stride, b + 32)
        return 4
    if left == 3:
        outer(3, 4, 4, atag, a, row_bytes, 2, b, step, units, c, stride, b + 32)
        return 3
    if left == 2:
        outer(2, 4, 4, atag, a, row_bytes, 1, b, step, units, c, stride, b + 32)
        return 2
    outer(1, 4, 4, atag, a, row_bytes, 0, b, step, units, c, stride, b + 32)
    return 1


@jit
def _scores_narrow(
    a: int, row_bytes: int, b: int, step: int, units: int, c: int, stride: int, left: int,
    atag: Any,
) -> int:  # fmt: skip
    """Run a tile of scores within 16 registers; return its rows."""
    for j in range(4):
        if left >= 4:
            outer(4, 1, 0, atag, a, row_bytes, 3, b + 8 * j, step, units, c + at.LINE * j, stride,
                  0)  # fmt: skip
        else:
            outer(1, 1, 0, atag, a, row_bytes, 0, b + 8 * j, step, units, c + at.LINE * j, stride,
                  0)  # fmt: skip
    return 4 if left >= 4 else 1


@unit
def _softmax(
    op: int, scores: int, pages: int, per_page: int, page_size: int, low: int, high: int,
    stats: int, sums: int, atag: Any,
) -> None:  # fmt: skip
    """Turn a row of scores into weights, in place, and scale its sums to the new maximum.

    Args:
        op: the operation.
        scores: float32 by vector of 16 keys; becomes weights stored as ``atag``.
        pages: number of pages.
        per_page: vectors in a page.
        page_size: keys in a page.
        low: first key that the row sees, counted from the block's first.
        high: past the last.
        stats: the row's maximum, and a line further its weight.
        sums: the row's weighted values.
        atag: how weights are stored.
    """
    scale, cap = real(op, at.A_SCALE), real(op, at.A_CAP)
    highest = splat(_HIDDEN)
    place = scores
    for page in range(pages):
        for j in range(0, per_page * LANES, LANES):
            x = vload(place, F32)
            if cap > _ZERO:
                x = vtanh(x * splat(scale / cap)) * splat(cap / scale)
                vstore(x, place, F32)
            # Lanes of this vector that hold keys which the row sees.
            first = low - page * page_size - j
            last = min(high - page * page_size, page_size) - j
            if first > 0 or last < LANES:
                x = keep_lanes(x, first, last, _HIDDEN)
            highest = vmax(highest, x)
            place += at.LINE
    old, top = get(stats, F32), hmax(highest)
    place = out = scores
    if top < _VISIBLE:
        for _ in range(pages * per_page):
            vstore(splat(_ZERO), out, atag)
            out += LANES * itemsize(atag)
        return
    top = max(top * scale, old)
    total = splat(_ZERO)
    for page in range(pages):
        for j in range(0, per_page * LANES, LANES):
            x = vexp(fma(vload(place, F32), splat(scale), splat(-top)))
            first = low - page * page_size - j
            last = min(high - page * page_size, page_size) - j
            if first > 0 or last < LANES:
                x = keep_lanes(x, first, last, _ZERO)
            total = total + x
            vstore(x, out, atag)
            place += at.LINE
            out += LANES * itemsize(atag)
    factor = vexp(splat(old - top))
    put(top, stats, F32)
    put(get(stats + at.LINE, F32) * hmax(factor) + hsum(total), stats + at.LINE, F32)
    if old < top:
        for i in range(0, field(op, at.A_WIDTH), at.LINE):
            vstore(vload(sums + i, F32) * factor, sums + i, F32)


@unit
def _values(
    op: int, job: int, values: int, pages: int, tail: int, rows: int, weights: int, stride: int,
    sums: int, atag: Any,
) -> None:  # fmt: skip
    """Add weights times values to the sums; the last page holds ``tail`` keys."""
    per = 4 // itemsize(atag)
    units = field(op, at.A_SLOTS) // per
    last = (tail + per - 1) // per
    mask = 0xFFFF if tail % per else -1
    width = field(op, at.A_WIDTH)
    offset = 0
    while offset < width:
        left = (width - offset) // at.LINE
        taken = 1
        if WIDE and left >= 4:
            taken = 4
        row = 0
        while row < rows:
            p, c = weights + row * stride, sums + row * width + offset
            row += _weigh(p, stride, values, pages, units, last, mask, offset, width, c, row, rows,
                          taken, atag)  # fmt: skip
        offset += taken * at.LINE


@jit
def _weigh(
    p: int, stride: int, values: int, pages: int, units: int, last: int, mask: int, offset: int,
    width: int, c: int, row: int, rows: int, vectors: int, atag: Any,
) -> int:  # fmt: skip
    """Run one tile of :func:`weigh`, of which the first fetches pages; return its rows."""
    left = rows - row
    if vectors == 4 and row == 0:
        if left >= 6:
            weigh(6, 4, 1, atag, p, stride, values, pages, units, last, mask, offset, width, c,
                  width)  # fmt: skip
            return 6
        if left >= 4:
            weigh(4, 4, 1, atag, p, stride, values, pages, units, last, mask, offset, width, c,
                  width)  # fmt: skip
            return 4
        if left == 3:
            weigh(3, 4, 1, atag, p, stride, values, pages, units, last, mask, offset, width, c,
                  width)  # fmt: skip
            return 3
        weigh(1, 4, 1, atag, p, stride, values, pages, units, last, mask, offset, width, c,
              width)  # fmt: skip
        return 1
    if vectors == 4:
        if left >= 6:
            weigh(6, 4, 0, atag, p, stride, values, pages, units, last, mask, offset, width, c,
                  width)  # fmt: skip
            return 6
        if left >= 2:
            weigh(2, 4, 0, atag, p, stride, values, pages, units, last, mask, offset, width, c,
                  width)  # fmt: skip
            return 2
        weigh(1, 4, 0, atag, p, stride, values, pages, units, last, mask, offset, width, c,
              width)  # fmt: skip
        return 1
    if left >= 4:
        weigh(4, 1, 0, atag, p, stride, values, pages, units, last, mask, offset, width, c,
              width)  # fmt: skip
        return 4
    weigh(1, 1, 0, atag, p, stride, values, pages, units, last, mask, offset, width, c,
          width)  # fmt: skip
    return 1


@jit
def _merge(base: int, size: int, parts: int, rows: int, width: int) -> None:
    """Merge the parts of a tile into the first."""
    for row in range(rows):
        stats = base + rows * width + row * 2 * at.LINE
        top = _HIDDEN
        for part in range(parts):
            top = max(top, get(stats + part * size, F32))
        weight = _ZERO
        for part in range(parts):
            factor = vexp(splat(get(stats + part * size, F32) - top))
            weight += get(stats + part * size + at.LINE, F32) * hmax(factor)
            for i in range(row * width, (row + 1) * width, at.LINE):
                x = vload(base + part * size + i, F32) * factor
                if part:
                    x = x + vload(base + i, F32)
                vstore(x, base + i, F32)
        put(weight, stats + at.LINE, F32)


@jit
def _store(
    op: int, job: int, task: int, sums: int, stats: int, rows: int, group: int, width: int,
    atag: Any,
) -> None:  # fmt: skip
    """Divide the sums by the weights and store them as rows of the output."""
    value_dim = field(op, at.A_VALUE_DIM)
    size = 4 if field(op, at.A_OUT_F32) else itemsize(atag)
    lines = strands(job, field(job, at.NUM_TOKENS), atag)
    stride = field(op, at.A_OUT_STRIDE)
    for row in range(rows):
        factor = splat(_ONE / get(stats + row * 2 * at.LINE + at.LINE, F32))
        head = field(task, at.T_HEAD) * group + row % group
        target = via(job, op, at.A_OUT_AT)
        target += (field(task, at.T_ROW) + row // group) * lines * stride
        target += head * value_dim * size
        for d in range(0, value_dim, LANES):
            x = vload(sums + row * width + 4 * d, F32) * factor
            if size == 4:
                vstore_some(x, target + 4 * d, min(LANES, value_dim - d), F32)
            else:
                count = min(LANES, value_dim - d)
                store_activation(x, target + size * d, count, lines, stride, atag)
