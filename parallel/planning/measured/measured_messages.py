"""Measured seconds of messages and collectives among ranks, at powers of two, with linear interpolation between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.runtime.execution.message_wait import wait_for
from collectives.runtime.requests.request_lists import wait_all
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.grad_compression import parse
from parallel.nn.flat_params import ParamSpan, Span
from parallel.nn.operator import Parameter, constant
from parallel.planning.measured.measurement_record import MeasurementRecord
from parallel.planning.measured.message_costs import MessageCosts
from quant.types import Array

LEAST = 64
"""Bytes of the smallest message that is measured."""

SECONDS, TIMES = 0.05, (3, 15)
"""Seconds of a measurement, and least and most repetitions in it. The median counts."""

BUCKET, WIDTH = 1 << 21, 256
"""Bytes of an allreduce beside computation, and width of the square products of that computation."""


@dataclass(frozen=True)
class MeasuredMessages(MessageCosts):
    """Messages measured among the ranks of the communicator, all groups like the given one at the

    same time. This includes effects that the cost model does not know: processors that are shared with the ranks,
    buffers of the network, copies. A network that limits a rate lets a burst pass after a pause (a token bucket), so
    collectives over it are measured after a pause and one after another: every second of a pause saves a second, up to
    the difference. All methods are collective.
    """

    record: MeasurementRecord = field(kw_only=True)
    _groups: dict[tuple[int, ...], tuple[Communicator, bool]] = field(default_factory=dict, kw_only=True)

    def collective(
        self, name: str, ranks: Sequence[int], nbytes: int, shared: bool = False, idle: float = math.inf
    ) -> float:
        if len(ranks) < 2 or not nbytes:
            return 0.0
        first = groups_like(ranks, len(self.nodes))[0]
        rested = _on_a_line(nbytes, partial(self._collective_seconds, name, first, shared, True))
        if not self.over_network(ranks):
            return rested
        sustained = _on_a_line(nbytes, partial(self._collective_seconds, name, first, shared, False))
        return max(min(rested, sustained), sustained - idle)

    def hidden(self, ranks: Sequence[int], name: str) -> float:
        if len(ranks) < 2:
            return 0.0
        first, name = groups_like(ranks, len(self.nodes))[0], name.partition(":")[0]

        def measure() -> float:
            return _hidden_share(self._group(first)[0], name)

        member = self.record.comm is not None and self._group(first)[1]
        return float(median(self.record.results(("hidden", name, first), measure, member)))

    def message(self, source: int, target: int, nbytes: float) -> float:
        """Seconds of a message between two ranks: of the first pair of ranks with the same kind of link."""
        far = self.over_network((source, target))
        pair = next(pair for pair in combinations(range(len(self.nodes)), 2) if self.over_network(pair) == far)
        return _on_a_line(nbytes, partial(self._message_seconds, pair))

    def _collective_seconds(self, name: str, ranks: tuple[int, ...], shared: bool, rested: bool, nbytes: int) -> float:
        def measure() -> float:
            comm, _ = self._group(ranks)
            call, vector = _call(comm, name, nbytes, shared)
            return median_seconds(comm, call, partial(vector.fill, 0) if rested else None)

        member = self.record.comm is not None and self._group(ranks)[1]
        key = name, ranks, shared, "rested" if rested else "sustained", nbytes
        return float(max(self.record.results(key, measure, member)))

    def _message_seconds(self, pair: tuple[int, int], nbytes: int) -> float:
        def measure() -> float:
            comm, _ = self._group(pair)
            return median_seconds(comm, _round_trip(comm, nbytes)) / 2

        member = self.record.comm is not None and self._group(pair)[1] and self.record.comm.Get_rank() in pair
        return float(max(self.record.results(("message", pair, nbytes), measure, member)))

    def _group(self, ranks: tuple[int, ...]) -> tuple[Communicator, bool]:
        """Communicator of this rank's group among all like `ranks`, and True if it is in one. Collective."""
        world = self.record.comm
        assert world is not None
        if ranks not in self._groups:
            groups = groups_like(ranks, world.Get_size())
            own = next((number for number, group in enumerate(groups) if world.Get_rank() in group), None)
            together = len(groups) == 1 and own is not None and len(ranks) == world.Get_size()
            comm = world if together else world.Split(len(groups) if own is None else own, world.Get_rank())
            self._groups[ranks] = comm, own is not None
        return self._groups[ranks]


