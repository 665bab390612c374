"""Validated description of one rank's part of a collective call: blocks sent and received, and their memory.

Functions named after collectives take the arguments of mpi4py's method, validate them before anything is sent, and
return a `Call`. Lengths are bytes where data is only moved, so that ranks may describe it differently, else elements.
"""

from collections.abc import Hashable, Mapping
from itertools import accumulate
from math import isqrt
from operator import index
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives.algorithms.neighbors import Neighbors
from collectives.buffers import arguments
from collectives.buffers.arguments import Buffer
from collectives.buffers.datatypes import Identity
from collectives.buffers.device_memory import DeviceMemory
from collectives.buffers.memory import InPlace
from collectives.errors import InvalidArgument, InvalidDatatype, InvalidType, OutOfRange
from collectives.runtime.arguments.ops import Combiner, combine

Blocks: TypeAlias = Mapping[int, int]
"""Block number -> where the block begins in the buffer, in units."""

NONE: Blocks = MappingProxyType({})

BYTE = np.dtype(np.uint8)


class Call(NamedTuple):
    """Validated description of one rank's part of a collective call.

    Attributes
    ----------
    lengths, unit
        Units in every block, or in a vector that may be cut anywhere; the unit is a byte or an element to be reduced.
    source, target
        The rank's buffers; the same object for a call in place.
    send_blocks, recv_blocks
        Blocks that are in `source` at the start and in `target` at the end.
    op, operation
        Identity of the operation (for a user-defined one also of the datatype), and the operation given by the user.
    local_counts
        The rank knows only its own block's length, unless it is the root.
    separate_output
        In place, but the result is assembled in other memory and copied at the end, as only its own part of the buffer
        may change (reduce-scatter).
    copy_input
        The input is a copy of `target`, made at the start (alltoall in place).
    v_form
        Called by a method for blocks of any length, on all ranks.
    typed
        Called by a method with a datatype for each block, on all ranks.
    neighbors
        The neighbours with which a rank exchanges blocks, in place of all ranks. The blocks that it sends are numbered
        first, then those that it receives.
    """

    collective: str
    lengths: tuple[int, ...]
    unit: np.dtype[Any]
    source: Buffer | None = None
    target: Buffer | None = None
    send_blocks: Blocks = NONE
    recv_blocks: Blocks = NONE
    root: int = 0
    combine: Combiner | None = None
    op: Hashable = None
    local_counts: bool = False
    separate_output: bool = False
    copy_input: bool = False
    operation: MPI.Op | None = None
    v_form: bool = False
    typed: bool = False
    neighbors: Neighbors | None = None

    @property
    def nbytes(self) -> int:
        """Message size n of cost formulas in bytes: all blocks of a rank. Same on all ranks unless `local_counts`."""
        if self.neighbors is not None:
            sent = sum(self.lengths[block] for block in self.send_blocks)
            return max(sent, sum(self.lengths) - sent)
        holders = isqrt(len(self.lengths)) if self.collective == "alltoall" else 1
        return sum(self.lengths) * self.unit.itemsize // holders

    @property
    def buffers(self) -> list[Buffer]:
        """List of the source and target buffers that exist. In place the same one twice."""
        return [buffer for buffer in (self.source, self.target) if buffer is not None]

    @property
    def in_place(self) -> bool:
        return self.source is self.target and not self.separate_output

    @property
    def ordered(self) -> bool:
        return self.combine is not None and not self.combine.commutative


def staged(buffer: Buffer) -> bool:
    """True if the buffer is on a device or not contiguous, so that host code works on a dense copy of its data."""
    return buffer.device or not buffer.contiguous


def call_device(call: Call) -> DeviceMemory | None:
    """Device of the first buffer of the call that is on one. None if all are in host memory."""
    return next((DeviceMemory(buffer.owner) for buffer in call.buffers if buffer.device), None)


def _root(root: Any, size: int) -> int:
    if isinstance(root, (np.generic, np.ndarray)) and root.ndim == 0:
        root = root.item()
    try:
        # mpi4py truncates floats; `size / 2` is a rank, 0.5 is none.
        rank = int(root) if isinstance(root, float) and root.is_integer() else index(root)
    except TypeError:
        raise InvalidType(MPI.ERR_ROOT, f"root: expected a rank, found {root!r}") from None
    if not 0 <= rank < size:
        kind = InvalidArgument if abs(rank) < 1 << 31 else OutOfRange
        raise kind(MPI.ERR_ROOT, f"root: expected a rank from 0 to {size - 1}, found {rank}")
    return rank


def is_in_place(spec: Any) -> bool:
    """True if a buffer argument is MPI.IN_PLACE or None, its synonym in mpi4py. False for a number equal to it."""
    return spec is None or isinstance(spec, InPlace)


def _in_place_off_root(sendbuf: Any, root: int) -> InvalidArgument:
    name = "MPI.IN_PLACE" if sendbuf is not None else "None, another name of MPI.IN_PLACE,"
    return InvalidArgument(MPI.ERR_BUFFER, f"sendbuf: {name} is for the root, {root}, only")


