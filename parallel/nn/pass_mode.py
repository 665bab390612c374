"""Mode of a pass through a model: training or evaluation, keys of random numbers, and what operators record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from quant.types import Array


class PassPosition(NamedTuple):
    """Position in a pass, from which a part of it can be repeated.

    Attributes
    ----------
    units : sequence of Operator
        Of the model; empty if the model is one unit.
    number : int
        Of the unit.
    counts : Counter
        Uses of each operator in the unit so far, by the operator's name and its part of the features.
    """

    units: Sequence[Any]
    number: int
    counts: Counter[tuple[str, Any]]

    def use(self, name: str, part: Any) -> str:
        """Name of the next use of an operator: for the first one the operator's own. Shards differ in their `part`."""
        count, self.counts[name, part] = self.counts[name, part], self.counts[name, part] + 1
        named_here = self._names(name)
        if named_here and not count:
            return name
        return f"{name}{USE}{count}" + ("" if named_here else f" in {self.number}")

    def _names(self, name: str) -> bool:
        """True if the unit is the first that has the operator with a name, which begins with the unit's then."""
        here = self.units[self.number].name if self.units else ""
        is_first = all(unit.name != here for unit in self.units[: self.number])
        return is_first and (here in ("", name) or name.startswith(f"{here}."))


USE = " #"
"""Separator of an operator's name and a later use of it."""


def user_of(use: str) -> str:
    """Name of the operator of a use.

    >>> user_of("1.drop #1"), user_of("1.drop #0 in 3"), user_of("1.drop")
    ('1.drop', '1.drop', '1.drop')
    """
    return use.partition(USE)[0]


class Past:
    """Earlier positions of the sequences of a pass: their number, and their keys and values (a KV cache).

    A pass then has the positions that follow. Operators for which `Operator.continues` is true compute what they would
    for these in a pass over all positions: those that mix positions take the earlier ones here, in the order of calls.
    """

    def __init__(self) -> None:
        self.length = 0
        self._kept: list[Array] = []
        self._calls = 0

    def extended(self, new: Array, xp: Any) -> Array:
        """Arrays of the earlier positions and `new` along axis 3. They are kept for the next pass."""
        call, self._calls = self._calls, self._calls + 1
        if call == len(self._kept):
            self._kept.append(new)
        else:
            self._kept[call] = xp.concatenate([self._kept[call], new], 3)
        return self._kept[call]

    def end_pass(self, positions: int) -> None:
        """End a pass of so many positions, which are earlier ones from then on."""
        self.length, self._calls = self.length + positions, 0


@dataclass(frozen=True)
class PassMode:
    """Mode of one forward pass: training or evaluation, and the keys of its random numbers.

    `training` enables dropout. Random operators are keyed by `seed`, `step`, the *use* of the operator in the pass and
    the sample's number in the data set (`samples`, one per sample of the batch), so results do not depend on rank,
    micro-batch or order. An operator that is used several times, in one unit of the model or in several, has other
    random numbers each time. Uses are counted by unit, so they do not depend on the division of units over ranks. The
    object counts them: a second pass through the model needs another one, or `repeated`.

    Operators may have loss terms of their own: they put their values by sequence into `terms`, by use (`use`) and
    term, and add their gradients times `scale`, the loss scale, in the backward pass. `records` has other arrays that
    are worth reporting, in the same way. A forward pass that is repeated writes the same again. `ranges` has the least
    and the largest input of operators that train with rounded inputs, by operator name. `traffic` has numbers that
    depend on ranks: what operators exchange, in both passes, and `seconds` the time that they spend in exchanges.
    `changes` are texts about arrays of operators that the pass has changed, which is an error of the step. `buffers`
    has values at which the pass arrives, by use and the buffer's name; `number` is that of the micro-batch.

    Operators that evaluate sequences one by one make `passes` at least, perhaps without tokens: the ranks of replicas
    that share experts then make equally many exchanges.

    In an evaluation with a `past` the inputs continue sequences, position by position (`Past`).
    """

    training: bool = True
    seed: int = 0
    step: int = 0
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    scale: float = 1.0
    passes: int = 0
    past: Past | None = None
    terms: dict[tuple[str, str], Array] = field(default_factory=dict, compare=False)
    records: dict[tuple[str, str], Array] = field(default_factory=dict, compare=False)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False)
    traffic: dict[tuple[str, str], float] = field(default_factory=dict, compare=False)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    changes: list[str] = field(default_factory=list, compare=False)
    buffers: dict[tuple[str, str], Array] = field(default_factory=dict, compare=False)
    number: int = field(default=0, compare=False)
    _positions: list[PassPosition] = field(
        default_factory=lambda: [PassPosition((), 0, Counter())], init=False, compare=False, repr=False
    )

    def enter(self, units: Sequence[Any], number: int) -> None:
        """Begin the unit `number` of the model's units; without such calls the whole model is one."""
        self._positions[-1] = PassPosition(units, number, Counter())

    def use(self, name: str, part: Any = None) -> str:
        """Name of this use of the operator with a name, a key of random numbers, terms and records.

        To be called once in each forward pass of the operator. A shard gives the `part` of the features that it has:
        the shards of an operator have the same name, and are one use of it.
        """
        return self._positions[-1].use(name, part)

    def position(self) -> PassPosition:
        """Position before a part of the pass, from which `repeated` repeats it."""
        now = self._positions[-1]
        return now._replace(counts=now.counts.copy())

    @contextmanager
    def repeated(self, position: PassPosition) -> Iterator[None]:
        """Context in which forward passes from this position on are repeated: they are the same uses as before."""
        self._positions.append(position._replace(counts=position.counts.copy()))
        try:
            yield
        finally:
            self._positions.pop()
