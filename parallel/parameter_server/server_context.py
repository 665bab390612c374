"""Context of a training with servers."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.data_parallel.run_context import RunContext
from parallel.engine.settings import Settings
from parallel.optim.optimizers import Optimizer
from parallel.parameter_server.key_assignment import ServerKey
from parallel.parameter_server.worker_clocks import ConsistencyRule, rule_of


@dataclass(frozen=True)
class ServerContext(RunContext):
    """Run context with settings, optimizer and the keys of all servers."""

    settings: Settings
    optimizer: Optimizer
    keys: tuple[ServerKey, ...]

    @property
    def rank(self) -> int:
        return self.plan.rank

    @property
    def servers(self) -> range:
        """Ranks of the servers: the first ones."""
        return range(self.settings.servers)

    @property
    def workers(self) -> range:
        """Ranks of the workers."""
        return range(self.settings.servers, self.plan.ranks)

    @property
    def rule(self) -> ConsistencyRule:
        return rule_of(self.settings.consistency)

    @property
    def has_chains(self) -> bool:
        """True if messages pass through replication chains and requests are repeated."""
        return self.settings.fault_tolerant or self.settings.replicas > 1
