"""Compiled programs, found by the arguments of a call in compiled code.

This takes less time than a lookup by key. It finds calls whose arguments other than arrays are the same objects
as before, or lists and tuples of these, and whose arrays have the same lengths and dtypes. Of a program for any counts
it reads the counts and displacements of each call. Other calls are looked up by key afterwards.
"""

from __future__ import annotations

import sys
from array import array as _array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import engine_class
from collectives.engine.instructions import (
    CHECK,
    CLASS_WORDS,
    HELD,
    IS_ARRAY,
    IS_BLOCKS,
    IS_BUFFER,
    IS_COUNTS,
    IS_HANDLE,
    IS_OBJECT,
    IS_SEQUENCE,
    MAX_DEPTH,
    QUEUED,
    REFUSED,
    RESULT_BITS,
)
from collectives.runtime.arguments.argument_keys import NO_ARRAY, CallKey, is_constant, is_handle
from collectives.runtime.arguments.call import Call
from collectives.runtime.execution.program import Program

MAX_ENTRIES = 16
"""Entries of a method for each channel. The oldest one goes first."""

ANY = -1
"""`nbytes` of the check of an array of any length."""

MAX_CHECKS = 256
"""Checks of one call's arguments: one for each number in lists of counts."""


def _refuse(*_: Any) -> int:
    return REFUSED


def call_functions() -> defaultdict[str, Callable[..., int]]:
    """Functions that run the calls of a method, by its name. At first they refuse."""
    return defaultdict(lambda: _refuse)


class CompiledCallTable:
    """Compiled programs of one communicator's calls of a form, which take `channels` in turn (see `instructions`).

    ``run[name](sendbuf, recvbuf, op, root, algorithm, segments)`` starts the program of a call of a method. It returns
    `DONE` if that has ended, `REFUSED` if there is none, and otherwise a number for `started`.
    """

    def __init__(self, channels: np.ndarray) -> None:
        self.run = call_functions()
        self._channels = channels
        self._methods: dict[str, _Method] = {}

    def started(self, name: str, number: int) -> tuple[Program, int, int]:
        """The program that a call has started, its channel, and the result of that (see `instructions`).

        Raises if a message has failed.
        """
        entry, result = self._methods[name].entries[number >> RESULT_BITS], number & ((1 << RESULT_BITS) - 1)
        if result != QUEUED:
            entry.program.note(result)
        return entry.program, entry.channel, result

    def unfinished(self, name: str) -> list[Program]:
        """Programs of a method's calls that have not ended, and are not held by a request."""
        entries = [] if name not in self._methods else self._methods[name].entries
        held = self._channels[HELD:]
        return [entry.program for entry in entries if not entry.program.ended and not held[entry.channel]]

    def add(self, programs: Mapping[int, Program], key: CallKey, classes: int, call: Call | None = None) -> None:
        """Let calls with the arguments of `key` run the program of their channel, if for any length in `classes`.

        If a program is for any counts, `call` describes the buffers.
        """
        name = key.arguments[0]
        if name not in self._methods:
            self._methods[name] = _Method(self._channels)
        has_blocks = all(program.has_blocks for program in programs.values())
        self._methods[name].add(programs, key, classes, call if has_blocks else None)
        self.run[name] = self._methods[name].run

    def discard(self, program: Program) -> None:
        """Forget all calls of a program."""
        for method in self._methods.values():
            method.discard(program)

    def clear(self) -> None:
        self.run.clear()
        self._methods.clear()


class _Method:
    """Compiled programs of one method."""

    def __init__(self, channels: np.ndarray) -> None:
        self.entries: list[_Entry] = []
        self.run = engine_class("CallTable")(channels, NO_ARRAY)

    def add(self, programs: Mapping[int, Program], key: CallKey, classes: int, call: Call | None) -> None:
        """Add programs, by channel, for the arguments of a key. Beyond `MAX_ENTRIES` of one forget its oldest."""
        described = _block_checks(key.given, call) if call is not None else {}
        checks = [
            check for number, value in enumerate(key.given) for check in described.get(number, _checks(value, number))
        ]
        if len(checks) > MAX_CHECKS or not all(check.is_possible for check in checks) or not key.is_current:
            return
        # the only array is then both buffers
        in_place = call is None and sum(check.array is not None for check in checks) == 1
        records = np.array([check.record(3 if in_place else 1 << check.argument) for check in checks], CHECK)
        if classes:
            records["nbytes"][np.isin(records["kind"], (IS_ARRAY, IS_BUFFER))] = ANY
        identity, referred = records.tobytes(), [check.refers_to for check in checks]
        entries = self.entries
        for channel, program in programs.items():
            known = [one for one in entries if one.program is program and one.identity == identity]
            for one in known:
                one.classes[...] |= _words(classes)
            if not known:
                others = [one for one in entries if one.channel != channel]
                alike = [one for one in entries if one.channel == channel][1 - MAX_ENTRIES :]
                entries = [*others, *alike, _Entry(program, channel, records, identity, _words(classes), referred)]
        if entries is not self.entries:
            self._store(entries)

    def discard(self, program: Program) -> None:
        self._store([entry for entry in self.entries if entry.program is not program])

    def _store(self, entries: list[_Entry]) -> None:
        rows = tuple((one.program.engine, one.checks, one.channel, one.classes, one.referred) for one in entries)
        self.run.store(())  # until the entries are these: Ctrl-C may come before
        self.entries = entries
        self.run.store(rows)


@cache
def _format_array(text: str) -> np.ndarray:
    """Array of the characters of a format, and a zero."""
    return np.frombuffer(text.encode() + b"\0", np.uint8)


