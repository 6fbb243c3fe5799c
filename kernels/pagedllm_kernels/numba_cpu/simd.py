"""What Numba code is written in: vectors of 16 floats, memory by address, atomics, tiles.

Owner: numba_cpu. Invariants: an address is an int64; nothing here allocates or raises.
A *tag* is a scalar whose Numba type says how numbers are stored: ``F32``, ``BF16`` (a
uint16), ``F16`` (an int16) or ``I8``. Functions that take one are compiled once per type,
which is how one source serves every storage type without closures, which Numba's disk cache
cannot follow.
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

from pagedllm_kernels.numba_cpu import emit
from pagedllm_kernels.numba_cpu.emit import FLOAT, I8, I16, I32, I64, VF, VH, VI, const, index
from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.layout import LANES, LINE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

F32, BF16, F16, S8 = np.float32(0), np.uint16(0), np.int16(0), np.int8(0)
TAGS = {types.float32: "f32", types.uint16: "bf16", types.int16: "f16", types.int8: "i8"}
_SIZES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1}

# Not nnan or ninf: a slot of a page may hold anything.
OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
}

_Fn = TypeVar("_Fn", bound="Callable[..., Any]")

UNITS: dict[str, Any] = {}
"""Every function marked as a :func:`unit`, by name."""


def jit(function: _Fn) -> _Fn:
    """Compile on first use, into the function that calls it."""
    return numba.njit(no_cpython_wrapper=True, **OPTIONS)(function)  # type: ignore[no-any-return]


def unit(function: _Fn, only: str = "") -> _Fn:
    """Compile on its own, by :mod:`compiler`; Numba code calls it through a symbol.

    What Numba code calls otherwise is optimised anew in every function around it. Parameters
    are addresses and numbers, int64, but for tags, whose names :mod:`compiler` knows. Where
    ``only`` is the name of a tag, a call with another one does nothing.
    """
    UNITS[function.__name__] = function

    @intrinsic  # type: ignore[untyped-decorator]
    def caller(typingctx: Any, *args: Any) -> Any:
        tags = [TAGS[a] for a in args if a in TAGS]
        symbol, called = unit_symbol(function, tags), not only or only in tags
        if called and llvm.address_of_symbol(symbol) is None:
            raise TypeError(f"{symbol} is not compiled before what calls it")

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if called:
                emit.call(builder, symbol, ir.VoidType(), cgutils.unpack_tuple(builder, args[0]))
            return context.get_dummy_value()

        return types.void(types.StarArgTuple.from_types(args)), codegen

    return caller  # type: ignore[no-any-return]


def unit_symbol(function: Any, tags: Sequence[str]) -> str:
    """Return the symbol of a unit compiled for these tags."""
    return "_".join(["pagedllm", function.__name__.strip("_"), *tags])


# --- functions that emit IR --------------------------------------------------------------------


class VectorType(types.Type):  # type: ignore[misc]
    """Numba's type of 16 floats in a register."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


VEC = VectorType()
TAG = "tag"
INT, REAL, NONE = types.int64, types.float32, types.void


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VF)


def emits(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give Numba code a function that emits IR.

    Args:
        result: its Numba type.
        parameters: of its parameters; ``TAG`` is a tag, of which it is given the name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def typed(*given: Any) -> Any:
            kinds = [g if p is TAG else p for g, p in zip(given, parameters)]

            def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                values = [TAGS[k] if p is TAG else a for k, p, a in zip(kinds, parameters, args)]
                value = function(builder, *values)
                return context.get_dummy_value() if result is NONE else value

            return result(*kinds), codegen

        # Numba counts the parameters, so there is one wrapper per number of them.
        wrappers: list[Callable[..., Any]] = [
            lambda context: typed(),
            lambda context, a: typed(a),
            lambda context, a, b: typed(a, b),
            lambda context, a, b, c: typed(a, b, c),
            lambda context, a, b, c, d: typed(a, b, c, d),
        ]
        return intrinsic(wrappers[len(parameters)])  # type: ignore[no-any-return]

    return decorate


class _Arithmetic(ConcreteTemplate):  # type: ignore[misc]
    cases = [signature(VEC, VEC, VEC)]  # noqa: RUF012 - Numba's own convention


def _operator(function: Any, instruction: str) -> None:
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    infer_global(function)(_Arithmetic)
    lower_builtin(function, VEC, VEC)(lower)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


@emits(VEC, REAL)
def splat(builder: Any, value: Any) -> Any:
    """Return a vector with all lanes alike."""
    return emit.splat(builder, value, VF)


@emits(VEC, VEC, VEC, VEC)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``."""
    return emit.fma(builder, a, b, c)


@emits(VEC, VEC, VEC)
def vmax(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger number of each lane."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emits(VEC, VEC, VEC)
def vmin(builder: Any, a: Any, b: Any) -> Any:
    """Return the smaller number of each lane."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@emits(VEC, VEC, VEC)
def copysign(builder: Any, value: Any, sign: Any) -> Any:
    """Return the magnitude of ``value`` with the sign of ``sign``."""
    return emit.call(builder, "llvm.copysign.v16f32", VF, [value, sign])


@emits(VEC, VEC)
def round_even(builder: Any, value: Any) -> Any:
    """Round to integers, as floats."""
    return emit.call(builder, "llvm.rint.v16f32", VF, [value])


@emits(VEC, VEC, VEC)
def scale_by_power(builder: Any, value: Any, exponent: Any) -> Any:
    """Return ``value * 2 ** exponent`` for whole exponents whose result is a normal number."""
    whole = builder.add(builder.fptosi(exponent, VI), const(127, VI))
    return builder.fmul(value, builder.bitcast(builder.shl(whole, const(23, VI)), VF))


@emits(REAL, VEC)
def hsum(builder: Any, value: Any) -> Any:
    """Return the sum of all lanes."""
    args = [ir.Constant(FLOAT, 0.0), value]
    return emit.call(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, args, ("reassoc",))


@emits(REAL, VEC)
def hmax(builder: Any, value: Any) -> Any:
    """Return the largest lane; no lane may be NaN."""
    flags = ("nnan", "nsz")
    return emit.call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, [value], flags)


