"""Which parts of the model a stage has, and the ways that micro-batches go through them.

A model is cut in parts, numbered from its input on. A part lies at a place: a chunk of a stage. A route leads through
one place of every part, forward in this order and backward in the other; a micro-batch takes one route. From a place to
the next on its route there is a message, unless both are on one stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Place(NamedTuple):
    """Where a part lies."""

    stage: int
    chunk: int


Route = tuple[Place, ...]


@dataclass(frozen=True)
class Placement:
    """Routes through the stages.

    Attributes
    ----------
    routes : tuple of Route
        Of equal length; micro-batch i takes route i modulo their number. Every place is on one route. Where there are
        two, every part lies on two places, and its gradients must be summed over both.
    """

    routes: tuple[Route, ...]

    @property
    def parts(self) -> int:
        """In how many parts the model is cut."""
        return len(self.routes[0])

    @cached_property
    def stages(self) -> int:
        return 1 + max(place.stage for route in self.routes for place in route)

    @cached_property
    def chunks(self) -> int:
        """How many parts of the model a stage has."""
        return 1 + max(place.chunk for route in self.routes for place in route)

    @cached_property
    def part(self) -> dict[Place, int]:
        """The number of the part that lies there."""
        return {place: number for route in self.routes for number, place in enumerate(route)}

    @cached_property
    def before(self) -> dict[Place, Place | None]:
        """Where a place's activations come from and its gradients go to; None for the model's input."""
        return {place: source for route in self.routes for place, source in zip(route, (None, *route))}

    @cached_property
    def after(self) -> dict[Place, Place | None]:
        """Where a place's activations go to and its gradients come from; None for the loss."""
        return {place: target for route in self.routes for place, target in zip(route, (*route[1:], None))}

    def route(self, microbatch: int) -> Route:
        """The way of a micro-batch."""
        return self.routes[microbatch % len(self.routes)]

    def owners(self, part: int) -> list[Place]:
        """All places of a part."""
        return [route[part] for route in self.routes]


def loop(stages: int, chunks: int = 1) -> Placement:
    """Part k lies on stage k modulo `stages`, as chunk k // `stages`: once around for every chunk."""
    return Placement((tuple(Place(part % stages, part // stages) for part in range(stages * chunks)),))


def vee(stages: int) -> Placement:
    """Down the stages and up again: stage s has part s as chunk 0 and part 2 stages - 1 - s as chunk 1.

    So the first stage has the model's input and its loss, and at the turn there is no message.
    """
    down = [Place(stage, 0) for stage in range(stages)]
    up = [Place(stage, 1) for stage in reversed(range(stages))]
    return Placement((tuple(down + up),))


def opposed(stages: int) -> Placement:
    """Two routes against each other: stage s has part s as chunk 0 and part stages - 1 - s as chunk 1.

    Even micro-batches go from the first stage to the last, through chunks 0; odd ones from the last to the first,
    through chunks 1. Every part lies on two stages (on both chunks of the middle one, if their number is odd).
    """
    down = tuple(Place(stage, 0) for stage in range(stages))
    up = tuple(Place(stage, 1) for stage in reversed(range(stages)))
    return Placement((down, up))


PLACEMENTS: dict[str, Callable[..., Placement]] = {"loop": loop, "vee": vee, "opposed": opposed}
