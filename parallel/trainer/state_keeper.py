"""Training state in memory that outlives the ranks, by which restarted ranks go on after the death of one.

Every rank keeps its part of a checkpoint in two `StateSegment` files of a folder in a tmpfs, written in turn. A step
ends on all ranks together, so the newest states of two ranks are at most one writing apart, and a kill leaves one step
that all ranks have whole. Where there are several nodes, a rank of the next one has a copy.
"""

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from collectives.runtime.execution.message_wait import wait_for
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError
from parallel.checkpoint.state_segment import HEADER, ROOM, ROOM_OF_SLICE, StateSegment, padded
from parallel.checkpoint.tensor_slices import TensorSlice
from parallel.engine.grad_compression import NONE
from parallel.engine.settings import Settings
from parallel.nn.operator import ArraySpec
from parallel.runtime import resources
from parallel.runtime.collective_errors import collective_call
from parallel.trainer.trainer import Training, settings_in

SHARE = 0.05
"""Largest share of the time of steps that keeping the state takes, unless the number of steps between is given."""

MEASURED = 4
"""Steps by whose times this number is chosen."""

PIECE = 1 << 30
"""Bytes of a message between nodes at most."""

ENDED = "ended-"
"""Beginning of the name of a file by which a rank notes that it has ended in order, or by an error of its own."""


class KeptState(Checkpoint):
    """State of this rank in a segment, with the interface of a checkpoint, to resume. Construction is collective."""

    def __init__(self, comm: MPI.Intracomm, segment: StateSegment):
        self._comm, self._segment, self.path = comm, segment, segment.path.parent
        self.facts = segment.facts()
        self.step, self.run = segment.step, self.facts["run"]
        names = sorted({tuple(name) for some in comm.allgather(self.facts["slices"]) for name in some})
        self.entries = {name[0]: ArraySpec((), np.dtype(np.float32)) for name in names}

    def fit(self, slices: Iterable[TensorSlice]) -> None:
        """Check that the state is of these slices of this rank, else CheckpointError. Collective."""
        found = _described(slices)

        def check() -> None:
            if found != self.facts["slices"]:
                raise ValueError("it has other tensors than this training")

        collective_call(self._comm, check, f"{self.path} cannot be used", CheckpointError)

    def restore(self, slices: Iterable[TensorSlice]) -> None:
        """Load the state into the arrays of the slices. Collective."""
        slices = list(slices)
        self.fit(slices)
        self._segment.read([piece.array for piece in slices])

    def resolved(self) -> Settings:
        """Settings with all open fields as they were decided at the first start, such as by measurements."""
        return Settings(**settings_in(self, "resolved"))


def _described(slices: Iterable[TensorSlice]) -> list[list[Any]]:
    """Names, starts, sizes and dtypes of slices. Those that follow one another in a tensor are one."""
    found: list[list[Any]] = []
    for one in slices:
        name, start, size, dtype = one.name, one.start, len(one.array), str(one.array.dtype)
        if found and found[-1] == [name, start - found[-1][2], found[-1][2], dtype]:
            found[-1][2] += size
        else:
            found.append([name, start, size, dtype])
    return found


@dataclass(frozen=True)
class Nodes:
    """Ranks of every node, and the copies on other nodes."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> "Nodes":
        """Nodes of a communicator. Collective."""
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        members = comm.allgather(tuple(node.allgather(comm.Get_rank())))
        node.Free()
        return cls(tuple(sorted(set(members))), comm.Get_rank())

    def node_of(self, rank: int) -> int:
        """Number of the node of a rank."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def neighbour(self, rank: int) -> int | None:
        """Rank of the next node that has the copy of a rank's state. None on one node."""
        if len(self.ranks) == 1:
            return None
        number = self.node_of(rank)
        following = self.ranks[(number + 1) % len(self.ranks)]
        return following[self.ranks[number].index(rank) % len(following)]

    def sources(self) -> list[int]:
        """Ranks whose copies this rank has."""
        return [one for ranks in self.ranks for one in ranks if self.neighbour(one) == self.rank]


