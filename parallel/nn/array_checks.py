"""What operators ask of the arrays that they are given, and how they say that it is not so."""

from __future__ import annotations

from typing import Any

from parallel.nn.operator import Spec


def expect(holds: bool, operator: Any, expected: str, x: Any) -> None:
    """Raise a ValueError that names the operator, what it expects, and what came, unless `holds`."""
    if not holds:
        name = f"{type(operator).__name__} {operator.name}".strip()
        raise ValueError(f"{name}: expected {expected}, found shape {tuple(x.shape)} of {x.dtype}")


def expect_last(operator: Any, x: Any, size: int) -> None:
    """`x` must have at least two axes, the last of that many elements."""
    expect(len(x.shape) >= 2 and x.shape[-1] == size, operator, f"an array of shape (batch, ..., {size})", x)


def expect_range(operator: Any, numbers: Any, limit: int, what: str) -> None:
    """All `numbers` must be below `limit`."""
    if numbers.size and (largest := int(numbers.max())) >= limit:
        name = f"{type(operator).__name__} {operator.name}".strip()
        raise ValueError(f"{name}: {what} {largest} is not below {limit}")


def elements(x: Spec) -> int:
    """How many elements such an array has."""
    return x.nbytes // x.dtype.itemsize


def widened(*specs: Spec) -> int:
    """Bytes of float32 copies of arrays in a half type; none of wide ones."""
    return sum(4 * elements(spec) for spec in specs if spec.dtype.itemsize == 2)


def stored(*specs: Spec) -> int:
    """Bytes that it takes to store float32 results in a half type: the results, and what rounding them takes."""
    return sum(9 * elements(spec) for spec in specs if spec.dtype.itemsize == 2)
