"""The choice of an algorithm: the cheapest that can do the call, from what all ranks know; measured beats the model."""

import math
import sys

import pytest

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import UniformNetwork
from collectives.analysis.simulate import price
from collectives.errors import InvalidArgument
from collectives.schedule.chunks import ChunkLayout, even
from collectives.schedule.semantics import MEANINGS, vector
from collectives.selection import select, shared_link
from collectives.selection.cost_model import BUILT_IN, Costs, measured_costs, network, uniform_network
from collectives.selection.exchanges import EXCHANGE, LONG_CALL, exchange_seconds
from collectives.selection.select import CallTraits, Selector, formula
from collectives.selection.shared_cores import (
    BETA,
    CRITICAL,
    MESSAGE,
    NETWORK_COPY,
    NETWORK_WORK,
    RESUME,
    TURN,
    UNCACHED,
    core_time,
    predict_on_shared_cores,
    total_work,
    without_core_time,
)
from collectives.selection.shared_link import predict_on_shared_link
from collectives.selection.timing_table import NATIVE, AlgorithmChoice, TimingKey, TimingTable
from collectives.transport.memory.copy_speed import MessageSpeed
from collectives.transport.mpi.network_speed import NetworkSpeed

COLLECTIVES = list(catalog.CATALOG)
TWO_NODES = (0, 0, 0, 0, 1, 1, 1, 1)


def choose(collective, size, nbytes, ordered=False, local_counts=False, nodes=None, costs=BUILT_IN):
    """Choice of the cost model."""
    selector = Selector(size, nodes, TimingTable(costs))
    return AlgorithmChoice(*selector.decide(CallTraits(collective, nbytes, ordered, local_counts))[:2])


def able(collective, ordered=False):
    """Those that look at no placement."""
    entries = catalog.CATALOG[collective].items()
    return {n: e for n, e in entries if e.alike and not e.placed and (e.ordered or not ordered)}


@pytest.mark.parametrize(
    ("collective", "ordered"), [(c, ordered) for c in COLLECTIVES for ordered in (False, True) if able(c, ordered)]
)
def test_nothing_that_can_do_it_is_cheaper(collective, ordered):
    """Neither uncut, nor in any number of segments up to the limit, near the limits of doubling."""
    entries = able(collective, ordered)
    for size in (1, 2, 3, 8, 64):
        for nbytes in (0, 8, 4096, 1 << 20, 1 << 28):
            chosen = choose(collective, size, nbytes, ordered)
            seconds = formula(collective, chosen.algorithm, size, nbytes, chosen.segments, BUILT_IN.shared)
            for name in entries:
                for segments in (1, 2, 4, 8, 16, 32, 64):
                    other = formula(collective, name, size, nbytes, segments, BUILT_IN.shared)
                    assert seconds <= other * (1 + 1e-12), (chosen, name, segments)


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if MEANINGS[c].reduces])
def test_an_ordered_operation_gets_an_algorithm_that_keeps_order(collective):
    for size in (2, 3, 7, 16):
        for nbytes in (0, 8, 1 << 24):
            assert catalog.find(collective, choose(collective, size, nbytes, ordered=True).algorithm).ordered


@pytest.mark.parametrize("collective", ["scatter", "gather"])
def test_where_lengths_are_private_bytes_do_not_matter(collective):
    for size in (2, 5, 64):
        assert len({choose(collective, size, nbytes, local_counts=True) for nbytes in (0, 8, 1 << 10, 1 << 28)}) == 1
    assert catalog.find(collective, choose(collective, 5, 0, local_counts=True).algorithm).private


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_short_messages_take_few_rounds_and_long_ones_little_volume(collective):
    for size in (8, 13, 64):
        entries = able(collective)
        short, long = choose(collective, size, 8), choose(collective, size, 1 << 34)
        fewest = min(catalog.evaluate(entry.rounds, size) for entry in entries.values())
        assert catalog.evaluate(entries[short.algorithm].rounds, size) == fewest
        assert short.segments == 1
        bytes_only = UniformNetwork(0, 1, 0)
        least = min(
            formula(collective, name, size, 1 << 34, segments, bytes_only)
            for name in entries
            for segments in (1, select.MOST_SEGMENTS)
        )
        assert formula(collective, long.algorithm, size, 1 << 34, long.segments, bytes_only) <= 1.1 * least