def same_size(sent: int, received: int, what: str) -> None:
    if sent != received:
        raise InvalidArgument(MPI.ERR_COUNT, f"sendbuf holds {sent} bytes, but {what} holds {received}")


def _same_elements(sent: Buffer, count: int, received: Buffer, what: str) -> None:
    same = sent.dtype == received.dtype if sent.dtype is not None else sent.datatype == received.datatype
    if not same:
        raise InvalidDatatype(
            MPI.ERR_TYPE, f"sendbuf has elements {_type(sent)}, but recvbuf has elements {_type(received)}"
        )
    if count != received.count:
        raise InvalidArgument(MPI.ERR_COUNT, f"sendbuf has {count} elements for {what} of {received.count}")


def _type(buffer: Buffer) -> str:
    return str(buffer.dtype) if buffer.dtype is not None else f"of {buffer.itemsize} bytes, a derived datatype"


def blocks_of(
    spec: Any, size: int, name: str, v_form: bool, writable: bool = False, typed: bool = False
) -> tuple[Buffer, tuple[int, ...], Blocks]:
    """Parse buffer argument `name` of `size` blocks: buffer, block lengths and offsets (packed if staged), in bytes."""
    if not v_form:
        buffer = arguments.blocks(spec, size, name, writable)
        block = buffer.block * buffer.itemsize
        return buffer, (block,) * size, {rank: rank * block for rank in range(size)}
    if typed:
        buffer, lengths = arguments.blocks_w(spec, size, name, writable)
    else:
        buffer = arguments.blocks_v(spec, size, name, writable)
        lengths = tuple(count * buffer.itemsize for count in buffer.counts or ())
    if buffer.contiguous:
        assert buffer.displs is not None
        return buffer, lengths, {rank: displ * buffer.itemsize for rank, displ in enumerate(buffer.displs)}
    return buffer, lengths, dict(enumerate(accumulate(lengths[:-1], initial=0)))  # packed without gaps


def _known_lengths(length: int, rank: int, size: int, v_form: bool) -> tuple[int, ...]:
    """Lengths of all blocks by rank: `length` for each, or in a v-form 0 for all but this rank's."""
    return (0,) * rank + (length,) + (0,) * (size - rank - 1) if v_form else (length,) * size


def _unit(buffer: Buffer) -> np.dtype[Any]:
    """Dtype of the elements to be reduced. A void dtype of the same size where only MPI knows their type.

    Bytes for a datatype without data.
    """
    if not buffer.itemsize:
        return BYTE
    return buffer.dtype if buffer.dtype is not None else np.dtype((np.void, buffer.itemsize))


def _identity(op: MPI.Op, buffer: Buffer) -> Hashable:
    """Cache key of a reduction: handle of a predefined operation, else identity of operation and datatype."""
    # A user's function gets the datatype as an argument, and two derived types of equal size may mean different things.
    # MPI gives the handles of freed operations and datatypes to new ones.
    return op.handle if op.is_predefined else Identity(op, buffer.datatype)


def _with_op(call: Call, source: Buffer, op: MPI.Op) -> Call:
    if not source.itemsize:  # of a datatype without data
        call = call._replace(lengths=(0,) * len(call.lengths))
    kernel = combine(op, source.dtype, source.datatype)
    return call._replace(combine=kernel, op=_identity(op, source), operation=op)


# ------------------------------------------------------------------------------------------ vectors


def barrier() -> Call:
    return Call("barrier", (0,), BYTE)


def broadcast(buf: Any, root: Any, rank: int, size: int) -> Call:
    root = _root(root, size)
    buffer = arguments.vector(buf, "buf", writable=rank != root)
    send_blocks: Blocks = {0: 0} if rank == root else {}
    return Call("broadcast", (buffer.nbytes,), BYTE, buffer, buffer, send_blocks, {0: 0}, root)


