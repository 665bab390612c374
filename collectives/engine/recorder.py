"""The record of a process for programs in Python: a ring of its last calls, in memory that other processes read."""

import time
from struct import Struct

import numpy as np

from collectives.engine.instructions import CALL_RECORD, CALLS_KEPT

_PLACES = {name: place for name, (_, place, *_) in (CALL_RECORD.fields or {}).items()}

AFTER_NUMBER = _PLACES["turn"]
"""Bytes of an entry before all fields but its number."""

_CALL_BYTES = CALL_RECORD.itemsize
_STATE, _ENDED, _NBYTES = (_PLACES[name] for name in ("state", "ended", "nbytes"))
_TWO_WORDS, _WORD = Struct("qq"), Struct("q")


class Recorder:
    """Record of this process: `words`, of which the first is the number of the last call, and a ring of entries."""

    words: memoryview | None = None
    entries: memoryview

    def set_record(self, words: np.ndarray, entries: np.ndarray) -> None:
        """Use this memory."""
        self.entries = entries.view(np.uint8).data
        self.words = words.data

    def start(self, entry: bytes, turns: memoryview, nbytes: int | None) -> int:
        """Note the start of a call. Returns its number."""
        assert self.words is not None, "there is a record"
        self.words[0] = number = self.words[0] + 1
        turns[0] = turn = turns[0] + 1
        at = number % CALLS_KEPT * _CALL_BYTES
        _WORD.pack_into(self.entries, at, 0)
        self.entries[at + AFTER_NUMBER : at + _CALL_BYTES] = entry
        _TWO_WORDS.pack_into(self.entries, at + AFTER_NUMBER, turn, time.monotonic_ns())
        if nbytes is not None:
            _WORD.pack_into(self.entries, at + _NBYTES, nbytes)
        _WORD.pack_into(self.entries, at, number)
        return number

    def end(self, number: int, state: int) -> None:
        """Note the end of a call."""
        at = number % CALLS_KEPT * _CALL_BYTES
        if _WORD.unpack_from(self.entries, at)[0] == number:
            _WORD.pack_into(self.entries, at + _ENDED, time.monotonic_ns())
            self.entries[at + _STATE] = state


recorder = Recorder()
