"""Collectives of Python objects: pickled by mpi4py's ``MPI.pickle``, and exchanged as bytes by those of arrays.

So they progress active requests, and a wait for a rank that has left ends in an error. Where an object of one rank
cannot be pickled, all ranks that would receive it raise.
"""

# mypy: disable-error-code="override"

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms.neighbors import Neighbors
from collectives.errors import InvalidArgument
from collectives.runtime.methods.collective_methods import CollectiveMethods, NeighborMethods

FRAME, HEAD = 512, 8
"""Bytes of the first message of an object, and of its length in there: short objects take one message."""

LENGTH = np.dtype(np.int64)
"""Type of a packed object's length. Of an error in place of an object, minus the length of its text, minus 1."""

_write_length, _read_length = Struct("=q").pack_into, Struct("=q").unpack_from


class _Packed:
    """A pickled object, or the text of the error that kept it from being one."""

    def __init__(self, value: Any):
        self.problem: Exception | None = None
        try:
            self.data = MPI.pickle.dumps(value)
            self.length = len(self.data)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem, self.data = error, f"{type(error).__name__}: {error}".encode(errors="replace")
        self.length = -1 - len(self.data)

    @classmethod
    def each(cls, values: Any, count: int) -> list["_Packed"]:
        """`count` values, packed. The same error in place of each, and of at least one, if there are not so many."""
        try:
            found = list(values)
            if len(found) != count:
                raise ValueError(f"expected {count} objects, one of each rank, found {len(found)}")
        except Exception as error:
            failed = cls(None)
            failed._fail(error)
            return [failed] * max(1, count)
        return [cls(value) for value in found]

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, np.uint8)

    def fill(self, frame: np.ndarray) -> None:
        """Write the length and the first bytes."""
        _write_length(frame.data, 0, self.length)
        short = self.data[: FRAME - HEAD]
        frame.data[HEAD : HEAD + len(short)] = short


def _nbytes(length: int) -> int:
    return length if length >= 0 else -1 - length


def _object(name: str, sender: int, length: int, data: bytes | memoryview) -> Any:
    if length < 0:
        raise InvalidArgument(MPI.ERR_OTHER, f"{name}: rank {sender} has no object: {bytes(data).decode()}")
    return MPI.pickle.loads(data)


def _unpacked(name: str, lengths: Sequence[int], data: memoryview, senders: Sequence[int] | None = None) -> list[Any]:
    """Objects of all ranks, or of `senders`, whose bytes follow one another in `data`. Raises the error of the first.

    None of a sender that does not exist, of which there are no bytes.
    """
    ends = accumulate(map(_nbytes, lengths), initial=0)
    parts = [data[start:end] for start, end in pairwise(ends)]
    found = zip(range(len(lengths)) if senders is None else senders, lengths, parts)
    return [_object(name, *each) if each[1] else None for each in found]


def _framed(name: str, lengths: Sequence[int], frames: memoryview) -> list[Any]:
    """Objects of all ranks, in their first messages, which the next call overwrites."""
    starts = range(HEAD, len(frames), FRAME)
    parts = [bytes(frames[start : start + _nbytes(length)]) for start, length in zip(starts, lengths)]
    return [_object(name, *found) for found in zip(range(len(lengths)), lengths, parts)]


def _raised(*packed: _Packed) -> None:
    for one in packed:
        if one.problem is not None:
            raise one.problem