def groups_like(ranks: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Groups without common ranks that one group is moved to: the groups of a mesh axis, from rank 0's.

    >>> groups_like((0, 2), 4), groups_like((0, 1), 5)
    ([(0, 2), (1, 3)], [(0, 1), (2, 3)])
    """
    found: list[tuple[int, ...]] = []
    for shift in range(-min(ranks), size - max(ranks)):
        moved = tuple(rank + shift for rank in ranks)
        if not any(set(moved) & set(group) for group in found):
            found.append(moved)
    return found


def _on_a_line(nbytes: float, at: Callable[[int], float]) -> float:
    """Seconds of `nbytes` bytes, by a line through the seconds of the powers of two below and above."""
    low = LEAST
    while 2 * low <= nbytes:
        low *= 2
    if nbytes <= low:
        return at(low)
    first, last = at(low), at(2 * low)
    return first + (last - first) * (nbytes - low) / low


def _call(comm: Communicator, name: str, nbytes: int, shared: bool) -> tuple[Callable[[], Any], Array]:
    """Collective of float32 vectors, as the engines and operators call it, and the vector that it sends from.

    A name may have a compression after a colon. ValueError for a collective that they do not call.
    """
    ranks, (name, _, compress) = comm.Get_size(), name.partition(":")
    counts = [-(-nbytes // (4 * ranks))] * ranks
    zeros = comm.zeros if shared else np.zeros
    whole, part = zeros(sum(counts), np.float32), zeros(counts[0], np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "allgatherv": lambda: comm.Allgatherv(MPI.IN_PLACE, [whole, counts]),
        "reduce_scatter": lambda: comm.Reduce_scatter(whole, part, counts),
        "alltoallv": lambda: comm.Alltoallv([whole, counts], [np.empty_like(whole), counts]),
    }
    if name not in calls or (compress and name != "allreduce"):
        raise ValueError(f"collective: expected one of {', '.join(calls)}; found {name}")
    if compress:
        return _compressed_sum(comm, compress, whole), whole
    return calls[name], whole


def _compressed_sum(comm: Communicator, compress: str, vector: Array) -> Callable[[], None]:
    """Allreduce with compressed gradients and error feedback, in place."""
    place = ParamSpan(Parameter((len(vector),), constant(0.0)), Span(0, len(vector)))
    compressor = parse(compress)(comm, GradBucket(0, [place], comm.Get_size(), comm.Get_rank()), 0)
    residual = np.zeros_like(vector)

    def run() -> None:
        np.add(vector, residual, out=vector)
        for requests in compressor.exchange(vector, vector, residual, 0):
            wait_all(requests)

    return run


def _round_trip(comm: Communicator, nbytes: int) -> Callable[[], None]:
    """Message to and fro between ranks 0 and 1, non-blocking and polled, as the engines exchange theirs."""
    there, back, rank = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8), comm.Get_rank()

    def run() -> None:
        for source in (0, 1) if rank < 2 else ():
            request = comm.Isend(there, 1 - rank) if rank == source else comm.Irecv(back, 1 - rank)
            wait_for(request.Test, "measurement", comm, 1 - rank)

    return run


def _hidden_share(comm: Communicator, name: str) -> float:
    """Share of a collective, or of an equally long computation, that overlaps the other one. Collective.

    The computation tests an allreduce after every product, and does not test a gather of weights (like a
    training).
    """
    ranks, whole = comm.Get_size(), comm.zeros(BUCKET // 4, np.float32)
    if name == "allreduce":
        request = comm.Allreduce_init(MPI.IN_PLACE, whole)
    else:
        part = comm.zeros(len(whole) // ranks, np.float32)
        request = comm.Allgatherv_init(part, [whole[: ranks * len(part)], [len(part)] * ranks])
    left, right, out = np.zeros((3, WIDTH, WIDTH), np.float32)

    def exchange() -> None:
        request.Start()
        request.Wait()

    def compute(test: Callable[[], Any] = bool) -> None:
        for _ in range(count):
            np.matmul(left, right, out=out)
            test()

    def together() -> None:
        request.Start()
        compute(request.Test if name == "allreduce" else bool)
        request.Wait()

    count = 1
    alone = median_seconds(comm, exchange)
    count = max(1, round(alone / median_seconds(comm, compute)))
    computing, both = median_seconds(comm, compute), median_seconds(comm, together)
    request.Free()
    return float(np.clip((alone + computing - both) / min(alone, computing), 0.0, 1.0))


def median_seconds(comm: Communicator, run: Callable[[], Any], rest: Callable[[], Any] | None = None) -> float:
    """Median over repetitions of the time until the last rank has returned, after a barrier. Collective.

    Before each repetition `rest` is called as long as one takes.
    """

    def once(pause: float = 0.0) -> float:
        until = time.perf_counter() + pause
        while rest is not None and time.perf_counter() < until:
            rest()
        comm.Barrier()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    once()
    first = comm.allreduce(once(), MPI.MAX)
    count = min(TIMES[1], max(TIMES[0], int(SECONDS / max(first, 1e-9))))
    seconds = np.array([once(first) for _ in range(count)])
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return float(np.median(seconds))
