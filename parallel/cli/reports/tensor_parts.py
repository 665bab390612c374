"""Parts of a model's tensors on every rank of a mesh: for tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from parallel.engine.data_parallel.partition_spec import units_of
from parallel.engine.model_on_mesh import expert_division, mesh_of
from parallel.engine.settings import Settings
from parallel.nn.operator import Operator, name_all
from parallel.nn.placement import Ranges, TensorCut
from parallel.pipeline.param_division import cuts_for
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.stage_params import replicas_of
from parallel.sharding.axis import STAGES
from parallel.sharding.device_mesh import MeshPlace
from parallel.sharding.expert.expert_axis import EXPERTS
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor.cut_model import cut
from parallel.sharding.tensor.tensor_axis import TENSOR, expert_cut


class TensorPart(NamedTuple):
    """Ranges of indices of one dimension of a tensor. A rank without the tensor has none."""

    dim: int
    ranges: Ranges


ABSENT = TensorPart(0, ())


class Holding(NamedTuple):
    """Logical tensor, and the part of it that every rank of a mesh has: None for the whole tensor."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart | None, ...]

    def text(self, rank: int) -> str:
        """Indices of a rank, such as ``[:, 0:16 64:80]``."""
        part = self.parts[rank]
        if part is None:
            return "all"
        if part == ABSENT:
            return "-"
        held = " ".join(f"{start}:{stop}" for start, stop in part.ranges if start < stop) or "none"
        return f"[{', '.join(held if axis == part.dim else ':' for axis in range(len(self.shape)))}]"


def holdings(model: Operator, loss: Any, mesh: Mesh, schedule: str = "1f1b") -> list[Holding]:
    """Parts of all tensors of a model on the ranks of a mesh, in the order of the model.

    Stages have nearly equally many units, by the placement of the pipeline schedule. ValueError if the model, or the
    schedule, does not fit the mesh.
    """
    settings = Settings(mesh=str(mesh))
    if STAGES.name in mesh.sizes:  # both calls are for their errors only
        replicas_of(mesh, mesh.size)
    else:
        mesh_of(settings, mesh.size)
    shapes = {parameter.name: parameter.shape for parameter in name_all(model)}
    on_stage = _names_by_stage(model, mesh.sizes.get(STAGES.name, 1), schedule)
    how, teams = expert_cut(settings, mesh), mesh.lines(EXPERTS.name)

    @cache
    def parts_along(shard: int, member: int) -> dict[str, TensorPart | None]:
        """Parts on a rank's position along ``tp``, and in its team that shares experts."""
        axis = MeshPlace(mesh, 0).axis(TENSOR.name)._replace(rank=shard)
        ours, _ = cut(model, loss, axis, experts=how)
        experts = expert_division(ours, mesh, settings)
        found: dict[str, list[TensorCut | None]] = {}
        for parameter in ours.parameters():
            # a parameter without a holder is no expert's: all members have it
            if experts is None or experts.holders.get(id(parameter), member) == member:
                found.setdefault(parameter.name, []).append(parameter.cut)
        return {name: _joined(cuts) for name, cuts in found.items()}

    every = []
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        (member,) = (team.index(rank) for team in teams if rank in team)
        parts, names = parts_along(at.get(TENSOR.name, 0), member), on_stage[at.get(STAGES.name, 0)]
        every.append({name: parts.get(name, ABSENT) if name in names else ABSENT for name in shapes})
    return [Holding(name, shape, tuple(parts[name] for parts in every)) for name, shape in shapes.items()]


def unlike(every: Iterable[Holding]) -> list[Holding]:
    """Tensors of the first of those units of the model whose tensors have equal shapes and parts."""
    units: dict[str, list[Holding]] = {}
    for one in every:
        units.setdefault(one.name.partition(".")[0], []).append(one)
    kinds: dict[Any, list[Holding]] = {}
    for some in units.values():
        kinds.setdefault(tuple((one.name.partition(".")[2], *one[1:]) for one in some), some)
    return [one for some in kinds.values() for one in some]


def _names_by_stage(model: Operator, stages: int, schedule: str) -> list[set[str]]:
    """Names of the parameters of the units of each stage. Those that several units use are on all their stages."""
    units, placement = units_of(model), build(schedule, stages, 1).placement
    cuts = cuts_for(None, len(units), placement.parts)
    names: list[set[str]] = [set() for _ in range(stages)]
    for (stage, _), part in placement.part.items():
        for unit in units[cuts[part] : cuts[part + 1]]:
            names[stage] |= {parameter.name for parameter in unit.parameters()}
    return names


def _joined(cuts: Iterable[TensorCut | None]) -> TensorPart | None:
    """Part that the shards of one rank make up. None: the whole tensor."""
    shards = [one for one in cuts if one is not None]
    if not shards:
        return None
    ranges = sorted(some for one in shards for some in one.ranges)
    dim, whole = shards[0].dim, shards[0].shape[shards[0].dim]
    return None if ranges == [(0, whole)] else TensorPart(dim, tuple(ranges))