class ObjectMethods(CollectiveMethods):
    """Collectives of objects, with the arguments and results of mpi4py's."""

    @cached_property
    def _frames(self) -> tuple[np.ndarray, np.ndarray]:
        """First messages of this rank's object and of those of all ranks."""
        return np.zeros(FRAME, np.uint8), np.zeros(self.Get_size() * FRAME, np.uint8)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of `root`, on all ranks. Collective."""
        frame, packed = self._frames[0], None
        if self.Get_rank() == root:
            packed = _Packed(obj)
            packed.fill(frame)
        self.Bcast(frame, root)
        (length,) = _read_length(frame.data)
        nbytes = _nbytes(length)
        data: bytes | memoryview = bytes(frame.data[HEAD : HEAD + nbytes])  # the next call overwrites the frame
        if nbytes > FRAME - HEAD:
            rest = np.empty(nbytes, np.uint8) if packed is None else packed.array()
            self.Bcast(rest, root)
            data = rest.data
        if packed is not None:
            _raised(packed)
        return _object("bcast", root, length, data)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks, as a list on `root`, None on others. Collective."""
        packed, is_root = _Packed(sendobj), self.Get_rank() == root
        lengths, data = np.empty(self.Get_size() if is_root else 0, LENGTH), None
        self.Gather(np.array([packed.length], LENGTH), lengths, root)
        if is_root:
            data, counts = _room(lengths)
        self.Gatherv(packed.array(), None if data is None else [data, counts], root)
        _raised(packed)
        return None if data is None else _unpacked("gather", lengths.tolist(), data.data)

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """This rank's one of the p objects of `root`. Collective."""
        packed: list[_Packed] = _Packed.each(sendobj, self.Get_size()) if self.Get_rank() == root else []
        length = np.empty(1, LENGTH)
        self.Scatter(np.array([one.length for one in packed], LENGTH), length, root)
        data = np.empty(_nbytes(length.tolist()[0]), np.uint8)
        self.Scatterv(_joined(packed) if packed else None, data, root)
        _raised(*packed)
        return _object("scatter", root, length.tolist()[0], data.data)

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks, as a list. Collective."""
        packed, (frame, frames) = _Packed(sendobj), self._frames
        packed.fill(frame)
        self.Allgather(frame, frames)
        lengths = [_read_length(frames.data, start)[0] for start in range(0, len(frames), FRAME)]
        if max(lengths) <= FRAME - HEAD > -min(lengths):
            _raised(packed)
            return _framed("allgather", lengths, frames.data)
        data, counts = _room(np.array(lengths))
        self.Allgatherv(packed.array(), [data, counts])
        _raised(packed)
        return _unpacked("allgather", lengths, data.data)

    def alltoall(self, sendobj: Any) -> list[Any]:
        """The objects that each rank has for this one, as a list. `sendobj` has p objects. Collective."""
        packed = _Packed.each(sendobj, self.Get_size())
        lengths = np.empty(self.Get_size(), LENGTH)
        self.Alltoall(np.array([one.length for one in packed], LENGTH), lengths)
        data, counts = _room(lengths)
        self.Alltoallv(_joined(packed), [data, counts])
        _raised(*packed)
        return _unpacked("alltoall", lengths.tolist(), data.data)


class NeighborObjectMethods(NeighborMethods):
    """Collectives of neighbours in a topology, of objects too, with the arguments and results of mpi4py's."""

    _neighbors: Neighbors

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all sources, as a list. None of a source that does not exist. Collective."""
        packed = _Packed(sendobj)
        lengths = np.zeros(len(self._neighbors.sources), LENGTH)
        self.Neighbor_allgather(np.array([packed.length], LENGTH), lengths)
        data, counts = _room(lengths)
        self.Neighbor_allgatherv(packed.array(), [data, counts])
        _raised(packed)
        return _unpacked("neighbor_allgather", lengths.tolist(), data.data, self._neighbors.sources)

    def neighbor_alltoall(self, sendobj: Any) -> list[Any]:
        """The objects of all sources, as a list. `sendobj` has one for each destination. Collective."""
        packed = _Packed.each(sendobj, len(self._neighbors.destinations))
        lengths = np.zeros(len(self._neighbors.sources), LENGTH)
        self.Neighbor_alltoall(np.array([one.length for one in packed], LENGTH), lengths)
        data, counts = _room(lengths)
        self.Neighbor_alltoallv(_joined(packed), [data, counts])
        _raised(*packed)
        return _unpacked("neighbor_alltoall", lengths.tolist(), data.data, self._neighbors.sources)


def _room(lengths: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Memory for objects of these lengths, and their bytes."""
    counts = [_nbytes(length) for length in lengths.tolist()]
    return np.empty(sum(counts), np.uint8), counts


def _joined(packed: list[_Packed]) -> list[Any]:
    """All packed objects as a buffer of bytes and their counts."""
    return [np.frombuffer(b"".join(one.data for one in packed), np.uint8), [len(one.data) for one in packed]]
