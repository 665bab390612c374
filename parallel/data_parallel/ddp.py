"""Data parallelism: all ranks have all weights, and one sum of gradients over the ranks a step.

Each layout is a sink of gradients: what it does when a bucket is complete in the last micro-batch of the step is all
that they differ in. No communication in between. A bucket is complete when the backward has left all units that use
it: within a unit a parameter may be handed in any number of times. (Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from parallel.data_parallel.error_feedback import ErrorFeedbackReducer
from parallel.data_parallel.grad_bucket import buckets_of, of, users_of
from parallel.data_parallel.partition_spec import PartitionSpec
from parallel.data_parallel.reducers import START, CanonicalReducer, Numbers, PlainReducer, StepScale
from parallel.data_parallel.run_context import RunContext
from parallel.nn.flat_params import ParamSpan, Span
from parallel.nn.operator import Parameter
from quant.types import Array

MOST_REQUESTS = 24
"""Buckets that have a request each: a communicator has shared memory for 31 persistent ones."""


class NaiveDDP:
    """One bucket and one allreduce after the last backward.

    Attributes
    ----------
    own : list of (Span, array)
        The spans of the flat vector that this rank updates, and their gradients after `finish`.
    started : int
        Exchanges that were started in this step.
    rounds : callable (numbers of all ranks) -> int
        How many micro-batches a rank takes part in.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self.buckets = buckets_of(self.cut(context.plan), context.plan)
        self.vector = context.memory.shared("gradients", context.flat.length, context.wide)
        scratch = context.memory.private("buffers", context.plan.scratch(adds=True), context.wide)
        part = self.part()
        reducer: Any = PlainReducer if context.plan.compress is None else ErrorFeedbackReducer
        if context.plan.reproducible:
            reducer = CanonicalReducer
        self.sums = [reducer(context, bucket, self._view(bucket.span), scratch, part) for bucket in self.buckets]
        self._bucket_of = {id(place.parameter): bucket for bucket in self.buckets for place in bucket.places}
        self._last_units = [units[0] for units in users_of(self.buckets, context.plan)]
        self.own = [(span, self._view(span)) for span in self.spans()]
        self.started = 0
        self._next = 0
        self._left = 0
        self._number: int | None = None

    # ------------------------------------------------------------------------------------ what layouts differ in

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        """Parameters of each bucket."""
        return [plan.flat.places]

    def part(self) -> Array:
        """Memory for the received part of a reduce-scatter."""
        return None

    def spans(self) -> list[Span]:
        """Spans that this rank updates."""
        return [self._context.flat.span] if self._context.flat.length else []

    def ready(self, sum_: PlainReducer | CanonicalReducer) -> None:
        """Exchange the next bucket, which has its last gradient."""

    def finalize(self) -> None:
        """Exchange what is left after the last backward."""
        for sum_ in self.sums:
            self._blocking("allreduce", sum_)

    # ------------------------------------------------------------------------------------ the motions of a step

    @staticmethod
    def rounds(everyone: Numbers, rank: int) -> int:
        """Backwards that a rank takes part in: those of its own micro-batches."""
        return len(everyone[rank])

    def begin(self, everyone: Numbers | None, step_scale: StepScale = START) -> None:
        """Begin a step; `everyone` is None if ranks draw micro-batches, so that `assign` comes after the last one."""
        self.started = self._next = 0
        self._left = -1 if everyone is None else len(everyone[self._context.plan.rank])
        for sum_ in self.sums:
            sum_.begin()
        if everyone is not None:
            self.assign(everyone, step_scale)

    def assign(self, everyone: Numbers, step_scale: StepScale = START) -> None:
        """Set the micro-batches of every rank, and the step's scale."""
        for sum_ in self.sums:
            sum_.assign(everyone, step_scale)

    def begin_backward(self, turn: int, number: int | None) -> None:
        assert number is not None
        self._number, self._left = number, self._left - 1
        self._open = set(range(len(self.sums)))
        for sum_ in self.sums:
            sum_.begin_backward(number)

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Accumulate a gradient."""
        of(self._bucket_of, parameter).accumulate(parameter, compute)

    def left(self, unit: int) -> None:
        """Complete the buckets whose last unit the backward has left."""
        for number, last in enumerate(self._last_units):
            if last == unit and number in self._open:
                self._shut(self.sums[number])

    def end_backward(self) -> None:
        """Complete the other buckets; gradients that did not come are zero."""
        for number in sorted(self._open):
            self._shut(self.sums[number])

    def bind(self) -> None:
        """Create persistent requests now, so that starting an exchange in a step is not collective. Collective."""

    def finish(self) -> None:
        """Complete the gradients in `own`."""
        self.finalize()

    def close(self) -> None:
        for sum_ in self.sums:
            sum_.close()

    def _shut(self, sum_: PlainReducer | CanonicalReducer) -> None:
        assert self._number is not None
        self._open.remove(sum_.bucket.number)
        sum_.end_backward(self._number)
        while not self._left and self._next < len(self.sums) and self._next not in self._open:
            self._next += 1
            self.ready(self.sums[self._next - 1])

    def _view(self, span: Span) -> Array:
        return self.vector[self._context.flat.within(span)]

    def _blocking(self, what: str, sum_: PlainReducer | CanonicalReducer) -> None:
        self.started += 1
        with self._context.recorder("communication", what, bucket=sum_.bucket.number):
            getattr(sum_, what)()


class BucketedDDP(NaiveDDP):
    """A blocking allreduce for each bucket as soon as it is complete."""

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        return plan.buckets(MOST_REQUESTS)

    def ready(self, sum_: PlainReducer | CanonicalReducer) -> None:
        self._blocking("allreduce", sum_)

    def finalize(self) -> None:
        for sum_ in self.sums[self._next :]:  # of a rank without micro-batches
            self._blocking("allreduce", sum_)


class OverlappedDDP(BucketedDDP):
    """A non-blocking allreduce for each bucket, which overlaps the backward; every gradient drives progress."""

    def __init__(self, context: RunContext):
        super().__init__(context)
        self._flying: dict[int, float] = {}

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        super().__call__(parameter, compute)
        if self._flying:
            with self._context.recorder("communication", "test"):
                self._move()

    def bind(self) -> None:
        for sum_ in self.sums:
            sum_.bind()

    def ready(self, sum_: PlainReducer | CanonicalReducer) -> None:
        number = sum_.bucket.number
        if sum_.alone and number:
            self._land(self.sums[number - 1])
        with self._context.recorder("communication", "start", bucket=number):
            sum_.start()
        self.started += 1
        self._flying[number] = time.perf_counter()

    def finalize(self) -> None:
        for sum_ in self.sums[self._next :]:
            self.ready(sum_)
        for sum_ in self.sums:
            self._land(sum_)

    def _land(self, sum_: PlainReducer | CanonicalReducer) -> None:
        with self._context.recorder("communication", "finish", bucket=sum_.bucket.number):
            sum_.finish()
        self._landed(sum_.bucket.number)

    def _move(self) -> None:
        """Test the active exchanges, oldest first: one test drives all, and they complete in order."""
        for number in list(self._flying):
            if not self.sums[number].test():
                break
            self._landed(number)

    def _landed(self, number: int) -> None:
        if number in self._flying:
            began = self._flying.pop(number)
            self._context.recorder.note("flight", "allreduce", began, time.perf_counter(), bucket=number)
