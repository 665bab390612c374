"""Catalogue of algorithms by collective and name: generator, properties, costs.

A new algorithm is one generator and one line of `CATALOG`. The proof of every entry compares its formulas with the
schedule.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from collectives.algorithms import (
    binary_tree,
    census,
    chain,
    circulant,
    direct,
    dissemination,
    halving,
    hierarchical,
    leaders,
    linear,
    mst,
    n_block,
    pairwise,
    recursive,
    ring,
    scan,
    tree,
    two_tree,
)
from collectives.analysis.rank_symmetry import SYMMETRIES, RankSymmetry
from collectives.schedule.semantics import MEANINGS
from collectives.schedule.steps import Rounds, Schedule
from collectives.schedule.topology import HashedTuple, Nodes, contiguous, regular
from collectives.schedule.transforms import segmented


class Algorithm(NamedTuple):
    """An algorithm of one collective: its generator, costs and properties.

    `generate` takes (rank, size) and, in this order, the root if there is one, the number of segments if it `cuts`,
    the placement if it is `placed`. Its docstring describes the algorithm. Costs are formulas, see `evaluate`. With
    `placed` they hold for nodes of equal size.
    """

    generate: Callable[..., Rounds]
    rounds: str  # messages on the critical path: the factor of alpha
    volume: str = "0"  # vectors of n bytes sent or received by the busiest rank, the larger of the two
    combined: str = "0"  # vectors combined by the busiest rank
    beta: str = ""  # the factor of n beta on the critical path, if it differs from `volume`
    gamma: str = ""  # the factor of n gamma on the critical path, if it differs from `combined`
    total: str = ""  # vectors sent by all ranks together, or "" if counted only
    depth: str = ""  # messages that follow one another from rank to rank, if a rank has several under way at once
    ordered: bool = False  # values combine in rank order (`placed`: only if ranks of a node are consecutive)
    alike: bool = True  # all ranks compute a sum by the same additions and so get the same bits
    private: bool = False  # ranks other than the root touch their own blocks only: no need for lengths of others
    blocks: str = "p"  # number of blocks that a vector is cut in: a formula
    cuts: bool = False  # the generator pipelines the data itself
    placed: bool = False  # the schedule depends on which ranks share a node
    strided: bool = False  # messages are of a block from each of many nodes, if these have several ranks
    exact: bool = True  # the formulas are exact for every number of ranks, else upper bounds
    symmetry: str = ""  # of the ranks, or if `placed` of the nodes, with root 0 and one segment: see `rank_symmetry`

    @property
    def idea(self) -> str:
        """One-line description of the algorithm: first line of its generator's docstring, without the cost."""
        return (self.generate.__doc__ or "").strip().splitlines()[0].partition(" Cost: ")[0]

    def keeps_order(self, nodes: Nodes | None = None) -> bool:
        """True if reductions combine operands in rank order under this placement of ranks on nodes."""
        return self.ordered and (not self.placed or contiguous(nodes))

    def seconds(self, size: int, nbytes: int, alpha: float, beta: float, gamma: float, segments: int = 1) -> float:
        """Predicted seconds as if on one node: alpha per message, beta per byte, gamma per reduced byte.

        `nbytes` is n of the formulas. `segments` is ignored unless the algorithm `cuts`.
        """
        if size == 1:
            return 0.0
        rounds, moved, added = (
            evaluate(formula, size, segments)
            for formula in (self.rounds, self.beta or self.volume, self.gamma or self.combined)
        )
        return rounds * alpha + nbytes * (moved * beta + added * gamma)


class LowerBound(NamedTuple):
    """Lower bounds on rounds, volume and reductions of a collective, as formulas. Not always reachable together."""

    rounds: str
    volume: str
    combined: str = "0"


BOUNDS: dict[str, LowerBound] = {
    "barrier": LowerBound("q", "0"),
    "broadcast": LowerBound("q", "1"),
    "reduce": LowerBound("q", "1", "(p-1)/p"),
    "scatter": LowerBound("q", "(p-1)/p"),
    "gather": LowerBound("q", "(p-1)/p"),
    "allgather": LowerBound("q", "(p-1)/p"),
    "reduce_scatter": LowerBound("q", "(p-1)/p", "(p-1)/p"),
    "allreduce": LowerBound("q", "2*(p-1)/p", "(p-1)/p"),
    "alltoall": LowerBound("q", "(p-1)/p"),
    "scan": LowerBound("q", "1", "1"),
    "exscan": LowerBound("q", "1", "0"),
}
"""Lower bounds per collective for p > 1 (Chan et al. 2007, section 3)."""

