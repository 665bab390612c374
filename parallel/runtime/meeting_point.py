"""Meeting point of the ranks of an engine: a call of all ranks begins, or is refused on all of them.

A rank may leave an engine alone: by an exception in the program between two calls, or by its end. It then sends a
notice to all other ranks. At the beginning of their next call they wait for it, poll for such notices, and raise
`RankLeft`. Once all ranks are in a call, each finishes its part of it, and errors are exchanged within the call. A
rank that cannot finish its part because of an error sends a notice too. It ends the waits of the others
(`taking_part`). A notice has the counts of meetings and calls that its rank has ended: for these the others may wait.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.errors import WAIT_ERRORS
from collectives.runtime.execution.message_wait import MessageWait
from collectives.runtime.record.watcher import last_call
from collectives.runtime.record.writer import record
from collectives.runtime.requests.program_end import uncaught_exception
from collectives.transport.waits import watchers
from parallel.runtime.call_order import CallOrder, messages, send_to_others
from parallel.runtime.collective_errors import describe, is_shared, raise_shared
from parallel.runtime.consistency_check import NOTHING, RankLeft, StepFailed

NOTICE = 1
"""Tag of notices."""

WATCHED = 16
"""Ranks whose death a rank notices in a meeting, at most: the next ones."""

LONGEST = 1000
"""Characters of a notice: short messages are sent without a receiver."""

CALLS = (
    *("construction", "step", "draw", "evaluate", "predict", "state_dict", "load_state_dict", "save", "load"),
    *("consensus", "failures", "close"),
)
"""Calls of engines in which all ranks meet: methods, draws from a shared queue, and the exchange of errors."""

ROW = np.dtype(
    [
        ("call", np.int64),  # number in `CALLS`
        ("batches", np.int64),  # micro-batches of the rank
        ("targets", np.float64),  # sum of the loss' counts of these
        ("stop", np.int64),  # 1 if the rank requests to end
        ("failed", np.int64),  # 1 if the rank has an error
        ("numbers", np.int64),  # hash of the micro-batches' numbers
        ("largest", np.int64),  # samples of the largest micro-batch
        ("fingerprint", np.int64),  # digest of what must be equal on all ranks
        ("content", np.int64),  # digest of the micro-batches
        ("weight", np.float64),  # weight of the rank in an average
        ("loss", np.float64),  # sum of its losses
        ("last", np.float64),  # number of the last step
    ]
)
"""Numbers that a rank brings to a meeting."""

_open_points: set[MeetingPoint] = set()

_unfinished: list[Any] = []
"""Requests that may never complete, and their buffers: MPI may still access them."""


class Notice(NamedTuple):
    """Message of a rank that leaves. Meetings and calls that have ended for it end for the others, too."""

    met: int  # meetings that have ended for it
    finished: int  # number of meetings whose call it has finished
    begun: float  # calls that it has begun
    why: str
    of_death: bool  # since a rank has died or does not answer


class MeetingPoint:
    """Meeting point of the ranks of a communicator. Construction and `free` are collective.

    With `may_leave` ranks may leave, or die, without an error of the others.

    Attributes
    ----------
    comm : MPI.Intracomm
        Communicator of this point alone. Threads as ranks have none of MPI, and send no notices.
    order : CallOrder
    left : dict of int to Notice
        Ranks that have left, as far as this rank knows, perhaps itself.
    """

    def __init__(self, comm: MPI.Intracomm, may_leave: bool = False):
        self._owner, self._may_leave = comm, may_leave
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        plain = MPI.Intracomm(comm)
        self._mail = plain.Dup() if plain and self._size > 1 else None  # for notices
        self.comm: Any = self._mail or comm
        self.order = CallOrder(self._mail)
        self._rows = np.zeros(self._size, ROW)
        self.left: dict[int, Notice] = {}
        self._met = self._finished = 0
        _open_points.add(self)

    def meet(self, call: str, **numbers: Any) -> np.ndarray:
        """Begin this call and wait for all ranks to make it. Return their numbers, a `ROW` of each. Collective.

        Raises
        ------
        RankLeft
            If one of them has left.
        StepFailed
            On all ranks, if they make different calls.
        """
        self.order.begin(call)
        return self.gather(**numbers)

    def gather(self, **numbers: Any) -> np.ndarray:
        """As `meet`, within the present call."""
        row = np.zeros(1, ROW)
        for name, value in {"call": CALLS.index(self.order.call), **numbers}.items():
            row[name] = value
        self._finished = self._met
        self._gather(row)
        self._met += 1
        for rank in np.flatnonzero(self._rows["call"] != self._rows["call"][0]).tolist()[:1]:
            first, other = (CALLS[self._rows["call"][at]] for at in (0, rank))
            raise_shared(StepFailed(f"{NOTHING}; rank 0 has called {first}, rank {rank} {other}"), None)
        return self._rows

    def _gather(self, row: np.ndarray) -> None:
        if self._size == 1:
            self._rows[:] = row
            return
        request = self.comm.Iallgather(row.view(np.uint8), self._rows.view(np.uint8))
        found = record() if self._mail is not None else None
        number = 0 if found is None else found.begin_wait(self.order.call, "all ranks", meeting=self.order.key)
        others = range(self._rank + 1, self._rank + min(self._size, 1 + WATCHED))
        awaited = {rank % self._size: "" for rank in others}
        wait = MessageWait(self.order.call, self._owner, lambda: awaited, number=number)
        try:
            self._wait(request.Test, lambda: self._has_left("met", self._met + 1), wait)
            if self._has_left("met", self._met + 1):  # it began the meeting, and gave it up
                self.expect_all()
        except BaseException:
            _unfinished.append((request, row, self._rows))
            raise
        finally:
            if found is not None:
                found.end_wait(number)

    def wait(self, done: Callable[[], bool], peers: Iterable[int], comm: MPI.Intracomm | None = None) -> None:
        """Wait until ``done()``, such as the test of a request. RankLeft if a rank has left meanwhile or before.

        `peers` are the ranks of `comm`, by default of all, that are waited for.
        """
        awaited = dict.fromkeys(peers, "message")
        wait = MessageWait(self.order.call, comm or self._owner, lambda: awaited)
        self._wait(done, lambda: bool(self.notices()), wait)

    def _wait(self, done: Callable[[], bool], is_vain: Callable[[], bool], wait: MessageWait) -> None:
        complete = False

        def ended() -> bool:
            nonlocal complete
            complete = complete or done()
            if not complete:
                self._expect_order(compares_calls=True)
            return complete or is_vain()

        wait.until(ended)
        if not (complete or done()):  # what a rank sent before its notice has arrived
            self.expect_all()

    def _has_left(self, stage: str, count: float) -> bool:
        """True if a rank has left before it had `count` meetings, finished their calls, or begun `count` calls."""
        return any(getattr(notice, stage) < count for notice in self.notices().values())

    def _expect_parts(self) -> None:
        """Raise RankLeft if a rank has left the call of the last meeting before it finished its part."""
        if self._has_left("finished", self._met):
            self.expect_all()

    def _expect_present(self) -> None:
        """Raise RankLeft if a rank has left before it began the call after the present one."""
        if self._has_left("begun", self.order.begun + 1):
            self.expect_all()

    @contextmanager
    def taking_part(self, reports_errors: bool = True, meets: bool = True) -> Iterator[None]:
        """Context of a call of all ranks. Its waits raise RankLeft if a rank leaves it by an error of its own.

        This applies to waits in which Chorus polls: all except waits in the MPI's own collectives. Without
        `reports_errors` only an interrupt, or another exception that ends programs, counts. Without `meets` the ranks
        need not have met in the call, and a rank that leaves right after it counts, too. May be nested.
        """
        if self._may_leave:
            yield
            return
        expect = self._expect_parts if meets else self._expect_present
        # nested contexts watch once, and only the outer one ends the call
        is_outer = expect not in watchers
        if is_outer:
            watchers.append(expect)
        try:
            yield
            if is_outer:
                self._finished = self._met
        except BaseException as error:
            if is_shared(error):
                self._finished = self._met
            elif not isinstance(error, RankLeft) and (reports_errors or not isinstance(error, Exception)):
                self.leave("a call in the middle", error)
            raise
        finally:
            if is_outer:
                watchers.remove(expect)

    def expect_begun(self) -> None:
        """Raise RankLeft if a rank has left before it began the present call. Not collective."""
        if self._has_left("begun", self.order.begun):
            self.expect_all()

    def expect_all(self) -> None:
        """Raise RankLeft if this rank has a notice of another one. Not collective."""
        if self.notices():
            text = "; ".join(f"rank {rank} has left {notice.why}" for rank, notice in sorted(self.left.items()))
            error = RankLeft(f"{NOTHING}; {text}")
            error.of_death = any(notice.of_death for notice in self.left.values())
            raise error

    def watch(self) -> None:
        """Raise RankLeft if another rank is in another engine, or has left, unless ranks may leave, or die.

        For waits in which ranks may be in different calls of this engine. Not collective.
        """
        with suppress(MPI.Exception) if self._may_leave else nullcontext():  # of messages to dead ranks
            self._expect_order(compares_calls=False)
        if not self._may_leave:
            self.expect_all()

    def _expect_order(self, compares_calls: bool) -> None:
        """Raise RankLeft, and leave, if the present call takes long and another rank is in another one.

        See `CallOrder.difference`.
        """
        text = self.order.difference(compares_calls)
        if text is not None:
            self.leave(f"the engine: {text}")
            raise RankLeft(f"{NOTHING}; {text}")

    def notices(self) -> dict[int, Notice]:
        """Receive the notices that have arrived. Returns `left`. Not collective."""
        self.left.update((rank, Notice(*notice)) for rank, notice in messages(self._mail, NOTICE))
        return self.left

    def leave(self, what: str, error: BaseException | None = None) -> None:
        """Send a notice to all other ranks that this one makes no more calls. Not collective. It does not wait.

        Sends none after another rank's notice, since the others have that notice too.
        """
        if not self.is_open:
            return
        _open_points.discard(self)
        self.order.leave()
        if self._mail is not None and not self.left:
            why = what if error is None else f"{what}: {text_of(error)}"
            of_death = isinstance(error, WAIT_ERRORS)
            notice = Notice(self._met, self._finished, self.order.begun, f"{why}{last_call()}"[:LONGEST], of_death)
            self.left[self._rank] = notice
            _unfinished.extend(send_to_others(self._mail, tuple(notice), NOTICE))

    @property
    def is_open(self) -> bool:
        """False after `leave` or `free`."""
        return self in _open_points

    def free(self) -> None:
        """Free the communicator, after a meeting that was the last one. Collective."""
        _open_points.discard(self)
        self.order.end()
        if self._mail is not None:
            self._mail.Free()


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {describe(error)}"


def _leave_all() -> None:
    """Leave all meeting points at the end of the program, for ranks that would wait for this one."""
    if not MPI.Is_finalized():
        error = uncaught_exception()
        for point in list(_open_points):
            point.leave("the program", error)


atexit.register(_leave_all)
