"""Memory forecast of servers and workers, from settings and shapes. Messages in flight are not included.

The arrival order of gradients is unknown, so the forecast counts the worst case. With one worker it is exact.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from parallel.asynchronous.server.consistency import rule_of
from parallel.asynchronous.server.key_assignment import ServerKey
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.settings import Settings


def of_worker(plan: PartitionSpec, synchronous: bool) -> Counter[str]:
    """Bytes of a worker by purpose, except activations. Asynchronous workers have two weight vectors, to prefetch."""
    storage, wide = plan.precision.storage.itemsize, plan.precision.wide.itemsize
    parameters = (1 if synchronous else 2) * plan.flat.length * storage
    return Counter(parameters=parameters, gradients=plan.flat.length * wide, buffers=plan.scratch(adds=False) * wide)


def of_shard(
    plan: PartitionSpec, settings: Settings, keys: Iterable[ServerKey], shard: int, states: int, parts: int
) -> Counter[str]:
    """Bytes of one shard by purpose, with `states` optimizer vectors and at most `parts` micro-batches in a step."""
    precision, keys = plan.precision, [key for key in keys if key.server == shard]
    workers, synchronous = plan.ranks - settings.servers, rule_of(settings.consistency).synchronous
    size, wide = sum(key.span.size for key in keys), precision.wide.itemsize
    bytes_ = Counter(parameters=size * precision.storage.itemsize, optimizer=size * wide * (states + precision.master))
    for key in keys if parts else ():
        landing = workers if key.table is None else 1  # rows arrive in temporary memory and are expanded one by one
        bytes_["gradients"] += key.span.size * wide * vectors(parts, landing, workers, synchronous, plan.reproducible)
    return bytes_


@lru_cache(maxsize=256)
def vectors(parts: int, landing: int, workers: int, synchronous: bool, reproducible: bool) -> int:
    """Maximum number of gradients of one key that a server holds at once.

    At most `landing` gradients arrive at once, as a worker sends the next one after the previous one is acknowledged.
    `reproducible` gradients are added in canonical order.

    >>> vectors(8, 1, 1, True, True), vectors(8, 2, 2, True, False), vectors(8, 2, 2, False, False)
    (4, 4, 2)
    """
    if not synchronous:
        return landing
    if not reproducible:
        return max(here.bit_count() + min(landing, parts - here) for here in range(parts))
    return max(  # parts are drawn in order: one worker has the last drawn one, the others have any of the earlier ones
        nodes(drawn, away) + min(landing, away + (drawn < parts))
        for drawn in range(parts + 1)
        for away in range(min(workers - 1, drawn) + 1)
    )


@lru_cache(maxsize=1 << 16)
def nodes(leaves: int, missing: int) -> int:
    """Maximum number of partial sums in a binary tree over `leaves` leaves, if any `missing` leaves have not arrived.

    >>> nodes(8, 0), nodes(8, 1), nodes(8, 2)
    (1, 3, 4)
    """
    if not missing or leaves <= 1:
        return 0 if missing else leaves.bit_count()
    left = 1 << (leaves - 1).bit_length() - 1  # the largest power of two below
    right = leaves - left
    splits = range(max(0, missing - right), min(left, missing) + 1)
    return max(nodes(left, some) + nodes(right, missing - some) for some in splits)
