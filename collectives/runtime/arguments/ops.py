"""Reduction kernels: ``out = left op right``, element by element, in rank order.

MPI's predefined operations become NumPy's ufuncs, on the element types that MPI allows for them and also on float16,
bfloat16 and other small floats. User-defined operations and types that only MPI can describe use
``MPI.Op.Reduce_local``.

Where NumPy and MPI leave a choice: MAX and MIN give NaN where either side is NaN; integers wrap around; a
bool counts as a number of one bit that saturates, so on bools SUM and MAX are "or", PROD and MIN "and".
MAXLOC and MINLOC give the lower location on equal values (and where a NaN makes two values incomparable).
Every NaN in a result is the same one, as NumPy gives the sign and the payload of either operand, by position; a complex
product is ``(a*c - b*d, a*d + b*c)``, each operation rounded, as NumPy fuses them or not, by position and by what `out`
is. So all ranks have the same bits, in any memory, with compiled kernels or without.
LAND, LOR, LXOR give 0 or 1 in the operands' type. REPLACE keeps the right operand and NO_OP the left one, as
``MPI.REPLACE(x, y)`` and ``MPI.NO_OP(x, y)`` do.

>>> import numpy as np
>>> from mpi4py import MPI
>>> x, y = np.array([1.0, 5.0]), np.array([4.0, 2.0])
>>> largest = combine(MPI.MAX, x.dtype, MPI.DOUBLE)
>>> largest(x, y, out=x)
>>> x.tolist()
[4.0, 5.0]
"""

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from mpi4py import MPI

from collectives.buffers.arguments import vector
from collectives.buffers.datatypes import OwnedDatatype, element_of, kind
from collectives.buffers.device_memory import DeviceMemory
from collectives.buffers.staging import PackedStaging
from collectives.errors import InvalidArgument, InvalidType

Vector = np.ndarray
Bind = Callable[[Vector, Vector, Vector], Callable[[], object]]


@dataclass(slots=True, eq=False)
class Combiner:
    """Elementwise reduction of two vectors by one operation, for one element type.

    ``bind(left, right, out)`` returns a call without arguments that combines these 1-D views of equal length, with the
    `dtype` given to `combine`, or of the packed elements' bytes (uint8) where it was None. `out` may be `left` or
    `right` or other memory, but may not overlap in part. If it does not commute, ranks are combined in order.
    ``function(left, right, out=out)`` does the same at once, if there is one, and `ufunc` is NumPy's function for it.
    """

    bind: Bind
    commutative: bool
    ufunc: Callable[..., Any] | None = None
    function: Callable[..., Any] | None = None

    def __call__(self, left: Vector, right: Vector, out: Vector) -> None:
        self.bind(left, right, out)()


class _OpRule(NamedTuple):
    name: str
    kinds: str  # of NumPy dtypes, as `buffers.kind` gives them
    ufunc: Callable[..., Any]


_RULES = {
    getattr(MPI, name).handle: _OpRule(name, kinds, ufunc)
    for kinds, ufuncs in (
        ("iufcb", {"SUM": np.add, "PROD": np.multiply}),
        ("iufb", {"MAX": np.maximum, "MIN": np.minimum}),
        ("iub", {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}),
        ("iub", {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}),
    )
    for name, ufunc in ufuncs.items()
}
_LOCATIONS = {MPI.MAXLOC.handle: ("MAXLOC", np.greater), MPI.MINLOC.handle: ("MINLOC", np.less)}
_SELECTIONS = {MPI.REPLACE.handle: 1, MPI.NO_OP.handle: 0}

OP_NAMES = {handle: rule[0] for handle, rule in (_RULES | _LOCATIONS).items()}
OP_NAMES |= {MPI.REPLACE.handle: "REPLACE", MPI.NO_OP.handle: "NO_OP"}
"""Names of MPI's operations by handle. Handles differ between processes."""


def is_commutative(op: MPI.Op) -> bool:
    """True if ``x op y == y op x``, as declared for user-defined ones, so that ranks may be combined in any order.

    >>> is_commutative(MPI.SUM), is_commutative(MPI.REPLACE)
    (True, False)
    """
    if op.handle in _SELECTIONS:  # Open MPI says yes, others no
        return False
    return op.Is_commutative()


