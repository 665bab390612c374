"""Every algorithm keeps its promises: proved, in as many rounds and with as much data as its line says."""

import re
from fractions import Fraction as F
from functools import cache
from itertools import product

import pytest
from support.tiers import default

from collectives.algorithms import catalog
from collectives.algorithms.catalog import BOUNDS, CATALOG
from collectives.analysis.matching import causal_levels
from collectives.analysis.prove import prove
from collectives.schedule import semantics
from collectives.schedule.semantics import MEANINGS
from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Send, numbers
from collectives.schedule.topology import numbered

LARGEST, LARGER = 17, 33
ENTRIES = [(collective, name) for collective in CATALOG for name in CATALOG[collective]]
REDUCING = [(collective, name) for collective, name in ENTRIES if MEANINGS[collective].reduces]

every_entry = pytest.mark.parametrize(("collective", "name"), ENTRIES)


def roots(collective, size):
    """All up to 8 ranks, then four."""
    if not MEANINGS[collective].rooted:
        return [0]
    return range(size) if size <= 8 else [0, 1, size // 2, size - 1]


@cache
def proofs(collective, name, size, segments=1, nodes=None, few=None):
    """Proofs of a schedule by root: every one, or a few."""
    found = []
    for root in few or roots(collective, size):
        schedules = catalog.build_all(collective, name, size, root, segments, nodes)
        found.append(prove(collective, schedules, root, segments, catalog.blocks(collective, name, size)))
    return found


def worst(collective, name, size, segments=1, nodes=None, few=None):
    """(rounds, volume, combined) at the worst root, the latter two in vectors of the busiest rank."""
    found = proofs(collective, name, size, segments, nodes, few)
    vector = semantics.vector(collective, size, catalog.blocks(collective, name, size)) * segments
    return (
        max(proof.rounds for proof in found),
        max(F(max(*proof.sent, *proof.received), vector) for proof in found),
        max(F(max(proof.combined), vector) for proof in found),
    )


def q(size):
    return (size - 1).bit_length()


def test_every_collective_has_a_meaning_and_a_bound():
    assert CATALOG.keys() == BOUNDS.keys()
    assert CATALOG.keys() <= MEANINGS.keys()


def check_costs(collective, name, size, segments=1, nodes=None, few=None):
    """What the schedules do is what the line says, or within it and close to it where it gives limits."""
    entry, count = CATALOG[collective][name], len(set(nodes or (0,)))
    done = worst(collective, name, size, segments, nodes, few)
    formulas = entry.rounds, entry.volume, entry.combined
    says = [catalog.evaluate(formula, size, segments, count) for formula in formulas]
    if entry.exact:
        assert list(done) == says, f"{size} ranks, {segments} segments, nodes {nodes}"
    else:
        assert all(x <= limit <= 2 * x for x, limit in zip(done, says)), f"{size} ranks, {segments} segments"
    for found, least in zip(done, BOUNDS[collective]):
        assert found >= catalog.evaluate(least, size), f"{size} ranks"


@every_entry
def test_costs_are_those_of_the_line_and_not_below_the_bounds(collective, name):
    for size in range(2, LARGEST + 1):
        check_costs(collective, name, size)


@pytest.mark.full
@pytest.mark.parametrize(("collective", "name"), [entry for entry in ENTRIES if MEANINGS[entry[0]].rooted])
def test_costs_of_every_root_of_many_ranks(collective, name):
    for size in range(9, LARGEST + 1):
        check_costs(collective, name, size, few=range(size))


@every_entry
def test_messages_follow_one_another_as_often_as_the_line_says(collective, name):
    entry = CATALOG[collective][name]
    for size in range(2, LARGEST + 1):
        waits = causal_levels(catalog.build_all(collective, name, size))
        assert len(waits) == len(set(waits))  # a rank waits once for each level
        depth = max(level for _, level in waits)
        if entry.depth:
            assert depth == catalog.evaluate(entry.depth, size), f"{size} ranks"
        elif not entry.placed:
            assert depth <= catalog.evaluate(entry.rounds, size), f"{size} ranks"


CUTTING = [(collective, name) for collective, name in ENTRIES if CATALOG[collective][name].cuts]
PLACED = [(collective, name) for collective, name in ENTRIES if CATALOG[collective][name].placed]
QUICK = [entry for entry in ENTRIES if catalog.evaluate(CATALOG[entry[0]][entry[1]].rounds, LARGER) <= 3 * q(LARGER)]


@pytest.mark.parametrize(("collective", "name"), CUTTING)
@pytest.mark.parametrize("segments", [2, 7])
def test_costs_in_segments_are_those_of_the_line(collective, name, segments):
    """Of those that cut by a rule of their own; so they are proved in these segments as well."""
    for size in range(2, LARGEST + 1):
        check_costs(collective, name, size, segments)


LARGE = (18, 23, 28, 33), (19, 24, 31, 32)


@pytest.mark.parametrize("sizes", default([*LARGE, range(LARGEST + 1, LARGER)], *LARGE))
@pytest.mark.parametrize(("collective", "name"), QUICK)
def test_more_ranks_too(collective, name, sizes):
    """Entries of few rounds, at two roots; on one node and, where they look at that, on unequal ones in no order."""
    entry = CATALOG[collective][name]
    for size in sizes:
        few = (0, size - 2) if MEANINGS[collective].rooted else (0,)
        check_costs(collective, name, size, size % 5 + 1 if entry.cuts else 1, few=few)
        if entry.placed:
            assert all(proofs(collective, name, size, 1, numbered(rank * rank % 7 % 4 for rank in range(size)), few))


@pytest.mark.parametrize(("collective", "name"), PLACED)
def test_costs_on_nodes_of_as_many_ranks_each(collective, name):
    """In order and interleaved."""
    for size in (2, 4, 6, 9, 12):
        for count in (count for count in range(2, size + 1) if size % count == 0):
            check_costs(collective, name, size, 1, tuple(rank // (size // count) for rank in range(size)))
            check_costs(collective, name, size, 1, tuple(rank % count for rank in range(size)))


def placements(size):
    """Every way to put ranks on nodes."""
    return {numbered(nodes) for nodes in product(range(size), repeat=size)}


@pytest.mark.parametrize(("collective", "name"), PLACED)
def test_every_placement_of_a_few_ranks(collective, name):
    entry = CATALOG[collective][name]
    for size in range(1, 6):
        for nodes in placements(size):
            for proof in proofs(collective, name, size, 1, nodes):
                assert proof.ordered >= entry.keeps_order(nodes), nodes
                assert proof.alike >= entry.alike


@pytest.mark.parametrize(("collective", "name"), PLACED)
def test_what_must_cross_the_network_crosses_it_once(collective, name):
    """A node of 3 takes in no more vectors than its share, or one in each of log2 rounds of the leaders."""
    size, nodes = 12, tuple(rank // 3 for rank in range(12))
    block = F(1, semantics.vector(collective, size, catalog.blocks(collective, name, size)))
    crossing = [0] * 4
    for rank, schedule in enumerate(catalog.build_all(collective, name, size, 0, 1, nodes)):
        for step in (step for steps in schedule for step in steps):
            if isinstance(step, (Recv, RecvReduce)) and nodes[step.peer] != nodes[rank]:
                crossing[nodes[rank]] += len(list(numbers(step.chunks)))
    twice = collective == "allreduce" or (name == "hierarchical" and collective in ("broadcast", "reduce"))
    share = 2 if name == "leaders" and collective in ("allreduce", "reduce", "broadcast") else F(3, 4) * (1 + twice)
    assert max(crossing) * block <= share


@pytest.mark.parametrize(
    ("collective", "name"), [entry for entry in ENTRIES if entry not in CUTTING and entry[0] != "barrier"]
)
@pytest.mark.parametrize("segments", [2, 3])
def test_segments_are_right_too_and_move_no_more(collective, name, segments):
    entry = CATALOG[collective][name]
    for size in range(1, 12):
        for proof, once in zip(proofs(collective, name, size, segments), proofs(collective, name, size)):
            assert proof.sent == tuple(segments * chunks for chunks in once.sent)
            assert proof.received == tuple(segments * chunks for chunks in once.received)
            assert proof.combined == tuple(segments * chunks for chunks in once.combined)
            assert proof.messages == segments * once.messages
            assert proof.ordered >= entry.ordered


@pytest.mark.parametrize(("collective", "name"), REDUCING)
def test_rank_order_is_kept_where_the_line_says_so_and_only_there(collective, name):
    entry = CATALOG[collective][name]
    kept = all(proof.ordered for size in range(1, LARGEST + 1) for proof in proofs(collective, name, size))
    if entry.placed:  # on nodes whose ranks are neighbours
        several = (proofs(collective, name, size, 1, numbered(r // 3 for r in range(size))) for size in range(4, 16))
        kept &= all(proof.ordered for found in several for proof in found)
    assert kept == entry.ordered


@pytest.mark.parametrize(("collective", "name"), REDUCING)
def test_ranks_get_the_same_bits_where_the_line_says_so_and_only_there(collective, name):
    alike = all(proof.alike for size in range(1, LARGEST + 1) for proof in proofs(collective, name, size))
    assert alike == CATALOG[collective][name].alike


@pytest.mark.parametrize("collective", [c for c in CATALOG if MEANINGS[c].reduces])
def test_every_reduction_has_an_algorithm_that_keeps_rank_order(collective):
    assert any(entry.ordered for entry in CATALOG[collective].values())


@every_entry
def test_private_entries_touch_only_what_a_rank_brings_or_takes(collective, name):
    """Away from the root; and where the others do too, they could be marked private as well."""
    alone = True
    for size in range(1, 10):
        for root in roots(collective, size):
            for rank in set(range(size)) - ({root} if MEANINGS[collective].rooted else set()):
                own = {*semantics.before(collective, rank, size, root), *semantics.after(collective, rank, size, root)}
                alone &= touched(catalog.build(collective, name, rank, size, root)) <= own
    if collective in ("scatter", "gather", "alltoall"):
        assert alone == CATALOG[collective][name].private
    else:
        assert not CATALOG[collective][name].private


def touched(schedule):
    chunks = set()
    for steps in schedule:
        for step in steps:
            match step:
                case Send(_, what) | Recv(_, what) | RecvReduce(_, what, _):
                    chunks.update(numbers(what))
                case Reduce(what, target, _) | Copy(what, target):
                    chunks.update(numbers(what), numbers(target))
    return chunks


@pytest.mark.parametrize("collective", ["scatter", "gather", "alltoall"])
def test_blocks_of_any_length_have_an_algorithm(collective):
    assert any(entry.private for entry in CATALOG[collective].values())


@every_entry
def test_docstrings_give_the_idea_then_the_cost(collective, name):
    entry = CATALOG[collective][name]
    first, cost, rest = " ".join((entry.generate.__doc__ or "").split()).partition(" Cost: ")
    assert entry.idea == first and re.search(r"[.]{1,3}$", first)
    assert cost and "alpha" in rest
    if CATALOG[collective][name].volume != "0":
        assert "n " in rest and "beta" in rest
    if MEANINGS[collective].reduces:
        assert "gamma" in rest
        assert "Keeps rank order" in rest if entry.ordered else "Commutative operations only" in rest


@every_entry
def test_one_rank_has_nothing_to_say(collective, name):
    (proof,) = proofs(collective, name, 1)
    assert proof == (True, True, 0, 0, (0,), (0,), (0,))


# What the literature says, with nothing taken from the catalogue's own formulas: rounds, volume, combined.
KNOWN = {
    ("broadcast", "linear"): lambda p: (p - 1, p - 1, 0),
    ("broadcast", "mst"): lambda p: (q(p), q(p), 0),
    ("broadcast", "ring"): lambda p: (q(p) + p - 1, F(2 * (p - 1), p), 0),
    ("reduce", "mst"): lambda p: (q(p), q(p), q(p)),
    ("reduce", "ring"): lambda p: (q(p) + p - 1, F(2 * (p - 1), p), F(p - 1, p)),
    ("scatter", "mst"): lambda p: (q(p), F(p - 1, p), 0),
    ("gather", "mst"): lambda p: (q(p), F(p - 1, p), 0),
    ("allgather", "ring"): lambda p: (p - 1, F(p - 1, p), 0),
    ("allgather", "mst"): lambda p: (2 * q(p), q(p), 0),
    ("reduce_scatter", "ring"): lambda p: (p - 1, F(p - 1, p), F(p - 1, p)),
    ("reduce_scatter", "mst"): lambda p: (2 * q(p), q(p), q(p)),
    ("allreduce", "mst"): lambda p: (2 * q(p), q(p), q(p)),
    ("allreduce", "ring"): lambda p: (2 * (p - 1), F(2 * (p - 1), p), F(p - 1, p)),
    ("allreduce", "recursive_doubling"): lambda p: (
        q(p) if p & (p - 1) == 0 else p.bit_length() - 1 + 2, q(p), q(p),
    ),
    ("barrier", "dissemination"): lambda p: (q(p), 0, 0),
}  # fmt: skip


@pytest.mark.parametrize(("collective", "name"), KNOWN)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 13, 16, 17])
def test_known_costs(collective, name, size):
    assert worst(collective, name, size) == KNOWN[collective, name](size)


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_the_ring_allreduce_keeps_everyone_equally_busy(size):
    (proof,) = proofs("allreduce", "ring", size)
    assert proof.sent == proof.received == (2 * (size - 1),) * size
    assert proof.combined == (size - 1,) * size
    assert proof.messages == 2 * (size - 1) * size


def test_the_tree_broadcast_doubles_those_who_know():
    """No rank receives twice, and p-1 messages are all there are."""
    for size in range(1, 33):
        proof, *_ = proofs("broadcast", "mst", size)
        assert proof.messages == size - 1
        assert proof.received == (0,) + (size,) * (size - 1)


# ------------------------------------------------------------------------------------------ asking


@pytest.mark.parametrize(
    ("formula", "size", "value"),
    [("q", 1, 0), ("q", 2, 1), ("q", 5, 3), ("q", 8, 3), ("odd", 8, 0), ("odd", 6, 1), ("odd", 1, 0),
     ("2*(p-1)/p", 3, F(4, 3)), ("(p-1)/p", 1, 0), ("q+p-1", 4, 5)],
)  # fmt: skip
def test_formulas(formula, size, value):
    assert catalog.evaluate(formula, size) == value


def test_seconds_are_rounds_alpha_volume_beta_combined_gamma():
    entry = CATALOG["allreduce"]["ring"]
    assert entry.seconds(4, 1000, 100.0, 2.0, 1.0) == 6 * 100 + 1000 * (1.5 * 2 + 0.75 * 1)
    tree = CATALOG["allreduce"]["mst"]  # up, then down: the busiest rank's volume counts twice on the path
    assert tree.seconds(4, 1000, 100.0, 2.0, 1.0) == 4 * 100 + 1000 * (4 * 2 + 2 * 1)


def test_unknown_names_get_the_list_of_known_ones():
    with pytest.raises(ValueError, match=r"unknown algorithm 'star' for broadcast; known: linear, mst, ring"):
        catalog.find("broadcast", "star")
    with pytest.raises(ValueError, match=r"unknown collective 'bcast'; known: barrier, broadcast"):
        catalog.names("bcast")
    with pytest.raises(ValueError, match="unknown algorithm"):
        catalog.build("allreduce", "star", 0, 2)


def test_schedules_are_built_once():
    first = catalog.build("allreduce", "ring", 1, 4)
    assert catalog.build("allreduce", "ring", 1, 4) is first
    assert catalog.build("allreduce", "ring", 2, 4) != first


@every_entry
def test_generators_are_pure(collective, name):
    entry, rooted = CATALOG[collective][name], MEANINGS[collective].rooted
    arguments = [2, 5, *[3] * rooted, *[4] * entry.cuts, *[(0, 1, 0, 1, 1)] * entry.placed]
    assert list(entry.generate(*arguments)) == list(entry.generate(*arguments))


@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_schedules_of_few_rounds_are_cheap_to_build_for_many_ranks(collective, name):
    """One rank of 4096: as many steps as it has messages, and not all other ranks."""
    entry, rooted = CATALOG[collective][name], MEANINGS[collective].rooted
    if catalog.evaluate(entry.rounds, 4096, 4) > 100:
        return
    nodes = tuple(rank // 8 for rank in range(4096))
    rounds = list(entry.generate(5, 4096, *[3] * rooted, *[4] * entry.cuts, *[nodes] * entry.placed))
    assert sum(map(len, rounds)) <= 8 * catalog.evaluate(entry.rounds, 4096, 4, 512)
