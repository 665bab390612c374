"""Very many ranks at once cost what they cost one by one, to the last bit, and what the model does with nodes."""

import random

import numpy as np
import pytest

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import (
    ClusteredNetwork,
    LinearCost,
    PiecewiseCost,
    SharedCardCost,
    UniformNetwork,
)
from collectives.analysis.matching import ScheduleError
from collectives.analysis.rank_symmetry import RankSymmetry
from collectives.analysis.simulate import price
from collectives.analysis.simulate_large import VectorSimulator
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.semantics import MEANINGS, vector
from collectives.schedule.steps import Recv, Send, freeze, one, span
from collectives.schedule.topology import regular

ENTRIES = [(collective, name) for collective in catalog.CATALOG for name in catalog.names(collective)]


class Uneven:
    """Every edge has costs of its own, in each direction, and they rise where a rank sends and receives at once."""

    cards = None

    def __init__(self, size):
        chance = np.random.default_rng(size)
        self.alpha, self.beta = 0.1 + chance.random((size, size)), chance.random((size, size))

    def message(self, source, target, nbytes, both):
        return self.alpha[source, target] + nbytes * self.beta[source, target] * np.where(both, 1.7, 1.0)

    def combine(self, nbytes, both):
        return nbytes * np.where(both, 0.3, 0.45)


def cluster(size):
    """Nodes with different numbers of ranks, costs by length."""
    nodes = tuple(sorted(random.Random(size).randrange(3) for _ in range(size)))
    inside = SharedCardCost(LinearCost(1.3, 0.1), LinearCost(1.5, 0.3))
    return ClusteredNetwork(nodes, inside, PiecewiseCost((1, 20, 50), (3.0, 5.0, 11.0)), LinearCost(0, 0.21))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_the_crowd_ends_when_its_ranks_do(collective, name):
    chance = random.Random(3)
    for size in (1, 2, 3, 5, 9):
        nodes = regular(size, 3)
        for root in {0, size - 1} if MEANINGS[collective].rooted else {0}:
            for segments in (1,) if collective == "barrier" else (1, 3):
                schedules = catalog.build_all(collective, name, size, root, segments, nodes)
                generated = catalog.rounds_of(range(size), collective, name, size, root, segments, nodes)
                blocks = catalog.blocks(collective, name, size) * segments
                layout = ChunkLayout.packed([chance.randrange(9) for _ in range(blocks)])
                crowd = VectorSimulator(generated)
                for network in (Uneven(size), cluster(size), UniformNetwork(1.1, 0.7, 0.3)):
                    finish = price(schedules, layout, 4, network).finish
                    assert tuple(crowd.price(layout, 4, network).tolist()) == finish


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_bytes_of_all_ranks(collective, name):
    """The simulator counts what all ranks send, and formulas agree."""
    entry = catalog.find(collective, name)
    for size in (1, 2, 3, 5, 8, 13):
        schedules = catalog.build_all(collective, name, size)
        blocks = catalog.blocks(collective, name, size)
        sends = (step for rounds in schedules for steps in rounds for step in steps if isinstance(step, Send))
        chunks = sum(len(part) for step in sends for part in step.chunks)
        assert VectorSimulator(schedules).traffic(ChunkLayout.packed([3] * blocks), 4) == 12 * chunks
        if entry.total:
            assert chunks == catalog.evaluate(entry.total, size) * vector(collective, size, blocks)


def test_ranks_that_drift_are_aligned():
    """Empty rounds strewn in by chance change nothing."""
    chance = random.Random(5)
    schedules = catalog.build_all("allreduce", "rabenseifner", 13)
    drifting = [[steps for it in schedule for steps in [()] * chance.randrange(3) + [it]] for schedule in schedules]
    layout = ChunkLayout.packed([3] * 8)
    expected = price(schedules, layout, 4, Uneven(13)).finish
    assert tuple(VectorSimulator(drifting).price(layout, 4, Uneven(13)).tolist()) == expected


