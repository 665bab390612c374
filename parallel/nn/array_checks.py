"""Checks of the shapes and dtypes of operators' inputs, results and gradients; array sizes for memory outlines."""

import math
import sys
from collections.abc import Callable
from numbers import Number
from operator import index
from typing import Any, TypeVar

import numpy as np

from parallel.nn.kernels.deferred import check
from parallel.nn.operator import ArraySpec, GradientSink, Operator, Parameter, parts_of
from quant.types import Array

Error = TypeVar("Error", bound=BaseException)


def is_single(value: Any) -> bool:
    """True for a Python number that is finite in float32.

    >>> is_single(0.5), is_single(1e39), is_single(10**400)
    (True, False, False)
    """
    return isinstance(value, float | int) and abs(value) <= float(np.finfo(np.float32).max)


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """An option that is an integer, also of NumPy; TypeError for others, bools too, ValueError below `least`.

    >>> whole_number("keep", np.int64(3))
    3
    """
    expected = f"{name}: expected an integer from {least} on, found {value!r}"
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(expected)
    if (number := index(value)) < least:
        raise ValueError(expected)
    return number


def label(operator: Any) -> str:
    """Class and name of an operator, for error messages."""
    return f"{type(operator).__name__} {getattr(operator, 'name', '')}".strip()


def expect(holds: bool, operator: Any, expected: str, x: Any) -> None:
    """Raise a ValueError unless `holds`; the message names the operator, what was expected, and x's shape and dtype."""
    if not holds:
        raise ValueError(f"{label(operator)}: expected {expected}, found shape {tuple(x.shape)} of {x.dtype}")


def expect_last(operator: Any, x: Any, size: int) -> None:
    """Raise a ValueError unless `x` has at least two axes, the last of length `size`, and no integers."""
    expect(len(x.shape) >= 2 and x.shape[-1] == size, operator, f"an array of shape (batch, ..., {size})", x)
    expect_floats(operator, x)


def expect_floats(operator: Any, x: Any) -> None:
    """Raise a ValueError if `x` has integers or bools, such as images of bytes."""
    expect(is_float(x), operator, "floating-point numbers, as x.astype(np.float32)", x)


def expect_range(operator: Any, numbers: Any, limit: int, what: str, least: int | None = None) -> None:
    """Raise a ValueError if any of the integers `numbers`, called `what`, is `limit` or more, or below `least`.

    Of an array on a device, within `deferred`, when the numbers of the step are read.
    """

    def judge_largest(largest: float) -> None:
        if largest >= limit:
            raise ValueError(f"{label(operator)}: {what} {int(largest)} is not below {limit}")

    def judge_smallest(smallest: float) -> None:
        if least is not None and smallest < least:
            raise ValueError(f"{label(operator)}: {what} {int(smallest)} is below {least}")

    if numbers.size:
        check(numbers.max(), judge_largest)
        if least is not None:
            check(numbers.min(), judge_smallest)


