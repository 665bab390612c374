"""Check of operators' and losses' gradients by finite differences in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np

from parallel.nn.array_checks import GradientNotWritten, checked, holders_of
from parallel.nn.flat_params import FlatParams
from parallel.nn.loss import Loss
from parallel.nn.operator import ArraySpec, Operator, Parameter, PassMode, arrays_of, nbytes_of
from parallel.nn.own_arrays import changes, own_arrays

STEP = 1e-5
"""Half the distance of the difference quotient: errors of about 1e-10 for values near 1."""

TOLERANCE = 1e-6
"""Largest difference, relative to the larger of 1 and the derivative."""

DIRECTIONS, ELEMENTS = 3, 5
"""Probes of x and of each parameter: random directions, and single elements."""


class GradientMismatch(AssertionError):
    """Raised when an operator's gradient is wrong, or it breaks another rule of `parallel.nn.operator`."""


def check(operator: Operator, x: np.ndarray) -> float:
    """Check an operator's gradients (finite differences at `x`), purity, outline: raise, or return the largest error.

    Gradients of sum(y r), with r random, plus the operator's own loss terms, are compared with central differences
    along random directions and by single elements. `forward` must be repeatable, neither pass may write into x, dy or
    saved values, `outline` must predict the result and the saved bytes, and each gradient must be written into the
    sink's array, once per use of its parameter.

    Parameters
    ----------
    operator : Operator
        Its parameters are named, and get new float64 values.
    x : array of float64, or of integers (which have no gradient)

    Returns
    -------
    float
        Largest difference found, relative to the larger of 1 and the derivative. GradientMismatch above `TOLERANCE`.

    Examples
    --------
    >>> from parallel.nn.linear import Linear
    >>> check(Linear(3, 2), np.ones((4, 3))) < 1e-6
    True
    """
    random, x = np.random.default_rng(0), np.array(x)
    flat = FlatParams(operator)
    vector = np.zeros(flat.length)
    flat.initialise(vector, 0)
    for place in flat.places:
        vector[place.span.start : place.span.start + place.size] += 0.1 * random.standard_normal(place.size)
    flat.bind(vector)
    dy, found = _contract(operator, x, random)

    def value() -> float:
        run = _run(x)
        y = operator.forward(x, run)[0]
        return float((y * dy).sum() + sum(term.sum() for term in run.terms.values()))

    points = [("x", x, found["x"])] if found["x"] is not None else []
    points += [(parameter.name, parameter.data, found[parameter.name]) for parameter in operator.parameters()]
    return max((_compare(*point, value, random) for point in points), default=0.0)


def check_loss(loss: Loss, y: np.ndarray, targets: np.ndarray) -> float:
    """Check a loss's gradient with respect to y (finite differences): raise, or return the largest error.

    Also checks its outline (shapes and bytes without data), if it has one. `check` describes errors and the result.
    """
    y = np.array(y)
    sum_, saved = loss.forward(y, targets)
    if not isinstance(sum_, float):
        raise GradientMismatch(f"forward: expected a float, found {type(sum_).__name__}")
    before = _copies(saved)
    dy = loss.backward(0.5, saved)
    _unchanged(before, "backward", "what was saved")
    if hasattr(loss, "outline"):
        _same_bytes(loss.outline(*(ArraySpec(x.shape, x.dtype) for x in (y, targets))).saved, saved)
    return _compare("y", y, dy, lambda: 0.5 * loss.forward(y, targets)[0], np.random.default_rng(0), y.size)


def _run(x: np.ndarray) -> PassMode:
    """Mode of a pass, in which random operators do the same as in all others."""
    return PassMode(samples=np.arange(len(x), dtype=np.int64))


