"""Engine of federated averaging: a step is a round. In it this rank trains its clients one after another."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.asynchronous.decentralized.federated import FederatedAverage, local_batches
from parallel.asynchronous.decentralized.replica_engine import ReplicaEngine
from parallel.data.sampler import Batch, batch_of, interleaved
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.memory_ledger import Workload
from parallel.engine.operator_records import records_of
from parallel.engine.settings import Settings
from parallel.nn.operator import Operator
from parallel.optim.lr_schedules import rate_at
from parallel.optim.optimizer import Optimizer
from parallel.runtime.step_report import StepReport


class ClientEngine(DataParallelEngine):
    """Single-rank engine of the clients' local steps. Learning rate, dropout and pruning follow the round."""

    round = 0

    @property
    def _clock(self) -> int:
        return self.round

    def begin(self, round_: int) -> None:
        """Begin the training of a client: its weights are in place, its optimizer state is 0."""
        self.round, self.updates = round_, 0
        self._sharded.missed.clear()
        for piece in self.pieces:
            for vector in piece.state.values():
                vector[...] = 0
        self.refresh()

    def local_step(self, batches: Sequence[Batch]) -> StepReport:
        self.steps = self.round
        return self.step(batches)


class FederatedEngine(ReplicaEngine):
    """Engine of federated averaging. A step is a round, and micro-batch k of it holds all samples of client k.

    A micro-batch without samples is a client that does not take part. Client k belongs to rank k mod p. Only this rank
    needs its samples. It makes `settings.local_epochs` passes over them, in new order each time, in steps of
    `settings.batch` samples, with its own optimizer that starts new in each round. The learning rate is the round's.
    `ReplicaEngine` describes the other arguments.

    Raises
    ------
    ValueError
        On all ranks, if a setting is invalid, or the optimizer has a moving average of the weights.
    """

    style: FederatedAverage
    _engine: ClientEngine
    _engine_class = ClientEngine

    def __init__(
        self, model: Operator, loss: Any, comm: Communicator, optimizer: Optimizer, settings: Settings
    ) -> None:
        if optimizer.ema:
            raise ValueError(f"ema: a client's optimizer lives for a round only; leave it out, found {optimizer.ema}")
        self._optimizer = optimizer
        super().__init__(model, loss, comm, optimizer, settings)

    @classmethod
    def _own_steps(cls, workload: Workload, settings: Settings) -> list[tuple[int, ...]]:
        """Sizes of the micro-batches of each kind of local step of the clients on the workload's rank."""
        micro, found = settings.micro(1), dict[tuple[int, ...], None]()
        for clients in workload.steps:
            for client in interleaved(len(clients), workload.rank, workload.ranks):
                for samples in {min(settings.batch, clients[client]), clients[client] % settings.batch}:
                    found[tuple(min(micro, samples - at) for at in range(0, samples, micro))] = None
        return list(found)

    def train_share(self, micro_batches: int) -> range:
        """Numbers of the clients whose data are on this rank, of `micro_batches` in all."""
        return interleaved(micro_batches, self._comm.Get_rank(), self._comm.Get_size())

    def _own(self, batches: Sequence[Batch]) -> StepReport:
        """Train this rank's clients of a round. The report has the mean loss and largest norm of their steps."""
        reports, rate = list[StepReport](), math.nan
        self.style.begin()  # from weights that a user may have changed
        try:
            for client in (batch_of(some, at) for at, some in enumerate(batches)):
                if len(client.samples) and self._problem is None:
                    self._begin()
                    reports.extend(map(self._engine.local_step, self._local_steps(client)))
                    self.style.collect(len(client.samples))
            rate = rate_at(self._optimizer.rate, self.steps)
        except BaseException as error:
            self._problem = error
        self._begin()
        self._engine.steps = self._engine.updates = self.steps + 1
        count = math.fsum(report.count for report in reports)
        losses = (report.loss * report.count for report in reports if report.count)
        loss = math.fsum(losses) / count if count else math.nan
        norm, scale = max((report.norm or 0.0 for report in reports), default=None), self._engine.scaling.value
        records = records_of(reports)
        return StepReport(self.steps, loss, count, norm, norm is None, scale, rate, False, 0.0, 0.0, *records)

    def _begin(self) -> None:
        self.style.start()
        self._engine.begin(self.steps)

    def _local_steps(self, client: Batch) -> Iterator[list[Batch]]:
        """Micro-batches of each local step of a client in this round."""
        micro, numbers = self.settings.micro(1), np.asarray(client.samples)
        for step in local_batches(self.settings, self.steps, client.number, len(numbers)):
            parts = (step[first : first + micro] for first in range(0, len(step), micro))
            yield [Batch(at, client.x[some], client.y[some], numbers[some]) for at, some in enumerate(parts)]
