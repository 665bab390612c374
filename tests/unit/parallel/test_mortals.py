"""No acknowledged update is lost and none is applied twice, whoever dies at what message; nobody waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mortals import Training

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


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_anybody_dies_at_any_time(data):
    servers, workers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    replicas = data.draw(st.integers(1, servers))
    deaths = st.dictionaries(st.integers(0, servers + workers - 1), st.integers(0, 1500), max_size=3)
    seed, rule = data.draw(st.integers(0, 1 << 30)), data.draw(st.sampled_from(RULES))
    parts = data.draw(st.sampled_from([1, 2, 4]))
    Training(servers, workers, replicas, rule, 2, parts, seed, data.draw(deaths)).check()