def _words(classes: int) -> np.ndarray:
    """Words of a set of size classes, which the engine reads."""
    return np.frombuffer(bytearray(classes.to_bytes(8 * CLASS_WORDS, sys.byteorder)), np.uint64)


class _Entry(NamedTuple):
    program: Program
    channel: int
    checks: np.ndarray
    identity: bytes
    """The bytes of the checks."""

    classes: np.ndarray
    """Size classes of calls for which a program for any length is the right one."""

    referred: list[Any]
    """Objects whose addresses the checks have: held, so that no others get these addresses."""


class _Check(NamedTuple):
    """Check of an argument, or of an item in its lists and tuples: see `instructions`."""

    kind: int
    value: Any
    argument: int
    path: tuple[tuple[int, bool], ...]
    length: int = 0
    array: np.ndarray | memoryview | None = None
    """Memory of a buffer."""

    itemsize: int = 0
    """Bytes of an element of a buffer of any counts. They are in the argument `counted` if that is not 0."""

    counted: int = 0
    counts: np.ndarray | memoryview | None = None
    content: np.ndarray = NO_ARRAY
    """An array of counts, and a copy of its bytes."""

    @property
    def is_possible(self) -> bool:
        """False for items too deep, and for objects among them that may change their value."""
        if (self.kind == IS_BLOCKS or (self.kind == IS_OBJECT and self.path)) and not is_constant(self.value):
            return False
        return len(self.path) <= MAX_DEPTH and (self.kind not in (IS_BUFFER, IS_BLOCKS) or self.array is not None)

    def record(self, buffers: int) -> tuple[Any, ...]:
        """Values of the fields of `CHECK`."""
        path = [*self.path, *[(0, False)] * (MAX_DEPTH - len(self.path))]
        memory, described = (0, 0, 0, 0), self.array if self.counts is None else self.counts
        if described is not None:
            nbytes = self.itemsize or described.nbytes
            dimensions = 0 if self.kind == IS_BLOCKS and type(described) is np.ndarray else described.ndim
            memory = 0 if self.array is None else buffers, self._type_address, dimensions, nbytes
        content = self.counted if self.kind == IS_BLOCKS else self.content.ctypes.data
        return self.kind, id(self.value), self.length, *memory, content, self.argument, len(self.path), path

    @property
    def refers_to(self) -> Any:
        """Objects whose addresses are in the words."""
        return self.value, self._type, self.content

    @property
    def _type(self) -> Any:
        """Dtype of an array, or format of another buffer, as the engine compares it. The same for equal ones."""
        described = self.array if self.counts is None else self.counts
        if isinstance(described, memoryview):
            return _format_array(described.format or "B")
        return None if described is None else described.dtype

    @property
    def _type_address(self) -> int:
        found = self._type
        return int(found.ctypes.data) if isinstance(found, np.ndarray) else id(found)


def _block_checks(given: tuple[Any, ...], call: Call) -> dict[int, list[_Check]]:
    """Checks of the buffers of a call for any counts, and of its counts, by argument. None of those that it ignores."""
    counted = 3 if call.collective == "reduce_scatter" else 0  # the argument in the place of a root
    found: dict[int, list[_Check]] = {counted: []} if counted else {}
    for number, buffer in enumerate((call.source, call.target)):
        if buffer is None:
            found[number] = []
        elif call.source is not call.target or number == 1:
            value, blocks = given[number], (call.send_blocks, call.recv_blocks)[number]
            parts = value if type(value) in (list, tuple) else (value,)
            datatype = parts[-1] if _has_datatype(parts) else None
            own = 0 if number else counted
            length = len(blocks) if own or buffer.counts is not None else 0
            array, itemsize = parts[0] if type(parts[0]) is np.ndarray else _view(parts[0]), buffer.itemsize
            found[number] = [_Check(IS_BLOCKS, datatype, number, (), length, array, itemsize, own)]
    return found


def _has_datatype(parts: Sequence[Any]) -> bool:
    """True if the last part of a buffer argument is its datatype."""
    return len(parts) > 2 or (len(parts) == 2 and isinstance(parts[1], (MPI.Datatype, str)))


def _checks(value: Any, argument: int, path: tuple[tuple[int, bool], ...] = ()) -> Iterator[_Check]:
    kind = type(value)
    is_buffer = argument < 2 and not path[1:] and not any(index for index, _ in path)
    if isinstance(value, np.ndarray) and is_buffer:
        yield _Check(IS_ARRAY, kind, argument, path, array=value)
    elif kind is list or kind is tuple:
        yield _Check(IS_SEQUENCE, kind, argument, path, len(value))
        for index, item in enumerate(value):
            yield from _checks(item, argument, (*path, (index, kind is list)))
    elif is_handle(value):
        yield _Check(IS_HANDLE, value, argument, path)
    elif kind in (np.ndarray, _array) and not is_buffer:
        content = np.frombuffer(value.tobytes(), np.uint8)  # a copy: they may change in the same object
        counts = value if kind is np.ndarray else memoryview(value)
        yield _Check(IS_COUNTS, kind, argument, path, counts=counts, content=content)
    elif is_buffer and not is_constant(value) and value is not MPI.IN_PLACE:
        yield _Check(IS_BUFFER, kind, argument, path, array=_view(value))
    else:
        yield _Check(IS_OBJECT, value, argument, path)


def _view(value: Any) -> memoryview | None:
    """Memory of an object by the buffer protocol. None if it has none."""
    try:
        memory = memoryview(value)
    except TypeError:
        return None
    return memory if memory.contiguous and memory.format is not None else None
