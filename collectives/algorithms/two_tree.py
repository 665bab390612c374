"""Two trees: one half of the vector goes down each. An inner rank of one tree is a leaf of the other.

In both trees the ranks after the root lie in order, a left subtree before its top. The ranks that have
children are 2, 4, 6 ... in one tree and 1, 3, 5 ... in the other, so in the steady state each rank receives both
halves and sends one of them twice: no link is idle in either direction. 7 ranks, root 0::

    half 0        4           half 1      3
               2     6                 1     5
              1 3   5                   2   4 6

(Sanders, Speck, Traff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".)
"""

from functools import lru_cache
from typing import NamedTuple

from collectives.schedule.steps import Recv, Round, Rounds, Send, one
from collectives.schedule.transforms import reverse


def _subtree_root(start: int, stop: int, places: int, tree: int) -> int:
    """Top of the subtree of inner nodes `start` .. `stop` - 1 of tree 0 or 1: its rank relative to the root. 0 if none.

    Places are 1 .. `places`. Inner place i of tree 0 is 2 i + 2, of tree 1 it is 2 i + 1. A subtree without inner
    places is the leaf between its neighbours.
    """
    top = 2 * ((start + stop) // 2) + 2 - tree - (start == stop)
    return top if 1 <= top <= places else 0


def _children(start: int, stop: int, places: int, tree: int) -> list[int]:
    middle = (start + stop) // 2
    tops = (_subtree_root(start, middle, places, tree), _subtree_root(middle + 1, stop, places, tree))
    return [top for top in tops if top]


@lru_cache(maxsize=8)
def _turns(places: int) -> tuple[int, ...]:
    """Turn (round modulo 2) in which each place receives from its parent in tree 0. In tree 1 it is the other turn.

    Siblings must get different turns. A place has at most one sibling in each tree, so turns alternate along chains of
    siblings, in one pass over all places.
    """
    apart: list[list[int]] = [[] for _ in range(places + 1)]
    for tree in (0, 1):
        parts = [(0, (places + tree) // 2)]
        while parts:
            start, stop = parts.pop()
            if start == stop:
                continue
            children = _children(start, stop, places, tree)
            if len(children) == 2:
                apart[children[0]].append(children[1])
                apart[children[1]].append(children[0])
            parts += [(start, (start + stop) // 2), ((start + stop) // 2 + 1, stop)]
    tops = [_subtree_root(0, (places + tree) // 2, places, tree) for tree in (0, 1)]
    turns = [-1] * (places + 1)
    for first in (*tops, *range(1, places + 1)):  # the root serves both tops, in different trees: turn 0 for both
        if turns[first] >= 0:
            continue
        turns[first] = 0
        chain = [first]
        while chain:
            place = chain.pop()
            for other in apart[place]:
                if turns[other] < 0:
                    turns[other] = 1 - turns[place]
                    chain.append(other)
    return tuple(turns)


def _arrival_round(time: int, place: int, tree: int, turns: tuple[int, ...]) -> int:
    """First round after `time` in which it is the turn of `place` to receive from its parent in `tree`."""
    return time + 1 + (time + 1 + turns[place] + tree) % 2


class _Visit(NamedTuple):
    """First segment of a half at a place: arrival round, sender `parent`, and the places it is sent to."""

    time: int
    parent: int
    children: list[int]


@lru_cache(maxsize=8)
def _visits(places: int) -> tuple[dict[int, _Visit], dict[int, _Visit]]:
    """Visits of both trees by place. The root, place 0, has the half from the start."""
    turns = _turns(places)
    trees: tuple[dict[int, _Visit], dict[int, _Visit]] = {}, {}
    for tree, visits in enumerate(trees):
        inner = (places + tree) // 2
        visits[0] = _Visit(-1, 0, [_subtree_root(0, inner, places, tree)])
        parts = [(0, inner, 0)]
        while parts:
            start, stop, parent = parts.pop()
            top = _subtree_root(start, stop, places, tree)
            if not top:
                continue
            time = _arrival_round(visits[parent].time, top, tree, turns)
            visits[top] = _Visit(time, parent, _children(start, stop, places, tree) if start < stop else [])
            if start < stop:
                middle = (start + stop) // 2
                parts += [(start, middle, top), (middle + 1, stop, top)]
    return trees


@lru_cache(maxsize=8)
def _last_arrival(places: int) -> int:
    """Latest round in which any place receives the first segment of either half."""
    return max(visit.time for visits in _visits(places) for visit in visits.values())


def broadcast(rank: int, size: int, root: int, segments: int) -> Rounds:
    """Each half of the vector goes down its own tree. A rank forwards one half and receives both.

    Cost: at most 2(k+f) alpha + (k+f)/k n beta for k segments of each half, f = floor(log2 p).
    """
    if size == 1:
        return
    # The same number of rounds on all ranks, so that the reverse is aligned.
    rounds: list[Round] = [[] for _ in range(_last_arrival(size - 1) + 2 * segments - 1)]
    place = (rank - root) % size
    for tree, visits in enumerate(_visits(size - 1)):
        time, parent, children = visits[place]
        for segment in range(segments):
            chunk, later = one(tree * segments + segment), 2 * segment
            if place:
                rounds[time + later].append(Recv((parent + root) % size, chunk))
            for child in children:
                rounds[visits[child].time + later].append(Send((child + root) % size, chunk))
    yield from rounds


def reduce(rank: int, size: int, root: int, segments: int) -> Rounds:
    """Reverse of the broadcast: the sum of each half goes up its own tree.

    Cost: at most 2(k+f) alpha + (k+f)/k n (beta + gamma). Commutative operations only.
    """
    return reverse(broadcast(rank, size, root, segments), rank, reducing=True)


def allreduce(rank: int, size: int, segments: int) -> Rounds:
    """Sums go up both trees to rank 0, then the results go down again.

    Cost: at most 4(k+f) alpha + (k+f)/k n (2 beta + gamma). Keeps rank order. All ranks get the same bits.
    """
    yield from reduce(rank, size, 0, segments)
    yield from broadcast(rank, size, 0, segments)
