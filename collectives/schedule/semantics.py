"""Semantics of each collective as data: the chunks of every rank before, and the values it must hold after.

A value is a tuple of terms in the order in which they were combined. A term ``(rank, chunk)`` is the input of `rank`
in `chunk`. A broadcast value has one term, a sum over all ranks has p.

A vector (broadcast, reduce, allreduce, scan) may be cut in any number of chunks. In collectives with a block per rank
(scatter, gather, allgather, reduce-scatter) chunk r is the block of rank r. Alltoall has a block per pair of ranks:
chunk ``s * p + d`` travels from s to d. Cut in segments, a vector has chunks segment by segment, and a block ``b``
becomes the chunks from ``b * parts`` on.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

Term: TypeAlias = tuple[int, int]
Value: TypeAlias = tuple[Term, ...]


class Meaning(NamedTuple):
    """Semantics of one collective: input and output blocks of a rank.

    `before(rank, size, root, blocks)` gives the input blocks of the rank, `after` with the same arguments the output
    blocks, each with the ranks whose terms it holds. All other blocks are undefined.
    """

    before: Callable[[int, int, int, int], Iterable[int]]
    after: Callable[[int, int, int, int], dict[int, Iterable[int]]]
    rooted: bool = False
    reduces: bool = False
    synchronises: bool = False  # a barrier: no rank may leave before all ranks have entered
    vector: bool = False  # one vector that may be cut anywhere, instead of blocks with owners
    pairs: bool = False  # a block per pair of ranks, instead of one per rank

    def blocks(self, size: int) -> int:
        """Default number of blocks of the data on `size` ranks. An algorithm may cut a vector differently."""
        return size * size if self.pairs else size


def _all(rank: int, size: int, root: int, blocks: int) -> range:
    return range(blocks)


def _at_root(rank: int, size: int, root: int, blocks: int) -> range:
    return range(blocks if rank == root else 0)


def _own(rank: int, size: int, root: int, blocks: int) -> range:
    return range(rank, rank + 1)


def _none(rank: int, size: int, root: int, blocks: int) -> range:
    return range(0)


MEANINGS: dict[str, Meaning] = {
    "barrier": Meaning(_none, lambda rank, size, root, blocks: {}, synchronises=True),
    "broadcast": Meaning(
        _at_root, lambda rank, size, root, blocks: dict.fromkeys(range(blocks), (root,)), rooted=True, vector=True
    ),
    "reduce": Meaning(
        _all,
        lambda rank, size, root, blocks: {c: range(size) for c in range(blocks)} if rank == root else {},
        rooted=True,
        reduces=True,
        vector=True,
    ),
    "scatter": Meaning(_at_root, lambda rank, size, root, blocks: {rank: (root,)}, rooted=True),
    "gather": Meaning(
        _own, lambda rank, size, root, blocks: {c: (c,) for c in range(size)} if rank == root else {}, rooted=True
    ),
    "allgather": Meaning(_own, lambda rank, size, root, blocks: {c: (c,) for c in range(size)}),
    "reduce_scatter": Meaning(_all, lambda rank, size, root, blocks: {rank: range(size)}, reduces=True),
    "allreduce": Meaning(
        _all, lambda rank, size, root, blocks: {c: range(size) for c in range(blocks)}, reduces=True, vector=True
    ),
    "alltoall": Meaning(
        lambda rank, size, root, blocks: range(rank * size, (rank + 1) * size),
        lambda rank, size, root, blocks: {source * size + rank: (source,) for source in range(size)},
        pairs=True,
    ),
    "scan": Meaning(
        _all, lambda rank, size, root, blocks: {c: range(rank + 1) for c in range(blocks)}, reduces=True, vector=True
    ),
    "exscan": Meaning(
        _all,
        lambda rank, size, root, blocks: {c: range(rank) for c in range(blocks)} if rank else {},
        reduces=True,
        vector=True,
    ),
}
"""Every collective by name. All packages use these names."""


def vector(collective: str, size: int, blocks: int) -> int:
    """Number of blocks that make up n in cost formulas and reported sizes: the most that one rank holds."""
    meaning = MEANINGS[collective]
    held = [len(list(meaning.before(0, size, 0, blocks))), len(meaning.after(0, size, 0, blocks))]
    return max(1, *held)


def before(
    collective: str, rank: int, size: int, root: int = 0, parts: int = 1, blocks: int | None = None
) -> list[int]:
    """Numbers of the input chunks of `rank`, when every block is cut in `parts` chunks.

    `blocks` is the number of blocks of a vector. For other collectives `Meaning.blocks` gives it.
    """
    meaning = MEANINGS[collective]
    held = meaning.before(rank, size, root, blocks or meaning.blocks(size))
    return [block * parts + part for block in held for part in range(parts)]


def after(
    collective: str, rank: int, size: int, root: int = 0, parts: int = 1, blocks: int | None = None
) -> dict[int, Value]:
    """Required output of `rank`: chunk number -> terms to be combined, in rank order.

    `before` describes the arguments.
    """
    meaning = MEANINGS[collective]
    wanted = meaning.after(rank, size, root, blocks or meaning.blocks(size))
    return {
        chunk: tuple((origin, chunk) for origin in origins)
        for block, origins in wanted.items()
        for chunk in range(block * parts, (block + 1) * parts)
    }
