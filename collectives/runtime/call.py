"""What one call asks for: which blocks a rank brings and takes, where in whose memory. No choice is made here.

Every function takes the arguments as mpi4py's method of that name does, refuses what is wrong with them before
anything is sent, and returns a `Call`. Collectives that only move data count in bytes, so that ranks may describe
the same data differently; those that reduce count in elements.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate
from math import isqrt
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives import buffers
from collectives.buffers import Buffer
from collectives.errors import InvalidArgument, InvalidType
from collectives.runtime.ops import Combine, combine

Blocks: TypeAlias = Mapping[int, int]
"""Block number -> where the block begins in the buffer, in units."""

NONE: Blocks = MappingProxyType({})

BYTE = np.dtype(np.uint8)


class Call(NamedTuple):
    """One rank's part of a collective call.

    Attributes
    ----------
    collective : str
        A name in the catalogue.
    lengths : tuple of int
        Units in every block; a single number for a vector that may be cut anywhere.
    unit : numpy.dtype
        What is counted: bytes, or the elements that are reduced.
    source, target : Buffer or None
        The rank's memory; the same object where the call works in place.
    brings, takes : Blocks
        The blocks that lie in `source` at first and in `target` at the end.
    root : int
    combine : Combine or None
        The reduction.
    op : Hashable
        What tells the operation from others for as long as `combine` lives.
    private : bool
        Whether the rank knows only its own block's length, unless it is the root.
    moved : int
        The block that lands elsewhere than it is wanted and moves to the beginning of `target` at the very end; -1
        for none. (A reduce-scatter in place.)
    snapshot : bool
        Whether the rank brings a copy of `target` taken at the very beginning. (An alltoall in place.)
    operation : MPI.Op or None
        The reduction as the user named it.
    uneven : bool
        Whether it was asked for by a method that takes blocks of any length, on all ranks.
    """

    collective: str
    lengths: tuple[int, ...]
    unit: np.dtype[Any]
    source: Buffer | None = None
    target: Buffer | None = None
    brings: Blocks = NONE
    takes: Blocks = NONE
    root: int = 0
    combine: Combine | None = None
    op: Hashable = None
    private: bool = False
    moved: int = -1
    snapshot: bool = False
    operation: MPI.Op | None = None
    uneven: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that a rank can hold: n in the formulas. Equal on all ranks unless `private`."""
        holders = isqrt(len(self.lengths)) if self.collective == "alltoall" else 1
        return sum(self.lengths) * self.unit.itemsize // holders

    @property
    def ordered(self) -> bool:
        """Whether ranks must be combined in order."""
        return self.combine is not None and not self.combine.commutative


def staged(buffer: Buffer) -> bool:
    """Whether the data must be brought into dense host memory first."""
    return buffer.device or not buffer.contiguous


def _root(root: Any, size: int) -> int:
    if not isinstance(root, (int, np.integer)):
        raise InvalidType(MPI.ERR_ROOT, f"root: expected a rank, found {root!r}")
    if not 0 <= root < size:
        raise InvalidArgument(MPI.ERR_ROOT, f"root: expected a rank from 0 to {size - 1}, found {root}")
    return int(root)


def is_in_place(spec: Any) -> bool:
    """Whether the argument is MPI.IN_PLACE."""
    return spec is MPI.IN_PLACE or (isinstance(spec, int) and spec == MPI.IN_PLACE)


def _same_size(sent: int, received: int, what: str) -> None:
    if sent != received:
        raise InvalidArgument(MPI.ERR_COUNT, f"sendbuf holds {sent} bytes, but {what} holds {received}")


