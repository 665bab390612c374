"""Exchange among neighbours: schedules of all ranks, played with one queue of messages for each pair of ranks."""

from collections import defaultdict, deque
from itertools import product
from random import Random

import pytest

from collectives.algorithms.neighbors import Neighbors, exchange
from collectives.schedule.steps import Copy, Recv, Send, numbers


def played(everyone, sent):
    """Blocks by rank and place of their source, of the names (rank, chunk) that they are sent with."""
    rounds = [next(exchange(rank, one, sent(one)), []) for rank, one in enumerate(everyone)]
    queues = defaultdict(deque)
    for rank, steps in enumerate(rounds):
        for step in steps:
            if isinstance(step, Send):
                queues[rank, step.peer].append((rank, *numbers(step.chunks)))
    found = [dict.fromkeys(range(len(one.sources))) for one in everyone]
    for rank, steps in enumerate(rounds):
        first = sent(everyone[rank])
        for step in steps:
            if isinstance(step, Recv):
                (chunk,) = numbers(step.chunks)
                found[rank][chunk - first] = queues[step.peer, rank].popleft()
            elif isinstance(step, Copy):
                (chunk,) = numbers(step.target)
                found[rank][chunk - first] = (rank, *numbers(step.source))
    assert not any(queues.values())
    return [list(one.values()) for one in found]


def grid(dims, periods):
    """Neighbours of all ranks in a grid, and the block that each must receive from each: the one sent towards it."""
    places = list(product(*map(range, dims)))

    def shifted(place, dimension, by):
        moved = list(place)
        moved[dimension] += by
        if periods[dimension]:
            moved[dimension] %= dims[dimension]
        return places.index(tuple(moved)) if 0 <= moved[dimension] < dims[dimension] else -1

    steps = [(dimension, by) for dimension in range(len(dims)) for by in (-1, 1)]
    everyone = [tuple(shifted(place, *step) for step in steps) for place in places]
    wanted = [
        [None if peer < 0 else (peer, number ^ 1) for number, peer in enumerate(neighbors)] for neighbors in everyone
    ]
    return [Neighbors.of_grid(one) for one in everyone], wanted


@pytest.mark.parametrize("dims", [(1,), (2,), (5,), (1, 1), (2, 3), (3, 4), (2, 1, 2)])
@pytest.mark.parametrize("wraps", [0, 1, 2, 7])
def test_blocks_of_a_grid_arrive_from_where_they_were_sent(dims, wraps):
    periods = [bool(wraps >> dimension & 1) for dimension in range(len(dims))]
    everyone, wanted = grid(dims, periods)
    assert played(everyone, lambda one: len(one.destinations)) == wanted
    gathered = [[None if one is None else (one[0], 0) for one in row] for row in wanted]
    assert played(everyone, lambda one: 1) == gathered


@pytest.mark.parametrize("seed", range(20))
def test_several_edges_between_two_ranks_stay_in_order(seed):
    chance = Random(seed)
    size = chance.randrange(1, 6)
    edges = [(chance.randrange(size), chance.randrange(size)) for _ in range(chance.randrange(15))]
    outgoing = [[target for source, target in edges if source == rank] for rank in range(size)]
    incoming = [[source for source, target in edges if target == rank] for rank in range(size)]
    for one in incoming:
        chance.shuffle(one)
    everyone = [Neighbors.of_graph(tuple(a), tuple(b)) for a, b in zip(incoming, outgoing)]
    wanted = []
    for rank, sources in enumerate(incoming):
        places = {s: deque(k for k, target in enumerate(outgoing[s]) if target == rank) for s in set(sources)}
        wanted.append([(s, places[s].popleft()) for s in sources])
    assert played(everyone, lambda one: len(one.destinations)) == wanted
