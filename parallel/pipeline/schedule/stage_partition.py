"""Partition of a model into contiguous parts with the fastest slowest part, by dynamic programming."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from parallel.pipeline.schedule.numeric import Number, PerPart, spread


class LayerCost(NamedTuple):
    """Cost of a layer for one microbatch, measured or estimated.

    Attributes
    ----------
    forward, backward, weights : seconds of F, B and W
    activations : bytes saved in F for B and W
    output : bytes of the result: the message if the model is cut after this layer
    parameters : bytes of weights, gradients and optimizer state
    gradients : bytes of the weight gradients, exchanged where two stages have the layer
    """

    forward: Number
    backward: Number
    weights: Number = 0
    activations: Number = 0
    output: Number = 0
    parameters: Number = 0
    gradients: Number = 0

    @property
    def seconds(self) -> Number:
        return self.forward + self.backward + self.weights


class MemoryLimit(NamedTuple):
    """Bytes that a part may use, with this many microbatches alive at once (`activation_memory.peaks`)."""

    nbytes: Number
    microbatches: PerPart = 1


def partition(
    layers: Sequence[LayerCost],
    parts: int,
    message: Callable[[Number], Number] | None = None,
    limit: MemoryLimit | None = None,
) -> list[range]:
    """Cut the layers into non-empty contiguous parts.

    Minimises the time of the slowest part (or of the slowest message, if larger), which is the cost per microbatch in
    the steady state; then the sum of squares of the parts' times; of several solutions, the one with the longest first
    parts. Dynamic programming in parts * layers**2 steps (Narayanan et al., "PipeDream", SOSP 2019, section 3.1).

    Parameters
    ----------
    layers : sequence of LayerCost
    parts : int
    message : callable (bytes) -> seconds, optional
        Cost of a message; default 0.
    limit : MemoryLimit, optional

    Raises
    ------
    ValueError
        If there are fewer layers than parts, or no cuts within the limit.

    Examples
    --------
    >>> partition([LayerCost(forward=t, backward=2 * t) for t in (1, 1, 1, 3)], parts=2)
    [range(0, 3), range(3, 4)]
    """
    if parts < 1:
        raise ValueError(f"parts: expected at least 1, found {parts}")
    if len(layers) < parts:
        raise ValueError(f"layers: a model of {len(layers)} layers cannot be cut in {parts} parts")
    times, nbytes, fixed = (
        [0, *accumulate(getattr(layer, what) for layer in layers)] for what in ("seconds", "activations", "parameters")
    )
    kept = spread(limit.microbatches, parts) if limit else []

    def fits(part: int, start: int, stop: int) -> bool:
        taken = kept[part] * (nbytes[stop] - nbytes[start]) + fixed[stop] - fixed[start] if limit else 0
        return limit is None or taken <= limit.nbytes

    def seconds(part: int, start: int, stop: int) -> Number | None:
        sent = message(layers[stop - 1].output) if message and part < parts - 1 else 0
        return max(times[stop] - times[start], sent) if fits(part, start, stop) else None

    cuts = _best(len(layers), parts, seconds, max)
    if cuts is None:
        assert limit is not None
        raise ValueError(f"no cuts of {len(layers)} layers into {parts} parts keep {limit.nbytes} bytes each")
    slowest = max(seconds(part, cut.start, cut.stop) or 0 for part, cut in enumerate(cuts))

    def square(part: int, start: int, stop: int) -> Number | None:
        own = seconds(part, start, stop)
        return None if own is None or own > slowest else (times[stop] - times[start]) ** 2

    cuts = _best(len(layers), parts, square, operator.add)
    assert cuts is not None
    return cuts


def _best(
    count: int,
    parts: int,
    price: Callable[[int, int, int], Number | None],
    join: Callable[[Number, Number], Number],
) -> list[range] | None:
    """Cuts of `count` layers with the least joined price; None if there are none.

    ``price(part, start, stop)`` is None where the part may not have those layers.
    """
    rest: dict[int, Number] = {count: 0}  # price of the remaining parts, by their first layer
    choices: list[dict[int, int]] = []
    for part in reversed(range(parts)):
        behind = parts - 1 - part
        values: dict[int, Number] = {}
        stops: dict[int, int] = {}
        for start in range(part, count - behind):
            for stop in range(count - behind, start, -1):
                own = price(part, start, stop) if stop in rest else None
                if own is None:
                    continue
                value = join(own, rest[stop])
                if start not in values or value < values[start]:
                    values[start], stops[start] = value, stop
        rest = values
        choices.append(stops)
    if 0 not in rest:
        return None
    cuts, at = [], 0
    for stops in reversed(choices):
        cuts.append(range(at, stops[at]))
        at = stops[at]
    return cuts
