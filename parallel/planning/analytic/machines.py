"""Devices and clusters as numbers: dense peaks, memory, bandwidths, and the links between devices."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from collectives.analysis.cost_functions import LinearCost
from parallel.planning.analytic.checked import expect_above_zero, expect_at_least, lookup

EFFICIENCY = {"0": 0.1, "1e9": 0.6, "16e9": 0.9, "128e9": 0.99}
"""Share of the attainable peak that a product reaches, by its FLOPs (Gao et al., vTrain)."""


@dataclass(frozen=True)
class Device:
    """Accelerator, or CPU: `peak` in FLOP/s by precision, dense. `memory` in bytes, its `bandwidth` in bytes/s.

    Large matrix products reach the share `attainable` of the peak, and others the share `efficiency` of that, by their
    FLOPs, linear between.
    """

    peak: dict[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    attainable: float = 0.8
    efficiency: dict[str, float] = field(default_factory=EFFICIENCY.copy, hash=False)
    source: str = ""

    def __post_init__(self) -> None:
        if not self.efficiency or not all(0 < share <= 1 for share in self.efficiency.values()):
            raise ValueError(f"efficiency: expected shares above 0, up to 1, found {self.efficiency}")
        if wrong := [flops for flops in self._curve[0] if not 0 <= flops < float("inf")]:
            raise ValueError(f"efficiency: expected finite FLOPs from 0 on, found {wrong[0]}")
        if not 0 < self.attainable <= 1:
            raise ValueError(f"attainable: expected a share above 0, up to 1, found {self.attainable}")
        expect_above_zero(self, "memory", "bandwidth")
        if not self.peak:
            raise ValueError("peak: expected FLOP/s of at least one precision, found none")
        # `not ... > 0` also refuses NaN
        for precision, flops in self.peak.items():
            if not flops > 0:
                raise ValueError(f"peak.{precision}: expected FLOP/s above 0, found {flops}")

    @cached_property
    def _curve(self) -> tuple[list[float], list[float]]:
        try:
            points = sorted((float(flops), share) for flops, share in self.efficiency.items())
        except ValueError:
            raise ValueError(f"efficiency: expected numbers of FLOPs, found {', '.join(self.efficiency)}") from None
        return [flops for flops, _ in points], [share for _, share in points]

    def efficiency_of(self, flops: float) -> float:
        """Share of the attainable peak that a product of `flops` FLOPs reaches."""
        return float(np.interp(flops, *self._curve))

    def peak_of(self, precision: str) -> float:
        """Dense peak in FLOP/s. ValueError if it is not known for this precision."""
        return lookup("precision", precision, self.peak)


@dataclass(frozen=True)
class Link:
    """Link of one device: seconds per message (`alpha`), and bytes per second in each direction (`rate`)."""

    alpha: float
    rate: float

    def __post_init__(self) -> None:
        expect_at_least(self, 0, "alpha")
        expect_above_zero(self, "rate")

    @property
    def cost(self) -> LinearCost:
        return LinearCost(self.alpha, 1 / self.rate)


@dataclass(frozen=True)
class Cluster:
    """Nodes of `per_node` devices each, and the links of a device within and between nodes.

    `direct`: 0 if a switch connects the devices of a node. Otherwise the number of devices among which a device divides
    the rate of its links.
    """

    device: str
    per_node: int
    inside: Link
    between: Link
    direct: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        expect_at_least(self, 1, "per_node")
        expect_at_least(self, 0, "direct")

    def link(self, ranks: int, stride: int = 1) -> Link:
        """Link that limits a mesh axis of `ranks` devices, neighbours of which are `stride` devices apart."""
        if ranks * stride > self.per_node:
            return self.between
        used = min(ranks - 1, self.direct)  # links to other ranks of the axis
        return replace(self.inside, rate=self.inside.rate * used / self.direct) if used else self.inside

    def ranks_inside(self, ranks: int, stride: int) -> int:
        """Number of ranks of such an axis that share a node. Each has its own link to other nodes."""
        return min(ranks, max(1, self.per_node // stride))


@dataclass(frozen=True)
class Stack:
    """Software of a training: shares of the hardware's rates that it reaches, and of messages that it hides.

    Attributes
    ----------
    products : float
        Factor of the share of the peak that matrix products reach (`Device.attainable`). The one calibrated number.
    inside, between : float
        Shares of the rates of links that collectives reach.
    fused_attention : bool
        True if scores are never in memory (flash attention).
    hides_replicas : bool
        True if gradients and weights of replicas are exchanged beside computation.
    hidden_tensor : float
        Share of the exchanges along tp that products hide.
    """

    products: float = 1.0
    inside: float = 0.65
    between: float = 0.9
    fused_attention: bool = True
    hides_replicas: bool = True
    hidden_tensor: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        expect_above_zero(self, "products", "inside", "between")
        expect_at_least(self, 0, "hidden_tensor")
        if max(self.inside, self.between, self.hidden_tensor) > 1:
            raise ValueError("inside, between, hidden_tensor: expected shares up to 1")
