"""Where the parts of a quantised array lie in its one buffer: larger scales first, codes last, nothing in between.

The parts come in descending order of their items' size, so that all are aligned without padding. Size and places follow
from spec and shape alone, before there is any data.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quant.spec.granularity import Blocking, blocking
from quant.packing import packed_nbytes
from quant.spec.quant_spec import SCALE_BITS, QuantSpec

STORED: dict[int, np.dtype[Any]] = {32: np.dtype(np.float32), 16: np.dtype(np.uint16)}
"""How items of so many bits lie in memory; those of 16 are the bits of fp16 or bf16. All else are packed codes."""


class Part(NamedTuple):
    """So many items of `bits` bits each, from byte `start` on."""

    name: str
    bits: int
    items: int
    start: int

    @property
    def nbytes(self) -> int:
        """Of all items."""
        return packed_nbytes(self.items, self.bits) if self.bits <= 8 else self.items * self.bits // 8

    @property
    def dtype(self) -> np.dtype:
        """Of an item; bytes, where items are packed."""
        return STORED.get(self.bits, np.dtype(np.uint8))


class Layout(NamedTuple):
    """The parts of the buffer of a quantised array.

    Attributes
    ----------
    elements : int
    blocks : Blocking
        The lines and groups of the elements.
    above : tuple of Blocking
        For each parent of the scales, how the level below it falls into groups.
    parts : tuple of Part
        `scale0` (those of the groups), `scale1` (their parent's) and so on, `zeros`, `codes`.
    """

    elements: int
    blocks: Blocking
    above: tuple[Blocking, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Of the buffer."""
        return sum(part.nbytes for part in self.parts)

    @property
    def bits_per_element(self) -> float:
        """Of this array, all of its buffer counted; NaN without elements."""
        return 8 * self.nbytes / self.elements if self.elements else math.nan

    def part(self, name: str) -> Part | None:
        """The part of that name, if there is one."""
        return next((part for part in self.parts if part.name == name), None)


@cache
def layout(spec: QuantSpec, shape: tuple[int, ...]) -> Layout:
    """Where everything lies for an array of that shape.

    >>> from quant.spec.presets import Q4_0
    >>> layout(Q4_0, (64,)).nbytes, layout(Q4_0, (64,)).bits_per_element
    (36, 4.5)
    """
    blocks = blocking(spec.granularity, shape)
    items = []
    above = []
    below = blocks
    for number, level in enumerate(spec.scales.levels):
        if number:
            below = blocking(spec.scales.levels[number - 1].granularity, (below.lines, below.per_line))
            above.append(below)
        each = 2**spec.bits if spec.code == "kmeans" else 1
        items.append((f"scale{number}", level.bits, below.groups * each))
    if not spec.symmetric:
        items.append(("zeros", spec.bits if spec.zero == "integer" else SCALE_BITS[spec.zero], blocks.groups))
    items.append(("codes", spec.bits, blocks.elements))
    parts: list[Part] = []
    for name, bits, count in sorted(items, key=lambda item: -STORED.get(item[1], np.dtype(np.uint8)).itemsize):
        start = parts[-1].start + parts[-1].nbytes if parts else 0
        parts.append(Part(name, bits, count, start))
    return Layout(blocks.elements, blocks, tuple(above), tuple(parts))


def wire_nbytes(spec: QuantSpec, shape: int | tuple[int, ...]) -> int:
    """Bytes of an array of that shape, or of a vector of so many elements, on the wire.

    >>> from quant.spec.presets import grouped
    >>> wire_nbytes(grouped(8, 128), 1000)
    1016
    """
    return layout(spec, (shape,) if isinstance(shape, int) else tuple(shape)).nbytes