@emits(VEC, VEC, INT, INT, REAL)
def keep_lanes(builder: Any, value: Any, first: Any, last: Any, other: Any) -> Any:
    """Replace all lanes but ``first <= lane < last`` by the scalar ``other``."""
    inside = builder.and_(
        builder.not_(emit.lanes_below(builder, first)), emit.lanes_below(builder, last)
    )
    return builder.select(inside, value, emit.splat(builder, other, VF))


# --- memory -----------------------------------------------------------------------------------


@emits(INT, TAG)
def itemsize(builder: Any, tag: str) -> Any:
    """Return the bytes of a number stored as ``tag``."""
    return index(_SIZES[tag])


@emits(INT, TAG)
def widening(builder: Any, tag: str) -> Any:
    """Return 2 where products of many rows widen numbers stored as ``tag`` first, else 1."""
    return index(2 if FEATURES.widens(tag) else 1)


@emits(VEC, INT, TAG)
def vload(builder: Any, address: Any, tag: str) -> Any:
    """Load 16 numbers stored as ``tag``."""
    if tag == "f32":
        return emit.load(builder, address, VF)
    return emit.widen(builder, emit.load(builder, address, VH, 2), tag)


@emits(NONE, VEC, INT, TAG)
def vstore(builder: Any, value: Any, address: Any, tag: str) -> None:
    """Store 16 numbers as ``tag``."""
    raw = value if tag == "f32" else emit.narrow(builder, value, tag)
    emit.store(builder, raw, address, _SIZES[tag])


@emits(VEC, INT, INT)
def vload_some(builder: Any, address: Any, count: Any) -> Any:
    """Load the first ``count`` of 16 float32 and touch nothing past them; the others are 0."""
    valid = emit.lanes_below(builder, count)
    return builder.bitcast(emit.masked_load(builder, address, valid), VF)


@emits(NONE, VEC, INT, INT, TAG)
def vstore_some(builder: Any, value: Any, address: Any, count: Any, tag: str) -> None:
    """Store the first ``count`` of 16 numbers as ``tag`` and touch nothing past them."""
    raw = value if tag == "f32" else emit.narrow(builder, value, tag)
    name = f"llvm.masked.store.v16{'f32' if tag == 'f32' else 'i16'}.p0"
    align, valid = ir.Constant(I32, _SIZES[tag]), emit.lanes_below(builder, count)
    place = emit.pointer(builder, address, raw.type)
    emit.call(builder, name, ir.VoidType(), [raw, place, align, valid])


@emits(VEC, VEC, TAG)
def rounded(builder: Any, value: Any, tag: str) -> Any:
    """Return the 16 numbers as they come back when stored as ``tag``."""
    if tag == "f32":
        return value
    return emit.widen(builder, emit.narrow(builder, value, tag), tag)


@emits(NONE, VEC, INT)
def vstore_int8(builder: Any, value: Any, address: Any) -> None:
    """Store 16 whole numbers from -128 to 127 as int8."""
    whole = builder.fptosi(value, VI)
    emit.store(builder, builder.trunc(whole, ir.VectorType(I8, LANES)), address, 1)


@emits(NONE, REAL, INT)
def put_int(builder: Any, value: Any, address: Any) -> None:
    """Store a whole number as an int32."""
    emit.store(builder, builder.fptosi(value, I32), address)


