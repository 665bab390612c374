"""Validated description of one rank's part of a collective call: blocks sent and received, and their memory.

Every function takes the arguments of mpi4py's method of that name, validates them before anything is sent, and returns
a `Call`. Collectives that only move data count in bytes, so that ranks may describe
the same data differently; those that reduce count in elements.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate
from math import isqrt
from operator import index
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives.buffers import arguments
from collectives.buffers.arguments import Buffer
from collectives.buffers.memory import InPlace
from collectives.errors import InvalidArgument, InvalidDatatype, InvalidType
from collectives.runtime.ops import Combiner, combine

Blocks: TypeAlias = Mapping[int, int]
"""Block number -> where the block begins in the buffer, in units."""

NONE: Blocks = MappingProxyType({})

BYTE = np.dtype(np.uint8)


class Call(NamedTuple):
    """One rank's part of a collective call.

    Attributes
    ----------
    collective : str
        Name in the catalogue.
    lengths : tuple of int
        Units in every block; a single number for a vector that may be cut anywhere.
    unit : numpy.dtype
        Unit of `lengths`: bytes, or the elements that are reduced.
    source, target : Buffer or None
        The rank's buffers; the same object for a call in place.
    send_blocks, recv_blocks : Blocks
        Blocks that are in `source` at the start and in `target` at the end.
    root : int
    combine : Combiner or None
        The reduction.
    op : Hashable
        Identity of the operation; for a user-defined one also of the datatype that it is called with.
    local_counts : bool
        The rank knows only its own block's length, unless it is the root.
    separate_output : bool
        In place, but the result is assembled in other memory and copied at the end, as only its own part of the buffer
        may change (reduce-scatter).
    copy_input : bool
        The input is a copy of `target`, made at the start (alltoall in place).
    operation : MPI.Op or None
        The operation as given by the user.
    v_form : bool
        Called by a method for blocks of any length, on all ranks.
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

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that a rank can hold: n in the formulas. Equal on all ranks unless `local_counts`."""
        holders = isqrt(len(self.lengths)) if self.collective == "alltoall" else 1
        return sum(self.lengths) * self.unit.itemsize // holders

    @property
    def in_place(self) -> bool:
        """True if input and result are in the same memory."""
        return self.source is self.target and not self.separate_output

    @property
    def ordered(self) -> bool:
        """True if operands must be combined in rank order."""
        return self.combine is not None and not self.combine.commutative


def staged(buffer: Buffer) -> bool:
    """True if the data must be copied to dense host memory first."""
    return buffer.device or not buffer.contiguous


def _root(root: Any, size: int) -> int:
    try:
        rank = index(root)
    except TypeError:
        raise InvalidType(MPI.ERR_ROOT, f"root: expected a rank, found {root!r}") from None
    if not 0 <= rank < size:
        raise InvalidArgument(MPI.ERR_ROOT, f"root: expected a rank from 0 to {size - 1}, found {rank}")
    return rank


def is_in_place(spec: Any) -> bool:
    """True for MPI.IN_PLACE, or None, its synonym in mpi4py; not for a number equal to it."""
    return spec is None or isinstance(spec, InPlace)


def _not_here(sendbuf: Any, root: int) -> InvalidArgument:
    name = "MPI.IN_PLACE" if sendbuf is not None else "None, another name of MPI.IN_PLACE,"
    return InvalidArgument(MPI.ERR_BUFFER, f"sendbuf: {name} is for the root, {root}, only")


def _same_size(sent: int, received: int, what: str) -> None:
    if sent != received:
        raise InvalidArgument(MPI.ERR_COUNT, f"sendbuf holds {sent} bytes, but {what} holds {received}")


def _same_elements(sent: Buffer, count: int, received: Buffer, what: str) -> None:
    """Both sides of a reduction must have the same number of the same elements."""
    same = sent.dtype == received.dtype if sent.dtype is not None else sent.datatype == received.datatype
    if not same:
        raise InvalidDatatype(
            MPI.ERR_TYPE, f"sendbuf has elements {_type(sent)}, but recvbuf has elements {_type(received)}"
        )
    if count != received.count:
        raise InvalidArgument(MPI.ERR_COUNT, f"sendbuf has {count} elements for {what} of {received.count}")


def _type(buffer: Buffer) -> str:
    return str(buffer.dtype) if buffer.dtype is not None else f"of {buffer.itemsize} bytes, a derived datatype"


def _block_bytes(buffer: Buffer) -> tuple[int, ...]:
    """Bytes of each block of a v-form."""
    assert buffer.counts is not None
    return tuple(count * buffer.itemsize for count in buffer.counts)


def _starts(buffer: Buffer) -> tuple[int, ...]:
    """Start of each block of a v-form, in bytes of the memory that the program uses."""
    assert buffer.counts is not None and buffer.displs is not None
    if not buffer.contiguous:  # packed without gaps
        return tuple(accumulate(_block_bytes(buffer)[:-1], initial=0))
    return tuple(displ * buffer.itemsize for displ in buffer.displs)


def _unit(buffer: Buffer) -> np.dtype[Any]:
    """The element that a reduction counts; raw memory of the right width where only MPI knows what it is."""
    return buffer.dtype if buffer.dtype is not None else np.dtype((np.void, buffer.itemsize))


class _Identity:
    """Key of objects that are the same only if they are one. It holds them, so that no others get their ids."""

    __slots__ = ("_ids", "_objects")

    def __init__(self, *objects: object) -> None:
        self._objects, self._ids = objects, tuple(map(id, objects))

    def __hash__(self) -> int:
        return hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._ids == other._ids


def _identity(op: MPI.Op, buffer: Buffer) -> Hashable:
    """Identity of an operation on the buffer's elements, to keep programs by.

    Predefined operations go by handle and depend on the elements' dtype alone. A user's function gets the datatype as
    an argument, and two derived types of equal size may mean different things. MPI gives the handles of freed
    operations and datatypes to new ones, so these go by object.
    """
    return op.handle if op.is_predefined else _Identity(op, buffer.datatype)


def _every(length: int, size: int) -> Blocks:
    return {block: block * length for block in range(size)}


# ------------------------------------------------------------------------------------------ vectors


def barrier() -> Call:
    """Barrier: no data."""
    return Call("barrier", (0,), BYTE)


def broadcast(buf: Any, root: Any, rank: int, size: int) -> Call:
    """The root's vector, everywhere."""
    root = _root(root, size)
    buffer = arguments.vector(buf, "buf", writable=rank != root)
    send_blocks: Blocks = {0: 0} if rank == root else {}
    return Call("broadcast", (buffer.nbytes,), BYTE, buffer, buffer, send_blocks, {0: 0}, root)


