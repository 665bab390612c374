"""A training step on any layout: forward and backward unit by unit, gradients summed over the ranks, the update.

The units' motions are called here, and nowhere else; where gradients go and weights come from is the layout's matter.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.runtime import consistency_check as guard
from parallel.grad_compression import AUTO, NONE, Maker, parse
from parallel.grad_compression.auto_select import choose
from parallel.data_parallel.run_context import Context
from parallel.data.sampler import Batch
from parallel.runtime.validation import named, whole
from parallel.data_parallel.error_feedback import Compressed
from parallel.nn.flat_params import Flat
from parallel.data_parallel.sharded_optimizer import Part
from parallel.layouts import LAYOUTS
from parallel.engine.memory_ledger import Ledger, predict, predict_activations
from parallel.runtime.vector_memory import Memory
from parallel.engine.microbatch_pass import Motion, nobody
from parallel.nn.operator import Operator, Spec
from parallel.optim.optimizers import Optimizer
from parallel.data_parallel.partition_spec import Plan
from parallel.optim.precision import PRECISIONS
from parallel.runtime.profiler import Recorder
from parallel.runtime.step_report import Evaluation, Report
from parallel.engine.base import Measure, Passed, Scored, Stepping, check, facts_of, type_of, units_of
from parallel.checkpoint.tensor_slices import Stretch
from parallel.data_parallel.reducers import Moment, Numbers

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
        A bucket of gradients is closed when it has as many bytes; the same for the one that is complete first. None
        has fewer than that, unless there is only one.
    check_every : int
        Compare the parameters of all ranks after every so many steps; 0 for never.
    compress : str
        What becomes of gradients between ranks, a name of `parallel.grad_compression.COMPRESSORS` with a number behind it;
        "none" for nothing; or "auto", which measures and takes what is quicker, plain sums among it.
    device : "cpu" or "cuda"
        Where all of it happens. On a GPU the current device.
    trace : bool
        Whether to keep `events`.
    memory : Memory, optional
        Where vectors come from, in place of `device`; by default the communicator's.

    Attributes
    ----------
    facts : list of (what it is, value)
        What was found to be the same on all ranks.
    context : Context
        What its parts share.
    pieces : list of Piece
        What this rank updates.
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
    All methods are collective, but for `share`, `state` and `load`, and `stretches` where nothing is compressed.
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
        first_bytes: int = 1 << 20,
        check_every: int = 0,
        compress: str = NONE,
        device: str = "cpu",
        trace: bool = False,
        memory: Memory | None = None,
    ) -> None:
        check(comm, precision=precision, clip=clip, check_every=check_every)
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}; found {layout!r}")
        if problem := uncompressible(compress, layout, precision, reproducible, device):
            raise problem
        self._name, self._layout = layout, LAYOUTS[layout]
        flat = Flat(model)
        settings = {"layout": layout, "seed": seed, "precision": precision, "reproducible": reproducible, "clip": clip}
        settings |= {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes, "check_every": check_every}
        settings["compress"] = compress
        self.facts = [*settings.items(), *facts_of(flat, optimizer)]
        guard.agree(comm, self.facts)
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
            seed=seed,
            compress=self._compressor(comm, compress, flat.length),
        )
        self._memory = memory or Memory(comm, device)
        context = Context(self._plan, comm, self._memory, Recorder(trace))
        part = Part.make(context, LAYOUTS[layout])
        self._gradients, self._weights = part.gradients, part.weights
        super().__init__(context, [part], part.spans, loss, optimizer, seed=seed, clip=clip, check_every=check_every)
        self.ledger = Ledger(self._memory.allocated, self._predict([()] * comm.Get_size()))
        self._looked_at: set[tuple[Any, ...]] = set()
        self._lenders = comm.Get_size()
        self.refresh()

    def _compressor(self, comm: Communicator, said: str, length: int) -> Maker | None:
        if said == AUTO:
            said, why = choose(comm, length)
            self.remarks = (f"compress {AUTO}: {why}",)
        return None if said == NONE else parse(said)

    def share(self, micro_batches: int) -> range:
        """The numbers of this rank's micro-batches, of so many in the step."""
        return self._layout.share(micro_batches, self._comm.Get_rank(), self._comm.Get_size())

    def step(self, batches: Iterable[Batch], *, stop: bool = False, drawn: bool = False) -> Report:
        """As of all engines, or of micro-batches that are drawn.

        Parameters
        ----------
        batches, stop
            As `Stepping.step` has them.
        drawn : bool
            Whether the next micro-batch is asked for when the one before is through, so that ranks may share them out
            while they work (`parallel.data.work_queue`), and tell each other afterwards who had which. The same on all ranks;
            for layouts in which nobody waits for others before the step's end.

        Raises
        ------
        ValueError, StepFailed, Diverged
            As `Stepping.step`; ValueError also if the layout does not let micro-batches be drawn.
        """
        if not drawn:
            return super().step(batches, stop=stop)
        if not self._layout.drawn:
            can = ", ".join(name for name, layout in LAYOUTS.items() if layout.drawn)
            raise ValueError(f"drawn: ranks can draw their micro-batches in {can}, and the layout is {self._name}")
        return self._step(lambda scale: self._drawn(batches, stop, scale))

    # ------------------------------------------------------------------------------------------ its state

    def stretches(self) -> Iterator[Stretch]:
        """As of all engines; what compression owes is shared out evenly first, so that any ranks can go on from it."""
        yield from super().stretches()
        for sum_ in self._compressed():
            sum_.share_out()
            yield from sum_.stretches()

    def state(self) -> dict[str, Any]:
        """As of all engines."""
        lenders = {} if self._plan.compress is None else {"ranks": self._comm.Get_size()}
        return super().state() | lenders

    def load(self, state: dict[str, Any]) -> None:
        """As of all engines."""
        ranks = whole(named(state, "state"), "ranks") if "ranks" in state else self._comm.Get_size()
        super().load(state)
        self._lenders = ranks

    def refresh(self) -> None:
        """As of all engines; what was owed by the ranks of the checkpoint is now owed by these."""
        for sum_ in self._compressed():
            sum_.owe(self._lenders)
        self._lenders = self._comm.Get_size()
        super().refresh()

    def _compressed(self) -> list[Compressed]:
        return self._gradients.sums if self._plan.compress is not None else []

    # ------------------------------------------------------------------------------------------ the parts of a step

    def _step(self, go: Callable[[float], tuple[int, bool, Passed]]) -> Report:
        """As of all engines; if it makes no update, nothing was sent in it."""
        updates = self.updates
        try:
            return super()._step(go)
        finally:
            if self.updates == updates:
                for sum_ in self._compressed():
                    sum_.undo()

    def _passes(self, mine: list[Batch], everyone: Numbers, moment: Moment) -> Passed:
        """All forwards and backwards, and the sum of gradients."""
        self._expect(everyone)
        gradients = self._gradients
        turns = gradients.rounds(everyone, self._plan.rank)
        there = range(len(self._units))
        self._weights.begin([*there, *reversed(there)] * turns)
        gradients.begin(everyone, moment)
        early, losses, problem = 0, [], None
        for turn in range(turns):
            batch = mine[turn] if turn < len(mine) else None
            motion = nobody() if batch is None or problem is not None else self._motion(batch, training=True)
            self._pass(turn, batch, motion, moment.scale)
            problem = problem or motion.problem
            if batch is not None:
                losses.append((batch.number, motion.total))
            early = gradients.started
            gradients.shut()
        gradients.finish()
        return Passed(early, losses, problem)

    def _drawn(self, batches: Iterable[Batch], stop: bool, scale: float) -> tuple[int, bool, Passed]:
        """The same, but a micro-batch is asked for when the one before is through, and ranks tell then what they had.

        A rank that has failed asks for no more: the others have what is left, and hear of it when they meet.
        """
        gradients, source, problem = self._gradients, iter(batches), None
        gradients.begin(None)
        mine: list[Batch] = []
        losses: list[tuple[int, float]] = []
        while problem is None:
            next_one, problem = self._checked(islice(source, 1))
            if not next_one:
                break
            (batch,) = next_one
            motion = self._motion(batch, training=True)
            self._pass(len(mine), batch, motion, scale)
            gradients.shut()
            mine.append(batch)
            losses.append((batch.number, motion.total))
            problem = motion.problem
        everyone, count, stop = self._meeting.begin(mine, stop, problem)
        self._expect(everyone)
        gradients.tell(everyone, Moment(self.steps, count, scale))
        gradients.finish()
        return count, stop, Passed(0, losses, None)

    def _pass(self, turn: int, batch: Batch | None, motion: Motion, scale: float) -> None:
        """Forward and backward of one micro-batch."""
        gradients, weights = self._gradients, self._weights
        with self._recorder("compute", "forward", turn=turn):
            for unit in self._units:
                weights.enter()
                motion.forward(unit)
                weights.leave()
            motion.score()
            self._note(batch, motion)
            motion.turn(scale)
        gradients.open(turn, None if batch is None else batch.number)
        with self._recorder("compute", "backward", turn=turn):
            for number in reversed(range(len(self._units))):
                weights.enter()
                motion.backward(self._units[number], gradients)
                weights.leave()
                gradients.left(number)

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

    def _note(self, batch: Batch | None, motion: Motion) -> None:
        """Enter in the ledger the shapes of a micro-batch that have not been seen before."""
        if batch is None or motion.problem is not None or not self._new((batch.x.shape, batch.y.shape)):
            return
        self._memory.at_least("activations", motion.nbytes())
        precision = self._plan.precision
        x = Spec(batch.x.shape, type_of(batch.x, precision.storage))
        y = Spec(batch.y.shape, type_of(batch.y, precision.wide))
        with contextlib.suppress(NotImplementedError):  # a model of the user's own may have no outlines
            activations, work = predict_activations(self._plan, self._loss, x, y)
            self.ledger.expect(Counter(activations=activations), work)

    def _expect(self, everyone: Numbers) -> None:
        """Enter in the ledger numbers of micro-batches that have not been seen before."""
        if self._new(tuple(everyone)):
            self.ledger.expect(self._predict(everyone), 0)

    def _new(self, kind: tuple[Any, ...]) -> bool:
        """Whether the ledger has seen nothing of this kind."""
        known = kind in self._looked_at
        self._looked_at.add(kind)
        return not known

    def _predict(self, everyone: Numbers) -> Counter[str]:
        return predict(self._plan, self._name, len(self._optimizer.states()), everyone)


def uncompressible(
    compress: str, layout: str, precision: str, reproducible: bool, device: str = "cpu"
) -> Exception | None:
    """Why gradients cannot be compressed so."""
    if compress == NONE:
        return None
    try:
        if compress != AUTO:
            parse(compress)
    except ValueError as error:
        return error
    if LAYOUTS[layout].divided:
        whole = ", ".join(name for name, line in LAYOUTS.items() if not line.divided)
        why = f"only where every rank has the whole sum ({whole}) can there be more, and the layout is {layout}"
    elif reproducible:
        why = "a reproducible training adds gradients as they are, in canonical order"
    elif PRECISIONS[precision].wide != np.float32:
        why = f"gradients are to be float32, and in {precision} they are not"
    elif device != "cpu":
        why = f"on {device} there is nothing else so far"
    else:
        return None
    return ValueError(f"compress: expected {NONE}, since {why}; found {compress}")
