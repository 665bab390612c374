"""Messages of Python objects: a frame of fixed length, then what did not fit into it, and the arrays of the object.

mpi4py's ``MPI.pickle`` makes the bytes. Unless the program has replaced its functions, long arrays in an object are
buffers of pickle's protocol 5: they are sent from where they are, and received in the memory that they keep.
"""

import gc
import marshal
import pickle
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import write_numbers
from collectives.engine.instructions import FRAME, FRAME_HEAD, Content
from collectives.errors import InvalidArgument

HEAD = FRAME_HEAD.itemsize
ROOM = FRAME - HEAD
"""Bytes of an object in its frame."""

LEAST_BUFFER, MOST_BUFFERS = 1 << 15, 32
"""Bytes of the shortest array that is sent by itself, and most of these in an object: the frame has their lengths."""

_write_head, _read_head = Struct("=qii").pack_into, Struct("=qii").unpack_from


def _dumps(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Pickle of an object, and the memory of its long arrays."""
    buffers: list[np.ndarray] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < LEAST_BUFFER or len(buffers) == MOST_BUFFERS:
            return True
        buffers.append(np.frombuffer(memory, np.uint8))
        return False

    protocol = MPI.pickle.PROTOCOL
    if protocol is None or protocol < 5 or pickle.dumps not in gc.get_referents(MPI.pickle):
        return MPI.pickle.dumps(value), buffers
    return pickle.dumps(value, protocol, buffer_callback=stays), buffers


def _loads(data: Any, buffers: Sequence[np.ndarray]) -> Any:
    return pickle.loads(data, buffers=[one.data for one in buffers]) if buffers else MPI.pickle.loads(data)


def copied(value: Any, frame: np.ndarray) -> Any:
    """An object as other ranks would receive it. `frame` is overwritten."""
    if write_numbers(frame, value):
        return value
    data, buffers = _dumps(value)
    return _loads(data, [np.array(one) for one in buffers])


class SentObject:
    """An object of this rank, whose frame is written. `parts` are what follows the frame."""

    def __init__(self, value: Any, frame: np.ndarray) -> None:
        self.problem: Exception | None = None
        self.parts: list[np.ndarray] = []
        self._data: bytes | None = None
        if write_numbers(frame, value):
            self._value = value
            return
        try:
            self._data, self._buffers = _dumps(value)
        except Exception as error:
            self.fail(error, frame)
            return
        lengths = np.array([one.nbytes for one in self._buffers], np.int64).tobytes()
        data = lengths + self._data if lengths else self._data
        _write(frame, data, len(self._buffers), Content.PICKLED)
        if len(data) > ROOM:
            self.parts.append(np.frombuffer(data, np.uint8)[ROOM:])
        self.parts += self._buffers

    def fail(self, error: Exception, frame: np.ndarray) -> None:
        """Send an error in place of the object."""
        self.problem = error
        _write(frame, f"{type(error).__name__}: {error}".encode(errors="replace")[:ROOM], 0, Content.FAILED)

    def load(self) -> Any:
        """The object as other ranks receive it; raise the error that kept it from being pickled."""
        if self.problem is not None:
            raise self.problem
        if self._data is None:
            return self._value
        return _loads(self._data, [np.array(one) for one in self._buffers])


def _write(frame: np.ndarray, data: bytes, buffers: int, content: Content) -> None:
    memory = frame.data
    _write_head(memory, 0, len(data), buffers, content)
    short = data[:ROOM]
    memory[HEAD : HEAD + len(short)] = short


def sent_objects(values: Any, frames: np.ndarray) -> list[SentObject]:
    """An object for each of `frames`; in place of each the same error if `values` are not so many."""
    try:
        found = [None] * len(frames) if values is None else list(values)
        if len(found) != len(frames):
            raise ValueError(f"expected {len(frames)} objects, one of each rank, found {len(found)}")
    except Exception as error:
        failed = [SentObject(None, frame) for frame in frames]
        for one, frame in zip(failed, frames):
            one.fail(error, frame)
        return failed
    return [SentObject(value, frame) for value, frame in zip(found, frames)]


class ReceivedObject:
    """An object of which the frame has arrived. `parts` are the memory for what follows the frame."""

    def __init__(self, frame: np.ndarray) -> None:
        length, count, self._content = _read_head(frame.data)
        self._lengths = 8 * count
        self._data = np.empty(length, np.uint8)
        self._data[:ROOM] = frame[HEAD : HEAD + length]
        lengths = self._data[: self._lengths].view(np.int64).tolist()
        self._buffers = [np.empty(nbytes, np.uint8) for nbytes in lengths]
        self.parts = [self._data[ROOM:], *self._buffers] if length > ROOM else self._buffers

    def load(self, name: str, sender: int) -> Any:
        """The object, once the parts have arrived; raise InvalidArgument if the sender has none."""
        data = self._data[self._lengths :].data
        if self._content == Content.FAILED:
            text = bytes(data).decode(errors="replace")
            raise InvalidArgument(MPI.ERR_OTHER, f"{name}: rank {sender} has no object: {text}")
        return marshal.loads(data) if self._content == Content.NUMBERS else _loads(data, self._buffers)


def tree(items: Sequence[Any], op: Any) -> Any:
    """Reduction of objects in the order of mpi4py's binomial tree: neighbours first, then pairs of them, and so on."""
    found, step = list(items), 1
    while step < len(found):
        for at in range(0, len(found) - step, 2 * step):
            found[at] = op(found[at], found[at + step])
        step *= 2
    return found[0]


def lower_blocks(items: Sequence[Any], op: Any) -> Iterator[Any]:
    """Reductions of the blocks of a power of two of items that precede the last item, the nearest block first."""
    stop, step = len(items) - 1, 1
    while stop:
        if stop & step:
            yield tree(items[stop - step : stop], op)
            stop -= step
        step *= 2
