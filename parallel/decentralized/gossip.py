"""Stochastic gradient push: every rank hands half of its mass on, to a rank twice as far away each time.

After its own update a rank sends half of x and w to rank + 2^i, and adds what comes from rank - 2^i; operators then see
z = x / w (`parallel.decentralized.push_sum`). The exponents i take turns, so news reach all ranks in ceil(log2 p) steps; where
p is a power of two, so does the mean. (Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep
Learning", ICML 2019: algorithm 1, one peer; with `tau` algorithm 2, in which messages may be late.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.runtime.requests import until
from parallel.data_parallel.run_context import Context
from parallel.runtime.vector_memory import Memory
from parallel.nn.operator import Array
from parallel.decentralized.push_sum import Mass
from parallel.replicas.style import Seen, Style

HALF = 0.5
HEAD = 128
"""Bytes before the vector in a message: the weight and the last step, and room so that the vector is aligned."""


def turns(size: int) -> int:
    """After so many steps every rank has sent to all distances: ceil(log2 p).

    >>> [turns(size) for size in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (size - 1).bit_length()


def peers(rank: int, size: int, step: int) -> tuple[int, int]:
    """Whom a rank sends to in a step, and from whom it receives; itself, if it is alone.

    >>> [peers(1, 6, step) for step in range(4)]
    [(2, 0), (3, 5), (5, 3), (2, 0)]
    """
    away = 1 << step % turns(size) if size > 1 else 0
    return (rank + away) % size, (rank - away) % size


def reach(size: int, tau: int) -> int:
    """After so many steps all ranks have heard what one of them says in a step before it sends.

    On time every distance has its turn at once; when late each takes a round at most, and `tau` steps.

    >>> reach(8, tau=0), reach(8, tau=1)
    (2, 12)
    """
    return max(0, turns(size) - 1) if tau == 0 else turns(size) * (turns(size) + tau)


class _Message:
    """Memory for a weight, the last step and a vector, and for what MPI knows of them."""

    def __init__(self, memory: Memory, like: Array):
        self.bytes = memory.own("buffers", HEAD + like.nbytes, np.uint8)
        self.head = self.bytes[: 2 * 8].view(np.float64)
        self.x = self.bytes[HEAD:].view(like.dtype)
        self.request: Any = MPI.REQUEST_NULL


class Gossip(Style):
    """One message of n bytes out, and one in, a step.

    Parameters
    ----------
    context, vector
        As of `Style`; on the host.
    tau : int
        How many steps late a message may be taken; a rank waits for those that are later. With 0, the default, a rank
        waits for this step's message; with more its step goes on while messages are under way.

    Attributes
    ----------
    mass : Mass
        Messages under way have the rest.
    """

    def __init__(self, context: Context, vector: Array, tau: int = 0):
        super().__init__(context, vector)
        self.mass = Mass(vector, self.memory.own("buffers", vector.size, vector.dtype))
        self.part, self._tau = self.mass.x, tau
        self._out = [_Message(self.memory, vector) for _ in range(tau + 1)]
        self._in = [_Message(self.memory, vector) for _ in range(tau + 1)]
        self._coming: dict[int, _Message] = {}  # by step
        self._wire = MPI.Intracomm(self.comm).Dup()  # what a training that failed has sent is found by no other one

    def reach(self, step: int) -> int:
        return reach(self.size, self._tau)

    def mix(self, step: int, seen: Seen) -> Seen:
        self.mass.moved()
        if self.size > 1:
            self._push(step)
        for sent in list(self._coming):
            self._take(sent, wait=sent <= step - self._tau)
        self.mass.settle()
        return seen

    def drain(self) -> None:
        for sent in list(self._coming):
            self._take(sent, wait=True)
        for message in self._out:
            until(message.request.Test)
        self.mass.settle()

    def begin(self) -> None:
        self.mass.begin()

    def rest(self) -> None:
        self.drain()  # messages under way still say when it was to end
        super().rest()

    def close(self) -> None:
        self.drain()
        self._wire.Free()

    def abandon(self) -> None:
        for message in self._coming.values():
            message.request.Cancel()
            message.request.Wait()  # its memory is free

    def _push(self, step: int) -> None:
        to, source = peers(self.rank, self.size, step)
        out, into = self._out[step % len(self._out)], self._in[step % len(self._in)]
        until(out.request.Test)
        self.mass.keep(HALF)  # the other half is as large
        out.x[...] = self.mass.x
        out.head[...] = self.mass.w, self.last
        into.request = self._wire.Irecv(into.bytes, source)
        out.request = self._wire.Isend(out.bytes, to)
        self._coming[step] = into

    def _take(self, sent: int, wait: bool) -> None:
        """Add a message, if it is there."""
        message = self._coming[sent]
        if wait:
            until(message.request.Test)
        elif not message.request.Test():
            return
        del self._coming[sent]
        weight, last = message.head.tolist()
        self.mass.add(message.x, weight)
        self.last = min(self.last, last)