@pytest.mark.parametrize(
    ("schedules", "told"),
    [
        ([[[Send(1, one(0)), Send(1, one(1))]], [[Recv(0, one(0))], [Recv(0, one(1))]]], "in two rounds"),
        ([[[Send(1, one(0))]], []], "do not match"),
        ([[], [[Recv(0, one(0))]]], "do not match"),
    ],
)
def test_what_a_crowd_cannot_play_is_refused(schedules, told):
    with pytest.raises(ScheduleError, match=told):
        VectorSimulator([freeze(schedule) for schedule in schedules])


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_ranks_of_a_node_share_its_card(per_node):
    """All ranks of one node send to the other node at once: each gets its share of the card."""
    size = 2 * per_node
    schedules = [freeze([[Send(rank + per_node, span(0, size))]]) for rank in range(per_node)]
    schedules += [freeze([[Recv(rank, span(0, size))]]) for rank in range(per_node)]
    network = ClusteredNetwork(regular(size, per_node), LinearCost(1, 1), LinearCost(100, 2), LinearCost(0, 0))
    layout = ChunkLayout.packed([1] * size)
    expected = (100 + per_node * size * 2,) * size
    assert price(schedules, layout, 1, network).finish == expected
    assert tuple(VectorSimulator(schedules).price(layout, 1, network)) == expected


def test_a_root_that_sends_to_all_uses_the_cards_alone():
    """One message after another leaves: nobody shares the card, though all receive in the same round."""
    network = ClusteredNetwork(regular(8, 4), LinearCost(0, 0), LinearCost(100, 2), LinearCost(0, 0))
    layout = ChunkLayout.packed([1] * 8)
    assert price(catalog.build_all("broadcast", "direct", 8), layout, 1, network).seconds == 4 * (100 + 16)


def test_curves_are_straight_between_what_was_measured_and_beyond():
    curve = PiecewiseCost((10, 20, 40), (1.0, 2.0, 6.0))
    assert [float(curve(n)) for n in (0, 10, 15, 20, 30, 40, 50)] == [1, 1, 1.5, 2, 4, 6, 8]
    assert float(PiecewiseCost((8,), (3.0,))(1000)) == 3
    assert float(PiecewiseCost((8, 16), (3.0, 2.0))(1000)) == 2, "what fell by chance does not fall for ever"
    assert SharedCardCost(curve, LinearCost(0, 1))(np.array([15, 15]), np.array([False, True])).tolist() == [1.5, 15]


def test_65536_ranks():
    """A log-round schedule is built and priced in seconds, and costs what its formula says."""
    size, nbytes = 1 << 16, 1 << 20
    crowd = VectorSimulator(catalog.rounds_of(range(size), "broadcast", "mst", size))
    layout = ChunkLayout.packed((nbytes // size,) * size)
    seconds = crowd.price(layout, 1, UniformNetwork(1024.0, 2.0, 0.0)).max()
    assert seconds == catalog.find("broadcast", "mst").seconds(size, nbytes, 1024, 2, 0)


SYMMETRIC = [
    (collective, name)
    for collective, entries in catalog.CATALOG.items()
    for name, entry in entries.items()
    if entry.symmetry
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("collective", "name"), SYMMETRIC)
def test_symmetric_schedules(collective, name):
    """Steps of one node of each kind, moved to the others, give the times of all ranks' steps, to the last bit."""
    placed, found = catalog.find(collective, name).placed, 0
    for size, per_node in [*((size, 1) for size in (*range(2, 18), 32)), (8, 2), (12, 3), (12, 4), (16, 4), (10, 4)]:
        nodes = regular(size, per_node)
        symmetry = catalog.symmetry_of(collective, name, size, nodes)
        if symmetry is None:
            continue
        found += 1
        every = list(catalog.rounds_of(range(size), collective, name, size, nodes=nodes))
        assert len(every) == symmetry.size and symmetry.per_node == (per_node if placed else 1)
        few = catalog.rounds_of(symmetry.ranks, collective, name, size, nodes=nodes)
        blocks = catalog.blocks(collective, name, size)
        layout = ChunkLayout.packed([3 + number * number for number in range(blocks)])
        network = ClusteredNetwork(nodes, LinearCost(1.0, 0.25), LinearCost(8.0, 0.5), LinearCost(0, 0.125))
        times = [VectorSimulator(*given).price(layout, 4, network) for given in ((every,), (few, symmetry))]
        assert times[0].tolist() == times[1].tolist()
    assert found >= 4


def test_ranges_that_a_move_would_tear():
    for move, part in (("exclusive or", range(1, 3)), ("exclusive or", range(0, 3)), ("rotation", range(3, 6))):
        with pytest.raises(ValueError, match="chunks "):
            list(RankSymmetry(move, 4, 1, 1).moved_chunks(part, 0))
