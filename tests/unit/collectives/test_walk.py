"""The proof finds every planted fault and says exactly where it is; the clock agrees with the formulas."""

import random
import re
from itertools import chain

import pytest

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import ClusteredNetwork, LinearCost, UniformNetwork
from collectives.analysis.matching import ScheduleError, match
from collectives.analysis.prove import prove
from collectives.analysis.simulate import price
from collectives.schedule.chunks import ChunkLayout, even
from collectives.schedule.semantics import MEANINGS, vector
from collectives.schedule.steps import NOTHING, Copy, Recv, RecvReduce, Reduce, Send, freeze, one, span

A, B, C = one(0), one(1), one(2)
BOTH = span(0, 2)
UNSEEN = one(2)  # of two chunks: chunk 0 of a spare copy

# Each fault: (collective, root, the rounds of every rank, what the error must say). Two ranks have two chunks.
FAULTS = {
    "deadlock in a circle": (
        "allgather", 0,
        [[[Recv(2, C)], [Send(1, A)]], [[Recv(0, A)], [Send(2, B)]], [[Recv(1, B)], [Send(0, C)]]],
        "deadlock: rank 0, round 0 (Recv of chunks 2 from rank 2) waits for round 1 of rank 2, which is in round 0; "
        "rank 1, round 0 (Recv of chunks 0 from rank 0) waits for round 1 of rank 0, which is in round 0; "
        "rank 2, round 0 (Recv of chunks 1 from rank 1) waits for round 1 of rank 1, which is in round 0",
    ),
    "both send first: sends wait for their receivers": (
        "allgather", 0,
        [[[Send(1, A)], [Recv(1, B)]], [[Send(0, B)], [Recv(0, A)]]],
        "deadlock: rank 0, round 0 (Send of chunks 0 to rank 1) waits for round 1 of rank 1, which is in round 0; "
        "rank 1, round 0 (Send of chunks 1 to rank 0) waits for round 1 of rank 0, which is in round 0",
    ),
    "a message that is never sent": (
        "broadcast", 0,
        [[[Send(1, A)]], [[Recv(0, A)], [Recv(0, B)]]],
        "rank 1, round 1, step 0: Recv of chunks 1 from rank 0: deadlock, rank 0 never sends this message",
    ),
    "a message that is never received": (
        "broadcast", 0,
        [[[Send(1, A), Send(1, B)]], [[Recv(0, A)]]],
        "rank 0, round 0, step 1: Send of chunks 1 to rank 1: deadlock, the message is never received",
    ),
    "a message to the wrong peer": (
        "broadcast", 0,
        [[[Send(2, span(0, 3))]], [[Recv(0, span(0, 3))]], []],
        "rank 1, round 0, step 0: Recv of chunks 0-2 from rank 0: deadlock, rank 0 never sends this message",
    ),
    "a peer that does not exist": (
        "broadcast", 0,
        [[[Send(2, BOTH)]], []],
        "rank 0, round 0, step 0: Send of chunks 0-1 to rank 2: no such peer among 2 ranks",
    ),
    "a peer below zero": (
        "broadcast", 0,
        [[], [[Recv(-1, BOTH)]]],
        "rank 1, round 0, step 0: Recv of chunks 0-1 from rank -1: no such peer among 2 ranks",
    ),
    "a message to oneself": (
        "broadcast", 0,
        [[[Send(0, BOTH), Recv(0, BOTH)]], []],
        "rank 0, round 0, step 0: Send of chunks 0-1 to rank 0: no such peer among 2 ranks",
    ),
    "room for fewer chunks than come": (
        "broadcast", 0,
        [[[Send(1, BOTH)]], [[Recv(0, A)]]],
        "rank 1, round 0, step 0: Recv of chunks 0 from rank 0: does not fit rank 0, round 0, step 0: "
        "Send of chunks 0-1 to rank 1",
    ),
    "room for another chunk, which may have another length": (
        "broadcast", 0,
        [[[Send(1, A), Send(1, B)]], [[Recv(0, B), Recv(0, A)]]],
        "rank 1, round 0, step 0: Recv of chunks 1 from rank 0: does not fit rank 0, round 0, step 0: "
        "Send of chunks 0 to rank 1",
    ),
    "a chunk overwritten while it is sent": (
        "allreduce", 0,
        [[[Send(1, A), Recv(1, A)]], [[Send(0, A), Recv(0, A)]]],
        "rank 0, round 0, step 1: Recv of chunks 0 from rank 1: hazard, chunk 0 is in use by step 0 of the same "
        "round, Send of chunks 0 to rank 1",
    ),
    "a chunk overwritten while it is sent, listed the other way round": (
        "allreduce", 0,
        [[[Recv(1, A), Send(1, A)]], [[Recv(0, A), Send(0, A)]]],
        "rank 0, round 0, step 0: Recv of chunks 0 from rank 1: hazard, chunk 0 is in use by step 1 of the same "
        "round, Send of chunks 0 to rank 1",
    ),
    "two receives on one chunk": (
        "reduce", 0,
        [[[Recv(1, A), Recv(2, A)]], [[Send(0, A)]], [[Send(0, A)]]],
        "rank 0, round 0, step 1: Recv of chunks 0 from rank 2: hazard, chunk 0 is in use by step 0 of the same "
        "round, Recv of chunks 0 from rank 1",
    ),
    "a receive on a chunk that a message is added to": (
        "reduce", 0,
        [[[RecvReduce(1, A), Recv(2, A)]], [[Send(0, A)]], [[Send(0, A)]]],
        "rank 0, round 0, step 0: RecvReduce of chunks 0 from rank 1 on the left: hazard, Recv of chunks 0 from "
        "rank 2 lands there too",
    ),
    "a term added twice": (
        "reduce", 0,
        [[[RecvReduce(1, BOTH)], [RecvReduce(1, BOTH)]], [[Send(0, BOTH)], [Send(0, BOTH)]]],
        "rank 0, round 1, step 0: RecvReduce of chunks 0-1 from rank 1 on the left: chunk 0 already has chunk 0 of "
        "rank 1",
    ),
    "an own term added twice": (
        "reduce", 0,
        [[[RecvReduce(1, BOTH)]], [[Copy(BOTH, span(2, 4)), Reduce(span(2, 4), BOTH)], [Send(0, BOTH)]]],
        "rank 1, round 0, step 1: Reduce of chunks 2-3 into 0-1 on the left: chunk 0 already has chunk 0 of rank 1",
    ),
    "a term lost": (
        "reduce", 0,
        [[[RecvReduce(1, BOTH)], [RecvReduce(2, A)]], [[Send(0, BOTH)]], [[], [Send(0, A)]]],
        "rank 0 does not get chunk 1 as required: lacks chunk 1 of rank 2",
    ),
    "a term overwritten": (
        "reduce", 0,
        [[[Recv(1, span(0, 2))]], [[Send(0, span(0, 2))]]],
        "rank 0 does not get chunk 0 as required: lacks chunk 0 of rank 0",
    ),
    "a term that does not belong": (
        "broadcast", 0,
        [[[Send(1, BOTH)], [RecvReduce(1, A, "right")]], [[Recv(0, BOTH), Copy(B, A)], [Send(0, A)]]],
        "rank 0 does not get chunk 0 as required: has chunk 1 of rank 0",
    ),
    "one chunk in the place of another": (
        "broadcast", 0,
        [[[Send(1, BOTH)]], [[Recv(0, BOTH)], [Copy(B, A)]]],
        "rank 1 does not get chunk 0 as required: lacks chunk 0 of rank 0 and has chunk 1 of rank 0",
    ),
    "a chunk that never arrives": (
        "broadcast", 0,
        [[[Send(1, A)]], [[Recv(0, A)]]],
        "rank 1 does not get chunk 1 as required: it never arrives",
    ),
    "a chunk sent before the rank has it": (
        "broadcast", 0,
        [[[Recv(1, BOTH)]], [[Send(0, BOTH)]]],
        "rank 1, round 0, step 0: Send of chunks 0-1 to rank 0: the rank does not have chunk 0",
    ),
    "a chunk forwarded in the round in which it comes": (
        "broadcast", 0,
        [[[Send(1, span(0, 3))]], [[Recv(0, span(0, 3)), Send(2, span(0, 3))]], [[Recv(1, span(0, 3))]]],
        "rank 1, round 0, step 0: Recv of chunks 0-2 from rank 0: hazard, chunk 0 is in use by step 1 of the same "
        "round, Send of chunks 0-2 to rank 2",
    ),
    "a sum into a chunk that is not there": (
        "gather", 0,
        [[[RecvReduce(1, B)]], [[Send(0, B)]]],
        "rank 0, round 0, step 0: RecvReduce of chunks 1 from rank 1 on the left: the rank does not have chunk 1",
    ),
    "a copy of a chunk that is not there": (
        "gather", 0,
        [[[Copy(UNSEEN, A)]], []],
        "rank 0, round 0, step 0: Copy of chunks 2 to 0: the rank does not have chunk 2",
    ),
    "a barrier that lets somebody leave early": (
        "barrier", 0,
        [[[Recv(1, NOTHING), Send(1, NOTHING)]], [[Send(0, NOTHING), Recv(0, NOTHING)], [Recv(2, NOTHING)]],
         [[], [Send(1, NOTHING)]]],
        "rank 0 may leave before it has heard of ranks [2]",
    ),
    "a barrier whose news is too old": (
        # Rank 1 hears of rank 2 in the round in which it tells rank 0: too late to pass it on.
        "barrier", 0,
        [[[Recv(1, NOTHING)]], [[Recv(2, NOTHING), Send(0, NOTHING)]], [[Send(1, NOTHING)]]],
        "rank 0 may leave before it has heard of ranks [2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    collective, root, rounds, message = FAULTS[fault]
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}$"):
        prove(collective, [freeze(its) for its in rounds], root)


def test_the_wrong_order_is_no_fault_but_is_told():
    """The root puts rank 2 before rank 1: a sum all the same, but nothing for operations that do not commute."""

    def reduce(first, second):
        root = [[RecvReduce(first, span(0, 3), "right")], [RecvReduce(second, span(0, 3), "right")]]
        return [freeze(root), freeze([[Send(0, span(0, 3))]]), freeze([[Send(0, span(0, 3))]])]

    assert prove("reduce", reduce(1, 2)).ordered
    assert not prove("reduce", reduce(2, 1)).ordered


@pytest.mark.parametrize(("side", "ordered"), [("right", True), ("left", False)])
def test_the_side_decides_the_order(side, ordered):
    message = [freeze([[RecvReduce(1, BOTH, side)]]), freeze([[Send(0, BOTH)]])]
    assert prove("reduce", message).ordered is ordered
    local = [
        freeze([[Recv(1, span(2, 4)), Reduce(span(2, 4), BOTH, side)]]),
        freeze([[Send(0, BOTH)]]),
    ]
    assert prove("reduce", local).ordered is ordered


def test_ranks_need_not_be_in_lockstep():
    """One rank takes in a single round what the other sends in three, and the rounds that count are counted."""
    schedules = [
        freeze([[], [Send(1, A)], [], [Send(1, B)], []]),
        freeze([[Recv(0, A), Recv(0, B)], []]),
    ]
    proof = prove("broadcast", schedules)
    assert proof.rounds == 2
    assert (proof.messages, proof.sent, proof.received) == (2, (2, 0), (0, 2))


def test_messages_match_in_order_and_not_by_what_they_carry():
    schedules = [freeze([[Send(1, B), Send(1, A)]]), freeze([[Recv(0, B)], [Recv(0, A)]])]
    assert prove("broadcast", schedules).messages == 2
    assert [spot.step for spot in match(schedules, 2).values()] == [0, 1]


def test_a_reduction_may_send_what_it_adds_to():
    exchange = [freeze([[Send(1, BOTH), RecvReduce(1, BOTH, "right")]]), freeze([[Send(0, BOTH), RecvReduce(0, BOTH)]])]
    proof = prove("allreduce", exchange)
    assert proof.ordered
    assert (proof.rounds, proof.sent, proof.combined) == (1, (2, 2), (2, 2))


def test_two_messages_may_add_to_one_chunk_in_the_order_listed():
    everything = span(0, 3)
    sends = [freeze([[Send(0, everything)]])] * 2
    for first, second, ordered in [(1, 2, True), (2, 1, False)]:
        steps = [RecvReduce(first, everything, "right"), RecvReduce(second, everything, "right")]
        assert prove("reduce", [freeze([steps]), *sends]).ordered is ordered


def test_local_steps_see_what_came_in_their_round():
    schedules = [
        freeze([[Send(1, BOTH)], [Recv(1, one(2)), Copy(one(2), A)]]),
        freeze([[Recv(0, BOTH)], [Copy(A, one(2)), Send(0, one(0))]]),
    ]
    assert prove("broadcast", schedules).ordered


def entries(*unwanted):
    return [(c, n) for c in catalog.CATALOG for n in catalog.names(c) if c not in unwanted]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("collective", "name"), entries())
