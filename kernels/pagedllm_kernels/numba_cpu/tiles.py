"""Register tiles: the innermost loops of every product, written as LLVM vector IR.

Owner: numba_cpu. Numbers are handled in *units* of 4 bytes: one fp32, two bf16 or fp16, four
int8; but those of int8 pages one by one, which are fp32 once they are read.
:func:`_dot` multiplies a vector of 16 units by another and adds the products of each
unit into the 16 lanes of a sum; every tile is a loop around it whose sums stay in registers.

- ``inner``: rows times rows, both contiguous along the sum; for few rows.
- ``outer``: numbers of the one operand times vectors of 16 columns of the other; for many
  rows, and for queries times keys.
- ``grouped``: the same for quantised numbers, whose sums are scaled group by group.
- ``weigh``: the same for probabilities times values, through a list of pages.
- ``transpose``: 16 by 16 units.

The scheme is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication", 2008. A tile's function takes the address of its arguments, int64 all of
them, strides in bytes; :mod:`layout` names them. :mod:`native` compiles tiles outside Numba,
which would optimise them anew in every function around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.emit import (
    I32,
    I64,
    VB,
    VF,
    VH,
    VI,
    call,
    const,
    fma,
    index,
    lanes_below,
    listed,
    load,
    load_units,
    loop,
    masked_load,
    prefetch,
    rows,
    splat,
    store,
    widen,
)
from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.grouped import grouped
from pagedllm_kernels.numba_cpu.layout import LANES, LINE


@dataclass(frozen=True, slots=True)
class Tile:
    """One function: what it computes, how large it is, and how its operands are stored."""

    kind: str
    rows: int
    columns: int
    tag: str
    """``f32``, ``bf16`` or ``f16``; ``i8`` of int8 pages; ``i8`` or ``i4`` of a grouped one's
    weights."""
    extra: int = 0

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return f"pagedllm_{self.kind}_{self.rows}x{self.columns}x{self.extra}_{self.tag}"


_AHEAD = 8192  # bytes of weights to fetch ahead: past the page at which the processor stops
# With 16 registers of 8 floats, tiles have one column and at most four rows.
COLUMNS, MAX_ROWS = (4, 6) if FEATURES.wide else (1, 4)
_MANY = ((16, 1), (8, 2), (8, 3)) if FEATURES.wide else ((4, 1),)
GROUPED_ROWS, GROUPED_COLUMNS = (8, 2) if FEATURES.wide else (2, 2)


def linear_tiles(tag: str) -> dict[int, Tile]:
    """Return the tiles that products with weights stored as ``tag`` use, by number."""
    many = "f32" if FEATURES.widens(tag) else tag
    tiles = {at.MANY + n: Tile("outer", m, n, many, 1) for m, n in _MANY}
    tiles |= {at.FEW + i: Tile("inner", 16 >> i, 1 << i, tag) for i in range(4)}
    return tiles | {at.TURN: Tile("transpose", 16, 16, "f32")}


def grouped_tiles() -> dict[int, Tile]:
    """Return the tiles that products with quantised weights use, by number."""
    tiles: dict[int, Tile] = {}
    for first, tag in ((at.GROUPED_8, "i8"), (at.GROUPED_4, "i4")):
        tiles |= {first + i: Tile("grouped", 1 << i, 2, tag) for i in range(3)}
        tiles[first + 3] = Tile("grouped", GROUPED_ROWS, GROUPED_COLUMNS, tag, 1)
    return tiles


def attention_tiles(tag: str) -> dict[int, Tile]:
    """Return the tiles that attention with a cache stored as ``tag`` uses, by number."""
    tiles = {}
    for m in range(1, MAX_ROWS + 1):
        tiles[at.FIRST + m] = Tile("outer", m, COLUMNS, tag, COLUMNS + 1)
        tiles[at.REST + m] = Tile("outer", m, COLUMNS, tag)
        tiles[at.WEIGH_FIRST + m] = Tile("weigh", m, COLUMNS, tag, 1)
        tiles[at.WEIGH_REST + m] = Tile("weigh", m, COLUMNS, tag)
        tiles[at.WEIGH_ONE + m] = Tile("weigh", m, 1, tag)
    return tiles


def emit(module: Any, tile: Tile) -> None:
    """Add a tile's function to an LLVM module."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    function = ir.Function(module, kind, tile.symbol)
    builder = ir.IRBuilder(function.append_basic_block())
    args = [load(builder, builder.add(function.args[0], index(8 * i)), I64) for i in range(11)]
    _BODIES[tile.kind](builder, tile, args)
    builder.ret_void()


