"""The engine in Python: runs programs where no compiler was at hand, and is the reference of the compiled one.

Both leave the same bytes and the same flags, so that ranks with either of them work together. Requests and the lookup
of calls by their arguments stay with Python code here (`REFUSED`).

Flags are 8-byte words that Python stores and loads whole. Processors of the x86 family keep stores in order and loads
in order, so the flag needs no fence there. On others a fence runs before a flag is set, after it was found set, and
before it is acknowledged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.instructions import (
    DONE,
    IGNORED,
    MISMATCH,
    REFUSED,
    WAITING,
    CallState,
    Kind,
)
from collectives.engine.mailbox_rows import MailboxRows
from collectives.engine.recorder import AFTER_NUMBER, recorder
from collectives.engine.row_operands import Row

NAP = 2e-5
"""Seconds of a sleep of the progress thread."""

_yield_core: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))


class _Expected(NamedTuple):
    """Expected array of `Program.run`: the program's memory in the array, and the offset of that memory.

    `nbytes` of the array may not overlap the other one.
    """

    memory: int = IGNORED
    offset: int = 0
    nbytes: int = 0
    written: bool = False
    per_element: int = 0
    """Bytes of the array for each element of a program for any length."""


class RowProgram(MailboxRows):
    """A program: arrays as `assembly.Rows` has them, and the state of its run.

    Attributes
    ----------
    polls, call_polls : polls without progress after which a wait, or a call, returns
    shares_cores : the core is yielded between polls
    is_deferred : a start only stores addresses
    is_running : from a start of the program to its end
    number : of the active call in the record; 0: none
    round, failed : index of the current round, and of the row that failed
    moves : number that changes with progress
    finished : called with the index of each row that is done, if not None
    """

    polls = call_polls = round = moves = number = 0
    shares_cores = is_deferred = is_running = _is_busy = False
    finished: Callable[[int], object] | None = None
    _entry: bytes | None = None
    _turns: memoryview

    def __init__(
        self,
        rows: np.ndarray,
        operands: np.ndarray,
        streams: np.ndarray,
        rounds: np.ndarray,
        bases: np.ndarray,
        links: Sequence[np.ndarray],
        messages: np.ndarray,
        spare: np.ndarray,
        calls: Sequence[Callable[[], object]],
    ) -> None:
        super().__init__(rows, operands, bases, links, spare)
        self._stops = [(first, stop) for first, stop, _ in streams.tolist()]
        self._positions = streams.view(np.int64).data[2::3]  # `position` of each
        self._rounds = [range(*bounds) for bounds in pairwise(rounds.tolist())]
        self._calls, self._messages, self._requests = calls, messages, [MPI.REQUEST_NULL] * len(messages)
        self._expected = [_Expected()] * 2
        attempts = {
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.LOCAL: self._compute,
            Kind.WAIT_STREAM: self._await_stream,
            Kind.WAIT_READ: self._await_read,
            Kind.NET_SEND: self._start_message,
            Kind.NET_RECV: self._start_message,
            Kind.NET_WAIT: self._test_message,
            Kind.EXPECT_NONE: self._expect_none,
            Kind.CALL: self._call,
        }
        self._attempts = [attempts[Kind(row["kind"])] for row in self._rows]

    # -------------------------------------------------------------------------------- runs

    def expect(self, number: int, written: bool, memory: int, offset: int, nbytes: int, per_element: int) -> None:
        """Describe the array with a number in `run`: the memory in it, and the bytes that may not overlap."""
        self._expected[number] = _Expected(memory, offset, nbytes, written, per_element)

    def describe(self, entry: np.ndarray, turns: np.ndarray) -> None:
        """Note calls in the record: as copies of `entry`, with numbers that `turns` counts."""
        self._entry, self._turns = entry.tobytes()[AFTER_NUMBER:], turns.data

    def begin(self) -> None:
        """Begin a call."""
        if recorder.words is not None and self._entry is not None:
            self.note_end(CallState.WAS_LEFT)
            nbytes = None if self._scale is None else int(self._scale["length"] * self._scale["call_bytes"])
            self.number = recorder.start(self._entry, self._turns, nbytes)
        self.is_running = True

    def note_end(self, state: int) -> None:
        """Note in the record that the call has ended by itself (`HAS_ENDED`), or that this rank has left it."""
        if self.number:
            recorder.end(self.number, state)
            self.number = 0
        if state == CallState.HAS_ENDED:
            self.is_running = False

    def accepts(self, *arrays: np.ndarray) -> bool:
        """True if `run` would start the program on these arrays."""
        return self._places(arrays) is not None

    def run(self, *arrays: np.ndarray) -> int:
        """Start the program on a send and a receive buffer like those of `expect`. `REFUSED` if they are not."""
        found = self._places(arrays)
        if found is None:
            return REFUSED
        places, length = found
        if length is not None:
            self.resize(length)
        for place, expected in zip(places, self._expected):
            self._bases[expected.memory] = place
        self.begin()
        return WAITING if self.is_deferred else self.advance(self.call_polls)

    def _places(self, arrays: Sequence[np.ndarray]) -> tuple[list[int], int | None] | None:
        """Addresses of the memories in these arrays, and the length of the call. None if they are not acceptable."""
        places: list[int] = []
        lengths: set[float] = set()
        for array, expected in zip(arrays, self._expected, strict=True):
            if not array.flags.forc or (expected.written and not array.flags.writeable):
                return None
            address = MPI.Get_address(array) if array.size else 0
            places.append(address + expected.offset)
            if self._scale is not None and expected.per_element:
                lengths.add(array.nbytes / expected.per_element)
        if len(lengths) > 1 or any(length != int(length) for length in lengths):
            return None
        length = int(lengths.pop()) if lengths else None
        nbytes = [one.nbytes if length is None else length * one.per_element for one in self._expected]
        ends = [place + each for place, each in zip(places, nbytes)]
        if all(one.nbytes for one in self._expected) and places[0] < ends[1] and places[1] < ends[0]:
            return None  # they overlap
        return places, length

    def advance(self, polls: int) -> int:
        """Run until the program has ended or failed, or `polls` polls in a row were without progress."""
        if not self.is_running:
            return DONE
        if self._is_busy:  # this frame has interrupted the one that advances it
            return WAITING
        self._is_busy = True
        try:
            return self._advance(polls)
        finally:
            self._is_busy = False

    def advance_patiently(self, polls: int, naps: int) -> int:
        """`advance`, with up to `naps` sleeps while the program waits."""
        while (result := self.advance(polls)) == WAITING and naps > 0:
            time.sleep(NAP)
            naps -= 1
        return result

    def _advance(self, polls: int) -> int:
        self.failed = -1
        self._update_views()
        while self.round < len(self._rounds):
            streams: Sequence[int] = self._rounds[self.round]
            left = polls
            while waiting := [stream for stream in streams if self.failed >= 0 or not self._run_stream(stream)]:
                if self.failed >= 0:  # then no stream after it has run
                    self.note_end(CallState.HAS_FAILED)
                    return MISMATCH
                if self._has_moved:
                    self._has_moved, left = False, polls
                    self.moves += 1
                    streams = waiting
                    continue
                left -= 1
                if left < 0:
                    return WAITING
                if self.shares_cores:
                    _yield_core()
            for stream in self._rounds[self.round]:
                self._positions[stream] = self._stops[stream][0]
            self.round += 1
        self.round = 0
        self.note_end(CallState.HAS_ENDED)
        return DONE

    def _run_stream(self, stream: int) -> bool:
        """Run a stream as far as possible. True at its end."""
        positions, stop = self._positions, self._stops[stream][1]
        while (position := positions[stream]) < stop:
            row = self._rows[position]
            if not self._attempts[position](row):
                return False
            positions[stream] = position + 1
            self._has_moved = True
            if self.finished is not None:
                self.finished(position)
        return True

    def _await_stream(self, row: Row) -> bool:
        return bool(self._positions[row["after"]] - self._stops[row["after"]][0] >= row["count"])

    # -------------------------------------------------------------------------------- the MPI, and functions

    def _start_message(self, row: Row) -> bool:
        message, receives = self._messages[row["link"]], row["kind"] == Kind.NET_RECV
        comm = MPI.Intracomm.fromhandle(int(message["comm"]) % (1 << 64))  # as mpi4py gives it: without a sign
        peer, tag = int(message["peer"]), int(message["tag"])
        buffer = None
        if row["nbytes"]:
            operand = self._operands[row["first_operand"]]
            side = "out" if receives else "left"
            address = self._address((operand[side], operand[f"{side}_offset"]))
            buffer = MPI.buffer.fromaddress(address, row["nbytes"])
        start = comm.Irecv if receives else comm.Isend
        self._requests[row["link"]] = start([buffer, row["nbytes"], MPI.BYTE], peer, tag)
        return True

    def _test_message(self, row: Row) -> bool:
        status = MPI.Status()
        if not self._requests[row["link"]].Test(status):
            return False
        if self._messages[row["link"]]["receives"]:
            found = status.Get_count(MPI.BYTE)
            if found != row["nbytes"]:
                self._messages[row["link"]]["count"], self.failed = found, row["index"]
                return False
        return True

    def _call(self, row: Row) -> bool:
        return self._calls[row["link"]]() is not False

    # -------------------------------------------------------------------------------- requests, which Python manages

    def runs_for(self, *_: object) -> bool:
        """False: the engine manages no request."""
        return False

    def end(self, *_: object) -> int:
        """Refuse: the interpreter manages no requests, Python code does."""
        return REFUSED

    is_idle = False
    start = activate = take_back = manage = end


class CallTable:
    """Table of programs by the arguments of calls: empty, as Python code looks them up by key."""

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, *_: object) -> int:
        return REFUSED

    def store(self, _: object) -> None:
        """Do nothing."""