def test_empty_rounds_change_nothing(collective, name):
    """Dropped, or strewn in by chance: ranks drift against each other, and the proof is the same."""
    chance = random.Random(7)
    for size in (2, 3, 6, 8):
        lockstep = catalog.build_all(collective, name, size)
        compact = [tuple(steps for steps in schedule if steps) for schedule in lockstep]
        drifting = [
            tuple(chain.from_iterable([()] * chance.randrange(3) + [steps] for steps in schedule))
            for schedule in compact
        ]
        blocks = catalog.blocks(collective, name, size)
        proofs = {prove(collective, schedules, blocks=blocks) for schedules in (lockstep, compact, drifting)}
        assert len(proofs) == 1


# ------------------------------------------------------------------------------------------ prices

ALPHA, BETA, GAMMA = 1024.0, 2.0, 0.5  # sums of their multiples are exact
PLAIN = UniformNetwork(ALPHA, BETA, GAMMA)


def seconds(collective, name, size, n, root=0, network=PLAIN):
    layout = ChunkLayout.packed(even(n, catalog.blocks(collective, name, size)))
    return price(catalog.build_all(collective, name, size, root), layout, 1, network).seconds


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12])
def test_known_prices(size):
    """The formulas of the literature, with numbers in them; every chunk is 16 bytes long."""
    p, n, q = size, 16 * size, (size - 1).bit_length()
    block = n / p
    ring = 2 * (p - 1) * (ALPHA + block * BETA) + (p - 1) * block * GAMMA
    assert seconds("allreduce", "ring", p, n) == ring
    assert seconds("broadcast", "mst", p, n) == q * (ALPHA + n * BETA)
    assert seconds("reduce", "mst", p, n) == q * (ALPHA + n * BETA + n * GAMMA)
    assert seconds("broadcast", "linear", p, n) == (p - 1) * (ALPHA + n * BETA)
    assert seconds("scatter", "linear", p, n) == (p - 1) * (ALPHA + block * BETA)
    assert seconds("barrier", "dissemination", p, n) == q * ALPHA


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("collective", "name"), entries())
def test_prices_agree_with_the_catalogue(collective, name):
    entry = catalog.find(collective, name)
    for size in (1, 2, 3, 4, 5, 7, 8, 13, 16):
        blocks = catalog.blocks(collective, name, size)
        layout, n = ChunkLayout.packed((16,) * blocks), 16 * vector(collective, size, blocks)
        roots = range(size) if MEANINGS[collective].rooted else [0]
        schedules = [catalog.build_all(collective, name, size, root) for root in roots]
        for gamma in (0, GAMMA):
            worst = max(price(its, layout, 1, UniformNetwork(ALPHA, BETA, gamma)).seconds for its in schedules)
            formula = float(entry.seconds(size, n, ALPHA, BETA, gamma))
            assert worst == formula if entry.exact else worst <= formula <= 2 * worst or size == 1, size


