"""Partition of a model into contiguous parts, such that the slowest is as fast as possible, by dynamic programming."""

import operator
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, product
from typing import NamedTuple

from parallel.pipeline.schedule.stage_placement import Number, PerPart, spread


class LayerCost(NamedTuple):
    """Cost of a layer for one micro-batch: seconds of forward, input and weight gradients, and bytes of memory."""

    forward: Number
    backward: Number
    weights: Number = 0
    activations: Number = 0  # saved in F for B and W
    parameters: Number = 0  # weights, gradients and optimizer state

    @property
    def seconds(self) -> Number:
        return self.forward + self.backward + self.weights


class MemoryLimit(NamedTuple):
    """Memory limit: bytes that a part may use with `microbatches` alive at once (`activation_memory.peaks`)."""

    nbytes: Number
    microbatches: PerPart = 1


def partition(
    layers: Sequence[LayerCost], parts: int, limit: MemoryLimit | None = None, ranks: Sequence[int] | None = None
) -> list[range]:
    """Cut the layers into contiguous parts so that the slowest part takes the least time, within a memory limit.

    Minimises the time of the slowest part, which is the cost per micro-batch in the steady state; then the sum of
    squares of the parts' times; of several solutions, the one with the longest first parts. Dynamic programming in
    parts * layers**2 steps (Narayanan et al., "PipeDream", SOSP 2019, section 3.1). With `ranks`, part k takes a
    ``ranks[k]``-th of its time, as its replicas take turns. ValueError if there are fewer layers than parts, or no cuts
    within the limit.

    Examples
    --------
    >>> partition([LayerCost(forward=t, backward=2 * t) for t in (1, 1, 1, 3)], parts=2)
    [range(0, 3), range(3, 4)]
    """
    if parts < 1:
        raise ValueError(f"parts: expected at least 1, found {parts}")
    if len(layers) < parts:
        raise ValueError(f"layers: a model of {len(layers)} layers cannot be cut in {parts} parts")
    times: list[Number] = [0, *accumulate(layer.seconds for layer in layers)]
    nbytes = [0, *accumulate(layer.activations for layer in layers)]
    fixed = [0, *accumulate(layer.parameters for layer in layers)]
    kept = spread(limit.microbatches, parts) if limit else []

    def seconds(part: int, start: int, stop: int) -> Number | None:
        if limit and kept[part] * (nbytes[stop] - nbytes[start]) + fixed[stop] - fixed[start] > limit.nbytes:
            return None
        whole = times[stop] - times[start]
        return whole if ranks is None else whole / ranks[part]

    cuts = _best(len(layers), parts, seconds, max)
    if cuts is None:
        assert limit is not None
        raise ValueError(f"no cuts of {len(layers)} layers into {parts} parts keep {limit.nbytes} bytes each")
    slowest = max(seconds(part, cut.start, cut.stop) or 0 for part, cut in enumerate(cuts))

    def square(part: int, start: int, stop: int) -> Number | None:
        own = seconds(part, start, stop)
        return None if own is None or own > slowest else own * own  # squares alone may prefer a slower part

    cuts = _best(len(layers), parts, square, operator.add)
    assert cuts is not None
    return cuts


def replicate(layers: Sequence[LayerCost], ranks: int, exchange: Number = 0) -> tuple[list[range], tuple[int, ...]]:
    """Cut the layers into parts and divide the ranks among them as replicas, so that the slowest part is fastest.

    A part on r ranks takes an r-th of its time, but at least that of its gradient sum: 2 (r - 1) / r times the bytes of
    `LayerCost.parameters` times `exchange`, in seconds per byte and micro-batch. Of equal solutions it returns one with
    the fewest parts. Dynamic programming in (layers * ranks)**2 steps (Narayanan et al., "PipeDream", SOSP 2019,
    section 3.1).

    Examples
    --------
    >>> replicate([LayerCost(forward=t, backward=t, parameters=w) for t, w in ((4, 1), (4, 1), (4, 90))], 3, exchange=1)
    ([range(0, 2), range(2, 3)], (2, 1))
    """
    if ranks < 1 or not layers:
        raise ValueError(f"ranks: expected at least 1, and layers; found {ranks} and {len(layers)} layers")
    times: list[Number] = [0, *accumulate(layer.seconds for layer in layers)]
    sums: list[Number] = [0, *accumulate(exchange * layer.parameters for layer in layers)]

    @cache
    def best(start: int, left: int) -> tuple[Number, int, list[range], tuple[int, ...]] | None:
        """Slowest time, number of parts, cuts and ranks of the layers from `start` on with `left` ranks."""
        if start == len(layers):
            return (0, 0, [], ()) if not left else None
        found = []
        for stop, count in product(range(start + 1, len(layers) + 1), range(1, left + 1)):
            rest = best(stop, left - count)
            if rest is not None:
                own = max(times[stop] - times[start], 2 * (count - 1) * (sums[stop] - sums[start])) / count
                found.append((max(own, rest[0]), rest[1] + 1, [range(start, stop), *rest[2]], (count, *rest[3])))
        return min(found, key=lambda way: way[:2], default=None)

    found = best(0, ranks)
    assert found is not None  # all layers on all ranks are a solution
    return found[2:]


def _best(
    count: int,
    parts: int,
    price: Callable[[int, int, int], Number | None],
    join: Callable[[Number, Number], Number],
) -> list[range] | None:
    """Cuts of `count` layers into parts with the least total price (combined by `join`). None if there are none.

    ``price(part, start, stop)`` is None where the part may not have those layers.
    """

    @cache
    def best(part: int, start: int) -> tuple[Number, list[range]] | None:
        """Least price and cuts of layers from `start` on into parts from `part` on. Ties: longest first part."""
        if part == parts:
            return (0, []) if start == count else None
        found: list[tuple[Number, list[range]]] = []
        for stop in range(count - (parts - 1 - part), start, -1):
            own, rest = price(part, start, stop), best(part + 1, stop)
            if own is not None and rest is not None:
                found.append((join(own, rest[0]), [range(start, stop), *rest[1]]))
        return min(found, key=lambda way: way[0], default=None)

    found = best(0, 0)
    return found and found[1]