@pytest.mark.parametrize(("size", "nbytes"), [(8, 1 << 20), (5, 1 << 22), (16, 1 << 16)])
def test_pipelines_are_cut_by_the_square_root_law(size, nbytes):
    """The chain's best number of segments is sqrt((p-2) n beta / alpha): doubling comes within a factor of two."""
    wire = UniformNetwork(1e-6, 1e-9, 0)
    segments, seconds = select.best_segments(lambda k: formula("broadcast", "chain", size, nbytes, k, wire), 1 << 20)
    best = ((size - 2) * nbytes * wire.beta / wire.alpha) ** 0.5
    assert best / 2 <= segments <= best * 2
    assert seconds <= min(formula("broadcast", "chain", size, nbytes, k, wire) for k in (1, 2, 4, 8, 16, 32, 64, 128))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_formulas_for_segments_are_near_the_clock(collective):
    """What the model takes is played on the clock: it lies within 40 % of what the formula said."""
    wire = BUILT_IN.shared._replace(overhead=None)  # the clock knows no messages under way at once
    for size in (4, 7):
        for nbytes in (1 << 16, 1 << 22):
            chosen = choose(collective, size, nbytes)
            said = formula(collective, chosen.algorithm, size, nbytes, chosen.segments, wire)
            played = select.predict(collective, chosen.algorithm, size, nbytes, chosen.segments)
            assert 0.6 * said <= played <= 1.4 * said, chosen


# ------------------------------------------------------------------------------------------ wires and placements


def test_each_edge_costs_what_its_wire_does():
    costs = Costs(UniformNetwork(1, 2, 3), UniformNetwork(10, 20, 30))
    assert uniform_network(None, costs) == costs.shared
    assert uniform_network((0, 1, 2), costs) == costs.network
    mixed = network((0, 0, 1), costs)
    assert (mixed.message(0, 1, 5, False), mixed.message(1, 2, 5, False), mixed.combine(5, False)) == (11, 110, 15)


def test_messages_under_way_at_once_cost_their_overhead():
    wire = UniformNetwork(alpha=10, beta=0, gamma=0, overhead=1)
    assert [formula("alltoall", name, 8, 64, 1, wire) for name in ("direct", "pairwise", "bruck")] == [16, 70, 30]
    assert formula("allreduce", "direct", 8, 64, 1, wire) == 2 * 16
    for same in (wire._replace(overhead=None), wire._replace(overhead=20)):  # never more than a message alone
        assert formula("alltoall", "direct", 8, 64, 1, same) == 70


def test_the_wire_flips_the_choice():
    """Many cheap messages within a node, few dear ones between nodes."""
    cheap, dear = UniformNetwork(1e-9, 1e-9, 0), UniformNetwork(1e-2, 1e-9, 0)
    costs = Costs(cheap, dear)
    on_a_node = choose("broadcast", 16, 1 << 20, costs=costs)
    between = choose("broadcast", 16, 1 << 20, nodes=tuple(range(16)), costs=costs)
    assert on_a_node.segments > 1
    assert between == ("mst", 1)


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "reduce", "allgather", "reduce_scatter"])
def test_a_slow_network_makes_it_look_at_the_placement(collective):
    for nbytes in (8, 1 << 20):
        name = choose(collective, 8, nbytes, nodes=TWO_NODES).algorithm
        assert catalog.find(collective, name).placed
        assert not catalog.find(collective, choose(collective, 8, nbytes).algorithm).placed


def test_rank_order_holds_on_scattered_placements_too():
    scattered = (0, 1) * 4
    assert catalog.find("allreduce", choose("allreduce", 8, 8, True, nodes=scattered).algorithm).keeps_order(scattered)