def test_uneven_and_empty_chunks_cost_what_they_weigh():
    """5 bytes in chunks of 2, 2, 1: the ring's rounds wait for the longest chunk under way."""
    assert seconds("allgather", "ring", 3, 5) == 2 * (ALPHA + 2 * BETA)
    assert seconds("broadcast", "mst", 8, 0) == 3 * ALPHA
    layout = ChunkLayout.packed((2, 2, 1))
    assert price(catalog.build_all("broadcast", "mst", 3), layout, 8, PLAIN).seconds == 2 * (ALPHA + 40 * BETA)


def test_a_slow_network_between_fast_nodes():
    """Ranks 0, 1 on one node and 2, 3 on the other."""
    inside, between = LinearCost(1.0, 0.0), LinearCost(100.0, 1.0)
    network = ClusteredNetwork((0, 0, 1, 1), inside, between, adding=LinearCost(0.0, 0.0))
    assert network.message(0, 1, 10) == network.message(3, 2, 10) == inside(10)
    assert network.message(1, 2, 10) == network.message(3, 0, 10) == between(10)
    assert seconds("broadcast", "mst", 4, 8, 0, network) == (100 + 8) + 1  # 0 to 2, then within both
    assert seconds("gather", "linear", 4, 8, 0, network) == 1 + 2 * (100 + 2)  # from 1, then from 2 and from 3
    assert seconds("allreduce", "recursive_doubling", 4, 8, 0, network) == 1 + (100 + 2 * 8)  # two share a card
    # Round after round all wait for the two edges between the nodes.
    assert seconds("allgather", "ring", 4, 8, 0, network) == 3 * (100 + 2)


