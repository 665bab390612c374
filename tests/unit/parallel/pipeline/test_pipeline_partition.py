"""Cuts are the best of all that there are; searches keep to their limit and say what comes closest."""

from itertools import combinations, pairwise, product
from random import Random

import pytest

from parallel.pipeline.schedule.schedule_search import search
from parallel.pipeline.schedule.stage_partition import LayerCost, MemoryLimit, partition, replicate


def every_way(count, parts):
    for inner in combinations(range(1, count), parts - 1):
        yield [range(start, stop) for start, stop in pairwise([0, *inner, count])]


def rank(layers, cuts):
    """What the cuts are compared by: the slowest, the squares, then the longest first parts."""
    times = [sum(layers[at].seconds for at in cut) for cut in cuts]
    return max(times), sum(time * time for time in times), [-len(cut) for cut in cuts]


def takes(layers, cuts, kept):
    return [
        times * sum(layers[at].activations for at in cut) + sum(layers[at].parameters for at in cut)
        for times, cut in zip(kept, cuts)
    ]


@pytest.mark.parametrize("limited", [False, True])
def test_no_cuts_are_better(limited):
    chance, refused, found = Random(7), 0, 0
    for _ in range(300):
        count = chance.randrange(1, 9)
        parts = chance.randrange(1, count + 1)
        layers = [LayerCost(*(chance.randrange(9) for _ in range(5))) for _ in range(count)]
        kept = [chance.randrange(1, 4) for _ in range(parts)]
        limit = MemoryLimit(chance.randrange(10, 120), kept) if limited else None
        ways = [cuts for cuts in every_way(count, parts) if not limit or max(takes(layers, cuts, kept)) <= limit.nbytes]
        if ways:
            best = min(ways, key=lambda cuts: rank(layers, cuts))
            assert partition(layers, parts, limit) == best
            found += 1
        else:
            with pytest.raises(ValueError, match="no cuts of"):
                partition(layers, parts, limit)
            refused += 1
    assert found > 50 and (refused > 10) == limited


def test_many_layers():
    layers = [LayerCost(1, 2) for _ in range(100)]
    assert [len(cut) for cut in partition(layers, 16)] == [7] * 4 + [6] * 12


def test_no_cuts_and_ranks_are_better():
    """Held against all ways to cut some layers and to divide the ranks."""
    random = Random(0)
    for _ in range(30):
        layers = [
            LayerCost(random.randint(1, 9), random.randint(1, 9), parameters=random.randint(0, 9)) for _ in range(5)
        ]
        ranks, exchange = random.randint(1, 5), random.choice([0, 1, 3])

        def slowest(cuts, counts, layers=layers, exchange=exchange):
            each = [(sum(layer.seconds for layer in layers[a:b]), layers[a:b], r) for (a, b), r in zip(cuts, counts)]
            return max(max(t, 2 * (r - 1) * exchange * sum(one.parameters for one in some)) / r for t, some, r in each)

        ways = [
            (list(pairwise((0, *inner, 5))), counts)
            for parts in range(1, min(5, ranks) + 1)
            for inner in combinations(range(1, 5), parts - 1)
            for counts in product(range(1, ranks + 1), repeat=parts)
            if sum(counts) == ranks
        ]
        cuts, counts = replicate(layers, ranks, exchange)
        found = slowest([(cut.start, cut.stop) for cut in cuts], counts)
        assert sum(counts) == ranks and found == min(slowest(*way) for way in ways)
        assert len(counts) == min(len(way[1]) for way in ways if slowest(*way) == found)
    with pytest.raises(ValueError, match="expected at least 1, and layers"):
        replicate([], 2)


def test_cuts_for_unequal_ranks():
    layers = [LayerCost(forward=1, backward=2) for _ in range(6)]
    assert partition(layers, 2, ranks=(2, 1)) == [range(0, 4), range(4, 6)]
    assert partition(layers, 2, ranks=(1, 2)) == [range(0, 2), range(2, 6)]


@pytest.mark.parametrize(
    "count, parts, told",
    [
        (3, 4, "a model of 3 layers cannot be cut in 4 parts"),
        (0, 1, "a model of 0 layers cannot be cut in 1 parts"),
        (3, 0, "parts: expected at least 1, found 0"),
    ],
)
def test_wrong_numbers_of_parts_are_refused(count, parts, told):
    with pytest.raises(ValueError, match=told):
        partition([LayerCost(1, 1)] * count, parts)


# ------------------------------------------------------------------------------------------ the search


def model(samples):
    """Eight layers; a micro-batch takes a unit, and one more for every sample."""
    each = 1 + samples
    return [LayerCost(each, each, each, activations=10 * samples, parameters=5)] * 8


def of_1f1b(choices):
    return next(choice for choice in choices if choice.schedule == "1f1b")


def test_the_fastest_comes_first_and_all_keep_to_the_limit():
    free = search(model, stages=4, samples=16)
    assert [choice.seconds for choice in free] == sorted(choice.seconds for choice in free)
    assert {choice.schedule for choice in free} >= {"gpipe", "1f1b", "interleaved", "zb-v", "dualpipe"}
    assert not {"pipedream", "pipedream-2bw"} & {choice.schedule for choice in free}
    limit = max(free[0].nbytes) - 1
    tight = search(model, stages=4, samples=16, limit=limit)
    assert 0 < len(tight) < len(free)
    assert all(max(choice.nbytes) <= limit for choice in tight)
    assert tight[0].seconds >= free[0].seconds


def test_a_step_is_as_long_as_the_simulator_says():
    """One sample a micro-batch: 2 layers of 3 * 2 units a stage, 16 micro-batches and 3 more."""
    choice = of_1f1b(search(model, stages=4, samples=16, microbatches=[16]))
    assert choice.seconds == (16 + 3) * 12 and choice.cuts == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert choice.nbytes == tuple(2 * 5 + 20 * (4 - stage) for stage in range(4))


def test_memory_moves_the_cuts():
    """The first layers keep the most: with a limit the first stage gets fewer of them than its share of the time."""
    layers = [LayerCost(1, 1, 1, activations=10) for _ in range(8)]
    free = of_1f1b(search(lambda samples: layers, 2, 8, microbatches=[8]))
    assert free.cuts == [range(0, 4), range(4, 8)] and free.nbytes == (80, 40)
    tight = of_1f1b(search(lambda samples: layers, 2, 8, limit=60, microbatches=[8]))
    assert tight.cuts == [range(0, 3), range(3, 8)] and tight.nbytes == (60, 50)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"limit": 20}, "no schedule keeps 20 bytes on a stage; .* with 16 micro-batches takes"),
        ({"microbatches": [5]}, "microbatches: expected a divisor of 16 samples, found 5"),
        ({"samples": 0}, "samples: expected at least 1, found 0"),
        ({"stages": 9}, "a model of 8 layers cannot be cut in 9 parts"),
    ],
)
def test_searches_that_find_nothing_say_so(options, told):
    with pytest.raises(ValueError, match=told):
        search(model, **{"stages": 4, "samples": 16, **options})
