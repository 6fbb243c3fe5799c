"""Products with quantised weights, and looking up their rows.

Owner: numba_cpu. The layout of weights is that of :mod:`pagedllm_kernels.quantized`. With w
the uint8 that stands for ``(w - 128) * b`` and x the int8 that stands for ``x * a``, a
group's part of a product is ``(start + sum of x * w) * a * b`` where ``start`` is -128 times
the sum of x.

Activations are rounded to int8 group by group before each product. Where there are few rows,
a row is kept in two lines, the second of which is what rounding took from the first: then
only the weights are rounded, and reading those takes the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.layout import (
    BLOCK,
    GROUP_BLOCK,
    GROUP_ROWS,
    LANES,
    LINE,
    RESULT,
    RESULT_ROW,
)
from pagedllm_kernels.numba_cpu.linear import finish
from pagedllm_kernels.numba_cpu.rows import NORM_ROWS, ZERO, Vector, strands
from pagedllm_kernels.numba_cpu.simd import (
    F16,
    F32,
    S8,
    copysign,
    field,
    get,
    get_byte,
    hmax,
    hsum,
    itemsize,
    jit,
    load64,
    put,
    put_int,
    real,
    round_even,
    run_tile,
    set_field,
    splat,
    store64,
    unit,
    via,
    vload,
    vmax,
    vstore,
    vstore_int8,
)
from pagedllm_kernels.numba_cpu.tiles import GROUPED_COLUMNS, GROUPED_ROWS
from pagedllm_kernels.quantized import GROUP, LEVELS

_FEW = 4  # lines of input that tiles of two panels take at once
_MOST = np.float32(127.0)
_STEPS = np.float32(254.0)  # of what rounding leaves, at most half a step
_ZERO = np.float32(-128.0)
_TABLE = tuple(float(level) for level in LEVELS)


@unit
def quantize(op: int, job: int, task: int, atag: Any) -> None:
    """Round ``NORM_ROWS`` rows of activations to int8, with a factor and a start per group."""
    width = field(op, at.Q_WIDTH)
    groups = (width + GROUP - 1) // GROUP
    rows = via(job, op, at.Q_ROWS_AT)
    in_lines, lines = strands(job, rows, atag), strands(job, rows, S8)
    stride = field(op, at.Q_IN_STRIDE)
    first = task * NORM_ROWS
    for row in range(first, min(first + NORM_ROWS, rows)):
        source = via(job, op, at.Q_IN_AT) + row * in_lines * stride
        for g in range(groups):
            out = via(job, op, at.Q_OUT_AT) + (row * lines * groups + g) * GROUP
            factors = via(job, op, at.Q_FACTORS_AT) + (row * lines * groups + g) * 8
            count = min(GROUP, width - g * GROUP)
            most, bad = splat(ZERO), splat(ZERO)
            for i in range(0, count, LANES):
                x = _activation(source, g * GROUP + i, in_lines, stride, atag)
                bad = bad + x * splat(ZERO)  # a NaN where x is one or infinite, else 0
                most = vmax(copysign(x, splat(_MOST)), most)  # in this order no NaN wins
            top, nan = hmax(most), hsum(bad)
            inverse = splat(_MOST / top if top > ZERO else ZERO)
            total, total_rest = splat(ZERO), splat(ZERO)
            for i in range(0, GROUP, LANES):
                x = splat(ZERO)
                if i < count:
                    x = _activation(source, g * GROUP + i, in_lines, stride, atag) * inverse
                whole = round_even(x)
                total = total + whole
                vstore_int8(whole, out + i)
                if lines == 2:
                    rest = round_even((x - whole) * splat(_STEPS))
                    total_rest = total_rest + rest
                    vstore_int8(rest, out + groups * GROUP + i)
            # What cannot be rounded spoils the row's products, as it would unrounded.
            put(top / _MOST + nan, factors, F32)
            put_int(hsum(total) * _ZERO, factors + 4)
            if lines == 2:
                put(top / _MOST / _STEPS, factors + groups * 8, F32)
                put_int(hsum(total_rest) * _ZERO, factors + groups * 8 + 4)


@jit
def _activation(row: int, i: int, lines: int, stride: int, tag: Any) -> Vector:
    place = row + itemsize(tag) * i
    x = vload(place, tag)
    return x + vload(place + stride, tag) if lines == 2 else x


@jit
def _block(op: int, job: int) -> int:
    """Columns of the output in a task."""
    rows = via(job, op, at.L_ROWS_AT)
    few = rows * strands(job, rows, S8) <= _FEW
    return BLOCK if few or field(op, at.L_MODE) == at.GATED else 2 * BLOCK


@jit
def quantized_tasks(op: int, job: int) -> int:
    """Return the number of tasks of a product."""
    block = _block(op, job)
    row_groups = (via(job, op, at.L_ROWS_AT) + GROUP_ROWS - 1) // GROUP_ROWS
    return (field(op, at.L_SIZE) + block - 1) // block * row_groups


@unit
def linear_quantized(op: int, job: int, task: int, scratch: int, atag: Any) -> None:
    """Multiply a block of weights by up to ``GROUP_ROWS`` rows of the input."""
    rows, size = via(job, op, at.L_ROWS_AT), field(op, at.L_SIZE)
    row_groups = (rows + GROUP_ROWS - 1) // GROUP_ROWS
    block, lines = _block(op, job), strands(job, rows, S8)
    n, first = task // row_groups * block, task % row_groups * GROUP_ROWS
    rows = min(GROUP_ROWS, rows - first)
    groups = field(op, at.L_UNITS)
    gated = field(op, at.L_MODE) == at.GATED
    panels = 2 * block // LANES if gated else block // LANES
    few = rows * lines <= _FEW
    for i in range(0, rows * lines * RESULT_ROW, LINE):
        vstore(splat(ZERO), scratch + RESULT + i, F32)
    args = scratch + at.ARGS
    set_field(args, at.G_A_STRIDE, groups * GROUP)
    set_field(args, at.G_FACTOR_STRIDE, groups * 8)
    set_field(args, at.G_C_STRIDE, RESULT_ROW)
    step = groups if few else GROUP_BLOCK
    for g in range(0, groups, step):
        set_field(args, at.G_GROUPS, min(step, groups - g))
        _list_panels(op, scratch, n // LANES, panels, block // LANES, g)
        _grouped(op, job, scratch, first * lines, rows * lines, panels, few, g)
    finish(op, job, first, rows, n, scratch + RESULT, lines, atag)
    if block > BLOCK and n + BLOCK < size:
        finish(op, job, first, rows, n + BLOCK, scratch + RESULT + BLOCK * 4, lines, atag)


@jit
def _list_panels(op: int, scratch: int, first: int, panels: int, far: int, group: int) -> None:
    """List the addresses of panels, and of their factors, from a group on.

    Those from number ``far`` on are up projections. Panels past the last repeat it.
    """
    size = (field(op, at.L_SIZE) + LANES - 1) // LANES
    groups, bits = field(op, at.L_UNITS), field(op, at.L_BITS)
    line = LANES * GROUP * bits // 8
    for j in range(panels):
        number = min(first + j % far, size - 1) + j // far * size
        panel = field(op, at.L_WEIGHT) + number * field(op, at.L_STRIDE)
        place = scratch + at.PANELS + 8 * j
        store64(panel + group * line, place)
        store64(panel + groups * line + group * LANES * 2, place + 32)


@jit
def _grouped(
    op: int, job: int, scratch: int, first: int, lines: int, panels: int, few: bool, g: int
) -> None:
    """Multiply the listed panels by lines of the input, from group g on, into the results."""
    args = scratch + at.ARGS
    groups = field(op, at.L_UNITS)
    tiles = at.GROUPED_8 if field(op, at.L_BITS) == 8 else at.GROUPED_4
    columns, height, number = GROUPED_COLUMNS, GROUPED_ROWS, tiles + 3
    if few:
        columns, height, number = 2, 1, tiles
        while height < lines:
            height, number = 2 * height, number + 1
    for j in range(0, panels, columns):
        set_field(args, at.G_LIST, scratch + at.PANELS + 8 * j)
        for line in range(0, lines, height):
            at_line = first + line
            set_field(args, at.G_A, via(job, op, at.L_IN_AT) + (at_line * groups + g) * GROUP)
            set_field(args, at.G_A_LAST, lines - 1 - line)
            set_field(
                args, at.G_FACTORS, via(job, op, at.L_FACTORS_AT) + (at_line * groups + g) * 8
            )
            set_field(args, at.G_C, scratch + RESULT + line * RESULT_ROW + j * LINE)
            run_tile(field(job, at.TILES), number, args)


@unit
def embed_quantized(op: int, job: int, task: int, rows: int) -> None:
    """``out[t] = table[token_ids[t]] * scale`` for some rows of a quantised table."""
    width, bits = field(op, at.E_WIDTH), field(op, at.E_BITS)
    groups = (width + GROUP - 1) // GROUP
    for t in range(task * rows, min((task + 1) * rows, field(job, at.NUM_TOKENS))):
        token = load64(field(job, at.TOKEN_IDS) + 8 * t)
        panel = field(op, at.E_TABLE) + token // LANES * field(op, at.E_PANEL)
        lane = token % LANES
        scale = real(op, at.E_SCALE) * get(field(op, at.E_SCALES) + 4 * token, F32)
        target = via(job, op, at.E_OUT_AT) + t * field(op, at.E_OUT_STRIDE)
        for i in range(width):
            if bits == 8:
                level = np.float32(get_byte(panel + (i // 4 * LANES + lane) * 4 + i % 4)) + _ZERO
            else:
                byte = get_byte(panel + (i // 8 * LANES + lane) * 4 + i % 4)
                factors = panel + groups * GROUP * LANES // 2
                level = np.float32(_TABLE[(byte >> (i // 4 % 2 * 4)) & 15])
                level *= get(factors + (i // GROUP * LANES + lane) * 2, F16)
            put(level * scale, target + 4 * i, F32)
