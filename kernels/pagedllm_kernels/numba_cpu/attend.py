"""Paged attention: the layout of pages, and attending to them task by task.

Owner: numba_cpu. Pages, in units of 4 bytes (two bf16 numbers, or one fp32):

- keys ``[pages, Hkv, ceil(D / per unit), slots]``: 16 keys side by side, so that scores come
  out as vectors of 16 keys;
- values ``[pages, Hkv, ceil(slots / per unit), Dv]`` with the numbers of a unit belonging to
  consecutive keys, so that a vector of outputs gathers two keys at once.

Slots are rounded up to 16 and Dv to 16. What no token was written to may hold anything. Pages
in int8 have a byte to a unit, and scales: see :mod:`int8_pages`.

A task is a tile of queries times all heads of a KV head, so each page is read once for the
whole group. The softmax is online over blocks of keys (Milakov and Gimelshein, 2018; Dao et
al., "FlashAttention", 2022); where there are fewer tiles than cores, the context is split
and the parts are merged by whichever thread finishes last ("Flash-Decoding", 2023).

A task's state is in its frame: addresses of the sums (float32 [rows, Dv]), of the rows'
maxima and weights (a line each), of lists of pages, and of the block's scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.int8_pages import beside, fetch_scales, scale_scores
from pagedllm_kernels.numba_cpu.layout import LANES, LINE, TASK, WORK
from pagedllm_kernels.numba_cpu.plan import visible_keys
from pagedllm_kernels.numba_cpu.rows import ONE, ZERO, store_activation, strands, vexp, vtanh
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    copy,
    fetch_add,
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
    put,
    real,
    round_up,
    run_tile,
    set_field,
    splat,
    store64,
    unit,
    via,
    vload,
    vmax,
    vstore,
)
from pagedllm_kernels.numba_cpu.tiles import COLUMNS, MAX_ROWS

_HIDDEN = np.float32(-1e30)
_VISIBLE = np.float32(-1e29)  # no score is below it


@unit
def attend(op: int, job: int, number: int, scratch: int, atag: Any, ptag: Any) -> None:
    """Run one task: attend, and store the output or merge the parts of one."""
    tasks = via(job, op, at.A_TASKS_AT)
    task = tasks + (number + 1) * TASK
    width = field(op, at.A_WIDTH)
    rows = field(task, at.T_ROWS) * field(op, at.A_GROUP)
    sums = scratch + WORK
    stats = sums + rows * width
    set_field(scratch, at.F_TASK, task)
    set_field(scratch, at.F_ROWS, rows)
    set_field(scratch, at.F_SUMS, sums)
    set_field(scratch, at.F_STATS, stats)
    set_field(scratch, at.F_KEYS, stats + rows * 2 * LINE)
    _start(op, scratch)
    page, last = field(task, at.T_FIRST), field(task, at.T_LAST)
    while page < last:
        pages = min(field(op, at.A_PER_BLOCK), last - page)
        set_field(scratch, at.F_PAGE, page)
        set_field(scratch, at.F_PAGES, pages)
        page += pages
        following = task  # what is fetched while the block ends: the next, or the next task's
        if page == last:
            following = task + TASK if number + 1 < load64(tasks) else 0
        set_field(scratch, at.F_NEXT, following)
        next_page = page
        if following and following != task:
            next_page = field(following, at.T_FIRST)
        set_field(scratch, at.F_NEXT_PAGE, next_page)
        _block(op, job, scratch, ptag)
    parts = field(task, at.T_PARTS) & 0xFFFF
    if parts > 1:
        part, size = field(task, at.T_PART), field(op, at.A_PART_BYTES)
        sums = field(job, at.PARTIALS) + (number - part) * size
        copy(sums + part * size, scratch + WORK, rows * (width + 2 * LINE))
        leader = task - part * TASK + 8 * at.T_PARTS
        # The next layers' tasks are these again, so the count goes on from layer to layer.
        if (fetch_add(leader, 1 << 32) >> 32) % parts != parts - 1:
            return
        _merge(sums, size, parts, rows, width)
    _store(op, job, task, sums, sums + rows * width, rows, atag)


@jit
def _start(op: int, scratch: int) -> None:
    task, rows = field(scratch, at.F_TASK), field(scratch, at.F_ROWS)
    sums, stats = field(scratch, at.F_SUMS), field(scratch, at.F_STATS)
    group, sinks = field(op, at.A_GROUP), field(op, at.A_SINKS)
    for i in range(sums, stats, LINE):
        vstore(splat(ZERO), i, F32)
    for row in range(rows):
        highest, weight = _HIDDEN, ZERO
        if sinks and field(task, at.T_PART) == 0:
            highest = get(sinks + 4 * (field(task, at.T_HEAD) * group + row % group), F32)
            weight = ONE
        put(highest, stats + row * 2 * LINE, F32)
        put(weight, stats + row * 2 * LINE + LINE, F32)


@unit
def _block(op: int, job: int, scratch: int, ptag: Any) -> None:
    """Attend to the frame's block of pages, and fetch the first of what follows meanwhile."""
    task, rows = field(scratch, at.F_TASK), field(scratch, at.F_ROWS)
    page, pages = field(scratch, at.F_PAGE), field(scratch, at.F_PAGES)
    page_size, slots = field(job, at.PAGE_SIZE), field(op, at.A_SLOTS)
    groups, wtag = (pages * slots // LANES + 3) // 4, beside(ptag)
    # Addresses: keys by vector, values by page, each followed by four to fetch at its end.
    values = field(scratch, at.F_KEYS) + (groups + 1) * 32
    scores = round_up(values + (pages + 4) * 8, LINE)
    stride = groups * 4 * LINE
    set_field(scratch, at.F_VALUES, values)
    set_field(scratch, at.F_SCORES, scores)
    set_field(scratch, at.F_STRIDE, stride)
    _addresses(op, job, scratch)
    keys, step = field(scratch, at.F_KEYS), slots // LANES * 8
    fetch_scales(op, scratch, keys, values, ptag)
    _scores(op, job, scratch, groups)
    scale_scores(op, job, scratch, keys, step, field(op, at.A_KEY_BYTES), ptag)
    for row in range(rows):
        first = field(task, at.T_ROW) + row // field(op, at.A_GROUP)
        low, high = visible_keys(op, job, field(task, at.T_SEQ), first, 1)
        base = page * page_size
        _softmax(op, job, scratch, row, low - base, high - base, wtag)
    scale_scores(op, job, scratch, values, 8, field(op, at.A_VALUE_BYTES), ptag)
    context = load32(field(job, at.CONTEXT_LENS) + 4 * field(task, at.T_SEQ))
    if page_size == slots:
        tail = min(context - (page + pages - 1) * page_size, page_size)
        _values(op, job, scratch, values, pages, tail, scores, wtag)
    else:
        # Pages with slots past their size end in units that hold anything: one at a time.
        for i in range(pages):
            tail = min(context - (page + i) * page_size, page_size)
            weights = scores + i * slots * itemsize(wtag)
            _values(op, job, scratch, values + 8 * i, 1, tail, weights, wtag)


@jit
def _place(op: int, job: int, task: int, page: int) -> int:
    """Return which head of which page a task's page is, counted over all pages."""
    table = field(job, at.PAGE_TABLE)
    table += 4 * (field(task, at.T_SEQ) * field(job, at.PAGE_TABLE_WIDTH) + page)
    return load32(table) * field(op, at.A_KV_HEADS) + field(task, at.T_HEAD)


@jit
def _addresses(op: int, job: int, scratch: int) -> None:
    """List a block's keys, then the first values; its values, then the first keys to follow."""
    task, pages = field(scratch, at.F_TASK), field(scratch, at.F_PAGES)
    keys, values = field(scratch, at.F_KEYS), field(scratch, at.F_VALUES)
    per_page = field(op, at.A_SLOTS) // LANES
    vectors, line = pages * per_page, field(op, at.A_KEY_STRIDE) // per_page
    value_size, key_size = field(op, at.A_VALUE_BYTES), field(op, at.A_KEY_BYTES)
    for i in range(pages):
        place = _place(op, job, task, field(scratch, at.F_PAGE) + i)
        store64(field(op, at.A_VALUES) + place * value_size, values + 8 * i)
        key = field(op, at.A_KEYS) + place * key_size
        for j in range(per_page):
            store64(key + j * line, keys + 8 * (i * per_page + j))
    for vector in range(vectors, round_up(vectors, 4)):
        store64(load64(keys + 8 * (vectors - 1)), keys + 8 * vector)
    following = field(scratch, at.F_NEXT)
    for i in range(4):
        value = load64(values + 8 * min(i // per_page, pages - 1))
        value += i % per_page * (value_size // per_page)
        store64(value, keys + 8 * (round_up(vectors, 4) + i))
        key = load64(keys)
        if following:
            last = field(following, at.T_LAST) - 1
            page = min(field(scratch, at.F_NEXT_PAGE) + i // per_page, last)
            place = _place(op, job, following, page)
            key = field(op, at.A_KEYS) + place * key_size + i % per_page * line
        store64(key, values + 8 * (pages + i))


@unit
def _scores(op: int, job: int, scratch: int, groups: int) -> None:
    """Queries times keys, float32 [rows, groups * 64], neither scaled nor masked.

    The first rows fetch, line by line, what the next group of keys reads: a processor drops
    prefetches that come faster than memory answers.
    """
    task, rows = field(scratch, at.F_TASK), field(scratch, at.F_ROWS)
    row_bytes, stride = field(op, at.A_UNITS) * 4, field(scratch, at.F_STRIDE)
    start = field(task, at.T_HEAD) * field(job, at.NUM_TOKENS) + field(task, at.T_ROW)
    query = field(job, at.QUERIES) + start * field(op, at.A_GROUP) * row_bytes
    args = scratch + at.ARGS
    set_field(args, at.O_A_STRIDE, row_bytes)
    set_field(args, at.O_A_LAST, rows)
    set_field(args, at.O_STRIDE, field(op, at.A_KEY_STRIDE))
    set_field(args, at.O_UNITS, field(op, at.A_UNITS))
    set_field(args, at.O_C_STRIDE, stride)
    for j in range(0, groups * 4, COLUMNS):
        keys = field(scratch, at.F_KEYS) + 8 * j
        set_field(args, at.O_LIST, keys)
        set_field(args, at.O_AHEAD, keys + 32)
        for row in range(0, rows, MAX_ROWS):
            set_field(args, at.O_A, query + row * row_bytes)
            set_field(args, at.O_C, field(scratch, at.F_SCORES) + row * stride + j * LINE)
            number = (at.REST if row else at.FIRST) + min(rows - row, MAX_ROWS)
            run_tile(field(job, at.TILES), number, args)


@unit
def _softmax(op: int, job: int, scratch: int, row: int, low: int, high: int, wtag: Any) -> None:
    """Turn a row of scores into weights, in place, and scale its sums to the new maximum.

    Args:
        op: the operation.
        job: the job.
        scratch: the frame.
        row: of the tile.
        low: first key that the row sees, counted from the block's first.
        high: past the last.
        wtag: how weights are stored.
    """
    scale, cap = real(op, at.A_SCALE), real(op, at.A_CAP)
    pages, page_size = field(scratch, at.F_PAGES), field(job, at.PAGE_SIZE)
    slots = field(op, at.A_SLOTS)
    stats = field(scratch, at.F_STATS) + row * 2 * LINE
    place = out = field(scratch, at.F_SCORES) + row * field(scratch, at.F_STRIDE)
    highest = splat(_HIDDEN)
    for page in range(pages):
        for j in range(0, slots, LANES):
            x = vload(place, F32)
            if cap > ZERO:
                x = vtanh(x * splat(scale / cap)) * splat(cap / scale)
                vstore(x, place, F32)
            # Lanes of this vector that hold keys which the row sees.
            first = low - page * page_size - j
            last = min(high - page * page_size, page_size) - j
            if first > 0 or last < LANES:
                x = keep_lanes(x, first, last, _HIDDEN)
            highest = vmax(highest, x)
            place += LINE
    old, top = get(stats, F32), hmax(highest)
    if top < _VISIBLE:
        for _ in range(0, pages * slots, LANES):
            vstore(splat(ZERO), out, wtag)
            out += LANES * itemsize(wtag)
        return
    top = max(top * scale, old)
    total = splat(ZERO)
    place = out
    for page in range(pages):
        for j in range(0, slots, LANES):
            x = vexp(fma(vload(place, F32), splat(scale), splat(-top)))
            first = low - page * page_size - j
            last = min(high - page * page_size, page_size) - j
            if first > 0 or last < LANES:
                x = keep_lanes(x, first, last, ZERO)
            total = total + x
            vstore(x, out, wtag)
            place += LINE
            out += LANES * itemsize(wtag)
    factor = vexp(splat(old - top))
    put(top, stats, F32)
    put(get(stats + LINE, F32) * hmax(factor) + hsum(total), stats + LINE, F32)
    if old < top:
        width = field(op, at.A_WIDTH)
        sums = field(scratch, at.F_SUMS) + row * width
        for i in range(sums, sums + width, LINE):
            vstore(vload(i, F32) * factor, i, F32)


@unit
def _values(
    op: int, job: int, scratch: int, values: int, pages: int, tail: int, weights: int, wtag: Any
) -> None:
    """Add weights times values to the sums; the last page holds ``tail`` keys."""
    per, unit_stride = 4 // itemsize(wtag), field(op, at.A_VALUE_STRIDE)
    rows, stride = field(scratch, at.F_ROWS), field(scratch, at.F_STRIDE)
    width = field(op, at.A_WIDTH)
    args = scratch + at.MORE_ARGS
    set_field(args, at.V_P_STRIDE, stride)
    set_field(args, at.V_LIST, values)
    set_field(args, at.V_PAGES, pages)
    set_field(args, at.V_UNITS, field(op, at.A_SLOTS) // per)
    set_field(args, at.V_LAST_UNITS, (tail + per - 1) // per)
    set_field(args, at.V_LAST_MASK, 0xFFFF if tail % per else -1)
    set_field(args, at.V_STRIDE, unit_stride)
    set_field(args, at.V_C_STRIDE, width)
    offset = 0
    while offset < width:
        whole = width - offset >= COLUMNS * LINE
        set_field(args, at.V_OFFSET, offset * unit_stride // width)
        for row in range(0, rows, MAX_ROWS):
            set_field(args, at.V_P, weights + row * stride)
            set_field(args, at.V_C, field(scratch, at.F_SUMS) + row * width + offset)
            number = at.WEIGH_ONE
            if whole:
                number = at.WEIGH_REST if row else at.WEIGH_FIRST
            run_tile(field(job, at.TILES), number + min(rows - row, MAX_ROWS), args)
        offset += COLUMNS * LINE if whole else LINE


@jit
def _merge(base: int, size: int, parts: int, rows: int, width: int) -> None:
    """Merge the parts of a tile into the first."""
    for row in range(rows):
        stats = base + rows * width + row * 2 * LINE
        top = _HIDDEN
        for part in range(parts):
            top = max(top, get(stats + part * size, F32))
        weight = ZERO
        for part in range(parts):
            factor = vexp(splat(get(stats + part * size, F32) - top))
            weight += get(stats + part * size + LINE, F32) * hmax(factor)
            for i in range(row * width, (row + 1) * width, LINE):
                x = vload(base + part * size + i, F32) * factor
                if part:
                    x = x + vload(base + i, F32)
                vstore(x, base + i, F32)
        put(weight, stats + LINE, F32)


@jit
def _store(op: int, job: int, task: int, sums: int, stats: int, rows: int, atag: Any) -> None:
    """Divide the sums by the weights and store them as rows of the output."""
    value_dim, group = field(op, at.A_VALUE_DIM), field(op, at.A_GROUP)
    wide = field(op, at.A_OUT_F32)
    size = 4 if wide else itemsize(atag)
    lines = strands(job, field(job, at.NUM_TOKENS), atag)
    stride = field(op, at.A_OUT_STRIDE)
    for row in range(rows):
        factor = splat(ONE / get(stats + row * 2 * LINE + LINE, F32))
        target = via(job, op, at.A_OUT_AT)
        target += (field(task, at.T_ROW) + row // group) * lines * stride
        target += (field(task, at.T_HEAD) * group + row % group) * value_dim * size
        for d in range(0, value_dim, LANES):
            x = vload(sums + row * field(op, at.A_WIDTH) + 4 * d, F32) * factor
            count = min(LANES, value_dim - d)
            if wide:
                store_activation(x, target + size * d, count, 1, 0, F32)
            else:
                store_activation(x, target + size * d, count, lines, stride, atag)
