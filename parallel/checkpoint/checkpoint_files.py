"""Checkpoints without a layout: whole tensors by name, for any number of ranks and any sharding.

A checkpoint is a folder:

    step-000000200/
        model-00001-of-00002.safetensors  ...      weights, as the optimiser has them: float32 or float64
        model.safetensors.index.json               in which file each of them is
        optimizer-00001-of-00002.safetensors  ...  the optimiser's state, ``m/<parameter>`` and so on
        optimizer.safetensors.index.json
        feedback-...                               residuals of gradient compression
        state.json                                 all that is no tensor; size and SHA-256 of every other file

All ranks write it, each its own share of whole tensors, which it gathers one at a time, into a folder with another
name. When everything is on the disk, rank 0 renames that folder. So a folder with the name of a checkpoint is
complete, and a crash leaves at most a folder that begins with a dot, which the next checkpoint clears away
(`parallel.checkpoint.step_folders`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from array_api_compat import array_namespace
from mpi4py import MPI

from parallel.checkpoint.safetensors_writer import SafetensorsReader, SafetensorsWriter, TensorEntry, digest_of
from parallel.checkpoint.step_folders import (
    FAMILIES,
    FILE,
    FORMAT,
    STATE,
    CheckpointError,
    NotRemoved,
    all_in,
    clear_unfinished,
    name_of,
    remove_old,
    step_of,
    unfinished,
)
from parallel.runtime.collective_errors import collective_call, raise_on_all
from parallel.runtime.validation import expect_integer
from parallel.runtime.vector_memory import to_host

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "NotRemoved",
    "TensorSliceLike",
    "all_in",
    "latest",
    "name_of",
    "plan",
    "save",
    "step_of",
    "tensors_in",
]

OPTIONAL = "feedback"
"""Family of tensors that a training may lack, or ignore."""
KINDS = {"step": int, "facts": dict, "files": dict}
"""Required fields of the state file, besides the format and its checksum."""
TAG = 1


class TensorSliceLike(Protocol):
    """Elements of a logical tensor in this rank's memory, as `Engine.tensor_slices` yields them."""

    @property
    def name(self) -> str:
        """Tensor name: ``model/...`` or ``optimizer/...``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def start(self) -> int:
        """First element in the flattened tensor."""

    @property
    def array(self) -> Any:
        """A 1-D view."""

    @property
    def mine(self) -> bool:
        """True if this rank writes it."""


# ---------------------------------------------------------------------------------------------- by name


def latest(comm: MPI.Intracomm, directory: Path) -> Path | None:
    """The newest checkpoint in a directory as rank 0 sees it, or None. Collective."""
    found = collective_call(comm, lambda: all_in(directory), f"cannot look into {directory}", CheckpointError, 0)
    return found[-1] if found else None


# ---------------------------------------------------------------------------------------------- writing


class SlicePart(NamedTuple):
    """Elements of a tensor that a rank contributes."""

    rank: int
    start: int
    size: int


@dataclass(frozen=True)
class CheckpointPlan:
    """A tensor, the ranks that hold its elements, and the rank that writes it."""

    name: str
    entry: TensorEntry
    parts: tuple[SlicePart, ...]
    writer: int


def save(
    comm: MPI.Intracomm,
    directory: Path,
    step: int,
    slices: Iterable[TensorSliceLike],
    facts: Mapping[str, Any],
    *,
    keep: int = 3,
) -> Path:
    """Write a checkpoint, all of it or nothing. Collective.

    Parameters
    ----------
    comm
        The ranks that hold the tensors.
    directory : Path
        Where checkpoints go, seen by all ranks; made if need be.
    step : int
        Steps that were made.
    slices
        What this rank holds of the tensors. Every element is one rank's to write.
    facts : mapping
        Whatever else is to be kept, the same on all ranks; becomes JSON.
    keep : int
        How many checkpoints to keep, this one among them; older ones are removed when it is there.

    Returns
    -------
    Path
        The checkpoint.

    Raises
    ------
    CheckpointError
        On all ranks, if any of them cannot do its part; those that were there still are. `NotRemoved`, if the new one
        is there as well.
    """
    if keep < 1:
        raise ValueError(f"keep: expected 1 or more, found {keep}")
    held = [piece for piece in slices if piece.mine and len(piece.array)]
    target = directory / name_of(step)
    trouble = f"checkpoint {target} was not written"

    with contextlib.ExitStack() as stack:
        folder = collective_call(comm, lambda: _begin(target, stack), trouble, CheckpointError, 0)
        collective_call(comm, lambda: _see(folder), trouble, CheckpointError)
        tensors = plan(comm, held)
        files: dict[str, list[Any]] = {}
        for family, planned in tensors.items():
            mine, problem = _write(comm, folder, family, planned, held)
            raise_on_all(comm, problem, trouble, CheckpointError)
            files |= {name: about for one in comm.allgather(mine) for name, about in one.items()}
        collective_call(comm, lambda: _finish(folder, target, step, tensors, files, facts), trouble, CheckpointError, 0)
    trouble = f"{target} is there, but older ones cannot be removed"
    collective_call(comm, lambda: remove_old(directory, keep), trouble, NotRemoved, 0)
    return target


def plan(comm: MPI.Intracomm, held: Sequence[TensorSliceLike]) -> dict[str, list[CheckpointPlan]]:
    """Assign tensors to writing ranks, by family and with about equal bytes for each rank. Collective.

    Raises
    ------
    CheckpointError
        If ranks do not agree on a tensor, or some of its elements are nobody's.
    """
    parts: dict[str, list[SlicePart]] = {}
    entries: dict[str, TensorEntry] = {}
    mine = [(one.name, tuple(one.shape), np.dtype(one.array.dtype).str, one.start, len(one.array)) for one in held]
    for rank, some in enumerate(comm.allgather(mine)):
        for name, shape, dtype, start, size in some:
            parts.setdefault(name, []).append(SlicePart(rank, start, size))
            if entries.setdefault(name, TensorEntry(shape, np.dtype(dtype))) != TensorEntry(shape, np.dtype(dtype)):
                raise CheckpointError(f"{name}: rank {rank} has {dtype} {shape}, another rank {entries[name]}")
    families: dict[str, list[CheckpointPlan]] = {family: [] for family in FAMILIES}
    load = [0] * comm.Get_size()
    for name in sorted(entries, key=_natural):
        pieces, end = sorted(parts[name], key=lambda part: part.start), 0
        for part in pieces:
            if part.start != end:
                raise CheckpointError(f"{name}: elements from {min(end, part.start)} on are on no rank, or on two")
            end += part.size
        if end != math.prod(entries[name].shape):
            raise CheckpointError(f"{name}: elements from {end} on are on no rank")
        writer = load.index(min(load))
        load[writer] += entries[name].nbytes
        families[name.partition("/")[0]].append(CheckpointPlan(name, entries[name], tuple(pieces), writer))
    return {family: some for family, some in families.items() if some or family != OPTIONAL}


def _natural(name: str) -> list[Any]:
    """Sort key that puts 10 after 9."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]


