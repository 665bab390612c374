# mypy: disable-error-code="override"
"""Communicator whose ranks are threads of one process: to check engines on many ranks without starting them.

Blocking collectives exchange Python objects at a barrier. Non-blocking and persistent ones leave them where they are
started, and take those of the other ranks when all are there: ranks start them in the same order.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.compressed.bound_collective import module_of
from conformance.thread_meeting import Meeting, Message, StartedCall

OPERATIONS = ((MPI.SUM, np.add), (MPI.MAX, np.maximum), (MPI.MIN, np.minimum))


def combined(op: MPI.Op, terms: Sequence[Any], algorithm: str | None = None) -> Any:
    """Terms of all ranks, combined in the order of the ranks, or by the binary tree of neighbours ("tree")."""
    function = next(function for one, function in OPERATIONS if one == op)
    while algorithm == "tree" and len(terms) > 1:
        pairs = [function(*terms[at : at + 2]) for at in range(0, len(terms) - 1, 2)]
        terms = [*pairs, *terms[len(pairs) * 2 :]]
    return reduce(function, terms)


class ThreadGroup:
    """Group of a communicator: the threads of its ranks, by their numbers in the whole run."""

    def __init__(self, members: Sequence[int]):
        self.members = list(members)

    def Translate_ranks(self, ranks: Sequence[int], other: ThreadGroup) -> list[int]:
        return [other.members.index(self.members[rank]) for rank in ranks]

    def Incl(self, ranks: Sequence[int]) -> ThreadGroup:
        return ThreadGroup([self.members[rank] for rank in ranks])


class ThreadCommunicator(Communicator):
    """Communicator of one of the threads that share a `Meeting`, with the methods that engines and operators use.

    `calls` has the name and the bytes of every collective on arrays, in order.
    """

    nodes = None

    def __new__(cls, *_: Any) -> ThreadCommunicator:
        return super().__new__(cls)

    def __init__(self, meeting: Meeting, rank: int, members: Sequence[int] = ()):
        self.meeting, self._rank = meeting, rank
        self._members = members or range(meeting.size)
        self.calls: list[tuple[Any, ...]] = []
        self._made: Counter[Any] = Counter()

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self.meeting.size

    def Split(self, color: int = 0, key: int = 0) -> ThreadCommunicator:
        every = self.allgather((color, key, self._rank))
        members = [rank for other, _, rank in sorted(every, key=lambda one: one[1:]) if other == color]
        made = Meeting(len(members), self.meeting.all_meetings) if members[0] == self._rank else None
        meeting = self.allgather(made)[members[0]]
        return ThreadCommunicator(meeting, members.index(self._rank), [self._members[rank] for rank in members])

    def Get_group(self) -> Any:
        return ThreadGroup(self._members)

    def Create_group(self, group: Any, tag: int = 0) -> Any:
        """Communicator of the threads of a group; collective over these only."""
        key, members = (*group.members, tag), group.members
        self._made[key] += 1
        meeting = self.meeting.group((key, self._made[key]), len(members))
        return ThreadCommunicator(meeting, members.index(self._members[self._rank]), members)

    def close(self) -> None:
        """No-op: threads share nothing but the meeting."""

    Free = free = close

    def empty(self, shape: Any, dtype: Any = float, like: Any = None) -> Any:
        return module_of(like).empty(shape, dtype)

    # ------------------------------------------------------------------------------------------ objects

    def allgather(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self._rank, value)

    def gather(self, value: Any, root: int = 0) -> Any:
        every = self.allgather(value)
        return every if self._rank == root else None

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def allreduce(self, value: Any, op: MPI.Op = MPI.SUM) -> Any:
        return combined(op, self.allgather(value))

    def Barrier(self, **_: Any) -> None:
        self.allgather(None)

    # ------------------------------------------------------------------------------------------ arrays

    def _arrays(self, name: str, send: np.ndarray) -> list[np.ndarray]:
        """Flat copies of the arrays of all ranks, which must make the same call."""
        return self._same(self.allgather(self._given(name, send)))

    def _given(self, name: str, send: np.ndarray) -> tuple[str, np.dtype, np.ndarray]:
        self.calls.append((name, send.nbytes))
        return name, send.dtype, send.reshape(-1).copy()

    @staticmethod
    def _same(every: Sequence[tuple[str, np.dtype, np.ndarray]]) -> list[np.ndarray]:
        if len({one[:2] for one in every}) > 1:
            raise ValueError(f"ranks made different calls: {[one[:2] for one in every]}")
        return [array for _, _, array in every]

    def Bcast(self, buf: np.ndarray, root: int = 0, **_: Any) -> None:
        buf.reshape(-1)[...] = self._arrays("bcast", buf)[root]

    def Allreduce(self, send: Any, recv: np.ndarray, op: MPI.Op = MPI.SUM, algorithm: Any = None) -> None:
        every = self._arrays("allreduce", recv if send is MPI.IN_PLACE else send)
        recv[...] = combined(op, every, algorithm).reshape(recv.shape)

    def Allreduce_init(self, send: Any, recv: np.ndarray, algorithm: Any = None) -> StartedCall:
        def take(every: list[Any]) -> None:
            recv[...] = combined(MPI.SUM, self._same(every), algorithm).reshape(recv.shape)

        return StartedCall(
            self.meeting, self._rank, lambda: self._given("allreduce", recv if send is MPI.IN_PLACE else send), take
        )

    def Iallreduce(self, send: Any, recv: np.ndarray, algorithm: Any = None) -> StartedCall:
        return self.Allreduce_init(send, recv, algorithm).Start()

    def Allgather(self, send: np.ndarray, recv: np.ndarray) -> None:
        self.Allgatherv(send, [recv])

    def Iallgather(self, send: Any, recv: np.ndarray) -> StartedCall:
        counts = [recv.size // self.Get_size()] * self.Get_size()
        return self.Allgatherv_init(send, [recv, counts]).Start()

    def Allgatherv(self, send: Any, recv: Any) -> None:
        _put(self._arrays("allgather", self._block(send, recv)), recv)

    def Allgatherv_init(self, send: Any, recv: Any) -> StartedCall:
        return StartedCall(
            self.meeting,
            self._rank,
            lambda: self._given("allgather", self._block(send, recv)),
            lambda every: _put(self._same(every), recv),
        )

    def _block(self, send: Any, recv: Any) -> np.ndarray:
        """Array that this rank sends: of an exchange in place its part of the receive buffer."""
        if send is not MPI.IN_PLACE:
            return np.asarray(send)
        start = _starts(recv)[self._rank]
        return np.asarray(recv[0].reshape(-1)[start : start + recv[1][self._rank]])

    def Reduce_scatter(
        self, send: np.ndarray, recv: np.ndarray, counts: Sequence[int], op: MPI.Op = MPI.SUM, algorithm: Any = None
    ) -> None:
        every, start = self._arrays("reduce_scatter", send), sum(counts[: self._rank])
        recv.reshape(-1)[...] = combined(op, every, algorithm)[start : start + counts[self._rank]]

    def Reduce_scatter_block(self, send: np.ndarray, recv: np.ndarray, op: MPI.Op = MPI.SUM) -> None:
        self.Reduce_scatter(send, recv, [recv.size] * self.Get_size(), op)

    def Alltoall(self, send: np.ndarray, recv: np.ndarray) -> None:
        blocks = [one.reshape(self.Get_size(), -1)[self._rank] for one in self._arrays("alltoall", send)]
        recv.reshape(-1)[...] = np.concatenate(blocks)

    def Alltoallv(self, send: Any, recv: Any) -> None:
        """Exchange blocks; `calls` leaves out the one that stays here."""
        self._take_blocks(recv, self.allgather(self._blocks(send)))

    def Alltoallv_init(self, send: Any, recv: Any) -> StartedCall:
        return StartedCall(
            self.meeting, self._rank, lambda: self._blocks(send), lambda every: self._take_blocks(recv, every)
        )

    def Ialltoallv(self, send: Any, recv: Any) -> StartedCall:
        return self.Alltoallv_init(send, recv).Start()

    def _blocks(self, send: Any) -> list[np.ndarray]:
        (array, counts), starts = send[:2], _starts(send)
        self.calls.append(("alltoallv", (sum(counts) - counts[self._rank]) * array.itemsize))
        return [array.reshape(-1)[start : start + count].copy() for start, count in zip(starts, counts)]

    def _take_blocks(self, recv: Any, every: Sequence[list[np.ndarray]]) -> None:
        _put([blocks[self._rank] for blocks in every], recv)

    # ------------------------------------------------------------------------------------------ messages

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Message:
        array = buf[0] if isinstance(buf, list) else buf
        self.calls.append(("send", array.nbytes))
        return self.meeting.start((self._rank, dest, tag), "sends", array.copy())

    def Irecv(self, buf: Any, source: int, tag: int = 0) -> Message:
        return self.meeting.start((source, self._rank, tag), "receives", buf[0] if isinstance(buf, list) else buf)

    def Iprobe(self, *_: Any) -> bool:
        """False: messages need no progress."""
        return False

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag)

    def Recv(self, buf: Any, source: int, tag: int = 0) -> None:
        self.Irecv(buf, source, tag).Wait()


def _starts(spec: Sequence[Any]) -> Sequence[int]:
    """Displacements of a buffer argument, by default one block after another."""
    return spec[2] if len(spec) > 2 else list(accumulate(spec[1][:-1], initial=0))


def _put(blocks: Sequence[np.ndarray], recv: Sequence[Any]) -> None:
    """Write the blocks of all ranks into a buffer argument; without counts, one after another."""
    if len(recv) == 1:
        recv = [*recv, [len(block) for block in blocks]]
    into = recv[0].reshape(-1)
    for start, count, block in zip(_starts(recv), recv[1], blocks, strict=True):
        into[start : start + count] = block


def run_threads(size: int, function: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """Results of ``function(communicator)`` of every rank, each in a thread; the first error of any rank is raised."""
    meeting = Meeting(size, [])
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