def _same_elements(sent: Buffer, count: int, received: Buffer, what: str) -> None:
    """Both sides of a reduction must have the same number of the same elements."""
    same = sent.dtype == received.dtype if sent.dtype is not None else sent.datatype == received.datatype
    if not same:
        raise InvalidType(
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
    """Where each block of a v-form begins, in bytes of the memory that the program sees."""
    assert buffer.counts is not None and buffer.displs is not None
    if not buffer.contiguous:  # packed without gaps
        return tuple(accumulate(_block_bytes(buffer)[:-1], initial=0))
    return tuple(displ * buffer.itemsize for displ in buffer.displs)


def _unit(buffer: Buffer) -> np.dtype[Any]:
    """The element that a reduction counts; raw memory of the right width where only MPI knows what it is."""
    return buffer.dtype if buffer.dtype is not None else np.dtype((np.void, buffer.itemsize))


def _identity(op: MPI.Op) -> Hashable:
    """The handle of a predefined operation; MPI may give that of a freed one to the next, so others go by object."""
    return op.handle if op.is_predefined else (id(op),)


def _every(length: int, size: int) -> Blocks:
    return {block: block * length for block in range(size)}


# ------------------------------------------------------------------------------------------ vectors


def barrier() -> Call:
    """Nothing but the news."""
    return Call("barrier", (0,), BYTE)


def broadcast(buf: Any, root: Any, rank: int, size: int) -> Call:
    """The root's vector, everywhere."""
    root = _root(root, size)
    buffer = buffers.vector(buf, "buf", writable=rank != root)
    brings: Blocks = {0: 0} if rank == root else {}
    return Call("broadcast", (buffer.nbytes,), BYTE, buffer, buffer, brings, {0: 0}, root)


def allreduce(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """The sum of all vectors, everywhere."""
    target = buffers.vector(recvbuf, "recvbuf", writable=True)
    source = target if is_in_place(sendbuf) else buffers.vector(sendbuf, "sendbuf")
    _same_elements(source, source.count, target, "a recvbuf")
    kernel = combine(op, source.dtype, source.datatype)
    call = Call("allreduce", (source.count,), _unit(source), source, target, {0: 0}, {0: 0}, 0, kernel, _identity(op))
    return call._replace(operation=op)


def reduce(sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, rank: int, size: int) -> Call:
    """The sum of all vectors, at the root."""
    root = _root(root, size)
    target = buffers.vector(recvbuf, "recvbuf", writable=True) if rank == root else None
    if is_in_place(sendbuf):
        if target is None:
            raise InvalidArgument(MPI.ERR_BUFFER, f"sendbuf: MPI.IN_PLACE is for the root, {root}, only")
        source = target
    else:
        source = buffers.vector(sendbuf, "sendbuf")
    if target is not None:
        _same_elements(source, source.count, target, "a recvbuf")
    kernel = combine(op, source.dtype, source.datatype)
    takes: Blocks = {} if target is None else {0: 0}
    call = Call("reduce", (source.count,), _unit(source), source, target, {0: 0}, takes, root, kernel, _identity(op))
    return call._replace(operation=op)


def scan(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """The sum of the vectors up to one's own."""
    return allreduce(sendbuf, recvbuf, op, rank, size)._replace(collective="scan")


def exscan(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """The sum of the vectors before one's own; nothing at rank 0."""
    call = allreduce(sendbuf, recvbuf, op, rank, size)._replace(collective="exscan")
    return call if rank else call._replace(takes=NONE)


# ------------------------------------------------------------------------------------------ equal blocks


def scatter(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int) -> Call:
    """A block of the root's for everyone."""
    root = _root(root, size)
    if rank != root:
        target = buffers.vector(recvbuf, "recvbuf", writable=True)
        return Call("scatter", (target.nbytes,) * size, BYTE, None, target, {}, {rank: 0}, root)
    source = buffers.blocks(sendbuf, size, "sendbuf")
    block = source.block * source.itemsize
    brings = _every(block, size)
    if is_in_place(recvbuf):
        return Call("scatter", (block,) * size, BYTE, source, source, brings, {rank: rank * block}, root)
    target = buffers.vector(recvbuf, "recvbuf", writable=True)
    _same_size(block, target.nbytes, "recvbuf, which takes one of its blocks,")
    return Call("scatter", (block,) * size, BYTE, source, target, brings, {rank: 0}, root)


def gather(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int) -> Call:
    """Everyone's block, at the root."""
    root = _root(root, size)
    if rank != root:
        if is_in_place(sendbuf):
            raise InvalidArgument(MPI.ERR_BUFFER, f"sendbuf: MPI.IN_PLACE is for the root, {root}, only")
        source = buffers.vector(sendbuf, "sendbuf")
        return Call("gather", (source.nbytes,) * size, BYTE, source, None, {rank: 0}, {}, root)
    return _gathered("gather", sendbuf, recvbuf, rank, size)._replace(root=root)


def allgather(sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    """Everyone's block, everywhere."""
    return _gathered("allgather", sendbuf, recvbuf, rank, size)


def _gathered(collective: str, sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    target = buffers.blocks(recvbuf, size, "recvbuf", writable=True)
    block = target.block * target.itemsize
    takes = _every(block, size)
    if is_in_place(sendbuf):
        return Call(collective, (block,) * size, BYTE, target, target, {rank: takes[rank]}, takes)
    source = buffers.vector(sendbuf, "sendbuf")
    _same_size(source.nbytes, block, "its block of recvbuf")
    return Call(collective, (block,) * size, BYTE, source, target, {rank: 0}, takes)


def reduce_scatter_block(sendbuf: Any, recvbuf: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """A block of the sum for everyone, all blocks alike."""
    if is_in_place(sendbuf):
        source = target = buffers.blocks(recvbuf, size, "recvbuf", writable=True)
    else:
        source = buffers.blocks(sendbuf, size, "sendbuf")
        target = buffers.vector(recvbuf, "recvbuf", writable=True)
        _same_elements(source, source.block, target, "each rank and a recvbuf")
    return _reduce_scattered(source, target, (source.block,) * size, op, rank)


def reduce_scatter(sendbuf: Any, recvbuf: Any, counts: Any, op: MPI.Op, rank: int, size: int) -> Call:
    """A block of the sum for everyone, `counts` elements for each."""
    counts = buffers.numbers(counts, size, "recvcounts")
    target = buffers.vector(recvbuf, "recvbuf", writable=True)
    source = target if is_in_place(sendbuf) else buffers.vector(sendbuf, "sendbuf")
    if source.count != sum(counts):
        raise InvalidArgument(
            MPI.ERR_COUNT,
            f"recvcounts: {counts} are {sum(counts)} elements, but "
            f"{'recvbuf' if source is target else 'sendbuf'} has {source.count}",
        )
    if source is not target:
        _same_elements(source, counts[rank], target, "this rank and a recvbuf")
    return _reduce_scattered(source, target, counts, op, rank)._replace(uneven=True)


def _reduce_scattered(source: Buffer, target: Buffer, counts: tuple[int, ...], op: MPI.Op, rank: int) -> Call:
    brings = dict(enumerate(accumulate(counts[:-1], initial=0)))
    in_place = source is target
    takes = {rank: brings[rank] if in_place else 0}
    kernel = combine(op, source.dtype, source.datatype)
    moved = rank if in_place and rank else -1
    return Call(
        "reduce_scatter",
        counts,
        _unit(source),
        source,
        target,
        brings,
        takes,
        combine=kernel,
        op=_identity(op),
        operation=op,
        moved=moved,
    )


def alltoall(sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    """A block from everyone for everyone."""
    target = buffers.blocks(recvbuf, size, "recvbuf", writable=True)
    block = target.block * target.itemsize
    brings = {rank * size + peer: peer * block for peer in range(size)}
    takes = {peer * size + rank: peer * block for peer in range(size)}
    lengths = (block,) * size**2
    if is_in_place(sendbuf):
        return Call("alltoall", lengths, BYTE, None, target, brings, takes, snapshot=True)
    source = buffers.blocks(sendbuf, size, "sendbuf")
    _same_size(source.block * source.itemsize, block, "a block of recvbuf")
    return Call("alltoall", lengths, BYTE, source, target, brings, takes)


# ------------------------------------------------------------------------------------------ blocks of any length


def alltoallv(sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    """A block from everyone for everyone, each of its own length."""
    target = buffers.blocks_v(recvbuf, size, "recvbuf", writable=True)
    inwards, ends = _block_bytes(target), _starts(target)
    in_place = is_in_place(sendbuf)
    source = target if in_place else buffers.blocks_v(sendbuf, size, "sendbuf")
    outwards, starts = _block_bytes(source), _starts(source)
    _same_size(outwards[rank], inwards[rank], "its own block of recvbuf")
    lengths = [0] * size**2
    for peer in range(size):
        lengths[rank * size + peer] = outwards[peer]
        lengths[peer * size + rank] = inwards[peer]
    brings = {rank * size + peer: starts[peer] for peer in range(size)}
    takes = {peer * size + rank: ends[peer] for peer in range(size)}
    call = Call("alltoall", tuple(lengths), BYTE, source, target, brings, takes, private=True, uneven=True)
    return call._replace(source=None, snapshot=True) if in_place else call


def scatterv(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int) -> Call:
    """A block of the root's for everyone, each of its own length."""
    root = _root(root, size)
    if rank != root:
        target = buffers.vector(recvbuf, "recvbuf", writable=True)
        lengths = _only(target.nbytes, rank, size)
        return Call("scatter", lengths, BYTE, None, target, {}, {rank: 0}, root, private=True, uneven=True)
    source = buffers.blocks_v(sendbuf, size, "sendbuf")
    lengths, starts = _block_bytes(source), dict(enumerate(_starts(source)))
    if is_in_place(recvbuf):
        takes = {rank: starts[rank]}
        return Call("scatter", lengths, BYTE, source, source, starts, takes, root, private=True, uneven=True)
    target = buffers.vector(recvbuf, "recvbuf", writable=True)
    _same_size(lengths[rank], target.nbytes, "recvbuf, which takes one of its blocks,")
    return Call("scatter", lengths, BYTE, source, target, starts, {rank: 0}, root, private=True, uneven=True)


def gatherv(sendbuf: Any, recvbuf: Any, root: Any, rank: int, size: int) -> Call:
    """Everyone's block, each of its own length, at the root."""
    root = _root(root, size)
    if rank != root:
        if is_in_place(sendbuf):
            raise InvalidArgument(MPI.ERR_BUFFER, f"sendbuf: MPI.IN_PLACE is for the root, {root}, only")
        source = buffers.vector(sendbuf, "sendbuf")
        lengths = _only(source.nbytes, rank, size)
        return Call("gather", lengths, BYTE, source, None, {rank: 0}, {}, root, private=True, uneven=True)
    return _gathered_v("gather", sendbuf, recvbuf, rank, size)._replace(root=root, private=True, uneven=True)


def allgatherv(sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    """Everyone's block, each of its own length, everywhere."""
    return _gathered_v("allgather", sendbuf, recvbuf, rank, size)._replace(uneven=True)


def _gathered_v(collective: str, sendbuf: Any, recvbuf: Any, rank: int, size: int) -> Call:
    target = buffers.blocks_v(recvbuf, size, "recvbuf", writable=True)
    lengths, starts = _block_bytes(target), dict(enumerate(_starts(target)))
    if is_in_place(sendbuf):
        return Call(collective, lengths, BYTE, target, target, {rank: starts[rank]}, starts)
    source = buffers.vector(sendbuf, "sendbuf")
    _same_size(source.nbytes, lengths[rank], "its block of recvbuf")
    return Call(collective, lengths, BYTE, source, target, {rank: 0}, starts)


def _only(length: int, rank: int, size: int) -> tuple[int, ...]:
    return (0,) * rank + (length,) + (0,) * (size - rank - 1)
