"""Layout of a quantised array's buffer: scales, zero points and codes without padding.

Parts are sorted by decreasing item size, so that all are aligned.

Codes of 1 to 8 bits are packed densely: n codes of b bits take ceil(b n / 8) bytes. A width is a sum of 4, 2 and 1.
Every block of 32 codes is stored plane by plane, the widest first. The 8/w fields of a byte come from elements 32 w/8
apart: byte j of a block of nibbles holds code j in its lower and code j + 16 in its upper half (ggml's Q4_0 does the
same). The codes after the last full block are a stream of bits, least significant first.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quant.spec.granularity import GroupBlocking, blocking, shape_of
from quant.spec.quant_spec import SCALE_BITS, QuantSpec

BLOCK = 32
"""Codes per block."""

POWERS = {bits: tuple(power for power in (4, 2, 1) if bits & power) for bits in range(1, 8)}
"""Planes of every width below 8: 7 bits are 4, 2 and 1."""


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` packed codes."""
    return -(-count * bits // 8)


STORED: dict[int, np.dtype[Any]] = {32: np.dtype(np.float32), 16: np.dtype(np.uint16)}
"""Dtype of items by bits. 16-bit items hold fp16 or bf16 bits. All other parts are packed bytes."""


class BufferPart(NamedTuple):
    """Part of the buffer: `items` items of `bits` bits each, beginning at byte `start`."""

    name: str
    bits: int
    items: int
    start: int

    @property
    def nbytes(self) -> int:
        return packed_nbytes(self.items, self.bits)

    @property
    def dtype(self) -> np.dtype:
        """Dtype as stored: float32, uint16 (bits of fp16 or bf16), or uint8 for all others, packed or not."""
        return STORED.get(self.bits, np.dtype(np.uint8))


class BufferLayout(NamedTuple):
    """Parts of a quantised array's buffer: `scale0` (of the groups), `scale1` (of their parent) ..., `zeros`, `codes`.

    `blocks` are the rows and groups of the elements. `parent_levels` has, for each parent of the scales, the groups of
    the level below it.
    """

    elements: int
    blocks: GroupBlocking
    parent_levels: tuple[GroupBlocking, ...]
    parts: tuple[BufferPart, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def bits_per_element(self) -> float:
        """Bits per element of this array, the whole buffer counted. NaN without elements."""
        return 8 * self.nbytes / self.elements if self.elements else math.nan


def layout(spec: QuantSpec, shape: int | tuple[int, ...]) -> BufferLayout:
    """Buffer layout of an array of this shape, or a vector of this length (cached).

    ValueError if the array has no axis that the spec needs.

    >>> from quant.spec.presets import Q4_0
    >>> layout(Q4_0, (64,)).nbytes, layout(Q4_0, (64,)).bits_per_element
    (36, 4.5)
    """
    return _layout(spec, shape_of(shape))


@cache
def _layout(spec: QuantSpec, shape: tuple[int, ...]) -> BufferLayout:
    blocks = blocking(spec.granularity, shape)
    levels = [blocks]
    for scales in spec.scales.levels[:-1]:
        levels.append(blocking(scales.granularity, (levels[-1].rows, levels[-1].per_row)))
    each = 2**spec.bits if spec.code == "kmeans" else 1
    items = [
        (f"scale{number}", scales.bits, level.groups * each)
        for number, (scales, level) in enumerate(zip(spec.scales.levels, levels))
    ]
    if not spec.symmetric:
        items.append(("zeros", spec.bits if spec.zero == "integer" else SCALE_BITS[spec.zero], blocks.groups))
    items.append(("codes", spec.bits, blocks.elements))
    parts: list[BufferPart] = []
    for name, bits, count in sorted(items, key=lambda item: -max(item[1], 8)):  # below 8 bits: packed bytes
        start = parts[-1].start + parts[-1].nbytes if parts else 0
        parts.append(BufferPart(name, bits, count, start))
    return BufferLayout(blocks.elements, blocks, tuple(levels[1:]), tuple(parts))


def wire_nbytes(spec: QuantSpec, shape: int | tuple[int, ...]) -> int:
    """Buffer size in bytes of an array quantised by `spec`. `shape` is its shape, or the length of a vector.

    >>> from quant.spec.presets import grouped
    >>> wire_nbytes(grouped(8, 128), 1000)
    1016
    """
    return layout(spec, shape).nbytes
