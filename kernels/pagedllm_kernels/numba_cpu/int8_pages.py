"""Pages in int8: rounding what is written, and the scales of what is read.

Owner: numba_cpu. Rows are rounded as :mod:`pagedllm_kernels.int8_pages` says. A page's head
holds keys ``[D, slots]``, or values ``[slots, Dv]``, a byte each, and behind them a float32
scale per slot. Queries and softmax weights beside them are float32: tiles widen what they
read, and a scale is multiplied into the score of its key, or the weight of its value.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from pagedllm_kernels.int8_pages import LEAST, MOST
from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.layout import LANES, LINE
from pagedllm_kernels.numba_cpu.rows import ONE, ZERO
from pagedllm_kernels.numba_cpu.simd import (
    F32,
    copysign,
    fetch,
    field,
    hmax,
    hsum,
    keep_lanes,
    load32,
    load64,
    put,
    round_even,
    splat,
    unit,
    vload,
    vmax,
    vstore,
)

_MOST, _STEP, _LEAST = (np.float32(x) for x in (MOST, 1 / MOST, LEAST))

INT8_UNITS = ("round_row", "fetch_scales", "scale_scores")


@intrinsic  # type: ignore[untyped-decorator]
def beside(typingctx: Any, ptag: Any) -> Any:
    """Return the tag of queries and weights that meet pages of this one."""
    kind = types.float32 if ptag == types.int8 else ptag

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_constant_null(kind)

    return kind(ptag), codegen


@partial(unit, only="i8")
def round_row(row: int, dim: int, scale: int, ptag: Any) -> None:
    """Round a row to whole numbers in place, and store its scale.

    Args:
        row: of float32, zero up to a multiple of 16.
        dim: numbers in it.
        scale: where its scale is stored.
        ptag: of the page.
    """
    most, bad = splat(ZERO), splat(ZERO)
    for d in range(0, dim, LANES):
        x = vload(row + 4 * d, F32)
        bad = bad + x * splat(ZERO)  # a NaN where x is one or infinite, else 0
        most = vmax(copysign(x, splat(ONE)), most)  # in this order no NaN wins
    top = hmax(most)
    inverse = splat(_MOST / top if top > _LEAST else ZERO)
    for d in range(0, dim, LANES):
        vstore(round_even(vload(row + 4 * d, F32) * inverse), row + 4 * d, F32)
    put(top * _STEP + hsum(bad), scale, F32)


@partial(unit, only="i8")
def fetch_scales(op: int, scratch: int, keys: int, values: int, ptag: Any) -> None:
    """Fetch what :func:`scale_scores` reads for a block; see there for the lists."""
    bytes_of_scales, step = 4 * field(op, at.A_SLOTS), field(op, at.A_SLOTS) // LANES * 8
    for page in range(field(scratch, at.F_PAGES)):
        key = load64(keys + page * step) + field(op, at.A_KEY_BYTES)
        fetch(key - bytes_of_scales, bytes_of_scales)
        value = load64(values + page * 8) + field(op, at.A_VALUE_BYTES)
        fetch(value - bytes_of_scales, bytes_of_scales)


@partial(unit, only="i8")
def scale_scores(
    op: int, job: int, scratch: int, heads: int, step: int, size: int, ptag: Any
) -> None:
    """Multiply a block's scores, or weights, by the scales of its keys, or values.

    Args:
        op: the operation.
        job: the job.
        scratch: the frame.
        heads: list of addresses of heads in pages.
        step: bytes from one page's entry in it to the next one's.
        size: bytes of a head in a page, whose scales come last.
        ptag: of the pages.
    """
    task, rows = field(scratch, at.F_TASK), field(scratch, at.F_ROWS)
    stride, slots = field(scratch, at.F_STRIDE), field(op, at.A_SLOTS)
    page_size, first = field(job, at.PAGE_SIZE), field(scratch, at.F_PAGE)
    context = load32(field(job, at.CONTEXT_LENS) + 4 * field(task, at.T_SEQ))
    place = field(scratch, at.F_SCORES)
    for page in range(field(scratch, at.F_PAGES)):
        scales = load64(heads + page * step) + size - 4 * slots
        written = min(context - (first + page) * page_size, page_size)
        for j in range(0, slots, LANES):
            x = vload(scales + 4 * j, F32)
            if written - j < LANES:  # the others may be anything, NaN too
                x = keep_lanes(x, 0, written - j, ZERO)
            for row in range(rows):
                vstore(vload(place + row * stride, F32) * x, place + row * stride, F32)
            place += LINE
