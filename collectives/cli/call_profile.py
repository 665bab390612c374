"""Profile of a program: its collectives, noted from the record with the line of the program that has made each."""

import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import product
from struct import Struct
from time import monotonic_ns, perf_counter
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.communicator import PREDEFINED, Communicator
from collectives.engine.instructions import CALL_RECORD, CALLS_KEPT
from collectives.runtime.methods.collective_forms import DECLARATIONS, FORMS, NEIGHBOR_DECLARATIONS, method_name
from collectives.runtime.record.layout import OUTSIDE
from collectives.runtime.record.writer import record
from collectives.runtime.requests.request import Request
from collectives.topologies import TopologyCommunicator

PACKAGE = __package__.partition(".")[0]

COLUMNS = ("kind", "turn", "started", "ended")
"""Numbers of a noted call: of its `CallKind`, of the call on its channel, and nanoseconds of the monotonic clock."""

MOST = 4_000_000
"""Calls that are noted, of 32 bytes each. Later ones are counted only."""

REPEATS = 3
"""Times that a sampled call, and the MPI's own, are repeated. The fastest counts."""

REPEATING = 0.005
"""Share of the run's time that the repeated calls have taken on any rank, above which no more are repeated."""


def _fibonacci(most: int) -> Iterator[int]:
    """Yield Fibonacci's numbers from 5 to `most`. Their remainders vary: several calls of a loop are met."""
    last, number = 3, 5
    while number <= most:
        yield number
        last, number = number, last + number


SAMPLED = frozenset(_fibonacci(1 << 40))
"""Numbers of the calls that are repeated."""

COUNTS = "_profiled_calls"
"""Attribute of a communicator with the number of its blocking calls by method."""

OBJECT_METHODS = "bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan"
"""Methods that make no call if there is one rank only: it receives a copy of its own object."""

KEPT = "?bBhHiIlLqQfdFD"
"""Types of arrays whose calls are repeated: those that every MPI can add."""

_OFFSETS = {name: field[1] for name, field in (CALL_RECORD.fields or {}).items()}
_CHANNEL, _TURN_AND_TIMES = Struct("=i"), Struct("=3q")
"""Parts of an entry: its channel, and its turn, start and end. NumPy takes longer to read them."""

_CONSTANT = slice(_OFFSETS["nbytes"], _OFFSETS["round"]), slice(_OFFSETS["form"], CALL_RECORD.itemsize)
"""Bytes of an entry that calls of one kind have in common."""


class CallKind(NamedTuple):
    """Line of the program, and a description from the record, that calls have in common."""

    site: str
    communicator: int
    channel: int
    collective: str
    form: str
    algorithm: str
    nbytes: int


class Sample(NamedTuple):
    """Seconds of a repeated call, and of the MPI's own collective with the same arguments."""

    kind: int
    ours: float
    native: float