# --- products of units -------------------------------------------------------------------------


def _dot(builder: Any, tag: str, total: Any, a: Any, b: Any) -> Any:
    """Return ``total`` plus, lane by lane, the products of the numbers in the units of a and b.

    Args:
        builder: where to emit.
        tag: how the numbers are stored.
        total: <16 x float>.
        a: <16 x i32>, 16 units.
        b: <16 x i32>, 16 units.
    """
    if tag in ("f32", "i8"):
        return fma(builder, builder.bitcast(a, VF), builder.bitcast(b, VF), total)
    if tag == "bf16" and FEATURES.bf16_dot:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call(builder, name, VF, [total, builder.bitcast(a, VB), builder.bitcast(b, VB)])
    (a0, a1), (b0, b1) = (_halves(builder, tag, unit) for unit in (a, b))
    return fma(builder, a1, b1, fma(builder, a0, b0, total))


def _halves(builder: Any, tag: str, unit: Any) -> tuple[Any, Any]:
    """Widen the first and the second number of each unit to floats."""
    if tag == "bf16":
        first = builder.shl(unit, const(16, VI))
        second = builder.and_(unit, const(0xFFFF0000, VI))
        return builder.bitcast(first, VF), builder.bitcast(second, VF)
    first = builder.trunc(unit, VH)
    second = builder.trunc(builder.lshr(unit, const(16, VI)), VH)
    return widen(builder, first, tag), widen(builder, second, tag)


# --- bodies ------------------------------------------------------------------------------------


def _outer(builder: Any, tile: Tile, args: list[Any]) -> None:
    """``C[i, j * 16 + lane] = sum over u of A[i, u] * B_j[u, lane]``, for i < rows, j < columns.

    Rows of A past the last repeat it; the B_j are given by a list of their addresses. Where
    ``extra`` is 1, a cache line from ``ahead`` on is fetched per unit; where it is more, a
    line from each of ``extra - 1`` addresses listed at ``ahead``.
    """
    a, a_stride, a_last, b_list, b_stride, units, c, c_stride, ahead = args[:9]
    width = tile.columns
    a_rows = rows(builder, a, a_stride, tile.rows, a_last)
    b_rows = listed(builder, b_list, width)
    ahead = [ahead] if tile.extra == 1 else listed(builder, ahead, tile.extra - 1)

    def body(u: Any, sums: list[Any]) -> list[Any]:
        offset = builder.mul(u, b_stride)
        b_units = [load_units(builder, builder.add(row, offset), tile.tag) for row in b_rows]
        step = builder.shl(u, index(2))
        for address in ahead:
            prefetch(builder, builder.add(address, offset), 2)
        changed = []
        for i, row in enumerate(a_rows):
            unit = splat(builder, load(builder, builder.add(row, step), I32), VI)
            for j in range(width):
                total = sums[i * width + j]
                changed.append(_dot(builder, tile.tag, total, b_units[j], unit))
        return changed

    sums = loop(builder, units, [const(0.0)] * (tile.rows * width), body)
    for i in range(tile.rows):
        target = builder.add(c, builder.mul(c_stride, index(i)))
        for j in range(width):
            store(builder, sums[i * width + j], builder.add(target, index(LINE * j)))


