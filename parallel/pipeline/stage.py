"""What a stage computes in a step: its units' motions on the micro-batches of its pipeline, in training or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.data_parallel.sharded_optimizer import Part
from parallel.engine.step_sync import Losses
from parallel.engine.microbatch_pass import Motion, nobody
from parallel.nn.operator import Array, Operator, Parameter, Run, Spec
from parallel.pipeline.param_division import Group

Compute = Callable[[Array], object]
Measure = Callable[[Array, Array], float]


class Chunk:
    """A part of the model on this stage, and the sink of its gradients.

    Parameters
    ----------
    number : int
        Which part.
    parts : int
        How many there are.
    units : sequence of Operator
    shares : sequence of (Group, Part)
        What this rank has of its weights.
    """

    def __init__(self, number: int, parts: int, units: Sequence[Operator], shares: Sequence[tuple[Group, Part]]):
        self.number, self.units, self.shares = number, units, shares
        self.first, self.last = number == 0, number == parts - 1
        self._sinks = {id(tensor.parameter): part.gradients for group, part in shares for tensor in group.tensors}

    def open(self, turn: int, number: int) -> None:
        """The gradients of a micro-batch are about to come."""
        for group, part in self.shares:
            part.gradients.open(turn, group.leaf(number, self.number))

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        """Take a gradient."""
        self._sinks[id(parameter)](parameter, compute)

    def shut(self) -> None:
        """All have come."""
        for _, part in self.shares:
            part.gradients.shut()


@dataclass(frozen=True)
class Microbatch:
    """One that goes through the pipeline.

    Attributes
    ----------
    number : int
        In the step, counted over all pipelines.
    x, y : array
        Inputs and targets, in the types that the model takes.
    run : Run
    made : sequence of Spec
        What each part of the model makes of it.
    """

    number: int
    x: Array
    y: Array
    run: Run
    made: Sequence[Spec]


class Scoring:
    """Forwards alone.

    Parameters
    ----------
    chunks : mapping of int to Chunk
    microbatches : sequence of Microbatch
    loss : loss operator
    progress : callable
        Called between two units, so that messages go on.
    measure : callable (scores, targets) -> float, optional

    Attributes
    ----------
    losses : list of (number, sum of losses)
        Of the micro-batches whose losses are here.
    measured : float
    problem : Exception or None
        The first; from then on nothing is computed.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        microbatches: Sequence[Microbatch],
        loss: Any,
        progress: Callable[[], None],
        measure: Measure | None = None,
    ):
        self._chunks, self._microbatches, self._loss = chunks, microbatches, loss
        self._progress, self._measure = progress, measure
        self.losses: Losses = []
        self.measured = 0.0
        self.problem: Exception | None = None

    def made(self, part: int, microbatch: int) -> Spec:
        """What a part of the model makes of a micro-batch."""
        return self._microbatches[microbatch].made[part]

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        """F; the scores stay here."""
        return self._through(self._chunks[chunk], microbatch, x, keep=False)[1]

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        """There is none."""
        raise NotImplementedError("forwards alone")

    def weights(self, chunk: int, microbatch: int) -> None:
        """There are none."""
        raise NotImplementedError("forwards alone")

    def update(self, chunk: int, number: int) -> None:
        """There is none."""
        raise NotImplementedError("without updates on the way")

    def _through(self, chunk: Chunk, microbatch: int, x: Array, keep: bool) -> tuple[Motion, Array]:
        """The motion and what has come of it."""
        one = self._microbatches[microbatch]
        x, y = one.x if chunk.first else x, one.y if chunk.last else None
        motion = nobody() if self.problem else Motion(x, y, one.run, self._loss)
        for unit in chunk.units:
            motion.forward(unit)
            if not keep:
                motion.saved.clear()
            self._progress()
        if chunk.last:
            motion.score()
            self.measured += motion.measure(self._measure) if self._measure else 0.0
            self.losses.append((one.number, motion.total))
        self.problem = self.problem or motion.problem
        made = None if chunk.last else self._fitting(motion.give(), chunk.number, microbatch)
        return motion, made

    def _fitting(self, array: Array, part: int, microbatch: int) -> Array:
        """What is sent, if it is what others wait for; it belongs to what a part of the model has made."""
        wanted = self.made(part, microbatch)
        if array is None or (array.shape, array.dtype) == (wanted.shape, wanted.dtype):
            return array
        found = f"{array.dtype} of shape {array.shape}"
        outline = f"part {part} of the model makes {wanted.dtype} of shape {wanted.shape} by its outline"
        self.problem = self.problem or ValueError(f"{outline}, found {found}")
        return None


class Training(Scoring):
    """Forwards, backwards, and gradients of weights.

    Parameters
    ----------
    scale : float
        What losses are multiplied with.
    note : callable (bytes), optional
        Told what is alive after every forward.

    Attributes
    ----------
    early : int
        Exchanges of gradients that were started before the last gradient was there.
    """

    def __init__(self, *args: Any, scale: float, note: Callable[[int], None] | None = None):
        super().__init__(*args)
        self._scale, self._note = scale, note
        self._motions: dict[tuple[int, int], Motion] = {}
        self._later: dict[tuple[int, int], list[tuple[Parameter, Compute]]] = {}
        self._alive: dict[tuple[int, int], int] = {}
        shares = [part for chunk in self._chunks.values() for _, part in chunk.shares]
        self._parts = list({id(part): part for part in shares}.values())
        self.early = 0

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        """F."""
        key = chunk, microbatch
        self._motions[key], made = self._through(self._chunks[chunk], microbatch, x, keep=True)
        if self._note:
            self._alive[key] = self._motions[key].nbytes(made)
            self._note(sum(self._alive.values()))
        return made

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        """B, or all of the backward."""
        here, key = self._chunks[chunk], (chunk, microbatch)
        motion = self._motions[key]
        if here.last:
            motion.turn(self._scale)
        else:
            motion.take(dy)
        if whole:
            here.open(microbatch, self._microbatches[microbatch].number)
            self._back(here, motion, here)
            self._end(here, key)
        else:
            later = self._later[key] = []
            self._back(here, motion, lambda parameter, compute: later.append((parameter, compute)))
        dx = motion.give_back()
        return None if here.first else self._fitting(dx, here.number - 1, microbatch)

    def weights(self, chunk: int, microbatch: int) -> None:
        """W."""
        here, key = self._chunks[chunk], (chunk, microbatch)
        here.open(microbatch, self._microbatches[microbatch].number)
        motion = self._motions[key]
        motion.settle(self._later.pop(key), here)
        self._end(here, key)

    def _back(self, chunk: Chunk, motion: Motion, sink: Any) -> None:
        for unit in reversed(chunk.units):
            motion.backward(unit, sink)
            self._progress()
        self.problem = self.problem or motion.problem

    def _end(self, chunk: Chunk, key: tuple[int, int]) -> None:
        """All of a micro-batch's gradients of a chunk are there."""
        motion = self._motions.pop(key)
        self.problem = self.problem or motion.problem
        self._alive.pop(key, None)
        self.early = sum(part.gradients.started for part in self._parts)
        chunk.shut()
