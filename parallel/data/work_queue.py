"""Work queue over one-sided MPI: ranks of unequal speed draw numbers from a shared counter.

A draw is one `Fetch_and_op` on a window of rank 0. Between nodes it may complete only when rank 0 next enters MPI, at
its next draw: place rank 0 on a fast node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from parallel.runtime.left_windows import SharedWindow

COUNTERS = 2
"""Counters used in turn: the next round's counter is reset once all ranks have begun this round and left the last."""


class WorkQueue:
    """Queue of work item numbers, each drawn by exactly one rank. Creating and freeing are collective.

    Which rank gets which number depends on timing, and so does the last digit of a sum over the numbers of a rank: for
    repeatable results, put what belongs to a number in order of numbers. ``meet()`` waits for all ranks, by default
    by a barrier.

    Examples
    --------
    >>> with WorkQueue(MPI.COMM_SELF) as pool:
    ...     [number for number in pool.draw(3)]
    [0, 1, 2]
    """

    def __init__(self, comm: MPI.Intracomm, meet: Callable[[], None] | None = None):
        self.comm, self._meet = comm, meet or comm.Barrier
        mine = COUNTERS if comm.Get_rank() == 0 else 0
        word = MPI.INT64_T.Get_size()
        self._shared = SharedWindow(comm, MPI.Win.Allocate(mine * word, word, comm=comm))
        self._round = 0
        if mine:
            for counter in range(COUNTERS):
                self._add(0, counter, MPI.REPLACE)

    def draw(self, count: int) -> Iterator[int]:
        """Iterate over the numbers in 0 .. count-1 that this rank draws, ascending. Each goes to one rank. Collective.

        Collective: ranks wait for each other at the beginning, not at the end. A rank may stop early, and the others
        then draw the rest. RuntimeError from an iterator of an earlier round, or after `close`.
        """
        if count < 0:
            raise ValueError(f"count: expected 0 or more, found {count}")
        self._open()
        self._meet()
        self._round += 1
        if self.comm.Get_rank() == 0:
            self._add(0, (self._round + 1) % COUNTERS, MPI.REPLACE)
        return self._numbers(self._round, count)

    def _numbers(self, round: int, count: int) -> Iterator[int]:
        while True:
            self._open()
            if round != self._round:
                raise RuntimeError(f"pool: this iterator belongs to round {round}, and round {self._round} has begun")
            number = self._add(1, round % COUNTERS, MPI.SUM)
            if number >= count:
                return
            yield number

    def _add(self, value: int, counter: int, op: MPI.Op) -> int:
        """Apply `op` (sum or replace) with `value` to a shared counter atomically. Returns its old value."""
        given, was = np.array([value], np.int64), np.empty(1, np.int64)
        window = self._shared.window
        assert window is not None
        window.Fetch_and_op([given, MPI.INT64_T], [was, MPI.INT64_T], 0, counter, op)
        window.Flush(0)
        return int(was[0])

    def _open(self) -> None:
        if not self._shared.is_open:
            raise RuntimeError("pool: it has been closed")

    def close(self) -> None:
        """Free the shared counters. Collective."""
        self._shared.free()

    def leave(self) -> None:
        """End the use of the queue on this rank, without waiting for the others: they free the counters later."""
        self._shared.leave()

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # a rank that failed does not wait for the others
            self.leave()
