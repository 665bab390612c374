"""Predicted times of plain and compressed allreduces, from a fitted network and measured kernels.

Encoding pays where bytes are expensive: over a network, hardly ever within a node, where a core copies about as many
bytes a second as it encodes.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.analysis.cost_functions import LinearCost
from collectives.communicator import Communicator
from collectives.compressed import Codec, VectorPartition, crowded
from collectives.transport.node.machine import usable_cores
from collectives.units import format_time

LENGTHS = (1 << 14, 1 << 18)
"""Elements of the sums that the cost is fitted to: 64 KiB and 1 MiB."""

TIMES = 5
"""Repetitions of each measurement. The median counts."""

SAMPLE = 1 << 18
"""Most elements that kernels are timed with, and scaled from."""


class CompressionForecast(NamedTuple):
    """Predicted seconds of a plain allreduce, and of a compressed one's messages and its encoding and decoding."""

    plain: float
    messages: float
    kernels: float

    @property
    def encoded(self) -> float:
        return self.messages + self.kernels

    @property
    def pays(self) -> bool:
        return self.encoded < self.plain

    def __str__(self) -> str:
        text = f"plain {format_time(self.plain)}, encoded {format_time(self.encoded)}"
        return f"{text} ({format_time(self.messages)} of messages, {format_time(self.kernels)} of kernels)"


def _median(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _slowest(comm: Communicator, seconds: list[float]) -> list[float]:
    """Element-wise maximum of `seconds` over all ranks, equal on all so that all decide equally."""
    found = np.array(seconds)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    return [float(value) for value in found]


def crowding(nodes: Sequence[int], cores: Sequence[set[int]]) -> float:
    """Ranks per core on the most crowded node, at least 1. Its cores are all that any of its ranks may use.

    `nodes` and `cores` have the node of each rank, and the cores that it may use.

    >>> crowding([0, 0, 0, 1], [{0, 1}, {0, 1}, {0, 1}, {0}])
    1.5
    """
    shared: dict[int, set[int]] = {}
    for node, of_rank in zip(nodes, cores):
        shared.setdefault(node, set()).update(of_rank)
    return max(1.0, *(list(nodes).count(node) / len(found) for node, found in shared.items()))


def fitted(comm: Communicator) -> LinearCost:
    """Cost of an uncompressed allreduce by bytes, fitted to times at two lengths. Collective. Moves about 12 MiB."""
    seconds = []
    for length in LENGTHS:
        x = comm.zeros(length, np.float32)
        seconds.append(_median(partial(comm.Allreduce, MPI.IN_PLACE, x)))
    short, long = _slowest(comm, seconds)
    nbytes = [4 * length for length in LENGTHS]
    beta = max(0.0, (long - short) / (nbytes[1] - nbytes[0]))
    return LinearCost(max(0.0, short - nbytes[0] * beta), beta)


def forecast(
    comm: Communicator, count: int, codec: Codec, wire: LinearCost | None = None, feedback: bool = False
) -> CompressionForecast:
    """Predict times of allreduces of `count` float32 elements, plain and compressed, from measurements. Collective.

    Assumes the two-shot algorithm. On a `crowded` communicator one rank of each node compresses the node's sum
    (`HierarchicalAllreduce`), and the sums within nodes are measured and count as messages.

    The codec's kernels are timed on noise, and assumed slower where ranks share cores. `wire` is a result of `fitted`.
    With `feedback` the kernels include error feedback: decoding the encoded vector, and a subtraction.
    """
    wire = wire or fitted(comm)
    inside = _within_nodes(comm) if crowded(comm) else LinearCost(0.0, 0.0)
    length = max(1, min(count, SAMPLE))
    x = np.random.default_rng(0).standard_normal(length, np.float32)
    out, bytes_ = np.empty_like(x), np.empty(codec.nbytes(length), np.uint8)
    seconds = [
        _median(lambda: codec.encode(x, bytes_)),
        _median(lambda: codec.decode(bytes_, out)),
        _median(lambda: codec.add(bytes_, out)),
        _median(lambda: np.subtract(x, out, out=out)),
    ]
    encode, decode, add, subtract = (value / length for value in _slowest(comm, seconds))
    nodes, cores = comm.nodes or (0,) * comm.Get_size(), comm.allgather(usable_cores())
    encoders = sorted({node: rank for rank, node in enumerate(nodes)}.values()) if crowded(comm) else range(len(nodes))
    encoded = sum(VectorPartition.even(count, len(encoders), codec.block, codec.nbytes).sizes)
    crowd = crowding([nodes[rank] for rank in encoders], [cores[rank] for rank in encoders])
    twice = 1 + 1 / len(encoders)  # every term, and this rank's part of the sum
    recording = (decode + subtract) * twice if feedback else 0
    kernels = crowd * count * (encode * twice + add + decode + recording)
    return CompressionForecast(wire(4 * count), wire(encoded) + inside(4 * count), kernels)


def _within_nodes(comm: Communicator) -> LinearCost:
    """Fitted cost of an allreduce within a node, with the largest alpha and beta of all nodes. Collective."""
    with comm.Split(comm.nodes[comm.Get_rank()], comm.Get_rank()) as node:  # type: ignore[index]
        found = fitted(node)
    return LinearCost(*_slowest(comm, list(found)))