CATALOG: dict[str, dict[str, Algorithm]] = {
    "barrier": {
        "linear": Algorithm(linear.barrier, "2*(p-1)", depth="2"),
        "dissemination": Algorithm(dissemination.barrier, "q", symmetry="rotation"),
        "leaders": Algorithm(leaders.barrier, "qN+2*qM", placed=True, symmetry="rotation"),
    },
    "broadcast": {
        "linear": Algorithm(linear.broadcast, "p-1", "p-1", depth="1", total="p-1"),
        "mst": Algorithm(mst.broadcast, "q", "q", symmetry="binomial tree"),
        "ring": Algorithm(ring.broadcast, "q+p-1", "2*(p-1)/p"),
        "chain": Algorithm(chain.broadcast, "p-1", "min(1,p-1)", beta="p-1", total="p-1"),
        "circulant": Algorithm(
            n_block.broadcast, "k-1+q", "(k-1+q)/k", blocks="1", cuts=True, symmetry="doubling tree"
        ),
        "two_tree": Algorithm(
            two_tree.broadcast, "2*(k+f)", "min(1,p-1)", beta="(k+f)/k", blocks="2", cuts=True, exact=False
        ),
        "hierarchical": Algorithm(
            hierarchical.broadcast, "2*(qN+qM)", "2*(p-1)/p", placed=True, symmetry="binomial tree"
        ),
        "leaders": Algorithm(leaders.broadcast, "qN+qM", "qN+qM", blocks="1", placed=True, symmetry="binomial tree"),
        "direct": Algorithm(direct.broadcast, "p-1", "p-1", depth="1", total="p-1"),
    },
    "reduce": {
        "linear": Algorithm(linear.reduce, "p-1", "p-1", "p-1", depth="1", ordered=True, total="p-1"),
        "mst": Algorithm(mst.reduce, "q", "q", "q", ordered=True, symmetry="binomial tree"),
        "ring": Algorithm(ring.reduce, "q+p-1", "2*(p-1)/p", "(p-1)/p"),
        "chain": Algorithm(chain.reduce, "p-1", "min(1,p-1)", "min(1,p-1)", beta="p-1", gamma="p-1", total="p-1"),
        "rabenseifner": Algorithm(
            halving.reduce, "2*f+odd", "2*(P-1)/P+odd", "(P-1)/P+odd", blocks="P", symmetry="butterfly to a tree"
        ),
        "circulant": Algorithm(
            n_block.reduce, "k-1+q", "(k-1+q)/k", "(k-1+q)/k", blocks="1", cuts=True, symmetry="doubling tree"
        ),
        "two_tree": Algorithm(
            two_tree.reduce,
            "2*(k+f)",
            "min(1,p-1)",
            "min(1,p-1)",
            "(k+f)/k",
            "(k+f)/k",
            blocks="2",
            cuts=True,
            exact=False,
        ),
        "hierarchical": Algorithm(
            hierarchical.reduce, "2*(qN+qM)", "2*(p-1)/p", "(p-1)/p", placed=True, symmetry="binomial tree"
        ),
        "leaders": Algorithm(
            leaders.reduce, "qN+qM", "qN+qM", "qN+qM", ordered=True, blocks="1", placed=True, symmetry="binomial tree"
        ),
        "direct": Algorithm(
            direct.reduce, "2*(p-1)", "2*(p-1)/p", "(p-1)/p", depth="2", ordered=True, total="(p-1)*(p+1)/p"
        ),
    },
    "scatter": {
        "linear": Algorithm(linear.scatter, "p-1", "(p-1)/p", depth="1", private=True, total="(p-1)/p"),
        "mst": Algorithm(mst.scatter, "q", "(p-1)/p", symmetry="binomial tree"),
        "direct": Algorithm(direct.scatter, "p-1", "(p-1)/p", depth="1", private=True, total="(p-1)/p"),
        "hierarchical": Algorithm(
            hierarchical.scatter, "qN+qM", "(p-1)/p", placed=True, strided=True, symmetry="binomial tree"
        ),
        "leaders": Algorithm(leaders.scatter, "qN+qM", "(p-1)/p", placed=True, symmetry="binomial tree"),
    },
    "gather": {
        "linear": Algorithm(linear.gather, "p-1", "(p-1)/p", depth="1", private=True, total="(p-1)/p"),
        "mst": Algorithm(mst.gather, "q", "(p-1)/p", symmetry="binomial tree"),
        "direct": Algorithm(direct.gather, "p-1", "(p-1)/p", depth="1", private=True, total="(p-1)/p"),
        "hierarchical": Algorithm(
            hierarchical.gather, "qN+qM", "(p-1)/p", placed=True, strided=True, symmetry="binomial tree"
        ),
        "leaders": Algorithm(leaders.gather, "qN+qM", "(p-1)/p", placed=True, symmetry="binomial tree"),
    },
    "allgather": {
        "linear": Algorithm(linear.allgather, "2*(p-1)", "p-1", beta="(p-1)/p+p-1", depth="2", total="(p-1)*(p+1)/p"),
        "mst": Algorithm(mst.allgather, "2*q", "q", beta="(p-1)/p+q", symmetry="binomial tree"),
        "ring": Algorithm(ring.allgather, "p-1", "(p-1)/p", total="p-1"),
        "recursive_doubling": Algorithm(
            halving.allgather, "f+2*odd", "(P-1+folds+odd*(p-1))/p", beta="(P-1+folds)/p+odd", symmetry="exclusive or"
        ),
        "circulant": Algorithm(circulant.allgather, "q", "(p-1)/p", symmetry="rotation"),
        "direct": Algorithm(direct.allgather, "p-1", "(p-1)/p", depth="1", total="p-1"),
        "hierarchical": Algorithm(
            hierarchical.allgather, "qN+qM", "(p-1)/p", placed=True, strided=True, symmetry="rotation"
        ),
        "leaders": Algorithm(
            leaders.allgather, "qN+2*qM", "(p-M)/p+qM", beta="(p-1)/p+qM", placed=True, symmetry="rotation"
        ),
    },
    "reduce_scatter": {
        "linear": Algorithm(
            linear.reduce_scatter,
            "2*(p-1)",
            "p-1",
            "p-1",
            beta="(p-1)/p+p-1",
            depth="2",
            ordered=True,
            total="(p-1)*(p+1)/p",
        ),
        "mst": Algorithm(mst.reduce_scatter, "2*q", "q", "q", beta="(p-1)/p+q", ordered=True, symmetry="binomial tree"),
        "ring": Algorithm(ring.reduce_scatter, "p-1", "(p-1)/p", "(p-1)/p", total="p-1"),
        "recursive_halving": Algorithm(
            halving.reduce_scatter,
            "f+2*odd",
            "(P-1+folds+odd*(p-1))/p",
            "(P-1+folds+odd*(p-1))/p",
            beta="(P-1+folds)/p+odd",
            gamma="(P-1+folds)/p+odd",
            symmetry="exclusive or",
        ),
        "circulant": Algorithm(circulant.reduce_scatter, "q", "(p-1)/p", "(p-1)/p", symmetry="rotation"),
        "direct": Algorithm(direct.reduce_scatter, "p-1", "(p-1)/p", "(p-1)/p", depth="1", ordered=True, total="p-1"),
        "tree": Algorithm(tree.reduce_scatter, "p-1", "(p-1)/p", "(p-1)/p", depth="1", ordered=True, total="p-1"),
        "hierarchical": Algorithm(
            hierarchical.reduce_scatter, "qN+qM", "(p-1)/p", "(p-1)/p", placed=True, strided=True, symmetry="rotation"
        ),
        "leaders": Algorithm(
            leaders.reduce_scatter,
            "qN+2*qM",
            "(p-M)/p+qM",
            "(p-M)/p+qM",
            beta="(p-1)/p+qM",
            placed=True,
            symmetry="rotation",
        ),
    },
    "allreduce": {
        "linear": Algorithm(
            linear.allreduce, "2*(p-1)", "p-1", "p-1", beta="2*(p-1)", depth="2", ordered=True, total="2*(p-1)"
        ),
        "mst": Algorithm(
            mst.allreduce, "2*q", "q", "q", beta="2*q", ordered=True, total="2*(p-1)", symmetry="binomial tree"
        ),
        "ring": Algorithm(ring.allreduce, "2*(p-1)", "2*(p-1)/p", "(p-1)/p", total="2*(p-1)"),
        "recursive_doubling": Algorithm(
            recursive.allreduce, "q+odd", "q", "q", beta="q+odd", ordered=True, symmetry="exclusive or"
        ),
        "rabenseifner": Algorithm(
            halving.allreduce,
            "2*f+2*odd",
            "2*(P-1)/P+odd",
            "(P-1)/P+odd",
            beta="2*(P-1)/P+2*odd",
            total="2*(p-1)",
            blocks="P",
            symmetry="exclusive or",
        ),
        "census": Algorithm(census.allreduce, "q", "q", "q+ones-min(1,p-1)", alike=False, symmetry="rotation"),
        "ordered_census": Algorithm(
            census.ordered_allreduce,
            "q",
            "max(0,2*q-1)",
            "q+ones",
            ordered=True,
            alike=False,
            exact=False,
            symmetry="ordered census",
        ),
        "circulant": Algorithm(circulant.allreduce, "2*q", "2*(p-1)/p", "(p-1)/p", symmetry="rotation"),
        "two_tree": Algorithm(
            two_tree.allreduce,
            "4*(k+f)",
            "min(2,p-1)",
            "min(1,p-1)",
            "2*(k+f)/k",
            "(k+f)/k",
            ordered=True,
            blocks="2",
            cuts=True,
            exact=False,
        ),
        "direct": Algorithm(
            direct.allreduce, "2*(p-1)", "2*(p-1)/p", "(p-1)/p", depth="2", ordered=True, total="2*(p-1)"
        ),
        "binary_tree": Algorithm(
            binary_tree.allreduce,
            "4*f",
            "min(3,p-1)",
            "min(2,p-1)",
            beta="4*f",
            gamma="2*f",
            ordered=True,
            total="2*(p-1)",
            blocks="1",
            exact=False,
        ),
        "tree": Algorithm(tree.allreduce, "2*(p-1)", "2*(p-1)/p", "(p-1)/p", depth="2", ordered=True, total="2*(p-1)"),
        "hierarchical": Algorithm(
            hierarchical.allreduce, "2*(qN+qM)", "2*(p-1)/p", "(p-1)/p", placed=True, symmetry="rotation"
        ),
        "leaders": Algorithm(
            leaders.allreduce,
            "qN+oddN+2*qM",
            "qN+qM",
            "qN+qM",
            beta="qN+oddN+2*qM",
            ordered=True,
            blocks="1",
            placed=True,
            symmetry="exclusive or",
        ),
    },
    "alltoall": {
        "pairwise": Algorithm(pairwise.alltoall, "p-1", "(p-1)/p", private=True, total="p-1"),
        "bruck": Algorithm(pairwise.bruck_alltoall, "q", "hops/p", total="hops"),
        "direct": Algorithm(direct.alltoall, "p-1", "(p-1)/p", depth="1", private=True, total="p-1"),
    },
    "scan": {
        "linear": Algorithm(
            scan.linear_scan, "p-1", "min(1,p-1)", "min(1,p-1)", beta="p-1", gamma="p-1", ordered=True, total="p-1"
        ),
        "doubling": Algorithm(scan.doubling_scan, "q", "q", "q", ordered=True, symmetry="prefix"),
    },
    "exscan": {
        "linear": Algorithm(
            scan.linear_exscan,
            "p-1",
            "min(1,p-1)",
            "min(1,max(0,p-2))",
            beta="p-1",
            gamma="max(0,p-2)",
            ordered=True,
            total="p-1",
        ),
        "doubling": Algorithm(scan.doubling_exscan, "q", "q", "max(0,2*q-1)", ordered=True, symmetry="prefix"),
    },
}
"""collective -> {name: algorithm}. The first one is the naive reference."""


