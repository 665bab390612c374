"""Quantised array: codes, scales and zero points in one buffer that can be sent as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from quant import kernels
from quant.formats import as_float32, values
from quant.kernels import LinearCode, array_namespace
from quant.layout import BufferLayout, BufferPart, layout
from quant.scaling.codebook import stored_levels
from quant.scaling.scales import numbers_of, scale_values
from quant.spec.granularity import GroupBlocking, PerChannel, PerGroup, PerTensor, from_rows, shape_of, to_rows
from quant.spec.quant_spec import QuantSpec, Scales
from quant.types import Array


class QuantizedArray:
    """Codes, scales and zero points of an array in one contiguous buffer. Its size follows from spec and shape.

    Parameters
    ----------
    spec : QuantSpec
    shape : tuple of int, or int
        Shape of the original array.
    buffer : array of uint8, shape (nbytes,), optional
        C-contiguous, NumPy or CuPy. Kept, not copied. Zeros by default. ValueError for another length or dtype, or on
        a GPU if the items of scales would not be aligned.

    Attributes
    ----------
    layout : BufferLayout

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
        self.shape = shape_of(shape)
        self.layout: BufferLayout = layout(spec, self.shape)
        if buffer is None:
            buffer = np.zeros(self.layout.nbytes, np.uint8)
        if buffer.dtype != np.uint8 or buffer.shape != (self.layout.nbytes,) or not buffer.flags.c_contiguous:
            raise ValueError(
                f"buffer: expected {self.layout.nbytes} contiguous uint8 for {spec} of shape {self.shape}, "
                f"found shape {buffer.shape} and type {buffer.dtype}"
            )
        # CUDA reads of a scale fault at an address that is no multiple of its size
        word = max(part.dtype.itemsize for part in self.layout.parts)
        if buffer.size and not isinstance(buffer, np.ndarray) and buffer.data.ptr % word:
            raise ValueError(
                f"buffer on a GPU: expected an address that is a multiple of {word}, for the scales of {spec}"
            )
        self.buffer = buffer

    # -------------------------------------------------------------------------------------- size and wire

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.layout.elements

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, with scales and zero points."""
        return self.layout.nbytes

    @property
    def bits_per_element(self) -> float:
        """Bits per element, with scales and zero points."""
        return self.layout.bits_per_element

    @property
    def groups(self) -> int:
        """Number of groups. The elements of a group share a scale."""
        return self.layout.blocks.groups

    def to_wire(self) -> Array:
        """Buffer with codes, scales and zero points, to be sent: uint8, shape (nbytes,), not copied."""
        return self.buffer

    @classmethod
    def from_wire(cls, buffer: Array, spec: QuantSpec, shape: int | tuple[int, ...]) -> QuantizedArray:
        """Quantised array of this spec and shape in a received buffer. The buffer is kept, not copied."""
        return cls(spec, shape, buffer)

    def __repr__(self) -> str:
        return f"QuantizedArray({self.spec}, shape={self.shape}, {self.nbytes} bytes)"

    # -------------------------------------------------------------------------------------- parts

    @property
    def _group_shape(self) -> tuple[int, int]:
        """(rows, groups per row): shape of arrays with one value per group."""
        return self.layout.blocks.rows, self.layout.blocks.per_row

    def _part(self, name: str) -> tuple[BufferPart, Array]:
        part = next((part for part in self.layout.parts if part.name == name), None)
        if part is None:
            raise KeyError(f"{self.spec} has no {name}")
        return part, self.buffer[part.start : part.start + part.nbytes].view(part.dtype)

    def part(self, name: str) -> Array:
        """View of a part of the buffer as stored: `scale0`, `scale1` ..., `zeros` or `codes`. Otherwise KeyError."""
        return self._part(name)[1]

    def items(self, name: str) -> Array:
        """Items of a part of the buffer, one per array entry: unpacked to uint8 if packed, else a view."""
        part, raw = self._part(name)
        if part.bits >= 8:
            return raw
        items = array_namespace(raw).empty(part.items, np.uint8)
        kernels.unpack(raw, part.bits, items)
        return items

    def put(self, name: str, items: Array) -> None:
        """Store `items` as the part of this name in the buffer, packed if they have fewer than 8 bits."""
        part, raw = self._part(name)
        if part.bits < 8:
            kernels.pack(items.reshape(-1), part.bits, raw)
        else:
            raw[...] = items.reshape(-1)

    def scales(self) -> Array:
        """Scale of each group, all levels multiplied: float32, shape (rows, groups per row). 1 for kmeans."""
        levels = self.spec.scales.levels
        if self.spec.code == "kmeans":
            return array_namespace(self.buffer).ones(self._group_shape, np.float32)
        last = len(levels) - 1
        outer = _aligned(numbers_of(self.items(f"scale{last}"), levels[last].format))
        for i, blocks in reversed(list(enumerate(self.layout.parent_levels))):
            numbers = array_namespace(outer).empty((blocks.rows, blocks.length), np.float32)
            table = array_namespace(outer).asarray(scale_values(levels[i].format))
            about = self.part(f"scale{i}"), levels[i].bits, blocks.size, outer.reshape(blocks.rows, blocks.per_row)
            kernels.decode_table(*about, table, numbers, False)
            outer = numbers
        return outer.reshape(self._group_shape)

    def levels(self) -> Array:
        """Table of the value of every code before scaling: float32, shape (2^bits,). ValueError for linear codes.

        For kmeans a table per group: shape (rows, groups per row, 2^bits).
        """
        if self.spec.code == "kmeans":
            numbers = _aligned(numbers_of(self.items("scale0"), self.spec.scales.format))
            return numbers.reshape(*self._group_shape, 2**self.spec.bits)
        if self.spec.linear:
            raise ValueError("linear codes have no table of levels")
        return array_namespace(self.buffer).asarray(values(self.spec.code))

    def level_index(self) -> Array:
        """Index of each element's level among all of `levels`, flattened: int64, in the array's shape (kmeans)."""
        blocks, tables = self.layout.blocks, self._expect_kmeans()
        xp = array_namespace(self.buffer)
        group = xp.arange(blocks.rows)[:, None] * blocks.per_row + xp.arange(blocks.length) // max(blocks.size, 1)
        rows = self.items("codes").reshape(blocks.rows, blocks.length) + group * tables.shape[-1]
        return from_rows(rows, self.spec.granularity, self.shape)

    def with_levels(self, levels: Array) -> QuantizedArray:
        """Copy with other levels, as many as `levels` has, rounded to the format that stores them. Only for kmeans.

        ValueError for levels that are not finite in that format.
        """
        table, form = self._expect_kmeans(), self.spec.scales.format
        levels = as_float32("levels", array_namespace(self.buffer).asarray(levels)).reshape(table.shape)
        made = QuantizedArray(self.spec, self.shape, self.buffer.copy())
        made.put("scale0", stored_levels(levels, form))
        return made

    def _expect_kmeans(self) -> Array:
        if self.spec.code != "kmeans":
            raise ValueError(f"expected codes of kmeans, found {self.spec}")
        return self.levels()

    def zeros(self) -> Array | None:
        """Zero point of each group: float32, shape (rows, groups per row). None for symmetric codes."""
        if self.spec.symmetric:
            return None
        items = self.items("zeros")
        if self.spec.zero != "integer":
            return _aligned(numbers_of(items, self.spec.zero)).reshape(self._group_shape)
        signed = self.spec.signed and not self.spec.bias
        numbers = (items.view(np.int8) if signed else items).astype(np.float32) - np.float32(self.spec.bias)
        return numbers.reshape(self._group_shape)

    def integers(self) -> Array:
        """Codes in the array's shape: q as int8 or uint8, bits of small floats, or indices into the table."""
        codes, blocks = self.items("codes"), self.layout.blocks
        if self.spec.linear and self.spec.signed:
            codes = (codes - np.uint8(self.spec.bias)).view(np.int8)
        return from_rows(codes.reshape(blocks.rows, blocks.length), self.spec.granularity, self.shape)

    # -------------------------------------------------------------------------------------- decoding

    def dequantize(self, out: Array = None, dtype: Any = np.float32) -> Array:
        """Decode to floating-point numbers: a new array of `dtype`, or `out`.

        Parameters
        ----------
        out : array of this shape, optional
            Destination, of any floating-point dtype, writable. TypeError or ValueError for others.
        dtype : dtype
            Dtype of the result if there is no `out`. TypeError unless of floating-point numbers.
        """
        _expect_floats("dtype", np.dtype(dtype))
        return self._decode(out, dtype, add=False)

    def add_to(self, out: Array) -> Array:
        """Add the decoded values to `out` in place, in float32 or in a wider dtype of `out`, and return `out`.

        TypeError or ValueError unless `out` is a writable array of floating-point numbers of this shape.
        """
        return self._decode(out, None, add=True)

    def _decode(self, out: Array, dtype: Any, add: bool) -> Array:
        xp, spec, blocks = array_namespace(self.buffer), self.spec, self.layout.blocks
        if out is not None:
            _expect_floats("out", out.dtype)
            if out.shape != self.shape:
                raise ValueError(f"out: expected shape {self.shape}, found {out.shape}")
            if not writable(out):
                raise ValueError("out: expected a writable array, found a read-only one")
        if add and np.result_type(out.dtype, np.float32) != np.float32:  # a sum in float32 would lose digits
            out[...] = (out + self.dequantize()).astype(out.dtype, copy=False)
            return out
        shape = blocks.rows, blocks.length
        if out is not None and _has_rows(out, spec):
            self._decode_rows(out.reshape(shape), add)
            return out
        rows = to_rows(out, spec.granularity).astype(np.float32) if add else xp.empty(shape, np.float32)
        self._decode_rows(rows, add)
        result = from_rows(rows, spec.granularity, self.shape)
        if out is None:
            return xp.ascontiguousarray(result.astype(dtype, copy=False)).reshape(self.shape)
        out[...] = result.astype(out.dtype, copy=False)
        return out

    def _decode_rows(self, rows: Array, add: bool) -> None:
        """Write (or with `add`, add) the decoded values to a C-contiguous matrix of rows."""
        spec, size = self.spec, self.layout.blocks.size
        if spec.linear:
            code = LinearCode.of(spec)
            kernels.decode_linear(self.part("codes"), size, self.scales(), self.zeros(), code, rows, add)
        else:
            kernels.decode_table(self.part("codes"), spec.bits, size, self.scales(), self.levels(), rows, add)

    # -------------------------------------------------------------------------------------- by groups

    def slice(self, start: int, stop: int) -> QuantizedArray:
        """Quantised vector of the groups `start` to `stop` (exclusive), counted in row order. A copy.

        Groups have the length of the first, so that only the last may be shorter. The same holds for groups of scales
        that share a parent's scale. ValueError for lengths that differ in any other way.
        """
        blocks, levels = self.layout.blocks, self.spec.scales.levels
        if not 0 <= start <= stop <= blocks.groups:
            raise ValueError(f"groups {start} to {stop} of {blocks.groups}")
        first, last = blocks.first_element(start), blocks.first_element(stop)
        size = _common_size(blocks, first, last)
        if size is None:
            raise ValueError(f"a group among {start} to {stop} is shorter than {blocks.size}, and not the last of them")
        ranges, kinds = [(start, stop)], []
        for parents in self.layout.parent_levels:
            low, high = ranges[-1]
            shared = _common_size(parents, low, high)
            if shared is None:
                raise ValueError(
                    f"entries {low} to {high} cut through groups of {min(parents.size, parents.length)} "
                    "that share a larger scale"
                )
            low, high = (parents.group_of(low), parents.group_of(high - 1) + 1) if low < high else (0, 0)
            ranges.append((low, high))
            kinds.append(PerGroup(shared) if high - low > 1 else PerTensor())
        scale = levels[-1]
        for kind, level in zip(reversed(kinds), reversed(levels[:-1])):
            # the slice has its own granularities: its groups start at 0 on every level
            scale = Scales(level.format, kind, scale)
        spec = self.spec.replace(granularity=PerGroup(size), scale=scale)
        buffer = array_namespace(self.buffer).zeros(layout(spec, (last - first,)).nbytes, np.uint8)
        sliced = QuantizedArray(spec, last - first, buffer)
        sliced.put("codes", self.items("codes")[first:last])
        if not spec.symmetric:
            sliced.put("zeros", self.items("zeros")[start:stop])
        each = 2**spec.bits if spec.code == "kmeans" else 1
        for number, (low, high) in enumerate(ranges):
            sliced.put(f"scale{number}", self.items(f"scale{number}")[low * each : high * each])
        return sliced


