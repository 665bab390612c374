"""Training engine with parameter servers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.checkpoint.step_folders import CheckpointError
from parallel.checkpoint.tensor_slices import TensorSlice, tensor_slices
from parallel.data.sampler import Batch, batch_of, contiguous
from parallel.data_parallel.partition_spec import plan_of
from parallel.engine.base import BaseEngine, check, facts_of, type_of
from parallel.engine.memory_ledger import MemoryLedger, Workload, predict_activations
from parallel.engine.microbatch_pass import MicrobatchPass
from parallel.engine.settings import Settings
from parallel.nn.flat_params import Span
from parallel.nn.operator import ArraySpec, Operator, PassMode
from parallel.optim.lr_schedules import rate_at
from parallel.optim.optimizers import LAMB, Optimizer, OptimizerSpan
from parallel.optim.precision import PRECISIONS
from parallel.parameter_server.event_order import EventOrder
from parallel.parameter_server.event_record import EventRecording, file_of, read
from parallel.parameter_server.gradient_sink import ServerGradients
from parallel.parameter_server.key_assignment import buckets_of, keys_of, keys_of_unit
from parallel.parameter_server.message_bus import MessageBus
from parallel.parameter_server.messages import MessageKind
from parallel.parameter_server.replication_chain import ReplicationChainLost, ReplicationChains
from parallel.parameter_server.retry import RetryQueue
from parallel.parameter_server.server_loop import ServerFailed, ServerLoop, ServerMail
from parallel.parameter_server.server_memory import of_shard, of_worker
from parallel.parameter_server.server_replicas import ServerReplicas
from parallel.parameter_server.server_settings import factors, refuse_servers
from parallel.parameter_server.shard_store import AsyncStore, ShardState, SyncStore
from parallel.parameter_server.work_assignment import PartResult, WorkPart, joined
from parallel.parameter_server.worker_client import Requeued, WorkerClient
from parallel.parameter_server.worker_clocks import GONE, rule_of
from parallel.runtime import consistency_check
from parallel.runtime.collective_errors import collective_call, raise_on_all
from parallel.runtime.profiler import Profiler, ProfilerEvent
from parallel.runtime.step_report import Evaluation, StepReport
from parallel.runtime.vector_memory import VectorAllocator
from quant.types import Array

Result = TypeVar("Result")

SERVER_DEFAULTS = Settings(layout="ps")

RECORDED = ("seed", "precision", "reproducible", "clip", "servers", "consistency", "bucket_bytes", "first_bytes")
"""Settings that must be equal for a recorded order of events to be replayed."""


class ParameterServer(BaseEngine):
    """Training engine whose first ranks are servers and whose other ranks are workers. Construction is collective.

    Parts of a step are its microbatches. Every worker takes part in every step with as many parts as it can draw, and
    `step` returns when this rank has no more to do. So ranks may be in different steps, within the limit of the
    consistency rule; `quiesce` synchronises them.

    Parameters
    ----------
    model, loss, comm, optimizer
        As of `Engine`.
    settings : Settings
        Specific fields: `servers`, `consistency`, `replicas`, `slow`, `delay`, `record`, `replay` and `fault_tolerant`.
        With the last one ranks wait for each other in messages only, every worker evaluates on its own, and the first
        living worker reports. `clip` limits the norm of a step with synchronous updates, else of every part.

    Attributes
    ----------
    steps, updates : int
        Steps of this rank; updates of every weight, valid after `quiesce`.
    server : ServerLoop or None
    worker : WorkerClient or None
    ticks : list of (float, int, int)
        On rank 0: time (`time.perf_counter`), worker, and its number of steps.
    outcomes : list of list of PartResult
        On rank 0: results of all parts, by step.
    keys : tuple of ServerKey
    flat : FlatParams
    ledger : MemoryLedger

    Raises
    ------
    ValueError
        If a setting is invalid or contradicts another.

    Notes
    -----
    All methods are collective, except `share`, `tensor_slices`, `load`, `refresh` and `close`.
    """

    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Optimizer,
        settings: Settings = SERVER_DEFAULTS,
    ) -> None:
        check(comm, settings)
        size, rank, servers = comm.Get_size(), comm.Get_rank(), settings.servers
        refuse_servers(settings, size, isinstance(optimizer, LAMB))
        self.settings, self._seed = settings, settings.seed
        self._comm, self._loss, self._optimizer = comm, loss, optimizer
        self._rule, recipe = rule_of(settings.consistency), PRECISIONS[settings.precision]
        self._plan = plan_of(model, size, rank, settings)
        self.flat = self._plan.flat
        consistency_check.check_equal(comm, [*settings.shared().items(), *facts_of(self.flat, optimizer)])
        self._units = self._plan.units
        self._servers, self._workers = range(servers), range(servers, size)
        self._fault_tolerant = settings.fault_tolerant
        self._replicas: ServerReplicas | None = None
        self._batches: dict[int, Sequence[Batch]] = {}
        buckets = buckets_of(self._plan)
        self.keys = keys_of(self._plan, buckets, servers)
        self._memory, self._recorder = VectorAllocator(comm), Profiler(settings.trace)
        self.ledger = MemoryLedger(self._memory.allocated)
        self.steps = self.updates = 0
        self.ticks: list[tuple[float, int, int]] = []
        self.outcomes: list[list[PartResult]] = []
        self._over = False
        self._is_quiescent = True
        self._recording: EventRecording | None = None
        self.server: ServerLoop | None = None
        self.worker: WorkerClient | None = None
        script = collective_call(comm, self._open_records, "order of messages")
        others = [*self._workers, *self._servers] if rank in self._servers else list(self._servers)
        self._bus = MessageBus(comm, [peer for peer in others if peer != rank], len(self._workers))
        self._mail: ServerMail = self._bus
        chained = settings.fault_tolerant or settings.replicas > 1
        if rank in self._servers:
            made = partial(self._make_server, script=script, mixed=recipe.master)
            if chained:
                self._replicas = ServerReplicas(self._bus, rank, self._servers, self._workers, settings.replicas)
                self._replicas.servers |= {shard: made(mail, shard) for shard, mail in self._replicas.mails.items()}
                self.server = self._replicas.servers[rank]
            else:
                self.server = made(self._bus, rank)
        else:
            if chained:
                storage, wide = np.dtype(recipe.storage), np.dtype(recipe.wide)
                self._mail = RetryQueue(self._bus, self._servers, settings.replicas, storage, wide)
            self.worker = self._make_worker(self._mail, buckets)
            self._slow, self._delay = factors(settings.slow).get(rank, 1.0), settings.delay
        self._seen_shapes: set[tuple[Any, ...]] = set()
        self._expect()

    @classmethod
    def forecast(
        cls, model: Operator, loss: Any, optimizer: Optimizer, workload: Workload, settings: Settings = SERVER_DEFAULTS
    ) -> MemoryLedger:
        """Memory forecast, as of `Engine`; a server counts the worst case of gradients."""
        rank, servers, ledger = workload.rank, settings.servers, MemoryLedger()
        plan, rule = plan_of(model, workload.ranks, rank, settings), rule_of(settings.consistency)
        if rank >= servers:
            ledger.expect(of_worker(plan, rule.synchronous))
            for samples in dict.fromkeys(samples for step in workload.steps for samples in step):
                activations, work = predict_activations(plan, loss, *workload.shapes(samples))
                ledger.expect(Counter(activations=activations), work)
            return ledger
        keys, parts = keys_of(plan, buckets_of(plan), servers), max(map(len, workload.steps), default=0)
        for shard in ReplicationChains(range(servers), settings.replicas).of(rank):
            here = [key for key in keys if key.server == shard]
            options: dict[str, Any] = {
                "workers": workload.ranks - servers,
                "synchronous": rule.synchronous,
                "parts": parts,
            }
            ledger.expect(of_shard(plan, here, len(optimizer.states()), **options), part=shard)
        return ledger

    def share(self, micro_batches: int) -> range:
        """Microbatches of this rank in an evaluation; in a step they are drawn."""
        if self.worker is None:
            return range(0)
        if self._fault_tolerant:
            return range(micro_batches)
        return contiguous(micro_batches, self._comm.Get_rank() - len(self._servers), len(self._workers))

    def step(self, batches: Sequence[Batch], *, stop: bool = False) -> StepReport:
        """Take part in the next step.

        Parameters
        ----------
        batches : sequence of Batch
            All microbatches of the step, by number, equal on all workers; not used on servers.
        stop : bool
            True to request the end; all ranks end after the same step, whose report has `stop` set.

        Returns
        -------
        StepReport
            Of the whole step on rank 0, of this rank's parts on the others.

        Raises
        ------
        StepFailed
            On all ranks, if one of them raised an exception or found a loss or gradient that is not finite; on ranks
            that had finished the step, in the next step or in `quiesce`. The engine is unusable afterwards.
        """
        began, spent = time.perf_counter(), self._recorder.seconds["communication"]
        self._is_quiescent = False
        with self._shared_errors():
            if self.server is not None:
                outcomes, last = self._serve(self.server, stop)
                early = 0
            else:
                assert self.worker is not None
                outcomes, last, early = self._work(self.worker, batches, stop)
        loss, count, norm = joined(outcomes)
        if self.server is not None and self._rule.synchronous:
            norm = self.server.norms.pop(self.steps, None)
        rate = rate_at(self._optimizer.rate, self.updates if self._rule.synchronous else self.steps)
        step, self.steps = self.steps, self.steps + 1
        if last:
            self.quiesce()
        seconds, communication = time.perf_counter() - began, self._recorder.seconds["communication"] - spent
        return StepReport(step, loss, count, norm, not count, 1.0, rate, last, seconds, communication, early)

    def quiesce(self) -> None:
        """Wait until all ranks have made the same number of steps and nothing is in flight. Raises `StepFailed`."""
        if self._is_quiescent:
            return
        with self._shared_errors(), self._recorder("communication", "quiesce"):
            if self.server is not None:
                self.server.until_quiescent()
                if self._replicas is not None:
                    rests = self.server.rests
                    self._replicas.until(lambda: all(server.rests >= rests for server in self._here()))
                self.updates = self.server.store.updates
            else:
                assert self.worker is not None
                self._rest(self.worker)
                self.updates = self.worker.updates
            self._bus.flush()
        self._is_quiescent = True
        self._write()

    def evaluate(self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None = None) -> Evaluation:
        """Mean loss without training, after `quiesce`.

        Parameters
        ----------
        batches : sequence of Batch
            Microbatches of this rank; none on servers.
        measure : callable (scores, targets) -> float, optional
            Summed over all batches.
        """
        self.quiesce()
        totals: list[tuple[float, int, float]] = []
        problem: Exception | None = None
        with self._shared_errors():
            if self.worker is not None:
                self.flat.bind(self.worker.copy())
                for batch in (batch_of(some, at) for at, some in enumerate(batches)):
                    pass_ = self._microbatch_pass(batch, None)
                    for unit in self._units:
                        pass_.forward(unit)
                        pass_.saved.clear()
                    pass_.score()
                    measured = pass_.measure(measure) if measure else 0.0
                    problem = problem or pass_.problem
                    totals.append((pass_.total, self._loss.count(batch.y), measured))
            if self._fault_tolerant and problem is not None:
                raise problem
        self._is_quiescent = False
        self.quiesce()
        gathered = totals
        if not self._fault_tolerant:
            raise_on_all(self._comm, problem, "evaluation", consistency_check.StepFailed)
            gathered = [entry for some in self._comm.allgather(totals) for entry in some]
        count = sum(entry[1] for entry in gathered)
        if not count:
            return Evaluation(math.nan, math.nan if measure else None, 0)
        loss = math.fsum(entry[0] for entry in gathered) / count
        return Evaluation(loss, math.fsum(entry[2] for entry in gathered) / count if measure else None, count)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """As of `Engine.tensor_slices`; empty on workers."""
        if self.server is not None:
            pieces = [state.piece for server in self._here() for state in server.store.key_states.values()]
            yield from tensor_slices(pieces, [state.key.span for state in self.server.store.key_states.values()])

    def refresh(self) -> None:
        """Apply assignments to the slices, on all ranks."""
        for server in self._here():
            for key_state in server.store.key_states.values():
                key_state.refresh()
        if self.worker is not None:
            self.worker.forget()

    def _here(self) -> list[ServerLoop]:
        """This rank's servers: its own, and those that it is a replica of."""
        return list(self._shards().values())

    def _shards(self) -> dict[int, ServerLoop]:
        """Server loops of this rank by shard: its own and those it replicates."""
        if self._replicas is not None:
            return self._replicas.servers
        return {} if self.server is None else {self._comm.Get_rank(): self.server}

    @property
    def is_reporter(self) -> bool:
        """True on the rank that reports progress: rank 0 or, if fault-tolerant, the first living worker."""
        rank = self._comm.Get_rank()
        if not self._fault_tolerant:
            return rank == 0
        living = [at for at, clock in zip(self._workers, self.worker.clocks) if clock != GONE] if self.worker else []
        return self.worker is not None and rank == min(living, default=self._workers[0])

    def save(self, write: Callable[[MPI.Intracomm, Iterator[TensorSlice]], Result]) -> Result | None:
        """Write a checkpoint from the state of the ranks of a communicator.

        If fault-tolerant, the reporting rank writes everything while the others wait; they return None, and a
        `CheckpointError` is raised on that rank only.
        """
        self.quiesce()
        if not self._fault_tolerant:
            return write(self._comm, self.tensor_slices())
        result, problem = None, None
        with self._shared_errors():
            if self.worker is not None and self.is_reporter:
                names, wide, whole = self._optimizer.states(), self._plan.precision.wide, Span(0, self.flat.length)
                weights, *states = self.worker.copies(len(names), wide)
                piece = OptimizerSpan(
                    whole, weights, np.zeros_like(weights), dict(zip(names, states)), self.flat.places
                )
                try:
                    result = write(MPI.COMM_SELF, tensor_slices([piece], [whole]))
                except CheckpointError as error:  # no problem of the training, which goes on
                    problem = error
        self._is_quiescent = False
        self.quiesce()
        if problem is not None:
            raise problem
        return result

    def state(self) -> dict[str, Any]:
        """As of `Engine.state`, after `quiesce`."""
        self.quiesce()
        return {"steps": self.steps, "updates": self.updates, "scaling": PRECISIONS["fp32"].loss_scale().state()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a `state`, of any engine."""
        self.steps, self.updates = state["steps"], state["updates"]
        for server in self._here():
            server.begin(self.steps)
            server.store.updates = self.updates

    @property
    def events(self) -> list[ProfilerEvent]:
        """Profiler events since construction or since the list was cleared; empty without `trace`."""
        return self._recorder.events

    @property
    def traffic(self) -> dict[tuple[str, MessageKind, int], int]:
        """Bytes of vectors by ``("sent" or "received", kind of message, other rank)``."""
        return self._bus.traffic

    def close(self) -> None:
        """Free all resources; messages in flight are lost unless all ranks are quiescent."""
        self._close_record()
        if isinstance(self._mail, RetryQueue) and (self._fault_tolerant or not self._over):
            self._mail.leave()  # not after an error on all ranks: the next communicator might receive it
        if self._replicas is not None and not self._over:
            self._replicas.until_left()
        if self._fault_tolerant:
            self._bus.leave()
        elif self._bus is not None and (self._is_quiescent or self._over):
            self._bus.close()
        self._bus = None  # type: ignore[assignment]
        for place in self.flat.places:
            place.parameter.data = None

    def _close_record(self) -> None:
        self._write()
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._over:
            self.quiesce()
        if consistency_check.exits_on_all_ranks(kind) or self._fault_tolerant:
            self.close()
        else:
            self._close_record()

    def _serve(self, server: ServerLoop, stop: bool) -> tuple[list[PartResult], bool]:
        server.stop_requested |= (
            stop and self._replicas is None
        )  # what copies of it do not hear must not change what it does
        with self._recorder("communication", "serve"):
            last = server.until_made(self.steps + 1)
        self._expect()
        outcomes = server.work.outcome(self.steps)
        if self._comm.Get_rank() == self._servers[0]:
            self.outcomes.append(outcomes)
        self.updates = server.store.updates
        return outcomes, last

    def _work(self, worker: WorkerClient, batches: Sequence[Batch], stop: bool) -> tuple[list[PartResult], bool, int]:
        self._batches[self.steps] = batches
        outcomes, early = self._parts(worker, self.steps, stop)
        last = worker.last == self.steps
        worker.tick(self.steps + 1, len(batches), last)
        return outcomes, last, early

    def _parts(self, worker: WorkerClient, clock: int, stop: bool) -> tuple[list[PartResult], int]:
        """Process parts of a step, and parts left by other workers, until none is left."""
        outcomes: list[PartResult] = []
        done: tuple[WorkPart, PartResult] | None = None
        early = 0
        while True:
            with self._recorder("communication", "draw"):
                part = worker.draw(clock, len(self._batches[clock]), done, stop)
            if part is None:
                return outcomes, early
            batches, done = self._batches[part.clock], None
            with suppress(Requeued):
                outcome = self._part(worker, part, batch_of(batches[part.number], part.number), len(batches))
                early += self._gradients.early
                outcomes.append(outcome)
                done = part, outcome

    def _rest(self, worker: WorkerClient) -> None:
        """Wait until all workers rest and all parts are done."""
        while True:
            try:
                worker.quiesce()
            except Requeued:
                self._parts(worker, self.steps - 1, stop=False)
            else:
                self._batches.clear()
                return

    def _part(self, worker: WorkerClient, part: WorkPart, batch: Batch, parts: int) -> PartResult:
        """Forward and backward of a microbatch, overlapped with pulls and pushes."""
        began = time.perf_counter()
        pass_, count = self._microbatch_pass(batch, part.clock), int(self._loss.count(batch.y))
        rows = np.unique(batch.x).astype(np.int64) if self._has_table else None
        waiting = self._recorder.seconds["communication"]
        self.flat.bind(worker.read(part.clock, self._order, rows))
        for number, unit in enumerate(self._units):
            with self._recorder("communication", "pull"):
                worker.need(self._needs[number])
            with self._recorder("compute", "forward", unit=number):
                pass_.forward(unit)
            worker.poll()
        pass_.score()
        if pass_.problem is None and not math.isfinite(pass_.total):
            text = f"the loss of micro-batch {part.number} is not a finite number in step {part.clock}"
            raise FloatingPointError(text)
        self._note(pass_, batch)
        pass_.loss_backward(1.0)
        self._gradients.begin_backward(part, parts, count, rows)
        with self._recorder("compute", "backward"):
            for number in reversed(range(len(self._units))):
                pass_.backward(self._units[number], self._gradients)
                if pass_.problem is None:
                    self._gradients.left(number)
        if pass_.problem is not None:
            raise pass_.problem
        waited = self._recorder.seconds["communication"] - waiting
        computed = time.perf_counter() - began - waited
        time.sleep((self._slow - 1) * computed + self._slow * self._delay)
        norm = self._gradients.end_backward()
        with self._recorder("communication", "push"):
            worker.acknowledged()
        return PartResult(pass_.total, count, norm, self._comm.Get_rank() - len(self._servers))

    def _microbatch_pass(self, batch: Batch, clock: int | None) -> MicrobatchPass:
        """Forward and backward state of a microbatch; `clock` is None in an evaluation."""
        wide, storage = self._plan.precision.wide, self._plan.precision.storage
        x = batch.x if batch.x.dtype.kind in "iub" else batch.x.astype(storage, copy=False)
        y = batch.y if batch.y.dtype.kind in "iub" else batch.y.astype(wide, copy=False)
        run = PassMode(clock is not None, self._seed, clock or 0, np.asarray(batch.samples, np.int64))
        return MicrobatchPass(x, y, run, self._loss)

    @contextmanager
    def _shared_errors(self) -> Iterator[None]:
        """Raise an error of this rank on all ranks, once nothing is in flight."""
        if self._over:
            raise consistency_check.StepFailed("the engine has failed before")
        try:
            yield
        except Exception as error:
            self._over = True
            problem: Exception | None = error
            if isinstance(error, ServerFailed):
                problem = error if str(error) else None
            elif self.worker is not None:
                self.worker.give_up()
            self._bus.flush()
            if self._fault_tolerant:
                why = f"rank {self._comm.Get_rank()}: {problem}" if problem else "another rank has given up"
                failed = consistency_check.StepFailed(f"the training has ended: {why}")
                failed.elsewhere = problem is None or isinstance(error, ReplicationChainLost)  # which all workers see
                raise failed from error
            raise_on_all(self._comm, problem, "the training has ended", consistency_check.StepFailed)
            raise

    def _expect(self) -> None:
        """Enter the forecast for steps with the largest number of parts so far into the ledger."""
        if self.worker is not None:
            self.ledger.expect(of_worker(self._plan, self._rule.synchronous))
        for shard, server in self._shards().items():
            keys, states = (
                [key_state.key for key_state in server.store.key_states.values()],
                len(self._optimizer.states()),
            )
            options: dict[str, Any] = {"workers": len(self._workers), "synchronous": self._rule.synchronous}
            self.ledger.expect(of_shard(self._plan, keys, states, parts=server.parts, **options), part=shard)

    def _note(self, pass_: MicrobatchPass, batch: Batch) -> None:
        """Enter new shapes of a microbatch into the ledger."""
        shapes = batch.x.shape, batch.y.shape
        if pass_.problem is not None or shapes in self._seen_shapes:
            return
        self._seen_shapes.add(shapes)
        self._memory.record_peak("activations", pass_.nbytes())
        x = ArraySpec(batch.x.shape, type_of(batch.x, self._plan.precision.storage))
        y = ArraySpec(batch.y.shape, type_of(batch.y, self._plan.precision.wide))
        with suppress(NotImplementedError):  # a model of the user's own may have no outlines
            activations, work = predict_activations(self._plan, self._loss, x, y)
            self.ledger.expect(Counter(activations=activations), work)

    def _make_server(self, bus: ServerMail, here: int, script: Any, mixed: bool) -> ServerLoop:
        wide = self._plan.precision.wide
        key_states = []
        for key in (key for key in self.keys if key.server == here):
            weights = self._memory.private("optimizer" if mixed else "parameters", key.span.size, wide)
            self.flat.initialise(weights, self._seed, key.span)
            state = {name: self._memory.private("optimizer", key.span.size, wide) for name in self._optimizer.states()}
            stored = self._memory.private("parameters", key.span.size, self._plan.precision.storage) if mixed else None
            # The weights stand in for the gradient, which `ShardState.prepare` sets before every update.
            piece = OptimizerSpan(key.span, weights, weights, state, self.flat.places, stored)
            key_states.append(ShardState(key, piece))
            key_states[-1].refresh()
        clip = self.settings.clip or None
        kind, make = SyncStore if self._rule.synchronous else AsyncStore, partial(self._memory.private, "gradients")
        store = kind(key_states, self._optimizer, self.flat.length, clip, self._plan.reproducible, make)
        loop = ServerLoop(bus, store, self._rule, self._workers, self._servers, here, EventOrder(script))
        if here == self._comm.Get_rank() == 0:
            loop.watch = lambda worker, clock: self.ticks.append((time.perf_counter(), worker, clock))
        return loop

    def _make_worker(self, bus: ServerMail, buckets: Any) -> WorkerClient:
        ahead, length = not self._rule.synchronous, self.flat.length
        storage, wide = self._plan.precision.storage, self._plan.precision.wide
        vectors = [self._memory.private("parameters", length, storage) for _ in range(1 + ahead)]
        worker = WorkerClient(bus, self._rule, self.keys, self._servers, vectors)
        gradient = self._memory.private("gradients", length, wide)
        clip = self.settings.clip or None
        scratch = self._memory.private("buffers", self._plan.scratch(adds=False), wide)
        self._gradients = ServerGradients(worker, self._plan, buckets, self.keys, gradient, scratch, ahead, clip)
        self._has_table = any(key.table is not None for key in self.keys)
        self._needs = [keys_of_unit(self._plan, self.keys, number) for number in range(len(self._units))]
        self._order = list(dict.fromkeys(key for keys in self._needs for key in keys))
        return worker

    def _open_records(self) -> Any:
        """Open the file that is recorded; the entries of the file to replay, or None."""
        rank, settings = self._comm.Get_rank(), self.settings
        if rank not in self._servers:
            return None
        facts = {name: getattr(settings, name) for name in RECORDED}
        facts["optimizer"] = [(f"optimizer's {what}", value) for what, value in self._optimizer.describe().items()]
        facts |= {"ranks": self._comm.Get_size(), "keys": [key.span for key in self.keys]}
        script = read(file_of(Path(settings.replay), rank), facts) if settings.replay else None
        if settings.record:
            self._recording = EventRecording(file_of(Path(settings.record), rank), facts)
        return script

    def _write(self) -> None:
        if self._recording is not None and self.server is not None:
            self._recording.write(self.server.order.entries)