def as_matrix(x: Array) -> Array:
    """View of `x` with all axes but the last joined; of an empty array too, where ``reshape(-1, 0)`` is ambiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def is_float(x: Any) -> bool:
    """True for arrays and specs that are not of integers or bools."""
    return x.dtype.kind not in "iub"


def float_type(x: Any) -> np.dtype | None:
    """Dtype of x, or of the first array in the tuple x, that is neither of integers nor of bools."""
    return next((one.dtype for one in parts_of(x) if one is not None and is_float(one)), None)


def type_after(unit: Operator, x: Array) -> np.dtype | None:
    """Dtype required of a unit's result: that of its input `x`, or for integer `x` its parameters'; None: any."""
    return float_type(x) or next((p.dtype for p in unit.parameters()), None)


def expect_type(operator: Any, what: str, found: Any, dtype: np.dtype | None) -> None:
    """Raise a TypeError if an array of `found`, but for integers and bools, is of another dtype; None is any."""
    for one in parts_of(found):
        if one is not None and is_float(one) and dtype not in (None, one.dtype):
            raise TypeError(f"{label(operator)}: expected a {what} of {dtype}, found one of {one.dtype}")


def expect_gradient(operator: Any, dx: Any, x: Any) -> None:
    """Raise a ValueError unless `dx` has the shapes of the input whose spec is `x`; None goes with integers."""
    found, wanted = parts_of(dx), parts_of(x)
    if len(found) != len(wanted):
        raise ValueError(f"{label(operator)}: expected gradients of {len(wanted)} inputs, found {len(found)}")
    for one, spec in zip(found, wanted):
        if one is None and is_float(spec):
            raise TypeError(f"{label(operator)}: expected a gradient of each input of {spec.dtype}, found None")
        if one is not None:
            expect(one.shape == spec.shape, operator, f"a gradient of the input's shape {spec.shape}", one)


def named(error: Error, loss: Any = None) -> Error:
    """Add a note that names the innermost operator (or `loss`) that raised `error`, if its text does not; return it."""
    place, trace = "", error.__traceback__
    while trace is not None:
        inner = trace.tb_frame.f_locals.get("self")
        if isinstance(inner, Operator) or (loss is not None and inner is loss):
            place = f"in the {trace.tb_frame.f_code.co_name} of {label(inner)}"
        trace = trace.tb_next
    if place and place.rpartition(" of ")[2] not in str(error):
        error.add_note(place)
    return error


class GradientNotWritten(TypeError):
    """Raised when an operator's gradient function returns the gradient instead of writing it into the given array."""


def checked(operator: Operator, sink: GradientSink) -> GradientSink:
    """Wrap a gradient sink so that it raises `GradientNotWritten` if ``compute(out)`` returns a result outside `out`.

    The error names the operator at or below `operator` that holds the parameter.
    """

    def take(parameter: Parameter, compute: Callable[[Array], object]) -> None:
        _expect_gradient(parameter, compute)

        def write(out: Array) -> None:
            returned = compute(out)
            if returned is not None and returned is not out and _strays(returned, out):
                raise GradientNotWritten(
                    f"{holders_of(operator, parameter)}: the gradient of {parameter.name} was returned; expected it in "
                    "the array that is given, as by grads(p, lambda out: np.multiply(a, b, out=out))"
                )

        sink(parameter, write)

    return take


def _expect_gradient(parameter: Any, compute: Any) -> None:
    if not isinstance(parameter, Parameter) or not callable(compute):
        found = f"{type(parameter).__name__} and {type(compute).__name__}"
        raise TypeError(f"grads: expected a Parameter and a function that writes its gradient, found {found}")


def holders_of(operator: Operator, parameter: Parameter) -> str:
    """Class and name, as text, of the operators at or below `operator` that hold `parameter`; else of `operator`."""
    operators = [operator, *(value for _, value in operator.walk() if isinstance(value, Operator))]
    held = [one for one in operators if any(value is parameter for _, value in one.members())]
    return " or ".join(dict.fromkeys(label(one) for one in held or [operator]))


def _strays(returned: Any, out: Array) -> bool:
    """True if `returned`, perhaps a nested tuple, holds numbers or arrays that are not in the memory of `out`."""
    if isinstance(returned, list | tuple):
        return any(_strays(item, out) for item in returned)
    if isinstance(returned, type(out)):
        xp = sys.modules[type(out).__module__.partition(".")[0]]
        return bool(returned.size) and not xp.may_share_memory(returned, out)
    return hasattr(returned, "dtype") or isinstance(returned, Number)


def elements(x: ArraySpec) -> int:
    """Number of elements of an array of this shape."""
    return x.nbytes // x.dtype.itemsize


def widened(*specs: ArraySpec) -> int:
    """Total bytes of float32 copies of those arrays that are float16 or bfloat16 (0 for the others)."""
    return sum(4 * elements(spec) for spec in specs if spec.dtype.itemsize == 2)


def stored(*specs: ArraySpec) -> int:
    """Bytes of temporaries to compute the float16 or bfloat16 arrays among these in float32 and round them."""
    return sum(9 * elements(spec) for spec in specs if spec.dtype.itemsize == 2)
