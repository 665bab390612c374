"""Settings of a training with parameter servers: their validation, and the run context of servers and workers."""

import math
from dataclasses import dataclass

from parallel.asynchronous.server.consistency import ConsistencyRule, rule_of
from parallel.asynchronous.server.key_assignment import ServerKey
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.settings import Settings
from parallel.optim.optimizer import Optimizer
from parallel.optim.precision import PRECISIONS


@dataclass(frozen=True)
class ServerContext(RunContext):
    """Run context of servers and workers: with settings, optimizer and the keys of all servers."""

    settings: Settings
    optimizer: Optimizer
    keys: tuple[ServerKey, ...]

    @property
    def servers(self) -> range:
        """Ranks of the servers: the first ones."""
        return range(self.settings.servers)

    @property
    def workers(self) -> range:
        return range(self.settings.servers, self.plan.ranks)

    @property
    def rule(self) -> ConsistencyRule:
        return rule_of(self.settings.consistency)

    @property
    def has_chains(self) -> bool:
        """True if shards are replicated or ranks may die: messages pass through chains and open requests are resent."""
        return self.settings.fault_tolerant or self.settings.replicas > 1


def factors(text: str) -> dict[int, float]:
    """Parse ``--slow``: slowdown factors by rank.

    >>> factors("2:5,3:1.5")
    {2: 5.0, 3: 1.5}
    """
    pairs = (pair.split(":") for pair in text.split(",") if pair)
    try:
        return {int(rank): float(factor) for rank, factor in pairs}
    except ValueError:
        raise ValueError(f"slow: expected RANK:FACTOR,..., found {text!r}") from None


def refuse_servers(settings: Settings, ranks: int, optimizer: type[Optimizer]) -> None:
    """Raise ValueError if settings are invalid with parameter servers, or with the optimizer."""
    servers, replicas, rule = settings.servers, settings.replicas, rule_of(settings.consistency)
    precision, checked, recorded = settings.precision, settings.check_every, settings.record or settings.replay
    # pairs of condition and text: the first that holds is raised
    for is_wrong, text in (
        (settings.device != "cpu", f"device: servers and workers are on the host, found {settings.device}"),
        (servers >= ranks, f"servers: {servers} of {ranks} rank{'s' * (ranks > 1)} leave no workers"),
        (PRECISIONS[precision].scaled, f"precision: {precision} needs a loss scale that is equal on all workers"),
        (
            optimizer.whole_tensors and (servers > 1 or not rule.synchronous),
            f"optimizer: {optimizer.__name__.lower()} needs bsp on one server, for norms of tensors",
        ),
        (not 1 <= replicas <= servers, f"replicas: expected 1 to {servers}, as many as servers, found {replicas}"),
        (replicas > 1 and recorded, f"replicas: expected 1 with record or replay, found {replicas}"),
        (checked, f"check_every: expected 0, since ps has one copy of each parameter; found {checked}"),
        (recorded and settings.record == settings.replay, f"record: {settings.record} is the file to replay"),
    ):
        if is_wrong:
            raise ValueError(text)
    for rank, factor in factors(settings.slow).items():
        if not servers <= rank < ranks:
            raise ValueError(f"slow: rank {rank} is no worker; these are {servers} to {ranks - 1}")
        if not 1 <= factor < math.inf:
            raise ValueError(f"slow: expected a factor from 1 on, found {factor} for rank {rank}")
