"""Servers that run on one rank: the one of its own shard, and replicas of other ranks' servers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from parallel.asynchronous.server.event_order import EventOrder
from parallel.asynchronous.server.message_bus import MessageBus
from parallel.asynchronous.server.messages import Mail
from parallel.asynchronous.server.server_loop import ServerLoop
from parallel.asynchronous.server.server_memory import of_shard
from parallel.asynchronous.server.server_replicas import ServerReplicas
from parallel.asynchronous.server.server_settings import ServerContext
from parallel.asynchronous.server.shard_store import AsyncStore, ShardState, SyncStore
from parallel.asynchronous.server.work_assignment import RankStep, joined
from parallel.data.sampler import Batch
from parallel.engine.memory_ledger import MemoryLedger
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.param_groups import merged_missed


class ServerHost:
    """Server loops that run on one rank: `loops` by shard, and `loop` of its own shard."""

    def __init__(self, context: ServerContext, bus: MessageBus, ledger: MemoryLedger, order: EventOrder):
        self._context, self._ledger, rank = context, ledger, context.plan.rank
        self._replicas: ServerReplicas | None = None
        make, servers, workers = partial(self._make, order=order), context.servers, context.workers
        if context.has_chains:
            self._replicas = ServerReplicas(bus, rank, servers, workers, context.settings.replicas, make)
        self.loops = {rank: make(bus, rank)} if self._replicas is None else self._replicas.servers
        self.loop = self.loops[rank]
        self.loop.waits_for_rank = self._replicas is None
        self._expect()

    def _make(self, bus: Mail, shard: int, order: EventOrder) -> ServerLoop:
        context, memory = self._context, self._context.memory
        flat, wide, master = context.flat, context.wide, context.plan.precision.master
        key_states = []
        for key in (key for key in context.keys if key.server == shard):
            weights = memory.private("optimizer" if master else "parameters", key.span.size, wide)
            flat.initialise(weights, context.settings.seed, key.span)
            state = {name: memory.private("optimizer", key.span.size, wide) for name in context.optimizer.states()}
            stored = memory.private("parameters", key.span.size, context.storage) if master else None
            # The weights are a placeholder for the gradient: `ShardState.prepare` sets it before every update.
            piece = OptimizerSpan(key.span, weights, weights, state, flat.places, stored)
            key_states.append(ShardState(key, piece))
            key_states[-1].refresh()
        kind, make = SyncStore if context.rule.synchronous else AsyncStore, partial(memory.private, "gradients")
        store = kind(key_states, context.optimizer, context.settings.clip or None, context.plan.reproducible, make)
        order = order if shard == context.plan.rank else EventOrder()
        return ServerLoop(bus, store, context.rule, context.workers, context.servers, shard, order)

    def step(self, step: int, batches: Sequence[Batch], stop: bool) -> RankStep:
        # A replica does not receive the request, and must do the same as the server.
        self.loop.stop_requested |= stop and self._replicas is None
        with self._context.recorder("communication", "serve"):
            last = self.loop.until_made(step + 1)
        self._expect()
        found = joined(self.loop.work.outcome(step), last)
        if self._context.rule.synchronous:
            found = found._replace(norm=self.loop.norms.get(step))
        for loop in self.loops.values():
            loop.norms = {at: value for at, value in loop.norms.items() if at > step}
        return found

    def quiesce(self, steps: int) -> None:
        self.loop.until_quiescent()
        if self._replicas is not None:
            count = self.loop.rests
            self._replicas.until(lambda: all(loop.rests >= count for loop in self.loops.values()))

    def key_states(self) -> Iterator[ShardState]:
        """States of all keys that this rank stores. Keys of its own shard come first."""
        for loop in self.loops.values():
            yield from loop.store.key_states.values()

    def missed(self) -> dict[str, int]:
        """Updates that frozen parameters have missed, by name."""
        return merged_missed(key_state.piece.missed.state() for key_state in self.key_states())

    def load(self, steps: int, updates: int, missed: Mapping[str, int]) -> None:
        for loop in self.loops.values():
            loop.begin(steps)
            loop.store.updates = updates
        for key_state in self.key_states():
            key_state.piece.missed.load(missed, (place.parameter for place in key_state.piece.places))

    def refresh(self) -> None:
        for key_state in self.key_states():
            key_state.refresh()

    def leave(self, failed: bool) -> None:
        """Serve until no rank needs this one. No-op without replication chains or after a failure."""
        if self._replicas is not None and not failed:
            self._replicas.until_left()

    def _expect(self) -> None:
        context, states = self._context, len(self._context.optimizer.states())
        for shard, loop in self.loops.items():
            size = of_shard(context.plan, context.settings, context.keys, shard, states, loop.parts)
            self._ledger.expect(size, part=shard)
