"""A training step on any layout: forward and backward unit by unit, gradients summed over the ranks, the update.

The units' motions are called here, and nowhere else; where gradients go and weights come from is the layout's matter.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import index
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel import guard
from parallel.blocks import Blocks, Everything, blocks_of
from parallel.compression import AUTO, Maker, parse
from parallel.compression.auto import choose
from parallel.context import Context
from parallel.data import Batch
from parallel.flat import Flat, Span, shards
from parallel.layouts import LAYOUTS
from parallel.ledger import Ledger, predict, predict_activations
from parallel.memory import Memory
from parallel.motion import Motion, nobody
from parallel.nn.compose import Sequential
from parallel.nn.kernels.storage import narrow
from parallel.nn.operator import Array, Operator, Run, Spec
from parallel.optim import Optimizer, Piece, block_squares, clip_factor
from parallel.plan import Plan
from parallel.precision import PRECISIONS
from parallel.record import Event, Recorder
from parallel.report import Evaluation, Report
from parallel.schedules import rate_at
from parallel.stretches import Stretch, stretches
from parallel.sums import Moment

__all__ = ["LAYOUTS", "PRECISIONS", "Batch", "Engine", "Evaluation", "Report", "Stretch"]


class Engine:
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
    compress : str, optional
        What becomes of gradients between ranks, a name of `parallel.compression.COMPRESSORS` with a number behind it;
        or "auto", which measures and takes what is quicker, plain sums among it.
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
    remarks : list of str
        What was decided here and is worth telling.

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
        first_bytes: int = 256 << 10,
        check_every: int = 0,
        compress: str | None = None,
        device: str = "cpu",
        trace: bool = False,
    ) -> None:
        problem = _refusal(comm, layout=layout, precision=precision, clip=clip, check_every=check_every)
        problem = problem or uncompressible(compress, layout, precision, reproducible, device)
        if problem:
            raise problem
        self._comm, self._loss, self._optimizer = comm, loss, optimizer
        self._name, self._layout, self._clip, self._seed, self._check_every = (
            layout,
            LAYOUTS[layout],
            clip,
            seed,
            check_every,
        )
        self.flat = Flat(model)
        recipe = PRECISIONS[precision]
        settings = {"layout": layout, "seed": seed, "precision": precision, "reproducible": reproducible, "clip": clip}
        settings |= {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes, "check_every": check_every}
        settings["compress"] = compress
        tensors = [(f"parameter {place.parameter.name}", place.parameter.shape) for place in self.flat.places]
        described = [(f"optimizer's {what}", value) for what, value in optimizer.describe().items()]
        guard.agree(comm, [*settings.items(), *tensors, *described])
        self._units = tuple(model.items) if isinstance(model, Sequential) else (model,)
        self._plan = Plan(
            units=self._units,
            flat=self.flat,
            ranks=comm.Get_size(),
            rank=comm.Get_rank(),
            precision=recipe,
            reproducible=reproducible,
            bucket_bytes=bucket_bytes,
            first_bytes=first_bytes,
            seed=seed,
            compress=self._compressor(compress),
        )
        self._memory, self._recorder = Memory(comm, device), Recorder(trace)
        self._context = Context(self._plan, comm, self._memory, self._recorder)
        self._gradients = self._layout.gradients(self._context)
        self._weights = self._layout.weights(self._context, self._gradients)
        self.scaling, self._scaled = recipe.loss_scale(), recipe.scaled
        self._pieces = self._make_pieces(recipe.master)
        self._blocks = Blocks(self._context, self._spans_of_all())
        everything = Everything([piece.span for piece in self._pieces])
        self._of_pieces = self._blocks.gather if self._layout.divided else everything.gather
        self.ledger = Ledger(self._memory.allocated, self._predict([()] * comm.Get_size()))
        self._looked_at: set[tuple[Any, ...]] = set()
        self._header = np.empty((comm.Get_size(), 5), np.int64)
        self.steps = self.updates = 0
        self.refresh()

    def _compressor(self, said: str | None) -> Maker | None:
        self.remarks: list[str] = []
        if said == AUTO:
            said, why = choose(self._comm, self.flat.length)
            self.remarks.append(f"compress {AUTO}: {why}")
        return parse(said) if said else None

    # ------------------------------------------------------------------------------------------ training

    def share(self, micro_batches: int) -> range:
        """The numbers of this rank's micro-batches, of so many in the step."""
        return self._layout.share(micro_batches, self._comm.Get_rank(), self._comm.Get_size())

    def step(self, batches: Sequence[Batch], *, stop: bool = False) -> Report:
        """One update from the micro-batches of all ranks.

        Parameters
        ----------
        batches : sequence of Batch, or of tuples like it
            This rank's. It may have none. `share` says which a rank should have.
        stop : bool
            Whether this rank wants to end, after a Ctrl-C say: all ranks learn it from the report.

        Raises
        ------
        ValueError
            On all ranks, if the numbers of their micro-batches are not those from 0 on, each once.
        StepFailed
            On all ranks, if one of them has raised an exception, or has a loss or a gradient that is no finite number
            (in fp16 the latter makes a skipped step, unless the loss scale cannot go lower). Nothing was updated then.
        Diverged
            On all ranks, if parameters that should be the same are not.
        """
        began, spent = time.perf_counter(), self._recorder.seconds["communication"]
        mine, problem = self._checked(batches)
        everyone, count, stop = self._meet(mine, stop, problem)
        scale = self.scaling.value
        with np.errstate(over="ignore", invalid="ignore"):  # found below, on all ranks together
            early, losses, problem = self._passes(mine, everyone, scale, Moment(self.steps, count * scale))
        loss = self._losses(losses, problem) / count if count else math.nan
        norm, factor, finite = self._norm(count, scale) if count else (None, 0.0, False)
        if count:
            self._rescale(finite)
        rate = rate_at(self._optimizer.rate, self.updates)
        if finite:
            with self._recorder("compute", "update"):
                self._optimizer.update(self._pieces, self.updates, factor, self._of_pieces)
            self.updates += 1
            self._weights.publish()
        step, self.steps = self.steps, self.steps + 1
        if self._check_every and self.steps % self._check_every == 0 and self._weights.replicated:
            guard.compare(self._comm, self.flat, step)
        seconds, communication = time.perf_counter() - began, self._recorder.seconds["communication"] - spent
        return Report(step, loss, count, norm, not finite, scale, rate, stop, seconds, communication, early)

    def evaluate(self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None = None) -> Evaluation:
        """Mean loss without training.

        Parameters
        ----------
        batches : sequence of Batch
            This rank's, which may be none.
        measure : callable (scores, targets) -> float, optional
            Summed over all batches: how many are right, say.
        """
        mine, problem = self._checked(batches)
        everyone, count, _ = self._meet(mine, False, problem)
        turns = self._gradients.rounds(everyone, self._comm.Get_rank())
        self._weights.begin([*range(len(self._units))] * turns)
        totals, measured = [], 0.0
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
        loss = self._losses(totals, problem)
        if measure:
            measured = self._comm.allreduce(measured)
        mean = 1 / count if count else math.nan
        return Evaluation(loss * mean, measured * mean if measure else None, count)

    # ------------------------------------------------------------------------------------------ its state

    def stretches(self) -> Iterator[Stretch]:
        """All that a checkpoint has of parameters and optimiser, as far as this rank holds it; in a fixed order.

        What compression owes is shared out evenly first, so that any number of ranks can go on from it.
        """
        yield from stretches(self._pieces, self._spans_of_all()[self._comm.Get_rank()])
        if self._plan.compress is not None:
            for sum_ in self._gradients.sums:
                sum_.share_out()
                yield from sum_.stretches()

    def refresh(self) -> None:
        """Make what was assigned to the stretches count, after all of them were, on all ranks."""
        for piece in self._pieces:
            if piece.stored is not None:
                narrow(piece.weights, piece.stored.dtype, out=piece.stored)
        self._weights.publish()

    def state(self) -> dict[str, Any]:
        """Besides the stretches: steps, updates, the loss scale; numbers that are the same on all ranks."""
        return {
            "steps": self.steps,
            "updates": self.updates,
            "scaling": self.scaling.state(),
            "ranks": self._comm.Get_size(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`, after the stretches were assigned to."""
        self.scaling.load(state["scaling"])
        self.steps, self.updates = state["steps"], state["updates"]
        if self._plan.compress is not None:
            for sum_ in self._gradients.sums:
                sum_.owe(state.get("ranks", self._comm.Get_size()))

    @property
    def events(self) -> list[Event]:
        """What has happened since the engine was made, or since the list was cleared; empty without `trace`."""
        return self._recorder.events

    def close(self) -> None:
        """Give back requests and let go of the memory; the engine is of no use afterwards."""
        self._gradients.close()
        self._weights.close()
        for place in self.flat.places:
            place.parameter.data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ the parts of a step

    def _checked(self, batches: Sequence[Batch]) -> tuple[list[Batch], Exception | None]:
        """The batches in order of their numbers, on the device; or none, and why."""
        xp = self._memory.xp
        try:
            mine = [Batch(index(number), *rest) for number, *rest in batches]
            for batch in mine:
                if len(batch.x) != len(batch.y) or len(batch.x) != len(batch.samples):
                    lengths = f"{len(batch.x)} inputs, {len(batch.y)} targets, {len(batch.samples)} sample numbers"
                    raise ValueError(f"micro-batch {batch.number} has {lengths}")
            mine.sort(key=lambda batch: batch.number)
            return [batch._replace(x=xp.asarray(batch.x), y=xp.asarray(batch.y)) for batch in mine], None
        except Exception as error:
            return [], error

    def _meet(
        self, mine: list[Batch], stop: bool, problem: Exception | None
    ) -> tuple[list[tuple[int, ...]], int, bool]:
        """The numbers of all ranks' micro-batches, how many targets there are, and whether anyone wants to stop."""
        count = 0
        if problem is None:
            try:
                count = sum(int(self._loss.count(batch.y)) for batch in mine)
            except Exception as error:
                problem = error
        with self._recorder("communication", "meet"):
            numbers = tuple(batch.number for batch in mine)
            header = np.array([len(mine), count, stop, problem is not None, guard.mark(numbers)], np.int64)
            self._comm.Allgather(header, self._header)
            if self._header[:, 3].any():
                guard.share_problems(self._comm, problem)
            lengths = self._header[:, 0].tolist()
            everyone = [tuple(range(length)) for length in lengths]
            if self._plan.reproducible or guard.mark(range(sum(lengths))) != guard.joined(self._header[:, 4].tolist()):
                everyone = self._comm.allgather(numbers)
                if sorted(chain.from_iterable(everyone)) != list(range(sum(lengths))):
                    wanted = f"each of the numbers 0 to {sum(lengths) - 1} on one rank"
                    raise ValueError(f"micro-batches: expected {wanted}, found {everyone}")
        return everyone, int(self._header[:, 1].sum()), bool(self._header[:, 2].any())

    def _motion(self, batch: Batch, training: bool) -> Motion:
        x = batch.x.astype(self._type(batch.x, "storage"), copy=False)
        y = batch.y.astype(self._type(batch.y, "wide"), copy=False)
        return Motion(x, y, Run(training, self._seed, self.steps, np.asarray(batch.samples, np.int64)), self._loss)

    def _passes(
        self, mine: list[Batch], everyone: list[tuple[int, ...]], scale: float, moment: Moment
    ) -> tuple[int, list[tuple[int, float]], Exception | None]:
        """All forwards and backwards, and the sum of gradients."""
        gradients, weights = self._gradients, self._weights
        turns = gradients.rounds(everyone, self._comm.Get_rank())
        there = range(len(self._units))
        weights.begin([*there, *reversed(there)] * turns)
        gradients.begin(everyone, moment)
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
        return early, losses, problem

    def _note(self, batch: Batch | None, motion: Motion, everyone: list[tuple[int, ...]]) -> None:
        """Enter in the ledger what has not been seen before: other shapes, other numbers of micro-batches."""
        if batch is None or motion.problem is not None:
            return
        kind = (batch.x.shape, batch.y.shape, *(len(numbers) for numbers in everyone))
        if kind not in self._looked_at:
            self._looked_at.add(kind)
            self._memory.at_least("activations", motion.nbytes())
            predicted = self._predict(everyone)
            x, y = (Spec(array.shape, self._type(array, of)) for array, of in ((batch.x, "storage"), (batch.y, "wide")))
            with contextlib.suppress(NotImplementedError):  # a model of the user's own may have no outlines
                predicted["activations"], work = predict_activations(self._plan, self._loss, x, y)
                self.ledger.expect(predicted, work)

    def _predict(self, everyone: list[tuple[int, ...]]) -> Counter[str]:
        return predict(self._plan, self._name, len(self._optimizer.states()), everyone)

    def _type(self, array: Array, of: str) -> np.dtype:
        """What an array of a batch is turned to: integers stay."""
        return array.dtype if array.dtype.kind in "iub" else getattr(self._plan.precision, of)

    def _losses(self, losses: list[tuple[int, float]], problem: Exception | None) -> float:
        """The sum of all ranks' losses, the same whoever has which; or what has gone wrong, on all ranks."""
        odd = [number for number, loss in losses if not math.isfinite(loss)]
        if problem is None and odd:
            numbers = ", ".join(map(str, odd))
            problem = FloatingPointError(
                f"the loss of micro-batch {numbers} is not a finite number in step {self.steps}"
            )
        with self._recorder("communication", "losses"):
            if self._plan.reproducible:
                everyone = self._comm.allgather((problem is not None, losses))
                total, failed = math.fsum(loss for _, some in everyone for _, loss in some), any(f for f, _ in everyone)
            else:
                pair = np.array([math.fsum(loss for _, loss in losses), problem is not None])
                self._comm.Allreduce(MPI.IN_PLACE, pair)
                total, failed = float(pair[0]), bool(pair[1] != 0)
            if failed:
                guard.share_problems(self._comm, problem)
        return total

    def _norm(self, count: int, scale: float) -> tuple[float, float, bool]:
        """The gradient's norm, the factor for the update, and whether to make it."""
        with self._recorder("compute", "norm"):
            squares = self._blocks.gather(self._block_squares())
        factor = 1 / (count * scale)
        norm, clip = clip_factor(squares, factor, self._clip)
        finite = math.isfinite(norm)
        if not finite and not self._scaled:
            odd = (place for place in self.flat.places if not np.isfinite(squares[blocks_of(place.span)]).all())
            names = ", ".join(place.parameter.name for place in odd)
            what = f"the gradient of {names} is" if names else "the norm of the gradient is"
            raise guard.StepFailed(f"nothing was updated; {what} not finite in step {self.steps}")
        return norm if finite else math.inf, factor * clip, finite

    def _rescale(self, finite: bool) -> None:
        """Tell the loss scale; if it can do no more, raise an exception on all ranks, which have told it the same."""
        try:
            self.scaling.update(finite)
        except FloatingPointError as error:
            raise guard.StepFailed(f"nothing was updated; {error}, in step {self.steps}") from error

    def _block_squares(self) -> np.ndarray:
        """Of this rank's part of the gradient."""
        if self._layout.divided:
            parts = [gradient for _, gradient in self._gradients.own]
        else:
            here = self._spans_of_all()[self._comm.Get_rank()]
            parts = [self._gradients.vector[span.start : span.stop] for span in here]
        return np.concatenate([np.zeros(0), *map(block_squares, parts)])

    # ------------------------------------------------------------------------------------------ how it is built

    def _spans_of_all(self) -> list[list[Span]]:
        """Rank by rank, spans that make up the whole vector together."""
        ranks = range(self._comm.Get_size())
        if self._layout.divided:
            return [[bucket.parts[rank] for bucket in self._gradients.buckets] for rank in ranks]
        return [[span] for span in shards(Span(0, self.flat.length), len(ranks))]

    def _make_pieces(self, mixed: bool) -> list[Piece]:
        """What this rank updates, with first values."""
        memory, wide, own = self._memory, self._context.wide, self._weights.own
        size = sum(span.size for span, _ in own)
        vectors = {name: memory.own("optimizer", size, wide) for name in self._optimizer.states()}
        master = memory.own("optimizer", size, wide) if mixed else None
        pieces, at = [], 0
        for (span, stored), (_, gradient) in zip(own, self._gradients.own):
            here = slice(at, at + span.size)
            at += span.size
            weights = stored if master is None else master[here]
            first = weights if memory.xp is np else np.empty(span.size, wide)
            self.flat.initialise(first, self._seed, span)
            if first is not weights:
                weights[...] = memory.xp.asarray(first)
            state = {name: vector[here] for name, vector in vectors.items()}
            pieces.append(Piece(span, weights, gradient, state, self.flat.places, None if master is None else stored))
        return pieces


def uncompressible(
    compress: str | None, layout: str, precision: str, reproducible: bool, device: str = "cpu"
) -> Exception | None:
    """Why gradients cannot be compressed so."""
    if compress is None:
        return None
    try:
        if compress != AUTO:
            parse(compress)
    except ValueError as error:
        return error
    if LAYOUTS[layout].divided:
        whole = ", ".join(name for name, line in LAYOUTS.items() if not line.divided)
        return ValueError(f"compress: only where every rank has the whole sum ({whole}); found {layout}")
    if reproducible:
        return ValueError("compress: a reproducible training adds gradients as they are, in canonical order")
    if PRECISIONS[precision].wide != np.float32:
        return ValueError(f"compress: gradients are to be float32, and in {precision} they are not")
    return None if device == "cpu" else ValueError("compress: only on the CPU so far")


def _refusal(comm: Any, *, layout: str, precision: str, clip: float | None, check_every: int) -> Exception | None:
    """What is wrong with the arguments."""
    if not isinstance(comm, Communicator):
        return TypeError(f"comm: expected a collectives.Communicator, found {comm!r}")
    if layout not in LAYOUTS:
        return ValueError(f"layout: expected one of {', '.join(LAYOUTS)}; found {layout!r}")
    if precision not in PRECISIONS:
        return ValueError(f"precision: expected one of {', '.join(PRECISIONS)}; found {precision!r}")
    if clip is not None and not clip > 0:
        return ValueError(f"clip: expected a positive limit, found {clip}")
    if check_every < 0:
        return ValueError(f"check_every: expected a number of steps, or 0 for never; found {check_every}")
    return None
