"""A quantised array: one buffer of bytes that holds codes, scales and zero points, and goes over a wire as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from quant import kernels
from quant.formats import values
from quant.spec.granularity import Blocking, Granularity, PerChannel, PerGroup, PerTensor, from_lines, to_lines
from quant.kernels import array_namespace
from quant.layout import Layout, layout
from quant.scaling.scales import numbers_of, spread
from quant.spec.quant_spec import QuantSpec, Scales

Array = Any


class QuantizedArray:
    """Codes, scales and zero points of an array, in one contiguous buffer whose size spec and shape decide.

    `quantize` makes them, and fills those that are there already. Without a buffer all bytes are 0.

    Parameters
    ----------
    spec : QuantSpec
    shape : tuple of int, or int
        Of the array that is meant.
    buffer : array of uint8, shape (nbytes,), optional
        C-contiguous, of NumPy or CuPy; it is kept, not copied.

    Attributes
    ----------
    spec : QuantSpec
    shape : tuple of int
    layout : Layout
        Where in the buffer what lies.
    buffer : array of uint8

    Raises
    ------
    ValueError
        If the buffer is of another length or type.

    Examples
    --------
    >>> from quant import INT8, quantize
    >>> q = quantize(np.array([1.0, -2.0, 4.0], np.float32), INT8)
    >>> q.integers(), q.nbytes
    (array([ 32, -64, 127], dtype=int8), 7)
    >>> QuantizedArray.from_wire(q.to_wire(), INT8, 3).dequantize()[-1]
    np.float32(4.0)
    """

    def __init__(self, spec: QuantSpec, shape: int | tuple[int, ...], buffer: Array = None):
        self.spec = spec
        self.shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        self.layout: Layout = layout(spec, self.shape)
        if buffer is None:
            buffer = np.zeros(self.layout.nbytes, np.uint8)
        if buffer.dtype != np.uint8 or buffer.shape != (self.layout.nbytes,) or not buffer.flags.c_contiguous:
            raise ValueError(
                f"{spec} of shape {self.shape} needs a contiguous buffer of {self.layout.nbytes} uint8, "
                f"not one of shape {buffer.shape} and type {buffer.dtype}"
            )
        self.buffer = buffer

    # -------------------------------------------------------------------------------------- size and wire

    @property
    def size(self) -> int:
        """Elements."""
        return self.layout.elements

    @property
    def nbytes(self) -> int:
        """Bytes, scales and zero points among them."""
        return self.layout.nbytes

    @property
    def bits_per_element(self) -> float:
        """Bits that an element takes, all counted."""
        return self.layout.bits_per_element

    @property
    def groups(self) -> int:
        """Groups of elements that share a scale."""
        return self.layout.blocks.groups

    def to_wire(self) -> Array:
        """All of it as contiguous bytes: the buffer itself, no copy."""
        return self.buffer

    @classmethod
    def from_wire(cls, buffer: Array, spec: QuantSpec, shape: int | tuple[int, ...]) -> QuantizedArray:
        """What `to_wire` gave, on the other side; the buffer is kept, not copied."""
        return cls(spec, shape, buffer)

    def __repr__(self) -> str:
        return f"QuantizedArray({self.spec}, shape={self.shape}, {self.nbytes} bytes)"

    # -------------------------------------------------------------------------------------- parts

    def part(self, name: str) -> Array:
        """A part of the buffer as it lies there: `scale0`, `scale1` ..., `zeros` or `codes`.

        Raises
        ------
        KeyError
            If there is no such part.
        """
        part = self.layout.part(name)
        if part is None:
            raise KeyError(f"{self.spec} has no {name}")
        return self.buffer[part.start : part.start + part.nbytes].view(part.dtype)

    def items(self, name: str) -> Array:
        """The items of a part, one to an entry: packed ones are unpacked. A view where they are not packed."""
        part, raw = self.layout.part(name), self.part(name)
        assert part is not None
        if part.bits >= 8:
            return raw
        items = array_namespace(raw).empty(part.items, np.uint8)
        kernels.unpack(raw, part.bits, items)
        return items

    def put(self, name: str, items: Array) -> None:
        """Set the items of a part."""
        part, raw = self.layout.part(name), self.part(name)
        assert part is not None
        if part.bits < 8:
            kernels.pack(items.reshape(-1), part.bits, raw)
        else:
            raw[...] = items.reshape(-1)

    def scales(self) -> Array:
        """What the codes of each group are multiplied with, all levels together: float32, shape (lines, groups).

        For kmeans, all 1.
        """
        blocks, levels = self.layout.blocks, self.spec.scales.levels
        shape = blocks.lines, blocks.per_line
        if self.spec.code == "kmeans":
            return array_namespace(self.buffer).ones(shape, np.float32)
        numbers = [_aligned(numbers_of(self.items(f"scale{i}"), level.format)) for i, level in enumerate(levels)]
        outer = numbers.pop()
        for own, above in zip(reversed(numbers), reversed(self.layout.above)):
            outer = spread(outer, above).reshape(-1) * own
        return outer.reshape(shape)

    def levels(self) -> Array:
        """What codes stand for before they are scaled: float32, shape (2^bits,), or for kmeans (lines, groups, 2^bits).

        Raises
        ------
        ValueError
            For linear codes.
        """
        xp, blocks = array_namespace(self.buffer), self.layout.blocks
        if self.spec.code == "kmeans":
            numbers = _aligned(numbers_of(self.items("scale0"), self.spec.scales.format))
            return numbers.reshape(blocks.lines, blocks.per_line, 2**self.spec.bits)
        if self.spec.linear:
            raise ValueError("linear codes have no table of levels")
        return xp.asarray(values(self.spec.code))

    def zeros(self) -> Array | None:
        """The zero points: float32, shape (lines, groups); None for symmetric codes."""
        if self.spec.symmetric:
            return None
        xp, blocks = array_namespace(self.buffer), self.layout.blocks
        items = self.items("zeros")
        if self.spec.zero != "integer":
            return _aligned(numbers_of(items, self.spec.zero)).reshape(blocks.lines, blocks.per_line)
        signed = self.spec.signed and not self.spec.bias
        numbers = (items.view(xp.int8) if signed else items).astype(xp.float32) - np.float32(self.spec.bias)
        return numbers.reshape(blocks.lines, blocks.per_line)

    def integers(self) -> Array:
        """The codes as an array of this shape: q as int8 or uint8, or the bits of small floats, or levels' numbers."""
        xp, blocks = array_namespace(self.buffer), self.layout.blocks
        codes = self.items("codes")
        if self.spec.linear and self.spec.signed:
            codes = (codes - np.uint8(self.spec.bias)).view(xp.int8)
        return from_lines(codes.reshape(blocks.lines, blocks.length), self.spec.granularity, self.shape)

    # -------------------------------------------------------------------------------------- numbers again

    def dequantize(self, out: Array = None, dtype: Any = np.float32) -> Array:
        """The numbers that the codes stand for.

        Parameters
        ----------
        out : array of this shape, optional
            Where to put them, of any floating-point type.
        dtype : dtype
            Of the result, where there is no `out`.
        """
        return self._decode(out, dtype, add=False)

    def add_to(self, out: Array) -> Array:
        """`out` plus the numbers that the codes stand for, in `out`; in float32 if `out` is no wider."""
        return self._decode(out, None, add=True)

    def _decode(self, out: Array, dtype: Any, add: bool) -> Array:
        xp, spec, blocks = array_namespace(self.buffer), self.spec, self.layout.blocks
        if out is not None and out.shape != self.shape:
            raise ValueError(f"out has shape {out.shape}, not {self.shape}")
        lines = None if out is None else _in_place(out, spec, (blocks.lines, blocks.length))
        direct = lines is not None
        if lines is None:
            lines = xp.empty((blocks.lines, blocks.length), np.float32)
            if add:
                lines[...] = to_lines(out, spec.granularity)
        self._decode_lines(lines, add)
        if direct:
            return out
        result = from_lines(lines, spec.granularity, self.shape)
        if out is None:
            return xp.ascontiguousarray(result.astype(dtype, copy=False)).reshape(self.shape)
        out[...] = result.astype(out.dtype, copy=False)
        return out

    def _decode_lines(self, lines: Array, add: bool) -> None:
        """The numbers, into (or with `add`, onto) the C-contiguous matrix of lines."""
        spec, size = self.spec, self.layout.blocks.size
        if spec.linear:
            packed, width = self.part("codes"), (spec.bits, spec.bias, spec.signed)
            kernels.decode_linear(packed, size, self.scales(), self.zeros(), *width, lines, add)
        else:
            codes = self.items("codes").reshape(lines.shape)
            kernels.decode_table(codes, size, self.scales(), self.levels(), lines, add)

    # -------------------------------------------------------------------------------------- by groups

    def slice(self, start: int, stop: int) -> QuantizedArray:
        """Groups from `start` to before `stop`, in the order of the lines: a vector of its own, copied.

        Raises
        ------
        ValueError
            If there are no such groups, if a shorter group would not be the last one, or if scales' parents would be
            cut through.
        """
        blocks, levels = self.layout.blocks, self.spec.scales.levels
        if not 0 <= start <= stop <= blocks.groups:
            raise ValueError(f"groups {start} to {stop} of {blocks.groups}")
        if blocks.length % blocks.size and start < stop and start // blocks.per_line != (stop - 1) // blocks.per_line:
            raise ValueError(f"a group among {start} to {stop} is shorter than {blocks.size}, and not the last of them")
        first, last = (_first_element(blocks, group) for group in (start, stop))
        at, scale = [(start, stop)], levels[-1]
        kinds = []
        for above in self.layout.above:
            kinds.append(_cut_out(above, *at[-1]))
            low, high = at[-1]
            at.append((low // above.size, -(-high // above.size)))
        for kind, level in zip(reversed(kinds), reversed(levels[:-1])):
            scale = Scales(level.format, kind, scale)
        spec = self.spec.replace(granularity=PerGroup(blocks.size), scale=scale)
        space = array_namespace(self.buffer).zeros(layout(spec, (last - first,)).nbytes, np.uint8)
        made = QuantizedArray(spec, last - first, space)
        made.put("codes", self.items("codes")[first:last])
        if not spec.symmetric:
            made.put("zeros", self.items("zeros")[start:stop])
        each = 2**spec.bits if spec.code == "kmeans" else 1
        for number, (low, high) in enumerate(at):
            made.put(f"scale{number}", self.items(f"scale{number}")[low * each : high * each])
        return made


def _first_element(blocks: Blocking, group: int) -> int:
    """The number of the first element of a group, in the order of the lines."""
    if group == blocks.groups:
        return blocks.elements
    line, place = divmod(group, blocks.per_line)
    return line * blocks.length + place * blocks.size


def _cut_out(above: Blocking, start: int, stop: int) -> Granularity:
    """How entries from `start` to before `stop` fall into the groups that they fell into as part of the whole."""
    if start >= stop or start // above.size == (stop - 1) // above.size:
        return PerTensor()
    if start % above.size or (above.length % above.size and above.lines > 1):
        raise ValueError(f"entries {start} to {stop} cut through groups of {above.size} that share a larger scale")
    return PerGroup(above.size)


def _aligned(numbers: Array) -> Array:
    """The same where a kernel can read it: a buffer from a wire may begin anywhere."""
    return np.require(numbers, requirements="A") if isinstance(numbers, np.ndarray) else numbers


def _in_place(out: Array, spec: QuantSpec, shape: tuple[int, int]) -> Array | None:
    """The matrix of lines that `out` itself is, if it is one: in order, of float32, and writable."""
    usual = (
        isinstance(spec.granularity, PerTensor)
        or out.ndim <= 1
        or (isinstance(spec.granularity, PerChannel) and spec.granularity.axis % out.ndim == 0)
        or (isinstance(spec.granularity, PerGroup) and spec.granularity.axis % out.ndim == out.ndim - 1)
    )
    fits = usual and out.dtype == np.float32 and out.flags.c_contiguous
    return out.reshape(shape) if fits else None