def _contract(
    operator: Operator, x: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Run forward and backward, check all but the gradients' values; return random dy and gradients by name."""
    given = _copies((x, [parameter.data for parameter in operator.parameters()]))
    arrays = own_arrays(operator)
    outline = operator.outline(ArraySpec(x.shape, x.dtype))
    y, saved = operator.forward(x, _run(x))
    if changed := changes(arrays, own_arrays(operator)):
        raise GradientMismatch(changed[0])
    if (y.shape, y.dtype) != outline.y:
        raise GradientMismatch(f"outline: expected a result {tuple(outline.y)}, found {(y.shape, y.dtype)}")
    _same_bytes(outline.saved, saved)
    if not np.may_share_memory(x, y):  # a view of x is new to the outline, and costs nothing
        _same_bytes((outline.saved, outline.y), (saved, y))
    if not np.array_equal(y, operator.forward(x, _run(x))[0]):
        raise GradientMismatch("forward: the same input gave different results")
    dy = random.standard_normal(y.shape)
    gradients = {parameter.name: np.zeros(parameter.shape) for parameter in operator.parameters()}
    uses = dict.fromkeys(gradients, 0)

    def sink(parameter: Parameter, compute: Callable[[np.ndarray], object]) -> None:
        part = np.full(parameter.shape, np.nan)
        compute(part)
        gradients[parameter.name] += part
        uses[parameter.name] += 1

    before = _copies((saved, dy))
    try:
        dx = operator.backward(dy, saved, checked(operator, sink))
    except GradientNotWritten as error:
        raise GradientMismatch(f"backward: {error}") from error
    _unchanged(before, "backward", "dy or what was saved")
    _unchanged(given, "a pass", "x or a parameter")
    if dx is not None and dx.shape != x.shape:
        raise GradientMismatch(f"backward: expected dx of shape {x.shape}, found {dx.shape}")
    for parameter in operator.parameters():
        if uses[parameter.name] != parameter.uses:
            raise GradientMismatch(
                f"backward of {holders_of(operator, parameter)}: {parameter.name} is held {parameter.uses} times, and "
                f"its gradient came {uses[parameter.name]} times"
            )
    return dy, {"x": dx, **gradients}


def _compare(
    name: str,
    point: np.ndarray,
    gradient: np.ndarray,
    value: Callable[[], float],
    random: np.random.Generator,
    elements: int = ELEMENTS,
) -> float:
    """Compare `gradient` with finite differences of `value()` by `point` (restored): raise, or return largest error."""
    if not point.size:
        return 0.0
    worst, original = 0.0, point.copy()
    units = random.choice(point.size, min(elements, point.size), replace=False)
    probes = [
        (f"along direction {number}", random.standard_normal(point.size) / np.sqrt(point.size))
        for number in range(DIRECTIONS)
    ]
    for unit in units:
        place = f"by element {tuple(map(int, np.unravel_index(unit, point.shape)))}"
        probes.append((place, np.eye(1, point.size, unit)[0]))
    for place, flat in probes:
        direction = flat.reshape(point.shape)
        values = []
        for sign in (1, -1):
            point[...] = original + sign * STEP * direction
            values.append(value())
        point[...] = original
        numeric, analytic = (values[0] - values[1]) / (2 * STEP), float((gradient * direction).sum())
        difference = abs(numeric - analytic) / max(1.0, abs(numeric))
        if not difference <= TOLERANCE:
            raise GradientMismatch(
                f"gradient by {name}, {place}: differences give {numeric:.10g}, backward {analytic:.10g}"
            )
        worst = max(worst, difference)
    return worst


def _copies(values: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(array, array.copy()) for array in arrays_of(values).values()]


def _unchanged(before: list[tuple[np.ndarray, np.ndarray]], method: str, what: str) -> None:
    if not all(np.array_equal(array, copy, equal_nan=array.dtype.kind == "f") for array, copy in before):
        raise GradientMismatch(f"{method} wrote into {what}")


def _same_bytes(outline: Any, saved: Any) -> None:
    expected, found = nbytes_of(outline), nbytes_of(saved)
    if expected != found:
        raise GradientMismatch(f"outline: expected {expected} bytes saved, found {found}")
