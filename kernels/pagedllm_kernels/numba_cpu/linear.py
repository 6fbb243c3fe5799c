"""Matrix products with what follows them: bias, residual, activation, softcap.

Owner: numba_cpu. Weights stay in memory once, row-major as checkpoints hold them. A task
reads its rows of the weights once and multiplies them by all rows of the input, so a step
of many sequences reads the weights as often as a step of one.

Few rows: dot products of two contiguous rows (:func:`tiles.inner`), bound by reading the
weights. Many rows: the input is packed into panels of 16 rows, and a tile multiplies numbers
of the weights, broadcast, by vectors of 16 rows (:func:`tiles.outer`), bound by arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.layout import (
    BLOCK,
    GROUP,
    LANES,
    LIST,
    PANEL,
    RESULT,
    RESULT_ROW,
    STAGE,
    TURNED,
)
from pagedllm_kernels.numba_cpu.rows import Vector, vexp, vsigmoid, vtanh
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    copy,
    copysign,
    field,
    fma,
    get,
    inner,
    itemsize,
    jit,
    outer,
    put,
    real,
    splat,
    store64,
    transpose,
    via,
    vload,
    vstore,
    vstore_some,
)

WIDE = FEATURES.wide

FEW_BYTES = 24576  # of weights in a task of few rows
_AHEAD = 2048  # bytes to prefetch ahead in a row of weights

_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_GELU_A = np.float32(0.7978845608028654)  # sqrt(2 / pi)
_GELU_B = np.float32(0.044715)
_ERF_P = np.float32(0.3275911)
_ERF_1 = np.float32(0.254829592)
_ERF_2 = np.float32(-0.284496736)
_ERF_3 = np.float32(1.421413741)
_ERF_4 = np.float32(-1.453152027)
_ERF_5 = np.float32(1.061405429)


@jit
def linear_tasks(op: int, job: int) -> int:
    """Return the number of tasks of a product."""
    rows = via(job, op, at.L_ROWS_AT)
    size = field(op, at.L_SIZE)
    if rows == 0:
        return 0
    if rows < field(job, at.FEW_ROWS):
        block = few_block(op)
        return (size + block - 1) // block
    return (size + BLOCK - 1) // BLOCK * ((rows + GROUP - 1) // GROUP)


@jit
def few_block(op: int) -> int:
    """Rows of weights in a task of few rows: a multiple of 16."""
    return max(LANES, FEW_BYTES // field(op, at.L_STRIDE) // LANES * LANES)


@jit
def linear(op: int, job: int, task: int, scratch: int, wtag: Any, atag: Any) -> None:
    """Run one task of a product."""
    if via(job, op, at.L_ROWS_AT) < field(job, at.FEW_ROWS):
        _linear_few(op, job, task, scratch, wtag, atag)
    else:
        _linear_many(op, job, task, scratch, wtag, atag)


@jit
def _linear_few(op: int, job: int, task: int, scratch: int, wtag: Any, atag: Any) -> None:
    rows = via(job, op, at.L_ROWS_AT)
    size = field(op, at.L_SIZE)
    stride = field(op, at.L_STRIDE)
    gated = field(op, at.L_MODE) == at.GATED
    block = few_block(op)
    result = scratch + RESULT
    for n in range(task * block, min((task + 1) * block, size), LANES):
        weight = field(op, at.L_WEIGHT) + n * stride
        _dot_rows(op, job, weight, size - 1 - n, rows, result, wtag)
        if gated:
            _dot_rows(op, job, weight + size * stride, size - 1 - n, rows, result + 64, wtag)
        for row in range(rows):
            finish(
                op,
                job,
                row,
                n,
                size,
                result + row * RESULT_ROW,
                result + row * RESULT_ROW + 64,
                atag,
            )


@jit
def _dot_rows(op: int, job: int, weight: int, last: int, rows: int, result: int, wtag: Any) -> None:
    """Multiply 16 rows of weights, of which ``last`` is the last, by all rows of the input."""
    stride = field(op, at.L_STRIDE)
    units = field(op, at.L_UNITS)
    x_stride = field(op, at.L_IN_STRIDE)
    source = via(job, op, at.L_IN_AT)
    for row in range(0, rows, 4):
        x = source + row * x_stride
        out = result + row * RESULT_ROW
        x_last = rows - 1 - row
        if x_last == 0:
            inner(
                16, 1, 0, wtag, weight, stride, last, x, x_stride, 0, units, out, RESULT_ROW, _AHEAD
            )
        elif x_last == 1:
            for i in range(0, 16, 8):
                inner(8, 2, 0, wtag, weight + i * stride, stride, last - i, x, x_stride, 1, units,
                      out + 4 * i, RESULT_ROW, _AHEAD)  # fmt: skip
        else:
            for i in range(0, 16, 4):
                inner(4, 4, 0, wtag, weight + i * stride, stride, last - i, x, x_stride, x_last,
                      units, out + 4 * i, RESULT_ROW, _AHEAD)  # fmt: skip


@jit
def _linear_many(op: int, job: int, task: int, scratch: int, wtag: Any, atag: Any) -> None:
    rows = via(job, op, at.L_ROWS_AT)
    groups = (rows + GROUP - 1) // GROUP
    n = task // groups * BLOCK
    first = task % groups * GROUP
    size = field(op, at.L_SIZE)
    stride = field(op, at.L_STRIDE)
    units = field(op, at.L_UNITS)
    count = min(BLOCK, size - n)
    halves = 2 if field(op, at.L_MODE) == at.GATED else 1
    weight = field(op, at.L_WEIGHT) + n * stride
    far = size * stride  # from a gate's row to its up projection's
    following, following_far = weight + BLOCK * stride, far  # the next task's weights
    if stride % 2048 == 0:
        # Rows a multiple of the cache's ways apart would evict each other.
        stage = scratch + STAGE
        padded = units * 4 + at.LINE
        for half in range(halves):
            for i in range(count):
                copy(stage + (half * BLOCK + i) * padded, weight + half * far + i * stride,
                     units * 4)  # fmt: skip
        weight, stride, far = stage, padded, BLOCK * padded
    for m in range(first, min(first + GROUP, rows), PANEL):
        panel_rows = min(PANEL, rows - m)
        for half in range(halves):
            fetch = following + half * following_far if m == first else 0
            _product(op, job, scratch, weight + half * far, stride, count, m, panel_rows,
                     half, fetch, wtag)  # fmt: skip
        result = scratch + RESULT
        for row in range(panel_rows):
            values = result + row * RESULT_ROW
            for i in range(0, count, LANES):
                finish(op, job, m + row, n + i, size, values + 4 * i,
                       values + 4 * (BLOCK + i), atag)  # fmt: skip


@jit
def _product(
    op: int, job: int, scratch: int, weight: int, stride: int, count: int, m: int,
    panel_rows: int, half: int, following: int, wtag: Any,
) -> None:  # fmt: skip
    """Multiply ``count`` rows of weights by up to PANEL rows of input, into the results.

    Meanwhile the weights at ``following`` (unless it is 0) are fetched into the cache.
    """
    units = field(op, at.L_UNITS)
    turned = scratch + TURNED + half * BLOCK * PANEL * 4
    panels = (panel_rows + LANES - 1) // LANES
    packed = via(job, op, at.L_PACKED_AT) + m // LANES * units * at.LINE
    for j in range(panels):
        store64(packed + j * units * at.LINE, scratch + LIST + 8 * j)
    fetch = scratch + LIST + 64
    step = 8
    if WIDE and panels == 1:
        step = 16
    if not WIDE:
        step = 4
    for i in range(0, count, step):
        source = weight + i * stride
        # A tile fetches a line per unit, so two of them fetch a block.
        turn = i // step
        store64(following + turn * units * at.LINE if following and turn < 2 else packed, fetch)
        last = count - 1 - i
        c = turned + i * PANEL * 4
        if not WIDE:
            for j in range(panels):
                outer(4, 1, 1, wtag, source, stride, last, scratch + LIST + 8 * j, at.LINE,
                      units, c + j * 64, PANEL * 4, fetch)  # fmt: skip
        elif panels == 3:
            outer(8, 3, 1, wtag, source, stride, last, scratch + LIST, at.LINE, units, c,
                  PANEL * 4, fetch)  # fmt: skip
        elif panels == 2:
            outer(8, 2, 1, wtag, source, stride, last, scratch + LIST, at.LINE, units, c,
                  PANEL * 4, fetch)  # fmt: skip
        else:
            outer(16, 1, 1, wtag, source, stride, last, scratch + LIST, at.LINE, units, c,
                  PANEL * 4, fetch)  # fmt: skip
    for j in range(panels):
        for i in range(0, BLOCK, LANES):
            transpose(16, 16, 0, F32, turned + i * PANEL * 4 + j * 64, PANEL * 4, 15,
                      scratch + RESULT + j * LANES * RESULT_ROW + (half * BLOCK + i) * 4,
                      RESULT_ROW)  # fmt: skip


@jit
def finish(
    op: int, job: int, row: int, n: int, size: int, values: int, others: int, atag: Any
) -> None:
    """Apply what follows a product to 16 results of a row and store them.

    Args:
        op: the operation.
        job: the job.
        row: of the input.
        n: the first of the 16 columns.
        size: columns in all; those past it are not stored.
        values: address of the 16 results, float32.
        others: of a gated product, address of the up projection's 16 results.
        atag: how activations are stored.
    """
    mode = field(op, at.L_MODE)
    bias = field(op, at.L_BIAS)
    count = min(LANES, size - n)
    target = via(job, op, at.L_OUT_AT) + row * field(op, at.L_OUT_STRIDE)
    v = vload(values, F32)
    if bias:
        v = v + vload(bias + 4 * n, F32)
    if mode == at.GATED:
        u = vload(others, F32)
        if bias:
            u = u + vload(bias + 4 * (size + n), F32)
        v = activate(v, field(op, at.L_ACTIVATION)) * u
        vstore_some(v, target + n * itemsize(atag), count, atag)
        return
    target += 4 * n
    if mode == at.ADD:
        if count == LANES:
            vstore(fma(v, splat(real(op, at.L_SCALE)), vload(target, F32)), target, F32)
        else:
            vstore(v, values, F32)
            for i in range(count):
                x = get(target + 4 * i, F32) + get(values + 4 * i, F32) * real(op, at.L_SCALE)
                put(x, target + 4 * i, F32)
        return
    if mode == at.LOGITS:
        v = v * splat(real(op, at.L_SCALE))
        cap = real(op, at.L_CAP)
        if cap > np.float32(0):
            v = vtanh(v * splat(_ONE / cap)) * splat(cap)
    if count == LANES:
        vstore(v, target, F32)
    else:
        vstore_some(v, target, count, F32)


@jit
def activate(x: Vector, kind: int) -> Vector:
    """SiLU, or GELU by tanh or by erf."""
    if kind == at.SILU:
        return x * vsigmoid(x)
    if kind == at.GELU_TANH:
        t = splat(_GELU_A) * fma(x * x * x, splat(_GELU_B), x)
        return splat(_HALF) * x * (splat(_ONE) + vtanh(t))
    return splat(_HALF) * x * (splat(_ONE) + verf(x * splat(np.float32(0.7071067811865476))))


@jit
def verf(x: Vector) -> Vector:
    """Error function, within 2e-7 absolutely: Abramowitz and Stegun, 7.1.26."""
    a = copysign(x, splat(_ONE))
    t = splat(_ONE) / fma(a, splat(_ERF_P), splat(_ONE))
    p = fma(splat(_ERF_5), t, splat(_ERF_4))
    p = fma(p, t, splat(_ERF_3))
    p = fma(p, t, splat(_ERF_2))
    p = fma(p, t, splat(_ERF_1))
    return copysign(splat(_ONE) - p * t * vexp(splat(np.float32(0)) - a * a), x)
