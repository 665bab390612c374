"""Axis of a mesh as a row: all that meshes, engines, checkpoints, ledger and planners know of a kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from parallel.nn.placement import Placement, Replicate, Shard


@dataclass(frozen=True)
class Axis:
    """Row of the table of axes (`parallel.sharding.axes.AXES`).

    The placement of a model's input along the axis decides what its ranks share:

        ===============  ================  ====================  ====================  ===============================
        input            samples           parameters            gradients             norm and checkpoint
        ===============  ================  ====================  ====================  ===============================
        ``Shard(0)``     of each rank      equal                 summed                ranks share the vector's blocks
        ``Shard(1)``     parts of each     equal                 summed                ranks share the vector's blocks
        ``Replicate()``  whole             shards of operators   of each rank's shard  shards are put together
        None             of other units    for its units only   of each rank's units  of each rank's units
        ===============  ================  ====================  ====================  ===============================
    """

    name: str
    holds: str  # what its ranks have, for readers
    input: Placement | None = None  # a model input's placement along the axis, None: ranks have other parts of it
    folded: bool = False  # no factor of the number of ranks: laid over other axes
    options: tuple[str, ...] = ()  # settings on which the computation of a unit depends
    check: Callable[[Any, Any], object] = lambda settings, mesh: None  # ValueError if they do not go together

    @property
    def own_samples(self) -> bool:
        """True if ranks have micro-batches of their own."""
        return self.input == Shard(0)

    @property
    def sums_gradients(self) -> bool:
        """True if ranks have equal parameters, whose gradients are sums over them."""
        return isinstance(self.input, Shard)

    @property
    def cuts_operators(self) -> bool:
        """True if ranks have shards of the same operators."""
        return self.input == Replicate()


UNCUT = ("pool", "products", "fake_quant", "fake_quant_inputs", "prune")
"""Settings that must have their defaults if operators are cut, or experts on different ranks."""


def changed(settings: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the named settings that are not at their defaults."""
    for name in names:
        if (found := getattr(settings, name)) != getattr(type(settings), name):
            yield name, found


STAGES = Axis("pp", "pipeline stages")
"""Values between stages travel forward, and their gradients backward (`parallel.pipeline`)."""

REPLICAS = Axis("dp", "replicas", Shard(0))
"""Gradients are summed, once in a step (`parallel.engine.data_parallel`)."""
