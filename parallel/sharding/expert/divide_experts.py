"""Models whose experts are divided over the ranks of a mesh axis: each rank has its own, and all other parameters."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np

from collectives.schedule.chunks import even
from parallel.nn.expert_group import ExpertGroup
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.operator import ArraySpec, Operator, Parameter, name_all
from parallel.nn.rewrite import operators_in, replaced
from parallel.sharding.expert.expert_ranks import ExpertRanks


def divide_experts(
    model: Operator, axis: Any, by_source: bool = False, dispatch: str = "direct", local: Any = None
) -> Operator:
    """Copy of a model with `ExpertRanks`, along an axis, for every group of experts.

    `ExpertRanks` describes the arguments.

    Parameters are shared with the model.

    Raises
    ------
    ValueError
        If there is no mixture, an expert's parameter is used elsewhere too, or an expert changes the width of rows.
    """
    holders_of(model, axis.size)

    def replacement(operator: Operator) -> Operator | None:
        if not isinstance(operator, ExpertGroup):
            return None
        ours = ExpertRanks(axis, operator.experts, by_source, dispatch, local, operator.first)
        ours.name = operator.name  # the exchange notes its traffic under this name
        return ours

    return replaced(model, replacement)


def holders_of(model: Operator, ranks: int) -> dict[int, int]:
    """Rank that has each expert's parameters, by id(parameter), of `ranks` that share experts. Names the parameters.

    ValueError if the model has no experts, or one of their parameters is used more than once.
    """
    name_all(model)
    found: dict[int, int] = {}
    groups = [one for one in operators_in(model) if isinstance(one, ExpertGroup)]
    for mixture in (one for one in operators_in(model) if isinstance(one, MixtureOfExperts)):
        _expect_width(mixture.router.width, mixture.experts)
    for group in groups:
        owners = [owner for rank, count in enumerate(even(len(group), ranks)) for owner in repeat(rank, count)]
        for owner, expert in zip(owners, group.experts):
            for parameter in expert.parameters():
                _expect_one_use(parameter)
                found.setdefault(id(parameter), owner)  # experts within an expert are not divided
    if not groups:
        raise ValueError("mesh: ep and etp divide the experts of a model, and this one has none")
    return found


def _expect_one_use(parameter: Parameter) -> None:
    if parameter.uses > 1:
        raise ValueError(
            f"mesh: experts on different ranks have parameters of their own; {parameter.name} is used "
            f"{parameter.uses} times"
        )


def _expect_width(width: int, experts: Operator) -> None:
    row = ArraySpec((1, width), np.dtype(np.float32))
    for expert in (one for group in operators_in(experts) if isinstance(group, ExpertGroup) for one in group.experts):
        if (shape := tuple(expert.outline(row).y.shape)) != row.shape:
            raise ValueError(f"mesh: expected an expert that maps {row.shape} to the same shape, found {shape}")