def test_one_port_out_and_one_in():
    """Messages of one round leave one after another, and arrive one after another; both ways at once is free."""
    everything = span(0, 3)
    layout, message = ChunkLayout.packed((4, 4, 4)), ALPHA + 12 * BETA
    fan_out = [freeze([[Send(1, everything), Send(2, everything)]])]
    fan_out += [freeze([[Recv(0, everything)]])] * 2
    assert price(fan_out, layout, 1, PLAIN).finish == (2 * message, message, 2 * message)
    fan_in = [freeze([[Recv(1, everything), Recv(2, one(3) + one(4) + one(5))]])]
    fan_in += [freeze([[Send(0, everything)]])] * 2
    assert price(fan_in, layout, 1, PLAIN).finish == (2 * message, message, 2 * message)
    exchange = [freeze([[Send(1, A), Recv(1, B)]]), freeze([[Send(0, B), Recv(0, A)]])]
    assert price(exchange, ChunkLayout.packed((4, 4)), 1, PLAIN).finish == (ALPHA + 4 * BETA,) * 2


def test_a_message_waits_for_both_ends():
    """Rank 2 is busy with rank 1 for one message before it can take rank 0's; rank 0 waits for it."""
    schedules = [freeze([[Send(2, A)]]), freeze([[Send(2, A)]]), freeze([[Recv(1, A)], [Recv(0, A)]])]
    message = ALPHA + 4 * BETA
    assert price(schedules, ChunkLayout.packed((4, 4, 4)), 1, PLAIN).finish == (2 * message, message, 2 * message)


def test_local_work_costs_gamma_per_byte():
    schedules = [freeze([[Reduce(B, A)], [Copy(A, B)]])]
    assert price(schedules, ChunkLayout.packed((6, 6)), 8, PLAIN).seconds == 48 * GAMMA
