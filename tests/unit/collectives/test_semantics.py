"""What each collective means, spelled out for three ranks with root 1."""

import pytest

from collectives.schedule import semantics
from collectives.schedule.semantics import MEANINGS

ALL = [0, 1, 2]
FROM_ALL = [0, 1, 2]
SPELLED = {
    # collective: (blocks that ranks 0, 1, 2 bring; {block: ranks that its terms come from} for ranks 0, 1, 2)
    "barrier": ([[], [], []], [{}, {}, {}]),
    "broadcast": ([[], ALL, []], [{0: [1], 1: [1], 2: [1]}] * 3),
    "reduce": ([ALL, ALL, ALL], [{}, {0: FROM_ALL, 1: FROM_ALL, 2: FROM_ALL}, {}]),
    "scatter": ([[], ALL, []], [{0: [1]}, {1: [1]}, {2: [1]}]),
    "gather": ([[0], [1], [2]], [{}, {0: [0], 1: [1], 2: [2]}, {}]),
    "allgather": ([[0], [1], [2]], [{0: [0], 1: [1], 2: [2]}] * 3),
    "reduce_scatter": ([ALL, ALL, ALL], [{0: FROM_ALL}, {1: FROM_ALL}, {2: FROM_ALL}]),
    "allreduce": ([ALL, ALL, ALL], [{0: FROM_ALL, 1: FROM_ALL, 2: FROM_ALL}] * 3),
    "alltoall": (
        [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
        [{0: [0], 3: [1], 6: [2]}, {1: [0], 4: [1], 7: [2]}, {2: [0], 5: [1], 8: [2]}],
    ),
    "scan": ([ALL, ALL, ALL], [dict.fromkeys(ALL, origins) for origins in ([0], [0, 1], [0, 1, 2])]),
    "exscan": ([ALL, ALL, ALL], [{}, {c: [0] for c in ALL}, {c: [0, 1] for c in ALL}]),
}
FLAGS = {
    # collective: which of (rooted, reduces, synchronises, vector) hold
    "barrier": {"synchronises"},
    "broadcast": {"rooted", "vector"},
    "reduce": {"rooted", "reduces", "vector"},
    "scatter": {"rooted"},
    "gather": {"rooted"},
    "allgather": set(),
    "reduce_scatter": {"reduces"},
    "allreduce": {"reduces", "vector"},
    "alltoall": set(),
    "scan": {"reduces", "vector"},
    "exscan": {"reduces", "vector"},
}


@pytest.mark.parametrize("collective", MEANINGS)
def test_every_meaning_is_spelled_out_here(collective):
    assert collective in SPELLED and collective in FLAGS


@pytest.mark.parametrize("collective", SPELLED)
@pytest.mark.parametrize("rank", range(3))
def test_before_and_after(collective, rank):
    brings, takes = (column[rank] for column in SPELLED[collective])
    assert semantics.before(collective, rank, 3, 1) == brings
    terms = {block: tuple((origin, block) for origin in origins) for block, origins in takes.items()}
    assert semantics.after(collective, rank, 3, 1) == terms


@pytest.mark.parametrize("collective", SPELLED)
def test_flags(collective):
    meaning = MEANINGS[collective]
    flags = {name for name in ("rooted", "reduces", "synchronises", "vector") if getattr(meaning, name)}
    assert flags == FLAGS[collective]


def test_blocks_are_cut_in_parts():
    assert semantics.before("gather", 1, 3, 0, parts=2) == [2, 3]
    assert semantics.after("reduce_scatter", 2, 3, parts=2) == {
        4: ((0, 4), (1, 4), (2, 4)),
        5: ((0, 5), (1, 5), (2, 5)),
    }


def test_a_vector_may_be_cut_in_any_number_of_blocks():
    assert semantics.before("broadcast", 1, 3, 1, blocks=5) == [0, 1, 2, 3, 4]
    assert semantics.after("scan", 1, 3, blocks=1, parts=2) == {0: ((0, 0), (1, 0)), 1: ((0, 1), (1, 1))}


@pytest.mark.parametrize("collective", MEANINGS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_whatever_anyone_ends_with_was_brought_by_its_origin(collective, size):
    for root in range(size):
        brought = {(rank, c) for rank in range(size) for c in semantics.before(collective, rank, size, root, 2)}
        for rank in range(size):
            for chunk, value in semantics.after(collective, rank, size, root, 2).items():
                assert brought.issuperset(value)
                assert all(term[1] == chunk for term in value)
