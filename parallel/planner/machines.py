"""Devices and clusters as numbers: dense peaks, memory, bandwidths, and the links between devices."""

from dataclasses import dataclass, field

from collectives.analysis.cost_functions import LinearCost
from parallel.planner.checked import expect_above_zero, expect_at_least, lookup


@dataclass(frozen=True)
class Device:
    """Accelerator, or CPU: `peak` in FLOP/s by precision, dense; `memory` in bytes, its `bandwidth` in bytes/s.

    Large matrix products reach the share `attainable` of the peak.
    """

    peak: dict[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    attainable: float = 0.8
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.attainable <= 1:
            raise ValueError(f"attainable: expected a share above 0, up to 1, found {self.attainable}")
        expect_above_zero(self, "memory", "bandwidth")
        if not self.peak:
            raise ValueError("peak: expected FLOP/s of at least one precision, found none")
        for precision, flops in self.peak.items():
            if not flops > 0:
                raise ValueError(f"peak.{precision}: expected FLOP/s above 0, found {flops}")

    def peak_of(self, precision: str) -> float:
        """Dense peak in FLOP/s; ValueError if it is not known for this precision."""
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
    """Nodes of `per_node` devices each, and the links of a device within and between nodes."""

    device: str
    per_node: int
    inside: Link
    between: Link
    source: str = ""

    def __post_init__(self) -> None:
        expect_at_least(self, 1, "per_node")

    def link(self, ranks: int, stride: int = 1) -> Link:
        """Link that limits a mesh axis of `ranks` devices, neighbours of which are `stride` devices apart."""
        return self.inside if ranks * stride <= self.per_node else self.between
