"""Granularity: elements that share a scale.

Every granularity turns an array into a matrix of rows, each cut into groups of `size` elements. The last group of a
row may be shorter. Kernels see only this matrix.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

from quant.types import Array


def whole_number(name: str, value: Any) -> int:
    """`value` as an int. ValueError unless it is a Python or NumPy integer, and for bool."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}: expected a whole number, found {value!r}")
    return int(value)


def shape_of(shape: Any) -> tuple[int, ...]:
    """Shape given as an integer or a sequence of them, as a tuple of int. ValueError for negative or other numbers."""
    lengths = shape if isinstance(shape, Iterable) else (shape,)
    found = tuple(whole_number("shape", n) for n in lengths)
    if any(n < 0 for n in found):
        raise ValueError(f"no array has the shape {found}")
    return found


@dataclass(frozen=True)
class PerTensor:
    """Granularity: all elements are one group, with one scale."""


@dataclass(frozen=True)
class PerChannel:
    """Granularity: one group, with one scale, per index along `axis`."""

    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", whole_number("axis", self.axis))


@dataclass(frozen=True)
class PerGroup:
    """Granularity: groups of `size` neighbours along `axis`. The last of each row may be shorter."""

    size: int
    axis: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", whole_number("axis", self.axis))
        object.__setattr__(self, "size", whole_number("the size of a group", self.size))
        if self.size < 1:
            raise ValueError(f"size: expected at least one element per group, found {self.size}")


Granularity = PerTensor | PerChannel | PerGroup


class GroupBlocking(NamedTuple):
    """Division of a matrix of `rows` x `length` elements into groups: each row is cut every `size` elements.

    >>> blocking(PerGroup(32), (3, 100))
    GroupBlocking(rows=3, length=100, size=32)
    >>> blocking(PerGroup(32), (3, 100)).groups
    12
    """

    rows: int
    length: int
    size: int

    @property
    def per_row(self) -> int:
        return -(-self.length // self.size)

    @property
    def groups(self) -> int:
        return self.rows * self.per_row

    @property
    def elements(self) -> int:
        return self.rows * self.length

    def first_element(self, group: Array) -> Array:
        """Index of a group's first element in row order. The number of elements for the index after the last group."""
        row, place = divmod(group, max(self.per_row, 1))
        return row * self.length + place * self.size

    def group_of(self, element: int) -> int:
        """Index of the group that holds the element with this index, both in row order."""
        row, place = divmod(element, self.length)
        return row * self.per_row + place // self.size


def _axis(granularity: PerChannel | PerGroup, ndim: int) -> int:
    if not -ndim <= granularity.axis < ndim:
        raise ValueError(f"{granularity} has no axis {granularity.axis} in an array of {ndim} dimensions")
    return granularity.axis % ndim


def from_front(granularity: Granularity, ndim: int) -> Granularity:
    """Granularity with its axis counted from the front in an array of `ndim` dimensions. ValueError without it."""
    if isinstance(granularity, PerTensor):
        return granularity
    return replace(granularity, axis=_axis(granularity, ndim))


def blocking(granularity: Granularity, shape: tuple[int, ...]) -> GroupBlocking:
    """Division of an array of this shape into rows and groups. ValueError if the array has no such axis."""
    n = math.prod(shape)
    match granularity:
        case PerTensor():
            return GroupBlocking(1, n, max(n, 1))
        case PerChannel():
            channels = shape[_axis(granularity, len(shape))]
            length = n // channels if channels else 0
            return GroupBlocking(channels, length, max(length, 1))
        case PerGroup(size):
            length = shape[_axis(granularity, len(shape))]
            return GroupBlocking(n // length if length else 0, length, size)


def to_rows(x: Array, granularity: Granularity) -> Array:
    """Arrange an array as the C-contiguous matrix whose rows are cut into groups. Without a copy if possible."""
    blocks, order = blocking(granularity, x.shape), _row_order(granularity, x.ndim)
    rows = (x.transpose(*order) if order else x).reshape(blocks.rows, blocks.length)
    return rows if rows.flags.c_contiguous else rows.copy()


def from_rows(rows: Array, granularity: Granularity, shape: tuple[int, ...]) -> Array:
    """Arrange a matrix from `to_rows` as an array of this shape again. A view if possible."""
    order = _row_order(granularity, len(shape))
    if not order:
        return rows.reshape(shape)
    transposed = rows.reshape([shape[i] for i in order])
    return transposed.transpose(*(order.index(i) for i in range(len(shape))))


def _row_order(granularity: Granularity, ndim: int) -> list[int] | None:
    """Axis order for `to_rows`: axis of channels first, or of groups last. None if the array has this order."""
    if isinstance(granularity, PerTensor):
        return None
    axis = _axis(granularity, ndim)
    others = [i for i in range(ndim) if i != axis]
    order = [axis, *others] if isinstance(granularity, PerChannel) else [*others, axis]
    return None if order == list(range(ndim)) else order
