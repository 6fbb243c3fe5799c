"""Matrix products with what follows them: bias, residual, activation, softcap.

Owner: numba_cpu. Weights stay in memory once, row-major as checkpoints hold them. A task
reads its rows of the weights once and multiplies them by all rows of the input, so a step
of many sequences reads the weights as often as a step of one.

Few rows: dot products of two contiguous rows (``inner`` tiles), bound by reading the weights.
Many rows: the input is packed into panels of 16 rows, and a tile multiplies numbers of the
weights, broadcast, by vectors of 16 rows (``outer`` tiles), bound by arithmetic. Where the
processor multiplies 16-bit numbers no faster than fp32, the panels are widened as they are
packed, and a block of weights as its task begins.

Products with quantised weights are in :mod:`quantized` and end here too.
"""

from __future__ import annotations

from typing import Any

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.layout import BLOCK, GROUP, LANES, PANEL, RESULT, RESULT_ROW
from pagedllm_kernels.numba_cpu.rows import (
    ONE,
    ZERO,
    Vector,
    activate,
    store_activation,
    strands,
    vtanh,
    widen_row,
)
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    copy,
    fetch,
    field,
    fma,
    itemsize,
    jit,
    real,
    run_tile,
    set_field,
    splat,
    store64,
    unit,
    via,
    vload,
    vload_some,
    vstore_some,
    widening,
)

WIDE = FEATURES.wide

FEW_BYTES = 24576  # of weights in a task of few rows
_START = 1024  # bytes to fetch where a stream of weights will go on


@jit
def linear_tasks(op: int, job: int) -> int:
    """Return the number of tasks of a product."""
    return product_tasks(op, job, via(job, op, at.L_ROWS_AT))


@jit
def product_tasks(op: int, job: int, rows: int) -> int:
    """Return the number of tasks of a product with so many rows."""
    size = field(op, at.L_SIZE)
    if rows == 0:
        return 0
    if rows < field(job, at.FEW_ROWS):
        block = _few_block(op)
        return (size + block - 1) // block
    return (size + BLOCK - 1) // BLOCK * ((rows + GROUP - 1) // GROUP)


