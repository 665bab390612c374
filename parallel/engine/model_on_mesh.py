"""Model and loss of a rank of a mesh: cut along ``tp``, divided along ``cp`` and ``ep``; and logical parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from collectives import Communicator
from parallel.engine.data_parallel.expert_shards import ExpertDivision, ExpertTeams
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.logical_blocks import LogicalBlocks, tensors_of
from parallel.engine.data_parallel.partition_spec import PartitionSpec, units_of
from parallel.engine.divided_sequences import CONTEXT, INPUTS, REPLICAS, TENSOR, SequenceModels, sequence_models
from parallel.engine.exchange_guard import PassErrors
from parallel.engine.settings import DEFAULTS, Settings
from parallel.nn.expert_group import ExpertGroup
from parallel.nn.flat_params import FlatParams
from parallel.nn.operator import Operator, Parameter, name_all
from parallel.nn.placement import PlacementError
from parallel.nn.rewrite import operators_in
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizers import OPTIMIZERS
from parallel.optim.precision import PRECISIONS
from parallel.runtime.collective_errors import collective_call
from parallel.sharding.device_mesh import DeviceMesh, MeshAxis
from parallel.sharding.expert.dispatch import Dispatch
from parallel.sharding.expert.divide_experts import divide_experts, holders_of
from parallel.sharding.mesh import EXPERT_TENSOR, EXPERTS, STAGES, Mesh
from parallel.sharding.tensor.check import check_placements
from parallel.sharding.tensor.cut_model import cut
from parallel.sharding.tensor.mixture_shards import ExpertCut, GroupShards


def mesh_of(settings: Settings, ranks: int) -> Mesh:
    """Mesh of the settings, by default all ranks along ``dp``; ValueError if it does not fit.

    >>> str(mesh_of(Settings(mesh="tp=2"), 2)), str(mesh_of(Settings(), 3))
    ('tp=2', 'dp=3')
    """
    mesh = Mesh({REPLICAS: ranks}) if settings.mesh is None else Mesh.parse(settings.mesh)
    mesh.expect(ranks, (REPLICAS, CONTEXT, TENSOR, EXPERTS, EXPERT_TENSOR))
    return mesh


def plan_of(model: Operator, ranks: int, rank: int, settings: Settings, compress: Any = None) -> PartitionSpec:
    """Partition of a model's flat parameter vector over ranks; also names its parameters and sets their dtype."""
    flat, precision = FlatParams(model), PRECISIONS[settings.precision]
    for place in flat.places:
        place.parameter.dtype = precision.storage
    return PartitionSpec(
        units=units_of(model),
        flat=flat,
        ranks=ranks,
        rank=rank,
        precision=precision,
        reproducible=settings.reproducible,
        bucket_bytes=settings.bucket_bytes,
        first_bytes=settings.first_bytes,
        seed=settings.seed,
        compress=compress,
    )


def check_cut(settings: Settings, mesh: Mesh, optimizer: type[Optimizer] | None = None) -> None:
    """Raise ValueError if settings do not go with operators that are cut on this mesh, or with divided experts.

    The optimizer is by default the one that the settings name.
    """
    tensor = mesh.sizes.get(TENSOR, 1)
    shards = settings.tensor_shards or tensor
    if shards % tensor:
        raise ValueError(f"tensor_shards: expected a multiple of tp, in {mesh}; found {shards}")
    _check_experts(settings, mesh)
    expert_cut(settings, mesh)
    if shards == 1:
        return
    _refuse(settings, f"operators that are cut into {shards} shards", *NOT_CUT)
    if (kind := optimizer or OPTIMIZERS[settings.optimizer]).whole_tensors:
        name = kind.__name__.lower()
        raise ValueError(f"optimizer: {name} needs norms of whole tensors; they are cut into {shards} shards")