def _weigh(builder: Any, tile: Tile, args: list[Any]) -> None:
    """``C[i, j * 16 + lane] += sum over u of P[i, u] * V[u, offset / 4 + j * 16 + lane]``.

    V lies in pages: the sum runs over ``units`` of each but the last, and over ``last_units``
    of that one, the last of which is masked: what no token was written to may be anything.
    Where ``extra`` is 1, the page four further in the list is fetched meanwhile.
    """
    p, p_stride, page_list, pages, units, last_units, last_mask, offset, v_stride, c, c_stride = (
        args
    )
    width = tile.columns
    targets = rows(builder, c, c_stride, tile.rows, index(tile.rows))
    places = [builder.add(row, index(LINE * j)) for row in targets for j in range(width)]
    p_rows = rows(builder, p, p_stride, tile.rows, index(tile.rows))
    one, line = index(1), LINE // 4 if tile.tag == "i8" else LINE

    def page_at(number: Any) -> Any:
        entry = builder.add(page_list, builder.shl(number, index(3)))
        return builder.add(load(builder, entry, I64), offset)

    def fetch(number: Any, u: Any) -> None:
        page = page_at(builder.add(number, index(4)))
        place = builder.add(page, builder.mul(u, v_stride))
        for j in range(0, width * line if tile.extra else 0, LINE):
            prefetch(builder, builder.add(place, index(j)), 2)

    def add_unit(page: Any, number: Any, u: Any, sums: list[Any], mask: Any = None) -> list[Any]:
        source = builder.add(page, builder.mul(u, v_stride))
        places = [builder.add(source, index(line * j)) for j in range(width)]
        values = [load_units(builder, place, tile.tag) for place in places]
        fetch(number, u)
        if mask is not None:
            values = [builder.and_(value, mask) for value in values]
        step = builder.shl(builder.add(builder.mul(number, units), u), index(2))
        changed = []
        for i, row in enumerate(p_rows):
            weight = splat(builder, load(builder, builder.add(row, step), I32), VI)
            for j in range(width):
                changed.append(_dot(builder, tile.tag, sums[i * width + j], values[j], weight))
        return changed

    last = builder.sub(pages, one)
    rest = builder.sub(last_units, one)

    def body(number: Any, sums: list[Any]) -> list[Any]:
        page = page_at(number)
        count = builder.select(builder.icmp_signed("==", number, last), rest, units)
        return loop(builder, count, sums, lambda u, s: add_unit(page, number, u, s))

    start = [load(builder, place, VF) for place in places]
    sums = loop(builder, pages, start, body)
    mask = splat(builder, builder.trunc(last_mask, I32), VI)
    sums = add_unit(page_at(last), last, rest, sums, mask)
    for value, place in zip(sums, places):
        store(builder, value, place)