def combine(op: MPI.Op, dtype: np.dtype[Any] | None, datatype: MPI.Datatype | None) -> Combiner:
    """Create the reduction kernel of `op` for elements with a dtype, a datatype or both. Raises if it has none."""
    if not isinstance(op, MPI.Op):
        raise InvalidType(MPI.ERR_OP, f"op: expected an MPI.Op, found {op!r}")
    if op == MPI.OP_NULL:
        raise InvalidArgument(MPI.ERR_OP, "op: MPI.OP_NULL (never made, or freed)")
    handle = op.handle
    if handle in _SELECTIONS:
        return Combiner(partial(_select, _SELECTIONS[handle]), False)
    if handle in _LOCATIONS:
        name, better = _LOCATIONS[handle]
        if dtype is None or dtype.names != ("val", "loc"):
            _refuse(name, dtype, datatype)
        return Combiner(partial(_locate, better), True)
    if handle in _RULES:
        ufunc = _ufunc(_RULES[handle], dtype, datatype)
        # NumPy 2.4 deprecates the third position of maximum and minimum; elsewhere it saves 0.2 us a call.
        bind = _bind_by_keyword if ufunc in (np.maximum, np.minimum) else partial
        reproducible = ReproducibleFunction.of(ufunc, dtype)
        return Combiner(reproducible.bind if reproducible else partial(bind, ufunc), True, ufunc, reproducible or ufunc)
    return Combiner(_local(op, dtype, datatype), is_commutative(op))


def _ufunc(rule: _OpRule, dtype: np.dtype[Any] | None, datatype: MPI.Datatype | None) -> Callable[..., Any]:
    if dtype is None or kind(dtype) not in rule.kinds:
        _refuse(rule.name, dtype, datatype)
    if datatype is not None and datatype in (MPI.BYTE, MPI.PACKED) and rule.name not in ("BAND", "BOR", "BXOR"):
        _refuse(rule.name, dtype, datatype)
    probe = np.zeros(1, dtype)
    try:
        rule.ufunc(probe, probe, out=probe)
    except TypeError:  # ml_dtypes' smallest lack some
        _refuse(rule.name, dtype, datatype)
    return rule.ufunc


def _bind_by_keyword(ufunc: Callable[..., Any], left: Vector, right: Vector, out: Vector) -> Callable[[], object]:
    return partial(ufunc, left, right, out=out)


PRODUCT_BLOCK = 1 << 12
"""Elements of a complex product computed at a time, so that its parts stay in the cache."""


@dataclass(frozen=True, slots=True)
class ReproducibleFunction:
    """Function ``(left, right, out)`` on vectors of floats: `ufunc`, in bits that depend on the operands alone.

    The bits do not depend on memory, alignment, length and position, or on which operand `out` is.
    """

    ufunc: Callable[..., Any]
    compute: Callable[[Vector, Vector, Vector], object]

    @classmethod
    def of(cls, ufunc: Callable[..., Any], dtype: np.dtype[Any] | None) -> Self | None:
        """The function of a ufunc on this dtype. None for numbers that are no floats."""
        if dtype is None or kind(dtype) not in "fc":
            return None
        if ufunc is np.multiply and dtype.kind == "c":
            return cls(ufunc, _complex_product)
        return cls(ufunc, lambda left, right, out: ufunc(left, right, out=out))

    def bind(self, left: Vector, right: Vector, out: Vector) -> Callable[[], object]:
        return partial(self, left, right, out)

    def __call__(self, left: Vector, right: Vector, out: Vector) -> None:
        self.compute(left, right, out)
        for part in (out.real, out.imag) if out.dtype.kind == "c" else (out,):
            if part.size:
                largest = np.maximum.reduce(part)  # NaN, if there is one, in a single pass
                if largest != largest:
                    part[np.isnan(part)] = np.nan


def _complex_product(left: Vector, right: Vector, out: Vector) -> None:
    for start in range(0, len(out), PRODUCT_BLOCK):
        block = slice(start, start + PRODUCT_BLOCK)
        a, b, c, d = left.real[block], left.imag[block], right.real[block], right.imag[block]
        real, imaginary = a * c - b * d, a * d + b * c
        out.real[block], out.imag[block] = real, imaginary


def on_device(kernel: Combiner, dtype: np.dtype[Any], device: DeviceMemory) -> Combiner | None:
    """Counterpart of a reduction kernel for a device's arrays. None if the device's library does not support it."""
    ufunc = getattr(device.namespace, kernel.ufunc.__name__, None) if kernel.ufunc is not None else None
    if ufunc is None:
        return None
    key = ufunc, dtype
    if key not in _supported:
        try:
            probe = device.empty(1, dtype)
            device.working(partial(ufunc, probe, probe, out=probe))()
            _supported[key] = True
        except Exception:  # unknown types are refused in many ways, some by the compiler of kernels
            _supported[key] = False
    return Combiner(partial(_bind_on_device, ufunc), kernel.commutative) if _supported[key] else None


_supported: dict[tuple[Callable[..., Any], np.dtype[Any]], bool] = {}


