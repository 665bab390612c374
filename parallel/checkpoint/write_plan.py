"""Assignment of a checkpoint's tensors to the ranks that write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from parallel.checkpoint.safetensors_writer import TensorEntry
from parallel.checkpoint.step_folders import FAMILIES, CheckpointError
from parallel.checkpoint.tensor_slices import TensorSlice

OPTIONAL = "feedback"
"""Family of tensors that a checkpoint or a run may lack."""


class SlicePart(NamedTuple):
    """Elements of a tensor that a rank contributes."""

    rank: int
    start: int
    size: int


class PlannedTensor(NamedTuple):
    """Tensor, the ranks that hold its elements, and the rank that writes it."""

    name: str
    entry: TensorEntry
    parts: tuple[SlicePart, ...]
    writer: int


def plan(comm: MPI.Intracomm, held: Sequence[TensorSlice]) -> dict[str, list[PlannedTensor]]:
    """Assign tensors to writing ranks, by family and with about equal bytes for each rank. Collective.

    CheckpointError if ranks disagree on a tensor, or some of its elements are on no rank or on two.
    """
    parts: dict[str, list[SlicePart]] = {}
    entries: dict[str, TensorEntry] = {}
    mine = [(one.name, TensorEntry(tuple(one.shape), one.array.dtype), one.start, len(one.array)) for one in held]
    for rank, some in enumerate(comm.allgather(mine)):
        for name, entry, start, size in some:
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
        writer = load.index(min(load))
        load[writer] += entries[name].nbytes
        families[name.partition("/")[0]].append(PlannedTensor(name, entries[name], tuple(pieces), writer))
    return {family: some for family, some in families.items() if some or family != OPTIONAL}


def natural_key(name: str) -> list[Any]:
    """Sort key that puts 10 after 9."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]


def within_family(name: str) -> str:
    """Tensor name in its family's files."""
    return name.partition("/")[2]
