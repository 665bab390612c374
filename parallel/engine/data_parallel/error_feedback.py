"""Compressed gradient reduction with error feedback: the compression error of a step is added to the next gradient."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from collectives.compressed import Motion
from collectives.runtime.requests.request import Request
from collectives.runtime.requests.request_lists import wait_all
from parallel.checkpoint.tensor_slices import TensorSlice, slice_of
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.data_parallel.reducers import START, PlainReducer, StepScale, Turns
from parallel.engine.data_parallel.run_context import RunContext
from parallel.nn.flat_params import Span
from parallel.nn.placement import TensorCut
from quant.types import Array

LOST = "feedback/lost"
"""Beginning of the names of residuals in checkpoints. The rank and the parameter follow."""


class ErrorFeedbackReducer(PlainReducer):
    """Bucket reducer with a compressed sum over ranks and error feedback. A rank's own micro-batches add uncompressed.

    `residual` are gradients minus sent values of this rank, over all steps; only the sum over all ranks has a meaning.
    It is kept in units of the step's mean gradient, so neither the number of samples in a step nor the loss scale
    changes its meaning. (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.)
    """

    alone = True
    """An exchange is several messages in sequence: two at once might be ordered differently on different ranks."""

    def __init__(self, context: RunContext, bucket: GradBucket, vector: Array, scratch: Array, part: Array):
        super().__init__(context, bucket, vector, scratch, part)
        self._context = context
        assert context.plan.compress is not None
        like = None if context.memory.xp is np else vector
        self.compressor = context.plan.compress(context.comm, bucket, context.plan.seed, like)
        self._feedback = self.compressor.feedback
        self.residual: Any = None
        self._before: Any = None
        if self._feedback:
            self.residual, self._before = (
                context.memory.private("buffers", bucket.span.size, context.wide) for _ in range(2)
            )
        self._sent = False
        self._state: dict[str, Array] = {}
        ends = [(place.span, place.span.start + place.size) for place in bucket.places]
        self._gaps = [bucket.within(Span(end, span.stop)) for span, end in ends if end < span.stop]
        self._step_scale = START
        self._rounds: Motion = iter(())
        self._waiting: list[Request] = []

    def assign(self, assignment: Turns, step_scale: StepScale = START) -> None:
        self._step_scale = step_scale

    def begin(self) -> None:
        super().begin()
        self._sent = False

    def end_step(self, applied: bool) -> None:
        """Forget what was before the step. If it was not `applied`, return to that."""
        if not applied:
            self.undo()
        self._sent = False

    def undo(self) -> None:
        """Restore residual and compressor from before the last exchange, if there was one since `begin`."""
        if self._sent:
            self.residual, self._before = self._before, self.residual
            for name, array in self.compressor.state().items():
                array[...] = self._state[name]
            self._sent = False

    def bind(self) -> None:
        """No-op: compressors bind their requests when created."""

    def start(self) -> None:
        self.bucket.complete(gaps=True)
        self._rounds = self._exchange()
        self._waiting = next(self._rounds, [])

    def test(self) -> bool:
        """Advance the exchange without blocking. True if it is complete."""
        while self._waiting and all([request.Test() for request in self._waiting]):
            self._waiting = next(self._rounds, [])
        return not self._waiting

    def finish(self) -> None:
        while self._waiting:
            wait_all(self._waiting)
            self._waiting = next(self._rounds, [])

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Slices of this rank's residual, a term of the sum over the ranks, and of the compressor's state."""
        plan = self._context.plan
        for place in self.bucket.places if self._feedback else ():
            start = place.span.start - self.bucket.span.start
            array = self.residual[start : start + place.size]
            yield slice_of(place.parameter, f"{LOST}/{plan.rank}", 0, array, True)._replace(terms=plan.ranks)
        cut = self.bucket.places[0].parameter.cut  # all tensors of the bucket are on the same ranks
        for name, array in self.compressor.state().items():
            whole = None if cut is None else TensorCut.whole(array.shape, cut.holders)
            yield TensorSlice(f"feedback/{name}", array.shape, 0, array.reshape(-1), plan.rank == 0, whole)

    def close(self) -> None:
        self.compressor.close()

    def _exchange(self) -> Motion:
        unit = self.vector.dtype.type(self._step_scale.unit)
        if not unit:  # nothing to learn from on any rank
            return
        places = self.bucket.places
        frozen = [self.bucket.within(place.span) for place in places if not place.parameter.requires_grad]
        if self._feedback:
            self.vector += self.residual * unit
        for part in frozen:  # whose residuals wait until they are released
            self.vector[part] = 0
        self._state = {name: array.copy() for name, array in self.compressor.state().items()}
        self.residual, self._before, self._sent = self._before, self.residual, True
        yield from self.compressor.exchange(self.vector, self.vector, self.residual, self._step_scale.step)
        if self._feedback:
            self.residual /= unit
        for gap in self._gaps:
            self.vector[gap] = 0
            if self._feedback:
                self.residual[gap] = 0
        for part in frozen:
            self.vector[part] = 0
            if self._feedback:
                self.residual[part] = self._before[part]
