"""Servers of one rank: that of its own shard, and those that it is a replica of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from parallel.data.sampler import Batch
from parallel.engine.memory_ledger import MemoryLedger
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.parameter_server.event_order import EventOrder, create, file_of, read
from parallel.parameter_server.message_bus import MessageBus
from parallel.parameter_server.server_context import ServerContext
from parallel.parameter_server.server_loop import ServerLoop, ServerMail
from parallel.parameter_server.server_memory import of_shard
from parallel.parameter_server.server_replicas import ServerReplicas
from parallel.parameter_server.shard_store import AsyncStore, ShardState, SyncStore
from parallel.parameter_server.work_assignment import PartResult, RankStep, joined

RECORDED = ("seed", "precision", "reproducible", "clip", "servers", "consistency", "bucket_bytes", "first_bytes")
"""Settings that must be equal for a recorded order of events to be replayed."""


def open_order(context: ServerContext) -> EventOrder:
    """Order of events of this server, with the files to record and to replay."""
    settings, rank = context.settings, context.rank
    facts = {name: getattr(settings, name) for name in RECORDED}
    facts["optimizer"] = [(f"optimizer's {what}", value) for what, value in context.optimizer.describe().items()]
    facts |= {"ranks": context.plan.ranks, "keys": [key.span for key in context.keys]}
    script = read(file_of(Path(settings.replay), rank), facts) if settings.replay else None
    return EventOrder(script, create(file_of(Path(settings.record), rank), facts) if settings.record else None)


class ServerHost:
    """Server loops of a rank.

    Attributes
    ----------
    loop : ServerLoop
        Of the rank's own shard.
    loops : dict of int to ServerLoop
        By shard.
    outcomes : list of list of PartResult
        On rank 0: results of all parts, by step.
    """

    def __init__(self, context: ServerContext, bus: MessageBus, ledger: MemoryLedger, order: EventOrder):
        self._context, self._ledger = context, ledger
        self.outcomes: list[list[PartResult]] = []
        self._replicas: ServerReplicas | None = None
        rank = context.rank
        if context.has_chains:
            replicas = ServerReplicas(bus, rank, context.servers, context.workers, context.settings.replicas)
            replicas.servers |= {shard: self._make(mail, shard, order) for shard, mail in replicas.mails.items()}
            self._replicas, self.loops = replicas, replicas.servers
        else:
            self.loops = {rank: self._make(bus, rank, order)}
        self.loop = self.loops[rank]
        self._expect()

    def _make(self, bus: ServerMail, shard: int, order: EventOrder) -> ServerLoop:
        context, memory = self._context, self._context.memory
        flat, wide, master = context.flat, context.wide, context.plan.precision.master
        key_states = []
        for key in (key for key in context.keys if key.server == shard):
            weights = memory.private("optimizer" if master else "parameters", key.span.size, wide)
            flat.initialise(weights, context.settings.seed, key.span)
            state = {name: memory.private("optimizer", key.span.size, wide) for name in context.optimizer.states()}
            stored = memory.private("parameters", key.span.size, context.storage) if master else None
            # The weights stand in for the gradient, which `ShardState.prepare` sets before every update.
            piece = OptimizerSpan(key.span, weights, weights, state, flat.places, stored)
            key_states.append(ShardState(key, piece))
            key_states[-1].refresh()
        kind, make = SyncStore if context.rule.synchronous else AsyncStore, partial(memory.private, "gradients")
        store = kind(key_states, context.optimizer, context.settings.clip or None, context.plan.reproducible, make)
        order = order if shard == context.rank else EventOrder()
        return ServerLoop(bus, store, context.rule, context.workers, context.servers, shard, order)

    @property
    def updates(self) -> int:
        """Updates of every weight, after `quiesce`."""
        return self.loop.store.updates

    def step(self, step: int, batches: Sequence[Batch], stop: bool) -> RankStep:
        """Serve until all workers have made a step."""
        # A replica does not receive the request, and must do the same as the server.
        self.loop.stop_requested |= stop and self._replicas is None
        with self._context.recorder("communication", "serve"):
            last = self.loop.until_made(step + 1)
        self._expect()
        outcomes = self.loop.work.outcome(step)
        if self._context.rank == 0:
            self.outcomes.append(outcomes)
        loss, count, norm = joined(outcomes)
        if self._context.rule.synchronous:
            norm = self.loop.norms.pop(step, None)
        return RankStep(loss, count, norm, last, 0)

    def quiesce(self, steps: int) -> None:
        """Serve until all workers wait and nothing is in flight."""
        self.loop.until_quiescent()
        if self._replicas is not None:
            count = self.loop.rests
            self._replicas.until(lambda: all(loop.rests >= count for loop in self.loops.values()))

    def key_states(self) -> Iterator[ShardState]:
        """States of all keys of this rank, its own shard's first."""
        for loop in self.loops.values():
            yield from loop.store.key_states.values()

    def load(self, steps: int, updates: int) -> None:
        """Continue after `steps` steps and `updates` updates."""
        for loop in self.loops.values():
            loop.begin(steps)
            loop.store.updates = updates

    def refresh(self) -> None:
        """Apply assignments to the weights."""
        for key_state in self.key_states():
            key_state.refresh()

    def leave(self, failed: bool) -> None:
        """Serve until no rank needs this one; without synchronising after a failure."""
        if self._replicas is not None and not failed:
            self._replicas.until_left()

    def _expect(self) -> None:
        """Enter the forecast for steps with the largest number of parts so far into the ledger."""
        context = self._context
        for shard, loop in self.loops.items():
            keys = [key_state.key for key_state in loop.store.key_states.values()]
            size = of_shard(
                context.plan,
                keys,
                len(context.optimizer.states()),
                workers=len(context.workers),
                synchronous=context.rule.synchronous,
                parts=loop.parts,
            )
            self._ledger.expect(size, part=shard)
