"""Validation of the settings of a training with servers."""

from __future__ import annotations

import math

from parallel.engine.settings import Settings
from parallel.optim.precision import PRECISIONS
from parallel.parameter_server.worker_clocks import rule_of


def factors(text: str) -> dict[int, float]:
    """Parse ``--slow``: slowdown factors by rank.

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


def refuse_servers(settings: Settings, ranks: int, lamb: bool) -> None:
    """Raise ValueError for settings that are invalid with servers."""
    servers, rule = settings.servers, rule_of(settings.consistency)
    if settings.device != "cpu":
        raise ValueError(f"device: servers and workers are on the host, found {settings.device}")
    if servers < 1:
        raise ValueError(f"servers: expected at least 1, found {servers}")
    if servers >= ranks:
        raise ValueError(f"servers: {servers} of {ranks} rank{'s' * (ranks > 1)} leave no workers")
    if PRECISIONS[settings.precision].scaled:
        why = "needs a loss scale that is equal on all workers, and these do not synchronise"
        raise ValueError(f"precision: {settings.precision} {why}")
    if lamb and (servers > 1 or not rule.synchronous):
        raise ValueError("optimizer: lamb needs norms of whole tensors, which bsp on one server has")
    if not 1 <= settings.replicas <= servers:
        raise ValueError(f"replicas: expected 1 to {servers}, as many as servers, found {settings.replicas}")
    if settings.replicas > 1 and (settings.record or settings.replay):
        raise ValueError(f"replicas: expected 1 with record or replay, found {settings.replicas}")
    if settings.check_every:
        found = settings.check_every
        raise ValueError(f"check_every: expected 0, since ps has one copy of each parameter; found {found}")
    if settings.record and settings.record == settings.replay:
        raise ValueError(f"record: {settings.record} is the file to replay")
    for rank, factor in factors(settings.slow).items():
        if not servers <= rank < ranks:
            raise ValueError(f"slow: rank {rank} is no worker; these are {servers} to {ranks - 1}")
        if not 1 <= factor < math.inf:
            raise ValueError(f"slow: expected a factor from 1 on, found {factor} for rank {rank}")
