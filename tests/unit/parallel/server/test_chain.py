"""No update that was said to be safe is lost, none is applied twice, whoever dies at whatever message."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import World

from parallel.server.chain import Ring


def run(world, pick, deaths=()):
    """Let things happen until nothing can; `deaths` are (after so many, rank)."""
    deaths, happened = sorted(deaths), 0
    while True:
        while deaths and deaths[0][0] <= happened:
            rank = deaths.pop(0)[1]
            if rank not in world.dead:
                world.kill(rank)
        choices = world.choices()
        if not choices:
            if not deaths:
                break
            happened = deaths[0][0]
            continue
        world.happen(*pick(choices))
        happened += 1
    world.settled()
    return happened


def enough(world, servers, replicas):
    """Whether fewer servers died than there are replicas, so that nothing may be broken."""
    return len(set(range(servers)) & world.dead) < replicas


@pytest.mark.parametrize("servers, replicas", [(1, 1), (2, 2), (3, 2), (3, 3), (4, 3)])
@pytest.mark.parametrize("seed", range(8))
def test_one_death_at_every_message(servers, replicas, seed):
    last = run(World(servers, replicas, 2, 3), random.Random(seed).choice)
    for victim in range(servers + 2):
        for after in range(last + 1):
            world = World(servers, replicas, 2, 3)
            run(world, random.Random(seed).choice, [(after, victim)])
            assert not world.broken or not enough(world, servers, replicas)


@pytest.mark.parametrize("servers, replicas", [(3, 3), (4, 3)])
def test_two_deaths_at_every_two_messages(servers, replicas):
    last = run(World(servers, replicas, 1, 2), random.Random(0).choice)
    for first in range(last + 1):
        for second in range(first, last + 8):
            for victims in ((0, 1), (1, 0), (1, 2), (0, 2), (2, 1)):
                world = World(servers, replicas, 1, 2)
                run(world, random.Random(first * 100 + second).choice, zip((first, second), victims))
                assert not world.broken


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_order_any_deaths(data):
    servers = data.draw(st.integers(1, 5))
    replicas = data.draw(st.integers(1, servers))
    workers = data.draw(st.integers(1, 3))
    world = World(servers, replicas, workers, data.draw(st.integers(0, 4)))
    deaths = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, servers + workers - 1)), max_size=5))
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    run(world, rng.choice, deaths)
    assert not world.broken or not enough(world, servers, replicas)


def test_every_order_of_a_small_case():
    """Two servers, two replicas, one worker with one update; one death at any time: all orders of events."""
    seen, stack = set(), [(World(2, 2, 1, 1), False)]
    while stack:
        world, killed = stack.pop()
        state = snapshot(world)
        if state in seen:
            continue
        seen.add(state)
        nexts = [(choice, None) for choice in world.choices()]
        nexts += [] if killed else [(None, victim) for victim in (0, 1)]
        if not world.choices():
            world.settled()
            assert not world.broken
        for choice, victim in nexts:
            after = copy.deepcopy(world)
            after.kill(victim) if choice is None else after.happen(*choice)
            stack.append((after, killed or choice is None))
    assert len(seen) > 50


def snapshot(world):
    """All that decides what a world can still do."""
    members = [
        (m._ring.chain, m._count, m._safe, tuple(m._log), tuple(m._asks), tuple(m._reads), tuple(m._early), frozenset(m._with_state))
        for m in world.members.values()
    ]
    clients = [(c._ring.chain, tuple(c.unsafe), tuple(c.unanswered)) for c in world.clients.values()]
    lines = tuple((pair, tuple(repr(message) for message in line)) for pair, line in sorted(world.lines.items()))
    return repr((members, clients, lines, sorted(world.notices), sorted(world.dead)))


def test_ring():
    ring = Ring([5, 6, 7], 2)
    assert ring.neighbours(5) == (None, 6) and ring.neighbours(6) == (5, None) and ring.neighbours(7) == (None, None)
    assert ring.lose(6) and not ring.lose(6)
    assert ring.chain == (5, 7)
