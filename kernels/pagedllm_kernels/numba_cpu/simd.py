"""Vectors of 16 floats as a Numba type, and typed memory access by address.

Owner: numba_cpu. Invariants: an address is an int64; nothing here allocates or raises.
A *tag* is a scalar whose Numba type says how numbers are stored: float32 (``F32``), bfloat16
(``BF16``, a uint16), float16 (``F16``, an int16). Functions that take one are compiled once
per type, which is how one source serves every storage type without closures, which Numba's
disk cache cannot follow.

Vector IR has no instruction set in it: LLVM gives AVX-512 one register for a vector, AVX2
two and Arm four.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from pagedllm_kernels.numba_cpu.emit import (
    FLOAT,
    I16,
    I32,
    I64,
    VF,
    VH,
    VI,
    call,
    const,
    index,
    lanes_below,
    load,
    narrow,
    pointer,
    store,
    widen,
)
from pagedllm_kernels.numba_cpu.emit import fma as ir_fma
from pagedllm_kernels.numba_cpu.emit import splat as ir_splat
from pagedllm_kernels.numba_cpu.layout import LANES
from pagedllm_kernels.numba_cpu.tiles import ARGUMENTS, TAGS, Tile, attention_tiles, linear_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

F32 = np.float32(0)
BF16 = np.uint16(0)
F16 = np.int16(0)

_Fn = TypeVar("_Fn", bound="Callable[..., Any]")


# Not nnan or ninf: a slot of a page may hold anything.
OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
}


def jit(function: _Fn) -> _Fn:
    """Compile on first use, into the function that calls it; never raises, never allocates."""
    return numba.njit(no_cpython_wrapper=True, **OPTIONS)(function)  # type: ignore[no-any-return]


def unit(function: _Fn) -> _Fn:
    """Compile on its own, by :mod:`compiler`; Numba code calls it through a symbol.

    What Numba code calls otherwise is optimised anew in every function around it. Parameters
    are addresses and numbers, int64, but for tags, which are named ``wtag`` and ``atag``.
    """
    UNITS[function.__name__] = function

    @intrinsic  # type: ignore[untyped-decorator]
    def caller(typingctx: Any, *args: Any) -> Any:
        symbol = unit_symbol(function, [TAGS[a] for a in args if a in TAGS])
        if llvm.address_of_symbol(symbol) is None:
            raise TypeError(f"{symbol} is not compiled before what calls it")

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            call(builder, symbol, ir.VoidType(), cgutils.unpack_tuple(builder, args[0]))
            return context.get_dummy_value()

        return types.void(types.StarArgTuple.from_types(args)), codegen

    return caller  # type: ignore[no-any-return]


UNITS: dict[str, Any] = {}
"""Every function marked as a :func:`unit`, by name."""


def unit_symbol(function: Any, tags: Sequence[str]) -> str:
    """Return the symbol of a unit compiled for these tags."""
    return "_".join(["pagedllm", function.__name__.strip("_"), *tags])


def emits(function: _Fn) -> _Fn:
    """Mark a function as one that emits IR: typing context and argument types in, code out."""
    return intrinsic(function)  # type: ignore[no-any-return]


class VectorType(types.Type):  # type: ignore[misc]
    """Numba's type of 16 floats in a register."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


VEC = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VF)


# --- vectors ----------------------------------------------------------------------------------


class _Arithmetic(ConcreteTemplate):  # type: ignore[misc]
    cases = [signature(VEC, VEC, VEC)]  # noqa: RUF012 - Numba's own convention


def _operator(function: Any, instruction: str) -> None:
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    infer_global(function)(_Arithmetic)
    lower_builtin(function, VEC, VEC)(lower)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_function, _instruction)


