"""Writing pages: norm, rotate and store a step's queries, keys and values.

Owner: numba_cpu. The layout of pages is that of :mod:`pagedllm_kernels.numba_cpu.attend`;
queries are stored ``[Hkv, T, G, D]``, beside their KV head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.int8_pages import beside, round_row
from pagedllm_kernels.numba_cpu.layout import LANES, WORK
from pagedllm_kernels.numba_cpu.rows import ONE, ZERO
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    field,
    get,
    itemsize,
    jit,
    load64,
    put,
    real,
    round_up,
    unit,
    via,
    vload,
    vstore_some,
)

WRITE_ROWS = 4  # of a task


@unit
def write(op: int, job: int, task: int, scratch: int, atag: Any, ptag: Any) -> None:
    """Norm, rotate and store the queries, keys and values of ``WRITE_ROWS`` rows."""
    tokens = field(job, at.NUM_TOKENS)
    heads, group = field(op, at.A_HEADS), field(op, at.A_GROUP)
    dim, value_dim = field(op, at.A_DIM), field(op, at.A_VALUE_DIM)
    page_size, qtag = field(job, at.PAGE_SIZE), beside(ptag)
    size = 4 if field(op, at.W_IN_F32) else itemsize(atag)
    row_bytes = field(op, at.A_UNITS) * 4
    turned = scratch + WORK
    for t in range(task * WRITE_ROWS, min((task + 1) * WRITE_ROWS, tokens)):
        source = via(job, op, at.W_QUERY_AT) + field(op, at.W_QUERY_OFFSET)
        source += t * field(op, at.W_QUERY_STRIDE)
        for head in range(heads):
            _turn(op, job, t, source + head * dim * size, field(op, at.W_Q_NORM), turned, atag)
            place = field(job, at.QUERIES)
            place += ((head // group * tokens + t) * group + head % group) * row_bytes
            for d in range(0, row_bytes // itemsize(qtag), LANES):
                count = min(LANES, row_bytes // itemsize(qtag) - d)
                vstore_some(vload(turned + 4 * d, F32), place + d * itemsize(qtag), count, qtag)
        slot = load64(field(job, at.SLOT_MAPPING) + 8 * t)
        page, offset = slot // page_size * field(op, at.A_KV_HEADS), slot % page_size
        keys = via(job, op, at.W_KEY_AT) + field(op, at.W_KEY_OFFSET)
        keys += t * field(op, at.W_KEY_STRIDE)
        values = via(job, op, at.W_VALUE_AT) + field(op, at.W_VALUE_OFFSET)
        values += t * field(op, at.W_VALUE_STRIDE)
        for head in range(field(op, at.A_KV_HEADS)):
            _turn(op, job, t, keys + head * dim * size, field(op, at.W_K_NORM), turned, atag)
            end = field(op, at.A_KEYS) + (page + head + 1) * field(op, at.A_KEY_BYTES)
            round_row(turned, dim, end + (offset - field(op, at.A_SLOTS)) * 4, ptag)
            _write_key(op, end - field(op, at.A_KEY_BYTES), offset, turned, ptag)
            _read(op, values + head * value_dim * size, value_dim, turned, atag)
            end = field(op, at.A_VALUES) + (page + head + 1) * field(op, at.A_VALUE_BYTES)
            round_row(turned, value_dim, end + (offset - field(op, at.A_SLOTS)) * 4, ptag)
            _write_value(op, end - field(op, at.A_VALUE_BYTES), offset, turned, ptag)


@jit
def _read(op: int, source: int, dim: int, out: int, atag: Any) -> None:
    """Read one head of the input into float32 ``out``, zero up to a multiple of 16."""
    wide = field(op, at.W_IN_F32)
    for d in range(dim):
        x = get(source + 4 * d, F32) if wide else get(source + itemsize(atag) * d, atag)
        put(x, out + 4 * d, F32)
    for d in range(dim, round_up(dim, LANES)):
        put(ZERO, out + 4 * d, F32)


@jit
def _turn(op: int, job: int, t: int, source: int, weight: int, out: int, atag: Any) -> None:
    """Norm and rotate one head into float32 ``out``, zero up to a multiple of 16."""
    dim = field(op, at.A_DIM)
    _read(op, source, dim, out, atag)
    if weight:
        total = ZERO
        for d in range(dim):
            x = get(out + 4 * d, F32)
            total += x * x
        factor = ONE / np.sqrt(total / np.float32(dim) + real(op, at.W_EPS))
        for d in range(dim):
            y = get(out + 4 * d, F32) * factor * get(weight + 4 * d, F32)
            put(y, out + 4 * d, F32)
    half = field(op, at.W_HALF)
    if half:
        row = load64(field(job, at.POSITIONS) + 8 * t) * half * 4
        for d in range(half):
            x, y = get(out + 4 * d, F32), get(out + 4 * (half + d), F32)
            c = get(field(op, at.W_COS) + row + 4 * d, F32)
            s = get(field(op, at.W_SIN) + row + 4 * d, F32)
            put(x * c - y * s, out + 4 * d, F32)
            put(y * c + x * s, out + 4 * (half + d), F32)


@jit
def _write_key(op: int, head: int, offset: int, source: int, ptag: Any) -> None:
    per, size = 4 // itemsize(beside(ptag)), itemsize(ptag)
    for u in range(field(op, at.A_UNITS)):
        place = head + u * field(op, at.A_KEY_STRIDE) + offset * per * size
        for i in range(per):
            put(get(source + 4 * (u * per + i), F32), place + i * size, ptag)


@jit
def _write_value(op: int, head: int, offset: int, source: int, ptag: Any) -> None:
    per, size = 4 // itemsize(beside(ptag)), itemsize(ptag)
    place = head + offset // per * field(op, at.A_VALUE_STRIDE) + offset % per * size
    for d in range(field(op, at.A_VALUE_DIM)):
        put(get(source + 4 * d, F32), place + d * per * size, ptag)
