"""How a pipeline divides a model's vector: which ranks have which run of it, and whose gradients are which leaves.

A *group* is a run of neighbours in the vector that the same parts of the model use. As a rule that is one part; a table
that is tied to the output belongs to the first part and the last. All ranks that have one of these parts add up the
group's gradients and update it, as in data parallelism.

In canonical order a tied parameter's gradient of a micro-batch is the sum of those of its uses. So the leaves of the
tree are the uses: of k parts micro-batch n has leaves k n to k n + k - 1, the last part's, which a backward comes to
first, at the left. With two parts that have one use each this is the sum that one rank forms, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from parallel.nn.flat_params import Flat
from parallel.nn.flat_params import Place as Tensor
from parallel.nn.operator import Operator, Parameter
from parallel.pipeline.schedule.stage_placement import Placement


@dataclass(frozen=True)
class Group:
    """A run of the vector.

    Attributes
    ----------
    number : int
        In order of the vector.
    tensors : tuple of Place
        Neighbours.
    parts : tuple of int
        The parts of the model that use them, ascending.
    """

    number: int
    tensors: tuple[Tensor, ...]
    parts: tuple[int, ...]

    def leaf(self, number: int, part: int) -> int:
        """The leaf of a part's gradient of a micro-batch."""
        return (number + 1) * len(self.parts) - 1 - self.parts.index(part)

    def holders(self, placement: Placement) -> list[int]:
        """The stages that have one of the parts."""
        return sorted({place.stage for part in self.parts for place in placement.owners(part)})

    def leaves(self, placement: Placement, stage: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """What a stage adds, of a pipeline that has the micro-batches of these numbers; ascending."""
        return tuple(
            sorted(
                self.leaf(number, part)
                for turn, number in enumerate(numbers)
                for part in self.parts
                if placement.route(turn)[part].stage == stage
            )
        )


def checked_cuts(cuts: Sequence[int], units: int, parts: int) -> tuple[int, ...]:
    """Where parts begin, and where the last one ends.

    Raises
    ------
    ValueError
        If they do not cut so many units in so many parts, none of them empty.
    """
    if units < parts:
        raise ValueError(f"stages: {units} units cannot be cut in {parts} parts; take fewer stages, or a deeper model")
    cuts = tuple(cuts)
    if len(cuts) != parts + 1 or cuts[0] != 0 or cuts[-1] != units or any(a >= b for a, b in pairwise(cuts)):
        raise ValueError(f"cuts: expected {parts + 1} ascending numbers from 0 to {units}, found {cuts}")
    return cuts


def divide(flat: Flat, units: Sequence[Operator], cuts: Sequence[int], *, reproducible: bool) -> list[Group]:
    """The groups, in order of the vector. Says how often a backward through one part hands in each parameter (`uses`).

    Raises
    ------
    ValueError
        If `reproducible`, and a parameter has more than two uses, in several parts: their order would show.
    """
    uses: dict[int, Counter[int]] = {id(tensor.parameter): Counter() for tensor in flat.places}
    for part, (start, stop) in enumerate(pairwise(cuts)):
        for unit in units[start:stop]:
            for _, value in unit.walk():
                if isinstance(value, Parameter):
                    uses[id(value)][part] += 1
    for parameter, _ in flat.places:
        of_parts = uses[id(parameter)]
        if reproducible and len(of_parts) > 1 and of_parts.total() > 2:
            raise ValueError(
                f"reproducible: {parameter.name} is used {of_parts.total()} times, in parts {sorted(of_parts)} of the "
                "model; in one order for any layout there can be two"
            )
        parameter.uses = max(of_parts.values())
    runs = groupby(flat.places, lambda tensor: tuple(sorted(uses[id(tensor.parameter)])))
    return [Group(number, tuple(run), parts) for number, (parts, run) in enumerate(runs)]
