"""Division of a pipelined model's parameter vector into groups, and the canonical summation order of their gradients.

A *group* is a contiguous run of parameters used by the same parts of the model: usually one part; an embedding tied to
the output belongs to the first and the last. All ranks with one of these parts sum the group's gradients and update it,
as in data parallelism.

In canonical order the gradient of a tied parameter from one micro-batch is the sum over its uses, which are the leaves
of the tree: with k parts, micro-batch n has leaves k n to k n + k - 1, the last part's (first in a backward) leftmost.
With two parts of one use each this is bitwise the sum that a single rank computes. Where a rank has several parts of a
sequence, each has the leaves of a micro-batch of its own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from collectives.schedule.chunks import even
from parallel.nn.flat_params import FlatParams
from parallel.nn.flat_params import ParamSpan as Tensor
from parallel.nn.operator import Operator, Parameter
from parallel.pipeline.schedule.stage_placement import StagePlacement


@dataclass(frozen=True)
class SharedParamGroup:
    """Contiguous run of parameters that the same parts of the model use. `number` in order of the parameter vector.

    `parts` are the parts of the model that use them, ascending; `terms` are the gradients of each part from a backward.
    Of experts that replicas share, `holder` is the position in a team of the replicas that have them
    (`parallel.engine.data_parallel.expert_shards`), and `unit` that of the model.
    """

    number: int
    tensors: tuple[Tensor, ...]
    parts: tuple[int, ...]
    terms: int = 1
    holder: int | None = None
    unit: int | None = None

    def leaf(self, number: int, part: int, term: int = 0) -> int:
        """Leaf number, in the tree of the gradient sum, of a term from `part` and micro-batch `number`."""
        return (number * self.terms + term + 1) * len(self.parts) - 1 - self.parts.index(part)

    def leaves(self, placement: StagePlacement, stage: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """Leaf numbers, ascending, of the gradients from a stage and its pipeline's micro-batches `numbers`."""
        return tuple(
            sorted(
                self.leaf(number, part, term)
                for turn, number in enumerate(numbers)
                for part in self.parts
                if placement.route(turn)[part].stage == stage
                for term in range(self.terms)
            )
        )


def cuts_for(cuts: Sequence[int] | None, units: int, parts: int) -> tuple[int, ...]:
    """Cuts of units into parts as a tuple, by default nearly equal: (0, 3, 5, 7) for 7 units and 3 parts.

    ValueError if they do not divide the units into this number of non-empty parts.
    """
    if units < parts:
        raise ValueError(f"stages: {units} units cannot be cut in {parts} parts; take fewer stages, or a deeper model")
    cuts = tuple(cuts or accumulate(even(units, parts), initial=0))
    if len(cuts) != parts + 1 or cuts[0] != 0 or cuts[-1] != units or any(a >= b for a, b in pairwise(cuts)):
        raise ValueError(f"cuts: expected {parts + 1} ascending numbers from 0 to {units}, found {cuts}")
    return cuts


def divide(
    flat: FlatParams,
    units: Sequence[Operator],
    cuts: Sequence[int],
    *,
    reproducible: bool,
    terms: int = 1,
    holders: Mapping[int, int] | None = None,
) -> list[SharedParamGroup]:
    """Divide a parameter vector into groups by the parts that use them. Sets `Parameter.uses` to the most in one part.

    If `reproducible`, gradients of groups with several parts come in so many `terms` (`Parameter.terms`). `holders` are
    the positions in a team of the replicas that have an expert's parameter, by id(parameter).

    Raises ValueError if `reproducible` and a parameter with several parts has more than two uses: the order would
    matter.
    """
    uses: dict[int, Counter[int]] = {id(tensor.parameter): Counter() for tensor in flat.places}
    unit_of: dict[int, int] = {}
    for part, (start, stop) in enumerate(pairwise(cuts)):
        for number in range(start, stop):
            for _, value in units[number].walk():
                if isinstance(value, Parameter):
                    uses[id(value)][part] += 1
                    unit_of[id(value)] = number
    for parameter, _ in flat.places:
        of_parts = uses[id(parameter)]
        if reproducible and len(of_parts) > 1 and of_parts.total() > 2:  # a + b has the bits of b + a
            raise ValueError(
                f"reproducible: {parameter.name} is used {of_parts.total()} times, in parts {sorted(of_parts)} of the "
                "model; in one order for any layout there can be two"
            )
        parameter.uses = max(of_parts.values())
        parameter.terms = terms if reproducible and len(of_parts) > 1 else 1

    def key(tensor: Tensor) -> tuple[tuple[int, ...], int | None, int | None]:
        of, holder = id(tensor.parameter), (holders or {}).get(id(tensor.parameter))
        return tuple(sorted(uses[of])), holder, None if holder is None else unit_of[of]

    groups: list[SharedParamGroup] = []
    for (parts, holder, unit), run in groupby(flat.places, key):
        tensors = tuple(run)
        groups.append(SharedParamGroup(len(groups), tensors, parts, tensors[0].parameter.terms, holder, unit))
    return groups
