"""Rows of the axis ``tp`` (operators are cut) and of ``etp`` (ranks of ``tp`` with parts of one expert)."""

from __future__ import annotations

from typing import Any

from parallel.nn.placement import Replicate
from parallel.sharding.axis import UNCUT, Axis, changed
from parallel.sharding.context.context_axis import CONTEXT, parts_of
from parallel.sharding.tensor.mixture_shards import ExpertCut


def shards_of(settings: Any, mesh: Any) -> int:
    """Number of logical shards of every operator that is cut: `settings.tensor_shards`, by default one per rank.

    ValueError unless it is a multiple of the ranks.
    """
    ranks: int = mesh.sizes.get(TENSOR.name, 1)
    shards: int = settings.tensor_shards or ranks
    if shards % ranks:
        raise ValueError(f"tensor_shards: expected a multiple of tp, in {mesh}; found {shards}")
    return shards


def check_cut(settings: Any, mesh: Any) -> None:
    """Raise ValueError if settings do not go with operators that are cut on this mesh."""
    ranks, shards = mesh.sizes.get(TENSOR.name, 1), shards_of(settings, mesh)
    if shards == 1:
        return
    for name, found in changed(settings, *UNCUT):
        raise ValueError(f"{name}: {found} is not for operators that are cut into {shards} shards")
    parts = mesh.sizes.get(CONTEXT.name, 1)
    several = parts_of(settings, parts) > parts
    # parts and slices are leaves of one binary tree, whole subtrees only for powers of two
    if several and ranks > 1 and shards & (shards - 1) and settings.reproducible and settings.sequence_parallel:
        expected = f"on ranks with several parts of a sequence, sequence_parallel takes a power of two; found {shards}"
        raise ValueError(f"tensor_shards: reproducible sums follow a binary tree: {expected}, and {mesh}")


def expert_cut(settings: Any, mesh: Any) -> ExpertCut:
    """Cut of experts along ``tp``. ValueError if this mesh cannot cut them into `Settings.expert_shards`."""
    tensor = mesh.sizes.get(TENSOR.name, 1)
    each = shards_of(settings, mesh) // tensor
    slices = settings.expert_shards or (mesh.etp * each if mesh.etp > 1 else 1)
    spread = mesh.ep * mesh.etp > 1 or tensor == 1
    # along etp a rank has `each` slices of an expert, otherwise all of them
    if slices != mesh.etp * each if mesh.etp > 1 else each % slices:
        expected = str(mesh.etp * each) if mesh.etp > 1 else f"a divisor of the {each} tensor_shards of a rank"
        raise ValueError(f"expert_shards: expected {expected}, for {mesh}; found {slices}")
    if slices > 1 and not spread:
        raise ValueError(f"expert_shards: parts of experts are for meshes with ep or etp; found {slices} and {mesh}")
    return ExpertCut(slices, spread)


TENSOR = Axis(
    "tp", "shards of the operators", Replicate(), options=("tensor_shards", "sequence_parallel"), check=check_cut
)
"""Partial results are summed forward, and gradients with respect to inputs backward."""

EXPERT_TENSOR = Axis("etp", "parts of the same experts", folded=True, check=expert_cut)
"""Results of an expert's parts are summed with the results of other operators along ``tp``."""
