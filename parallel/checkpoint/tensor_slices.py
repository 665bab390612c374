"""Slices of weights and optimizer state that ranks hold, and the assignment of whole tensors to writing ranks."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from parallel.checkpoint.step_folders import FAMILIES, CheckpointError
from parallel.nn.flat_params import Span
from parallel.nn.operator import ArraySpec, Parameter
from parallel.nn.placement import TensorCut
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.runtime.vector_memory import to_host
from quant.types import Array

OPTIONAL = "feedback"
"""Family of tensors that a checkpoint or a run may lack."""

BUFFERS = "buffers"
"""Family of tensors of models with such state."""


class TensorSlice(NamedTuple):
    """Contiguous elements of a flattened tensor that this rank holds, as a view of its memory.

    Attributes
    ----------
    name : str
        ``"model/<parameter>"``, ``"optimizer/<state>/<parameter>"``, ``"buffers/<buffer>"``, or
        ``"feedback/<state>/<parameter>"``.
    shape, start : tuple of int, int
        Shape of the whole tensor, and first element in the flattened tensor.
    array : 1-D array
        View of the rank's memory, float32 or float64, or of a buffer: assigning to its elements changes the state.
    mine : bool
        True if checkpoints take it from this rank. Every element is in one such slice, on one rank.
    cut : TensorCut or None
        If the array is of a part of the tensor: which. The flattened tensor then has its parts one after another.
    terms : int
        If above 0, the tensor is one of so many terms of a sum, with its number in the name:
        ``"feedback/lost/3/<parameter>"``. Terms of a checkpoint with more are added to those of lower numbers.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    array: Array
    mine: bool
    cut: TensorCut | None = None
    terms: int = 0

    def elements_of(self, whole: np.ndarray) -> np.ndarray:
        """The elements of the slice, from the whole tensor in its shape."""
        part, start = (whole, self.start) if self.cut is None else (self.cut.take(whole), self.start - self.cut.offset)
        return part.reshape(-1)[start : start + len(self.array)]

    def sources(self, entries: Mapping[str, ArraySpec]) -> list[str]:
        """Names of the tensors of a checkpoint whose sum the slice is: its own, if there in this shape, or terms."""
        names: Iterable[str] = [self.name]
        if self.terms:
            family, kind, number, rest = self.name.split("/", 3)
            every = (f"{family}/{kind}/{term}/{rest}" for term in count(int(number), self.terms))
            names = takewhile(entries.__contains__, every)
        wanted = ArraySpec(tuple(self.shape), np.dtype(self.array.dtype))
        return [name for name in names if len(self.array) and entries.get(name) == wanted]


def tensor_slices(pieces: Sequence[OptimizerSpan], mine: Sequence[Span]) -> Iterator[TensorSlice]:
    """Slices of weights and optimizer state in this rank's `pieces`; checkpoints take those inside the spans `mine`."""
    for piece in pieces:
        vectors = {"model": piece.weights, **{f"optimizer/{name}": view for name, view in piece.state.items()}}
        for place in piece.places:
            for kind, vector in vectors.items():
                for start, stop, write in _divided(place.unpadded.intersection(piece.span), mine):
                    array = vector[start - piece.span.start : stop - piece.span.start]
                    yield slice_of(place.parameter, kind, start - place.span.start, array, write)


def slice_of(parameter: Parameter, kind: str, start: int, array: Array, mine: bool) -> TensorSlice:
    """Slice of values like a parameter's, from its element `start` on, with the name of its logical tensor."""
    cut = parameter.cut
    at = start if cut is None else start + cut.offset
    return TensorSlice(f"{kind}/{parameter.name}", parameter.logical.shape, at, array, mine, cut)


def taken_once(slices: Iterable[TensorSlice], axis: Any) -> Iterator[TensorSlice]:
    """Slices of which checkpoints take every element from the first rank of `axis` (None: no axis) that has it."""
    rank = 0 if axis is None else axis.rank
    for piece in slices:
        first = 0 if piece.cut is None else piece.cut.holders[0]
        yield piece if rank == first else piece._replace(mine=False)


