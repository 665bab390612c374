"""A training step on any layout: forward and backward unit by unit, gradients summed over the ranks, the update.

The units' motions are called here, and nowhere else; where gradients go and weights come from is the layout's matter.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from collectives import Communicator
from parallel import guard
from parallel.context import Context
from parallel.data import Batch
from parallel.flat import Flat
from parallel.holdings import Part
from parallel.layouts import LAYOUTS
from parallel.ledger import Ledger, predict, predict_activations
from parallel.memory import Memory
from parallel.motion import Motion, nobody
from parallel.nn.operator import Operator, Spec
from parallel.optim import Optimizer
from parallel.plan import Plan
from parallel.precision import PRECISIONS
from parallel.record import Recorder
from parallel.report import Evaluation, Report
from parallel.stepping import Measure, Passed, Scored, Stepping, check, facts_of, type_of, units_of
from parallel.stretches import Stretch
from parallel.sums import Numbers

__all__ = ["LAYOUTS", "PRECISIONS", "Batch", "Engine", "Evaluation", "Report", "Stretch"]


class Engine(Stepping):
    """A model in training, spread over the ranks of a communicator. Making one is collective.

    Parameters
    ----------
    model : Operator
        A `Sequential`'s items are the units in which weights come and go; any other operator is one unit.
    loss : loss operator
    comm : Communicator
        Of ours. Stays the caller's.
    optimizer : Optimizer
    layout : str
        A name of `LAYOUTS`.
    seed : int
        Of first values and of dropout.
    precision : str
        A name of `PRECISIONS`.
    reproducible : bool
        Whether gradients are added in the canonical order, the same for every layout and number of ranks.
    clip : float, optional
        Limit of the gradient's norm.
    bucket_bytes, first_bytes : int
        A bucket of gradients is closed when it has as many bytes; the same for the one that is complete first.
    check_every : int
        Compare the parameters of all ranks after every so many steps; 0 for never.
    device : "cpu" or "cuda"
        Where all of it happens. On a GPU the current device.
    trace : bool
        Whether to keep `events`.

    Attributes
    ----------
    steps, updates : int
        Steps that were made, skipped ones included; those that changed the weights.
    scaling : LossScale
        What the loss is multiplied with; 1 but in fp16.
    flat : Flat
        The vector of parameters.
    ledger : Ledger
        Bytes by kind.

    Raises
    ------
    ValueError
        If an argument has no meaning.
    Disagreement
        On all ranks, if their models or settings differ; it names the first difference.

    Notes
    -----
    All methods are collective, but for `share`, `stretches`, `state` and `load`.
    """

    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Optimizer,
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
        check(comm, precision=precision, clip=clip, check_every=check_every)
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}; found {layout!r}")
        self._name, self._layout = layout, LAYOUTS[layout]
        flat = Flat(model)
        settings = {"layout": layout, "seed": seed, "precision": precision, "reproducible": reproducible, "clip": clip}
        settings |= {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes, "check_every": check_every}
        guard.agree(comm, [*settings.items(), *facts_of(flat, optimizer)])
        self._units = units_of(model)
        self._plan = Plan(
            units=self._units,
            flat=flat,
            ranks=comm.Get_size(),
            rank=comm.Get_rank(),
            precision=PRECISIONS[precision],
            reproducible=reproducible,
            bucket_bytes=bucket_bytes,
            first_bytes=first_bytes,
        )
        self._memory = Memory(comm, device)
        context = Context(self._plan, comm, self._memory, Recorder(trace))
        part = Part.make(context, LAYOUTS[layout])
        self._gradients, self._weights = part.gradients, part.weights
        super().__init__(context, [part], part.spans, loss, optimizer, seed=seed, clip=clip, check_every=check_every)
        self.ledger = Ledger(self._memory.allocated, self._predict([()] * comm.Get_size()))
        self._looked_at: set[tuple[Any, ...]] = set()
        self.refresh()

    def share(self, micro_batches: int) -> range:
        """The numbers of this rank's micro-batches, of so many in the step."""
        return self._layout.share(micro_batches, self._comm.Get_rank(), self._comm.Get_size())

    # ------------------------------------------------------------------------------------------ the parts of a step

    def _passes(self, mine: list[Batch], everyone: Numbers, scale: float) -> Passed:
        """All forwards and backwards, and the sum of gradients."""
        gradients, weights = self._gradients, self._weights
        turns = gradients.rounds(everyone, self._plan.rank)
        there = range(len(self._units))
        weights.begin([*there, *reversed(there)] * turns)
        gradients.begin(everyone)
        early, losses, problem = 0, [], None
        for turn in range(turns):
            batch = mine[turn] if turn < len(mine) else None
            motion = nobody() if batch is None or problem is not None else self._motion(batch, training=True)
            with self._recorder("compute", "forward", turn=turn):
                for unit in self._units:
                    weights.enter()
                    motion.forward(unit)
                    weights.leave()
                motion.score()
                self._note(batch, motion, everyone)
                motion.turn(scale)
            gradients.open(turn, None if batch is None else batch.number)
            with self._recorder("compute", "backward", turn=turn):
                for number in reversed(there):
                    weights.enter()
                    motion.backward(self._units[number], gradients)
                    weights.leave()
                    gradients.left(number)
            problem = problem or motion.problem
            if batch is not None:
                losses.append((batch.number, motion.total))
            early = gradients.started
            gradients.shut()
        gradients.finish()
        return Passed(early, losses, problem)

    def _motion(self, batch: Batch, training: bool) -> Motion:
        return Motion(*self._typed(batch), self._run(batch, training), self._loss)

    def _scores(self, mine: list[Batch], everyone: Numbers, measure: Measure | None) -> Scored:
        turns = self._gradients.rounds(everyone, self._plan.rank)
        self._weights.begin([*range(len(self._units))] * turns)
        totals, measured, problem = [], 0.0, None
        for turn in range(turns):
            motion = self._motion(mine[turn], training=False) if turn < len(mine) else nobody()
            for unit in self._units:
                self._weights.enter()
                motion.forward(unit)
                motion.saved.clear()
                self._weights.leave()
            motion.score()
            measured += motion.measure(measure) if measure else 0.0
            problem = problem or motion.problem
            if turn < len(mine):
                totals.append((mine[turn].number, motion.total))
        return Scored(totals, measured, problem)

    def _note(self, batch: Batch | None, motion: Motion, everyone: Numbers) -> None:
        """Enter in the ledger what has not been seen before: other shapes, other numbers of micro-batches."""
        if batch is None or motion.problem is not None:
            return
        kind = (batch.x.shape, batch.y.shape, *(len(numbers) for numbers in everyone))
        if kind not in self._looked_at:
            self._looked_at.add(kind)
            self._memory.at_least("activations", motion.nbytes())
            predicted = self._predict(everyone)
            precision = self._plan.precision
            x = Spec(batch.x.shape, type_of(batch.x, precision.storage))
            y = Spec(batch.y.shape, type_of(batch.y, precision.wide))
            with contextlib.suppress(NotImplementedError):  # a model of the user's own may have no outlines
                predicted["activations"], work = predict_activations(self._plan, self._loss, x, y)
                self.ledger.expect(predicted, work)

    def _predict(self, everyone: Numbers) -> Counter[str]:
        return predict(self._plan, self._name, len(self._optimizer.states()), everyone)