def test_large_clusters_are_priced_by_a_part(monkeypatch):
    nodes = tuple(rank // 8 for rank in range(4096))
    assert select.sample(nodes, 64) == nodes[:64]
    assert len(select.sample(tuple(rank // 1000 for rank in range(3000)), 64)) == 64
    assert select.sample((0, 1, 1, 0), 64) == (0, 1, 1, 0)
    select.predict.cache_clear()
    ranks = []
    monkeypatch.setattr(select, "price", lambda steps, *rest: ranks.append(len(steps)) or price(steps, *rest))
    choose("allreduce", 4096, 1 << 20, nodes=nodes)
    assert 0 < max(ranks) <= select.SIMULATED_RANKS


def test_where_ranks_share_cores_the_work_of_all_ranks_counts():
    n, work = 1 << 20, total_work("broadcast", "linear", 4)
    assert work == (3, 0, 3, 3.0, 0.0, 0.0)
    expected = (RESUME + MESSAGE) * 3 / 2 + n * BETA * (3 / 2 + CRITICAL * 3)
    assert predict_on_shared_cores("broadcast", "linear", 4, n, 2) == pytest.approx(expected)
    gathered = (RESUME + 3 * MESSAGE) / 2 + TURN + n * BETA * 3 / 4 * (1 / 2 + CRITICAL)
    assert predict_on_shared_cores("gather", "linear", 4, n, 2) == pytest.approx(gathered)
    long = RESUME * 3 / 2 + MESSAGE * 3 / 2 + 8 * n * UNCACHED * BETA * (3 / 2 + CRITICAL * 3)
    assert predict_on_shared_cores("broadcast", "linear", 4, 8 * n, 2) == pytest.approx(long)
    alone, shared = Selector(4), Selector(4, cores=2)
    assert alone.decide(CallTraits("allreduce", 8)).algorithm == "recursive_doubling"
    assert shared.decide(CallTraits("allreduce", 8)).choice == ("linear", 1)  # half of the waits
    assert alone.decide(CallTraits("broadcast", 8 * n)).segments > 1
    assert {shared.decide(CallTraits(name, 8 * n)).segments for name in catalog.CATALOG} == {1}


def test_where_emulated_nodes_share_cores_the_messages_of_all_ranks_count():
    n, nodes, wire = 1 << 20, (0, 1, 2, 3), BUILT_IN.network
    waited = without_core_time(wire)
    work = NETWORK_WORK * wire.alpha
    assert waited == (wire.alpha - work, NETWORK_COPY, wire.gamma, 0.0)
    assert without_core_time(wire._replace(beta=4e-9)).beta == pytest.approx(4e-9 - NETWORK_COPY)
    expected = 3 * (work + n * NETWORK_COPY)
    assert core_time("broadcast", "linear", 4, n, 1, waited) == pytest.approx(expected)
    alone, shared = Selector(4, nodes), Selector(4, nodes, cores=2)
    for collective, few in (("allgather", "recursive_doubling"), ("reduce_scatter", "recursive_halving")):
        call = CallTraits(collective, 8192)
        assert (alone.decide(call).algorithm, shared.decide(call).algorithm) == ("direct", few)
        formula_alone = formula(collective, few, 4, 8192, 1, waited)
        few_messages = core_time(collective, few, 4, 8192, 1, waited)
        assert shared.decide(call).seconds == pytest.approx(formula_alone + few_messages / 2 + shared.call)
    assert shared.decide(CallTraits("broadcast", 64 * n)).segments > 1
    pairs = Selector(4, (0, 0, 1, 1), cores=2)  # messages within nodes cost less
    assert pairs.decide(call) == Selector(4, (0, 0, 1, 1)).decide(call)


def test_long_messages_that_cross_between_nodes_cost_more():
    n, wire = 1 << 20, BUILT_IN.network
    assert total_work("allgather", "recursive_doubling", 4).exchanged == 3
    assert total_work("alltoall", "pairwise", 4).exchanged == 1  # of three rounds one is of pairs
    expected = EXCHANGE * n * 3 / 4 * wire.beta
    assert exchange_seconds("allgather", "recursive_doubling", 4, n, wire) == pytest.approx(expected)
    assert exchange_seconds("allgather", "recursive_doubling", 4, LONG_CALL - 1, wire) == 0.0
    assert exchange_seconds("allgather", "ring", 4, n, wire) == 0.0
    for selector in (Selector(4, (0, 1, 2, 3)), Selector(4, (0, 1, 2, 3), cores=2)):
        for collective in ("allgather", "allreduce", "reduce_scatter"):
            assert selector.decide(CallTraits(collective, 4 * n)).algorithm == "ring"
    assert Selector(4).decide(CallTraits("allgather", 4 * n)).algorithm != "ring"


def test_where_ranks_share_a_link_the_bytes_of_all_messages_count():
    n = 1 << 28
    expected = shared_link.MESSAGE + 2 * shared_link.OVERHEAD + 3 * n * shared_link.BETA
    assert predict_on_shared_link("broadcast", "linear", 4, n) == pytest.approx(expected)
    for size in (2, 3, 4, 8):
        selector = Selector(size, shares_link=True)
        for name, entries in catalog.CATALOG.items():
            chosen = selector.decide(CallTraits(name, n))
            able = [one for one, entry in entries.items() if not entry.placed and entry.alike]
            least = min(total_work(name, one, size).moved for one in able)
            assert (chosen.segments, total_work(name, chosen.algorithm, size).moved) == (1, least)
    assert Selector(4, shares_link=True).decide(CallTraits("allreduce", n)).algorithm == "direct"
    assert Selector(4, shares_link=True).decide(CallTraits("allreduce", 8)).algorithm == "recursive_doubling"


def test_measured_speed_becomes_rounded_costs():
    near, disturbed = (MessageSpeed(round_trip, 1.55e-10, 0.4e-10, 1.6e-10) for round_trip in (0.35e-6, 0.45e-6))
    costs = measured_costs(near, NetworkSpeed())
    assert costs == measured_costs(disturbed, NetworkSpeed())
    assert costs == BUILT_IN._replace(shared=BUILT_IN.shared._replace(alpha=2**-20, beta=2**-32.5))
    by_address = measured_costs(MessageSpeed(1e-6, 1.0, 1.0, 2**-31), NetworkSpeed())
    assert by_address.shared[:2] == (2**-19.5, 2**-31)
    by_cells = measured_costs(MessageSpeed(1e-6, 2**-32, 2**-32, math.inf), NetworkSpeed())  # no reads of peers' memory
    assert by_cells.shared.beta == 2**-31
    for unknown in (MessageSpeed(), MessageSpeed(math.inf, 1e-10, 1e-10, 1e-10), MessageSpeed(1e-6, *3 * [math.inf])):
        assert measured_costs(unknown, NetworkSpeed()) == BUILT_IN
    slow = measured_costs(MessageSpeed(), NetworkSpeed(message=1e-4, byte=4e-9))
    assert slow.network == (2**-13.5, 2**-28, BUILT_IN.network.gamma, 2**-15.5)
    assert slow.shared == BUILT_IN.shared


def test_measured_costs_decide_only_where_bits_cannot_differ():
    cheap = Costs(UniformNetwork(1e-9, BUILT_IN.shared.beta, BUILT_IN.shared.gamma))
    for collective in COLLECTIVES:
        known, measured = Selector(16), Selector(16, costs=cheap)
        choices = [s.decide(CallTraits(collective, 1 << 20)) for s in (known, measured)]
        assert (choices[0][:2] == choices[1][:2]) or not MEANINGS[collective].reduces, collective
        assert choices[1].seconds < choices[0].seconds  # expected at measured costs in any case
    pair = [Selector(2, costs=costs).decide(CallTraits("allreduce", 8)).seconds for costs in (BUILT_IN, cheap)]
    assert pair[1] < pair[0]
    call = CallTraits("broadcast", 1 << 20)
    tuned = Costs(shared=BUILT_IN.shared._replace(beta=1e-10))
    known = Selector(16, None, TimingTable(tuned), costs=cheap)
    assert known.decide(call) == Selector(16, None, TimingTable(tuned)).decide(call)


def test_a_table_without_a_wire_leaves_its_measured_costs():
    tuned = TimingTable(Costs(shared=BUILT_IN.shared._replace(beta=1e-10)))
    slow = Costs(network=UniformNetwork(1e-3, 1e-7, BUILT_IN.network.gamma))
    for costs in (BUILT_IN, slow):
        between = Selector(4, range(4), tuned, costs=costs)
        assert between.costs == (tuned.costs.shared, costs.network)
        alone, built_in = Selector(4, range(4), costs=costs), Selector(4, range(4))
        for nbytes in (8, 1 << 16, 1 << 20):
            moved, summed = CallTraits("broadcast", nbytes), CallTraits("allreduce", nbytes)
            assert between.decide(moved).choice == alone.decide(moved).choice
            assert between.decide(summed).choice == built_in.decide(summed).choice, "equal bits in every launch"


def test_a_choice_that_was_made_is_looked_up():
    selector = Selector(64)
    first = selector.decide(CallTraits("allreduce", 1 << 20))
    called = []
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        again = selector.decide(CallTraits("allreduce", (1 << 20) + 8))
    finally:
        sys.setprofile(None)
    assert again is first and len(called) < 10, called


def test_what_neighbours_see_is_priced_by_the_model():
    """In place what is both sent and combined must land first, so fewer rounds pay less; tables know nothing of it."""
    table = measured({8: {RING: 1e-9, OWN: 1e-9}, 1 << 20: {RING: 1e-9, OWN: 1e-9}}, ranks=2, placement="2")
    for selector in (Selector(2), Selector(2, None, table)):

        def seen(nbytes, selector=selector, in_place=False):
            traits = CallTraits("allreduce", nbytes, native=True, form="persistent", shared=True, in_place=in_place)
            return selector.decide(traits)

        assert seen(1 << 16)[:2] == ("recursive_doubling", 1) and seen(1 << 16, in_place=True)[:2] == ("ring", 1)
        assert seen(1 << 18).source == "model" and seen(1 << 18)[:2] == ("ring", 1)
        assert seen(8) == selector.decide(CallTraits("allreduce", 8, native=True, form="persistent"))
        reduce = selector.decide(CallTraits("reduce", 1 << 18, form="persistent", shared=True))
        plain = selector.decide(CallTraits("reduce", 1 << 18, form="persistent"))
        assert reduce == plain, "its partial sums are in scratch memory"


# ------------------------------------------------------------------------------------------ tables


def measured(rows, collective="allreduce", form="blocking", ranks=4, placement="4"):
    rows = {nbytes: {AlgorithmChoice(*choice): s for choice, s in row.items()} for nbytes, row in rows.items()}
    return TimingTable(entries={TimingKey(collective, form, ranks, placement): rows})


RING, DIRECT, OWN = ("ring", 1), ("direct", 1), (NATIVE, 1)
ROWS = {8: {RING: 4e-6, DIRECT: 2e-6, OWN: 1e-6}, 8192: {RING: 1e-5, DIRECT: 8e-5, OWN: 2e-5}}


def test_the_measured_winner_is_taken_and_flips_between_sizes():
    selector = Selector(4, None, measured(ROWS))
    short, long = selector.decide(CallTraits("allreduce", 8)), selector.decide(CallTraits("allreduce", 8192))
    assert short == ("direct", 1, 2e-6, "measured")
    assert long == ("ring", 1, 1e-5, "measured")
    names = [selector.decide(CallTraits("allreduce", 1 << power)).algorithm for power in range(3, 14)]
    assert names == sorted(names)  # direct, then ring, with one change
    assert {"direct", "ring"} == set(names)


def test_native_is_taken_only_where_it_may_be():
    selector = Selector(4, None, measured(ROWS))
    assert selector.decide(CallTraits("allreduce", 8, native=True)).choice == OWN
    assert selector.decide(CallTraits("allreduce", 8192, native=True)).choice == RING
    assert selector.decide(CallTraits("allreduce", 8)).choice == DIRECT
    assert Selector(4).decide(CallTraits("allreduce", 8, native=True)).algorithm != NATIVE
    huge = Selector(4, None, measured({1 << 31: {RING: 1.0, OWN: 0.5}}))
    assert huge.decide(CallTraits("allreduce", 1 << 31, native=True)).choice == RING


def test_what_was_measured_for_blocking_calls_does_not_speak_for_native_in_other_forms():
    selector = Selector(4, None, measured(ROWS))
    assert selector.decide(CallTraits("allreduce", 8, native=True, form="persistent")).choice == DIRECT
    both = measured(ROWS).merged(measured({8: {RING: 2e-6, OWN: 1e-6}}, form="persistent"))
    assert Selector(4, None, both).decide(CallTraits("allreduce", 8, native=True, form="persistent")).choice == OWN


def test_blocks_of_any_length_have_rows_of_their_own():
    rows = {64: {("linear", 1): 1e-6, ("direct", 1): 2e-6, OWN: 1e-7}}
    selector = Selector(4, None, measured(rows, "allgather"))
    assert selector.decide(CallTraits("allgather", 64, native=True, v_form=True)).choice == ("linear", 1)
    own = measured(rows, "allgather").merged(measured({64: {("direct", 1): 2e-6, OWN: 1e-7}}, "allgatherv"))
    assert Selector(4, None, own).decide(CallTraits("allgather", 64, native=True, v_form=True)).choice == OWN


def test_an_operation_that_needs_order_gets_none_that_was_measured_without():
    table = measured({8: {RING: 1e-6, ("mst", 1): 9e-6, ("gone", 1): 1e-9, ("census", 1): 1e-8}})
    assert Selector(4, None, table).decide(CallTraits("allreduce", 8)).choice == RING
    assert Selector(4, None, table).decide(CallTraits("allreduce", 8, ordered=True)).choice == ("mst", 1)


def test_where_nothing_was_measured_the_model_decides_at_the_fitted_costs():
    costs = Costs(shared=UniformNetwork(1e-2, 1e-12, 1e-12))
    table = measured(ROWS)._replace(costs=costs)
    far = Selector(4, None, table).decide(CallTraits("allreduce", 1 << 24))
    assert far.source == "model"
    assert far.seconds == pytest.approx(formula("allreduce", far.algorithm, 4, 1 << 24, 1, costs.shared))
    assert far.algorithm != choose("allreduce", 4, 1 << 24).algorithm
    assert Selector(4, None, table).decide(CallTraits("broadcast", 8)).source == "model"


def test_near_numbers_of_ranks_and_like_placements_are_taken():
    table = measured(ROWS)
    assert [Selector(p, None, table).decide(CallTraits("allreduce", 8)).source for p in (1, 2, 3, 5, 6, 7)] == [
        "model", "model", "measured", "measured", "measured", "model",
    ]  # fmt: skip
    assert Selector(4, (0, 0, 1, 1), table).decide(CallTraits("allreduce", 8)).source == "model"
    paired = measured(ROWS, placement="2x2")
    assert Selector(6, (0, 0, 1, 1, 2, 2), paired).decide(CallTraits("allreduce", 8)).source == "measured"
    assert Selector(4, (0, 1, 0, 1), paired).decide(CallTraits("allreduce", 8)).source == "model"


# ------------------------------------------------------------------------------------------ what a user names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("allreduce", "star"), "algorithm: unknown algorithm 'star' for allreduce; known: linear, mst, ring"),
        (
            ("allreduce", "ring", True),
            "algorithm: 'ring' for allreduce does not keep rank order, which an operation that does not commute needs; "
            "able: linear, mst, recursive_doubling",
        ),
        (
            ("allreduce", "leaders", True, (0, 1, 0)),
            "algorithm: 'leaders' for allreduce does not keep rank order, which an operation that does not commute "
            "needs; able: linear, mst, recursive_doubling",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(arguments, message):
    with pytest.raises(InvalidArgument) as caught:
        select.check(*arguments)
    assert str(caught.value).startswith(message)


def test_what_can_be_done_is_not():
    assert select.check("allreduce", "ring") is select.check("allreduce", "leaders", True, (0, 0, 1)) is None


def test_lengths_travel_ahead_only_where_that_saves_rounds():
    assert choose("gather", 4, 0, local_counts=True).algorithm == "linear"
    assert choose("gather", 64, 0, local_counts=True).algorithm == "mst"
    assert choose("alltoall", 64, 0, local_counts=True).algorithm == "direct"  # bruck may move far more


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_predictions_are_the_clock_s(collective):
    for name in catalog.names(collective):
        for size, nbytes in ((1, 8), (3, 1000), (4, 1 << 20)):
            blocks = catalog.blocks(collective, name, size)
            layout = ChunkLayout.packed(even(nbytes * blocks // vector(collective, size, blocks), blocks))
            found = select.predict(collective, name, size, nbytes)
            assert found == price(catalog.build_all(collective, name, size), layout, 1, BUILT_IN.shared).seconds
            assert (found > 0) == (size > 1)


def test_segments_enter_the_prediction():
    whole = select.predict("broadcast", "linear", 4, 1 << 20)
    assert select.predict("broadcast", "linear", 4, 1 << 20, 4) != whole