def _divided(span: Span, mine: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """Split a span at the bounds of the spans `mine`: yields (start, stop, True if inside one of them)."""
    cuts = {span.start, span.stop} | {cut for part in mine for cut in part if span.start < cut < span.stop}
    for start, stop in pairwise(sorted(cuts)):
        yield start, stop, any(part.start <= start and stop <= part.stop for part in mine)


class SlicePart(NamedTuple):
    """Part of a flattened tensor that `rank` holds and sends to the writer: `size` elements from `start` on."""

    rank: int
    start: int
    size: int


class PlannedTensor(NamedTuple):
    """Tensor of a checkpoint, the parts that ranks hold, and the rank that writes the whole tensor."""

    name: str
    entry: ArraySpec
    parts: tuple[SlicePart, ...]
    writer: int
    cuts: frozenset[TensorCut] = frozenset()

    def ordered(self, values: np.ndarray) -> np.ndarray:
        """The flattened tensor in its own order, from its parts one after another."""
        if not self.cuts:
            return values
        whole = np.empty(self.entry.shape, values.dtype)
        for cut in self.cuts:
            size = math.prod(cut.local_shape)
            cut.put(values[cut.offset : cut.offset + size].reshape(cut.local_shape), whole)
        return whole.reshape(-1)


def plan(comm: MPI.Intracomm, held: Sequence[TensorSlice]) -> dict[str, list[PlannedTensor]]:
    """Assign each tensor to a rank that writes it, with about equal bytes per rank; lists by tensor family. Collective.

    CheckpointError if ranks disagree on a tensor, or some of its elements are on no rank or on two.
    """
    parts: dict[str, list[SlicePart]] = {}
    entries: dict[str, ArraySpec] = {}
    cuts: dict[str, set[TensorCut]] = {}
    mine = [
        (one.name, ArraySpec(tuple(one.shape), one.array.dtype), one.start, len(one.array), one.cut) for one in held
    ]
    for rank, some in enumerate(comm.allgather(mine)):
        for name, entry, start, size, cut in some:
            if cut is not None:
                cuts.setdefault(name, set()).add(cut)
            parts.setdefault(name, []).append(SlicePart(rank, start, size))
            if entries.setdefault(name, entry) != entry:
                raise CheckpointError(f"{name}: rank {rank} has {entry}, another rank {entries[name]}")
    families: dict[str, list[PlannedTensor]] = {family: [] for family in FAMILIES}
    load = [0] * comm.Get_size()
    for name in sorted(entries, key=natural_key):
        pieces, end = sorted(parts[name], key=lambda part: part.start), 0
        for part in pieces:
            if part.start != end:
                raise CheckpointError(f"{name}: elements from {min(end, part.start)} on are on no rank, or on two")
            end += part.size
        if end != math.prod(entries[name].shape):
            raise CheckpointError(f"{name}: elements from {end} on are on no rank")
        writer = load.index(min(load))  # the same on all ranks, which have the same table
        load[writer] += entries[name].nbytes
        families[name.partition("/")[0]].append(
            PlannedTensor(name, entries[name], tuple(pieces), writer, frozenset(cuts.get(name, ())))
        )
    return {family: some for family, some in families.items() if some or family not in (OPTIONAL, BUFFERS)}


def whole_tensors(comm: MPI.Intracomm, slices: Sequence[TensorSlice]) -> dict[str, np.ndarray]:
    """Whole tensors by name on all ranks, from the slices of all. Collective; CheckpointError as `plan`."""
    held = [piece for piece in slices if piece.mine and len(piece.array)]
    mine = {(piece.name, piece.start): piece.array for piece in held}
    found = {}
    for tensor in (tensor for planned in plan(comm, held).values() for tensor in planned):
        values = np.empty(math.prod(tensor.entry.shape), tensor.entry.dtype)
        for part in tensor.parts:  # in the plan's order, equal on all ranks: Bcast is collective
            here = values[part.start : part.start + part.size]
            if part.rank == comm.Get_rank():
                here[...] = to_host(mine[tensor.name, part.start])
            comm.Bcast(here, part.rank)
        found[tensor.name] = tensor.ordered(values).reshape(tensor.entry.shape)
    return found


def natural_key(name: str) -> list[Any]:
    """Sort key that orders numbers in names by value: "layer9" before "layer10"."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]


def within_family(name: str) -> str:
    """Tensor name without its family prefix: "model/w" becomes "w"."""
    return name.partition("/")[2]
