"""Training engine with parameter servers."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from mpi4py import MPI

from collectives import Communicator
from collectives.errors import WAIT_ERRORS
from parallel.asynchronous.server.consistency import GONE, rule_of
from parallel.asynchronous.server.event_order import open_order
from parallel.asynchronous.server.key_assignment import buckets_of, keys_of
from parallel.asynchronous.server.message_bus import MessageBus
from parallel.asynchronous.server.replication_chain import ReplicationChainLost, ReplicationChains
from parallel.asynchronous.server.server_host import ServerHost
from parallel.asynchronous.server.server_memory import of_shard, of_worker
from parallel.asynchronous.server.server_settings import ServerContext, refuse_servers
from parallel.asynchronous.server.worker_trainer import WorkerTrainer
from parallel.checkpoint.step_folders import CheckpointError
from parallel.checkpoint.tensor_slices import TensorSlice, tensor_slices
from parallel.data.sampler import Batch, contiguous
from parallel.engine.base import BaseEngine, check, frees_on_error
from parallel.engine.fingerprint import agreed
from parallel.engine.memory_ledger import MemoryLedger, Workload, predict_activations
from parallel.engine.model_on_mesh import plan_of
from parallel.engine.model_ownership import ModelOwnership
from parallel.engine.operator_records import refuse_buffers
from parallel.engine.settings import Settings
from parallel.nn.operator import Operator
from parallel.optim.lr_schedules import rate_at
from parallel.optim.optimizer import Optimizer
from parallel.optim.param_groups import checked_missed, frozen_of, merged_missed
from parallel.optim.precision import PRECISIONS
from parallel.runtime import consistency_check
from parallel.runtime.collective_errors import collective_call, raise_on_all, written
from parallel.runtime.meeting_point import MeetingPoint
from parallel.runtime.profiler import Profiler
from parallel.runtime.step_report import Evaluation, StepReport, in_units
from parallel.runtime.vector_memory import VectorAllocator
from quant.types import Array

Result = TypeVar("Result")

SERVER_DEFAULTS = Settings(layout="ps")


class ParameterServer(BaseEngine):
    """Training engine whose first ranks are servers and whose other ranks are workers. Construction is collective.

    Parts of a step are its micro-batches. Every worker takes part in every step with as many parts as it can draw, and
    `step` returns when this rank has no more to do. So ranks may be in different steps, within the limit of the
    consistency rule. `quiesce` synchronises them. All methods are collective, except `share`, `tensor_slices`, `load`
    and `refresh`.

    Parameters
    ----------
    model, loss, comm, optimizer : see `DataParallelEngine`
    settings : specific ones are `ServerOptions` and `fault_tolerant`. With it ranks wait for each other in messages
        only, every worker evaluates on its own, and the first living worker reports. `clip` limits the norm of a step
        with synchronous updates, otherwise of every part.

    Attributes
    ----------
    steps, updates : steps of this rank. Updates of every weight, valid after `quiesce`
    server : None on workers. On rank 0 ``server.work.outcome(step)`` has all parts' results until the next `quiesce`
    worker : None on servers
    keys, flat, ledger : keys of all servers. See `DataParallelEngine` for the others
    traffic : bytes of vectors by ``("sent" or "received", kind of message, other rank)``

    Raises
    ------
    ValueError
        If a setting is invalid or contradicts another.
    """

    @frees_on_error
    def __init__(
        self, model: Operator, loss: Any, comm: Communicator, optimizer: Optimizer, settings: Settings = SERVER_DEFAULTS
    ) -> None:
        check(comm, settings)
        refuse_servers(settings, comm.Get_size(), type(optimizer))
        refuse_buffers(model, settings.layout)
        self.settings, self._comm = settings, comm
        ownership = ModelOwnership(comm, model, settings.layout)
        self.resources.callback(ownership.release)
        self.remarks = ownership.remarks
        self._fingerprint = agreed(comm, model, loss, optimizer, settings.seed)
        ownership.start()
        plan = plan_of(model, comm.Get_size(), comm.Get_rank(), settings)
        self.flat, self.parameters = plan.flat, [place.parameter for place in plan.flat.places]
        for parameter in self.parameters:
            parameter.bind(None)
        buckets = buckets_of(plan)
        self.keys = keys_of(plan, buckets, settings.servers)
        memory, self._recorder = VectorAllocator(comm), Profiler(settings.trace)
        self._context = context = ServerContext(plan, comm, memory, self._recorder, settings, optimizer, self.keys)
        self.ledger = MemoryLedger(memory.allocated)
        self.steps = self._skipped = 0  # `_skipped` steps were no updates, at the last quiescent point
        self._failed, self._is_closed, self._is_quiescent = False, False, True
        self._frozen = frozen_of(self.parameters)
        self._loaded: tuple[int, Mapping[str, int]] = 0, {}  # updates, and those that parameters had missed
        self._order = collective_call(comm, partial(open_order, context), "order of messages")
        self.resources.callback(self._order.close)
        is_server = plan.rank in context.servers
        peers = [rank for rank in (*(context.workers if is_server else ()), *context.servers) if rank != plan.rank]
        self.point = MeetingPoint(comm, settings.fault_tolerant)
        self.resources.callback(self.point.leave, "the engine's constructor")
        self._bus = MessageBus(comm, peers, len(context.workers), self.point.watch, settings.fault_tolerant)
        self.resources.callback(self._bus.withdraw)
        self.traffic = self._bus.traffic
        self._role: ServerHost | WorkerTrainer
        if is_server:
            self._role = ServerHost(context, self._bus, self.ledger, self._order)
        else:
            self._role = WorkerTrainer(context, self._bus, loss, buckets, self.ledger)
        ownership.begin()
        self.server = self._role.loop if isinstance(self._role, ServerHost) else None
        self.worker = self._role.client if isinstance(self._role, WorkerTrainer) else None

    @classmethod
    def forecast(
        cls, model: Operator, loss: Any, optimizer: Optimizer, workload: Workload, settings: Settings = SERVER_DEFAULTS
    ) -> MemoryLedger:
        """Forecast of a rank's memory. It counts the most gradients that a server may hold."""
        rank, servers, ledger = workload.rank, settings.servers, MemoryLedger()
        plan = plan_of(model, workload.ranks, rank, settings)
        if rank >= servers:
            ledger.expect(of_worker(plan, rule_of(settings.consistency).synchronous))
            for samples in dict.fromkeys(samples for step in workload.steps for samples in step):
                ledger.expect(*predict_activations(plan.units, loss, *workload.shapes(samples)))
            return ledger
        keys, parts = keys_of(plan, buckets_of(plan), servers), max(map(len, workload.steps), default=0)
        for shard in ReplicationChains(range(servers), settings.replicas).of(rank):
            ledger.expect(of_shard(plan, settings, keys, shard, len(optimizer.states()), parts), part=shard)
        return ledger

    @property
    def updates(self) -> int:
        return self._role.loop.store.updates if isinstance(self._role, ServerHost) else self._role.client.updates

    def share(self, micro_batches: int) -> range:
        """Micro-batches that this rank evaluates, by number: none on servers, all if fault-tolerant, else a share.

        In a training step workers request micro-batches instead.
        """
        if self.server is not None:
            return range(0)
        if self.settings.fault_tolerant:
            return range(micro_batches)
        servers, workers = self._context.servers, self._context.workers
        return contiguous(micro_batches, self._context.plan.rank - len(servers), len(workers))

    def step(self, batches: Sequence[Batch], *, stop: bool = False) -> StepReport:
        """Take part in the next step. The report is of the whole step on rank 0, of own micro-batches on workers.

        `batches` are all micro-batches of the step, by number, equal on all workers. Not used on servers. `stop`
        requests the end. All ranks end after the same step, whose report has `stop` set.

        Raises
        ------
        StepFailed
            On all ranks, if one of them raised an exception or found a loss or gradient that is not finite. Ranks that
            had finished the step raise it in the next step or in `quiesce`. The engine is unusable afterwards.
        """
        began, spent = time.perf_counter(), self._recorder.seconds["communication"]
        self._is_quiescent = False
        self.point.order.begin("step")
        with self._shared_errors():
            self._expect_flags()
            clock = self.steps - (self._skipped if self._context.rule.synchronous else 0)
            rate = rate_at(self._context.optimizer.rate, clock)
            loss, count, norm, last, records = self._role.step(self.steps, batches, stop)
        step, self.steps = self.steps, self.steps + 1
        if last:
            self.quiesce()
        seconds, waited = time.perf_counter() - began, self._recorder.seconds["communication"] - spent
        return StepReport(step, loss, in_units(count), norm, not count, 1.0, rate, last, seconds, waited, *records)

    def _expect_flags(self) -> None:
        """Raise ValueError if a fault-tolerant training freezes or releases parameters: servers that count may die."""
        if self.settings.fault_tolerant and self._frozen != frozen_of(self.parameters):
            raise ValueError("requires_grad: expected no changes in a training with fault_tolerant, found some")

    def quiesce(self, call: str = "quiesce") -> None:
        """Wait until all living ranks call this, after the same step, and nothing is in flight. Raises `StepFailed`."""
        if self._is_quiescent:
            return
        self.point.order.begin(call)
        with self._shared_errors(), self._recorder("communication", "quiesce"):
            self._role.quiesce(self.steps)
            self._bus.flush()
        self._is_quiescent, self._skipped = True, max(0, self.steps - self.updates)
        self._order.flush()

    def evaluate(self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None = None) -> Evaluation:
        """Mean loss and `measure` over all workers' batches (see `TrainEngine.evaluate`). Calls `quiesce`.

        Servers have no batches. If fault-tolerant, each worker uses its own batches only, and servers return NaN.
        """
        self.quiesce()
        sums: list[tuple[float, float, float]] = []
        problem: BaseException | None = None
        with self._shared_errors():
            if isinstance(self._role, WorkerTrainer):
                sums, problem = self._role.evaluate(batches, measure, self.steps)
            if self.settings.fault_tolerant and problem is not None:  # dead ranks cannot share the error
                raise problem
        self._is_quiescent = False
        self.quiesce()
        if not self.settings.fault_tolerant:
            raise_on_all(self._comm, problem, "evaluation", consistency_check.StepFailed)
            self._fingerprint.compare(self._comm)
            sums = [entry for some in self._comm.allgather(sums) for entry in some]
        losses, counts, measured = zip(*sums) if sums else ((), (), ())
        total = math.fsum(counts)
        divisor = total or math.nan
        mean = math.fsum(measured) / divisor if measure else None
        return Evaluation(math.fsum(losses) / divisor, mean, in_units(total))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Slices of this server's weights and optimizer state, replicas included, for checkpoints. None on workers."""
        if isinstance(self._role, ServerHost):
            own = [state.key.span for state in self._role.loop.store.key_states.values()]
            yield from tensor_slices([state.piece for state in self._role.key_states()], own)

    def refresh(self) -> None:
        self._role.refresh()

    @property
    def is_reporter(self) -> bool:
        """True on the rank that reports progress: rank 0 or, if fault-tolerant, the first living worker."""
        rank, workers = self._context.plan.rank, self._context.workers
        if not self.settings.fault_tolerant:
            return rank == 0
        if self.worker is None:
            return False
        return rank == min((at for at, clock in zip(workers, self.worker.clocks) if clock != GONE), default=workers[0])

    def save(self, write: Callable[[MPI.Intracomm, Iterator[TensorSlice]], Result]) -> Result | None:
        """Write a checkpoint after `quiesce`: calls ``write(comm, this rank's slices)`` and returns its result.

        If fault-tolerant, the reporting rank writes everything while the others wait. They return None, and a
        `CheckpointError` is raised on that rank only.
        """
        self.quiesce()
        if not self.settings.fault_tolerant:
            self._fingerprint.compare(self._comm)
            return written(self._comm, write, self.tensor_slices())
        result, problem = None, None
        with self._shared_errors():
            if isinstance(self._role, WorkerTrainer) and self.is_reporter:
                piece = self._role.whole_state()
                try:
                    result = write(MPI.COMM_SELF, tensor_slices([piece], [piece.span]))
                except CheckpointError as error:  # the training continues
                    problem = error
        self._is_quiescent = False
        self.quiesce()
        if problem is not None:
            raise problem
        return result

    def state(self) -> dict[str, Any]:
        self.quiesce()
        missed = self._missed()
        state = {"steps": self.steps, "updates": self.updates, "scaling": PRECISIONS["fp32"].loss_scale().state()}
        return state | ({"missed": missed} if missed else {})

    def _missed(self) -> Mapping[str, int]:
        """Updates that frozen parameters have missed, by name: as servers have counted them, if all live."""
        if not self.settings.fault_tolerant:
            return merged_missed(self._comm.allgather(self._role.missed()))
        updates, missed = self._loaded
        since = self.updates - updates
        return {**missed, **{one.name: missed.get(one.name, 0) + since for one in self._frozen if since}}

    def load(self, state: dict[str, Any]) -> None:
        missed = checked_missed(state.get("missed", {}), self.parameters, state["updates"])
        self.steps, self._skipped = state["steps"], max(0, state["steps"] - state["updates"])
        self._loaded = state["updates"], missed
        self._role.load(state["steps"], state["updates"], missed)

    def close(self) -> None:
        """Free all resources, parameter values too. The bus stays if messages may be in flight, or if fault-tolerant.

        With replicas, or fault-tolerant, a server first serves until no rank needs it, unless the engine has failed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._role.leave(self._failed)
        if not self.settings.fault_tolerant:
            self.point.meet("close")
            self.point.free()
        if self.settings.fault_tolerant:
            self._bus.leave()
        elif self._is_quiescent or self._failed:
            self._bus.close()
        self.resources.close()

    def meet(self, call: str) -> None:
        """Like `BaseEngine.meet`, once all ranks have finished the same step. Fault-tolerant ranks do not wait."""
        self.quiesce(call)
        if not self.settings.fault_tolerant:
            super().meet(call)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if kind is None and not self._failed:
            self.quiesce()
        if self.leave(error) or (self.settings.fault_tolerant and not isinstance(error, consistency_check.RankLeft)):
            self.close()
        else:
            self._is_closed = True
            self.resources.close()

    @contextmanager
    def _shared_errors(self) -> Iterator[None]:
        """Context manager: after an error in its body on any rank, complete sends and raise `StepFailed` on all."""
        if self._failed:
            raise consistency_check.StepFailed("the engine has failed before")
        try:
            yield
        except BaseException as error:
            self._failed = True
            self.point.order.ignore()
            dies, is_vain = self.settings.fault_tolerant, isinstance(error, (consistency_check.RankLeft, *WAIT_ERRORS))
            if is_vain or (isinstance(error, KeyboardInterrupt) and not dies):  # that may have lost messages
                if not dies:
                    self.point.leave("a call in the middle", error)
                raise
            problem = consistency_check.cause_of(error)
            is_known = isinstance(error, consistency_check.TrainingFailed)
            if self.worker is not None and not is_known:
                self.worker.give_up()
            if self.server is not None and self.server.problem is None and not is_known:
                with suppress(consistency_check.TrainingFailed):
                    self.server.give_up(error)
            self._bus.flush()
            if self.settings.fault_tolerant:
                why = f"rank {self._context.plan.rank}: {problem}" if problem else "another rank has given up"
                failed = consistency_check.StepFailed(f"the training has ended: {why}")
                failed.elsewhere = problem is None or isinstance(error, ReplicationChainLost)  # all workers find one
                raise failed from error
            self.point.meet("failures")
            raise_on_all(self._comm, problem, "the training has ended", consistency_check.StepFailed)
            raise