@lru_cache(maxsize=4096)
def evaluate(formula: str, size: int, segments: int = 1, nodes: int = 1) -> Fraction:
    """Value of a cost formula such as ``2*(p-1)/p`` for p = `size` ranks, k = `segments` and N = `nodes`.

    Names: q = ceil(log2 p), f = floor(log2 p), P = 2^f, odd = (p != P). `ones` is the number of one bits of p-1,
    `hops` the number of one bits in 0 .. p-1 together, `folds` the sum of min(2^i, p-P) over i < f. There are N nodes
    of M ranks. `qN` and `qM` are ceil(log2 N) and ceil(log2 M), and `oddN` is `odd` for N.
    """
    code = compile(formula, formula, "eval")  # the formulas are the constants above
    return Fraction(eval(code, {"min": min, "max": max, "__builtins__": {}, **_values(size, segments, nodes)}))


@lru_cache(maxsize=4096)
def evaluate_all(formulas: tuple[str, ...], size: int, segments: int = 1) -> tuple[float, ...]:
    """Values of several formulas as floats. Faster than the exact values of `evaluate`."""
    code = compile(f"({', '.join(formulas)},)", "formulas", "eval")
    return tuple(eval(code, {"min": min, "max": max, "__builtins__": {}, **_floats(size, segments)}))