@emits(INT, INT)
def get_byte(builder: Any, address: Any) -> Any:
    """Load a uint8."""
    return builder.zext(emit.load(builder, address, I8, 1), I64)


@emits(REAL, INT, TAG)
def get(builder: Any, address: Any, tag: str) -> Any:
    """Load one number stored as ``tag``, as a float."""
    if tag == "f32":
        return emit.load(builder, address, FLOAT)
    raw = emit.load(builder, address, I16, 2)
    if tag == "f16":
        return builder.fpext(builder.bitcast(raw, ir.HalfType()), FLOAT)
    return builder.bitcast(builder.shl(builder.zext(raw, I32), ir.Constant(I32, 16)), FLOAT)


@emits(NONE, REAL, INT, TAG)
def put(builder: Any, value: Any, address: Any, tag: str) -> None:
    """Store one float as ``tag``; as int8, one that is whole."""
    if tag in ("f32", "i8"):
        raw = value if tag == "f32" else builder.fptosi(value, I8)
        emit.store(builder, raw, address, _SIZES[tag])
        return
    # Through a vector: one way of rounding, and no call into a C library.
    vector = emit.narrow(builder, emit.splat(builder, value, VF), tag)
    emit.store(builder, builder.extract_element(vector, ir.Constant(I32, 0)), address, 2)


@emits(INT, INT)
def load64(builder: Any, address: Any) -> Any:
    """Load an int64."""
    return emit.load(builder, address, I64, 8)


@emits(INT, INT)
def load32(builder: Any, address: Any) -> Any:
    """Load an int32, as an int64."""
    return builder.sext(emit.load(builder, address, I32), I64)


@emits(NONE, INT, INT)
def store64(builder: Any, value: Any, address: Any) -> None:
    """Store an int64."""
    emit.store(builder, value, address, 8)


@emits(INT, INT, INT)
def field(builder: Any, table: Any, number: Any) -> Any:
    """Return a field of a job, an operation, a task or a frame."""
    return emit.load(builder, emit.field(builder, table, number), I64, 8)


@emits(NONE, INT, INT, INT)
def set_field(builder: Any, table: Any, number: Any, value: Any) -> None:
    """Set a field of a task, a frame or a tile's arguments."""
    emit.store(builder, value, emit.field(builder, table, number), 8)


@emits(REAL, INT, INT)
def real(builder: Any, table: Any, number: Any) -> Any:
    """Return a float32 field of an operation."""
    return emit.load(builder, emit.field(builder, table, number), FLOAT)


@emits(INT, INT, INT, INT)
def via(builder: Any, job: Any, op: Any, number: Any) -> Any:
    """Return the job's field that a field of an operation points to."""
    number = emit.load(builder, emit.field(builder, op, number), I64, 8)
    return emit.load(builder, emit.field(builder, job, number), I64, 8)


@emits(NONE, INT, INT, INT)
def copy(builder: Any, target: Any, source: Any, size: Any) -> None:
    """Copy ``size`` bytes between places that do not overlap."""
    places = (emit.pointer(builder, address, I8) for address in (target, source))
    cgutils.raw_memcpy(builder, *places, size, 1)


@emits(NONE, INT)
def _fetch_line(builder: Any, address: Any) -> None:
    emit.prefetch(builder, address, 2)


@jit
def fetch(address: int, size: int) -> None:
    """Fetch ``size`` bytes; more than a few lines at once are dropped by the processor."""
    for line in range(0, size, LINE):
        _fetch_line(address + line)


@jit
def round_up(value: int, step: int) -> int:
    """Return the next multiple of ``step``."""
    return (value + step - 1) // step * step


@emits(NONE, INT, INT, INT)
def run_tile(builder: Any, table: Any, number: Any, args: Any) -> None:
    """Call a tile of a table of them with its arguments."""
    address = emit.load(builder, emit.field(builder, table, number), I64, 8)
    builder.call(emit.pointer(builder, address, ir.FunctionType(ir.VoidType(), [I64])), [args])


# --- threads ----------------------------------------------------------------------------------


@emits(INT, INT, INT)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to an int64 that other threads use and return what it was."""
    return builder.atomic_rmw("add", emit.pointer(builder, address, I64), value, "acq_rel")


@emits(INT, INT)
def load_acquire(builder: Any, address: Any) -> Any:
    """Load an int64 that another thread writes, and see all it wrote before."""
    return builder.load_atomic(emit.pointer(builder, address, I64), "acquire", 8)


@emits(NONE)
def pause(builder: Any) -> None:
    """Tell the processor that this is a waiting loop."""
    if FEATURES.x86:
        emit.call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


@emits(NONE)
def give_way(builder: Any) -> None:
    """Let another thread of this machine run on this core."""
    if FEATURES.yield_symbol:
        emit.call(builder, FEATURES.yield_symbol, I32, [])