@jit
def _few_block(op: int) -> int:
    """Rows of weights in a task of few rows: a multiple of BLOCK."""
    return max(BLOCK, FEW_BYTES // field(op, at.L_STRIDE) // BLOCK * BLOCK)


@jit
def linear(op: int, job: int, task: int, scratch: int, atag: Any) -> None:
    """Run one task of a product."""
    if via(job, op, at.L_ROWS_AT) < field(job, at.FEW_ROWS):
        _linear_few(op, job, task, scratch, atag)
    else:
        _linear_many(op, job, task, scratch, atag)


@unit
def _linear_few(op: int, job: int, task: int, scratch: int, atag: Any) -> None:
    rows = via(job, op, at.L_ROWS_AT)
    size = field(op, at.L_SIZE)
    stride = field(op, at.L_STRIDE)
    halves = 2 if field(op, at.L_MODE) == at.GATED else 1
    block = _few_block(op)
    args = scratch + at.ARGS
    set_field(args, at.I_W_STRIDE, stride)
    set_field(args, at.I_X_STRIDE, field(op, at.L_IN_STRIDE))
    set_field(args, at.I_UNITS, field(op, at.L_UNITS))
    set_field(args, at.I_OUT_STRIDE, RESULT_ROW)
    for n in range(task * block, min((task + 1) * block, size), BLOCK):
        weight = field(op, at.L_WEIGHT) + n * stride
        for half in range(halves):
            if halves == 2:
                # Where the stream goes on when these rows are done.
                fetch(weight + (BLOCK if half else size) * stride, _START)
            place = weight + half * size * stride
            for i in range(0, min(BLOCK, size - n), LANES):
                _dot_rows(op, job, args, place + i * stride, size - 1 - n - i,
                          scratch + RESULT + 4 * (half * BLOCK + i), atag)  # fmt: skip
        lines = strands(job, rows, atag)
        finish(op, job, 0, rows, n, scratch + RESULT, lines, atag)


@jit
def _dot_rows(op: int, job: int, args: int, weight: int, last: int, result: int, atag: Any) -> None:
    """Multiply 16 rows of weights, of which ``last`` is the last, by all rows of the input."""
    rows = via(job, op, at.L_ROWS_AT)
    rows *= strands(job, rows, atag)
    stride = field(op, at.L_STRIDE)
    for row in range(0, rows, 8):
        x_last = min(rows - row, 8) - 1
        power = 0  # of two, of which a tile takes that many rows of the input
        while 1 << power <= x_last:
            power += 1
        set_field(args, at.I_X, via(job, op, at.L_IN_AT) + row * field(op, at.L_IN_STRIDE))
        set_field(args, at.I_X_LAST, x_last)
        for i in range(0, LANES, LANES >> power):
            set_field(args, at.I_W, weight + i * stride)
            set_field(args, at.I_W_LAST, last - i)
            set_field(args, at.I_OUT, result + row * RESULT_ROW + 4 * i)
            run_tile(field(job, at.TILES), at.FEW + power, args)


@unit
def _linear_many(op: int, job: int, task: int, scratch: int, atag: Any) -> None:
    rows = via(job, op, at.L_ROWS_AT)
    groups = (rows + GROUP - 1) // GROUP
    n = task // groups * BLOCK
    first = task % groups * GROUP
    size = field(op, at.L_SIZE)
    stride = field(op, at.L_STRIDE)
    units = field(op, at.L_UNITS) * widening(atag)
    count = min(BLOCK, size - n)
    halves = 2 if field(op, at.L_MODE) == at.GATED else 1
    weight = field(op, at.L_WEIGHT) + n * stride
    far = size * stride  # from a gate's row to its up projection's
    following, following_far = weight + BLOCK * stride, far  # the next task's weights
    if widening(atag) == 2 or stride % 2048 == 0:
        # Rows a multiple of the cache's ways apart would evict each other.
        padded = units * 4 + at.LINE
        for half in range(halves):
            for i in range(count):
                source = weight + half * far + i * stride
                target = scratch + at.STAGE + (half * BLOCK + i) * padded
                if widening(atag) == 2:
                    widen_row(target, source, units, atag)
                else:
                    copy(target, source, units * 4)
        weight, stride, far = scratch + at.STAGE, padded, BLOCK * padded
    args = scratch + at.ARGS
    set_field(args, at.O_A_STRIDE, stride)
    set_field(args, at.O_STRIDE, at.LINE)
    set_field(args, at.O_UNITS, units)
    set_field(args, at.O_C_STRIDE, PANEL * 4)
    for m in range(first, min(first + GROUP, rows), PANEL):
        for half in range(halves):
            ahead = following + half * following_far if m == first else 0
            _product(op, job, scratch, weight + half * far, count, m, half, ahead, atag)
        finish(op, job, m, min(PANEL, rows - m), n, scratch + RESULT, 1, atag)


@unit
def _product(
    op: int, job: int, scratch: int, weight: int, count: int, m: int, half: int,
    following: int, atag: Any,
) -> None:  # fmt: skip
    """Multiply ``count`` rows of weights by up to PANEL rows of input, into the results.

    Meanwhile the weights at ``following`` (unless it is 0) are fetched into the cache.
    """
    lines = field(op, at.L_UNITS)  # of 16 rows' units, half of what a block of weights takes
    units = lines * widening(atag)
    args = scratch + at.ARGS
    turned = scratch + at.TURNED + half * BLOCK * PANEL * 4
    panels = (min(PANEL, via(job, op, at.L_ROWS_AT) - m) + LANES - 1) // LANES
    packed = via(job, op, at.L_PACKED_AT) + m // LANES * units * at.LINE
    for j in range(panels):
        store64(packed + j * units * at.LINE, scratch + at.PANELS + 8 * j)
    columns, step = 1, 4
    if WIDE:
        columns = panels
        step = 16 if panels == 1 else 8
    for i in range(0, count, step):
        set_field(args, at.O_A, weight + i * field(args, at.O_A_STRIDE))
        set_field(args, at.O_A_LAST, count - 1 - i)
        # A tile fetches a line per unit, so two of them fetch a block, or one when widened.
        done = i // step * units
        more = following != 0 and done < 2 * lines
        set_field(args, at.O_AHEAD, following + done * at.LINE if more else packed)
        for j in range(0, panels, columns):
            set_field(args, at.O_LIST, scratch + at.PANELS + 8 * j)
            set_field(args, at.O_C, turned + i * PANEL * 4 + j * at.LINE)
            run_tile(field(job, at.TILES), at.MANY + columns, args)
    args = scratch + at.MORE_ARGS
    set_field(args, at.X_STRIDE, PANEL * 4)
    set_field(args, at.X_LAST, LANES - 1)
    set_field(args, at.X_TARGET_STRIDE, RESULT_ROW)
    for j in range(panels):
        for i in range(0, BLOCK, LANES):
            set_field(args, at.X_SOURCE, turned + i * PANEL * 4 + j * at.LINE)
            result = scratch + RESULT + j * LANES * RESULT_ROW
            set_field(args, at.X_TARGET, result + (half * BLOCK + i) * 4)
            run_tile(field(job, at.TILES), at.TURN, args)


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
    out_lines = strands(job, via(job, op, at.L_ROWS_AT), atag) if mode == at.GATED else 1
    target = via(job, op, at.L_OUT_AT) + first * stride + n * width
    for _ in range(rows):
        for i in range(0, min(BLOCK, size - n), LANES):
            count = min(LANES, size - n - i)
            out = target + i * width
            v = _result(op, result + 4 * i, lines, n + i)
            if bias:
                v = v + vload(bias + 4 * (n + i), F32)
            if mode == at.GATED:
                u = _result(op, result + 4 * (BLOCK + i), lines, size + n + i)
                if bias:
                    u = u + vload(bias + 4 * (size + n + i), F32)
                v = activate(v, activation) * u
                store_activation(v, out, count, out_lines, stride, atag)
                continue
            if mode == at.LOGITS:
                v = v * scale
                if cap > ZERO:
                    v = vtanh(v * splat(ONE / cap)) * splat(cap)
            elif mode == at.ADD:
                v = fma(v, scale, vload_some(out, count))
            vstore_some(v, out, count, F32)
        target += stride * out_lines
        result += RESULT_ROW * lines


@jit
def _result(op: int, place: int, lines: int, n: int) -> Vector:
    """Return 16 results of a row from column n on, of one line or of two."""
    v = vload(place, F32)
    if lines == 2:
        v = v + vload(place + RESULT_ROW, F32)
    if field(op, at.L_SCALES):
        v = v * vload(field(op, at.L_SCALES) + 4 * n, F32)
    return v
