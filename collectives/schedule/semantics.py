"""What each collective means, as data: who holds which chunk before, and what must lie where after.

A value is a tuple of terms in the order in which they were combined; a term ``(rank, chunk)`` is what `rank`
brought as `chunk`. A broadcast value is one term, a sum over all ranks is p of them.

A vector (broadcast, reduce, allreduce, scan) may be cut in any number of chunks. Where every rank owns a block
(scatter, gather, allgather, reduce-scatter) chunk r is the block of rank r; where every pair of ranks has one
(alltoall) chunk ``s * p + d`` travels from s to d. Cut in segments, a vector has chunks segment by segment, and a
block ``b`` becomes the chunks from ``b * parts`` on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

Term: TypeAlias = tuple[int, int]
Value: TypeAlias = tuple[Term, ...]


class Meaning(NamedTuple):
    """One collective: its blocks, and what a rank has before and after.

    Attributes
    ----------
    blocks : size -> int
        How many blocks the data has. A vector may be cut in another number, by the algorithm's choice.
    before : (rank, size, root, blocks) -> block numbers
        The blocks that the rank brings.
    after : (rank, size, root, blocks) -> {block: ranks whose terms it holds}
        The blocks that the rank must end with. All others may hold anything.
    rooted, reduces : bool
        Whether it has a root; whether it combines, so that an operation is needed.
    synchronises : bool
        Whether nobody may leave before everybody came, which is all that a barrier means.
    vector : bool
        Whether the data is one vector that may be cut anywhere, not blocks with owners.
    """

    blocks: Callable[[int], int]
    before: Callable[[int, int, int, int], Iterable[int]]
    after: Callable[[int, int, int, int], dict[int, Iterable[int]]]
    rooted: bool = False
    reduces: bool = False
    synchronises: bool = False
    vector: bool = False


def _per_rank(size: int) -> int:
    return size


def _per_pair(size: int) -> int:
    return size * size


def _all(rank: int, size: int, root: int, blocks: int) -> range:
    return range(blocks)


def _at_root(rank: int, size: int, root: int, blocks: int) -> range:
    return range(blocks if rank == root else 0)


def _own(rank: int, size: int, root: int, blocks: int) -> range:
    return range(rank, rank + 1)


def _none(rank: int, size: int, root: int, blocks: int) -> range:
    return range(0)


MEANINGS: dict[str, Meaning] = {
    "barrier": Meaning(_per_rank, _none, lambda rank, size, root, blocks: {}, synchronises=True),
    "broadcast": Meaning(
        _per_rank,
        _at_root,
        lambda rank, size, root, blocks: {c: (root,) for c in range(blocks)},
        rooted=True,
        vector=True,
    ),
    "reduce": Meaning(
        _per_rank,
        _all,
        lambda rank, size, root, blocks: {c: range(size) for c in range(blocks)} if rank == root else {},
        rooted=True,
        reduces=True,
        vector=True,
    ),
    "scatter": Meaning(_per_rank, _at_root, lambda rank, size, root, blocks: {rank: (root,)}, rooted=True),
    "gather": Meaning(
        _per_rank,
        _own,
        lambda rank, size, root, blocks: {c: (c,) for c in range(size)} if rank == root else {},
        rooted=True,
    ),
    "allgather": Meaning(_per_rank, _own, lambda rank, size, root, blocks: {c: (c,) for c in range(size)}),
    "reduce_scatter": Meaning(_per_rank, _all, lambda rank, size, root, blocks: {rank: range(size)}, reduces=True),
    "allreduce": Meaning(
        _per_rank,
        _all,
        lambda rank, size, root, blocks: {c: range(size) for c in range(blocks)},
        reduces=True,
        vector=True,
    ),
    "alltoall": Meaning(
        _per_pair,
        lambda rank, size, root, blocks: range(rank * size, (rank + 1) * size),
        lambda rank, size, root, blocks: {source * size + rank: (source,) for source in range(size)},
    ),
    "scan": Meaning(
        _per_rank,
        _all,
        lambda rank, size, root, blocks: {c: range(rank + 1) for c in range(blocks)},
        reduces=True,
        vector=True,
    ),
    "exscan": Meaning(
        _per_rank,
        _all,
        lambda rank, size, root, blocks: {c: range(rank) for c in range(blocks)} if rank else {},
        reduces=True,
        vector=True,
    ),
}
"""Every collective by name. The keys are the names used everywhere else."""


def vector(collective: str, size: int, blocks: int) -> int:
    """How many of the blocks one rank can hold of its own: what n means in costs, and in sizes told to users."""
    meaning = MEANINGS[collective]
    held = [len(list(meaning.before(0, size, 0, blocks))), len(meaning.after(0, size, 0, blocks))]
    return max(1, *held)


def before(
    collective: str, rank: int, size: int, root: int = 0, parts: int = 1, blocks: int | None = None
) -> list[int]:
    """Chunk numbers that `rank` brings when every block is cut in `parts` chunks.

    `blocks` is the number of blocks that a vector is first cut in; other collectives have a number of their own.
    """
    meaning = MEANINGS[collective]
    held = meaning.before(rank, size, root, blocks or meaning.blocks(size))
    return [block * parts + part for block in held for part in range(parts)]


def after(
    collective: str, rank: int, size: int, root: int = 0, parts: int = 1, blocks: int | None = None
) -> dict[int, Value]:
    """The value that each chunk must have at `rank` in the end, terms in rank order. Arguments as in `before`."""
    meaning = MEANINGS[collective]
    wanted = meaning.after(rank, size, root, blocks or meaning.blocks(size))
    return {
        chunk: tuple((origin, chunk) for origin in origins)
        for block, origins in wanted.items()
        for chunk in range(block * parts, (block + 1) * parts)
    }
