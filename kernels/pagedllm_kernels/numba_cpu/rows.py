"""Operations on rows: embedding, norms, packing; and functions of vectors.

Owner: numba_cpu. Widths of the rows are multiples of 16 numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.layout import LANES
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    copy,
    copysign,
    field,
    fma,
    hsum,
    itemsize,
    jit,
    load64,
    real,
    round_even,
    rounded,
    run_tile,
    scale_by_power,
    set_field,
    splat,
    unit,
    via,
    vload,
    vmax,
    vmin,
    vstore,
    vstore_some,
    widening,
)

Vector = Any  # annotates a value of 16 floats

EMBED_ROWS = 8  # of a task
NORM_ROWS = 4

ZERO, HALF, ONE, TWO = (np.float32(x) for x in (0.0, 0.5, 1.0, 2.0))
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_EXP_MIN = np.float32(-87.0)
_EXP_MAX = np.float32(88.0)
_C5 = np.float32(1.9875691500e-4)
_C4 = np.float32(1.3981999507e-3)
_C3 = np.float32(8.3334519073e-3)
_C2 = np.float32(4.1665795894e-2)
_C1 = np.float32(1.6666665459e-1)
_C0 = np.float32(5.0000001201e-1)
_GELU_A = np.float32(0.7978845608028654)  # sqrt(2 / pi)
_GELU_B = np.float32(0.044715)
_ERF_SCALE = np.float32(0.7071067811865476)
_ERF_P = np.float32(0.3275911)
_ERF_1 = np.float32(0.254829592)
_ERF_2 = np.float32(-0.284496736)
_ERF_3 = np.float32(1.421413741)
_ERF_4 = np.float32(-1.453152027)
_ERF_5 = np.float32(1.061405429)


@jit
def vexp(x: Vector) -> Vector:
    """E ** x, within 1 ulp or so; below -87 it is e ** -87, which is 1.6e-38.

    Cody and Waite's reduction and the polynomial of Cephes' ``expf``.
    """
    x = vmin(vmax(x, splat(_EXP_MIN)), splat(_EXP_MAX))
    n = round_even(x * splat(_LOG2E))
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), x))
    p = fma(splat(_C5), r, splat(_C4))
    p = fma(p, r, splat(_C3))
    p = fma(p, r, splat(_C2))
    p = fma(p, r, splat(_C1))
    p = fma(p, r, splat(_C0))
    return scale_by_power(fma(p, r * r, r + splat(ONE)), n)


@jit
def vsigmoid(x: Vector) -> Vector:
    """1 / (1 + e ** -x)."""
    return splat(ONE) / (splat(ONE) + vexp(splat(ZERO) - x))


@jit
def vtanh(x: Vector) -> Vector:
    """Hyperbolic tangent, within 1e-7 absolutely."""
    return splat(TWO) * vsigmoid(splat(TWO) * x) - splat(ONE)


@jit
def verf(x: Vector) -> Vector:
    """Error function, within 2e-7 absolutely: Abramowitz and Stegun, 7.1.26."""
    a = copysign(x, splat(ONE))
    t = splat(ONE) / fma(a, splat(_ERF_P), splat(ONE))
    p = fma(splat(_ERF_5), t, splat(_ERF_4))
    p = fma(p, t, splat(_ERF_3))
    p = fma(p, t, splat(_ERF_2))
    p = fma(p, t, splat(_ERF_1))
    return copysign(splat(ONE) - p * t * vexp(splat(ZERO) - a * a), x)


@jit
def activate(x: Vector, kind: int) -> Vector:
    """SiLU, or GELU by tanh or by erf."""
    if kind == at.SILU:
        return x * vsigmoid(x)
    if kind == at.GELU_TANH:
        t = splat(_GELU_A) * fma(x * x * x, splat(_GELU_B), x)
        return splat(HALF) * x * (splat(ONE) + vtanh(t))
    return splat(HALF) * x * (splat(ONE) + verf(x * splat(_ERF_SCALE)))


@jit
def strands(job: int, rows: int, tag: Any) -> int:
    """Return in how many rows a row of a product's input is kept: 2 where they are few.

    A number is then the sum of two narrow ones, which costs nothing where reading the weights
    takes all the time, and rounds its product with them about as well as float32 does.
    """
    return 2 if rows < field(job, at.SPLIT_ROWS) and itemsize(tag) < 4 else 1


@jit
def store_activation(
    value: Vector, target: int, count: int, lines: int, stride: int, tag: Any
) -> None:
    """Store up to 16 numbers of a row, and in the next row what rounding took from them."""
    vstore_some(value, target, count, tag)
    if lines == 2:
        vstore_some(value - rounded(value, tag), target + stride, count, tag)


@unit
def embed(op: int, job: int, task: int, atag: Any) -> None:
    """``out[t] = table[token_ids[t]] * scale`` for ``EMBED_ROWS`` rows."""
    width = field(op, at.E_WIDTH)
    scale = splat(real(op, at.E_SCALE))
    first = task * EMBED_ROWS
    for t in range(first, min(first + EMBED_ROWS, field(job, at.NUM_TOKENS))):
        token = load64(field(job, at.TOKEN_IDS) + 8 * t)
        source = field(op, at.E_TABLE) + token * width * itemsize(atag)
        target = via(job, op, at.E_OUT_AT) + t * field(op, at.E_OUT_STRIDE)
        for i in range(0, width, LANES):
            vstore(vload(source + i * itemsize(atag), atag) * scale, target + 4 * i, F32)


@unit
def norm(op: int, job: int, task: int, atag: Any) -> None:
    """RMS norm of ``NORM_ROWS`` rows (Zhang and Sennrich, 2019); without a weight, a copy."""
    width = field(op, at.N_WIDTH)
    weight = field(op, at.N_WEIGHT)
    mode = field(op, at.N_MODE)
    scale = splat(real(op, at.N_SCALE))
    index = field(op, at.N_INDEX_AT)
    rows = via(job, op, at.N_ROWS_AT)
    out_stride = field(op, at.N_OUT_STRIDE)
    lines = strands(job, rows, atag) if mode == at.STORE else 1
    first = task * NORM_ROWS
    for row in range(first, min(first + NORM_ROWS, rows)):
        source_row = row
        if index:
            source_row = load64(field(job, index) + 8 * row)
        source = via(job, op, at.N_IN_AT) + field(op, at.N_IN_OFFSET)
        source += source_row * field(op, at.N_IN_STRIDE)
        target = via(job, op, at.N_OUT_AT) + field(op, at.N_OUT_OFFSET)
        target += row * lines * out_stride
        factor = splat(ONE)
        if weight:
            total = splat(ZERO)
            for i in range(0, width, LANES):
                x = vload(source + 4 * i, F32)
                total = fma(x, x, total)
            mean = hsum(total) / np.float32(width)
            factor = splat(ONE / np.sqrt(mean + real(op, at.N_EPS)))
        for i in range(0, width, LANES):
            y = vload(source + 4 * i, F32) * factor
            if weight:
                y = y * vload(weight + 4 * i, F32)
            if mode == at.STORE:
                store_activation(y, target + itemsize(atag) * i, LANES, lines, out_stride, atag)
            elif mode == at.STORE_F32:
                vstore(y, target + 4 * i, F32)
            else:
                vstore(fma(y, scale, vload(target + 4 * i, F32)), target + 4 * i, F32)


@jit
def widen_row(target: int, source: int, count: int, tag: Any) -> None:
    """Widen ``count`` numbers, a multiple of 16, to float32."""
    for i in range(0, count, LANES):
        vstore(vload(source + itemsize(tag) * i, tag), target + 4 * i, F32)


@unit
def pack(op: int, job: int, task: int, scratch: int, atag: Any) -> None:
    """Transpose one panel of 16 rows to [units, 16]; rows past the last repeat it."""
    units = field(op, at.P_UNITS) * widening(atag)
    stride = field(op, at.P_IN_STRIDE)
    source = via(job, op, at.P_IN_AT) + task * LANES * stride
    last = via(job, op, at.P_ROWS_AT) - 1 - task * LANES
    if widening(atag) == 2:
        padded = units * 4 + at.LINE
        for row in range(min(LANES, last + 1)):
            widen_row(scratch + at.STAGE + row * padded, source + row * stride, units, atag)
        source, stride = scratch + at.STAGE, padded
    target = via(job, op, at.P_OUT_AT) + task * units * at.LINE
    args = scratch + at.MORE_ARGS
    set_field(args, at.X_STRIDE, stride)
    set_field(args, at.X_LAST, last)
    set_field(args, at.X_TARGET_STRIDE, at.LINE)
    whole = units // LANES * LANES
    for u in range(0, whole, LANES):
        set_field(args, at.X_SOURCE, source + 4 * u)
        set_field(args, at.X_TARGET, target + u * at.LINE)
        run_tile(field(job, at.TILES), at.TURN, args)
    for u in range(whole, units):
        for row in range(LANES):
            copy(target + u * at.LINE + 4 * row, source + min(row, last) * stride + 4 * u, 4)
