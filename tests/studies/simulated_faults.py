"""Ranks in one process that run the schedules of random collectives, with a fault in one of them, and keep records.

Messages between two ranks match in order. A send ends at once, or when it is received. A run ends when no rank can go
on, and `causes` derives from the records why.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.algorithms import catalog
from collectives.cli.faults import KINDS
from collectives.engine.instructions import CallState
from collectives.runtime.record.causes import causes
from collectives.runtime.record.layout import MAGIC, NBYTES, VERSION, RankState, parts
from collectives.runtime.record.reader import ProcessState, RankRecord
from collectives.schedule.steps import Recv, RecvReduce, Send

SILENT = "corrupt"  # no rank waits for wrong data
CALLS = 12
TICK = 1_000_000  # nanoseconds of a round
ROOTED = "broadcast", "reduce", "gather", "scatter"
NAMES = (*ROOTED, "allreduce", "allgather", "alltoall", "reduce_scatter", "barrier", "scan")


class SimulatedCall(NamedTuple):
    """Call of a collective at a line of the program."""

    collective: str
    algorithm: str
    root: int
    nbytes: int
    line: int


class SimulatedFault(NamedTuple):
    """Fault of a rank at a call, from 0, before a round of it if that is above 0."""

    kind: str
    rank: int
    call: int
    round: int = 0


def drawn_call(rng: random.Random, size: int, line: int) -> SimulatedCall:
    """Random call on a number of ranks, of an algorithm that exists on them."""
    name = rng.choice(NAMES)
    able = [one for one in catalog.names(name) if not catalog.find(name, one).placed]
    root = rng.randrange(size) if name in ROOTED else -1
    return SimulatedCall(name, rng.choice(able), root, rng.choice((8, 4096, 1 << 20)) * (name != "barrier"), line)


class SimulatedRank:
    """Rank with its calls to make and its record. `rounds` has the rest of the active call, None outside of calls."""

    def __init__(self, rank: int, size: int, calls: list[SimulatedCall]):
        self.rank, self.size, self.calls = rank, size, calls
        self.header, self.entries = parts(np.zeros(NBYTES, np.uint8))
        header = {"magic": MAGIC, "version": VERSION, "rank": rank, "size": size, "pid": 1, "job": "7", "opened": 1}
        for field, value in header.items():
            self.header[field] = value
        self.made = 0
        self.rounds: Iterator[Sequence[Any]] | None = None
        self.waiting: list[tuple[tuple[int, int], int, bool]] = []  # (pair, number of the message, is a send)
        self.process, self.is_frozen = ProcessState.LIVES, False

    @property
    def is_done(self) -> bool:
        return self.rounds is None and self.made == len(self.calls)

    @property
    def record(self) -> RankRecord:
        return RankRecord(self.header[0], self.entries, self.process)

    def begin(self, now: int) -> None:
        """Begin the next call."""
        call, entry = self.calls[self.made], self.entries[self.made + 1]
        self.made += 1
        reduces = call.collective in ("reduce", "allreduce", "reduce_scatter", "scan")
        fields = {
            "number": self.made, "turn": self.made, "started": now, "nbytes": call.nbytes, "communicator": 1,
            "root": call.root, "round": -1, "peer": -1, "state": CallState.IS_ACTIVE, "collective": call.collective,
            "algorithm": call.algorithm, "dtype": "float64" * reduces, "op": "SUM" * reduces,
        }  # fmt: skip
        for field, value in fields.items():
            entry[field] = value
        self.header["last"] = self.made
        schedule = catalog.build(call.collective, call.algorithm, self.rank, self.size, max(0, call.root))
        self.rounds, self.round = iter(schedule), 0

    def end(self, now: int) -> None:
        """End the active call."""
        self.entries[self.made]["ended"], self.entries[self.made]["state"] = now, CallState.HAS_ENDED
        self.rounds = None

    def note_wait(self, now: int) -> None:
        """Note the round and rank that the active call waits for, and the line."""
        if self.rounds is not None:
            (source, target), _, is_send = self.waiting[0]
            self.entries[self.made]["round"], self.entries[self.made]["peer"] = (
                self.round,
                target if is_send else source,
            )
        line = self.calls[min(self.made - (self.rounds is not None), len(self.calls) - 1)].line
        self.header["line"], self.header["line_seen"] = f"program.py:{line} in main: call()", now


class SimulatedRun:
    """Run of random calls with a fault. `strict` sends end when they are received."""

    def __init__(self, seed: int, kinds: tuple[str, ...] = tuple(KINDS)):
        self.rng = rng = random.Random(seed)
        size, self.strict, self.now = rng.randint(2, 4), rng.random() < 0.5, 0
        calls = [drawn_call(rng, size, 10 + at) for at in range(CALLS)]
        kind, rank, call = rng.choice(kinds), rng.randrange(size), rng.randrange(CALLS)
        within = rng.randrange(4) if kind in ("stop", "kill") else 0
        self.fault = SimulatedFault(kind, rank, call, within)
        self.ranks = [SimulatedRank(at, size, list(calls)) for at in range(size)]
        own = self.ranks[rank].calls
        if kind == "skip":
            del own[call]
        elif kind == "more":
            own.insert(call, own[call])
        elif kind == "diverge":
            own.insert(call, SimulatedCall("broadcast", "mst", size - 1, 24, own[call].line))
        self.sent, self.received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()  # messages that are posted

    def _strikes(self, rank: SimulatedRank) -> bool:
        """True if the fault, of a kind that stops a rank, is now."""
        fault = self.fault
        if rank.rank != fault.rank or fault.kind in ("skip", "more", "diverge", "corrupt"):
            return False
        if rank.rounds is None:
            return rank.made == fault.call and not fault.round
        return rank.made == fault.call + 1 and rank.round >= fault.round > 0

    def _freeze(self, rank: SimulatedRank) -> None:
        kind, rank.is_frozen = self.fault.kind, True
        if kind == "raise":
            rank.header["state"], rank.header["last_words"] = RankState.HAS_RAISED, b"InjectedFault: an injected fault"
        elif kind == "exit":
            rank.header["state"] = RankState.HAS_LEFT
        elif kind != "delay":
            rank.process = {"stop": ProcessState.STOPPED, "kill": ProcessState.HAS_ENDED}[kind]

    def _is_over(self, wait: tuple[tuple[int, int], int, bool]) -> bool:
        pair, number, is_send = wait
        return self.received[pair] >= number if is_send else self.sent[pair] >= number

    def _next_round(self, rank: SimulatedRank) -> Sequence[Any] | None:
        return None if rank.rounds is None else next(rank.rounds, None)

    def advance(self, rank: SimulatedRank) -> bool:
        """Let a rank go on by a round, if it can."""
        if rank.is_frozen or rank.is_done or not all(map(self._is_over, rank.waiting)):
            return False
        if rank.rounds is None:
            if self._strikes(rank):
                self._freeze(rank)
                return True
            rank.begin(self.now)
        rank.waiting, steps = [], self._next_round(rank)
        if steps is None:
            rank.end(self.now)
            if rank.made == len(rank.calls):
                rank.header["state"] = RankState.HAS_LEFT
            return True
        rank.round += 1
        if self._strikes(rank):
            self._freeze(rank)
            return True
        for step in steps:
            if isinstance(step, Send):
                pair = rank.rank, step.peer
                self.sent[pair] += 1
                if self.strict:
                    rank.waiting.append((pair, self.sent[pair], True))
            elif isinstance(step, Recv | RecvReduce):
                pair = step.peer, rank.rank
                self.received[pair] += 1
                rank.waiting.append((pair, self.received[pair], False))
        return True

    def run(self) -> list[str]:
        """Run until no rank can go on. Returns the causes."""
        while able := [rank for rank in self.ranks if self.advance(rank)]:
            self.now += TICK * len(able)
            self.rng.shuffle(self.ranks)
        for rank in self.ranks:
            if not rank.is_frozen or self.fault.kind == "delay":
                rank.note_wait(self.now)
        return causes([rank.record for rank in self.ranks], self.now + TICK)


CONDITIONS = {
    "stop": "is stopped", "kill": "has ended", "raise": "has ended by InjectedFault", "exit": "has left the program",
    "delay": "is in its own code",
}  # fmt: skip


def wrong(run: SimulatedRun, found: list[str]) -> str:
    """Text on causes that do not name the fault: its rank, condition, call, and the line. Empty if they do."""
    fault, text = run.fault, "\n".join(found)
    struck = next(rank for rank in run.ranks if rank.rank == fault.rank)
    others = [rank for rank in run.ranks if rank is not struck and not rank.is_done]
    if fault.kind in SILENT or not (others or struck.rounds is not None):
        return "a false alarm" if found else ""
    if not found:
        return "no cause"
    if fault.kind not in CONDITIONS:
        return "" if f"rank {fault.rank}" in text and "#" in text else "another rank"
    if not others:  # it is in a call that the others have ended
        return "" if struck.is_frozen and (f"rank {fault.rank} {CONDITIONS[fault.kind]}" in text) else "another cause"
    if any(not one.startswith(f"rank {fault.rank} {CONDITIONS[fault.kind]}") for one in found):
        return "another cause"
    if struck.made and f"#{struck.made}" not in text:
        return "another call"
    line = struck.calls[struck.made].line if fault.kind == "delay" else 0
    return "" if not line or f"program.py:{line} " in text else "another line"
