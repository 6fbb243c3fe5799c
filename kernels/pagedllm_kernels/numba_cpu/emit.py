"""Helpers for code that emits LLVM IR: types, constants, loads and stores by address.

Owner: numba_cpu. Vectors have 16 lanes and no instruction set in them: LLVM gives AVX-512
one register for a vector, AVX2 two and Arm four.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.layout import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
VF = ir.VectorType(FLOAT, LANES)
VI = ir.VectorType(I32, LANES)
VH = ir.VectorType(I16, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite has no class for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


VB = ir.VectorType(_BFloat(), 2 * LANES)


def const(value: float, kind: Any = VF) -> Any:
    """Return a constant vector with all lanes alike."""
    return ir.Constant(kind, [value] * kind.count)


def index(value: int) -> Any:
    """Return an int64 constant."""
    return ir.Constant(I64, value)


def splat(builder: Any, scalar: Any, kind: Any) -> Any:
    """Broadcast a scalar to all lanes."""
    undefined = ir.Constant(kind, ir.Undefined)
    vector = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(vector, undefined, ir.Constant(VI, [0] * LANES))


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """Turn an address into a pointer to ``kind``."""
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    """Load a value of any alignment from an address."""
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def load_units(builder: Any, address: Any, tag: str) -> Any:
    """Load 16 units; int8 numbers, which are a byte each, come as fp32."""
    if tag != "i8":
        return load(builder, address, VI)
    numbers = load(builder, address, ir.VectorType(I8, LANES), 1)
    return builder.bitcast(builder.sitofp(numbers, VF), VI)


def store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    """Store a value of any alignment at an address."""
    builder.store(value, pointer(builder, address, value.type)).align = align


def call(
    builder: Any, name: str, result: Any, args: list[Any], fastmath: tuple[str, ...] = ()
) -> Any:
    """Call an LLVM intrinsic or an external function."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, args, fastmath=fastmath)


def field(builder: Any, table: Any, number: Any) -> Any:
    """Return the address of a field of a table of int64."""
    return builder.add(table, builder.shl(number, index(3)))


def masked_load(builder: Any, address: Any, valid: Any) -> Any:
    """Load 16 units of which only the valid ones are touched; the others are 0."""
    args = [pointer(builder, address, VI), ir.Constant(I32, 4), valid, const(0, VI)]
    return call(builder, "llvm.masked.load.v16i32.p0", VI, args)


def prefetch(builder: Any, address: Any, level: int) -> None:
    """Fetch a cache line into the first (3) or the second (2) level."""
    hints = [ir.Constant(I32, v) for v in (0, level, 1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer(builder, address, I8), *hints])


def lanes_below(builder: Any, count: Any) -> Any:
    """Return <16 x i1>: lane < the int64 ``count``."""
    lanes = ir.Constant(VI, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32), VI))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, fused where the processor can."""
    return call(builder, "llvm.fmuladd.v16f32", VF, [a, b, c])


def widen(builder: Any, raw: Any, tag: str) -> Any:
    """Widen 16 stored bf16 or fp16 numbers, as <16 x i16>, to floats."""
    if tag == "bf16":
        bits = builder.shl(builder.zext(raw, VI), const(16, VI))
        return builder.bitcast(bits, VF)
    return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), VF)


def narrow(builder: Any, value: Any, tag: str) -> Any:
    """Round 16 floats to bf16 or fp16 (to nearest, ties to even), as <16 x i16>."""
    if tag == "f16":
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), VH)
    if FEATURES.bf16_dot:
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(_BFloat(), LANES)), VH)
    bits = builder.bitcast(value, VI)
    odd = builder.and_(builder.lshr(bits, const(16, VI)), const(1, VI))
    rounded = builder.add(bits, builder.add(odd, const(0x7FFF, VI)))
    # Rounding must not carry a NaN over into infinity.
    nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(nan, builder.or_(bits, const(0x400000, VI)), rounded)
    return builder.trunc(builder.lshr(rounded, const(16, VI)), VH)


def loop(
    builder: Any, count: Any, values: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit ``for i in range(count): values = body(i, values)``; return the last values."""
    before = builder.block
    inside, after = builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(builder.icmp_signed(">", count, index(0)), inside, after)
    builder.position_at_end(inside)
    i = builder.phi(I64)
    current = [builder.phi(value.type) for value in values]
    changed = body(i, current)
    following = builder.add(i, index(1))
    end = builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    for phi, first, later in zip([i, *current], [index(0), *values], [following, *changed]):
        phi.add_incoming(first, before)
        phi.add_incoming(later, end)
    builder.position_at_end(after)
    results = []
    for value, later in zip(values, changed):
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phi.add_incoming(later, end)
        results.append(phi)
    return results


def rows(builder: Any, base: Any, stride: Any, count: int, last: Any) -> list[Any]:
    """Addresses of rows 0 to count - 1, none past row ``last``: those repeat it."""
    addresses = []
    for i in range(count):
        row = builder.select(builder.icmp_signed("<", index(i), last), index(i), last)
        addresses.append(builder.add(base, builder.mul(row, stride)))
    return addresses


def listed(builder: Any, address: Any, count: int) -> list[Any]:
    """Addresses from a list of them."""
    return [load(builder, builder.add(address, index(8 * j)), I64) for j in range(count)]