def allreduce(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    target = arguments.vector(recvbuf, "recvbuf", writable=True)
    source = target if is_in_place(sendbuf) else arguments.vector(sendbuf, "sendbuf")
    _same_elements(source, source.count, target, "a recvbuf")
    return _with_op(Call("allreduce", (source.count,), _unit(source), source, target, {0: 0}, {0: 0}), source, op)


def reduce(sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, rank: int, size: int) -> Call:
    root = _root(root, size)
    if rank == root:
        return allreduce(sendbuf, recvbuf, op, rank, size)._replace(collective="reduce", root=root)
    if is_in_place(sendbuf):
        raise _in_place_off_root(sendbuf, root)
    source = arguments.vector(sendbuf, "sendbuf")
    return _with_op(Call("reduce", (source.count,), _unit(source), source, None, {0: 0}, {}, root), source, op)


def scan(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    return allreduce(sendbuf, recvbuf, op, rank, size)._replace(collective="scan")


def exscan(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    call = allreduce(sendbuf, recvbuf, op, rank, size)._replace(collective="exscan")
    return call if rank else call._replace(recv_blocks=NONE)


# ------------------------------------------------------------------------------------------ blocks


def scatter(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int, v_form: bool = False) -> Call:
    root = _root(root, size)
    if rank != root:
        target = arguments.vector(recvbuf, "recvbuf", writable=True)
        lengths = _known_lengths(target.nbytes, rank, size, v_form)
        call = Call("scatter", lengths, BYTE, None, target, {}, {rank: 0}, root)
    else:
        source, lengths, starts = blocks_of(sendbuf, size, "sendbuf", v_form)
        if is_in_place(recvbuf):
            call = Call("scatter", lengths, BYTE, source, source, starts, {rank: starts[rank]}, root)
        else:
            target = arguments.vector(recvbuf, "recvbuf", writable=True)
            same_size(lengths[rank], target.nbytes, "recvbuf, which takes one of its blocks,")
            call = Call("scatter", lengths, BYTE, source, target, starts, {rank: 0}, root)
    return call._replace(local_counts=True, v_form=True) if v_form else call


def gather(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int, v_form: bool = False) -> Call:
    root = _root(root, size)
    if rank == root:
        call = allgather(sendbuf, recvbuf, rank, size, v_form)._replace(collective="gather", root=root)
    else:
        if is_in_place(sendbuf):
            raise _in_place_off_root(sendbuf, root)
        source = arguments.vector(sendbuf, "sendbuf")
        lengths = _known_lengths(source.nbytes, rank, size, v_form)
        call = Call("gather", lengths, BYTE, source, None, {rank: 0}, {}, root)
    return call._replace(local_counts=True, v_form=True) if v_form else call


def allgather(sendbuf: Any, recvbuf: Any, rank: int, size: int, v_form: bool = False) -> Call:
    target, lengths, starts = blocks_of(recvbuf, size, "recvbuf", v_form, writable=True)
    if is_in_place(sendbuf):
        source, send_blocks = target, {rank: starts[rank]}
    else:
        source, send_blocks = arguments.vector(sendbuf, "sendbuf"), {rank: 0}
        same_size(source.nbytes, lengths[rank], "its block of recvbuf")
    return Call("allgather", lengths, BYTE, source, target, send_blocks, starts, v_form=v_form)


def reduce_scatter_block(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    if is_in_place(sendbuf):
        source = target = arguments.blocks(recvbuf, size, "recvbuf", writable=True)
    else:
        source = arguments.blocks(sendbuf, size, "sendbuf")
        target = arguments.vector(recvbuf, "recvbuf", writable=True)
        _same_elements(source, source.block, target, "each rank and a recvbuf")
    return _reduce_scatter(source, target, (source.block,) * size, op, rank)


def reduce_scatter(sendbuf: Any, recvbuf: Any, recvcounts: Any, op: MPI.Op, rank: int, size: int) -> Call:
    counts = arguments.numbers(recvcounts, size, "recvcounts")
    target = arguments.vector(recvbuf, "recvbuf", writable=True)
    source = target if is_in_place(sendbuf) else arguments.vector(sendbuf, "sendbuf")
    if source.count != sum(counts):
        raise InvalidArgument(
            MPI.ERR_COUNT,
            f"recvcounts: {counts} are {sum(counts)} elements, but "
            f"{'recvbuf' if source is target else 'sendbuf'} has {source.count}",
        )
    if source is not target:
        _same_elements(source, counts[rank], target, "this rank and a recvbuf")
    return _reduce_scatter(source, target, counts, op, rank)._replace(v_form=True)


def _reduce_scatter(source: Buffer, target: Buffer, counts: tuple[int, ...], op: MPI.Op, rank: int) -> Call:
    starts = dict(enumerate(accumulate(counts[:-1], initial=0)))
    call = Call("reduce_scatter", counts, _unit(source), source, target, starts, {rank: 0})
    return _with_op(call._replace(separate_output=source is target), source, op)


def alltoall(sendbuf: Any, recvbuf: Any, rank: int, size: int, v_form: bool = False, typed: bool = False) -> Call:
    """Blocks of equal length, in a `v_form` of any length, and if `typed` of a datatype each."""
    target, received, ends = blocks_of(recvbuf, size, "recvbuf", v_form, writable=True, typed=typed)
    in_place = is_in_place(sendbuf)
    source, sent, starts = (
        (target, received, ends) if in_place else blocks_of(sendbuf, size, "sendbuf", v_form, typed=typed)
    )
    same_size(sent[rank], received[rank], "its own block of recvbuf" if v_form else "a block of recvbuf")
    lengths = list(sent) * size
    if v_form:  # only the lengths of this rank's blocks are known
        lengths = [0] * size**2
        lengths[rank::size] = received
        lengths[rank * size : (rank + 1) * size] = sent
    send_blocks = {rank * size + peer: start for peer, start in starts.items()}
    recv_blocks = {peer * size + rank: end for peer, end in ends.items()}
    call = Call("alltoall", tuple(lengths), BYTE, source, target, send_blocks, recv_blocks)
    call = call._replace(source=None, copy_input=True) if in_place else call
    return call._replace(local_counts=True, v_form=True, typed=typed) if v_form else call
