"""A model in training with its parts on different ranks: each stage by its line of a plan, with replicas if wished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.schedule.chunks import even
from parallel.runtime import consistency_check as guard
from parallel.data_parallel.run_context import Context
from parallel.data.sampler import Batch, contiguous
from parallel.nn.flat_params import BLOCK, Flat
from parallel.data_parallel.sharded_optimizer import Part
from parallel.layouts import LAYOUTS
from parallel.engine.memory_ledger import Ledger, predict_part
from parallel.runtime.vector_memory import Memory
from parallel.mesh import Mesh
from parallel.nn.compose import Sequential
from parallel.nn.operator import Operator, Outline, Spec, nbytes_of
from parallel.optim.optimizers import Optimizer
from parallel.pipeline.schedule.actions import to_csv
from parallel.pipeline.param_division import Group, checked_cuts, divide
from parallel.pipeline.schedule.truncate import fewer, forwards
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import Plan, build
from parallel.pipeline.runner import Deed, Runner, deeds
from parallel.pipeline.schedule.simulator import simulate
from parallel.pipeline.stage import Chunk, Microbatch, Scoring, Training
from parallel.data_parallel.partition_spec import Plan as Division
from parallel.optim.precision import PRECISIONS, Precision
from parallel.runtime.profiler import Recorder
from parallel.engine.base import Measure, Passed, Scored, Stepping, check, facts_of, type_of, units_of
from parallel.data_parallel.reducers import Moment, Numbers

AXIS = "pp"
REPLICAS = ("dp", "zero1")
"""Axes along which stages have replicas: how these add up gradients, by the name of the layout."""


class Pipeline(Stepping):
    """A model in parts, spread over stages, and stages over replicas. Making one is collective.

    Parameters
    ----------
    model : Operator
        A `Sequential` with at least as many items as there are parts. They have outlines, which tell how long messages
        are.
    loss : loss operator
    comm : Communicator
        Of ours. Stays the caller's.
    optimizer : Optimizer
    schedule : str or Plan
        A name of `schedules.SCHEDULES`, or a plan of one's own, without messages.
    mesh : Mesh or str
        With an axis ``pp``, of the stages, and perhaps one of `REPLICAS`.
    microbatches : int
        Of a step, in each replica; a step may have fewer. A plan of one's own has its own number.
    virtual : int, optional
        Parts of the model on each stage, where the schedule leaves it open.
    cuts : sequence of int, optional
        The units with which parts begin, and how many units there are; by default parts have equal numbers.
    seed, precision, reproducible, clip, bucket_bytes, first_bytes, check_every, device, trace
        As of `parallel.engine.data_parallel_engine.Engine`.

    Attributes
    ----------
    mesh : Mesh
    plan : Plan
        What all stages of a replica do in a step, messages included.
    cuts : tuple of int
    sent : Counter
        Messages of the last step by the stage that they went to.
    ledger : Ledger
        Bytes by kind.

    Raises
    ------
    ValueError
        On all ranks, if an argument has no meaning, the ranks are not those of the mesh, or the plan does not work out:
        before any message is sent.
    Disagreement
        On all ranks, if their models or settings differ; it names the first difference.
    """

    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Optimizer,
        *,
        schedule: str | Plan = "1f1b",
        mesh: Mesh | str,
        microbatches: int = 1,
        virtual: int | None = None,
        cuts: Sequence[int] | None = None,
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
        self.mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        self._layout = replicas_of(self.mesh, comm.Get_size())
        plan = schedule
        if isinstance(plan, str):
            plan = self._build(plan, self.mesh.sizes[AXIS], microbatches, virtual)
        if plan.stages != self.mesh.sizes[AXIS]:
            raise ValueError(f"schedule: {plan.name} is for {plan.stages} stages, the mesh is {self.mesh}")
        flat, units = Flat(model), units_of(model)
        self.cuts = checked_cuts(cuts or even_cuts(len(units), plan.placement.parts), len(units), plan.placement.parts)
        settings = {"mesh": self.mesh, "cuts": self.cuts, "seed": seed, "precision": precision, "clip": clip}
        settings |= {"reproducible": reproducible, "bucket_bytes": bucket_bytes, "first_bytes": first_bytes}
        settings |= {"check_every": check_every, "schedule": plan.name, "placement": plan.placement.routes}
        lines = enumerate(to_csv(plan.actions).splitlines())
        told = [(f"the line of stage {stage}", line) for stage, line in lines]
        guard.agree(comm, [*settings.items(), *told, *facts_of(flat, optimizer)])
        self.plan = lower(plan)
        simulate(self.plan)
        groups = divide(flat, units, self.cuts, reproducible=reproducible)

        recipe = PRECISIONS[precision]
        if refusal := self._refusal(plan, groups, self.mesh, clip, recipe):
            raise ValueError(refusal)
        whole = Division(units, flat, comm.Get_size(), comm.Get_rank(), recipe, reproducible, bucket_bytes, first_bytes)
        for tensor in flat.places:
            tensor.parameter.dtype = recipe.storage  # elsewhere too: outlines go by it
        context = Context(whole, comm, Memory(comm, device), Recorder(trace))
        self._ours: list[Communicator] = []
        self._held: dict[int, tuple[int, ...]] = {}
        self._shares = [(group, self._share(context, group)) for group in groups if whole.rank in self._holders(group)]
        self._chunks = {
            chunk: Chunk(part, plan.placement.parts, units[slice(*self.cuts[part : part + 2])], self._of(part))
            for (stage, chunk), part in plan.placement.part.items()
            if stage == self._stage(whole.rank)
        }
        self._line = MPI.Intracomm(comm).Split(self._replica(whole.rank), self._stage(whole.rank))
        self._runner = Runner(MPI.Intracomm(self._line), context.recorder, context.memory.xp)
        self._bound: dict[tuple[str, int], tuple[Deed, ...]] = {}
        self._outlines: dict[Spec, list[Outline]] = {}
        self._looked_at: set[tuple[Any, ...]] = set()
        parts = [part for _, part in self._shares]
        spans = comm.allgather([span for part in parts for span in part.mine])
        options: dict[str, Any] = {"seed": seed, "clip": clip, "check_every": check_every}
        super().__init__(context, parts, spans, loss, optimizer, teams=sorted(self.mesh.lines(AXIS)), **options)
        self.ledger = Ledger(context.memory.allocated, self._predict([()] * len(self.mesh.lines(AXIS))))
        self.refresh()

    @staticmethod
    def _build(schedule: str, stages: int, microbatches: int, virtual: int | None) -> Plan:
        """The plan of a schedule, for so many micro-batches of a step."""
        return build(schedule, stages, microbatches, virtual=virtual)

    @staticmethod
    def _refusal(plan: Plan, groups: Sequence[Group], mesh: Mesh, clip: float | None, recipe: Precision) -> str | None:
        """What this engine cannot do."""
        return None if plan.versions is None else f"schedule: {plan.name} updates on the way; it is for Asynchronous"

    @property
    def sent(self) -> Counter[int]:
        """Messages of the last step, or evaluation, by the stage that they went to."""
        return self._runner.sent

    def share(self, micro_batches: int) -> range:
        """The numbers of this rank's micro-batches, of so many in the step: those of its replica."""
        return contiguous(micro_batches, self._replica(self._comm.Get_rank()), len(self.mesh.lines(AXIS)))

    def close(self) -> None:
        """Give back requests, communicators and memory; the engine is of no use afterwards. Collective."""
        super().close()
        for comm in self._ours:
            comm.Free()
        self._line.Free()

    # ------------------------------------------------------------------------------------------ who is where

    def _stage(self, rank: int) -> int:
        return self.mesh.coordinates(rank)[AXIS]

    def _replica(self, rank: int) -> int:
        return self.mesh.coordinates(rank).get(self._layout, 0)

    def _holders(self, group: Group) -> tuple[int, ...]:
        """The ranks that have a group."""
        if group.number not in self._held:
            stages = group.holders(self.plan.placement)
            ranks = tuple(rank for rank in range(self.mesh.size) if self._stage(rank) in stages)
            self._held[group.number] = ranks
        return self._held[group.number]

    def _share(self, context: Context, group: Group) -> Part:
        """What this rank has of a group. Collective over those that have it.

        Every group has a communicator of its own: in which order a rank comes to the end of its groups is the plan's
        matter, and not the same for all ranks.
        """
        ranks = self._holders(group)
        comm = context.comm.Create_group(context.comm.Get_group().Incl(ranks), tag=group.number)
        self._ours.append(comm)
        flat = context.flat.part(group.tensors)
        plan = replace(context.plan, flat=flat, ranks=len(ranks), rank=comm.Get_rank())
        share = Part.make(Context(plan, comm, context.memory.among(comm), context.recorder), LAYOUTS[self._layout])
        share.gradients.bind()
        return share

    def _of(self, part: int) -> list[tuple[Group, Part]]:
        """What this rank has of the weights of a part."""
        return [(group, share) for group, share in self._shares if part in group.parts]

    def _leaves(self, group: Group, everyone: Numbers) -> list[tuple[int, ...]]:
        """By holder of a group: which of its leaves it adds."""
        return [
            group.leaves(self.plan.placement, self._stage(rank), everyone[self._replica(rank)])
            for rank in self._holders(group)
        ]

    # ------------------------------------------------------------------------------------------ the parts of a step

    def _foresee(self, mine: list[Batch]) -> None:
        """Find the sizes of messages, or what is wrong with micro-batches."""
        for batch in mine:
            self._outline(self._form(batch))

    def _form(self, batch: Batch) -> Spec:
        return Spec(batch.x.shape, type_of(batch.x, self._context.storage))

    def _passes(self, mine: list[Batch], everyone: Numbers, moment: Moment) -> Passed:
        """All forwards and backwards, and the sum of gradients."""
        self._expect_at_most(everyone)
        here = [self._microbatch(batch, training=True) for batch in mine]
        work = Training(
            self._chunks, here, self._loss, self._runner.progress, scale=moment.scale, note=self._noting(here, everyone)
        )
        for group, part in self._shares:
            part.gradients.begin(self._leaves(group, everyone))
        self._runner.run(self._bind("train", len(mine)), work)
        for _, part in self._shares:
            part.gradients.finish()
        return Passed(work.early, work.losses, work.problem)

    def _expect_at_most(self, everyone: Numbers) -> None:
        most, found = self.plan.microbatches, max(map(len, everyone))
        if found > most:
            raise ValueError(f"micro-batches: expected at most {most} for each pipeline, found {found}")

    def _scores(self, mine: list[Batch], everyone: Numbers, measure: Measure | None) -> Scored:
        """Forwards alone, without dropout."""
        here = [self._microbatch(batch, training=False) for batch in mine]
        work = Scoring(self._chunks, here, self._loss, self._runner.progress, measure)
        self._runner.run(self._bind("evaluate", len(mine)), work)
        return Scored(work.losses, work.measured, work.problem)

    def _bind(self, what: str, microbatches: int) -> tuple[Deed, ...]:
        """This stage's line, for so many micro-batches."""
        key = what, microbatches
        if key not in self._bound:
            stage = self._stage(self._context.plan.rank)
            if what == "train":
                self._bound[key] = deeds(fewer(self.plan, microbatches), stage)
            else:
                self._bound[key] = deeds(lower(forwards(self.plan, microbatches)), stage, f"{what} ")
        return self._bound[key]

    def _microbatch(self, batch: Batch, training: bool) -> Microbatch:
        x, y = self._typed(batch)
        made = [outline.y for outline in self._outline(self._form(batch))]
        return Microbatch(batch.number, x, y, self._run(batch, training), made)

    def _outline(self, x: Spec) -> list[Outline]:
        """Of every part, for an input like this."""
        if x not in self._outlines:
            outlines: list[Outline] = []
            for start, stop in pairwise(self.cuts):
                part = Sequential(self._context.plan.units[start:stop])
                try:
                    outlines.append(part.outline(outlines[-1].y if outlines else x))
                except NotImplementedError:
                    some = f"an operator in units {start} to {stop - 1}"
                    raise ValueError(f"{some} has no outline, which would tell how long messages are") from None
            self._outlines[x] = outlines
        return self._outlines[x]

    # ------------------------------------------------------------------------------------------ bytes

    def _noting(self, here: list[Microbatch], everyone: Numbers) -> Callable[[int], None] | None:
        """Who enters in the ledger what has not been seen before: other shapes, other numbers of micro-batches."""
        kind = (*(one.x.shape for one in here), *(one.y.shape for one in here), *map(len, everyone))
        if kind in self._looked_at:
            return None
        self._looked_at.add(kind)
        predicted = self._predict(everyone)
        predicted["activations"], work = self._activations(here)
        self.ledger.expect(predicted, work)
        return lambda alive: self._context.memory.at_least("activations", alive)

    def _predict(self, everyone: Numbers) -> Counter[str]:
        """Bytes of everything but activations."""
        states, total = len(self._optimizer.states()), Counter(buffers=self.flat.length // BLOCK * 8)
        for group, part in self._shares:
            plan, leaves = part.context.plan, self._leaves(group, everyone)
            leaves[plan.rank] = self._in_turn(group, everyone)
            total += predict_part(plan, self._layout, states, leaves)
        return total

    def _in_turn(self, group: Group, everyone: Numbers) -> tuple[int, ...]:
        """This rank's leaves of a group in the order in which they come."""
        numbers = everyone[self._replica(self._context.plan.rank)]
        done = [deed.action for deed in self._bind("train", len(numbers)) if deed.action.kind in ("W", "BW")]
        parts = [(action.microbatch, self._chunks[action.chunk].number) for action in done]
        return tuple(group.leaf(numbers[turn], part) for turn, part in parts if part in group.parts)

    def _activations(self, here: list[Microbatch]) -> tuple[int, int]:
        """The most bytes that are alive between forwards and backwards, and of temporaries."""
        most = work = 0
        held: dict[tuple[int, int], int] = {}
        for deed in self._bind("train", len(here)):
            action = deed.action
            key = action.chunk, action.microbatch
            if action.kind == "F":
                one, chunk = here[action.microbatch], self._chunks[action.chunk]
                outline = self._outline(Spec(one.x.shape, one.x.dtype))[chunk.number]
                kept: Any = outline.y, outline.saved
                ends = [outline.work]
                if chunk.last:
                    y = Spec(one.y.shape, one.y.dtype)
                    loss = self._loss.outline(outline.y, y)
                    kept, ends = (outline.y, y, outline.saved, loss.saved), [outline.work, loss.work]
                held[key] = nbytes_of(kept)
                most, work = max(most, sum(held.values())), max(work, *ends)
            elif action.kind in ("W", "BW"):
                del held[key]
        return most, work


def replicas_of(mesh: Mesh, ranks: int) -> str:
    """The axis along which stages have replicas; ``"dp"`` if there is none.

    Raises
    ------
    ValueError
        If the mesh has no stages, or an axis that means nothing here, or is not for so many ranks.
    """
    others = [name for name in mesh.sizes if name != AXIS]
    if AXIS not in mesh.sizes or len(others) > 1 or not set(others) <= set(REPLICAS):
        raise ValueError(f"mesh: expected {AXIS}, and {' or '.join(REPLICAS)} if stages have replicas; found {mesh}")
    if mesh.size != ranks:
        raise ValueError(f"mesh: {mesh} is for {mesh.size} ranks, found {ranks}")
    return others[0] if others else "dp"


def even_cuts(units: int, parts: int) -> tuple[int, ...]:
    """Parts of as many units each as can be.

    >>> even_cuts(7, 3)
    (0, 3, 5, 7)
    """
    return tuple(accumulate(even(units, parts), initial=0))
