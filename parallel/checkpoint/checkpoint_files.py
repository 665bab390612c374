"""Writing and reading of checkpoints: whole tensors by name, for any number of ranks and any sharding.

    step-000000200/
        model-00001-of-00002.safetensors  ...      master weights: float32 or float64
        model.safetensors.index.json               file of each tensor
        optimizer-00001-of-00002.safetensors  ...  optimizer state: ``m/<parameter>`` ...
        optimizer.safetensors.index.json
        feedback-...                               residuals of gradient compression
        state.json                                 facts; size and SHA-256 of every other file

Every rank writes its share of whole tensors, gathered one at a time, into a folder with a temporary name, which rank 0
renames when everything is on the disk. So a folder with a checkpoint's name is complete, and a crash leaves at most a
folder that begins with a dot, which the next checkpoint removes (`parallel.checkpoint.step_folders`).
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.checkpoint.safetensors_writer import SafetensorsReader, SafetensorsWriter, digest_of
from parallel.checkpoint.step_folders import (
    CheckpointError,
    Kept,
    NotRemoved,
    Owner,
    all_in,
    expect_place,
    finish_replacements,
    move_into_place,
    name_of,
    next_origin,
    read_state,
    remove_old,
    sync_folder,
    unfinished,
    write_state,
    write_text,
)
from parallel.checkpoint.tensor_slices import OPTIONAL, PlannedTensor, TensorSlice, natural_key, plan, within_family
from parallel.nn.array_checks import whole_number
from parallel.nn.operator import ArraySpec
from parallel.runtime.collective_errors import collective_call, raise_on_all
from parallel.runtime.vector_memory import to_host
from quant.kernels import array_namespace

__all__ = ["Checkpoint", "CheckpointError", "Kept", "NotRemoved", "Owner", "all_in", "latest", "name_of", "new_run"]
__all__ += ["save", "tensors_in"]

TAG = 1
NO_RUN = Owner()


def latest(comm: MPI.Intracomm, directory: Path) -> Path | None:
    """Path of the newest checkpoint in a directory, by branch and step on rank 0, or None. Collective."""
    found = collective_call(comm, lambda: all_in(directory), f"cannot look into {directory}", CheckpointError, 0)
    return found[-1] if found else None


def new_run(comm: MPI.Intracomm) -> str:
    """Identifier of a new run, random and equal on all ranks. Collective."""
    return str(comm.bcast(os.urandom(8).hex() if comm.Get_rank() == 0 else None))


# ---------------------------------------------------------------------------------------------- writing


def save(
    comm: MPI.Intracomm,
    directory: Path,
    step: int,
    slices: Iterable[TensorSlice],
    facts: Mapping[str, Any],
    *,
    keep: int | Kept = 3,
    owner: Owner = NO_RUN,
) -> Path:
    """Write a checkpoint atomically, remove the oldest others, return its path. Collective.

    A checkpoint of the same run and step is replaced; there is a valid one at any moment.

    Parameters
    ----------
    comm
        Ranks that hold the tensors.
    directory : Path
        Folder of checkpoints, seen by all ranks; created if it does not exist.
    step : int
        Steps done.
    slices
        This rank's slices of tensors. Every element is written by one rank.
    facts : mapping
        Other state, equal on all ranks; becomes JSON.
    keep : int or Kept
        Number of checkpoints to keep, the new one and the newest others, or also of the best, by the fact ``score``.
        The rest is removed afterwards.
    owner : Owner
        Run that writes.

    Raises
    ------
    CheckpointError
        On all ranks, if any of them fails, or if the directory has checkpoints of another run; earlier checkpoints are
        unchanged. `NotRemoved` if the new one was written.
    """
    newest, best = keep if isinstance(keep, Kept) else Kept(keep)
    kept = Kept(whole_number("keep", newest, 1), whole_number("keep_best", best))
    held = [piece for piece in slices if piece.mine and len(piece.array)]
    target = directory / name_of(step)
    trouble = f"checkpoint {target} was not written"

    collective_call(comm, lambda: _expect_place(target, owner), trouble, CheckpointError, 0)
    with contextlib.ExitStack() as stack:
        folder = collective_call(comm, lambda: stack.enter_context(unfinished(target)), trouble, CheckpointError, 0)
        collective_call(comm, lambda: _expect_shared(folder), trouble, CheckpointError)
        files = _write_tensors(comm, folder, held, trouble)
        fields = {"step": step, "facts": facts, "files": files}
        collective_call(comm, lambda: _finish(folder, target, owner, fields), trouble, CheckpointError, 0)
    trouble = f"{target} is there, but older ones cannot be removed"
    collective_call(comm, lambda: remove_old(target, kept, owner), trouble, NotRemoved, 0)
    return target


def _expect_place(target: Path, owner: Owner) -> None:
    if target.parent.is_dir():
        finish_replacements(target.parent)
        expect_place(target, owner)


def _expect_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} of rank 0 does not exist here: all ranks must share the directory")


def _file_names(family: str, tensors: Sequence[PlannedTensor]) -> dict[int, str]:
    """Safetensors file name, by rank, for each rank that writes tensors of a family ("model", "optimizer", ...)."""
    writers = sorted({tensor.writer for tensor in tensors})
    count = len(writers)
    return {writer: f"{family}-{at:05d}-of-{count:05d}.safetensors" for at, writer in enumerate(writers, 1)}


def _write_tensors(
    comm: MPI.Intracomm, folder: Path, held: Sequence[TensorSlice], trouble: str
) -> dict[str, list[Any]]:
    """Write the files of all families; returns {file: [bytes, SHA-256]} of all ranks, on rank 0. Collective.

    CheckpointError on all ranks if one fails.
    """
    tensors, files = plan(comm, held), dict[str, list[Any]]()
    for family, planned in tensors.items():
        mine, problem = _write(comm, folder, family, planned, held)
        raise_on_all(comm, problem, trouble, CheckpointError)
        files |= {name: about for one in comm.allgather(mine) for name, about in one.items()}
    collective_call(comm, lambda: _write_indices(folder, tensors, files), trouble, CheckpointError, 0)
    return dict(sorted(files.items()))


def _write(
    comm: MPI.Intracomm, folder: Path, family: str, tensors: Sequence[PlannedTensor], held: Sequence[TensorSlice]
) -> tuple[dict[str, list[Any]], Exception | None]:
    """Gather and write this rank's tensors one by one; returns {file: [bytes, SHA-256]} and an error. Collective.

    All ranks take the same tensors in turn, so no cycle of waiting ranks arises; a rank that cannot write still
    receives.
    """
    rank, names = comm.Get_rank(), _file_names(family, tensors)
    mine = {(piece.name, piece.start): piece.array for piece in held}
    writer, problem = None, None
    if rank in names:
        entries = {within_family(tensor.name): tensor.entry for tensor in tensors if tensor.writer == rank}
        try:
            writer = SafetensorsWriter(folder / names[rank], entries)
        except OSError as error:
            problem = error
    for tensor in tensors:
        values = _gather(comm, tensor, mine)
        if values is not None and writer is not None and problem is None:  # after an error it only receives
            try:
                writer.add(values)
            except OSError as error:
                problem = error
    if writer is None:
        return {}, problem
    try:
        writer.close(sync=problem is None)  # after an error the folder is removed: no flush
    except OSError as error:
        problem = problem or error
    return {names[rank]: [writer.size, writer.digest]}, problem


def _gather(comm: MPI.Intracomm, tensor: PlannedTensor, mine: Mapping[tuple[str, int], Any]) -> np.ndarray | None:
    """Gather a tensor's elements on its writing rank: the flattened tensor there, None on all other ranks."""
    rank = comm.Get_rank()
    if tensor.writer != rank:
        for part in tensor.parts:
            if part.rank == rank:
                comm.Send(to_host(mine[tensor.name, part.start]), tensor.writer, TAG)
        return None
    values = np.empty(math.prod(tensor.entry.shape), tensor.entry.dtype)
    for part in tensor.parts:
        here = values[part.start : part.start + part.size]
        if part.rank == rank:
            here[...] = to_host(mine[tensor.name, part.start])
        else:
            comm.Recv(here, part.rank, TAG)
    return tensor.ordered(values)


