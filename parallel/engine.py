"""A training step on any layout: forward and backward unit by unit, gradients summed over the ranks, the update.

(The public interface; what it does follows.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from collectives import Communicator
from parallel.nn.operator import Array, Operator

LAYOUTS = ("dp-naive", "dp-bucket", "dp", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


class Batch(NamedTuple):
    """One micro-batch: any tuple of these four will do.

    Attributes
    ----------
    number : int
        Which of the step's micro-batches it is, 0 to M-1 in canonical order over all ranks.
    x, y : array
        Inputs and targets, on the host or on the device.
    samples : array of int64
        The samples' numbers, for dropout.
    """

    number: int
    x: Array
    y: Array
    samples: np.ndarray


class Report(NamedTuple):
    """What a step tells, the same on all ranks except for the times."""

    step: int  # the number of the step that was made, from 0
    loss: float  # mean over `count`
    count: int  # targets of all ranks
    norm: float | None  # of the gradient of the mean loss, before clipping; None if nobody asked (no clip, no loss scale)
    skipped: bool  # the gradient overflowed in fp16: nothing was updated, the loss scale was halved
    scale: float  # the loss scale that was used
    rate: float
    stop: bool  # some rank said stop=True
    seconds: float
    communication: float  # seconds of these that this rank spent in communication, waiting included
    early: int  # exchanges of gradients that were started before the backward ended


class Evaluation(NamedTuple):
    """Means over all targets of all ranks."""

    loss: float
    measure: float | None
    count: int


class Stretch(NamedTuple):
    """Elements of a logical tensor that this rank holds: what checkpoints read and write.

    Attributes
    ----------
    name : str
        ``"model/<parameter>"``, or ``"optimizer/<state>/<parameter>"``.
    shape : tuple of int
        Of the whole tensor.
    start : int
        Where in the flattened tensor the stretch begins.
    array : 1-D array
        A view of the rank's memory: assigning to its elements changes the state. float32 (float64 in fp64).
    mine : bool
        Whether this rank is the one to write it to a checkpoint. Every element is in one such stretch, on one rank.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    array: Array
    mine: bool


class Engine:
    """A model in training, spread over the ranks of a communicator.

    Parameters
    ----------
    model : Operator
        Best a `Sequential`, whose items are the units.
    loss : operator of parallel.nn.loss
    comm : Communicator
    optimizer : Optimizer
    layout : str
        A name of `LAYOUTS`.
    seed : int
        Of first values and of dropout.
    precision : str
        A name of `PRECISIONS`.
    reproducible : bool
        Whether gradients are added in the canonical order, which is the same for every layout and number of ranks.
    clip : float, optional
        Limit of the gradient's norm.
    bucket_bytes, first_bytes : int
        Sizes of buckets, and of the one that is complete first.
    check_every : int
        Compare the parameters of all ranks after every so many steps; 0 for never.
    device : "cpu" or "cuda"
    trace : bool
        Whether to record what happens when (`events`).

    All of its methods are collective, but for `share` and `stretches`.
    """

    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Any,
        *,
        layout: str = "dp",
        seed: int = 0,
        precision: str = "fp32",
        reproducible: bool = False,
        clip: float | None = None,
        bucket_bytes: int = 4 << 20,
        first_bytes: int = 256 << 10,
        check_every: int = 0,
        device: str = "cpu",
        trace: bool = False,
    ) -> None:
        raise NotImplementedError

    steps: int  # updates attempted so far (what Run.step and schedules see); a checkpoint sets it
    scaling: Any  # the LossScale: value, state(), load()
    ledger: Any  # bytes by kind: .allocated and .predicted, dicts from kind to bytes

    def share(self, micro_batches: int) -> Sequence[int]:
        """The numbers of this rank's micro-batches, of so many in the step."""
        raise NotImplementedError

    def step(self, batches: Sequence[Batch], *, stop: bool = False) -> Report:
        """One update from all ranks' micro-batches. A rank may have none.

        `stop` says that this rank wants to end, after a Ctrl-C say: all learn it from the report.
        """
        raise NotImplementedError

    def evaluate(
        self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None = None
    ) -> Evaluation:
        """Mean loss without training; `measure(scores, targets)` is summed likewise (how many are right, say)."""
        raise NotImplementedError

    def stretches(self) -> Iterator[Stretch]:
        """All that a checkpoint has of parameters and optimiser, as far as this rank holds it, in the same order."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Make what was assigned to the stretches count, after all of them were."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back requests and memory."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
