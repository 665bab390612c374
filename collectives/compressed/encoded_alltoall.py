"""All-to-all of encoded blocks."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from collectives.communicator import Communicator
from collectives.compressed.bound_collective import BoundCollective, Motion, module_of
from collectives.compressed.codec import Codec, encode_part, required_codec
from collectives.compressed.partition import VectorPartition, checked
from quant.types import Array


class EncodedAlltoall(BoundCollective):
    """All-to-all in which blocks for other ranks are encoded once. A rank's block for itself is copied unencoded.

    p-1 messages from and to each rank. Creation is collective.

    Parameters
    ----------
    comm : Communicator
    sent, received : int or sequence of int
        Elements for each rank, and from each. One number holds for all ranks. What r sends to s must be what s
        receives from r. Stored as `VectorPartition`.
    codec : Codec
    like : module or array, optional
        The module ``cupy``, or one of its arrays: for vectors on a GPU.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from collectives.compressed import QuantCodec, run
    >>> from quant import INT8
    >>> x, out = np.ones(10, np.float32), np.empty(10, np.float32)
    >>> with EncodedAlltoall(Communicator(MPI.COMM_SELF), 10, 10, QuantCodec(INT8)) as exchange:
    ...     run(exchange.alltoall(x, out))
    >>> bool((x == out).all())
    True
    """

    def __init__(
        self,
        comm: Communicator,
        sent: int | Sequence[int],
        received: int | Sequence[int],
        codec: Codec,
        like: Any = None,
    ) -> None:
        self.rank, self.size, self.codec = comm.Get_rank(), comm.Get_size(), required_codec(codec)
        self.sent, self.received = self._partition("sent", sent), self._partition("received", received)
        self._out, self._in = (comm.empty(parts.nbytes, np.uint8, like) for parts in (self.sent, self.received))
        self._scratch = module_of(like).empty(max(self.sent.lengths), np.float32)
        messages = self.sent.message(self._out), self.received.message(self._in)
        for _, sizes, *_ in messages:
            sizes[self.rank] = 0
        self._exchange = comm.Alltoallv_init(*messages)

    def alltoall(self, x: Array, out: Array, lost: Array | None = None) -> Motion:
        """Send block s of x to rank s, store blocks received in `out` in rank order. Yield requests to wait for.

        Parameters
        ----------
        x : float32 array of ``sent.elements`` elements
        out : float32 array of ``received.elements`` elements
            May be x if both are divided equally.
        lost : float32 array like x, optional
            Receives the encoding error of x. May be x, unless `out` is.
        """
        self.received.of_vector(out, self.rank)[...] = self.sent.of_vector(x, self.rank)
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            part, wire = self.sent.of_vector(x, rank), self.sent.of_wire(self._out, rank)
            error = None if lost is None else self.sent.of_vector(lost, rank)
            encode_part(self.codec, part, wire, error, self._scratch)
        if lost is not None:
            self.sent.of_vector(lost, self.rank)[...] = 0
        self._exchange.Start()
        yield [self._exchange]
        for rank in others:
            self.codec.decode(self.received.of_wire(self._in, rank), self.received.of_vector(out, rank))

    def close(self) -> None:
        self._exchange.Free()

    def _partition(self, name: str, lengths: int | Sequence[int]) -> VectorPartition:
        each = [lengths] * self.size if isinstance(lengths, (int, Integral)) else lengths
        return VectorPartition.of(checked(name, each, self.size), self.codec.nbytes)
