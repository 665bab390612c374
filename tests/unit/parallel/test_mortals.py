"""No acknowledged update is lost and none is applied twice, whoever dies at what message; nobody waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_deaths import Training

RULES = ("bsp", "ssp:1", "async")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("servers, replicas", [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3)])
def test_nobody_dies(rule, servers, replicas):
    training = Training(servers, 2, replicas, rule, steps=2, parts=4, seed=1, deaths={})
    training.check()
    assert len(training.done) == 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("victim", range(4))
def test_one_dies_at_every_few_turns(rule, victim):
    last = Training(2, 2, 2, rule, steps=1, parts=2, seed=victim, deaths={}).world.turns
    for moment in range(0, last, 37):
        Training(2, 2, 2, rule, steps=1, parts=2, seed=victim, deaths={victim: moment}).check()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_anybody_dies_at_any_time(data):
    servers, workers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    replicas = data.draw(st.integers(1, servers))
    deaths = st.dictionaries(st.integers(0, servers + workers - 1), st.integers(0, 1500), max_size=3)
    seed, rule = data.draw(st.integers(0, 1 << 30)), data.draw(st.sampled_from(RULES))
    parts = data.draw(st.sampled_from([1, 2, 4]))
    Training(servers, workers, replicas, rule, 2, parts, seed, data.draw(deaths)).check()


FOUND = [
    (2, 3, 1, "bsp", 2, 2, 0, {2: 150}),  # a part that comes back is not for who is a step behind
    (4, 4, 4, "ssp:0", 2, 2, 577545312, {5: 1197, 7: 760}),  # all clocks say step 1, but its update is not made
    (3, 4, 2, "ssp:1", 2, 2, 579271750, {6: 1675, 4: 1737, 1: 2233}),  # a push is asked again after a rest
    (3, 2, 2, "ssp:0", 3, 1, 1017418204, {1: 701, 4: 707}),  # who was to call workers off is dead
    (2, 2, 2, "bsp", 2, 2, 484752728, {1: 344, 3: 324}),  # called off between asking for a part and getting one
    (4, 4, 2, "ssp:0", 2, 1, 8653857, {4: 175, 3: 459, 0: 340}),  # sums for a chain that is lost
]


@pytest.mark.parametrize("servers, workers, replicas, rule, steps, parts, seed, deaths", FOUND)
def test_what_once_went_wrong(servers, workers, replicas, rule, steps, parts, seed, deaths):
    Training(servers, workers, replicas, rule, steps, parts, seed, deaths).check()
