"""Numeric types of simulated times and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = int | float | Fraction
PerPart: TypeAlias = Number | Sequence[Number]
"""One number for all parts of the model, or one per part."""


def spread(each: PerPart, parts: int) -> list[Number]:
    """Expand to one number per part; ValueError for a sequence of another length."""
    numbers = list(each) if isinstance(each, Sequence) else [each] * parts
    if len(numbers) != parts:
        raise ValueError(f"expected one number, or one for each of {parts} parts; found {len(numbers)}")
    return numbers
