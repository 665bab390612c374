"""Collectives that carry fewer bits: what travels is encoded, and what that loses is known.

A codec says how numbers become bytes. The motions here say how often that happens on the way, and so how large the
error becomes; eps is that of encoding once, p the number of ranks:

    way            what is encoded                                     error of a sum        bytes sent
    two_shot       every rank's terms, then the sums                   sqrt(2) eps           2 (p-1)/p n'
    ring           a sum that grows, hop by hop, then the sums         sqrt((p+1)/2) eps     2 (p-1)/p n'
    hierarchical   the sums of nodes, then the sums of all             sqrt(2) eps of these  2 (k-1)/k n' of a node
    shared_scale   every rank's terms, as integers of one scale: sums  eps                   2 (p-1)/p n''
                   of integers are exact, in whatever order

Here n' are the bytes of an encoded vector, n'' those of a vector of integers wide enough for the sum, and k nodes. The
errors are relative to that of a single rank's terms when errors are independent: sums of p terms of size 1 are of size
sqrt(p), and so is the error of adding p encoded terms; see docs/compression.md for how the laws come about.

Every motion is a generator that yields requests to wait for, so that a caller may do something else meanwhile:

    for requests in motion:
        wait_all(requests)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from mpi4py import MPI

from collectives.chunks import even
from collectives.communicator import Communicator
from collectives.requests import Request
from quant import PerChannel, PerGroup, QuantizedArray, QuantSpec, quantize, wire_nbytes

Motion = Iterator[list[Request]]


class Codec(Protocol):
    """How a vector of float32 becomes bytes.

    Attributes
    ----------
    block : int
        Elements that are encoded together: ranks get whole blocks, but for the last one.
    """

    block: int

    def nbytes(self, count: int) -> int:
        """Of so many elements; the same whatever they are."""

    def encode(self, x: np.ndarray, wire: np.ndarray) -> None:
        """Write `nbytes` bytes. An element that is not finite leaves none of its block finite."""

    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        """What the bytes stand for."""

    def add(self, wire: np.ndarray, out: np.ndarray) -> None:
        """`out` += what the bytes stand for."""


class Quantised:
    """Numbers in few bits, as `quant` writes them; a group that is not finite is NaN on the other side.

    Parameters
    ----------
    spec : quant.QuantSpec
        Groups along the vector, or one scale for each part that travels.
    norm : callable (x) -> float32 array of a scale for each group, optional
        Instead of the spec's own.

    Attributes
    ----------
    seed : int
        For stochastic rounding; every vector that is encoded takes the next one.
    """

    def __init__(self, spec: QuantSpec, norm: Callable[[np.ndarray], np.ndarray] | None = None):
        if isinstance(spec.granularity, PerChannel):
            raise ValueError(f"a vector has no channels, and {spec} wants a scale for each")
        self.spec, self._norm, self.seed = spec, norm, 0
        self.block = spec.granularity.size if isinstance(spec.granularity, PerGroup) else 1

    def nbytes(self, count: int) -> int:
        """Codes and scales."""
        return wire_nbytes(self.spec, count)

    def encode(self, x: np.ndarray, wire: np.ndarray) -> None:
        """Quantise."""
        self.seed += 1
        scales = self._norm(x) if self._norm else None
        quantize(x, self.spec, scales=scales, seed=self.seed, nonfinite="poison", out=self._as_array(wire, len(x)))

    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Dequantise."""
        self._as_array(wire, len(out)).dequantize(out)

    def add(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Dequantise and add in one pass."""
        self._as_array(wire, len(out)).add_to(out)

    def _as_array(self, wire: np.ndarray, count: int) -> QuantizedArray:
        return QuantizedArray.from_wire(wire, self.spec, count)


class Parts(NamedTuple):
    """A vector divided among ranks, and its encoded parts, one after another.

    >>> Parts.of(1000, 3, 256, lambda count: count // 4)
    Parts(lengths=(512, 256, 232), starts=(0, 512, 768), sizes=(128, 64, 58), places=(0, 128, 192))
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, count: int, ranks: int, block: int, nbytes: Callable[[int], int]) -> Parts:
        """As equal as whole blocks can be."""
        whole = [blocks * block for blocks in even(-(-count // block), ranks)]
        starts = [min(start, count) for start in accumulate(whole[:-1], initial=0)]
        lengths = [min(start + length, count) - start for start, length in zip(starts, whole)]
        sizes = [nbytes(length) for length in lengths]
        return cls(tuple(lengths), tuple(starts), tuple(sizes), tuple(accumulate(sizes[:-1], initial=0)))

    def of_vector(self, vector: np.ndarray, rank: int) -> np.ndarray:
        """A rank's part of the elements."""
        return vector[self.starts[rank] : self.starts[rank] + self.lengths[rank]]

    def of_wire(self, wire: np.ndarray, rank: int) -> np.ndarray:
        """A rank's part of the bytes."""
        return wire[self.places[rank] : self.places[rank] + self.sizes[rank]]


def _bytes(wire: np.ndarray, sizes: Any, places: Any) -> list[Any]:
    return [wire, list(sizes), list(places), MPI.BYTE]


class Bound:
    """Made once for vectors of one length, used many times, and closed."""

    def close(self) -> None:
        """Give communicators back, where there are any. Collective."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # a rank that failed does not wait for the others
            self.close()


class Flat(Bound):
    """What all ways have in common: a vector in parts, encoded sums that reach all ranks as the same bytes.

    Bound to a length once; what it needs lies ready. Making one is collective.

    Parameters
    ----------
    comm : Communicator
    count : int
        Elements of the vectors.
    codec : Codec

    Attributes
    ----------
    parts : Parts
        Which part of a sum is whose.
    """

    def __init__(self, comm: Communicator, count: int, codec: Codec):
        self.comm, self.count, self.codec = comm, count, codec
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.parts = Parts.of(count, self.size, codec.block, codec.nbytes)
        self._wire = comm.empty(sum(self.parts.sizes), np.uint8)
        self._total = np.empty(self.parts.lengths[self.rank], np.float32)
        self._decoded = np.empty(max(self.parts.lengths), np.float32)

    def reduce_scatter(self, x: np.ndarray, total: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        """`total` = this rank's part of the sum of all ranks' x.

        Parameters
        ----------
        x : float32 array of `count` elements
        total : float32 array of ``parts.lengths[rank]`` elements
        lost : float32 array of `count` elements, optional
            What encoding has lost here; may be x itself. The lost of all ranks together is what is missing from the
            sum: added to the next x, nothing is lost for good (error feedback; Karimireddy et al., "Error Feedback
            Fixes SignSGD", ICML 2019).
        """
        raise NotImplementedError

    def allgather(self, part: np.ndarray, out: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        """`out` = the parts of all ranks; all of them have the same digits, the owner included.

        Parameters
        ----------
        part : float32 array of ``parts.lengths[rank]`` elements
        out : float32 array of `count` elements
        lost : float32 array like `part`, optional
            To which is added what encoding has lost of it.
        """
        self.codec.encode(part, self.parts.of_wire(self._wire, self.rank))
        parts = _bytes(self._wire, self.parts.sizes, self.parts.places)
        yield [self.comm.Iallgatherv(MPI.IN_PLACE, parts)]
        if lost is not None:
            lost += part
        for rank in range(self.size):
            self.codec.decode(self.parts.of_wire(self._wire, rank), self.parts.of_vector(out, rank))
        if lost is not None:
            lost -= self.parts.of_vector(out, self.rank)

    def allreduce(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        """`out` = the sum of all ranks' x, as `reduce_scatter` and `allgather` after it; `out` may be x.

        `lost` then has, in this rank's part, what the sum has lost too (both ends feed back, as in Tang et al.,
        "DoubleSqueeze", ICML 2019).
        """
        yield from self.reduce_scatter(x, self._total, lost)
        yield from self.allgather(self._total, out, None if lost is None else self.parts.of_vector(lost, self.rank))

    def _encode(self, part: np.ndarray, wire: np.ndarray, lost: np.ndarray | None) -> None:
        """Encode, and note what that loses."""
        self.codec.encode(part, wire)
        if lost is not None:
            decoded = self._decoded[: len(part)]
            self.codec.decode(wire, decoded)
            np.subtract(part, decoded, out=lost)


class TwoShot(Flat):
    """Everyone sends rank r its encoded part r of the vector, r adds them up; then the encoded sums go to all.

    2 (p-1) messages of a p-th of the encoded vector, from and to each rank. Each term and each sum is encoded once.
    """

    def __init__(self, comm: Communicator, count: int, codec: Codec):
        super().__init__(comm, count, codec)
        mine = self.parts.sizes[self.rank]
        self._arriving = comm.empty(self.size * mine, np.uint8)
        self._sizes, self._places = [mine] * self.size, [mine * rank for rank in range(self.size)]

    def reduce_scatter(self, x: np.ndarray, total: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        for rank in range(self.size):
            part, wire = self.parts.of_vector(x, rank), self.parts.of_wire(self._wire, rank)
            self._encode(part, wire, None if lost is None else self.parts.of_vector(lost, rank))
        sent = _bytes(self._wire, self.parts.sizes, self.parts.places)
        yield [self.comm.Ialltoallv(sent, _bytes(self._arriving, self._sizes, self._places))]
        total[...] = 0
        for place, size in zip(self._places, self._sizes):
            self.codec.add(self._arriving[place : place + size], total)


class Ring(Flat):
    """Part c leaves rank c+1, gains a term at every hop, is encoded anew for the next one, and comes to rest at rank c.

    2 (p-1) messages of a p-th of the encoded vector. A sum is encoded once for every rank that it has come by.
    """

    def __init__(self, comm: Communicator, count: int, codec: Codec):
        super().__init__(comm, count, codec)
        self._out, self._in = (comm.empty(max(self.parts.sizes), np.uint8) for _ in range(2))
        self._growing = np.empty(max(self.parts.lengths), np.float32)

    def reduce_scatter(self, x: np.ndarray, total: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        part = self.parts.of_vector(x, left)
        for hop in range(1, self.size):
            gone, come = (self.rank - hop) % self.size, (self.rank - hop - 1) % self.size
            size = self.parts.sizes[gone]
            self._encode(part, self._out[:size], None if lost is None else self.parts.of_vector(lost, gone))
            arriving = self._in[: self.parts.sizes[come]]
            yield [self._hop(self._out[:size], right, arriving, left)]
            part = self._growing[: self.parts.lengths[come]]
            np.copyto(part, self.parts.of_vector(x, come))
            self.codec.add(arriving, part)
        total[...] = part
        if lost is not None:
            self.parts.of_vector(lost, self.rank)[...] = 0

    def _hop(self, sent: np.ndarray, right: int, arriving: np.ndarray, left: int) -> Request:
        """An exchange with the neighbours: of an all-to-all, only messages that have bytes are sent."""
        nothing = [0] * self.size
        to, from_ = nothing.copy(), nothing.copy()
        to[right], from_[left] = len(sent), len(arriving)
        return self.comm.Ialltoallv(_bytes(sent, to, nothing), _bytes(arriving, from_, nothing))


class SharedScale(Bound):
    """Ranks agree on the largest element of each group, and add integers of one scale.

    Sums of integers are exact: the result is the same in whatever order they are added, and each term is encoded once,
    the sum never. Integers on the wire are as wide as the largest sum needs.

    Parameters
    ----------
    comm : Communicator
    count : int
        Elements of the vectors.
    bits : int
        Of a term, 2 to 16.
    group : int
        Elements that share a scale.

    Attributes
    ----------
    integer : numpy.dtype
        What travels.
    """

    def __init__(self, comm: Communicator, count: int, bits: int = 8, group: int = 256):
        if not 2 <= bits <= 16:
            raise ValueError(f"bits: expected 2 to 16, found {bits}")
        if group < 1:
            raise ValueError(f"group: expected 1 element or more, found {group}")
        self.comm, self.count, self.group = comm, count, group
        self.largest = 2 ** (bits - 1) - 1
        wanted = self.largest * comm.Get_size()
        self.integer = next(np.dtype(kind) for kind in ("i1", "i2", "i4", "i8") if wanted <= np.iinfo(kind).max)
        self._groups = -(-count // group)
        self._peaks = comm.empty(self._groups, np.float32)
        self._codes = comm.empty(count, self.integer)

    def allreduce(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        """`out` = the sum of all ranks' x; `out` or `lost` (what encoding has lost of x) may be x."""
        whole, tail = divmod(self.count, self.group)
        np.abs(x[: whole * self.group].reshape(whole, self.group)).max(axis=1, out=self._peaks[:whole], initial=0)
        if tail:
            self._peaks[whole] = np.abs(x[-tail:]).max()
        self._peaks[~np.isfinite(self._peaks)] = np.inf  # 0 x inf is NaN: the whole group is, on all ranks
        yield [self.comm.Iallreduce(MPI.IN_PLACE, self._peaks, MPI.MAX)]
        steps = np.repeat(self._peaks / np.float32(self.largest), self.group)[: self.count]
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.where(steps > 0, x / steps, 0)
            np.rint(codes, out=codes)
            codes[~np.isfinite(codes)] = 0
            self._codes[...] = codes
            if lost is not None:
                np.subtract(x, codes * steps, out=lost)
            yield [self.comm.Iallreduce(MPI.IN_PLACE, self._codes, MPI.SUM)]
            np.multiply(self._codes, steps, out=out)


class Hierarchical(Bound):
    """Sums of nodes are exact and stay in memory; their leaders exchange encoded ones, then tell their nodes.

    Parameters
    ----------
    comm : Communicator
    count : int
    codec : Codec
    flat : class of Flat
        What the leaders do.
    """

    def __init__(self, comm: Communicator, count: int, codec: Codec, flat: type[Flat] = TwoShot):
        nodes = comm.nodes or (0,) * comm.Get_size()
        self._node = comm.Split(nodes[comm.Get_rank()], comm.Get_rank())
        first = self._node.Get_rank() == 0
        self._leaders = comm.Split(0 if first else MPI.UNDEFINED, comm.Get_rank())
        self._flat = flat(self._leaders, count, codec) if first else None
        self._sum = self._node.empty(count, np.float32)

    def allreduce(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        """`out` = the sum of all ranks' x, which it may be; `lost` is not 0 on leaders only."""
        yield [self._node.Ireduce(x, self._sum, MPI.SUM, 0)]
        if lost is not None:
            lost[...] = 0
        if self._flat is not None:
            yield from self._flat.allreduce(self._sum, self._sum, lost)
        yield [self._node.Ibcast(self._sum, 0)]
        out[...] = self._sum

    def close(self) -> None:
        self._node.Free()
        if self._leaders != MPI.COMM_NULL:
            self._leaders.Free()
