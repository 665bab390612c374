"""Dispatch of tokens as a schedule of messages, to prove, price and draw it without MPI.

Chunk t is token t, numbered by rank. The k-th copy of a token on a rank is chunk k C + t, of C tokens. Results take
the same messages backwards, and are added where a token's copies separated. On their way, chunk (1 + j) C + t is the
result of the j-th choice of token t, chunk (1 + k + n) C + t the sum of those on node n, of k choices, and chunk t the
whole sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from collectives.analysis.prove import Proof, prove_outputs
from collectives.schedule.semantics import Value
from collectives.schedule.steps import Copy, Recv, Reduce, Schedule, Send, Step, scattered
from collectives.schedule.topology import Nodes
from parallel.sharding.expert.hierarchical_route import relays


class DispatchSchedule(NamedTuple):
    """Schedules of all ranks, their chunks before, and the values of chunks that they must have after."""

    schedules: list[Schedule]
    inputs: Sequence[Sequence[int]]
    outputs: list[dict[int, Value]]
    tokens: int

    def prove(self) -> Proof:
        """Prove that every rank gets its tokens, or sums of results. ScheduleError names rank, round and step."""
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
    """Schedule of a route of `parallel.sharding.expert.dispatch.ROUTES`.

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


def combine_schedule(
    choices: Sequence[np.ndarray], owners: Sequence[int], route: str = "direct", nodes: Nodes | None = None
) -> DispatchSchedule:
    """Schedule of the results' way back to the ranks of their tokens. `dispatch_schedule` describes the arguments.

    A relay of the hierarchical route adds the results of its node. A rank adds what arrives for its tokens.
    """
    size, holder = len(owners), np.repeat(np.arange(len(owners)), owners)
    nodes = nodes or (0,) * size
    relay = relays(nodes) if route == "hierarchical" else None
    ends = [*accumulate(map(len, choices), initial=0)]
    count, width = ends[-1], max((some.shape[1] for some in choices), default=0)
    inputs: list[list[int]] = [[] for _ in owners]
    outputs: list[dict[int, Value]] = [{} for _ in owners]
    rounds: list[dict[tuple[int, int], list[int]]] = [defaultdict(list) for _ in range(2)]
    sums: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(2)]  # terms by rank and chunk, after each round
    for source, (mine, start) in enumerate(zip(choices, ends)):
        for token, experts in enumerate(mine, start):
            terms: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (rank, chunk) by the rank that adds them
            for place, by in enumerate(holder[experts].tolist(), 1):
                inputs[by].append(place * count + token)
                adder = source if relay is None else int(relay[source][nodes[by]])
                terms[adder].append((by, place * count + token))
                if by != adder:
                    rounds[0][by, adder].append(place * count + token)
            arrived = [chunk for _, chunk in terms.pop(source, [])]
            for adder, some in sorted(terms.items()):
                partial = (1 + width + nodes[adder]) * count + token
                sums[0][adder, partial] = [chunk for _, chunk in some]
                rounds[1][adder, source].append(partial)
                arrived.append(partial)
            sums[1][source, token] = arrived
            outputs[source][token] = tuple(
                sorted((by, place * count + token) for place, by in enumerate(holder[experts].tolist(), 1))
            )
    schedules = [
        tuple(step for messages, added in zip(rounds, sums) for step in _combined(messages, added, rank))
        for rank in range(size)
    ]
    return DispatchSchedule(schedules, inputs, outputs, count)


def _combined(
    messages: dict[tuple[int, int], list[int]], sums: dict[tuple[int, int], list[int]], rank: int
) -> Iterator[tuple[Step, ...]]:
    """Rounds of a rank: its messages, then its sums, a term of each in a round."""
    sends = [Send(to, scattered(chunks)) for (by, to), chunks in messages.items() if by == rank]
    yield *sends, *(Recv(by, scattered(chunks)) for (by, to), chunks in messages.items() if to == rank)
    mine = {chunk: terms for (by, chunk), terms in sums.items() if by == rank}
    for place in range(max(map(len, mine.values()), default=0)):
        pairs = [(terms[place], chunk) for chunk, terms in mine.items() if place < len(terms)]
        source, target = (scattered(some) for some in zip(*pairs))
        yield (Reduce(source, target, "right") if place else Copy(source, target),)  # nothing is there to add to yet


def _steps(messages: dict[tuple[int, int], list[int]], rank: int, count: int) -> tuple[Step, ...]:
    """Steps of a rank in a round. A sender has one copy of each token."""
    sends = [Send(to, scattered(one % count for one in chunks)) for (by, to), chunks in messages.items() if by == rank]
    receives = [Recv(by, scattered(chunks)) for (by, to), chunks in messages.items() if to == rank]
    return *sends, *receives
