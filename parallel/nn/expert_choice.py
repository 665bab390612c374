"""Choice of experts for tokens, from scores: the best k, in groups, up to a capacity.

Arrays have shape (sequences, tokens, experts). Equal scores are resolved by the lower index, so that a choice depends
only on the values in its own sequence.
"""

import math
from fractions import Fraction

from parallel.nn import kernels
from parallel.nn.kernels import array_namespace
from quant.types import Array


def best_in_groups(scores: Array, count: int, groups: int, chosen_groups: int) -> Array:
    """Mask of the `count` largest scores of the experts in the best groups of each token.

    Neighbouring experts form `groups` groups of equal size. A group's score is the sum of its ``count /
    chosen_groups`` largest (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """
    if groups == chosen_groups:
        return kernels.top_k(scores, count)
    xp = array_namespace(scores)
    grouped = scores.reshape(*scores.shape[:-1], groups, scores.shape[-1] // groups)
    sums = xp.where(kernels.top_k(grouped, count // chosen_groups), grouped, 0).sum(axis=-1)
    allowed = xp.repeat(kernels.top_k(sums, chosen_groups), grouped.shape[-1], axis=-1)
    return kernels.top_k(xp.where(allowed, scores, -math.inf), count)


def capacity_of(factor: float, tokens: int, choices: int, experts: int) -> int:
    """Most tokens of a sequence that an expert takes: `factor`, the decimal number, times the mean load, rounded up.

    >>> capacity_of(1.25, 8, 2, 4), capacity_of(1.1, 100, 2, 4)
    (5, 55)
    """
    return math.ceil(Fraction(str(factor)) * tokens * choices / experts)


def within_capacity(chosen: Array, scores: Array, capacity: int, priority: str) -> Array:
    """Mask of the choices that experts take: of each sequence, at most `capacity` per expert.

    An expert takes the first tokens (`priority` "position"), or those with the highest scores ("score"), among equal
    ones the first.
    """
    if priority == "position":
        return chosen & (chosen.cumsum(axis=1) <= capacity)
    wanted = array_namespace(scores).where(chosen, scores, -math.inf)
    return chosen & kernels.top_k(wanted.swapaxes(1, 2), capacity).swapaxes(1, 2)