def _check_experts(settings: Settings, mesh: Mesh) -> None:
    dispatch = Dispatch.parse(settings.dispatch)
    if mesh.ep * mesh.etp > 1:
        _refuse(settings, f"experts on different ranks; found {mesh}", *NOT_CUT, "compress")
    for name in ("dispatch", "overlap_expert_comm"):
        if (found := getattr(settings, name)) != getattr(DEFAULTS, name) and mesh.expert_replicas == 1:
            raise ValueError(f"{name}: {found} is for replicas that share experts, by ep; found {mesh}")
    rounds = settings.rounds(mesh.without(TENSOR, CONTEXT).size)
    if settings.overlap_expert_comm and rounds == 1 and STAGES not in mesh.sizes:
        raise ValueError("overlap_expert_comm: expected steps of several micro-batches (accumulate), found 1 a rank")
    if settings.reproducible and not dispatch.is_exact:
        raise ValueError(f"dispatch: reproducible training needs direct, found {settings.dispatch}")


def check_overlap(settings: Settings, layout: str) -> None:
    """Raise ValueError if two passes need their weights at a time, and replicas of this layout have those of one."""
    if settings.overlap_expert_comm and LAYOUTS[layout].sharded:
        raise ValueError(f"overlap_expert_comm: {layout} has the weights of one unit at a time")


def expert_cut(settings: Settings, mesh: Mesh) -> ExpertCut:
    """Cut of experts along ``tp``; ValueError for `Settings.expert_shards` into which this mesh cannot cut them."""
    tensor = mesh.sizes.get(TENSOR, 1)
    each = (settings.tensor_shards or tensor) // tensor
    slices = settings.expert_shards or (mesh.etp * each if mesh.etp > 1 else 1)
    spread = mesh.ep * mesh.etp > 1 or tensor == 1
    if slices != mesh.etp * each if mesh.etp > 1 else each % slices:
        expected = str(mesh.etp * each) if mesh.etp > 1 else f"a divisor of the {each} tensor_shards of a rank"
        raise ValueError(f"expert_shards: expected {expected}, for {mesh}; found {slices}")
    if slices > 1 and not spread:
        raise ValueError(f"expert_shards: parts of experts are for meshes with ep or etp; found {slices} and {mesh}")
    return ExpertCut(slices, spread)


def _refuse(settings: Settings, what: str, *names: str) -> None:
    for name in names:
        if (found := getattr(settings, name)) != getattr(DEFAULTS, name):
            raise ValueError(f"{name}: {found} is not for {what}")


NOT_CUT = ("pool", "products", "fake_quant", "fake_quant_inputs", "prune")
"""Settings that must have their defaults if operators are cut, or experts on different ranks."""


def shards_of(settings: Settings, axis: Any) -> int:
    """Number of logical shards of every operator that is cut: `settings.tensor_shards`, by default one per rank."""
    return settings.tensor_shards or int(axis.size)


def cut_for(model: Operator, loss: Any, axis: Any, mesh: Mesh, settings: Settings) -> tuple[Operator, Any]:
    """Cut model and loss for this rank of the axis, and check all placements; PlacementError if they do not fit."""
    algorithm, experts = "tree" if settings.reproducible else "auto", expert_cut(settings, mesh)
    model, loss = cut(model, loss, axis, shards_of(settings, axis), algorithm, settings.sequence_parallel, experts)
    check_placements(model, loss, {axis: INPUTS[axis] for axis in (REPLICAS, TENSOR)}, {REPLICAS})
    return model, loss


class ModelOnMesh(NamedTuple):
    """Model, loss and communicators of a rank of a mesh.

    Attributes
    ----------
    model, loss : cut for this rank, with its experts
    whole : Operator
        Model with the experts of all ranks, cut for this rank.
    experts : ExpertDivision or None
        None if every rank has all experts.
    sequences : ModelsByLength or WholeSequences
        Of `model`, for this rank's tokens; with errors raised on all ranks of an exchange.
    errors : PassErrors
        Of operators beside exchanges.
    comm, replicas : Communicator
        All ranks; those with the same shards of the model, along all other axes.
    axis : MeshAxis
        Ranks that share the operators.
    blocks : LogicalBlocks or None
        None if the model is whole.
    parameters : tuple of Parameter
        Logical parameters of the whole model, in its order.
    is_guarded : bool
        True if operators exchange, so that those between exchanges are guarded.
    """

    model: Operator
    loss: Any
    whole: Operator
    experts: ExpertDivision | None
    sequences: SequenceModels
    errors: PassErrors
    comm: Communicator
    replicas: Communicator
    axis: Any
    blocks: LogicalBlocks | None
    parameters: tuple[Parameter, ...]
    is_guarded: bool

    @property
    def counts(self) -> bool:
        """True on the one rank of each team whose losses, measures and whole tensors count."""
        return bool(self.axis.rank == 0)


