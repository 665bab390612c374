"""Numbers of any kind, and one for every part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = int | float | Fraction
PerPart: TypeAlias = Number | Sequence[Number]
"""One number for all parts of the model, or a sequence with one for each."""


def spread(each: PerPart, parts: int) -> list[Number]:
    """A number for every part.

    Raises
    ------
    ValueError
        If there are more or fewer than parts.
    """
    numbers = list(each) if isinstance(each, Sequence) else [each] * parts
    if len(numbers) != parts:
        raise ValueError(f"expected one number, or one for each of {parts} parts; found {len(numbers)}")
    return numbers
