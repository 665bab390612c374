"""Compressed allreduces over all ranks, regardless of nodes: two-shot and ring."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.compressed.bound_collective import BoundCollective, Motion, module_of
from collectives.compressed.codec import Codec, encode_part, required_codec, within
from collectives.compressed.partition import VectorPartition, checked
from collectives.runtime.requests.request import Request
from quant.types import Array


class FlatAllreduce(BoundCollective):
    """Base of the two-shot and the ring allreduce of encoded vectors. All ranks get the same bits.

    Bound to one length, with all memory allocated. Creation is collective.

    Parameters
    ----------
    comm : Communicator
    count : int
        Elements of the vectors.
    codec : Codec
    lengths : sequence of int, optional
        Elements of each rank's part, the same on all ranks. By default whole blocks, as equal as possible. Stored as
        `parts`, a `VectorPartition`.
    like : module or array, optional
        The module ``cupy``, or one of its arrays: for vectors on a GPU.
    """

    def __init__(
        self, comm: Communicator, count: int, codec: Codec, lengths: Sequence[int] | None = None, like: Any = None
    ):
        self.comm, self.count, self.codec = comm, count, required_codec(codec)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        if lengths is None:
            self.parts = VectorPartition.even(count, self.size, codec.block, codec.nbytes)
        else:
            self.parts = VectorPartition.of(checked("lengths", lengths, self.size), codec.nbytes)
        if self.parts.elements != count:
            raise ValueError(f"lengths: expected {count} elements together, found {self.parts.elements}")
        self._codecs = [within(codec, start, length) for start, length in zip(self.parts.starts, self.parts.lengths)]
        self._wire = comm.empty(self.parts.nbytes, np.uint8, like)
        self._gathering = comm.Allgatherv_init(MPI.IN_PLACE, self.parts.message(self._wire))
        xp = module_of(like)
        self._total = xp.empty(self.parts.lengths[self.rank], np.float32)
        self._scratch = xp.empty(max(self.parts.lengths), np.float32)

    def reduce_scatter(self, x: Array, total: Array, lost: Array | None = None) -> Motion:
        """Sum this rank's part of all ranks' x into `total`. Yield requests to wait for.

        Parameters
        ----------
        x : float32 array of `count` elements
        total : float32 array of ``parts.lengths[rank]`` elements
        lost : float32 array of `count` elements, optional
            Receives this rank's encoding error. May be x itself. Its sum over ranks is missing from the total. Add it
            to the next x, so that no error stays (error feedback: Karimireddy et al., "Error Feedback Fixes SignSGD",
            ICML 2019).
        """
        raise NotImplementedError

    def allgather(self, part: Array, out: Array, lost: Array | None = None) -> Motion:
        """Encode `part`, gather the decoded parts of all ranks in `out`, bitwise equal. Yield requests to wait for.

        Parameters
        ----------
        part : float32 array of ``parts.lengths[rank]`` elements
        out : float32 array of `count` elements
        lost : float32 array like `part`, optional
            The encoding error of the part is added to it.
        """
        self._codecs[self.rank].encode(part, self.parts.of_wire(self._wire, self.rank))
        self._gathering.Start()
        yield [self._gathering]
        if lost is not None:
            lost += part
        for rank in range(self.size):
            self.codec.decode(self.parts.of_wire(self._wire, rank), self.parts.of_vector(out, rank))
        if lost is not None:
            lost -= self.parts.of_vector(out, self.rank)

    def allreduce(self, x: Array, out: Array, lost: Array | None = None) -> Motion:
        """Sum all ranks' x into `out` (may be x). Yield requests to wait for.

        This rank's part of `lost` includes the encoding error of the sum (error feedback at both ends: Tang et
        al., "DoubleSqueeze", ICML 2019).
        """
        yield from self.reduce_scatter(x, self._total, lost)
        yield from self.allgather(self._total, out, self._part_of(lost, self.rank))

    def close(self) -> None:
        self._gathering.Free()

    def _encode(self, rank: int, part: Array, wire: Array, lost: Array | None) -> None:
        """Encode `part`, the part of `rank`, into the bytes `wire`. Its encoding error goes to that part of `lost`."""
        encode_part(self._codecs[rank], part, wire, self._part_of(lost, rank), self._scratch)

    def _part_of(self, vector: Array | None, rank: int) -> Array | None:
        return None if vector is None else self.parts.of_vector(vector, rank)


class TwoShotAllreduce(FlatAllreduce):
    """Allreduce in which all ranks send rank r their encoded part r, r adds these up and sends the encoded sum to all.

    2 (p-1) messages of a p-th of the encoded vector, from and to each rank. Each term and each sum is encoded once.
    """

    def __init__(
        self, comm: Communicator, count: int, codec: Codec, lengths: Sequence[int] | None = None, like: Any = None
    ):
        super().__init__(comm, count, codec, lengths, like)
        self._terms = VectorPartition.of([self.parts.lengths[self.rank]] * self.size, codec.nbytes)
        self._arriving = comm.empty(self._terms.nbytes, np.uint8, like)
        self._scattering = comm.Alltoallv_init(self.parts.message(self._wire), self._terms.message(self._arriving))

    def reduce_scatter(self, x: Array, total: Array, lost: Array | None = None) -> Motion:
        for rank in range(self.size):
            self._encode(rank, self.parts.of_vector(x, rank), self.parts.of_wire(self._wire, rank), lost)
        self._scattering.Start()
        yield [self._scattering]
        self.codec.decode(self._terms.of_wire(self._arriving, 0), total)
        for rank in range(1, self.size):
            self.codec.add(self._terms.of_wire(self._arriving, rank), total)

    def close(self) -> None:
        super().close()
        self._scattering.Free()


class RingAllreduce(FlatAllreduce):
    """Ring reduce-scatter, encoding the growing sum of part c again at every hop from rank c+1 to c, then an allgather.

    Messages of a p-th of the encoded vector: p-1 in the reduce-scatter. The number in the allgather depends on its
    algorithm. A sum is encoded once at every rank on its path.
    """

    def __init__(
        self, comm: Communicator, count: int, codec: Codec, lengths: Sequence[int] | None = None, like: Any = None
    ):
        super().__init__(comm, count, codec, lengths, like)
        self._out, self._in = (comm.empty(max(self.parts.sizes), np.uint8, like) for _ in range(2))
        self._growing = module_of(like).empty(max(self.parts.lengths), np.float32)

    def reduce_scatter(self, x: Array, total: Array, lost: Array | None = None) -> Motion:
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        part = self.parts.of_vector(x, left)
        for hop in range(1, self.size):
            gone, come = (self.rank - hop) % self.size, (self.rank - hop - 1) % self.size
            size = self.parts.sizes[gone]
            self._encode(gone, part, self._out[:size], lost)
            arriving = self._in[: self.parts.sizes[come]]
            yield [self._hop(self._out[:size], right, arriving, left)]
            part = self._growing[: self.parts.lengths[come]]
            part[...] = self.parts.of_vector(x, come)
            self.codec.add(arriving, part)
        total[...] = part
        if lost is not None:
            self.parts.of_vector(lost, self.rank)[...] = 0

    def _hop(self, sent: Array, right: int, arriving: Array, left: int) -> Request:
        """Start a sparse all-to-all: send `sent` to `right`, receive `arriving` from `left`. Return its request."""
        nothing = [0] * self.size
        to, from_ = nothing.copy(), nothing.copy()
        to[right], from_[left] = len(sent), len(arriving)
        return self.comm.Ialltoallv([sent, to, nothing, MPI.BYTE], [arriving, from_, nothing, MPI.BYTE])
