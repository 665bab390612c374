"""Placements of the experts of a mixture on ranks, and the bytes that a rank sends for one layer and step.

    replicated   every replica has all experts (Shazeer et al., arXiv:1701.06538, section 3.1, has them per group)
    one a rank   tokens travel to the rank of their expert; no other rank has its gradient
    data, model  experts over the replicas, each cut over the ranks of the model axis (GShard, arXiv:2006.16668,
                 section 3.2; Switch Transformers, arXiv:2101.03961, section 5)

Experts are on the axis ``ep``, folded over the replicas ``dp``. ``tp`` cuts operators.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from collectives.schedule.chunks import even


class MixtureSize(NamedTuple):
    """Sizes of a mixture: experts, choices of a token, tokens of a replica, width, hidden width, bytes of a number."""

    experts: int
    choices: int
    tokens: int
    width: int
    hidden: int
    itemsize: int = 4

    @property
    def rows(self) -> int:
        """Bytes of the rows of all choices of a replica."""
        return self.choices * self.tokens * self.width * self.itemsize

    @property
    def expert(self) -> int:
        """Bytes of the weights of one expert."""
        return (2 * self.hidden * self.width + self.hidden + self.width) * self.itemsize


class ExpertPlacement(NamedTuple):
    """Placement of experts on ``dp * tp`` ranks. `ep` replicas share the experts.

    Rank r is on replica ``r // tp``, and in place ``r // tp % ep`` along ``ep``.
    """

    name: str
    dp: int
    tp: int
    ep: int

    def __str__(self) -> str:
        return f"{self.name} (dp={self.dp},tp={self.tp},ep={self.ep})"

    def experts_of(self, rank: int, experts: int) -> range:
        """Experts of a rank: whole ones, or its part of each along ``tp``."""
        place = rank // self.tp % self.ep
        counts = even(experts, self.ep)
        stop = list(accumulate(counts))[place]
        return range(stop - counts[place], stop)

    def sent(self, size: MixtureSize) -> dict[str, int]:
        """Bytes that a rank sends for one layer and step if loads are equal: tokens, sums along tp, sums of gradients.

        Tokens and gradients of them travel four times. Sums along ``tp`` add results, and gradients of tokens and of
        the weights of their choices. Sums of weights' gradients run among the ranks with the same experts. Both sums
        use rings.
        """
        copies, held = self.dp // self.ep, -(-size.experts // self.ep) * size.expert // self.tp
        summed = size.tokens * (2 * size.width + size.choices) * size.itemsize
        return {
            "tokens": 4 * size.rows * (self.ep - 1) // self.ep,
            "sums along tp": 2 * summed * (self.tp - 1) // self.tp,
            "gradients": 2 * held * (copies - 1) // copies,
        }


def placements(ranks: int, tp: int) -> list[ExpertPlacement]:
    """The three placements on this number of ranks. ValueError unless `tp` divides it."""
    if ranks % tp:
        raise ValueError(f"tp: expected a divisor of {ranks} ranks, found {tp}")
    return [
        ExpertPlacement("replicated", ranks, 1, 1),
        ExpertPlacement("divided over all ranks", ranks, 1, ranks),
        ExpertPlacement("data and model axes", ranks // tp, tp, ranks // tp),
    ]
