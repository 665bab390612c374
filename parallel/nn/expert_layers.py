"""Mixtures of experts in the place of a transformer's feed-forward layers, described by one value or a line of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parallel.nn.array_checks import whole_number
from parallel.nn.compose import Sequential
from parallel.nn.linear import feed_forward
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.operator import Init
from parallel.nn.router import Router, RouterSettings


def _flag(text: str) -> bool:
    if text:
        raise ValueError(text)
    return True


def _no(text: str) -> bool:
    return not _flag(text)


ROUTER_WORDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "k": ("choices", int),
    "scores": ("scores", str),
    "unnormalized": ("normalize", _no),
    "scale": ("scale", float),
    "groups": ("groups", int),
    "chosen-groups": ("chosen_groups", int),
    "capacity": ("capacity", float),
    "priority": ("priority", str),
    "noise": ("noise", _flag),
    "jitter": ("jitter", float),
    "balance": ("balance_loss", float),
    "bias": ("bias_rate", float),
    "z": ("z_loss", float),
}
LAYER_WORDS: dict[str, tuple[str, Callable[[str], Any]]] = {"every": ("every", int), "shared": ("shared", _flag)}
WORDS = (*ROUTER_WORDS, *LAYER_WORDS)
"""Words of `ExpertLayers.parse`; the tables have field and type of each."""


@dataclass(frozen=True)
class ExpertLayers:
    """Mixtures of experts in a transformer, in place of feed-forward layers.

    An expert has 1 / k of the hidden width of a feed-forward layer, for k choices, so that a token costs the same
    floating-point operations as in a dense model; a shared expert adds as many as one of the k.

    Attributes
    ----------
    experts : int
        Number of experts of each mixture.
    router : RouterSettings
    every : int
        Distance of blocks with a mixture: 2 for every second block.
    shared : bool
        Add an expert of all tokens.
    """

    experts: int = 8
    router: RouterSettings = field(default_factory=lambda: RouterSettings(balance_loss=0.01))
    every: int = 1
    shared: bool = False

    def __post_init__(self) -> None:
        whole_number("experts", self.experts, 1)
        whole_number("experts: every", self.every, 1)
        self.router.expect_experts(self.experts)

    @classmethod
    def parse(cls, text: str) -> ExpertLayers:
        """Parse text such as ``"8,k=2,capacity=1.25,every=2,shared"``; ValueError names what is malformed.

        >>> layers = ExpertLayers.parse("16,k=4,scores=sigmoid,bias=0.001")
        >>> layers.experts, layers.router.choices, layers.router.bias_rate, layers.router.balance_loss
        (16, 4, 0.001, 0.0)
        """
        values: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = word.partition("=")
            if name.isdecimal() and not value and not values.get("experts"):
                values["experts"] = int(name)
                continue
            table, target = (LAYER_WORDS, values) if name in LAYER_WORDS else (ROUTER_WORDS, given)
            if name not in table:
                raise ValueError(f"experts: expected their number and some of {', '.join(WORDS)}; found {word!r}")
            attribute, convert = table[name]
            try:
                target[attribute] = convert(value)
            except ValueError as error:
                raise ValueError(f"experts: expected another value than in {word!r}") from error
        if not {"balance_loss", "bias_rate"} & given.keys():  # unbalanced routers tend to few experts
            given["balance_loss"] = 0.01
        return cls(**values, router=RouterSettings(**given))

    def mixture(self, width: int, init: Init, init_out: Init) -> MixtureOfExperts:
        """Mixture of experts between vectors of this width, with these initial weights."""
        hidden = max(4 * width // self.router.choices, 1)
        experts = [Sequential(feed_forward(width, hidden, init, init_out)) for _ in range(self.experts + self.shared)]
        router = Router(width, self.experts, self.router)
        return MixtureOfExperts(router, experts[: self.experts], experts[-1] if self.shared else None)