def allreduce(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """The sum of all vectors, everywhere."""
    target = arguments.vector(recvbuf, "recvbuf", writable=True)
    source = target if is_in_place(sendbuf) else arguments.vector(sendbuf, "sendbuf")
    _same_elements(source, source.count, target, "a recvbuf")
    kernel = combine(op, source.dtype, source.datatype)
    call = Call("allreduce", (source.count,), _unit(source), source, target, {0: 0}, {0: 0}, 0, kernel)
    return call._replace(op=_identity(op, source), operation=op)


def reduce(sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, rank: int, size: int) -> Call:
    """The sum of all vectors, at the root."""
    root = _root(root, size)
    target = arguments.vector(recvbuf, "recvbuf", writable=True) if rank == root else None
    if is_in_place(sendbuf):
        if target is None:
            raise _not_here(sendbuf, root)
        source = target
    else:
        source = arguments.vector(sendbuf, "sendbuf")
    if target is not None:
        _same_elements(source, source.count, target, "a recvbuf")
    kernel = combine(op, source.dtype, source.datatype)
    recv_blocks: Blocks = {} if target is None else {0: 0}
    call = Call("reduce", (source.count,), _unit(source), source, target, {0: 0}, recv_blocks, root, kernel)
    return call._replace(op=_identity(op, source), operation=op)


def scan(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """The sum of the vectors up to one's own."""
    return allreduce(sendbuf, recvbuf, op, rank, size)._replace(collective="scan")


def exscan(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """The sum of the vectors before one's own; nothing at rank 0."""
    call = allreduce(sendbuf, recvbuf, op, rank, size)._replace(collective="exscan")
    return call if rank else call._replace(recv_blocks=NONE)


# ------------------------------------------------------------------------------------------ equal blocks


def scatter(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int) -> Call:
    """A block of the root's for everyone."""
    root = _root(root, size)
    if rank != root:
        target = arguments.vector(recvbuf, "recvbuf", writable=True)
        return Call("scatter", (target.nbytes,) * size, BYTE, None, target, {}, {rank: 0}, root)
    source = arguments.blocks(sendbuf, size, "sendbuf")
    block = source.block * source.itemsize
    send_blocks = _every(block, size)
    if is_in_place(recvbuf):
        return Call("scatter", (block,) * size, BYTE, source, source, send_blocks, {rank: rank * block}, root)
    target = arguments.vector(recvbuf, "recvbuf", writable=True)
    _same_size(block, target.nbytes, "recvbuf, which takes one of its blocks,")
    return Call("scatter", (block,) * size, BYTE, source, target, send_blocks, {rank: 0}, root)


def gather(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int) -> Call:
    """Everyone's block, at the root."""
    root = _root(root, size)
    if rank != root:
        if is_in_place(sendbuf):
            raise _not_here(sendbuf, root)
        source = arguments.vector(sendbuf, "sendbuf")
        return Call("gather", (source.nbytes,) * size, BYTE, source, None, {rank: 0}, {}, root)
    return _gathered("gather", sendbuf, recvbuf, rank, size)._replace(root=root)


def allgather(sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    """Everyone's block, everywhere."""
    return _gathered("allgather", sendbuf, recvbuf, rank, size)


def _gathered(collective: str, sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    target = arguments.blocks(recvbuf, size, "recvbuf", writable=True)
    block = target.block * target.itemsize
    recv_blocks = _every(block, size)
    if is_in_place(sendbuf):
        return Call(collective, (block,) * size, BYTE, target, target, {rank: recv_blocks[rank]}, recv_blocks)
    source = arguments.vector(sendbuf, "sendbuf")
    _same_size(source.nbytes, block, "its block of recvbuf")
    return Call(collective, (block,) * size, BYTE, source, target, {rank: 0}, recv_blocks)


def reduce_scatter_block(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """A block of the sum for everyone, all blocks alike."""
    if is_in_place(sendbuf):
        source = target = arguments.blocks(recvbuf, size, "recvbuf", writable=True)
    else:
        source = arguments.blocks(sendbuf, size, "sendbuf")
        target = arguments.vector(recvbuf, "recvbuf", writable=True)
        _same_elements(source, source.block, target, "each rank and a recvbuf")
    return _reduce_scattered(source, target, (source.block,) * size, op, rank)


def reduce_scatter(sendbuf: Any, recvbuf: Any, counts: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """A block of the sum for everyone, `counts` elements for each."""
    counts = arguments.numbers(counts, size, "recvcounts")
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
    return _reduce_scattered(source, target, counts, op, rank)._replace(v_form=True)


def _reduce_scattered(source: Buffer, target: Buffer, counts: tuple[int, ...], op: MPI.Op, rank: int) -> Call:
    send_blocks = dict(enumerate(accumulate(counts[:-1], initial=0)))
    kernel = combine(op, source.dtype, source.datatype)
    return Call(
        "reduce_scatter",
        counts,
        _unit(source),
        source,
        target,
        send_blocks,
        {rank: 0},
        combine=kernel,
        op=_identity(op, source),
        operation=op,
        separate_output=source is target,
    )


def alltoall(sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    """A block from everyone for everyone."""
    target = arguments.blocks(recvbuf, size, "recvbuf", writable=True)
    block = target.block * target.itemsize
    send_blocks = {rank * size + peer: peer * block for peer in range(size)}
    recv_blocks = {peer * size + rank: peer * block for peer in range(size)}
    lengths = (block,) * size**2
    if is_in_place(sendbuf):
        return Call("alltoall", lengths, BYTE, None, target, send_blocks, recv_blocks, copy_input=True)
    source = arguments.blocks(sendbuf, size, "sendbuf")
    _same_size(source.block * source.itemsize, block, "a block of recvbuf")
    return Call("alltoall", lengths, BYTE, source, target, send_blocks, recv_blocks)


# ------------------------------------------------------------------------------------------ blocks of any length


def alltoallv(sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    """A block from everyone for everyone, each of its own length."""
    target = arguments.blocks_v(recvbuf, size, "recvbuf", writable=True)
    inwards, ends = _block_bytes(target), _starts(target)
    in_place = is_in_place(sendbuf)
    source = target if in_place else arguments.blocks_v(sendbuf, size, "sendbuf")
    outwards, starts = _block_bytes(source), _starts(source)
    _same_size(outwards[rank], inwards[rank], "its own block of recvbuf")
    lengths = [0] * size**2
    for peer in range(size):
        lengths[rank * size + peer] = outwards[peer]
        lengths[peer * size + rank] = inwards[peer]
    send_blocks = {rank * size + peer: starts[peer] for peer in range(size)}
    recv_blocks = {peer * size + rank: ends[peer] for peer in range(size)}
    call = Call(
        "alltoall", tuple(lengths), BYTE, source, target, send_blocks, recv_blocks, local_counts=True, v_form=True
    )
    return call._replace(source=None, copy_input=True) if in_place else call


def scatterv(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int) -> Call:
    """A block of the root's for everyone, each of its own length."""
    root = _root(root, size)
    if rank != root:
        target = arguments.vector(recvbuf, "recvbuf", writable=True)
        lengths = _only(target.nbytes, rank, size)
        return Call("scatter", lengths, BYTE, None, target, {}, {rank: 0}, root, local_counts=True, v_form=True)
    source = arguments.blocks_v(sendbuf, size, "sendbuf")
    lengths, starts = _block_bytes(source), dict(enumerate(_starts(source)))
    if is_in_place(recvbuf):
        recv_blocks = {rank: starts[rank]}
        return Call("scatter", lengths, BYTE, source, source, starts, recv_blocks, root, local_counts=True, v_form=True)
    target = arguments.vector(recvbuf, "recvbuf", writable=True)
    _same_size(lengths[rank], target.nbytes, "recvbuf, which takes one of its blocks,")
    return Call("scatter", lengths, BYTE, source, target, starts, {rank: 0}, root, local_counts=True, v_form=True)


def gatherv(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int) -> Call:
    """Everyone's block, each of its own length, at the root."""
    root = _root(root, size)
    if rank != root:
        if is_in_place(sendbuf):
            raise _not_here(sendbuf, root)
        source = arguments.vector(sendbuf, "sendbuf")
        lengths = _only(source.nbytes, rank, size)
        return Call("gather", lengths, BYTE, source, None, {rank: 0}, {}, root, local_counts=True, v_form=True)
    return _gathered_v("gather", sendbuf, recvbuf, rank, size)._replace(root=root, local_counts=True, v_form=True)


def allgatherv(sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    """Everyone's block, each of its own length, everywhere."""
    return _gathered_v("allgather", sendbuf, recvbuf, rank, size)._replace(v_form=True)


def _gathered_v(collective: str, sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    target = arguments.blocks_v(recvbuf, size, "recvbuf", writable=True)
    lengths, starts = _block_bytes(target), dict(enumerate(_starts(target)))
    if is_in_place(sendbuf):
        return Call(collective, lengths, BYTE, target, target, {rank: starts[rank]}, starts)
    source = arguments.vector(sendbuf, "sendbuf")
    _same_size(source.nbytes, lengths[rank], "its block of recvbuf")
    return Call(collective, lengths, BYTE, source, target, {rank: 0}, starts)


def _only(length: int, rank: int, size: int) -> tuple[int, ...]:
    return (0,) * rank + (length,) + (0,) * (size - rank - 1)
