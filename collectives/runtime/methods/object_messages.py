"""Messages of Python objects: a frame of fixed length, then what did not fit into it, and the arrays of the object.

mpi4py's ``MPI.pickle`` makes the bytes. Unless the program has replaced its functions, long arrays in an object are
buffers of pickle's protocol 5: they are sent from where they are, and received in the memory that they keep.
"""

import gc
import pickle
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import available, copy_object, engine, read_plain, write_object
from collectives.engine.instructions import FRAME, FRAME_HEAD, Content
from collectives.errors import InvalidArgument
from collectives.runtime.execution.message_wait import MessageWait

HEAD = FRAME_HEAD.itemsize
ROOM = FRAME - HEAD
"""Bytes of an object in its frame."""

LEAST_BUFFER, MOST_BUFFERS = 1 << 15, 32
"""Bytes of the shortest array that is sent by itself, and most of these in an object: the frame has their lengths."""

TAG = 0
"""Tag of messages of blocking calls on the private communicator."""

if available():
    engine.set_pickler(MPI.pickle, pickle.dumps)

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


def copied(value: Any) -> Any:
    """An object as other ranks would receive it."""
    if (copy := copy_object(value)) is not NotImplemented:
        return copy
    data, buffers = _dumps(value)
    return _loads(data, [np.array(one) for one in buffers])


class SentObject:
    """An object of this rank, whose frame is written. `parts` are what follows the frame."""

    parts: Sequence[np.ndarray] = ()
    problem: Exception | None = None
    """The error that kept the object from being pickled."""

    _data = b""
    _buffers: Sequence[np.ndarray] = ()

    def __init__(self, value: Any, frame: np.ndarray) -> None:
        self._value = value
        self._plain = data = write_object(frame, value)
        if data is not None:
            if len(data) > ROOM:
                self.parts = [np.frombuffer(data, np.uint8)]
            return
        try:
            data, buffers = _dumps(value)
        except Exception as error:
            self.fail(error, frame)
            return
        self._data, self._buffers, self.parts = data, buffers, buffers
        lengths = np.array([one.nbytes for one in buffers], np.int64).tobytes() if buffers else b""
        if _write(frame, len(data), lengths, data, Content.PICKLED):
            self.parts = [np.frombuffer(data, np.uint8), *buffers]

    def fail(self, error: Exception, frame: np.ndarray) -> None:
        """Send an error in place of the object."""
        self.problem = error
        text = f"{type(error).__name__}: {error}".encode(errors="replace")[:ROOM]
        _write(frame, len(text), b"", text, Content.FAILED)

    def check(self) -> None:
        """Raise the error that kept the object from being pickled."""
        if self.problem is not None:
            raise self.problem

    def load(self) -> Any:
        """The object as other ranks receive it."""
        self.check()
        if (copy := copy_object(self._value)) is not NotImplemented:
            return copy
        if self._plain is not None:
            return read_plain(self._plain)
        return _loads(self._data, [np.array(one) for one in self._buffers])


def _write(frame: np.ndarray, length: int, lengths: bytes, data: bytes, content: Content) -> bool:
    """Write a frame: the lengths of buffers, and the object. True if that is too long, so that it follows the frame."""
    memory = frame.data
    _write_head(memory, 0, length, len(lengths) // 8, content)
    follows = len(lengths) + length > ROOM
    short = lengths if follows else lengths + data
    memory[HEAD : HEAD + len(short)] = short
    return follows


def sent_objects(values: Any, frames: np.ndarray) -> list[SentObject]:
    """Objects, one for each frame. If there are not as many, an error in place of each, and of at least one."""
    try:
        found = [None] * len(frames) if values is None else list(values)
        if len(found) != len(frames):
            raise ValueError(f"expected {len(frames)} objects, one of each rank, found {len(found)}")
    except Exception as error:
        rows = frames if len(frames) else np.empty((1, FRAME), np.uint8)
        failed = [SentObject(None, row) for row in rows]
        for one, row in zip(failed, rows):
            one.fail(error, row)
        return failed
    return [SentObject(value, frame) for value, frame in zip(found, frames)]


class ReceivedObject:
    """An object of which the frame has arrived. `parts` are the memory for what follows the frame."""

    def __init__(self, frame: np.ndarray) -> None:
        memory = frame.data
        length, count, self._content = _read_head(memory)
        start = HEAD + 8 * count
        lengths = frame[HEAD:start].view(np.int64).tolist() if count else ()
        self._buffers = [np.empty(nbytes, np.uint8) for nbytes in lengths]
        self.parts: Sequence[np.ndarray] = self._buffers
        self._data: Any
        if start + length > FRAME:
            data = np.empty(length, np.uint8)
            self._data, self.parts = data.data, [data, *self._buffers]
        else:
            self._data = bytes(memory[start : start + length])  # the next call overwrites the frame

    def load(self, name: str, sender: int) -> Any:
        """The object, once the parts have arrived; raise InvalidArgument if the sender has none."""
        if self._content == Content.FAILED:
            text = self._data.decode(errors="replace")
            raise InvalidArgument(MPI.ERR_OTHER, f"{name}: rank {sender} has no object: {text}")
        return read_plain(self._data) if self._content == Content.PLAIN else _loads(self._data, self._buffers)


class PartMessages(MessageWait):
    """Messages of what follows frames: (rank, memory) received and sent. A wait for them looks at the ranks."""

    def __init__(
        self,
        name: str,
        comm: MPI.Intracomm,
        incoming: Sequence[tuple[int, np.ndarray]],
        outgoing: Sequence[tuple[int, np.ndarray]],
    ) -> None:
        super().__init__(name, comm, self._unfinished)
        self._peers = [peer for peer, _ in (*incoming, *outgoing)]
        self._requests = [comm.Irecv([part, MPI.BYTE], peer, TAG) for peer, part in incoming]
        self._requests += [comm.Isend([part, MPI.BYTE], peer, TAG) for peer, part in outgoing]

    def are_complete(self) -> bool:
        return MPI.Request.Testall(self._requests)

    def _unfinished(self) -> dict[int, str]:
        return {peer: "object" for peer, one in zip(self._peers, self._requests) if not one.Get_status()}


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