@lru_cache(maxsize=256)
def _floats(p: int, k: int) -> dict[str, float]:
    return {name: float(value) for name, value in _values(p, k, 1).items()}


@lru_cache(maxsize=256)
def _values(p: int, k: int, N: int) -> dict[str, Fraction | int]:
    """Values of the names in formulas."""
    f = p.bit_length() - 1
    M, P = -(-p // N), 1 << f
    doublings = (p - P).bit_length()  # number of i with 2^i <= p-P
    return {
        "p": Fraction(p),
        "k": Fraction(k),
        "q": (p - 1).bit_length(),
        "f": f,
        "P": Fraction(P),
        "odd": int(p != P),
        "ones": (p - 1).bit_count(),
        "hops": sum(map(int.bit_count, range(p))),
        "folds": (1 << doublings) - 1 + (f - doublings) * (p - P),
        "N": Fraction(N),
        "M": Fraction(M),
        "qN": (N - 1).bit_length(),
        "qM": (M - 1).bit_length(),
        "oddN": int(N & (N - 1) != 0),
    }


def names(collective: str) -> list[str]:
    """Names of the algorithms for a collective, the naive one first."""
    return list(_entries(collective))


def find(collective: str, name: str) -> Algorithm:
    """Look up an algorithm by name. ValueError if there is none."""
    entries = _entries(collective)
    if name not in entries:
        raise ValueError(f"unknown algorithm {name!r} for {collective}; known: {', '.join(entries)}")
    return entries[name]


def _entries(collective: str) -> Mapping[str, Algorithm]:
    if collective not in CATALOG:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(CATALOG)}")
    return CATALOG[collective]


