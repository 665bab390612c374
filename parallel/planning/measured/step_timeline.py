"""Predicted training step: seconds by cause, and spans of time of each lane (a stage, or a rank and its messages)."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

COMPUTE, SHARED, NETWORK, IDLE, UPDATE, STEP = "compute", "shared memory", "network", "idle", "update", "step"
CAUSES = (COMPUTE, SHARED, NETWORK, IDLE, UPDATE, STEP)
"""Causes of time: passes of the model, messages within and between nodes that the rank waits for, waiting for other
stages or servers, norm and update of the weights, and a constant per step."""


class TimeSpan(NamedTuple):
    """Time from `start` to `end`, in seconds from the step's begin, that a lane spends on something."""

    lane: str
    label: str
    cause: str
    start: float
    end: float


@dataclass
class StepTimeline:
    """Step of the rank that takes longest: `parts` has its seconds by cause, `spans` its drawing."""

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[TimeSpan] = field(default_factory=list)
    now: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def spend(self, label: str, cause: str, seconds: float, lane: str = "rank") -> None:
        """Add time of a rank that does nothing else meanwhile."""
        if seconds > 0:
            self.spans.append(TimeSpan(lane, label, cause, self.now, self.now + seconds))
            self.parts[cause] += seconds
            self.now += seconds

    def beside(self, label: str, cause: str, start: float, seconds: float, lane: str = "messages") -> float:
        """Draw messages that overlap the computation, from `start`. Returns their end."""
        self.spans.append(TimeSpan(lane, label, cause, start, start + seconds))
        return start + seconds

    def wait(self, until: float, cause: str) -> None:
        """Wait for messages that end at `until`, if that is later than now."""
        self.spend("wait", cause, until - self.now)
