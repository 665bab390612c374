"""Teams of replicas: each has micro-batches of its own, and its ranks share the sequences of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallel.sharding.mesh import Mesh


class Teams(NamedTuple):
    """Teams of replicas: each has samples of its own, and its ranks share their sequences.

    `places` are every replica's team and its part of the sequences; `parts` are the ranks of a team.
    """

    places: tuple[tuple[int, int], ...]
    parts: int

    @classmethod
    def of(cls, replicas: Mesh) -> Teams:
        """Teams on a mesh of replicas, without axes along which operators are cut."""
        groups = replicas.teams
        places = {rank: (team, part) for team, group in enumerate(groups) for part, rank in enumerate(group)}
        return cls(tuple(places[rank] for rank in range(replicas.size)), len(groups[0]))

    @property
    def number(self) -> int:
        return len(self.places) // self.parts

    def leaf(self, number: int, rank: int) -> int:
        """Number of a replica's term of the gradient of a micro-batch, which has as many terms as a team has ranks."""
        return number * self.parts + self.places[rank][1]

    def leaves(self, assignment: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Numbers of the terms of the gradient by replica (`leaf`), from the micro-batches of every team.

        >>> Teams.of(Mesh.parse("dp=2,cp=2")).leaves([(0, 1), (2,)])
        [(0, 2), (1, 3), (4,), (5,)]
        """
        teams = enumerate(team for team, _ in self.places)
        return [tuple(self.leaf(number, rank) for number in assignment[team]) for rank, team in teams]