def blocks(collective: str, name: str, size: int) -> int:
    """Number of blocks that an algorithm divides the data into on `size` ranks, before segmentation."""
    return _blocks(collective, find(collective, name), size)


def _blocks(collective: str, entry: Algorithm, size: int) -> int:
    meaning = MEANINGS[collective]
    return int(evaluate(entry.blocks, size)) if meaning.vector else meaning.blocks(size)


def build(
    collective: str, name: str, rank: int, size: int, root: int = 0, segments: int = 1, nodes: Nodes | None = None
) -> Schedule:
    """Schedule of one rank, pipelined over `segments` of the data. `nodes` is the node of every rank."""
    entry = find(collective, name)
    return _built(collective, entry, rank, size, root, segments, nodes if entry.placed else None)


@lru_cache(maxsize=1024)
def _built(
    collective: str, entry: Algorithm, rank: int, size: int, root: int, segments: int, nodes: Nodes | None
) -> Schedule:
    return tuple(map(tuple, _rounds(collective, entry, rank, size, root, segments, nodes)))


def _rounds(
    collective: str, entry: Algorithm, rank: int, size: int, root: int, segments: int, nodes: Nodes | None
) -> Rounds:
    meaning = MEANINGS[collective]
    optional: tuple[tuple[Any, bool], ...] = (root, meaning.rooted), (segments, entry.cuts), (nodes, entry.placed)
    rounds = entry.generate(rank, size, *(value for value, wanted in optional if wanted))
    if segments > 1 and not entry.cuts:
        return segmented(rounds, segments, _blocks(collective, entry, size), meaning.vector)
    return rounds


def rounds_of(
    ranks: Iterable[int],
    collective: str,
    name: str,
    size: int,
    root: int = 0,
    segments: int = 1,
    nodes: Nodes | None = None,
) -> Iterator[Rounds]:
    """Yield the rounds of one rank after another, as generators, for schedules too large for memory all at once."""
    entry = find(collective, name)
    lasting = nodes and HashedTuple(nodes)
    return (_rounds(collective, entry, rank, size, root, segments, lasting) for rank in ranks)


def symmetry_of(collective: str, name: str, size: int, nodes: Nodes | None = None) -> RankSymmetry | None:
    """Symmetry of the schedule of all ranks with root 0. None if it has none for this number of ranks or nodes."""
    entry = find(collective, name)
    if not entry.symmetry or (entry.placed and nodes is None):
        return None
    groups = 1 + max(nodes) if entry.placed and nodes else size
    if SYMMETRIES[entry.symmetry].powers and groups & (groups - 1):
        return None
    if groups != size and nodes != regular(groups * (size // groups), size // groups):
        return None
    owned = 1 if MEANINGS[collective].vector else size // groups  # blocks of a node: of a rail, or of all its ranks
    return RankSymmetry(entry.symmetry, groups, size // groups, owned if blocks(collective, name, size) == size else 0)


def build_all(
    collective: str, name: str, size: int, root: int = 0, segments: int = 1, nodes: Nodes | None = None
) -> list[Schedule]:
    """Schedules of all ranks in rank order. `build` describes the arguments."""
    return [build(collective, name, rank, size, root, segments, nodes) for rank in range(size)]
