"""DDP layouts: all weights on all ranks, and gradients summed over the ranks once per step.

Each layout is a gradient sink; they differ in the exchange of a bucket that is complete in the step's last micro-batch.
A bucket is complete when the backward has left all units that use it: within a unit a parameter may be handed in any
number of times. (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.)
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from parallel.engine.data_parallel.error_feedback import ErrorFeedbackReducer
from parallel.engine.data_parallel.grad_bucket import buckets_of, of, users_of
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.data_parallel.reducers import START, CanonicalReducer, PlainReducer, StepScale, Turns
from parallel.engine.data_parallel.run_context import RunContext
from parallel.nn.flat_params import ParamSpan, Span
from parallel.nn.operator import Parameter
from quant.types import Array

MOST_REQUESTS = 24
"""Most buckets (plus one) with a persistent request each: a communicator has shared memory for 31 of these."""


class NaiveDDP:
    """Gradient sink with one bucket, all-reduced (blocking) after the last backward of a step. Base of other layouts.

    `own` are the spans of the flat vector that this rank updates, with their gradients after `finish`.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self.buckets = buckets_of(self.cut(context.plan), context.plan)
        length, weights = context.flat.length, context.storage  # which have as many elements
        context.memory.reserve([length, length], [context.wide, weights])
        self.vector = context.memory.shared("gradients", length, context.wide)
        scratch = context.memory.private("buffers", context.plan.scratch(adds=True), context.wide)
        part = self.part()
        make: Any = PlainReducer if context.plan.compress is None else ErrorFeedbackReducer
        if context.plan.reproducible:
            make = CanonicalReducer
        self.reducers = [make(context, bucket, self._view(bucket.span), scratch, part) for bucket in self.buckets]
        self._bucket_of = {id(place.parameter): bucket for bucket in self.buckets for place in bucket.places}
        self._last_units = [units[0] for units in users_of(self.buckets, context.plan)]
        self.own = [(span, self._view(span)) for span in self.spans()]
        self._next = 0
        self._remaining = 0
        self._number: int | None = None
        self._empty: set[int] = set()

    # ------------------------------------------------------------------------------------ overridden by layouts

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        return plan.runs()

    def part(self) -> Array:
        """Allocate the receive buffer of the reduce-scatter. None, as this layout uses allreduce."""
        return None

    def spans(self) -> list[Span]:
        return [self._context.flat.span] if self._context.flat.length else []

    def ready(self, reducer: PlainReducer) -> None:
        """Start the exchange of a bucket that is complete in the step's last micro-batch. Here a no-op."""

    def finalize(self) -> None:
        """Exchange, after the last backward of a step, all buckets that are not exchanged yet."""
        for reducer in self.reducers:
            self._blocking("allreduce", reducer)

    # ------------------------------------------------------------------------------------ a step

    @staticmethod
    def rounds(assignment: Turns, rank: int) -> int:
        return len(assignment[rank])

    def begin(self, assignment: Turns | None, step_scale: StepScale = START) -> None:
        """Begin a step. `assignment` lists micro-batches by rank, None if ranks draw them (`assign` then follows)."""
        self._next = 0
        self.bind()  # before activations take memory, of which programs need some too
        mine = () if assignment is None else assignment[self._context.plan.rank]
        self._remaining = -1 if assignment is None else len(mine)
        self._empty = {turn for turn, number in enumerate(mine) if number is None}
        for reducer in self.reducers:
            reducer.begin()
        if assignment is not None:
            self.assign(assignment, step_scale)

    def assign(self, assignment: Turns, step_scale: StepScale = START) -> None:
        for reducer in self.reducers:
            reducer.assign(assignment, step_scale)

    def begin_backward(self, turn: int, number: int | None) -> None:
        """Begin the backward of micro-batch `number`. With None, a turn without a micro-batch, nothing changes.

        If the assignment has None for the turn, buckets are complete and exchanged at the same time as on other ranks.
        """
        takes_part = number is not None or turn in self._empty
        self._open = set(range(len(self.reducers))) if takes_part else set()
        if not takes_part:
            return
        self._number, self._remaining = number, self._remaining - 1
        for reducer in self.reducers if number is not None else ():
            reducer.begin_backward(number)

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        of(self._bucket_of, parameter).accumulate(parameter, compute)

    def left(self, unit: int) -> None:
        for number, last in enumerate(self._last_units):
            if last == unit and number in self._open:
                self._complete(self.reducers[number])

    def end_backward(self) -> None:
        """Complete the buckets that are still open at the end of a backward. Gradients that did not come are zero."""
        for number in sorted(self._open):
            self._complete(self.reducers[number])

    def bind(self) -> None:
        """Create `OverlappedDDP`'s persistent requests before its first step. No-op in other layouts. Collective."""

    def finish(self) -> None:
        self.finalize()

    def close(self) -> None:
        for reducer in self.reducers:
            reducer.close()

    def _complete(self, reducer: PlainReducer) -> None:
        self._open.remove(reducer.bucket.number)
        if self._number is not None:
            reducer.end_backward(self._number)
        while not self._remaining and self._next < len(self.reducers) and self._next not in self._open:
            self._next += 1
            self.ready(self.reducers[self._next - 1])

    def _view(self, span: Span) -> Array:
        return self.vector[self._context.flat.within(span)]

    def _blocking(self, what: str, reducer: PlainReducer) -> None:
        with self._context.recorder("communication", what, bucket=reducer.bucket.number):
            getattr(reducer, what)()


