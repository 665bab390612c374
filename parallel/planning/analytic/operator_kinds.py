"""Kinds of operators in the planner's graphs: the placements of values that each can take and give along a mesh axis.

The rules of operators with weights follow the styles in `parallel.sharding.tensor.cut_model`, and data
parallelism: each rank has some samples, or some positions, and gradients of weights are summed.
"""

from typing import NamedTuple

from parallel.nn.placement import Partial, Placement, Replicate, Shard

WHOLE, SUM, COPIES = Replicate(), Partial(), Replicate(partial=True)
BATCH, SEQUENCE, FEATURES = Shard(0), Shard(1), Shard(-1)


class PlacementRule(NamedTuple):
    """Placements along an axis of an operator's inputs (the same for all) and its result.

    `cut_weight`: ranks have parts of the weight. Otherwise all of it, and with `some_samples` a term of its gradient.
    """

    takes: Placement
    gives: Placement
    cut_weight: bool = False
    some_samples: bool = False

    @property
    def divides(self) -> bool:
        """True if the ranks share the work."""
        return self.cut_weight or any(isinstance(each, Shard) for each in (self.takes, self.gives))


SAMPLES = {
    "replicated": PlacementRule(WHOLE, WHOLE),
    "batch": PlacementRule(BATCH, BATCH, some_samples=True),
    "sequence": PlacementRule(SEQUENCE, SEQUENCE, some_samples=True),
}
"""Rules of operators that treat all positions the same."""

EVERYWHERE = SAMPLES | {"features": PlacementRule(FEATURES, FEATURES)}
"""Rules of operators that treat all elements the same."""


class OperatorKind(NamedTuple):
    """Rules by name, and the number of inputs (-1: any number)."""

    rules: dict[str, PlacementRule]
    inputs: int = 1


KINDS = {
    "input": OperatorKind(EVERYWHERE, 0),
    "output": OperatorKind(EVERYWHERE),
    "linear": OperatorKind(
        {
            **SAMPLES,
            "column": PlacementRule(COPIES, FEATURES, cut_weight=True),
            "row": PlacementRule(FEATURES, SUM, cut_weight=True),
        }
    ),
    "elementwise": OperatorKind(EVERYWHERE),
    "norm": OperatorKind(SAMPLES),
    "attention": OperatorKind(
        {"replicated": SAMPLES["replicated"], "batch": SAMPLES["batch"], "heads": PlacementRule(FEATURES, FEATURES)}
    ),
    "add": OperatorKind({**EVERYWHERE, "partial": PlacementRule(SUM, SUM)}, -1),
}
"""Kinds by name. A linear layer is cut by columns or rows, attention by heads. A sum may add partial sums."""
