"""The register tile of products with quantised weights.

Owner: numba_cpu. The layout of weights is that of :mod:`pagedllm_kernels.quantized`, and what
is computed is said in :mod:`quantized`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from pagedllm_kernels.numba_cpu.emit import (
    FLOAT,
    I8,
    I32,
    VF,
    VH,
    VI,
    call,
    const,
    fma,
    index,
    listed,
    load,
    loop,
    prefetch,
    rows,
    splat,
    store,
    widen,
)
from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.layout import LINE
from pagedllm_kernels.quantized import GROUP, LEVELS

if TYPE_CHECKING:
    from pagedllm_kernels.numba_cpu.tiles import Tile

_AHEAD = 4096  # bytes of weights to fetch ahead


def grouped(builder: Any, tile: Tile, args: list[Any]) -> None:
    """``C[i, j * 16 + lane] += sum over g of f[i, g] * (s[i, g] + sum over u in g A[i, u] * B_j``.

    A is int8; its factors f, float32, and starts s, int32, lie side by side. The panels B_j
    are listed, and for i4, four entries on, their own factors of groups, float16. Rows of A
    past the last repeat it.
    """
    a, a_stride, a_last, factors, f_stride, b_list, groups, c, c_stride = args[:9]
    height, width = tile.rows, tile.columns
    a_rows = rows(builder, a, a_stride, height, a_last)
    f_rows = rows(builder, factors, f_stride, height, a_last)
    panels = listed(builder, b_list, width)
    scales = listed(builder, builder.add(b_list, index(32)), width)
    targets = rows(builder, c, c_stride, height, index(height))
    places = [builder.add(row, index(LINE * j)) for row in targets for j in range(width)]
    per = 2 if tile.tag == "i4" else 1  # units in a line of weights
    mask = const(0x0F0F0F0F, VI)

    def body(g: Any, totals: list[Any]) -> list[Any]:
        own = [builder.add(row, builder.shl(g, index(3))) for row in f_rows]
        starts = [load(builder, builder.add(place, index(4)), I32) for place in own]
        sums = [splat(builder, start, VI) for start in starts for _ in range(width)]
        for line in range(GROUP // 4 // per):
            offset = builder.mul(g, index(GROUP // 4 // per * LINE))
            offset = builder.add(offset, index(line * LINE))
            lines = [load(builder, builder.add(panel, offset), VI) for panel in panels]
            for panel in () if tile.extra else panels:
                prefetch(builder, builder.add(panel, builder.add(offset, index(_AHEAD))), 2)
            for half in range(per):
                weights = lines
                if per == 2:
                    weights = [builder.lshr(v, const(4, VI)) if half else v for v in lines]
                    weights = [_levels(builder, builder.and_(v, mask)) for v in weights]
                step = builder.add(builder.mul(g, index(GROUP)), index(4 * (line * per + half)))
                for i, row in enumerate(a_rows):
                    unit = splat(builder, load(builder, builder.add(row, step), I32), VI)
                    for j in range(width):
                        k = i * width + j
                        sums[k] = _dot_int8(builder, sums[k], weights[j], unit)
        changed = []
        for i, place in enumerate(own):
            factor = splat(builder, load(builder, place, FLOAT), VF)
            for j, scale in enumerate(scales):
                scaled = builder.sitofp(sums[i * width + j], VF)
                if per == 2:
                    halves = load(builder, builder.add(scale, builder.shl(g, index(5))), VH, 2)
                    scaled = builder.fmul(scaled, widen(builder, halves, "f16"))
                changed.append(fma(builder, scaled, factor, totals[i * width + j]))
        return changed

    totals = [load(builder, place, VF) for place in places]
    for value, place in zip(loop(builder, groups, totals, body), places):
        store(builder, value, place)


def _dot_int8(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return <16 x i32> ``total`` plus the products of 4 uint8 of ``a`` and 4 int8 of ``b``."""
    if FEATURES.int8_dot:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", VI, [total, a, b])
    for shift in (0, 8, 16, 24):
        left = builder.and_(builder.lshr(a, const(shift, VI)), const(0xFF, VI))
        right = builder.ashr(builder.shl(b, const(24 - shift, VI)), const(24, VI))
        total = builder.add(total, builder.mul(left, right))
    return total


def _levels(builder: Any, codes: Any) -> Any:
    """Return the uint8 that stand for ``LEVELS`` of the low 4 bits of each byte, the rest 0."""
    kind = ir.VectorType(I8, LINE)
    codes = builder.bitcast(codes, kind)
    table = [level + 128 for level in LEVELS]
    if FEATURES.byte_shuffle:
        found = ir.Constant(kind, table * 4)
        found = call(builder, "llvm.x86.avx512.pshuf.b.512", kind, [found, codes])
    else:
        values = [const(value, kind) for value in table]
        for bit in (1, 2, 4, 8):
            odd = builder.icmp_unsigned("!=", builder.and_(codes, const(bit, kind)), const(0, kind))
            values = [builder.select(odd, b, a) for a, b in zip(values[::2], values[1::2])]
        found = values[0]
    return builder.bitcast(found, VI)
