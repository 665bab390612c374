"""Where a worker's gradients go: to the servers, bucket by bucket, while the backward goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from parallel.data_parallel.grad_bucket import Bucket, Filling
from parallel.nn.operator import Array, Parameter
from parallel.optim.optimizers import block_squares, clip_factor, total
from parallel.parameter_server.key_assignment import Key
from parallel.parameter_server.work_assignment import Part
from parallel.parameter_server.worker_client import Worker


class Gradients:
    """A sink. A bucket is pushed when its last gradient is there, unless all must be known before the first may go.

    Parameters
    ----------
    worker : Worker
    buckets : sequence of Bucket
    keys : sequence of Key
    vector, scratch : array
        As long as the vector of parameters; as `parallel.data_parallel.grad_bucket.Filling` wants it.
    apart : bool
        Whether what is pushed is an update of its own: then its norm is taken here, and its limit kept.
    clip : float, optional
        That limit.

    Attributes
    ----------
    early : int
        Buckets that were pushed before the backward was over.
    """

    def __init__(
        self,
        worker: Worker,
        buckets: Sequence[Bucket],
        keys: Sequence[Key],
        vector: Array,
        scratch: Array,
        apart: bool,
        clip: float | None,
    ):
        self._worker, self._vector, self._apart, self._clip = worker, vector, apart, clip
        self._fillings = [Filling(bucket, scratch) for bucket in buckets]
        self._of = {id(place.parameter): filling for filling in self._fillings for place in filling.bucket.places}
        self._keys = [[key for key in keys if key.bucket == bucket.number] for bucket in buckets]
        self._squares: dict[int, float] = {}
        self._pushed: set[int] = set()
        self.early = 0

    def open(self, part: Part, parts: int, count: int, rows: Array | None) -> None:
        """A backward begins: of this part of a step of so many, with so many targets, and rows of the table."""
        self._part, self._parts, self._count, self._rows = part, parts, count, rows
        self._factor = 1 / count if count else 0.0
        self._squares, self._pushed, self.early = {}, set(), 0
        for filling in self._fillings:
            span = filling.bucket.span
            filling.fresh(self._vector[span.start : span.stop])
            filling.expect()

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Take a gradient."""
        filling = self._of[id(parameter)]
        filling.put(parameter, compute)
        if not filling.missing:
            self._complete(filling)
            if not (self._apart and self._clip):
                self._push(filling)
                self.early += 1
        self._worker.poll()

    def shut(self) -> float:
        """The backward is over, what it did not hand in is zero: push what is left. Gives the norm per target.

        Raises
        ------
        FloatingPointError
            If the gradient is not finite.
        """
        for filling in self._fillings:
            if filling.bucket.number not in self._squares:
                self._complete(filling)
        norm = math.sqrt(math.fsum(self._squares.values())) * self._factor
        if self._apart and self._clip:
            self._factor *= clip_factor(np.array([norm**2]), 1.0, self._clip).factor
        for filling in self._fillings:
            if filling.bucket.number not in self._pushed:
                self._push(filling)
        return norm

    def _complete(self, filling: Filling) -> None:
        filling.complete()
        squares = total(block_squares(filling.vector)) if self._apart else 0.0
        if not math.isfinite(squares):
            names = ", ".join(
                place.parameter.name
                for place in filling.bucket.places
                if not np.isfinite(self._vector[place.span.start : place.span.stop]).all()
            )
            raise FloatingPointError(f"the gradient of {names} is not finite in step {self._part.clock}")
        self._squares[filling.bucket.number] = squares

    def _push(self, filling: Filling) -> None:
        self._pushed.add(filling.bucket.number)
        for key in self._keys[filling.bucket.number]:
            gradient = self._vector[key.span.start : key.span.stop]
            self._worker.push(key.number, self._part, self._parts, self._count, self._factor, gradient, self._rows)
