"""Short calls, played from what `shorten` says of them, do what the collective means."""

import pytest

from collectives.algorithms import catalog
from collectives.runtime.program import SOURCE, TARGET, Task
from collectives.runtime.single_exchange import as_single_exchange
from collectives.schedule import semantics
from collectives.schedule.chunks import MemorySpan

COLLECTIVES = [name for name, meaning in semantics.MEANINGS.items() if name not in ("barrier", "scan", "exscan")]
LENGTH = 3


def places(memory, chunks):
    return {chunk: MemorySpan(memory, at * LENGTH, (at + 1) * LENGTH) for at, chunk in enumerate(sorted(chunks))}


def tasks(collective, name, size=2, root=0):
    blocks = catalog.blocks(collective, name, size)
    count = blocks if semantics.MEANINGS[collective].vector else semantics.MEANINGS[collective].blocks(size)
    return [
        Task(
            catalog.build(collective, name, rank, size, root),
            (LENGTH,) * count,
            places(SOURCE, semantics.before(collective, rank, size, root, blocks=blocks)),
            places(TARGET, semantics.after(collective, rank, size, root, blocks=blocks)),
            1,
        )
        for rank in range(size)
    ]


def play(short, source, target, arrived):
    """One rank's part, every element the set of terms in it."""
    origin, goal, count = short.copy
    target[goal : goal + count] = source[origin : origin + count]
    first, length = short.into
    assert length == len(arrived)
    for index, value in enumerate(arrived):
        target[first + index] = value if short.mine is None else value | source[short.mine + index]


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_two_ranks(collective, root):
    """Every algorithm that is short for both does it right; and there is one for each collective."""
    found = 0
    for name in catalog.names(collective):
        pair = tasks(collective, name, root=root)
        shorts = [as_single_exchange(task) for task in pair]
        if None in shorts:
            continue
        found += 1
        sources = [
            [{(rank, chunk, i)} for chunk in sorted(task.source) for i in range(LENGTH)]
            for rank, task in enumerate(pair)
        ]
        targets = [[set() for _ in range(len(task.target) * LENGTH)] for task in pair]
        for rank, short in enumerate(shorts):
            assert short.peer == 1 - rank
            first, count = shorts[1 - rank].out
            play(short, sources[rank], targets[rank], sources[1 - rank][first : first + count])
        for rank, target in enumerate(targets):
            wanted = semantics.after(collective, rank, 2, root, blocks=catalog.blocks(collective, name, 2))
            expected = [
                {(origin, chunk, i) for origin, chunk in wanted[chunk]}
                for chunk in sorted(wanted)
                for i in range(LENGTH)
            ]
            if collective == "broadcast" and rank == root:
                continue  # the root's vector is where it was: nothing is copied in a call in place
            assert target == expected
    assert found


def test_what_is_not_short():
    """Two rounds, several peers, chunks that lie apart, news without data, and nothing at all."""
    assert as_single_exchange(tasks("allreduce", "ring")[0]) is None
    assert as_single_exchange(tasks("broadcast", "linear", size=3)[0]) is None
    apart = tasks("allreduce", "recursive_doubling")[0]
    scattered = {
        chunk: MemorySpan(SOURCE, place.start * 2, place.start * 2 + LENGTH) for chunk, place in apart.source.items()
    }
    assert as_single_exchange(apart._replace(source=scattered)) is None
    assert as_single_exchange(Task(catalog.build("barrier", "dissemination", 0, 2), (1, 1), {}, {}, 1)) is None
    assert as_single_exchange(Task((), (1,), {0: MemorySpan(SOURCE, 0, 1)}, {0: MemorySpan(TARGET, 0, 1)}, 1)) is None


def test_the_side():
    """What comes from a lower rank stands on the left."""
    assert [as_single_exchange(task).side for task in tasks("allreduce", "recursive_doubling")] == ["right", "left"]