def _write_indices(folder: Path, tensors: Mapping[str, Sequence[PlannedTensor]], files: dict[str, list[Any]]) -> None:
    """Write the index file of each family, and add its size and checksum to `files`."""
    for family, some in tensors.items():
        names = _file_names(family, some)
        index = {
            "metadata": {"total_size": sum(tensor.entry.nbytes for tensor in some)},
            "weight_map": {within_family(tensor.name): names[tensor.writer] for tensor in some},
        }
        name = f"{family}.safetensors.index.json"
        write_text(folder / name, json.dumps(index, indent=1))
        files[name] = [*digest_of(folder / name)]


def _finish(folder: Path, target: Path, owner: Owner, fields: dict[str, Any]) -> None:
    """Write the state file, then move `folder` to `target`, which makes the checkpoint valid."""
    expect_place(target, owner)  # another run may have begun meanwhile
    origin = next_origin(target.parent, fields["step"], owner.run)
    write_state(folder, fields | origin._asdict())
    sync_folder(folder)
    move_into_place(folder, target)


# ---------------------------------------------------------------------------------------------- reading


class Checkpoint:
    """Checkpoint opened for reading; size and checksum of every file are verified. Collective, on any number of ranks.

    CheckpointError on all ranks if it is damaged or not a checkpoint.

    Attributes
    ----------
    step : int
        Steps done.
    run : str
        Identifier of the run; "" in checkpoints of versions without one.
    facts : dict
        As passed to `save`.
    entries : dict of str -> ArraySpec
        All tensors.
    """

    def __init__(self, comm: MPI.Intracomm, path: Path):
        self._comm, self.path = comm, path
        trouble = f"{path} cannot be used"
        state = collective_call(comm, lambda: read_state(path), trouble, CheckpointError, 0)
        self.step: int = state["step"]
        self.run: str = state.get("run", "")
        self.facts: dict[str, Any] = state["facts"]
        names = sorted(state["files"])
        mine = names[comm.Get_rank() :: comm.Get_size()]
        found = collective_call(
            comm,
            lambda: {name: _verified(path / name, *state["files"][name]) for name in mine},
            trouble,
            CheckpointError,
        )
        self.entries: dict[str, ArraySpec] = {}
        self._file_of: dict[str, str] = {}
        for file, entries in sorted(item for some in comm.allgather(found) for item in some.items()):
            family = file.partition("-")[0]
            self.entries |= {f"{family}/{name}": entry for name, entry in entries.items()}
            self._file_of |= {f"{family}/{name}": file for name in entries}

    def fit(self, slices: Iterable[TensorSlice]) -> None:
        """Check that all ranks' slices have exactly the checkpoint's names, shapes and dtypes, else CheckpointError.

        Collective. Tensors of the family `OPTIONAL` may be missing on either side, or have other shapes.
        """
        wanted: dict[str, ArraySpec] = {}
        for piece in slices:
            if len(piece.array):
                wanted[piece.name] = ArraySpec(tuple(piece.shape), np.dtype(piece.array.dtype))
        for others in self._comm.allgather(wanted):  # a rank may hold nothing of a tensor
            wanted |= others
        differences = []
        for name in sorted(wanted.keys() | self.entries.keys(), key=natural_key):
            here, there = wanted.get(name), self.entries.get(name)
            if here != there and not name.startswith(OPTIONAL):
                differences.append(f"{name} is {_described(there)} in the checkpoint and {_described(here)} here")
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise CheckpointError(f"{self.path} is of another model or optimiser: {'; '.join(differences[:3])}{more}")

    def restore(self, slices: Iterable[TensorSlice]) -> None:
        """Load the checkpoint's values into the arrays of the slices, after checking with `fit`. Collective.

        Slices of the family `OPTIONAL` that it does not hold in this shape are unchanged, and terms of a sum are 0.
        Their owner may have to be notified, as by `parallel.engine.base.TrainEngine.refresh`.
        """
        slices = list(slices)
        self.fit(slices)
        collective_call(self._comm, lambda: self._copy(slices), f"{self.path} can no longer be read", CheckpointError)

    def tensor(self, name: str) -> np.ndarray:
        """Read a whole tensor by its name in `entries`. Not collective."""
        return SafetensorsReader(self.path / self._file_of[name]).tensor(within_family(name))

    def _copy(self, slices: Iterable[TensorSlice]) -> None:
        readers: dict[str, SafetensorsReader] = {}
        for piece in slices:
            if piece.terms:
                piece.array[...] = 0
            for source in piece.sources(self.entries):
                file, name = self._file_of[source], within_family(source)
                reader = readers.get(file) or readers.setdefault(file, SafetensorsReader(self.path / file))
                if piece.cut is None:
                    values = reader.read(name, piece.start, len(piece.array))
                else:
                    values = piece.elements_of(reader.tensor(name))
                values = array_namespace(piece.array).asarray(values)
                piece.array[...] = piece.array + values if piece.terms else values


def tensors_in(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Iterate over (name, array) of all tensors of a checkpoint, sorted by name, without verifying checksums."""
    readers = [(file.name.partition("-")[0], SafetensorsReader(file)) for file in path.glob("*.safetensors")]
    everything = {f"{family}/{name}": reader for family, reader in readers for name in reader.entries}
    for name in sorted(everything, key=natural_key):
        yield name, everything[name].tensor(within_family(name))


def _described(entry: ArraySpec | None) -> str:
    return "missing" if entry is None else f"{entry.dtype} of shape {entry.shape}"


def _verified(path: Path, size: int, digest: str) -> dict[str, ArraySpec]:
    """Verify size and SHA-256 of a checkpoint file (ValueError); returns shape and dtype of its tensors by name."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    found = path.stat().st_size
    if found != size:
        raise ValueError(f"{path.name} has {found} bytes instead of {size}")
    if digest_of(path) != (size, digest):
        raise ValueError(f"{path.name} is damaged: its checksum is wrong")
    return SafetensorsReader(path).entries if path.suffix == ".safetensors" else {}
