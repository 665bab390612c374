"""Dispatch as schedules: proved for many placements, and the messages are those that routes send."""

import numpy as np
import pytest
from support import thread_ranks

from collectives.analysis.matching import ScheduleError
from collectives.schedule.chunks import even
from collectives.schedule.steps import Reduce, Send
from parallel.nn.expert_group import Assignments
from parallel.sharding.expert.dispatch import Dispatch
from parallel.sharding.expert.dispatch_schedule import combine_schedule, dispatch_schedule
from parallel.sharding.expert.hierarchical_route import relays

PLACEMENTS = [(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 1, 2), (0, 0, 1, 1, 2, 2, 3, 3)]
EXPERTS = 8


def choices(ranks, k, seed=0):
    """Other numbers of tokens on every rank, and other experts."""
    random = np.random.default_rng(seed)
    return [
        np.array([random.permutation(EXPERTS)[:k] for _ in range((rank * 3 + 2) % 7)], int).reshape(-1, k)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("nodes", PLACEMENTS)
@pytest.mark.parametrize("route", ["direct", "hierarchical"])
@pytest.mark.parametrize("k", [1, 4, EXPERTS])
def test_proof_and_copies(k, route, nodes):
    ranks = len(nodes)
    chosen, owners = choices(ranks, k), even(EXPERTS, ranks)
    schedule = dispatch_schedule(chosen, owners, route, nodes)
    schedule.prove()
    of_expert = np.repeat(nodes, owners)
    tokens = [(nodes[rank], of_expert[experts].tolist()) for rank in range(ranks) for experts in chosen[rank]]
    kind = set if route == "hierarchical" else list
    assert schedule.crossings(nodes) == sum(there != home for home, away in tokens for there in kind(away))


@pytest.mark.parametrize("nodes", PLACEMENTS)
@pytest.mark.parametrize("route", ["direct", "hierarchical"])
@pytest.mark.parametrize("k", [1, 4, EXPERTS])
def test_results_take_the_same_messages_backwards(k, route, nodes):
    """Every rank gets the sum of its tokens' results, by as many rows between nodes."""
    chosen, owners = choices(len(nodes), k), even(EXPERTS, len(nodes))
    back = combine_schedule(chosen, owners, route, nodes)
    back.prove()
    assert back.crossings(nodes) == dispatch_schedule(chosen, owners, route, nodes).crossings(nodes)
    assert [len(one) for one in back.outputs] == list(map(len, chosen))
    assert sum(map(len, back.inputs)) == k * sum(map(len, chosen))


@pytest.mark.parametrize("route", ["direct", "hierarchical"])
def test_a_result_that_is_not_added_is_found(route):
    """A term of the last sum left out."""
    back = combine_schedule(choices(4, 4), (2,) * 4, route, (0, 0, 1, 1))
    cut = [one[:-1] if any(isinstance(step, Reduce) for step in one[-1]) else one for one in back.schedules]
    with pytest.raises(ScheduleError, match="does not get chunk"):
        back._replace(schedules=cut).prove()


def test_a_missing_message_is_found():
    schedule = dispatch_schedule(choices(4, 4), (2,) * 4, "hierarchical", (0, 0, 1, 1))
    silent = [tuple(tuple(step for step in steps if not isinstance(step, Send)) for steps in schedule.schedules[0])]
    with pytest.raises(ScheduleError):
        schedule._replace(schedules=silent + schedule.schedules[1:]).prove()


@pytest.mark.parametrize("nodes", PLACEMENTS[1:])
@pytest.mark.parametrize("route", ["direct", "hierarchical"])
def test_routes_send_the_messages_of_the_schedule(route, nodes):
    """Rows that every rank sends in each exchange of the forward pass."""
    ranks, width = len(nodes), 2048
    chosen, owners = choices(ranks, 4, seed=3), even(EXPERTS, ranks)

    def sent(axis):
        axis.comm.nodes = nodes
        weights = np.zeros((len(chosen[axis.rank]), EXPERTS), np.float32)
        np.put_along_axis(weights, chosen[axis.rank], 1, axis=1)
        plan = Dispatch(route).plan(axis, owners, Assignments.from_weights(weights))
        plan.send(np.ones((len(weights), width), np.float32))
        plan.receive()
        return [nbytes // (4 * width) for kind, nbytes in axis.comm.calls if kind == "alltoallv"]

    schedule = dispatch_schedule(chosen, owners, route, nodes)
    messages = [
        [sum(len(run) for step in steps if isinstance(step, Send) for run in step.chunks) for steps in one]
        for one in schedule.schedules
    ]
    found = thread_ranks.run(ranks, sent, "ep")
    assert [[rows for rows in one if rows] for one in found] == [[rows for rows in one if rows] for one in messages]


def test_relays_share_the_load():
    """Every rank of the wider node has a relay, and every rank of the narrower one relays for as many."""
    found = relays((0, 0, 0, 0, 1, 1))
    assert np.bincount(found[:4, 1]).tolist() == [0, 0, 0, 0, 2, 2] and found[4:, 0].tolist() == [0, 2]
