"""Stochastic gradient push: each step, every rank sends half of its push-sum mass to rank + 2^i, i = 0, 1, ... in turn.

After its own update a rank sends half of x and w to rank + 2^i and adds the message of rank - 2^i. Operators then use
z = x / w (`push_sum`). The exponents i take turns, so information reaches all ranks in ceil(log2 p) steps, and so does
the mean if p is a power of two. (Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep
Learning", ICML 2019: algorithm 1 with one peer. With `tau` algorithm 2: messages may be late.)
"""

from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.asynchronous.decentralized.averaging_style import AveragingStyle, ReplicaSums
from parallel.asynchronous.decentralized.push_sum import PushSumMass
from parallel.engine.data_parallel.run_context import RunContext
from parallel.runtime.vector_memory import VectorAllocator
from quant.types import Array

HEAD = 128  # bytes before the vector in a message: weight and last step, padded so that the vector is aligned
WEIGHTS = 0  # tag, distinct from the tags of the meeting point


def turns(size: int) -> int:
    """Number of distances 1, 2, 4, ... that gossip messages cycle through: ceil(log2 p) for p = `size` ranks.

    >>> [turns(size) for size in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (size - 1).bit_length()


def peers(rank: int, size: int, step: int) -> tuple[int, int]:
    """(destination, source) of a rank's gossip messages in a step. The rank itself if it is the only one.

    >>> [peers(1, 6, step) for step in range(4)]
    [(2, 0), (3, 5), (5, 3), (2, 0)]
    """
    away = 1 << step % turns(size) if size > 1 else 0
    return (rank + away) % size, (rank - away) % size


def reach(size: int, tau: int) -> int:
    """Maximum number of steps from the first send of a value until all ranks have it. Messages are up to `tau` late.

    On time every distance follows at once. Late messages take up to one round and `tau` steps per distance.

    >>> reach(8, tau=0), reach(8, tau=1)
    (2, 12)
    """
    return max(0, turns(size) - 1) if tau == 0 else turns(size) * (turns(size) + tau)


class _GossipMessage:
    """Buffer of a gossip message (push-sum weight, stop step, vector) and its MPI request."""

    def __init__(self, memory: VectorAllocator, like: Array):
        self.bytes = memory.private("buffers", HEAD + like.nbytes, np.uint8)
        self.head = self.bytes[: 2 * 8].view(np.float64)
        self.x = self.bytes[HEAD:].view(like.dtype)
        self.request: Any = MPI.REQUEST_NULL
        self.peer = -1


class Gossip(AveragingStyle):
    """Stochastic gradient push: each step, a rank sends and receives one message of n bytes, the size of the weights.

    Messages may be `tau` steps late. With 0 a rank waits for the message of the same step. The masses of all ranks and
    of the messages in flight add up to the number of ranks.
    """

    def __init__(self, context: RunContext, vector: Array, tau: int = 0):
        super().__init__(context, vector)
        self.mass = PushSumMass(vector, self.memory.private("buffers", vector.size, vector.dtype))
        self.part, self._tau = self.mass.x, tau
        self._out = [_GossipMessage(self.memory, vector) for _ in range(tau + 1)]
        self._in = [_GossipMessage(self.memory, vector) for _ in range(tau + 1)]
        self._coming: dict[int, _GossipMessage] = {}  # by step

    def reach(self, step: int) -> int:
        return reach(self.size, self._tau)

    def take_changes(self) -> None:
        self.mass.take_changes()

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        self.mass.absorb_update()
        if self.size > 1:
            self._push(step)
        for sent in list(self._coming):
            self._take(sent, wait=sent <= step - self._tau)
        self.mass.update_estimate()
        return sums

    def drain(self) -> None:
        for sent in list(self._coming):
            self._take(sent, wait=True)
        for message in self._out:
            self.point.wait(message.request.Test, [message.peer])
        self.mass.update_estimate()

    def begin(self) -> None:
        self.mass.begin()

    def finish(self) -> None:
        self.drain()  # messages in flight still carry the last step
        super().finish()

    def close(self) -> None:
        self.drain()

    def abandon(self) -> None:
        for message in self._coming.values():
            message.request.Cancel()
            message.request.Wait()  # MPI no longer accesses the buffer

    def _push(self, step: int) -> None:
        to, source = peers(self.rank, self.size, step)
        out, into = self._out[step % len(self._out)], self._in[step % len(self._in)]
        self.point.wait(out.request.Test, [out.peer])
        self.mass.keep(0.5)  # the other half is as large
        out.x[...] = self.mass.x
        out.head[...] = self.mass.w, self.last
        out.peer, into.peer = to, source
        into.request = self.point.comm.Irecv(into.bytes, source, WEIGHTS)
        out.request = self.point.comm.Isend(out.bytes, to, WEIGHTS)
        self._coming[step] = into

    def _take(self, sent: int, wait: bool) -> None:
        message = self._coming[sent]
        if wait:
            self.point.wait(message.request.Test, [message.peer])
        elif not message.request.Test():
            return
        del self._coming[sent]
        weight, last = message.head.tolist()
        self.mass.add(message.x, weight)
        self.last = min(self.last, last)
