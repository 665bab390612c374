"""Mode of a pass through a model: training or evaluation, keys of random numbers, and what operators record."""

from dataclasses import dataclass, field

import numpy as np

from quant.types import Array


@dataclass(frozen=True)
class PassMode:
    """Mode of a forward pass: training or evaluation, and the keys of its random numbers.

    `training` enables dropout. Random operators are keyed by `seed`, `step`, the operator's name and the sample's
    number in the data set (`samples`, one per sample of the batch), so results do not depend on rank, micro-batch or
    order.

    Operators may have loss terms of their own: they put their values by sequence into `terms`, by operator name and
    term, and add their gradients times `scale`, the loss scale, in the backward pass. `records` has other arrays that
    are worth reporting, in the same way. A forward pass that is repeated writes the same again. `ranges` has the least
    and the largest input of operators that train with rounded inputs, by operator name. `traffic` has numbers that
    depend on ranks: what operators exchange, in both passes, and `seconds` the time that they spend in exchanges.

    Operators that evaluate sequences one by one make `passes` at least, perhaps without tokens: the ranks of replicas
    that share experts then make equally many exchanges.
    """

    training: bool = True
    seed: int = 0
    step: int = 0
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    scale: float = 1.0
    passes: int = 0
    terms: dict[tuple[str, str], Array] = field(default_factory=dict, compare=False)
    records: dict[tuple[str, str], Array] = field(default_factory=dict, compare=False)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False)
    traffic: dict[tuple[str, str], float] = field(default_factory=dict, compare=False)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