class StateKeeper:
    """Keeper of the training state of this rank. Construction is collective.

    A context, whose end notes that the training needs no restart, unless another rank has died.

    Parameters
    ----------
    comm : communicator
        Ranks of the training.
    folder : Path
        Folder in a tmpfs, the same on all nodes. It is created.
    attempt, restarts : int
        Number of this start, 0 for the first, and the last number. The last one keeps nothing.
    every : int, optional
        Steps between two states. By default as many as keep the time for it below `SHARE`.
    """

    def __init__(self, comm: MPI.Intracomm, folder: Path, attempt: int, restarts: int, every: int | None = None):
        self._comm, self._folder, self.attempt = comm, folder, attempt
        self._is_last, self.every = attempt >= restarts, every
        self.problem: BaseException | None = None
        self._nodes = Nodes.of(comm)
        self._training: Training | None = None
        self._own: list[StateSegment] = []
        self._copies: dict[int, list[StateSegment]] = {}
        self._seconds: list[float] = []
        self._last = 0.0
        collective_call(comm, lambda: folder.mkdir(0o700, exist_ok=True), "--survive")

    def newest(self) -> KeptState | None:
        """Newest state that every rank has whole. None at the first start, or if there is none. Collective.

        All other states are removed. CheckpointError if a rank had ended, so that a restart would repeat it.
        """
        comm, mine = self._comm, self._nodes.ranks[self._nodes.node_of(self._nodes.rank)]
        if self._own:
            return self._newest_own()
        paths = sorted(self._folder.glob("*-*")) if self.attempt else []
        comm.Barrier()  # all ranks of a node have looked
        if not self.attempt and self._nodes.rank == mine[0]:
            self._remove("*-*")
        ended = sorted({path.read_text() for path in paths if path.name.startswith(ENDED)})
        if ended := [text for some in comm.allgather(ended) for text in some]:
            raise CheckpointError(f"--survive: not restarted after {ended[0]}")
        own = paths[mine.index(self._nodes.rank) :: len(mine)]
        found = {path.name: step for path in own if (step := _whole_step(path)) >= 0}
        every = comm.allgather(found)
        steps = [
            {step for some in every for name, step in some.items() if _rank_of(name) == rank}
            for rank in range(comm.Get_size())
        ]
        step = max(set.intersection(*steps), default=-1)
        for path in own:
            if found.get(path.name) != step:
                path.unlink()
        if step < 0:
            return None
        held = [
            {_rank_of(name): name for other in ranks for name, one in every[other].items() if one == step}
            for ranks in self._nodes.ranks
        ]
        state = collective_call(comm, lambda: self._moved(held), "--survive: a state cannot be read", CheckpointError)
        return KeptState(comm, state)

    @property
    def can_shrink(self) -> bool:
        """True if the training can go on with fewer ranks: every rank has the whole state."""
        chosen = None if self._training is None else self._training.resolved
        return chosen is not None and chosen.layout == "dp" and not chosen.mesh and chosen.compress == NONE

    def shrink(self, comm: MPI.Intracomm) -> None:
        """Go on with the ranks of `comm`, those that have survived. Collective."""
        self._comm, self._nodes, self._training = comm, Nodes.of(comm), None

    def _newest_own(self) -> KeptState | None:
        """Newest state that every rank still has in memory after `shrink`."""
        whole = {one.step: one for one in self._own if one.is_whole()}
        step = max(set.intersection(*map(set, self._comm.allgather(list(whole)))), default=-1)
        return KeptState(self._comm, whole[step]) if step >= 0 else None

    def _moved(self, held: list[dict[int, str]]) -> StateSegment:
        """Segment of this rank's state on this node, from another node if need be. `held` has names by node, rank."""
        comm, nodes, here = self._comm, self._nodes, self._nodes.node_of(self._nodes.rank)
        for rank in range(comm.Get_size()):  # one order on all ranks: no cycle of waiting ranks
            if rank in held[nodes.node_of(rank)]:
                continue
            sender = next(nodes.ranks[number][0] for number, names in enumerate(held) if rank in names)
            if nodes.rank == sender:
                segment = StateSegment(self._folder / held[here][rank])
                comm.send(len(segment.memory), rank)
                self._wait([(comm.Isend(piece, rank), rank) for piece in _pieces(segment.memory)])
            elif nodes.rank == rank:
                name = held[here][rank] = _name("rank", rank, 0)
                wait_for(partial(comm.Iprobe, sender), "state", comm, sender)
                segment = StateSegment(self._folder / name, comm.recv(source=sender) - HEADER.itemsize)
                self._wait([(comm.Irecv(piece, sender), sender) for piece in _pieces(segment.memory)])
        return StateSegment(self._folder / held[here][nodes.rank])

    def begin(self, training: Training) -> None:
        """Reserve memory for the states of a training, which has been resumed. Collective, errors too.

        ValueError if there is too little. The last start removes all states.
        """
        self._comm.Barrier()  # all ranks have read their states
        if self._is_last:
            return self._remove("rank-*", "copy-*")
        self._training, is_shrunk = training, bool(self._own)
        slices = list(training.engine.tensor_slices())
        capacity = padded(sum(one.array.nbytes for one in slices) + ROOM + ROOM_OF_SLICE * len(slices))
        sizes, sources = self._comm.allgather(capacity), self._nodes.sources()
        total = 2 * (capacity + sum(sizes[rank] for rank in sources))
        if training.settings.device == "cpu":
            resources.check_memory(self._comm, {**training.forecast.needed, "kept states": total})

        def reserve(kind: str, rank: int) -> list[StateSegment]:
            return [StateSegment(self._folder / _name(kind, rank, number), sizes[rank]) for number in range(2)]

        self._own = collective_call(self._comm, lambda: reserve("rank", self._nodes.rank), "--survive")
        self._copies = collective_call(
            self._comm, lambda: {rank: reserve("copy", rank) for rank in sources}, "--survive"
        )
        if is_shrunk:  # the files may have been those of other ranks
            for one in self._own:
                one.clear()
            self._keep_now()
        self._last = time.perf_counter()

    def keep(self) -> None:
        """Keep the state after this step, if it is one of those. Collective."""
        training = self._training
        if training is None or (self.every and training.done % self.every):
            return
        began = time.perf_counter()
        self._keep_now()
        if self.every is None:
            self._choose(began)

    def _keep_now(self) -> None:
        assert self._training is not None
        slices = list(self._training.engine.tensor_slices())
        segment = min(self._own, key=lambda one: one.step)
        segment.write(self._training.done, [one.array for one in slices], self._facts(slices))
        self._copy(segment)

    def _copy(self, segment: StateSegment) -> None:
        """Send the newest state to the next node, and receive the copies of this rank."""
        neighbour, comm = self._nodes.neighbour(self._nodes.rank), self._comm
        if neighbour is None:
            return
        requests, arriving = [], []
        for rank, some in self._copies.items():
            copy, header = min(some, key=lambda one: one.step), np.empty(HEADER.itemsize, np.uint8)
            copy.clear()
            arriving.append((copy, header))
            requests += [
                (comm.Irecv(piece, rank), rank) for piece in (header, *_pieces(copy.memory[HEADER.itemsize :]))
            ]
        memory = segment.memory
        sent = (memory[: HEADER.itemsize], *_pieces(memory[HEADER.itemsize :]))
        self._wait([*requests, *((comm.Isend(piece, neighbour), neighbour) for piece in sent)])
        for copy, header in arriving:
            copy.receive(header)

    def _wait(self, requests: list[tuple[MPI.Request, int]]) -> None:
        for request, peer in requests:
            wait_for(request.Test, "state", self._comm, peer)

    def _choose(self, began: float) -> None:
        """Choose the number of steps between states after `MEASURED` steps. Collective then."""
        now = time.perf_counter()
        self._seconds.append((now - began) / max(began - self._last, 1e-9))
        self._last = now
        if len(self._seconds) == MEASURED:
            share = sorted(self._seconds)[MEASURED // 2]
            self.every = int(self._comm.allreduce(max(1, math.ceil(share / SHARE)), MPI.MAX))

    def _facts(self, slices: list[TensorSlice]) -> dict[str, Any]:
        training = self._training
        assert training is not None
        own = {"run": training.run_id, "engine": training.engine.state(), "slices": _described(slices)}
        return training.facts() | own | {"resolved": asdict(training.resolved)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        problem = error or self.problem
        if not _is_of_death(problem):
            rank = self._nodes.rank
            text = "the end" if problem is None else f"an error: {problem or type(problem).__name__}"
            with suppress(OSError):  # the folder was removed
                (self._folder / f"{ENDED}{rank:05d}").write_text(f"{text} (rank {rank})")

    def _remove(self, *patterns: str) -> None:
        """Remove the files of this node with such names. Another rank may remove them too."""
        for pattern in patterns:
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)


def _is_of_death(error: BaseException | None) -> bool:
    """True for an error that follows from the death of another rank."""
    while error is not None:
        if isinstance(error, MPI.Exception) or getattr(error, "of_death", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _name(kind: str, rank: int, number: int) -> str:
    return f"{kind}-{rank:05d}-{number}"


def _rank_of(name: str) -> int:
    """Rank whose state is in the file of this name."""
    return int(name.split("-")[1])


def _whole_step(path: Path) -> int:
    """Step of the whole state in a file, or -1."""
    try:
        segment = StateSegment(path)
    except OSError:
        return -1
    return segment.step if segment.is_whole() else -1


def _pieces(memory: np.ndarray) -> list[np.ndarray]:
    return [memory[start : start + PIECE] for start in range(0, len(memory), PIECE)]