def _bind_on_device(ufunc: Callable[..., Any], left: Any, right: Any, out: Any) -> Callable[[], object]:
    # CuPy copies an operand that shares memory with `out`, unless it is the same object.
    def address(array: Any) -> int:
        return int(array.__cuda_array_interface__["data"][0])

    return partial(ufunc, *(out if address(array) == address(out) else array for array in (left, right)), out=out)


def _refuse(name: str, dtype: np.dtype[Any] | None, datatype: MPI.Datatype | None) -> NoReturn:
    if datatype is not None and (dtype is None or datatype in (MPI.BYTE, MPI.PACKED)):
        what = datatype.name if datatype.is_predefined else "derived datatypes"
    else:
        what = f"dtype {dtype}"
    raise InvalidType(MPI.ERR_OP, f"op: MPI.{name} is not defined for {what}")


def _select(which: int, left: Vector, right: Vector, out: Vector) -> Callable[[], object]:
    return partial(np.copyto, out, (left, right)[which])


def _locate(better: Callable[..., Any], left: Vector, right: Vector, out: Vector) -> Callable[[], object]:
    """Bind MAXLOC or MINLOC: write the (value, location) pair with the better value to `out`. Ties: lower location."""
    take, keep, lower = (np.empty(left.shape, np.bool_) for _ in range(3))

    def run() -> None:
        better(right["val"], left["val"], out=take)
        better(left["val"], right["val"], out=keep)
        np.less(right["loc"], left["loc"], out=lower)
        np.greater(lower, keep, out=lower)  # lower and not keep
        np.logical_or(take, lower, out=take)
        np.copyto(out, np.where(take, right, left))

    return run


def _local(op: MPI.Op, dtype: np.dtype[Any] | None, datatype: MPI.Datatype | None) -> Bind:
    """Bind function of a reduction by ``MPI.Op.Reduce_local``, for operations and types without a NumPy ufunc.

    ``Reduce_local(in, inout)`` computes inout = in op inout, so `in` is the left operand.
    """
    if datatype is None:
        assert dtype is not None, "elements have a dtype or a datatype"
        return partial(_dense, op, _bytes(dtype.itemsize), dtype.itemsize)
    element = element_of(datatype, "op")
    if not datatype.is_predefined:  # the user may free it while a call is under way
        datatype = OwnedDatatype(MPI.Datatype(datatype).Dup())
    return partial(_dense if element.dense else _spread, op, datatype, element.itemsize)


def _reduce_local(op: MPI.Op, source: Any, target: Any) -> None:
    if op == MPI.OP_NULL:
        raise InvalidArgument(MPI.ERR_OP, "op: freed before the end of a call that uses it")
    op.Reduce_local(source, target)


def _dense(
    op: MPI.Op, datatype: MPI.Datatype, size: int, left: Vector, right: Vector, out: Vector
) -> Callable[[], object]:
    n = out.nbytes // size
    if n == 0:
        return lambda: None
    at = MPI.Get_address(out)
    source = np.empty_like(left) if MPI.Get_address(left) == at else left
    reduce = partial(_reduce_local, op, [source, n, datatype], [out, n, datatype])
    if source is left and MPI.Get_address(right) == at:
        return reduce

    def run() -> None:
        if source is not left:
            np.copyto(source, left)
        np.copyto(out, right)
        reduce()

    return run


def _spread(
    op: MPI.Op, datatype: MPI.Datatype, size: int, left: Vector, right: Vector, out: Vector
) -> Callable[[], object]:
    """Bind a reduction of packed elements of a datatype with gaps: unpack both operands, ``Reduce_local``, pack."""
    n = out.nbytes // size
    if n == 0:
        return lambda: None
    element = element_of(datatype, "op")
    if element.extent <= 0:
        raise InvalidType(MPI.ERR_OP, f"op: cannot combine elements of extent {element.extent}")
    before = max(0, -(element.low // element.extent))
    nbytes = (before + n - 1) * element.extent + max(element.high, element.extent)
    places = [[np.zeros(nbytes, np.uint8), (n, before), datatype] for _ in range(2)]
    a, b = (vector(place, "op", writable=True) for place in places)
    first = PackedStaging(a, load=False, store=True, host=left.view(np.uint8))
    second = PackedStaging(b, load=False, store=True, host=right.view(np.uint8))
    result = PackedStaging(b, load=True, store=False, host=out.view(np.uint8))

    def run() -> None:
        first.store()
        second.store()
        _reduce_local(op, *places)
        result.load()

    return run


@cache
def _bytes(width: int) -> MPI.Datatype:
    """Contiguous MPI datatype of `width` bytes (cached), for elements that MPI has no datatype for."""
    return OwnedDatatype(MPI.BYTE.Create_contiguous(width).Commit())


atexit.register(_bytes.cache_clear)  # before MPI ends
