"""Row of the axis ``ep``: ranks with different tokens share the experts of mixtures."""

from __future__ import annotations

from typing import Any

from parallel.sharding.axis import STAGES, UNCUT, Axis, changed
from parallel.sharding.expert.dispatch import Dispatch


def check_experts(settings: Any, mesh: Any) -> None:
    """Raise ValueError if settings do not go with the division of experts on this mesh."""
    dispatch = Dispatch.parse(settings.dispatch)
    if mesh.ep * mesh.etp > 1:
        for name, found in changed(settings, *UNCUT, "compress"):
            raise ValueError(f"{name}: {found} is not for experts on different ranks; found {mesh}")
    if mesh.expert_replicas == 1:
        for name, found in changed(settings, "dispatch", "overlap_expert_comm"):
            raise ValueError(f"{name}: {found} is for replicas that share experts, by ep; found {mesh}")
    # exchanges of one micro-batch hide behind another's computation: one alone has nothing to overlap
    if settings.overlap_expert_comm and STAGES.name not in mesh.sizes and settings.rounds(mesh.samples.size) == 1:
        raise ValueError("overlap_expert_comm: expected steps of several micro-batches (accumulate), found 1 a rank")
    if settings.reproducible and not dispatch.is_exact:
        raise ValueError(f"dispatch: reproducible training needs direct, found {settings.dispatch}")


EXPERTS = Axis("ep", "different experts", folded=True, check=check_experts)
"""Tokens travel to their experts and results back. Their gradients do the same in the backward pass."""