class BucketedDDP(NaiveDDP):
    """Gradient sink with several buckets, each all-reduced (blocking) when the step's last backward completes it."""

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        return plan.buckets(MOST_REQUESTS)

    def ready(self, reducer: PlainReducer) -> None:
        self._blocking("allreduce", reducer)

    def finalize(self) -> None:
        for reducer in self.reducers[self._next :]:  # of a rank without micro-batches
            self._blocking("allreduce", reducer)


class OverlappedDDP(BucketedDDP):
    """Gradient sink with a non-blocking allreduce per bucket. The step's last backward overlaps and drives it.

    Complete buckets are started in order, those that must be alone in flight one after another.
    """

    def __init__(self, context: RunContext):
        super().__init__(context)
        self._active: dict[int, float] = {}
        self._waiting: deque[PlainReducer] = deque()

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        super().__call__(parameter, compute)
        if self._active:
            with self._context.recorder("communication", "test"):
                self._test_active()
            self._start_waiting()

    def bind(self) -> None:
        for reducer in self.reducers:
            reducer.bind()

    def ready(self, reducer: PlainReducer) -> None:
        self._waiting.append(reducer)
        self._start_waiting()

    def finalize(self) -> None:
        for reducer in self.reducers[self._next :]:
            self.ready(reducer)
        for reducer in self.reducers:
            self._start_waiting()
            self._finish(reducer)

    def _start_waiting(self) -> None:
        while self._waiting and not (self._waiting[0].alone and self._active):
            reducer = self._waiting.popleft()
            with self._context.recorder("communication", "start", bucket=reducer.bucket.number):
                reducer.start()
            self._active[reducer.bucket.number] = time.perf_counter()

    def _finish(self, reducer: PlainReducer) -> None:
        with self._context.recorder("communication", "finish", bucket=reducer.bucket.number):
            reducer.finish()
        self._note_end(reducer.bucket.number)

    def _test_active(self) -> None:
        """Test the allreduces in flight, oldest first, until one is incomplete. One test drives them all."""
        for number in list(self._active):
            if not self.reducers[number].test():
                break
            self._note_end(number)

    def _note_end(self, number: int) -> None:
        if number in self._active:
            began = self._active.pop(number)
            self._context.recorder.note("flight", "allreduce", began, time.perf_counter(), bucket=number)