@emits
def splat(typingctx: Any, value: Any) -> Any:
    """Return a vector with all lanes alike."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir_splat(builder, args[0], VF)

    return VEC(types.float32), codegen


@emits
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir_fma(builder, *args)

    return VEC(VEC, VEC, VEC), codegen


def _minmax(order: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(builder.fcmp_ordered(order, *args), *args)

        return VEC(VEC, VEC), codegen

    return operation


vmax, vmin = _minmax(">"), _minmax("<")


@emits
def hsum(typingctx: Any, value: Any) -> Any:
    """Return the sum of all lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(FLOAT, [FLOAT, VF])
        name = "llvm.vector.reduce.fadd.v16f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        start = ir.Constant(FLOAT, 0.0)
        return builder.call(function, [start, args[0]], fastmath=("reassoc",))

    return types.float32(VEC), codegen


@emits
def hmax(typingctx: Any, value: Any) -> Any:
    """Return the largest lane; no lane may be NaN."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(FLOAT, [VF])
        name = "llvm.vector.reduce.fmax.v16f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [args[0]], fastmath=("nnan", "nsz"))

    return types.float32(VEC), codegen


@emits
def keep_lanes(typingctx: Any, value: Any, first: Any, last: Any, other: Any) -> Any:
    """Replace all lanes but ``first <= lane < last`` by the scalar ``other``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.Constant(VI, list(range(LANES)))
        low, high = (ir_splat(builder, builder.trunc(arg, I32), VI) for arg in args[1:3])
        inside = builder.and_(
            builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
        )
        return builder.select(inside, args[0], ir_splat(builder, args[3], VF))

    return VEC(VEC, types.int64, types.int64, types.float32), codegen


@emits
def round_even(typingctx: Any, value: Any) -> Any:
    """Round to integers, as floats."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.rint.v16f32", VF, [args[0]])

    return VEC(VEC), codegen


@emits
def copysign(typingctx: Any, value: Any, sign: Any) -> Any:
    """Return the magnitude of ``value`` with the sign of ``sign``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.copysign.v16f32", VF, list(args))

    return VEC(VEC, VEC), codegen


@emits
def scale_by_power(typingctx: Any, value: Any, exponent: Any) -> Any:
    """Return ``value * 2 ** exponent`` for whole exponents whose result is a normal number."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = builder.fptosi(args[1], VI)
        bits = builder.shl(builder.add(whole, const(127, VI)), const(23, VI))
        return builder.fmul(args[0], builder.bitcast(bits, VF))

    return VEC(VEC, VEC), codegen


# --- memory -----------------------------------------------------------------------------------


@emits
def itemsize(typingctx: Any, tag: Any) -> Any:
    """Return the bytes of a number stored as ``tag``."""
    size = tag.bitwidth // 8

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return index(size)

    return types.int64(tag), codegen


@emits
def vload(typingctx: Any, address: Any, tag: Any) -> Any:
    """Load 16 numbers stored as ``tag``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if tag == types.float32:
            return load(builder, args[0], VF)
        return widen(builder, load(builder, args[0], VH, 2), TAGS[tag])

    return VEC(types.int64, tag), codegen


@emits
def vstore(typingctx: Any, value: Any, address: Any, tag: Any) -> Any:
    """Store 16 numbers as ``tag``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if tag == types.float32:
            store(builder, args[0], args[1])
        else:
            store(builder, narrow(builder, args[0], TAGS[tag]), args[1], 2)
        return context.get_dummy_value()

    return types.void(VEC, types.int64, tag), codegen


@emits
def vload_some(typingctx: Any, address: Any, count: Any, tag: Any) -> Any:
    """Load the first ``count`` of 16 float32 and touch nothing past them; the others are 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = pointer(builder, args[0], VF)
        operands = [place, ir.Constant(I32, 4), lanes_below(builder, args[1]), const(0.0)]
        return call(builder, "llvm.masked.load.v16f32.p0", VF, operands)

    return VEC(types.int64, types.int64, types.float32), codegen


