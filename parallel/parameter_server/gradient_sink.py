"""Gradient sink of a worker: pushes buckets to the servers during the backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from parallel.data_parallel.grad_bucket import GradBucket, of, users_of
from parallel.data_parallel.partition_spec import PartitionSpec
from parallel.nn.operator import Parameter
from parallel.optim.optimizers import block_squares, clip_factor, total
from parallel.parameter_server.key_assignment import ServerKey
from parallel.parameter_server.work_assignment import WorkPart
from parallel.parameter_server.worker_client import WorkerClient
from quant.types import Array


class ServerGradients:
    """Gradient sink that pushes a bucket once the backward has left its units, or at the end if a norm is needed first.

    If `separate`, every part is an update of its own, whose norm is limited to `clip` here. `early` counts the buckets
    pushed before the end of the backward.
    """

    def __init__(
        self,
        worker: WorkerClient,
        plan: PartitionSpec,
        buckets: Sequence[GradBucket],
        keys: Sequence[ServerKey],
        vector: Array,
        separate: bool,
        clip: float | None,
    ):
        self._worker, self._vector, self._separate = worker, vector, separate
        self._clip = clip if separate else None
        self._buckets = list(buckets)
        self._of = {id(place.parameter): bucket for bucket in self._buckets for place in bucket.places}
        self._last_units = [units[0] for units in users_of(buckets, plan)]
        self._keys = [[key for key in keys if key.bucket == bucket.number] for bucket in buckets]
        self._squares: dict[int, float] = {}  # by bucket
        self.early = 0

    def begin_backward(self, part: WorkPart, parts: int, count: int, rows: Array | None) -> None:
        """Begin the backward of a part of a step of `parts` parts, with `count` targets and these rows of the table."""
        self._part, self._parts, self._count, self._rows = part, parts, count, rows
        self._factor = 1 / count if count else 0.0
        self._squares, self.early = {}, 0
        for bucket in self._buckets:
            span = bucket.span
            bucket.reset(self._vector[span.start : span.stop])
            bucket.begin_backward()

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        of(self._of, parameter).accumulate(parameter, compute)
        self._worker.poll()

    def left(self, unit: int) -> None:
        """Push the buckets whose last unit the backward has left."""
        for bucket, last in zip(self._buckets, self._last_units):
            if last == unit:
                self._complete(bucket)
                if self._clip is None:
                    self._push(bucket)
                    self.early += 1
        self._worker.poll()

    def end_backward(self) -> float:
        """Push the remaining buckets and return the norm per target; FloatingPointError if it is not finite."""
        late = [bucket for bucket in self._buckets if bucket.number not in self._squares]
        for bucket in late:
            self._complete(bucket)
        norm = math.sqrt(math.fsum(self._squares.values())) * self._factor
        if self._clip is not None:
            late = self._buckets
            self._factor *= clip_factor(np.array([norm**2]), 1.0, self._clip).factor
        for bucket in late:
            self._push(bucket)
        return norm

    def _complete(self, bucket: GradBucket) -> None:
        bucket.end_backward()
        bucket.complete()
        squares = total(block_squares(bucket.vector)) if self._separate else 0.0
        if not math.isfinite(squares):
            names = ", ".join(
                place.parameter.name
                for place in bucket.places
                if not np.isfinite(self._vector[place.span.start : place.span.stop]).all()
            )
            raise FloatingPointError(f"the gradient of {names} is not finite in step {self._part.clock}")
        self._squares[bucket.number] = squares

    def _push(self, bucket: GradBucket) -> None:
        for key in self._keys[bucket.number]:
            gradient = self._vector[key.span.start : key.span.stop]
            self._worker.push(key.number, self._part, self._parts, self._count, self._factor, gradient, self._rows)
