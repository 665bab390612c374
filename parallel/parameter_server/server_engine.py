"""A training with servers: what `parallel.engine.data_parallel_engine.Engine` is to ranks that are all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.runtime import consistency_check as guard
from parallel.data.sampler import Batch, contiguous
from parallel.nn.flat_params import Flat, Span
from parallel.engine.memory_ledger import Ledger
from parallel.runtime.vector_memory import Memory
from parallel.engine.microbatch_pass import Motion
from parallel.nn.compose import Sequential
from parallel.nn.operator import Array, Operator, Run
from parallel.optim.optimizers import LAMB, Optimizer, Piece
from parallel.data_parallel.partition_spec import Plan
from parallel.optim.precision import PRECISIONS
from parallel.runtime.profiler import Event, Recorder
from parallel.runtime.step_report import Evaluation, Report
from parallel.optim.lr_schedules import rate_at
from parallel.parameter_server.replication_chain import ChainLost
from parallel.parameter_server.worker_clocks import GONE, rule_of
from parallel.parameter_server.key_assignment import buckets_of, keys_of
from parallel.parameter_server.messages import Kind
from parallel.server.order import Order
from parallel.parameter_server.message_bus import Post
from parallel.parameter_server.event_record import Recording, file_of, read
from parallel.parameter_server.server_replicas import Replicas
from parallel.server.retry import Retry
from parallel.parameter_server.server_loop import Failed, Mail, Server
from parallel.parameter_server.gradient_sink import Gradients
from parallel.parameter_server.shard_store import Apart, Cell, Together
from parallel.parameter_server.work_assignment import Outcome, Part, joined
from parallel.parameter_server.worker_client import Again, Worker
from parallel.checkpoint.tensor_slices import Stretch, stretches
from parallel.runtime.collective_errors import agree, together

Result = TypeVar("Result")


class ParameterServer:
    """A model in training: the first ranks keep the weights, the others work. Making one is collective.

    A step's micro-batches are its parts. Every worker takes part in all steps, one after another, in each with as many
    parts as it comes to; and `step` returns when this rank has done what it can. So ranks may be in different steps, as
    the rule of consistency allows; `settle` brings them together.

    Parameters
    ----------
    model, loss, comm, optimizer, seed, clip, bucket_bytes, first_bytes, trace
        As `parallel.engine.data_parallel_engine.Engine` has them. Steps that are one update are clipped as a whole, else every part is.
    precision : str
        A name of `PRECISIONS` whose loss is not scaled.
    reproducible : bool
        Whether gradients of a step that is one update are added in canonical order.
    servers : int
        How many of the ranks are servers.
    consistency : str
        As `parallel.parameter_server.worker_clocks.rule_of` reads it.
    replicas : int
        Servers that have a copy of each parameter.
    mortal : bool
        Whether this MPI goes on after the death of a rank, and so shall the training. Then no rank waits for another
        but in a message, every worker evaluates by itself, and the first that lives speaks for all.
    slow : mapping of int to float
        Ranks of workers that take so many times as long.
    delay : float
        Seconds that a part takes longer than it would, before `slow` counts: for experiments.
    record, replay : path, optional
        Where the order of what servers did is kept; where it is taken from.

    Attributes
    ----------
    steps, updates : int
        Steps that this rank has made; updates of every weight, known after `settle`.
    server : Server or None
    worker : Worker or None
        What this rank is.
    ticks : list of (float, int, int)
        On the first rank: when, by `time.perf_counter`, which worker had made how many steps.
    outcomes : list
        On the first rank, for every step that it has seen the end of: what its parts came to.
    keys : tuple of Key
        Into which the vector of parameters is cut.
    flat : Flat
    ledger : Ledger
        Of `allocated` bytes by kind.

    Raises
    ------
    ValueError
        If an argument has no meaning, or they do not go together.

    Notes
    -----
    All methods are collective, but for `share`, `stretches`, `load`, `refresh` and `close`.
    """

    remarks: Sequence[str] = ()

    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Optimizer,
        *,
        servers: int = 1,
        consistency: str = "bsp",
        replicas: int = 1,
        mortal: bool = False,
        seed: int = 0,
        precision: str = "fp32",
        reproducible: bool = False,
        clip: float | None = None,
        bucket_bytes: int = 1 << 20,
        first_bytes: int = 256 << 10,
        slow: Mapping[int, float] | None = None,
        delay: float = 0.0,
        record: Path | None = None,
        replay: Path | None = None,
        trace: bool = False,
    ) -> None:
        size, rank = comm.Get_size(), comm.Get_rank()
        refuse_servers(size, servers, consistency, precision, isinstance(optimizer, LAMB), slow or {})
        self._comm, self._loss, self._optimizer, self._seed = comm, loss, optimizer, seed
        self._rule, recipe = rule_of(consistency), PRECISIONS[precision]
        self.flat = Flat(model)
        told = {"seed": seed, "precision": precision, "reproducible": reproducible, "clip": clip, "servers": servers}
        told |= {"consistency": consistency, "bucket_bytes": bucket_bytes, "first_bytes": first_bytes}
        tensors = [(f"parameter {place.parameter.name}", place.parameter.shape) for place in self.flat.places]
        described = [(f"optimizer's {what}", value) for what, value in optimizer.describe().items()]
        guard.agree(comm, [*told.items(), *tensors, *described])
        self._units = tuple(model.items) if isinstance(model, Sequential) else (model,)
        self._plan = Plan(self._units, self.flat, size, rank, recipe, reproducible, bucket_bytes, first_bytes)
        self._servers, self._workers = range(servers), range(servers, size)
        self._mortal = mortal
        self._replicas: Replicas | None = None
        self._batches: dict[int, Sequence[Batch]] = {}
        buckets = buckets_of(self._plan)
        self.keys = keys_of(self._plan, buckets, servers)
        self._memory, self._recorder = Memory(comm), Recorder(trace)
        self.ledger = Ledger(self._memory.allocated, self._memory.allocated.copy())
        self.steps = self.updates = 0
        self.ticks: list[tuple[float, int, int]] = []
        self.outcomes: list[list[Outcome]] = []
        self._over = False
        self._settled = True
        self._recording: Recording | None = None
        self.server: Server | None = None
        self.worker: Worker | None = None
        facts = told | {"optimizer": described, "ranks": size, "keys": [key.span for key in self.keys]}
        script = together(comm, lambda: self._files(facts, record, replay), "order of messages")
        others = [*self._workers, *self._servers] if rank in self._servers else list(self._servers)
        self._post = Post(comm, [peer for peer in others if peer != rank], len(self._workers))
        self._mail: Mail = self._post
        chained = mortal or replicas > 1
        if rank in self._servers:
            made = partial(self._make_server, script=script, mixed=recipe.master, clip=clip)
            if chained:
                self._replicas = Replicas(self._post, rank, self._servers, self._workers, replicas)
                self._replicas.servers |= {shard: made(mail, shard) for shard, mail in self._replicas.mails.items()}
                self.server = self._replicas.servers[rank]
            else:
                self.server = made(self._post, rank)
        else:
            if chained:
                storage, wide = np.dtype(recipe.storage), np.dtype(recipe.wide)
                self._mail = Retry(self._post, self._servers, replicas, storage, wide)
            self.worker = self._make_worker(self._mail, buckets, clip)
            self._slow, self._delay = (slow or {}).get(rank, 1.0), delay

    # ------------------------------------------------------------------------------------------ training

    def share(self, micro_batches: int) -> range:
        """The numbers of this rank's micro-batches in an evaluation. In a step it gets those that it draws."""
        if self.worker is None:
            return range(0)
        if self._mortal:
            return range(micro_batches)
        return contiguous(micro_batches, self._comm.Get_rank() - len(self._servers), len(self._workers))

    def step(self, batches: Sequence[Batch], *, stop: bool = False) -> Report:
        """Take part in the next step.

        Parameters
        ----------
        batches : sequence of Batch, or of tuples like it
            All of the step, by number, the same on all workers; those that this one draws are taken out of it. Servers
            need none.
        stop : bool
            Whether this rank wants to end. All do after the same step, whose reports say so.

        Returns
        -------
        Report
            On the first rank of the whole step, on others of what they did of it.

        Raises
        ------
        StepFailed
            On all ranks, if one of them has raised an exception, or has a loss or a gradient that is no finite number;
            on those that were done with the step by then in the next one, or in `settle`. Nothing can be done with the
            engine then.
        """
        began, spent = time.perf_counter(), self._recorder.seconds["communication"]
        self._settled = False
        with self._sharing_problems():
            if self.server is not None:
                outcomes, last = self._serve(self.server, stop)
                early = 0
            else:
                assert self.worker is not None
                outcomes, last, early = self._work(self.worker, batches, stop)
        loss, count, norm = joined(outcomes)
        if self.server is not None and self._rule.together:
            norm = self.server.norms.pop(self.steps, None)
        rate = rate_at(self._optimizer.rate, self.updates if self._rule.together else self.steps)
        step, self.steps = self.steps, self.steps + 1
        if last:
            self.settle()
        seconds, communication = time.perf_counter() - began, self._recorder.seconds["communication"] - spent
        return Report(step, loss, count, norm, not count, 1.0, rate, last, seconds, communication, early)

    def settle(self) -> None:
        """Wait until all ranks have made as many steps; nothing is under way then. Raises `StepFailed`, as `step`."""
        if self._settled:
            return
        with self._sharing_problems(), self._recorder("communication", "settle"):
            if self.server is not None:
                self.server.until_rest()
                if self._replicas is not None:
                    rests = self.server.rests
                    self._replicas.until(lambda: all(server.rests >= rests for server in self._here()))
                self.updates = self.server.store.updates
            else:
                assert self.worker is not None
                self._rest(self.worker)
                self.updates = self.worker.updates
            self._post.flush()
        self._settled = True
        self._write()

    def evaluate(self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None = None) -> Evaluation:
        """Mean loss without training, with the weights as they are when all have made as many steps.

        Parameters
        ----------
        batches : sequence of Batch
            This rank's; servers have none.
        measure : callable (scores, targets) -> float, optional
            Summed over all batches.
        """
        self.settle()
        totals: list[tuple[float, int, float]] = []
        problem: Exception | None = None
        with self._sharing_problems():
            if self.worker is not None:
                self.flat.bind(self.worker.copy())
                for batch in (Batch(*some) for some in batches):
                    motion = self._motion(batch, None)
                    for unit in self._units:
                        motion.forward(unit)
                        motion.saved.clear()
                    motion.score()
                    measured = motion.measure(measure) if measure else 0.0
                    problem = problem or motion.problem
                    totals.append((motion.total, self._loss.count(batch.y), measured))
            if self._mortal and problem is not None:
                raise problem
        self._settled = False
        self.settle()
        everyone = totals
        if not self._mortal:
            agree(self._comm, problem, "evaluation", guard.StepFailed)
            everyone = [entry for some in self._comm.allgather(totals) for entry in some]
        count = sum(entry[1] for entry in everyone)
        if not count:
            return Evaluation(math.nan, math.nan if measure else None, 0)
        loss = math.fsum(entry[0] for entry in everyone) / count
        return Evaluation(loss, math.fsum(entry[2] for entry in everyone) / count if measure else None, count)

    # ------------------------------------------------------------------------------------------ its state

    def stretches(self) -> Iterator[Stretch]:
        """As `Engine.stretches`; workers have none."""
        if self.server is not None:
            cells = [cell for server in self._here() for cell in server.store.cells.values()]
            yield from stretches(
                [cell.piece for cell in cells], [cell.key.span for cell in self.server.store.cells.values()]
            )

    def refresh(self) -> None:
        """Make what was assigned to the stretches count, on all ranks."""
        for server in self._here():
            for cell in server.store.cells.values():
                cell.refresh()
        if self.worker is not None:
            self.worker.forget()

    def _here(self) -> list[Server]:
        """This rank's servers: its own, and those that it is a replica of."""
        if self._replicas is not None:
            return list(self._replicas.servers.values())
        return [] if self.server is None else [self.server]

    @property
    def speaks(self) -> bool:
        """Whether this rank tells of the training: the first; or, where ranks may die, the first worker that lives."""
        rank = self._comm.Get_rank()
        if not self._mortal:
            return rank == 0
        living = [at for at, clock in zip(self._workers, self.worker.clocks) if clock != GONE] if self.worker else []
        return self.worker is not None and rank == min(living, default=self._workers[0])

    def save(self, write: Callable[[MPI.Intracomm, Iterable[Stretch]], Result]) -> Result | None:
        """Have a checkpoint written, by the ranks of a communicator from what each has of the state.

        Where ranks may die, one that speaks writes all of it, while the others wait; they get None.
        """
        self.settle()
        if not self._mortal:
            return write(self._comm, self.stretches())
        result = None
        with self._sharing_problems():
            if self.worker is not None and self.speaks:
                names, wide, whole = self._optimizer.states(), self._plan.precision.wide, Span(0, self.flat.length)
                weights, *states = self.worker.copies(len(names), wide)
                piece = Piece(whole, weights, np.zeros_like(weights), dict(zip(names, states)), self.flat.places)
                result = write(MPI.COMM_SELF, stretches([piece], [whole]))
        self._settled = False
        self.settle()
        return result

    def state(self) -> dict[str, Any]:
        """As `Engine.state`, when all have made as many steps."""
        self.settle()
        return {"steps": self.steps, "updates": self.updates, "scaling": PRECISIONS["fp32"].loss_scale().state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`, of this engine or another."""
        self.steps, self.updates = state["steps"], state["updates"]
        for server in self._here():
            server.begin(self.steps)
            server.store.updates = self.updates

    @property
    def events(self) -> list[Event]:
        """What has happened since the engine was made, or since the list was cleared; empty without `trace`."""
        return self._recorder.events

    @property
    def traffic(self) -> dict[tuple[str, Kind, int], int]:
        """Bytes of vectors, ``("sent" or "received", kind of message, the other rank)``."""
        return self._post.traffic

    def close(self) -> None:
        """Let go of everything; what others still send is lost, unless all have settled."""
        self._write()
        if self._recording is not None:
            self._recording.close()
            self._recording = None
        if isinstance(self._mail, Retry):
            self._mail.leave()
        if self._replicas is not None and not self._over:
            self._replicas.until_left()
        if self._mortal:
            self._post.leave()
        elif self._post is not None and (self._settled or self._over):
            self._post.close()
        self._post = None  # type: ignore[assignment]
        for place in self.flat.places:
            place.parameter.data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._over:
            self.settle()
        self.close()

    # ------------------------------------------------------------------------------------------ what a rank does

    def _serve(self, server: Server, stop: bool) -> tuple[list[Outcome], bool]:
        server.wish |= stop and self._replicas is None  # what copies of it do not hear must not change what it does
        with self._recorder("communication", "serve"):
            last = server.until_made(self.steps + 1)
        outcomes = server.work.outcome(self.steps)
        if self._comm.Get_rank() == self._servers[0]:
            self.outcomes.append(outcomes)
        self.updates = server.store.updates
        return outcomes, last

    def _work(self, worker: Worker, batches: Sequence[Batch], stop: bool) -> tuple[list[Outcome], bool, int]:
        self._batches[self.steps] = batches
        outcomes, early = self._parts(worker, self.steps, stop)
        last = worker.last == self.steps
        worker.tick(self.steps + 1, len(batches), last)
        return outcomes, last, early

    def _parts(self, worker: Worker, clock: int, stop: bool) -> tuple[list[Outcome], int]:
        """Do parts of a step, and what others leave undone, until nothing is left of it."""
        outcomes: list[Outcome] = []
        done: tuple[Part, Outcome] | None = None
        early = 0
        while True:
            with self._recorder("communication", "draw"):
                part = worker.draw(clock, len(self._batches[clock]), done, stop)
            if part is None:
                return outcomes, early
            batches, done = self._batches[part.clock], None
            with suppress(Again):
                outcome = self._part(worker, part, Batch(*batches[part.number]), len(batches))
                early += self._gradients.early
                outcomes.append(outcome)
                done = part, outcome

    def _rest(self, worker: Worker) -> None:
        """Wait until all workers rest, and all parts are done."""
        while True:
            try:
                worker.rest()
            except Again:
                self._parts(worker, self.steps - 1, stop=False)
            else:
                self._batches.clear()
                return

    def _part(self, worker: Worker, part: Part, batch: Batch, parts: int) -> Outcome:
        """Forward and backward of a micro-batch, with the weights that come in and the gradients that go out."""
        began = time.perf_counter()
        motion, count = self._motion(batch, part.clock), int(self._loss.count(batch.y))
        rows = np.unique(batch.x).astype(np.int64) if self._has_table else None
        waiting = self._recorder.seconds["communication"]
        self.flat.bind(worker.read(part.clock, self._order, rows))
        for number, unit in enumerate(self._units):
            with self._recorder("communication", "pull"):
                worker.need(self._needs[number])
            with self._recorder("compute", "forward", unit=number):
                motion.forward(unit)
            worker.poll()
        motion.score()
        if motion.problem is None and not math.isfinite(motion.total):
            text = f"the loss of micro-batch {part.number} is not a finite number in step {part.clock}"
            raise FloatingPointError(text)
        motion.turn(1.0)
        self._gradients.open(part, parts, count, rows)
        with self._recorder("compute", "backward"):
            for unit in reversed(self._units):
                motion.backward(unit, self._gradients)
        if motion.problem is not None:
            raise motion.problem
        waited = self._recorder.seconds["communication"] - waiting
        computed = time.perf_counter() - began - waited
        time.sleep((self._slow - 1) * computed + self._slow * self._delay)
        norm = self._gradients.shut()
        with self._recorder("communication", "push"):
            worker.acknowledged()
        return Outcome(motion.total, count, norm, self._comm.Get_rank() - len(self._servers))

    def _motion(self, batch: Batch, clock: int | None) -> Motion:
        """A micro-batch of a step; or None, of an evaluation."""
        wide, storage = self._plan.precision.wide, self._plan.precision.storage
        x = batch.x if batch.x.dtype.kind in "iub" else batch.x.astype(storage, copy=False)
        y = batch.y if batch.y.dtype.kind in "iub" else batch.y.astype(wide, copy=False)
        run = Run(clock is not None, self._seed, clock or 0, np.asarray(batch.samples, np.int64))
        return Motion(x, y, run, self._loss)

    @contextmanager
    def _sharing_problems(self) -> Iterator[None]:
        """Whatever is raised here is raised on all ranks, when nothing is under way any more."""
        if self._over:
            raise guard.StepFailed("the engine has failed before")
        try:
            yield
        except Exception as error:
            self._over = True
            problem: Exception | None = error
            if isinstance(error, Failed):
                problem = error if str(error) else None
            elif self.worker is not None:
                self.worker.give_up()
            self._post.flush()
            if self._mortal:
                why = f"rank {self._comm.Get_rank()}: {problem}" if problem else "another rank has given up"
                failed = guard.StepFailed(f"the training has ended: {why}")
                failed.elsewhere = problem is None or isinstance(error, ChainLost)  # which all workers see
                raise failed from error
            agree(self._comm, problem, "the training has ended", guard.StepFailed)
            raise

    # ------------------------------------------------------------------------------------------ how it is built

    def _make_server(self, post: Mail, here: int, script: Any, mixed: bool, clip: float | None) -> Server:
        wide = self._plan.precision.wide
        cells = []
        for key in (key for key in self.keys if key.server == here):
            weights = self._memory.own("optimizer" if mixed else "parameters", key.span.size, wide)
            self.flat.initialise(weights, self._seed, key.span)
            gradient = np.zeros_like(weights)
            state = {name: self._memory.own("optimizer", key.span.size, wide) for name in self._optimizer.states()}
            stored = self._memory.own("parameters", key.span.size, self._plan.precision.storage) if mixed else None
            cells.append(Cell(key, Piece(key.span, weights, gradient, state, self.flat.places, stored)))
            cells[-1].refresh()
        kind = Together if self._rule.together else Apart
        store = kind(cells, self._optimizer, self.flat.length, clip, self._plan.reproducible)
        watch = self._watch if here == self._comm.Get_rank() == 0 else lambda worker, clock: None
        return Server(post, store, self._rule, self._workers, self._servers, here, Order(script), watch)

    def _make_worker(self, post: Mail, buckets: Any, clip: float | None) -> Worker:
        ahead, length = not self._rule.together, self.flat.length
        storage, wide = self._plan.precision.storage, self._plan.precision.wide
        vectors = [self._memory.own("parameters", length, storage) for _ in range(1 + ahead)]
        worker = Worker(post, self._rule, self.keys, self._servers, vectors)
        gradient = self._memory.own("gradients", length, wide)
        scratch = self._memory.own("buffers", self._plan.scratch(adds=False), wide)
        self._gradients = Gradients(worker, buckets, self.keys, gradient, scratch, ahead, clip)
        self._has_table = any(key.table is not None for key in self.keys)
        self._needs = [self._keys_of(number) for number in range(len(self._units))]
        self._order = list(dict.fromkeys(key for keys in self._needs for key in keys))
        return worker

    def _keys_of(self, unit: int) -> list[int]:
        """The keys in which a unit has parameters."""
        spans = [place.span for place in self.flat.places if unit in self._plan.users[id(place.parameter)]]
        return [
            key.number
            for key in self.keys
            if any(max(key.span.start, span.start) < min(key.span.stop, span.stop) for span in spans)
        ]

    def _watch(self, worker: int, clock: int) -> None:
        self.ticks.append((time.perf_counter(), worker, clock))

    def _files(self, facts: dict[str, Any], record: Path | None, replay: Path | None) -> Any:
        """Open what is written, and read what is to be played again."""
        rank = self._comm.Get_rank()
        if rank not in self._servers:
            return None
        script = None if replay is None else read(file_of(Path(replay), rank), facts)
        if record is not None:
            self._recording = Recording(file_of(Path(record), rank), facts)
        return script

    def _write(self) -> None:
        if self._recording is not None and self.server is not None:
            self._recording.write(self.server.order.entries)


def factors(text: str) -> dict[int, float]:
    """What ``--slow`` says: ranks and how many times as long they take.

    >>> factors("2:5,3:1.5")
    {2: 5.0, 3: 1.5}
    """
    found = {}
    for pair in filter(None, text.split(",")):
        rank, _, factor = pair.partition(":")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(f"slow: expected RANK:FACTOR, found {pair!r}") from None
    return found


def refuse_servers(
    ranks: int, servers: int, consistency: str, precision: str, lamb: bool, slow: Mapping[int, float]
) -> None:
    """Raise ValueError for a training with servers that has no meaning; it names the argument and says why."""
    rule = rule_of(consistency)
    if servers < 1:
        raise ValueError(f"servers: expected at least 1, found {servers}")
    if servers >= ranks:
        raise ValueError(f"servers: {servers} of {ranks} rank{'s' * (ranks > 1)} leave no workers")
    if PRECISIONS[precision].scaled:
        raise ValueError(f"precision: {precision} needs a loss scale that all workers agree on, and these do not meet")
    if lamb and (servers > 1 or not rule.together):
        raise ValueError("optimizer: lamb needs norms of whole tensors, which bsp on one server has")
    for rank, factor in slow.items():
        if not servers <= rank < ranks:
            raise ValueError(f"slow: rank {rank} is no worker; these are {servers} to {ranks - 1}")
        if not 1 <= factor < math.inf:
            raise ValueError(f"slow: expected a factor from 1 on, found {factor} for rank {rank}")
