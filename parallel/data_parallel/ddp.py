"""Data parallelism: all ranks have all weights, and one sum of gradients over the ranks a step.

Each layout is a sink of gradients: what it does when a bucket is complete in the last micro-batch of the step is all
that they differ in. No communication in between. (Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", VLDB 2020.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from parallel.data_parallel.grad_bucket import buckets_of
from parallel.data_parallel.run_context import Context
from parallel.data_parallel.error_feedback import Compressed
from parallel.nn.flat_params import Place, Span
from parallel.nn.operator import Array, Parameter
from parallel.data_parallel.partition_spec import Plan
from parallel.data_parallel.reducers import START, Canonical, Moment, Numbers, Plain

MOST_REQUESTS = 24
"""Buckets that have a request each: a communicator has shared memory for 31 persistent ones."""


class Naive:
    """One bucket, and one allreduce when the last backward is over. What all others are compared with.

    Attributes
    ----------
    own : list of (Span, array)
        The spans of the flat vector that this rank updates, and their gradients after `finish`.
    started : int
        Exchanges that were started in this step.
    rounds : callable (numbers of all ranks) -> int
        How many micro-batches a rank takes part in.
    """

    def __init__(self, context: Context):
        self._context = context
        self.buckets = buckets_of(self.cut(context.plan), context.plan)
        self.vector = context.memory.seen("gradients", context.flat.length, context.wide)
        scratch = context.memory.own("buffers", context.plan.scratch(adds=True), context.wide)
        part = self.part()
        kind = Canonical if context.plan.reproducible else Compressed if context.plan.compress else Plain
        self.sums = [kind(context, bucket, self._view(bucket.span), scratch, part) for bucket in self.buckets]
        self._of = {id(place.parameter): sum_ for sum_ in self.sums for place in sum_.bucket.places}
        self.own = [(span, self._view(span)) for span in self.spans()]
        self.started = 0
        self._next = 0
        self._left = 0
        self._number: int | None = None

    # ------------------------------------------------------------------------------------ what layouts differ in

    @staticmethod
    def cut(plan: Plan) -> Sequence[Sequence[Place]]:
        """The buckets' places."""
        return [plan.flat.places]

    def part(self) -> Array:
        """Memory for a part of a reduce-scatter."""
        return None

    def spans(self) -> list[Span]:
        """What this rank updates."""
        return [self._context.flat.span] if self._context.flat.length else []

    def ready(self, sum_: Plain | Canonical) -> None:
        """The next bucket in line has its last gradient."""

    def settle(self) -> None:
        """All backwards are over."""
        for sum_ in self.sums:
            self._blocking("allreduce", sum_)

    # ------------------------------------------------------------------------------------ the motions of a step

    @staticmethod
    def rounds(everyone: Numbers, rank: int) -> int:
        """Ranks take part in their own micro-batches only."""
        return len(everyone[rank])

    def begin(self, everyone: Numbers | None, moment: Moment = START) -> None:
        """A step begins; None if ranks draw its micro-batches, so that none is known to be the last until `tell`."""
        self.started = self._next = 0
        self._left = -1 if everyone is None else len(everyone[self._context.plan.rank])
        for sum_ in self.sums:
            sum_.begin()
        if everyone is not None:
            self.tell(everyone, moment)

    def tell(self, everyone: Numbers, moment: Moment = START) -> None:
        """Who has, or had, which micro-batches, and of what step."""
        for sum_ in self.sums:
            sum_.tell(everyone, moment)

    def open(self, turn: int, number: int | None) -> None:
        """A backward begins."""
        assert number is not None
        self._number, self._left = number, self._left - 1
        self._open = set(range(len(self.sums)))
        for sum_ in self.sums:
            sum_.open(number)

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Take a gradient."""
        sum_ = self._of[id(parameter)]
        sum_.put(parameter, compute)
        if sum_.complete:
            self._shut(sum_)

    def left(self, unit: int) -> None:
        """The backward has left a unit."""

    def shut(self) -> None:
        """The backward is over; what it did not hand in is zero."""
        for number in sorted(self._open):
            self._shut(self.sums[number])

    def bind(self) -> None:
        """Make sure that nobody waits for others when an exchange is started in the midst of a step. Collective."""

    def finish(self) -> None:
        """Complete the gradients in `own`."""
        self.settle()

    def close(self) -> None:
        """Give requests back."""
        for sum_ in self.sums:
            sum_.close()

    def _shut(self, sum_: Plain | Canonical) -> None:
        assert self._number is not None
        self._open.remove(sum_.bucket.number)
        sum_.shut(self._number)
        while not self._left and self._next < len(self.sums) and self._next not in self._open:
            self._next += 1
            self.ready(self.sums[self._next - 1])

    def _view(self, span: Span) -> Array:
        return self.vector[self._context.flat.within(span)]

    def _blocking(self, what: str, sum_: Plain | Canonical) -> None:
        self.started += 1
        with self._context.recorder("communication", what, bucket=sum_.bucket.number):
            getattr(sum_, what)()


class Bucketed(Naive):
    """An allreduce for each bucket as soon as it is complete; the backward waits for it."""

    @staticmethod
    def cut(plan: Plan) -> Sequence[Sequence[Place]]:
        return plan.buckets(MOST_REQUESTS)

    def ready(self, sum_: Plain | Canonical) -> None:
        self._blocking("allreduce", sum_)

    def settle(self) -> None:
        for sum_ in self.sums[self._next :]:  # of a rank without micro-batches
            self._blocking("allreduce", sum_)


class Overlapped(Bucketed):
    """An allreduce for each bucket, which goes on while the backward does; moved on with every gradient handed in."""

    def __init__(self, context: Context):
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

    def ready(self, sum_: Plain | Canonical) -> None:
        number = sum_.bucket.number
        if sum_.alone and number:
            self._land(self.sums[number - 1])
        with self._context.recorder("communication", "start", bucket=number):
            sum_.start()
        self.started += 1
        self._flying[number] = time.perf_counter()

    def settle(self) -> None:
        for sum_ in self.sums[self._next :]:
            self.ready(sum_)
        for sum_ in self.sums:
            self._land(sum_)

    def _land(self, sum_: Plain | Canonical) -> None:
        with self._context.recorder("communication", "finish", bucket=sum_.bucket.number):
            sum_.finish()
        self._landed(sum_.bucket.number)

    def _move(self) -> None:
        """Go on with all that is under way, which a single test does; buckets end in the order in which they began."""
        for number in list(self._flying):
            if not self.sums[number].test():
                break
            self._landed(number)

    def _landed(self, number: int) -> None:
        if number in self._flying:
            began = self._flying.pop(number)
            self._context.recorder.note("flight", "allreduce", began, time.perf_counter(), bucket=number)
