"""Choice of the activations of each block that are computed again in the backward pass."""

from collections.abc import Sequence

from parallel.nn.compose import Recompute, Sequential
from parallel.nn.operator import Operator

KINDS = ("none", "selective", "full")
"""Nothing; the attention's probabilities (Korthikanti et al., 2022, section 5); all but a block's input."""


def recompute_kinds(recompute: bool | str, blocks: int) -> list[str]:
    """Kind of every block, from one for all or from one for each; True is "full".

    ValueError if a word is no kind, or their number is neither one nor that of the blocks.

    >>> recompute_kinds("full,selective,none", 3)
    ['full', 'selective', 'none']
    >>> recompute_kinds(True, 2)
    ['full', 'full']
    """
    text = ("full" if recompute else "none") if isinstance(recompute, bool) else recompute
    words = [word.strip() for word in text.split(",")]
    words = words * blocks if len(words) == 1 else words
    if len(words) != blocks or not set(words) <= set(KINDS):
        raise ValueError(
            f"recompute: expected {', '.join(KINDS)}, or one of them for each of {blocks} blocks; found {text!r}"
        )
    return words


def whole_units(recompute: bool | str, model: str) -> bool:
    """True to recompute whole units of a model without attention; ValueError for a choice that needs attention."""
    if recompute not in (True, False, "none", "full"):
        raise ValueError(f"recompute: expected none or full for {model}, found {recompute!r}")
    return recompute in (True, "full")


def unit_of(items: Sequence[Operator], recompute: bool) -> Operator:
    """Operators in order, recomputed as a whole or not."""
    unit = Sequential(items)
    return Recompute(unit) if recompute else unit