def _inner(builder: Any, tile: Tile, args: list[Any]) -> None:
    """``out[j, i] = sum over u of W[i, u] * X[j, u]``, 16 results; rows past the last repeat it."""
    w, w_stride, w_last, x, x_stride, x_last, units, out, out_stride = args[:9]
    height, width = tile.rows, tile.columns
    sources = rows(builder, w, w_stride, height, w_last)
    inputs = rows(builder, x, x_stride, width, x_last)
    # Enough sums for the latency of a product; the weights are read as one stream, row after
    # row, since a processor fetches one stream ahead twice as fast as several.
    strands = max(1, 8 // width)
    lines = builder.ashr(units, index(4))
    whole = builder.sdiv(lines, index(strands))
    left = builder.srem(lines, index(strands))
    rest = builder.and_(units, index(LANES - 1))
    some = builder.select(builder.icmp_signed(">", rest, index(0)), index(1), index(0))
    valid = lanes_below(builder, rest)

    def add_line(row: Any, at: Any, sums: list[Any], valid: Any = None) -> list[Any]:
        def units(source: Any) -> Any:
            place = builder.add(source, at)
            return load(builder, place, VI) if valid is None else masked_load(builder, place, valid)

        w_units = units(row)
        if valid is None:
            prefetch(builder, builder.add(builder.add(row, at), index(_AHEAD)), 2)
        return [_dot(builder, tile.tag, s, units(x), w_units) for s, x in zip(sums, inputs)]

    results: list[Any] = []
    for row in sources:

        def strand_lines(i: Any, sums: list[Any], row: Any = row) -> list[Any]:
            at = builder.mul(i, index(LINE * strands))
            changed = []
            for k in range(strands):
                part = sums[k * width : (k + 1) * width]
                changed += add_line(row, builder.add(at, index(LINE * k)), part)
            return changed

        sums = loop(builder, whole, [const(0.0)] * (strands * width), strand_lines)
        after = builder.mul(whole, index(LINE * strands))

        def line(i: Any, sums: list[Any], row: Any = row, after: Any = after) -> list[Any]:
            return add_line(row, builder.add(after, builder.shl(i, index(6))), sums)

        def tail(i: Any, sums: list[Any], row: Any = row) -> list[Any]:
            return add_line(row, builder.shl(lines, index(6)), sums, valid)

        first = loop(builder, some, loop(builder, left, sums[:width], line), tail)
        for k in range(1, strands):
            part = sums[k * width : (k + 1) * width]
            first = [builder.fadd(s, t) for s, t in zip(first, part)]
        results.append(first)
    # Results of one row of X lie side by side.
    totals = _reduce(builder, [results[i][j] for j in range(width) for i in range(height)])
    undefined = ir.Constant(VF, ir.Undefined)
    for j in range(width):
        lanes = list(range(j * height, (j + 1) * height))
        picks = ir.Constant(ir.VectorType(I32, height), lanes)
        part = builder.shuffle_vector(totals, undefined, picks)
        store(builder, part, builder.add(out, builder.mul(out_stride, index(j))))


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(VI, lanes))


def _reduce(builder: Any, vectors: list[Any]) -> Any:
    """Return the vector whose lane i is the sum of all lanes of ``vectors[i]``, 16 of them.

    Four rounds, each of which halves the number of vectors: 15 additions instead of 16 sums
    of 16 lanes each.
    """
    for bit in (1, 2, 4, 8):
        merged = []
        for a, b in zip(vectors[::2], vectors[1::2]):
            # A lane takes from b where its bit is set; each half adds its other half.
            own = [lane + LANES if lane & bit else lane for lane in range(LANES)]
            far = [(lane ^ bit) + (LANES if lane & bit else 0) for lane in range(LANES)]
            merged.append(builder.fadd(_shuffle(builder, a, b, own), _shuffle(builder, a, b, far)))
        vectors = merged
    return vectors[0]


def _transpose(builder: Any, tile: Tile, args: list[Any]) -> None:
    """``target[j, i] = source[i, j]`` for 16 by 16 units; rows past the last repeat it."""
    source, s_stride, s_last, target, t_stride = args[:5]
    vectors = [load(builder, row, VI) for row in rows(builder, source, s_stride, LANES, s_last)]
    for bit in (1, 2, 4, 8):
        for i in range(LANES):
            if i & bit:
                continue
            a, b = vectors[i], vectors[i | bit]
            low = [(lane ^ bit) + LANES if lane & bit else lane for lane in range(LANES)]
            high = [lane + LANES if lane & bit else lane | bit for lane in range(LANES)]
            vectors[i] = _shuffle(builder, a, b, low)
            vectors[i | bit] = _shuffle(builder, a, b, high)
    for j, vector in enumerate(vectors):
        store(builder, vector, builder.add(target, builder.mul(t_stride, index(j))))


_BODIES = {
    "outer": _outer,
    "grouped": grouped,
    "weigh": _weigh,
    "inner": _inner,
    "transpose": _transpose,
}