def _common_size(blocks: GroupBlocking, first: int, last: int) -> int | None:
    """Group size with which elements `first` to `last` (exclusive), cut out as a vector, keep their groups.

    None if there is none: all groups but the last must have one length, and the last must not be longer.
    """
    if first >= last or blocks.group_of(first) == blocks.group_of(last - 1):
        return blocks.size
    later = np.arange(blocks.group_of(first) + 1, blocks.group_of(last - 1) + 1)
    lengths = np.diff(blocks.first_element(later), prepend=first, append=last)
    return int(lengths[0]) if (lengths[1:-1] == lengths[0]).all() and lengths[-1] <= lengths[0] else None


def _aligned(numbers: Array) -> Array:
    """`numbers`, or an aligned copy if they are not aligned: a received buffer may begin at any address."""
    return np.require(numbers, requirements="A") if isinstance(numbers, np.ndarray) else numbers


def _has_rows(out: Array, spec: QuantSpec) -> bool:
    """True if rows can be decoded into `out` directly: float32, C-contiguous, its axes in the order of `to_rows`."""
    kind = spec.granularity
    in_order = (
        isinstance(kind, PerTensor)
        or out.ndim <= 1
        or kind.axis % out.ndim == (0 if isinstance(kind, PerChannel) else out.ndim - 1)
    )
    return bool(in_order and out.dtype == np.float32 and out.flags.c_contiguous)


def _expect_floats(name: str, dtype: np.dtype) -> None:
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise TypeError(f"{name}: expected floating-point numbers, found {dtype}")


def writable(array: Array) -> bool:
    """True if elements can be written. Always True on a GPU."""
    return bool(getattr(array.flags, "writeable", True))
