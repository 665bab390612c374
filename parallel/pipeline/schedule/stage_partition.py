"""Where to cut a model: contiguous parts whose slowest is as fast as can be, by dynamic programming."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from parallel.pipeline.schedule.numeric import Number, PerPart, spread


class Layer(NamedTuple):
    """What a layer takes for one micro-batch, measured or estimated.

    Attributes
    ----------
    forward, backward, weights : number
        Seconds of F, B and W.
    activations : number
        Bytes that it saves in F for B and W.
    output : number
        Bytes of its result: what is sent if the model is cut behind it.
    parameters : number
        Bytes that it takes all the time: weights, gradients, the optimiser's state.
    gradients : number
        Bytes of its weights' gradients: what is exchanged where two stages have it.
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


class Limit(NamedTuple):
    """Memory that a part may take.

    Attributes
    ----------
    nbytes : number
    microbatches : number, or one for every part
        How many micro-batches a part keeps at once, as `memory.peaks` counts them.
    """

    nbytes: Number
    microbatches: PerPart = 1


def partition(
    layers: Sequence[Layer],
    parts: int,
    message: Callable[[Number], Number] | None = None,
    limit: Limit | None = None,
) -> list[range]:
    """Cut the layers in so many parts, none of them empty.

    What a micro-batch costs in the steady state is the time of the slowest part, or of the slowest message if that is
    more. Of all ways to cut for which this is least, that one is taken whose parts are most alike: the sum of squares
    of their times is least; of several such, the one whose first parts are the longest.

    Parameters
    ----------
    layers : sequence of Layer
    parts : int
    message : callable (bytes) -> seconds, optional
        What a message costs; nothing, if not given.
    limit : Limit, optional

    Returns
    -------
    list of range
        The layers of every part.

    Raises
    ------
    ValueError
        If there are fewer layers than parts, or no cuts within the limit.

    Notes
    -----
    Dynamic programming over the number of parts and the layers that they have, as in Narayanan et al., "PipeDream",
    SOSP 2019, section 3.1, first for the slowest, then for the squares among what is no slower: parts * layers**2
    steps.

    Examples
    --------
    >>> partition([Layer(forward=t, backward=2 * t) for t in (1, 1, 1, 3)], parts=2)
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
        raise ValueError(f"no cuts of {len(layers)} layers in {parts} parts keep to {limit.nbytes} bytes each")
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
    """The cuts of `count` layers whose prices, joined, are least; None if there are none.

    ``price(part, start, stop)`` is None where that part may not have those layers.
    """
    rest: dict[int, Number] = {count: 0}  # the price of the parts behind, by where they start
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
