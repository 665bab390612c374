"""Waits for messages outside of collectives: with the time limit, the looks at other ranks and the record of calls."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Self

from mpi4py import MPI

from collectives.runtime.execution.progress import progress_until
from collectives.runtime.record.watcher import look
from collectives.runtime.record.writer import record
from collectives.transport.node.machine import world_ranks
from collectives.transport.waits import limited

UNKNOWN = {(-1, "other ranks")}
"""Awaited ranks of MPI.COMM_WORLD, with what is awaited, if they are unknown."""


class MessageWait:
    """Wait for ranks of a communicator, as `Awaited`. A long one is in the record, with an entry per awaited rank.

    Parameters
    ----------
    name : str
        Name of the call in the record.
    comm : MPI.Intracomm
        The time limit of a `Communicator` is that of the wait.
    awaited : function
        Returns what is awaited, by rank in `comm`. Empty if that is unknown.
    survives : bool
        A rank that dies or leaves does not end the wait.
    number : int
        Number of the call in the record, if it is in it.
    """

    moves = 0

    def __init__(
        self,
        name: str,
        comm: MPI.Intracomm,
        awaited: Callable[[], Mapping[int, str]],
        survives: bool = False,
        number: int = 0,
    ) -> None:
        self._name, self._comm, self._awaited = name, comm, awaited
        self._survives, self._number = survives, number
        self._noted: dict[tuple[int, str], int] = {}  # numbers of entries in the record

    def until(self, done: Callable[[], object]) -> None:
        """Wait until ``done()``, with progress of all requests meanwhile. Raises Timeout, PeerLeft or PeerFailed."""
        if not done():
            with self.limited(), self:
                progress_until(done, self)  # type: ignore[arg-type]

    def limited(self) -> AbstractContextManager[object]:
        """Context of a wait with the time limit of the communicator."""
        return limited(getattr(self._comm, "timeout", None), self._comm.Get_rank())

    def stall(self, idle: float) -> None:
        """Look at the awaited ranks, `idle` seconds without progress. Raises PeerLeft or PeerFailed. See `look`."""
        if MPI.Intracomm(self._comm) == MPI.COMM_NULL:  # threads as ranks have no records
            return
        worlds, awaited = world_ranks(self._comm), self._awaited()
        if not self._number:
            self._note({(worlds[rank], what) for rank, what in awaited.items()} or UNKNOWN, idle)
        if (found := record()) is not None:
            found.stall(self._number, -1, -1)
        look(self._name, {} if self._survives else {rank: (worlds[rank], 0) for rank in awaited}, idle)

    def _note(self, awaited: set[tuple[int, str]], idle: float) -> None:
        """Note the awaited ranks of MPI.COMM_WORLD, with what is awaited."""
        if (found := record()) is None:
            return
        for one in [one for one in self._noted if one not in awaited]:
            found.end_wait(self._noted.pop(one))
        for peer, what in awaited - set(self._noted):
            self._noted[peer, what] = found.begin_wait(self._name, what, peer, time.monotonic_ns() - int(1e9 * idle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the entries of the wait in the record."""
        if self._noted:
            self._note(set(), 0.0)

    def describe(self, subject: str) -> str:
        """Sentence on the wait."""
        if self._number:
            return f"{self._name}: {subject} for other ranks to make this call"
        texts = [f"for rank {rank}{f' ({what})' if what else ''}" for rank, what in sorted(self._awaited().items())]
        return f"{self._name}: {subject} {' and '.join(texts) or 'for other ranks'}"


def wait_for(done: Callable[[], object], name: str, comm: MPI.Intracomm, peer: int, what: str = "") -> None:
    """Wait until ``done()``, the test of a message from or to a rank of `comm`. Raises as `MessageWait.until`."""
    if not done():
        MessageWait(name, comm, lambda: {peer: what}).until(done)
