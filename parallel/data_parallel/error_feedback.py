"""The sum of a bucket's gradients over the ranks, compressed on its way; what that loses comes with the next step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.compressed import Motion
from collectives.runtime.requests import Request, wait_all
from parallel.data_parallel.grad_bucket import Bucket
from parallel.data_parallel.run_context import Context
from parallel.nn.flat_params import Span
from parallel.nn.operator import Array
from parallel.checkpoint.tensor_slices import Stretch
from parallel.data_parallel.reducers import START, Moment, Numbers, Plain


class Compressed(Plain):
    """Plain sums of a rank's micro-batches; between ranks, what a compressor makes of them.

    What is lost is kept in units of the step's mean gradient, so neither the number of samples in a step nor the loss
    scale changes its meaning. (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.)

    Attributes
    ----------
    lost : vector
        By how much what this rank has sent so far falls short of its gradients. Only the sum over all ranks has a
        meaning of its own. None if nothing is fed back.
    """

    alone = True
    """It has several messages, one after another: with two such, ranks might have them in different orders."""

    def __init__(self, context: Context, bucket: Bucket, vector: Array, scratch: Array, part: Array):
        super().__init__(context, bucket, vector, scratch, part)
        self._context = context
        assert context.plan.compress is not None
        self.compressor = context.plan.compress(context.comm, bucket, context.plan.seed)
        self._feedback = self.compressor.feedback
        self.lost: Any = None
        self._before: Any = None
        if self._feedback:
            self.lost, self._before = (
                np.asarray(context.memory.own("buffers", bucket.span.size, context.wide)) for _ in range(2)
            )
        self._sent = False
        ends = [(place.span, place.span.start + place.size) for place in bucket.places]
        self._gaps = [bucket.within(Span(end, span.stop)) for span, end in ends if end < span.stop]
        self._moment = START
        self._motion: Motion = iter(())
        self._waiting: list[Request] = []

    def tell(self, everyone: Numbers, moment: Moment = START) -> None:
        """Which step it is, and in which units its gradients are."""
        self._moment = moment

    def begin(self) -> None:
        super().begin()
        self._sent = False

    def undo(self) -> None:
        """The step is not made, and what was sent in it goes with it: what was owed before is owed again."""
        if self._sent:
            self.lost, self._before = self._before, self.lost
            self._sent = False

    def bind(self) -> None:
        """Compressors are bound already."""

    def allreduce(self) -> None:
        """Leave the sum over the ranks on all of them."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Begin `allreduce`."""
        self._filling.complete(gaps=True)
        self._motion = self._exchange()
        self._waiting = next(self._motion, [])

    def test(self) -> bool:
        """Go on as far as messages have come; whether it is over."""
        while self._waiting and all([request.Test() for request in self._waiting]):
            self._waiting = next(self._motion, [])
        return not self._waiting

    def finish(self) -> None:
        """Wait for what was started."""
        while self._waiting:
            wait_all(self._waiting)
            self._waiting = next(self._motion, [])

    def share_out(self) -> None:
        """Owe on every rank an equal part of what all of them owe. Collective."""
        if self._feedback:
            self._context.comm.Allreduce(MPI.IN_PLACE, self.lost)
            self.lost /= self._context.comm.Get_size()

    def owe(self, ranks: int) -> None:
        """So many ranks had the part that was now assigned to `lost`."""
        if self._feedback:
            self.lost *= ranks / self._context.comm.Get_size()

    def stretches(self) -> Iterator[Stretch]:
        """What a checkpoint has of it: what a rank owes after `share_out`, and the compressor's state."""
        mine = self._context.plan.rank == 0
        for place in self.bucket.places if self._feedback else ():
            start = place.span.start - self.bucket.span.start
            name, shape = place.parameter.name, place.parameter.shape
            yield Stretch(f"feedback/lost/{name}", shape, 0, self.lost[start : start + place.size], mine)
        for name, array in self.compressor.state().items():
            yield Stretch(f"feedback/{name}", array.shape, 0, array.reshape(-1), mine)

    def close(self) -> None:
        """Collective."""
        self.compressor.close()

    def _exchange(self) -> Motion:
        unit = self.vector.dtype.type(self._moment.unit)
        if not unit:  # nothing to learn from on any rank
            return
        if self._feedback:
            self.vector += self.lost * unit
        self.lost, self._before, self._sent = self._before, self.lost, True
        yield from self.compressor.exchange(self.vector, self.vector, self.lost, self._moment.step)
        if self._feedback:
            self.lost /= unit
        for gap in self._gaps:
            self.vector[gap] = 0
            if self._feedback:
                self.lost[gap] = 0
