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
from pagedllm_kernels.numba_cpu.blocks import copy, fetch
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
from pagedllm_kernels.numba_cpu.rows import (
    Vector,
    store_activation,
    strands,
    vexp,
    vsigmoid,
    vtanh,
)
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    copysign,
    field,
    fma,
    inner,
    itemsize,
    jit,
    outer,
    real,
    splat,
    store64,
    transpose,
    unit,
    via,
    vload,
    vload_some,
    vstore_some,
)

WIDE = FEATURES.wide

_START = 1024  # bytes to fetch where a stream of weights will go on
FEW_BYTES = 24576  # of weights in a task of few rows

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
    """Rows of weights in a task of few rows: a multiple of BLOCK."""
    return max(BLOCK, FEW_BYTES // field(op, at.L_STRIDE) // BLOCK * BLOCK)


@jit
def linear(op: int, job: int, task: int, scratch: int, wtag: Any, atag: Any) -> None:
    """Run one task of a product."""
    if via(job, op, at.L_ROWS_AT) < field(job, at.FEW_ROWS):
        _linear_few(op, job, task, scratch, wtag, atag)
    else:
        _linear_many(op, job, task, scratch, wtag, atag)


@unit
def _linear_few(op: int, job: int, task: int, scratch: int, wtag: Any, atag: Any) -> None:
    rows = via(job, op, at.L_ROWS_AT)
    size = field(op, at.L_SIZE)
    stride = field(op, at.L_STRIDE)
    gated = field(op, at.L_MODE) == at.GATED
    block = few_block(op)
    result = scratch + RESULT
    lines = strands(job, rows, wtag)
    for n in range(task * block, min((task + 1) * block, size), BLOCK):
        weight = field(op, at.L_WEIGHT) + n * stride
        if gated:
            fetch(weight + size * stride, _START)
        for i in range(0, min(BLOCK, size - n), LANES):
            _dot_rows(
                op, job, weight + i * stride, size - 1 - n - i, rows * lines, result + 4 * i, wtag
            )
        if gated:
            fetch(weight + BLOCK * stride, _START)
            weight += size * stride
            for i in range(0, min(BLOCK, size - n), LANES):
                _dot_rows(op, job, weight + i * stride, size - 1 - n - i, rows * lines,
                          result + 4 * (BLOCK + i), wtag)  # fmt: skip
        finish(op, job, 0, rows, n, result, lines, atag)


@jit
def _dot_rows(op: int, job: int, weight: int, last: int, rows: int, result: int, wtag: Any) -> None:
    """Multiply 16 rows of weights, of which ``last`` is the last, by all rows of the input."""
    stride = field(op, at.L_STRIDE)
    units = field(op, at.L_UNITS)
    x_stride = field(op, at.L_IN_STRIDE)
    x = via(job, op, at.L_IN_AT)
    row = 0
    while row < rows:
        x_last = rows - 1 - row
        if x_last == 0:
            inner(16, 1, 0, wtag, weight, stride, last, x, x_stride, 0, units, result, RESULT_ROW)
            row += 1
        elif x_last == 1:
            for i in range(0, 16, 8):
                inner(8, 2, 0, wtag, weight + i * stride, stride, last - i, x, x_stride, x_last,
                      units, result + 4 * i, RESULT_ROW)  # fmt: skip
            row += 2
        elif x_last <= 3:
            for i in range(0, 16, 4):
                inner(4, 4, 0, wtag, weight + i * stride, stride, last - i, x, x_stride, x_last,
                      units, result + 4 * i, RESULT_ROW)  # fmt: skip
            row += 4
        else:
            for i in range(0, 16, 2):
                inner(2, 8, 0, wtag, weight + i * stride, stride, last - i, x, x_stride, x_last,
                      units, result + 4 * i, RESULT_ROW)  # fmt: skip
            row += 8
        x += 8 * x_stride
        result += 8 * RESULT_ROW


@unit
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
            ahead = following + half * following_far if m == first else 0
            _product(op, job, scratch, weight + half * far, stride, count, m, panel_rows,
                     half, ahead, wtag)  # fmt: skip
        finish(op, job, m, panel_rows, n, scratch + RESULT, 1, atag)


@unit
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
    step = 8
    if WIDE and panels == 1:
        step = 16
    if not WIDE:
        step = 4
    for i in range(0, count, step):
        source = weight + i * stride
        # A tile fetches a line per unit, so two of them fetch a block.
        turn = i // step
        ahead = following + turn * units * at.LINE if following and turn < 2 else packed
        last = count - 1 - i
        c = turned + i * PANEL * 4
        if not WIDE:
            for j in range(panels):
                outer(4, 1, 1, wtag, source, stride, last, scratch + LIST + 8 * j, at.LINE,
                      units, c + j * 64, PANEL * 4, ahead)  # fmt: skip
        elif panels == 3:
            outer(8, 3, 1, wtag, source, stride, last, scratch + LIST, at.LINE, units, c,
                  PANEL * 4, ahead)  # fmt: skip
        elif panels == 2:
            outer(8, 2, 1, wtag, source, stride, last, scratch + LIST, at.LINE, units, c,
                  PANEL * 4, ahead)  # fmt: skip
        else:
            outer(16, 1, 1, wtag, source, stride, last, scratch + LIST, at.LINE, units, c,
                  PANEL * 4, ahead)  # fmt: skip
    for j in range(panels):
        for i in range(0, BLOCK, LANES):
            transpose(16, 16, 0, F32, turned + i * PANEL * 4 + j * 64, PANEL * 4, 15,
                      scratch + RESULT + j * LANES * RESULT_ROW + (half * BLOCK + i) * 4,
                      RESULT_ROW)  # fmt: skip


@unit
def finish(
    op: int, job: int, first: int, rows: int, n: int, result: int, lines: int, atag: Any
) -> None:
    """Apply what follows a product to a block of its results and store them.

    Args:
        op: the operation.
        job: the job.
        first: row of the input that the first row of results belongs to.
        rows: of results.
        n: the column that the first of up to BLOCK columns belongs to.
        result: float32 [rows, 2 * BLOCK]; of a gated product, gates and then up projections.
        lines: of results to a row; they are added up.
        atag: how activations are stored.
    """
    mode = field(op, at.L_MODE)
    bias = field(op, at.L_BIAS)
    size = field(op, at.L_SIZE)
    stride = field(op, at.L_OUT_STRIDE)
    activation = field(op, at.L_ACTIVATION)
    scale = splat(real(op, at.L_SCALE))
    cap = real(op, at.L_CAP)
    width = itemsize(atag) if mode == at.GATED else 4
    target = via(job, op, at.L_OUT_AT) + first * stride + n * width
    for _ in range(rows):
        for i in range(0, min(BLOCK, size - n), LANES):
            count = min(LANES, size - n - i)
            out = target + i * width
            v = _result(result + 4 * i, lines)
            if bias:
                v = v + vload(bias + 4 * (n + i), F32)
            if mode == at.GATED:
                u = _result(result + 4 * (BLOCK + i), lines)
                if bias:
                    u = u + vload(bias + 4 * (size + n + i), F32)
                store_activation(activate(v, activation) * u, out, count, lines, stride, atag)
                continue
            if mode == at.LOGITS:
                v = v * scale
                if cap > np.float32(0):
                    v = vtanh(v * splat(_ONE / cap)) * splat(cap)
            elif mode == at.ADD:
                v = fma(v, scale, vload_some(out, count, F32))
            vstore_some(v, out, count, F32)
        target += stride * (lines if mode == at.GATED else 1)
        result += RESULT_ROW * lines


@jit
def _result(place: int, lines: int) -> Vector:
    v = vload(place, F32)
    return v + vload(place + RESULT_ROW, F32) if lines == 2 else v


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