@emits
def vstore_some(typingctx: Any, value: Any, address: Any, count: Any, tag: Any) -> Any:
    """Store the first ``count`` of 16 numbers as ``tag`` and touch nothing past them."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, address, count = args[:3]
        raw = value if tag == types.float32 else narrow(builder, value, TAGS[tag])
        kind = raw.type
        name = f"llvm.masked.store.v16{'f32' if kind == VF else 'i16'}.p0"
        mask = lanes_below(builder, count)
        place = pointer(builder, address, kind)
        align = ir.Constant(I32, 4 if kind == VF else 2)
        call(builder, name, ir.VoidType(), [raw, place, align, mask])
        return context.get_dummy_value()

    return types.void(VEC, types.int64, types.int64, tag), codegen


@emits
def rounded(typingctx: Any, value: Any, tag: Any) -> Any:
    """Return the 16 numbers as they come back when stored as ``tag``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if tag == types.float32:
            return args[0]
        return widen(builder, narrow(builder, args[0], TAGS[tag]), TAGS[tag])

    return VEC(VEC, tag), codegen


@emits
def get(typingctx: Any, address: Any, tag: Any) -> Any:
    """Load one number stored as ``tag``, as a float."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if tag == types.float32:
            return load(builder, args[0], FLOAT)
        raw = load(builder, args[0], I16, 2)
        if tag == types.int16:
            return builder.fpext(builder.bitcast(raw, ir.HalfType()), FLOAT)
        return builder.bitcast(builder.shl(builder.zext(raw, I32), ir.Constant(I32, 16)), FLOAT)

    return types.float32(types.int64, tag), codegen


@emits
def put(typingctx: Any, value: Any, address: Any, tag: Any) -> Any:
    """Store one float as ``tag``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if tag == types.float32:
            store(builder, args[0], args[1])
        else:
            # Through a vector: one way of rounding, and no call into a C library.
            vector = narrow(builder, ir_splat(builder, args[0], VF), TAGS[tag])
            store(builder, builder.extract_element(vector, ir.Constant(I32, 0)), args[1], 2)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64, tag), codegen


@emits
def load64(typingctx: Any, address: Any) -> Any:
    """Load an int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return load(builder, args[0], I64, 8)

    return types.int64(types.int64), codegen


@emits
def store64(typingctx: Any, value: Any, address: Any) -> Any:
    """Store an int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        store(builder, args[0], args[1], 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@emits
def load32(typingctx: Any, address: Any) -> Any:
    """Load an int32, as an int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sext(load(builder, args[0], I32), I64)

    return types.int64(types.int64), codegen


def _field_address(builder: Any, table: Any, number: Any) -> Any:
    return builder.add(table, builder.shl(number, index(3)))


@emits
def field(typingctx: Any, table: Any, number: Any) -> Any:
    """Return a field of a job, an operation or a task."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return load(builder, _field_address(builder, *args), I64, 8)

    return types.int64(types.int64, types.int64), codegen


@emits
def real(typingctx: Any, table: Any, number: Any) -> Any:
    """Return a float32 field of an operation."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return load(builder, _field_address(builder, *args), FLOAT)

    return types.float32(types.int64, types.int64), codegen


@emits
def via(typingctx: Any, job: Any, op: Any, number: Any) -> Any:
    """Return the job's field that a field of an operation points to."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        job, op, number = args
        number = load(builder, _field_address(builder, op, number), I64, 8)
        return load(builder, _field_address(builder, job, number), I64, 8)

    return types.int64(types.int64, types.int64, types.int64), codegen


# --- tiles ------------------------------------------------------------------------------------


def _tile_caller(kind: str) -> Any:
    """Return a function of Numba code that calls a tile: literal sizes, a tag, addresses."""
    names = ARGUMENTS[kind]

    @intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
    def caller(typingctx: Any, rows: Any, columns: Any, extra: Any, tag: Any, *args: Any) -> Any:
        sizes = [int(size.literal_value) for size in (rows, columns, extra)]
        tile = Tile(kind, sizes[0], sizes[1], TAGS[tag], sizes[2])
        if tile not in (*linear_tiles(tile.tag), *attention_tiles(tile.tag)):
            raise TypeError(f"no such tile is compiled: {tile}")

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            call(builder, tile.symbol, ir.VoidType(), cgutils.unpack_tuple(builder, args[4]))
            return context.get_dummy_value()

        addresses = types.StarArgUniTuple(types.int64, len(names))
        return types.void(rows, columns, extra, tag, addresses), codegen

    return caller


outer, weigh, inner, transpose = (_tile_caller(k) for k in ("outer", "weigh", "inner", "transpose"))
