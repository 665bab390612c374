"""Which elements share a scale: all of them, those of a channel, or so many in a row.

Whatever the granularity, an array becomes a matrix of lines, and every line falls into groups of `size` elements, the
last of which may be shorter. Kernels see nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

Array = Any


@dataclass(frozen=True)
class PerTensor:
    """One group of all elements."""


@dataclass(frozen=True)
class PerChannel:
    """A group for every index along `axis`."""

    axis: int = 0


@dataclass(frozen=True)
class PerGroup:
    """Groups of `size` neighbours along `axis`; the last of each line has what is left.

    Raises
    ------
    ValueError
        For a size below 1.
    """

    size: int
    axis: int = -1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a group has at least one element, not {self.size}")


Granularity = PerTensor | PerChannel | PerGroup


class Blocking(NamedTuple):
    """A matrix of `lines` x `length`, each line in groups of `size`.

    >>> blocking(PerGroup(32), (3, 100))
    Blocking(lines=3, length=100, size=32)
    >>> blocking(PerGroup(32), (3, 100)).groups
    12
    """

    lines: int
    length: int
    size: int

    @property
    def per_line(self) -> int:
        """Groups of a line."""
        return -(-self.length // self.size)

    @property
    def groups(self) -> int:
        """Groups in all."""
        return self.lines * self.per_line

    @property
    def elements(self) -> int:
        """Elements in all."""
        return self.lines * self.length


def _axis(granularity: PerChannel | PerGroup, ndim: int) -> int:
    if not -ndim <= granularity.axis < ndim:
        raise ValueError(f"{granularity} has no axis {granularity.axis} in an array of {ndim} dimensions")
    return granularity.axis % ndim


def blocking(granularity: Granularity, shape: tuple[int, ...]) -> Blocking:
    """The lines and groups of an array of that shape.

    Raises
    ------
    ValueError
        If the array has no such axis.
    """
    n = math.prod(shape)
    match granularity:
        case PerTensor():
            return Blocking(1, n, max(n, 1))
        case PerChannel():
            channels = shape[_axis(granularity, len(shape))]
            length = n // channels if channels else 0
            return Blocking(channels, length, max(length, 1))
        case PerGroup(size):
            length = shape[_axis(granularity, len(shape))]
            return Blocking(n // length if length else 0, length, size)


def to_lines(x: Array, granularity: Granularity) -> Array:
    """The matrix of lines, C-contiguous: `x` itself where it lies like that, else a copy."""
    blocks = blocking(granularity, x.shape)
    lines = _turned(x, granularity).reshape(blocks.lines, blocks.length)
    return lines if lines.flags.c_contiguous else lines.copy()


def from_lines(lines: Array, granularity: Granularity, shape: tuple[int, ...]) -> Array:
    """The array of that shape whose matrix of lines this is; a view where possible."""
    match granularity:
        case PerChannel() if (axis := _axis(granularity, len(shape))) > 0:
            order = [axis, *(i for i in range(len(shape)) if i != axis)]
        case PerGroup() if (axis := _axis(granularity, len(shape))) < len(shape) - 1:
            order = [*(i for i in range(len(shape)) if i != axis), axis]
        case _:
            return lines.reshape(shape)
    turned = lines.reshape([shape[i] for i in order])
    return turned.transpose(*(order.index(i) for i in range(len(shape))))


def _turned(x: Array, granularity: Granularity) -> Array:
    """`x` with the axis of the channels first, or that of the groups last."""
    match granularity:
        case PerChannel() if (axis := _axis(granularity, x.ndim)) > 0:
            return x.transpose(axis, *(i for i in range(x.ndim) if i != axis))
        case PerGroup() if (axis := _axis(granularity, x.ndim)) < x.ndim - 1:
            return x.transpose(*(i for i in range(x.ndim) if i != axis), axis)
    return x
