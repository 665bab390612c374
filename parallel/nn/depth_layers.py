"""Mixture-of-Depths in the blocks of a transformer, described by one value or a line of text."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.nn.array_checks import whole_number
from parallel.nn.compose import Sequential
from parallel.nn.depths import MixtureOfDepths


@dataclass(frozen=True)
class DepthLayers:
    """Blocks of a transformer that compute for a part of the tokens only (`MixtureOfDepths`).

    Attributes
    ----------
    fraction : float
        Of the tokens of each sequence, above 0 up to 1.
    every : int
        Distance of these blocks: 2 for every second block, from the second on.
    """

    fraction: float = 0.125
    every: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"depths: expected a fraction above 0 up to 1, found {self.fraction:g}")
        whole_number("depths: every", self.every, 1)

    @classmethod
    def parse(cls, text: str) -> DepthLayers:
        """Parse a fraction and perhaps a distance, such as ``"0.5,every=1"``; ValueError for other text.

        >>> DepthLayers.parse("0.125"), DepthLayers.parse("0.5,every=1")
        (DepthLayers(fraction=0.125, every=2), DepthLayers(fraction=0.5, every=1))
        """
        fraction, comma, rest = text.partition(",")
        name, _, every = rest.partition("=")
        expected = f"depths: expected text such as 0.125 or 0.5,every=1, found {text!r}"
        if comma and name.strip() != "every":
            raise ValueError(expected)
        try:
            values = float(fraction), int(every) if comma else cls.every
        except ValueError as error:
            raise ValueError(expected) from error
        return cls(*values)

    def of(self, model: Sequential, width: int) -> Sequential:
        """Transformer of this width with `MixtureOfDepths` around some of its blocks; ValueError if there are none."""
        last = len(model.items) - 1
        numbers = range(self.every, last, self.every)
        if not numbers:
            raise ValueError(f"depths: expected a model of at least {self.every} blocks, found {last - 1}")
        items = [
            MixtureOfDepths(item, width, self.fraction) if number in numbers else item
            for number, item in enumerate(model.items)
        ]
        return Sequential(items, cuts={_within_block(pattern, numbers): style for pattern, style in model.cuts.items()})


def _within_block(pattern: str, numbers: range) -> str:
    """Pattern of operator names in a transformer whose blocks with these numbers are within a `MixtureOfDepths`.

    >>> [_within_block(pattern, range(2, 5, 2)) for pattern in ("0.0", "2.1.inner.1", "3.1.inner.1", "*.0.inner.1")]
    ['0.0', '2.block.1.inner.1', '3.1.inner.1', '*.0.inner.1']
    """
    number, _, rest = pattern.partition(".")
    return f"{number}.block.{rest}" if number.isdecimal() and int(number) in numbers else pattern
