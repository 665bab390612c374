"""Partition of a model into contiguous parts, such that the slowest is as fast as possible, by dynamic programming."""

import operator
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
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


def partition(layers: Sequence[LayerCost], parts: int, limit: MemoryLimit | None = None) -> list[range]:
    """Cut the layers into contiguous parts so that the slowest part takes the least time, within a memory limit.

    Minimises the time of the slowest part, which is the cost per micro-batch in the steady state; then the sum of
    squares of the parts' times; of several solutions, the one with the longest first parts. Dynamic programming in
    parts * layers**2 steps (Narayanan et al., "PipeDream", SOSP 2019, section 3.1). ValueError if there are fewer
    layers than parts, or no cuts within the limit.

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
        return times[stop] - times[start]

    cuts = _best(len(layers), parts, seconds, max)
    if cuts is None:
        assert limit is not None
        raise ValueError(f"no cuts of {len(layers)} layers into {parts} parts keep {limit.nbytes} bytes each")
    slowest = max(times[cut.stop] - times[cut.start] for cut in cuts)

    def square(part: int, start: int, stop: int) -> Number | None:
        own = seconds(part, start, stop)
        return None if own is None or own > slowest else own * own

    cuts = _best(len(layers), parts, square, operator.add)
    assert cuts is not None
    return cuts


def _best(
    count: int,
    parts: int,
    price: Callable[[int, int, int], Number | None],
    join: Callable[[Number, Number], Number],
) -> list[range] | None:
    """Cuts of `count` layers into parts with the least total price (combined by `join`); None if there are none.

    ``price(part, start, stop)`` is None where the part may not have those layers.
    """

    @cache
    def best(part: int, start: int) -> tuple[Number, list[range]] | None:
        """Least price and cuts of layers from `start` on into parts from `part` on; ties: longest first part."""
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