class CallProfile:
    """Profile of this rank's calls from now on.

    Attributes
    ----------
    kinds : list of CallKind
    calls : array of int64
        `COLUMNS` of each call, one call after the other.
    samples : list of Sample
    left_out : int
        Calls above `MOST` (not noted).
    """

    def __init__(self) -> None:
        found = record()
        if found is None:
            raise OSError("no profile: the system refuses the memory of a record")
        self._record, self._bytes = found, found.entries.view(np.uint8).data
        self._seen = found.last
        self._numbers: dict[tuple[int, int, bytes, bytes], int] = {}  # by code, instruction and parts of an entry
        self._codes: list[CodeType] = []  # alive, so that no other one has its address
        self._under_way: deque[tuple[int, int]] = deque()
        self.kinds: list[CallKind] = []
        self.calls, self.samples, self.left_out = array("q"), list[Sample](), 0
        self._began, self._repeating = perf_counter(), 0.0
        for owner, declared in ((Communicator, DECLARATIONS), (TopologyCommunicator, NEIGHBOR_DECLARATIONS)):
            for declaration, form in product(declared, FORMS):
                self._watch(owner, method_name(declaration.name, form), form == "blocking")
        for name in ("Start", "Wait", "Test"):
            self._watch(Request, name, False)
        for name in OBJECT_METHODS:
            self._watch_alone(name)

    def _watch(self, owner: type, name: str, is_sampled: bool) -> None:
        """Replace a method by one that notes the calls which it has made."""
        method = getattr(owner, name)

        @wraps(method)
        def noted(comm: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                result = method(comm, *arguments, **keywords)
            except BaseException:
                self.note(sys._getframe(1))
                raise
            kind = self.note(sys._getframe(1))
            if is_sampled and self._is_due(comm, name):
                self._sample(kind, comm, method, name, arguments, keywords)
            return result

        setattr(owner, name, noted)

    def _watch_alone(self, name: str) -> None:
        """Replace a method of objects by one that notes the program's calls of it on a single rank."""
        method, rank = getattr(Communicator, name), PREDEFINED["COMM_WORLD"].Get_rank()

        @wraps(method)
        def noted(comm: Any, *arguments: Any, **keywords: Any) -> Any:
            frame = sys._getframe(1)
            if comm.Get_size() > 1 or _is_own(frame):
                return method(comm, *arguments, **keywords)
            started = monotonic_ns()
            result = method(comm, *arguments, **keywords)
            ended, about = monotonic_ns(), (name.encode(), b"")
            if (kind := self._numbers.get((id(frame.f_code), frame.f_lasti, *about))) is None:
                kind = self._numbers[id(frame.f_code), frame.f_lasti, *about] = len(self.kinds)
                self.kinds.append(CallKind(self._site(frame), -1 - rank, 0, name, "blocking", "copy", 0))
            self._keep(kind, len(self.calls), started, ended)
            return result

        setattr(Communicator, name, noted)

    def _keep(self, *call: int) -> bool:
        """Keep the numbers of a call. False if there are `MOST` before it."""
        if len(self.calls) >= len(COLUMNS) * MOST:
            self.left_out += 1
            return False
        self.calls.extend(call)
        return True

    def note(self, frame: FrameType | None) -> int | None:
        """Note the calls since the last one, made by the program in `frame`. Number of the last one's kind."""
        self._complete()
        kind = None
        last = self._record.last
        while self._seen < last:
            self._seen += 1
            entry = self._entry(self._seen)
            if entry is None or _CHANNEL.unpack_from(entry, _OFFSETS["channel"])[0] == OUTSIDE:
                continue
            while frame is not None and _is_own(frame):
                frame = frame.f_back
            kind = self._kind(entry, frame)
            turn, started, ended = _TURN_AND_TIMES.unpack_from(entry, _OFFSETS["turn"])
            if self._keep(kind, turn, started, ended) and not ended:
                self._under_way.append((self._seen, len(self.calls) - 1))
        return kind

    def _entry(self, number: int) -> bytes | None:
        """Entry of a call. None if later ones have taken its place."""
        at = number % CALLS_KEPT * CALL_RECORD.itemsize
        entry = self._bytes[at : at + CALL_RECORD.itemsize].tobytes()
        return entry if int.from_bytes(entry[:8], sys.byteorder) == number else None

    def _complete(self) -> None:
        """Note the ends of calls that were under way, in the order of their starts."""
        while self._under_way:
            number, at = self._under_way[0]
            entry = self._entry(number)
            if entry is not None:
                ended = int.from_bytes(entry[_OFFSETS["ended"] : _OFFSETS["ended"] + 8], sys.byteorder)
                if not ended:
                    return
                self.calls[at] = ended
            self._under_way.popleft()

    def _kind(self, entry: bytes, frame: FrameType | None) -> int:
        at = (id(frame.f_code), frame.f_lasti) if frame is not None else (0, 0)  # a hash of code, a line take longer
        key = *at, entry[_CONSTANT[0]], entry[_CONSTANT[1]]
        if (number := self._numbers.get(key)) is None:
            number = self._numbers[key] = len(self.kinds)
            found = np.frombuffer(entry, CALL_RECORD)[0]
            collective, algorithm = (found[name].decode() for name in ("collective", "algorithm"))
            communicator, channel, form, nbytes = (
                found[name].item() for name in ("communicator", "channel", "form", "nbytes")
            )
            about = communicator, channel, collective, FORMS[form], algorithm, nbytes
            self.kinds.append(CallKind(self._site(frame), *about))
        return number

    def _site(self, frame: FrameType | None) -> str:
        """File and line that a frame is at."""
        if frame is None:
            return f"{__file__}:0"
        self._codes.append(frame.f_code)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    # -------------------------------------------------------------------------------- samples

    def _is_due(self, comm: Any, name: str) -> bool:
        """True for blocking calls of a communicator's method whose numbers are `SAMPLED`: on all ranks for the same."""
        if (made := vars(comm).get(COUNTS)) is None:
            made = vars(comm)[COUNTS] = Counter()
        made[name] += 1
        return made[name] in SAMPLED

    def _sample(
        self,
        kind: int | None,
        comm: Any,
        ours: Callable[..., Any],
        name: str,
        arguments: Any,
        keywords: Any,
    ) -> None:
        """Repeat a call in turns with the MPI's own, unless a rank cannot. What it has received stays."""
        plain = comm.plain
        values = *arguments, *keywords.values()
        given = {name: value for name, value in keywords.items() if name not in ("algorithm", "segments", "timeout")}
        start = perf_counter()
        is_short = self._repeating <= REPEATING * (start - self._began)
        # all or none: calls are collective
        if plain.Get_size() == 1 or not plain.allreduce(is_short and _can_repeat(values), MPI.LAND):
            return
        memory = [*_arrays(values)]
        kept = [one.copy() for one in memory]
        best = [float("inf")] * 2
        try:
            for turn in range(2 * REPEATS):
                plain.Barrier()
                began = perf_counter()
                if turn % 2:
                    getattr(plain, name)(*arguments, **given)
                else:
                    ours(comm, *arguments, **keywords)
                best[turn % 2] = min(best[turn % 2], perf_counter() - began)
        finally:
            for one, before in zip(memory, kept):
                if one.flags.writeable:
                    one[...] = before
            self._seen = self._record.last
            self._repeating += perf_counter() - start
        if kind is not None:
            self.samples.append(Sample(kind, *best))


def _is_own(frame: FrameType) -> bool:
    """True for a frame of this package, not of the program."""
    return bool(frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE)


def _can_repeat(value: Any) -> bool:
    """True if an argument is one that the MPI's own takes, too, and whose memory can be kept: no function of a user."""
    if isinstance(value, np.ndarray):
        return value.dtype.isnative and value.dtype.char in KEPT
    if isinstance(value, list | tuple):
        return all(map(_can_repeat, value))
    if isinstance(value, MPI.Op):
        return bool(value.is_predefined)
    return value is None or value is MPI.IN_PLACE or isinstance(value, int | float | str | np.integer | MPI.Datatype)


def _arrays(value: Any) -> Iterator[np.ndarray]:
    """Arrays in arguments of a call, in lists and tuples too."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _arrays(one)
