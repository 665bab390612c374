"""Dispatch of tokens as a schedule of messages, to prove, price and draw it without MPI.

Chunk t is token t, numbered by rank; the k-th copy of a token on a rank is chunk k C + t, of C tokens. Results take the
same messages backwards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from collectives.analysis.prove import Proof, prove_outputs
from collectives.schedule.semantics import Value
from collectives.schedule.steps import Recv, Schedule, Send, Step, scattered
from collectives.schedule.topology import Nodes
from parallel.expert.hierarchical_route import relays


class DispatchSchedule(NamedTuple):
    """Schedules of all ranks, their tokens before, and the copies of tokens that they must have after."""

    schedules: list[Schedule]
    inputs: list[range]
    outputs: list[dict[int, Value]]
    tokens: int

    def prove(self) -> Proof:
        """Prove that every rank gets the tokens of its experts; ScheduleError names rank, round and step."""
        return prove_outputs(self.schedules, self.inputs, self.outputs, self.tokens)

    def crossings(self, nodes: Nodes) -> int:
        """Copies of tokens that are sent between nodes."""
        return sum(
            sum(map(len, step.chunks))
            for rank, schedule in enumerate(self.schedules)
            for steps in schedule
            for step in steps
            if isinstance(step, Send) and nodes[step.peer] != nodes[rank]
        )


def dispatch_schedule(
    choices: Sequence[np.ndarray], owners: Sequence[int], route: str = "direct", nodes: Nodes | None = None
) -> DispatchSchedule:
    """Schedule of a route of `parallel.expert.dispatch.ROUTES`.

    Parameters
    ----------
    choices : sequence of arrays of int, of shape (tokens, k)
        Experts of every rank's tokens.
    owners : sequence of int
        Number of experts of each rank.
    nodes : tuple of int, optional
        Node of every rank, for the hierarchical route.
    """
    size, holder = len(owners), np.repeat(np.arange(len(owners)), owners)
    ends = [*accumulate(map(len, choices), initial=0)]
    tokens = [range(*pair) for pair in pairwise(ends)]
    needed = {  # copies for each rank, by source and token
        (source, token): Counter(holder[experts].tolist())
        for source, mine in enumerate(tokens)
        for token, experts in zip(mine, choices[source])
    }
    rounds: list[dict[tuple[int, int], list[int]]] = [defaultdict(list) for _ in range(2)]
    outputs: list[dict[int, Value]] = [{token: ((rank, token),) for token in mine} for rank, mine in enumerate(tokens)]
    nodes = nodes or (0,) * size
    relay = relays(nodes) if route == "hierarchical" else None
    for (source, token), receivers in needed.items():
        for receiver, copies in sorted(receivers.items()):
            last = source if relay is None else int(relay[source][nodes[receiver]])
            if last != source and token not in outputs[last]:
                rounds[0][source, last].append(token)
                outputs[last][token] = ((source, token),)
            if receiver != last:
                chunks = [copy * ends[-1] + token for copy in range(copies)]
                rounds[relay is not None][last, receiver] += chunks
                outputs[receiver] |= dict.fromkeys(chunks, ((source, token),))
    schedules = [tuple(_steps(messages, rank, ends[-1]) for messages in rounds if messages) for rank in range(size)]
    return DispatchSchedule(schedules, list(tokens), outputs, ends[-1])


def _steps(messages: dict[tuple[int, int], list[int]], rank: int, count: int) -> tuple[Step, ...]:
    """Steps of a rank in a round; a sender has one copy of each token."""
    sends = [Send(to, scattered(one % count for one in chunks)) for (by, to), chunks in messages.items() if by == rank]
    receives = [Recv(by, scattered(chunks)) for (by, to), chunks in messages.items() if to == rank]
    return *sends, *receives
