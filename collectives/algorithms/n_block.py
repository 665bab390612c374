"""Pipelined broadcast and reduce over a circulant graph: k blocks in k - 1 + q rounds, q = ceil(log2 p).

In every round each rank sends to distance skip[i] and receives from distance -skip[i]. `i` cycles through the
q = ceil(log2 p) skips from 1 to ceil(p/2). The block numbers are chosen so that a rank receives q different blocks in
q rounds and has received every block before it sends it. Blocks 0 1 2 from rank 0 of 5, block received by round::

    skip        2   3   1   2   3
    rank 1              2   1   0
    rank 2      0           2   1
    rank 3          1   0       2
    rank 4              1   0   2

(Traff 2024, "Optimal Broadcast Schedules in Logarithmic Time", arXiv 2407.18004.)
"""

from functools import lru_cache

from collectives.schedule.steps import Recv, Round, Rounds, Send, one
from collectives.schedule.transforms import reverse


@lru_cache(maxsize=256)
def _skips(size: int) -> tuple[int, ...]:
    """Rank distances of a cycle's rounds, ascending: 1 ... ceil(p/4), ceil(p/2). Then p and a sentinel."""
    skips = [size]
    while skips[0] > 1:
        skips.insert(0, (skips[0] + 1) // 2)
    return (*skips, 3 * size)


def _first_block(place: int, skips: tuple[int, ...]) -> int:
    """Block that rank root + `place` gets in a complete cycle 0: smallest skip index of `place` split greedily."""
    last = len(skips) - 2
    for index in range(last - 1, -1, -1):
        if skips[index] == place:
            return index
        if skips[index] < place:
            place -= skips[index]
    return last


@lru_cache(maxsize=1 << 14)
def _receive_schedule(place: int, size: int) -> tuple[int, ...]:
    """Block that rank root + `place` receives in each of the q rounds of cycle 0. Cycle c adds c q. Negative: no block.

    The place p + r is reached from 0 by skips, always the largest that leads to a place not too far yet. Every such
    way ends in a skip that no other way has used, and its number is the block. (Traff 2024, algorithm 5.)
    """
    skips = _skips(size)
    last = len(skips) - 2
    base, goal = _first_block(place, skips), size + place
    unused = [index for index in range(last, -1, -1) if index != base]
    blocks: list[int] = []
    limit = 2 * size

    def search(here: int, start: int) -> None:
        """Append to `blocks` by depth-first search from `here` over unused skips up to index `start`, largest first."""
        nonlocal limit
        for index in [index for index in unused if index <= start]:
            there = here + skips[index]
            # the recursion may have used the skip, or passed the goal, since the list was made
            if index not in unused or there > goal - skips[len(blocks)] or there >= limit:
                continue
            if there <= goal - skips[len(blocks) + 1]:
                search(there, index)
            if here > goal - skips[len(blocks) + 1]:
                return
            limit = there
            blocks.append(index)
            unused.remove(index)

    search(0, last)
    return tuple(base if block == last else block - last for block in blocks)


def _received_block(place: int, size: int, blocks: int, time: int) -> int | None:
    """Block that rank root + `place` receives in round `time` of a broadcast of `blocks` blocks, or None.

    Rounds are numbered from -(blocks - 1) mod q, so that the last cycle is complete. A cycle uses every skip once.
    Numbers beyond the last block stand for the last block, received only once.
    """
    skips, schedule = _skips(size), _receive_schedule(place, size)
    lap, last = len(skips) - 2, blocks - 1
    late = -last % lap  # rounds by which the first cycle is shorter

    def block(time: int) -> int:
        return schedule[time % lap] + time // lap * lap - late

    found = block(time)
    if found < last:
        return found if found >= 0 else None
    before = range(max(late, time - 2 * lap), time)
    return None if any(block(earlier) >= last for earlier in before) else last


def broadcast(rank: int, size: int, root: int, segments: int) -> Rounds:
    """Pipeline over a circulant graph: each rank receives a new block in every round and forwards an earlier one.

    Cost: (k-1+q)(alpha + n beta / k) for k blocks, and no fewer rounds are possible. (Traff 2024.)
    """
    if size == 1:
        return
    skips, place = _skips(size), (rank - root) % size
    lap = len(skips) - 2
    late = -(segments - 1) % lap
    for time in range(late, late + segments - 1 + lap):
        skip = skips[time % lap]
        ahead = (place + skip) % size
        leaves = _received_block(ahead, size, segments, time) if ahead else None
        comes = _received_block(place, size, segments, time) if place else None
        steps: Round = [] if leaves is None else [Send((rank + skip) % size, one(leaves))]
        yield steps if comes is None else [*steps, Recv((rank - skip) % size, one(comes))]


def reduce(rank: int, size: int, root: int, segments: int) -> Rounds:
    """Reverse of the broadcast: partial sums go to the root block by block over the same circulant graph.

    Cost: (k-1+q)(alpha + n (beta + gamma) / k) for k blocks. Commutative operations only. (Traff 2024.)
    """
    return reverse(broadcast(rank, size, root, segments), rank, reducing=True)