def _begin(target: Path, stack: contextlib.ExitStack) -> Path:
    """Make an empty folder under a temporary name, and remove those of crashed runs."""
    folder = stack.enter_context(unfinished(target))
    clear_unfinished(target.parent)
    return folder


def _see(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there, which rank 0 has made: all ranks must share the directory")


def _file_names(family: str, tensors: Sequence[CheckpointPlan]) -> dict[int, str]:
    """File name of each rank that writes one."""
    writers = sorted({tensor.writer for tensor in tensors})
    count = len(writers)
    return {writer: f"{family}-{at:05d}-of-{count:05d}.safetensors" for at, writer in enumerate(writers, 1)}


def _inner(name: str) -> str:
    """A tensor's name within its family's files."""
    return name.partition("/")[2]


def _write(
    comm: MPI.Intracomm, folder: Path, family: str, tensors: Sequence[CheckpointPlan], held: Sequence[TensorSliceLike]
) -> tuple[dict[str, list[Any]], Exception | None]:
    """Gather this rank's tensors one after another and write them: {file: (bytes, SHA-256)}, and what went wrong.

    All ranks go through the same list, so nobody waits in a circle; a rank that cannot write goes on to receive.
    """
    rank, names = comm.Get_rank(), _file_names(family, tensors)
    mine = {(piece.name, piece.start): piece.array for piece in held}
    writer, problem = None, None
    if rank in names:
        entries = {_inner(tensor.name): tensor.entry for tensor in tensors if tensor.writer == rank}
        try:
            writer = SafetensorsWriter(folder / names[rank], entries)
        except OSError as error:
            problem = error
    for tensor in tensors:
        if tensor.writer != rank:
            for part in tensor.parts:
                if part.rank == rank:
                    comm.Send(to_host(mine[tensor.name, part.start]), tensor.writer, TAG)
            continue
        whole = np.empty(math.prod(tensor.entry.shape), tensor.entry.dtype)
        for part in tensor.parts:
            here = whole[part.start : part.start + part.size]
            if part.rank == rank:
                here[...] = to_host(mine[tensor.name, part.start])
            else:
                comm.Recv(here, part.rank, TAG)
        if writer is not None and problem is None:
            try:
                writer.add(whole)
            except OSError as error:
                problem = error
    if writer is None:
        return {}, problem
    try:
        writer.close(sync=problem is None)
    except OSError as error:
        problem = problem or error
    return {names[rank]: [writer.size, writer.digest]}, problem


def _finish(
    folder: Path,
    target: Path,
    step: int,
    tensors: Mapping[str, Sequence[CheckpointPlan]],
    files: dict[str, list[Any]],
    facts: Mapping[str, Any],
) -> None:
    """Write indices and the state file, and rename the folder: then the checkpoint exists."""
    for family, some in tensors.items():
        names = _file_names(family, some)
        index = {
            "metadata": {"total_size": sum(tensor.entry.nbytes for tensor in some)},
            "weight_map": {_inner(tensor.name): names[tensor.writer] for tensor in some},
        }
        name = f"{family}.safetensors.index.json"
        _put(folder / name, json.dumps(index, indent=1))
        files[name] = [*digest_of(folder / name)]
    state = {"format": FORMAT, "step": step, "facts": facts, "files": dict(sorted(files.items()))}
    state["sha256"] = _seal(state)
    _put(folder / STATE, json.dumps(state, indent=1))
    _sync(folder)
    folder.rename(target)
    _sync(target.parent)


def _seal(state: Mapping[str, Any]) -> str:
    """Checksum of state.json without the checksum."""
    rest = {name: value for name, value in state.items() if name != "sha256"}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _put(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flush a folder's names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------- reading


class Checkpoint:
    """A checkpoint that was found whole: every file is as long as it was and has the same checksum. Collective.

    Parameters
    ----------
    comm
        Any ranks; they need not be as many as those that wrote it.
    path : Path

    Attributes
    ----------
    step : int
        Steps that were made.
    facts : dict
        What `save` was given.
    entries : dict of str -> Entry
        All tensors.

    Raises
    ------
    CheckpointError
        On all ranks, if it is damaged or none of ours.
    """

    def __init__(self, comm: MPI.Intracomm, path: Path):
        self._comm, self.path = comm, path
        trouble = f"{path} cannot be used"
        state = collective_call(comm, lambda: _state(path), trouble, CheckpointError, 0)
        self.step: int = state["step"]
        self.facts: dict[str, Any] = state["facts"]
        names = sorted(state["files"])
        mine = names[comm.Get_rank() :: comm.Get_size()]
        found = collective_call(
            comm,
            lambda: {name: _verified(path / name, *state["files"][name]) for name in mine},
            trouble,
            CheckpointError,
        )
        self.entries: dict[str, TensorEntry] = {}
        self._file_of: dict[str, str] = {}
        for file, entries in sorted(item for some in comm.allgather(found) for item in some.items()):
            family = file.partition("-")[0]
            self.entries |= {f"{family}/{name}": entry for name, entry in entries.items()}
            self._file_of |= {f"{family}/{name}": file for name in entries}

    def fit(self, slices: Iterable[TensorSliceLike]) -> None:
        """See whether it holds exactly the tensors that these are slices of. Collective.

        Raises
        ------
        CheckpointError
            On all ranks; it names tensors that differ.
        """
        wanted: dict[str, TensorEntry] = {}
        for piece in slices:
            if len(piece.array):
                wanted[piece.name] = TensorEntry(tuple(piece.shape), np.dtype(piece.array.dtype))
        for others in self._comm.allgather(wanted):
            wanted |= others
        told = []
        for name in sorted(wanted.keys() | self.entries.keys(), key=_natural):
            here, there = wanted.get(name), self.entries.get(name)
            if here != there and not (name.startswith(OPTIONAL) and None in (here, there)):
                told.append(f"{name} is {_described(there)} in the checkpoint and {_described(here)} here")
        if told:
            more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
            raise CheckpointError(f"{self.path} is of another model or optimiser: {'; '.join(told[:3])}{more}")

    def restore(self, slices: Iterable[TensorSliceLike]) -> None:
        """Copy what it holds into the slices, once it is known to `fit` all ranks. Collective.

        Stretches of the family `OPTIONAL` that it does not hold stay as they are.

        The holder of the slices may have to be told, as by `parallel.engine.data_parallel_engine.Engine.refresh`.
        """
        slices = list(slices)
        self.fit(slices)
        collective_call(self._comm, lambda: self._copy(slices), f"{self.path} can no longer be read", CheckpointError)

    def tensor(self, name: str) -> np.ndarray:
        """A whole tensor of `entries`, on the calling rank."""
        entry = self.entries[name]
        values = SafetensorsReader(self.path / self._file_of[name]).read(_inner(name), 0, math.prod(entry.shape))
        return values.reshape(entry.shape)

    def _copy(self, slices: Iterable[TensorSliceLike]) -> None:
        readers: dict[str, SafetensorsReader] = {}
        for piece in slices:
            size = len(piece.array)
            if size and piece.name in self._file_of:
                file = self._file_of[piece.name]
                reader = readers.get(file) or readers.setdefault(file, SafetensorsReader(self.path / file))
                values = reader.read(_inner(piece.name), piece.start, size)
                piece.array[...] = array_namespace(piece.array).asarray(values)


def tensors_in(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of a checkpoint by name, in their order, one at a time; as they are, unchecked."""
    readers = [(file.name.partition("-")[0], SafetensorsReader(file)) for file in path.glob("*.safetensors")]
    everything = {f"{family}/{name}": reader for family, reader in readers for name in reader.entries}
    for name in sorted(everything, key=_natural):
        entry = everything[name].entries[_inner(name)]
        yield name, everything[name].read(_inner(name), 0, math.prod(entry.shape)).reshape(entry.shape)


def _described(entry: TensorEntry | None) -> str:
    return "missing" if entry is None else f"{entry.dtype} of shape {entry.shape}"


def _state(path: Path) -> dict[str, Any]:
    """Validated contents of state.json."""
    if not path.is_dir():
        raise ValueError("there is no such folder")
    if not (path / STATE).is_file():
        raise ValueError(f"it has no {STATE}, so it is no checkpoint")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{STATE} is damaged: {error}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(f"{STATE} is none of ours")
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']!r}, and {FORMAT!r} is what this version reads")
    if state.get("sha256") != _seal(state):
        raise ValueError(f"{STATE} is damaged: its checksum is wrong")
    for name, kind in KINDS.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"{STATE} is none of ours: {name} is {state.get(name)!r}")
    expect_integer(state, "step")
    for name, about in state["files"].items():
        if not FILE.fullmatch(name) or not isinstance(about, list) or list(map(type, about)) != [int, str]:
            raise ValueError(f"{STATE} is none of ours: of {name!r} it says {about!r}")
    return state


def _verified(path: Path, size: int, digest: str) -> dict[str, TensorEntry]:
    """Tensors of a file whose size and checksum are verified."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    found = path.stat().st_size
    if found != size:
        raise ValueError(f"{path.name} has {found} bytes instead of {size}")
    if digest_of(path) != (size, digest):
        raise ValueError(f"{path.name} is damaged: its checksum is wrong")
    return SafetensorsReader(path).entries if path.suffix == ".safetensors" else {}
