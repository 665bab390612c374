"""Training on a worker: forward and backward of the micro-batches it requests, overlapped with pulls and pushes."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from parallel.asynchronous.server.key_assignment import ServerKey, keys_of_unit
from parallel.asynchronous.server.message_bus import MessageBus
from parallel.asynchronous.server.messages import Mail
from parallel.asynchronous.server.retry import RetryQueue
from parallel.asynchronous.server.server_memory import of_worker
from parallel.asynchronous.server.server_settings import ServerContext, factors
from parallel.asynchronous.server.work_assignment import PartResult, RankStep, WorkPart, joined
from parallel.asynchronous.server.worker_client import Requeued, WorkerClient
from parallel.data.sampler import Batch, batch_of
from parallel.engine.base import type_of
from parallel.engine.data_parallel.grad_bucket import GradBucket, of, users_of
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.memory_ledger import MemoryLedger, predict_activations
from parallel.engine.microbatch_pass import MicrobatchPass, counted_by
from parallel.engine.operator_records import PartRecords
from parallel.engine.step_sync import count_of
from parallel.nn.flat_params import Span
from parallel.nn.operator import ArraySpec, Parameter, PassMode
from parallel.nn.own_arrays import changed_arrays
from parallel.optim.grad_norm import block_squares, clip_factor, total
from parallel.optim.optimizer_span import OptimizerSpan
from quant.types import Array


class ServerGradients:
    """Gradient sink that pushes a bucket to servers once the backward has left its units.

    At the end if clipped on the worker.

    If `separate`, every part is an update of its own, whose norm the worker limits to `clip`. Otherwise servers clip.
    """

    def __init__(
        self,
        worker: WorkerClient,
        plan: PartitionSpec,
        buckets: Sequence[GradBucket],
        keys: Sequence[ServerKey],
        vector: Array,
        separate: bool,
        clip: float | None,
    ):
        self._worker, self._vector, self._separate = worker, vector, separate
        self._clip = clip if separate else None
        self._buckets = list(buckets)
        self._of = {id(place.parameter): bucket for bucket in self._buckets for place in bucket.places}
        self._last_units = [units[0] for units in users_of(buckets, plan)]
        self._keys = [[key for key in keys if key.bucket == bucket.number] for bucket in buckets]
        self._squares: dict[int, float] = {}  # by bucket

    def begin_backward(self, part: WorkPart, parts: int, count: float, rows: Array | None) -> None:
        """Begin the backward of `part`, one of `parts` in its step, for `count` targets and `rows` of the embedding."""
        self._part, self._parts, self._count, self._rows = part, parts, count, rows
        self._factor = 1 / count if count else 0.0
        self._squares = {}
        for bucket in self._buckets:
            span = bucket.span
            bucket.reset(self._vector[span.start : span.stop])
            bucket.square = 0.0
            bucket.begin_backward()

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        of(self._of, parameter).accumulate(parameter, compute)
        self._worker.poll()

    def left(self, unit: int) -> None:
        for bucket, last in zip(self._buckets, self._last_units):
            if last == unit:
                self._complete(bucket)
                if self._clip is None:
                    self._push(bucket)
        self._worker.poll()

    def end_backward(self) -> float:
        """Push the remaining buckets. Returns the gradient norm per target before clipping (0 unless `separate`)."""
        late = [bucket for bucket in self._buckets if bucket.number not in self._squares]
        for bucket in late:
            self._complete(bucket)
        norm = math.sqrt(math.fsum(self._squares.values())) * self._factor
        if self._clip is not None:
            late = self._buckets
            self._factor *= clip_factor(np.array([norm**2]), 1.0, self._clip).factor
        for bucket in late:
            self._push(bucket)
        return norm

    def _complete(self, bucket: GradBucket) -> None:
        bucket.end_backward()
        bucket.complete()
        squares = total(block_squares(bucket.vector)) if self._separate else 0.0
        if not math.isfinite(bucket.square):  # a term is not finite, or its square overflows
            own = [place for place in bucket.places if not np.isfinite(self._vector[slice(*place.span)]).all()]
            names = ", ".join(place.parameter.name for place in own)
            if names or not math.isfinite(squares):
                raise FloatingPointError(f"the gradient of {names} is not finite in step {self._part.clock}")
        self._squares[bucket.number] = squares

    def _push(self, bucket: GradBucket) -> None:
        for key in self._keys[bucket.number]:
            gradient = self._vector[key.span.start : key.span.stop]
            self._worker.push(key.number, self._part, self._parts, self._count, self._factor, gradient, self._rows)


class WorkerTrainer:
    """Training steps, evaluation and checkpoint state of one worker. `client` communicates with the servers."""

    def __init__(
        self, context: ServerContext, bus: MessageBus, loss: Any, buckets: Sequence[GradBucket], ledger: MemoryLedger
    ):
        self._context, self._loss, self._ledger = context, loss, ledger
        plan, memory, settings, length = context.plan, context.memory, context.settings, context.flat.length
        self._mail: Mail = bus
        if context.has_chains:
            self._mail = RetryQueue(bus, context.servers, settings.replicas, context.storage, context.wide)
        synchronous = context.rule.synchronous
        # The second receives prefetched weights, while those of the first are in use.
        vectors = [memory.private("parameters", length, context.storage) for _ in range(1 if synchronous else 2)]
        self.client = WorkerClient(self._mail, context.rule, context.keys, context.servers, vectors)
        gradient = memory.private("gradients", length, context.wide)
        scratch = memory.private("buffers", plan.scratch(adds=False), context.wide)
        for bucket in buckets:
            bucket.use_scratch(scratch)
        clip = settings.clip or None
        self._gradients = ServerGradients(self.client, plan, buckets, context.keys, gradient, not synchronous, clip)
        self._has_table = any(key.table is not None for key in context.keys)
        self._keys_of_unit = [keys_of_unit(plan, context.keys, number) for number in range(len(plan.units))]
        self._order = list(dict.fromkeys(key for keys in self._keys_of_unit for key in keys))
        self._slow, self._delay = factors(settings.slow).get(context.plan.rank, 1.0), settings.delay
        self._batches: dict[int, Sequence[Batch]] = {}
        self._known_specs: set[tuple[ArraySpec, ...]] = set()
        ledger.expect(of_worker(plan, synchronous))

    def step(self, step: int, batches: Sequence[Batch], stop: bool) -> RankStep:
        self._batches[step] = batches
        outcomes = self._work(step, stop)
        last = self.client.last == step
        self.client.tick(step + 1, len(batches), last)
        found = joined(outcomes, last)
        return found._replace(norm=None) if self._context.rule.synchronous else found  # else servers know it

    def quiesce(self, steps: int) -> None:
        """Wait until all living workers call this, after `steps` steps. Redoes micro-batches of dead ones meanwhile."""
        while True:
            try:
                self.client.quiesce()
            except Requeued:
                self._work(steps - 1, stop=False)
            else:
                self._batches.clear()
                return

    def evaluate(
        self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None, step: int
    ) -> tuple[list[tuple[float, float, float]], BaseException | None]:
        """Sum of losses, targets and measure of each micro-batch, without training. And the first error, if any."""
        found, problem = [], None
        self._context.flat.bind(self.client.copy())
        try:
            mine = [batch_of(some, at) for at, some in enumerate(batches)]
            counts = {batch.number: count_of(counted_by(self._loss, measure), batch.y) for batch in mine}
        except BaseException as error:
            return [], error
        for batch in mine:
            passing = self._pass(batch, self._mode(batch, step, training=False))
            units = self._context.plan.units
            for number in range(len(units)):
                passing.forward(units, number)
                passing.saved.clear()
            passing.score(measure)
            problem = problem or passing.problem
            found.append((passing.total, counts[batch.number], passing.measured))
        self._context.flat.unbind()
        return found, problem

    def whole_state(self) -> OptimizerSpan:
        """Weights and optimizer state of the whole vector, read from the servers for a checkpoint."""
        flat, names = self._context.flat, self._context.optimizer.states()
        weights, *states = self.client.copies(len(names), self._context.wide)
        gradient = np.zeros_like(weights)
        return OptimizerSpan(Span(0, flat.length), weights, gradient, dict(zip(names, states)), flat.places)

    def missed(self) -> dict[str, int]:
        """Nothing: servers count the updates that frozen parameters miss."""
        return {}

    def load(self, steps: int, updates: int, missed: Mapping[str, int]) -> None:
        self.client.updates = updates

    def refresh(self) -> None:
        self.client.forget()

    def leave(self, failed: bool) -> None:
        # Not after a failure on all ranks: unmatched messages might be received by the next communicator.
        if isinstance(self._mail, RetryQueue) and (self._context.settings.fault_tolerant or not failed):
            self._mail.leave()

    def _work(self, clock: int, stop: bool) -> list[PartResult]:
        """Train on micro-batches of step `clock`, and on micro-batches that dead workers left.

        Returns their results.
        """
        outcomes: list[PartResult] = []
        done = None
        while True:
            with self._context.recorder("communication", "draw"):
                part = self.client.draw(clock, len(self._batches[clock]), done, stop)
            if part is None:
                return outcomes
            batches, done = self._batches[part.clock], None
            with suppress(Requeued):
                outcome = self._part(part, batch_of(batches[part.number], part.number), len(batches))
                outcomes.append(outcome)
                done = part, outcome

    def _part(self, part: WorkPart, batch: Batch, parts: int) -> PartResult:
        began, client, recorder = time.perf_counter(), self.client, self._context.recorder
        run = self._mode(batch, part.clock, training=True)
        passing, count = self._pass(batch, run), count_of(self._loss, batch.y)
        rows = np.unique(batch.x).astype(np.int64) if self._has_table else None
        waited = recorder.seconds["communication"]
        self._context.flat.bind(client.read(part.clock, self._order, rows))
        units = self._context.plan.units
        for number in range(len(units)):
            with recorder("communication", "pull"):
                client.need(self._keys_of_unit[number])
            with recorder("compute", "forward", unit=number):
                passing.forward(units, number)
            client.poll()
        passing.score()
        # checked before gradients are sent: servers cannot take back an update
        if (problem := changed_arrays([run])) is not None:
            raise problem
        if passing.problem is None and not math.isfinite(passing.total):
            text = f"the loss of micro-batch {part.number} is not a finite number in step {part.clock}"
            raise FloatingPointError(text)
        self._record_shapes(passing, batch)
        passing.loss_backward(1.0)
        self._gradients.begin_backward(part, parts, count, rows)
        with recorder("compute", "backward"):
            for number in reversed(range(len(units))):
                passing.backward(units[number], self._gradients)
                if passing.problem is None:
                    self._gradients.left(number)
        if passing.problem is not None:
            raise passing.problem
        computed = time.perf_counter() - began - (recorder.seconds["communication"] - waited)
        time.sleep((self._slow - 1) * computed + self._slow * self._delay)
        norm = self._gradients.end_backward()
        self._context.flat.unbind()
        with recorder("communication", "push"):
            client.acknowledged()
        worker, records = self._context.plan.rank - len(self._context.servers), PartRecords.of([run])
        return PartResult(passing.total, count, norm, worker, records.packed())

    def _specs(self, batch: Batch) -> tuple[ArraySpec, ...]:
        arrays = (batch.x, self._context.storage), (batch.y, self._context.wide)
        return tuple(ArraySpec(array.shape, type_of(array, dtype)) for array, dtype in arrays)

    def _mode(self, batch: Batch, step: int, training: bool) -> PassMode:
        return PassMode(training, self._context.settings.seed, step, batch.samples)

    def _pass(self, batch: Batch, run: PassMode) -> MicrobatchPass:
        """New forward and backward state of a micro-batch."""
        x, y = (array.astype(spec.dtype, copy=False) for array, spec in zip((batch.x, batch.y), self._specs(batch)))
        return MicrobatchPass(x, y, run, self._loss)

    def _record_shapes(self, passing: MicrobatchPass, batch: Batch) -> None:
        specs = self._specs(batch)
        if passing.problem is not None or specs in self._known_specs:
            return
        self._known_specs.add(specs)
        self._context.memory.record_peak("activations", passing.nbytes((batch.x, batch.y)))
        with suppress(NotImplementedError):  # a user's model may have no outlines
            self._ledger.expect(*predict_activations(self._context.plan.units, self._loss, *specs))