def forecast_axis(mesh: Mesh, rank: int, name: str = TENSOR) -> MeshAxis:
    """Axis of a mesh as `rank` has it, without a communicator: to cut a model that does not run."""
    return MeshAxis(name, mesh.coordinates(rank).get(name, 0), mesh.sizes.get(name, 1), None)


def with_own_experts(model: Operator, experts: ExpertDivision | None, mesh: Mesh, rank: int) -> Operator:
    """Model as `rank` has it, without a communicator, for a forecast: experts are divided like this, or not."""
    if experts is None:
        return model
    group = next(group for group in mesh.expert_groups(EXPERTS) if rank in group)
    return divide_experts(model, MeshAxis(EXPERTS, group.index(rank), len(group), None))


def place_model(model: Operator, loss: Any, mesh: DeviceMesh, settings: Settings) -> ModelOnMesh:
    """Cut a model for this rank of a mesh, along all axes. Collective."""
    axis, errors = mesh.axis(TENSOR), PassErrors()
    parameters = tuple(name_all(model))
    replicas = mesh.comm if axis.size == 1 else mesh.axis(*mesh.mesh.without(TENSOR).sizes).comm
    one, shards = axis._replace(rank=0, size=1), shards_of(settings, axis)
    every, _ = (model, None) if shards == 1 else cut(model, loss, one, shards, experts=expert_cut(settings, mesh.mesh))
    model, loss = cut_for(model, loss, axis, mesh.mesh, settings)
    blocks = None if shards == 1 else _logical_blocks(every, model, axis)
    whole, experts = model, expert_division(model, mesh.mesh, settings)
    if experts is not None:
        relayed = Dispatch.parse(settings.dispatch).route == "hierarchical"
        local = mesh.on_node(EXPERTS) if relayed else None
        model = divide_experts(model, mesh.axis(EXPERTS), experts.teams.by_source, settings.dispatch, local)
    context = mesh.axis(CONTEXT)
    is_guarded = axis.size * context.size * mesh.mesh.expert_replicas > 1
    finish = (errors.guard,) if is_guarded else ()
    sequences = collective_call(  # shards differ in their heads
        mesh.comm, lambda: sequence_models(model, loss, context, settings, *finish), "mesh", PlacementError
    )
    return ModelOnMesh(
        model, loss, whole, experts, sequences, errors, mesh.comm, replicas, axis, blocks, parameters, is_guarded
    )


def expert_division(model: Operator, mesh: Mesh, settings: Settings) -> ExpertDivision | None:
    """Division of a model's experts on a mesh; None if every rank has all. ValueError if it cannot be divided.

    Also if settings divide experts, and the model has none.
    """
    if settings.expert_shards is not None and not any(isinstance(one, ExpertGroup) for one in operators_in(model)):
        raise ValueError(f"expert_shards: {settings.expert_shards} is for models with mixtures of experts; found none")
    if mesh.ep * mesh.etp == 1:
        return None
    share = mesh.expert_replicas
    holders = holders_of(model, share)
    if mesh.sizes.get(TENSOR, 1) > 1 and not any(isinstance(one, GroupShards) for one in operators_in(model)):
        raise ValueError(
            f"mesh: {mesh} needs a model with mixtures in its table `cuts`, as `experts`; found none there"
        )
    return None if share == 1 else ExpertDivision(ExpertTeams(share, settings.reproducible), holders)


def _logical_blocks(whole: Operator, model: Operator, axis: MeshAxis) -> LogicalBlocks:
    """Blocks of the vector of a model with all shards, `whole`; a rank has those of its `model`. Collective."""
    return LogicalBlocks(axis, tensors_of(FlatParams(whole)), axis.comm.allgather(tensors_of(FlatParams(model))))
