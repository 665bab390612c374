"""Placement of the model's parts on stages, and the routes of micro-batches through them.

A model is cut into parts, numbered from its input. A part lies at one or more places: a chunk of a stage each. A route
passes through one place of every part, forward in this order and backward in reverse; every micro-batch takes one
route. Consecutive places on different stages exchange messages.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

Number: TypeAlias = int | float | Fraction
PerPart: TypeAlias = Number | Sequence[Number]
"""One number for all parts of the model, or one per part."""


def spread(each: PerPart, parts: int) -> list[Number]:
    """List of one number per part, from one number for all parts or a sequence. ValueError for a wrong length."""
    numbers = list(each) if isinstance(each, Sequence) else [each] * parts
    if len(numbers) != parts:
        raise ValueError(f"expected one number, or one for each of {parts} parts; found {len(numbers)}")
    return numbers


class StagePlace(NamedTuple):
    """Place of a part of the model: chunk `chunk` of stage `stage`."""

    stage: int
    chunk: int


Route = tuple[StagePlace, ...]


@dataclass(frozen=True)
class StagePlacement:
    """Placement of model parts on stages, as routes of equal length. Micro-batch i takes route i modulo their number.

    Where routes differ, a part lies at several places, over which its gradients must be summed.
    """

    routes: tuple[Route, ...]

    @property
    def parts(self) -> int:
        return len(self.routes[0])

    @cached_property
    def stages(self) -> int:
        return 1 + max(place.stage for route in self.routes for place in route)

    @cached_property
    def chunks(self) -> int:
        return 1 + max(place.chunk for route in self.routes for place in route)

    @cached_property
    def part(self) -> dict[StagePlace, int]:
        return {place: number for route in self.routes for number, place in enumerate(route)}

    def route(self, microbatch: int) -> Route:
        return self.routes[microbatch % len(self.routes)]

    def neighbour(self, place: StagePlace, microbatch: int, step: int) -> StagePlace | None:
        """Place `step` (1 or -1) parts further on the route of a micro-batch. None beyond the ends of the model."""
        part = self.part[place] + step
        return self.route(microbatch)[part] if 0 <= part < self.parts else None

    def owners(self, part: int) -> list[StagePlace]:
        """Places of a part, each once."""
        return list(dict.fromkeys(route[part] for route in self.routes))


def loop(stages: int, chunks: int = 1) -> StagePlacement:
    """Placement in rounds: part k of the model is chunk k // `stages` of stage k modulo `stages`."""
    return StagePlacement((tuple(StagePlace(part % stages, part // stages) for part in range(stages * chunks)),))


def vee(stages: int) -> StagePlacement:
    """Placement down the stages and up again: stage s has part s as chunk 0, part 2 stages - 1 - s as chunk 1.

    The first stage has the model's input and the loss; there is no message at the turn.
    """
    down = [StagePlace(stage, 0) for stage in range(stages)]
    up = [StagePlace(stage, 1) for stage in reversed(range(stages))]
    return StagePlacement((tuple(down + up),))


def opposed(stages: int) -> StagePlacement:
    """Placement of two opposite routes: stage s has part s as chunk 0 and part stages - 1 - s as chunk 1.

    Even micro-batches pass from the first stage to the last through chunks 0, odd ones from the last to the first
    through chunks 1. Every part lies on two stages (on both chunks of the middle one, if their number is odd).
    """
    down = tuple(StagePlace(stage, 0) for stage in range(stages))
    up = tuple(StagePlace(stage, 1) for stage in reversed(range(stages)))
    return StagePlacement((down, up))


def replicated(ranks: Sequence[int]) -> StagePlacement:
    """Placement with part k on `ranks[k]` neighbouring stages, its replicas, which take micro-batches in turn.

    Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018, section 3.2: round robin.
    """
    first = list(accumulate(ranks, initial=0))
    turns = range(math.lcm(*ranks))
    return StagePlacement(
        tuple(tuple(StagePlace(first[part] + turn % count, 0) for part, count in enumerate(ranks)) for turn in turns)
    )


PLACEMENTS: dict[str, Callable[..., StagePlacement]] = {"loop": loop, "vee": vee, "opposed": opposed}
