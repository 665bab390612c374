"""Model and loss of a rank of a mesh: cut along ``tp``, divided along ``cp`` and ``ep``; and logical parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from collectives import Communicator
from parallel.engine.compression import check_compression
from parallel.engine.data_parallel.expert_shards import ExpertDivision, ExpertTeams
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.logical_blocks import LogicalBlocks, tensors_of
from parallel.engine.data_parallel.partition_spec import PartitionSpec, units_of
from parallel.engine.exchange_guard import PassErrors
from parallel.engine.settings import Settings
from parallel.engine.synchronised_norm import is_synchronised, synchronised
from parallel.nn.expert_group import ExpertGroup
from parallel.nn.flat_params import FlatParams
from parallel.nn.operator import Operator, Parameter, name_all
from parallel.nn.placement import PlacementError
from parallel.nn.rewrite import operators_in
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizers import OPTIMIZERS
from parallel.optim.precision import PRECISIONS
from parallel.runtime.collective_errors import collective_call
from parallel.sharding.axes import AXES
from parallel.sharding.axis import REPLICAS, STAGES, Axis
from parallel.sharding.context.context_axis import CONTEXT, INVARIANT, parts_of
from parallel.sharding.context.models_by_length import ModelsByLength, WholeSequences
from parallel.sharding.device_mesh import DeviceMesh, MeshAxis, MeshPlace
from parallel.sharding.expert.dispatch import Dispatch
from parallel.sharding.expert.divide_experts import divide_experts, holders_of
from parallel.sharding.expert.expert_axis import EXPERTS
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor.check import check_placements
from parallel.sharding.tensor.cut_model import cut
from parallel.sharding.tensor.mixture_shards import GroupShards
from parallel.sharding.tensor.tensor_axis import TENSOR, expert_cut, shards_of

Finish = Callable[[Operator, Any], tuple[Operator, Any]]

SequenceModels = ModelsByLength | WholeSequences


def mesh_of(settings: Settings, ranks: int) -> Mesh:
    """Mesh of the settings, by default all ranks along ``dp``; ValueError if it does not fit.

    >>> str(mesh_of(Settings(mesh="tp=2"), 2)), str(mesh_of(Settings(), 3))
    ('tp=2', 'dp=3')
    """
    mesh = Mesh({REPLICAS.name: ranks}) if settings.mesh is None else Mesh.parse(settings.mesh)
    mesh.expect(ranks, [name for name in AXES if name != STAGES.name])
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


def check_on_mesh(settings: Settings, mesh: Mesh, layout: str, optimizer: type[Optimizer] | None = None) -> None:
    """Raise ValueError if settings do not go with the layout of replicas, or with what is divided along an axis.

    The optimizer is by default the one that the settings name.
    """
    check_compression(settings, layout)
    if settings.overlap_expert_comm and LAYOUTS[layout].sharded:
        raise ValueError(f"overlap_expert_comm: {layout} has the weights of one unit at a time")
    for axis in reversed(AXES.values()):
        axis.check(settings, mesh)
    kind, shards = optimizer or OPTIMIZERS[settings.optimizer], shards_of(settings, mesh)
    if kind.whole_tensors and shards > 1:
        name = kind.__name__.lower()
        raise ValueError(f"optimizer: {name} needs norms of whole tensors; they are cut into {shards} shards")


def cut_for(model: Operator, loss: Any, place: MeshPlace, settings: Settings) -> tuple[Operator, Any]:
    """Cut model and loss for a rank of a mesh, and check all placements; PlacementError if they do not fit."""
    algorithm, sequence = "tree" if settings.reproducible else "auto", settings.sequence_parallel
    shards, experts = shards_of(settings, place.mesh), expert_cut(settings, place.mesh)
    model, loss = cut(model, loss, place.axis(TENSOR.name), shards, algorithm, sequence, experts)
    _check_placements(model, loss, CONTEXT)
    return model, loss


class ModelOnMesh(NamedTuple):
    """Model, loss and communicators of a rank of a mesh."""

    model: Operator  # cut for this rank, with its experts
    loss: Any
    whole: Operator  # with the experts of all ranks
    experts: ExpertDivision | None  # None if every rank has all experts
    sequences: SequenceModels  # of `model`, for this rank's tokens; with errors raised on all ranks of an exchange
    errors: PassErrors  # of operators beside exchanges
    comm: Communicator  # all ranks
    replicas: Communicator  # ranks with the same shards of the model, along all other axes
    axis: MeshAxis  # ranks that share the operators
    blocks: LogicalBlocks | None  # None if the model is whole
    parameters: tuple[Parameter, ...]  # logical ones of the whole model, in its order
    is_guarded: bool  # operators exchange, so that those between exchanges are guarded

    @property
    def counts(self) -> bool:
        """True on the one rank of each team whose losses, measures and whole tensors count."""
        return self.axis.rank == 0


class DividedModel(NamedTuple):
    """Model and loss cut for a rank, with its experts; and `whole`, the same model with the experts of all ranks."""

    model: Operator
    loss: Any
    whole: Operator
    experts: ExpertDivision | None  # None if every rank has all experts


def divide_model(model: Operator, loss: Any, place: MeshPlace, settings: Settings) -> DividedModel:
    """Cut a model for a rank of a mesh, and divide its experts. Collective on a `DeviceMesh`."""
    whole, loss = cut_for(model, loss, place, settings)
    experts = expert_division(whole, place.mesh, settings)
    if experts is None:
        return DividedModel(whole, loss, whole, None)
    local = place.on_node(EXPERTS.name) if Dispatch.parse(settings.dispatch).route == "hierarchical" else None
    model = divide_experts(whole, place.axis(EXPERTS.name), experts.teams.by_source, settings.dispatch, local)
    return DividedModel(model, loss, whole, experts)


def place_model(model: Operator, loss: Any, mesh: DeviceMesh, settings: Settings) -> ModelOnMesh:
    """Cut a model for this rank of a mesh, along all axes. Collective."""
    axis, errors = mesh.axis(TENSOR.name), PassErrors()
    parameters = tuple(name_all(model))
    replicas = mesh.comm if axis.size == 1 else mesh.axis(*mesh.mesh.alike.sizes).comm
    one, shards = axis._replace(rank=0, size=1), shards_of(settings, mesh.mesh)
    every, _ = (model, None) if shards == 1 else cut(model, loss, one, shards, experts=expert_cut(settings, mesh.mesh))
    here = divide_model(model, loss, mesh, settings)
    blocks = None if shards == 1 else _logical_blocks(every, here.whole, axis)
    here = here._replace(model=synchronised(here.model, settings, mesh.mesh, replicas))
    is_guarded = axis.size * mesh.axis(CONTEXT.name).size * mesh.mesh.expert_replicas > 1 or is_synchronised(here.model)
    finish = (errors.guard,) if is_guarded else ()
    sequences = collective_call(  # shards differ in their heads
        mesh.comm, lambda: sequence_models(here.model, here.loss, mesh, settings, *finish), "mesh", PlacementError
    )
    return ModelOnMesh(*here, sequences, errors, mesh.comm, replicas, axis, blocks, parameters, is_guarded)


def sequence_models(
    model: Operator, loss: Any, place: MeshPlace, settings: Settings, finish: Finish = lambda *both: both
) -> SequenceModels:
    """Models for this rank's tokens, with all placements checked; `finish` is applied to each that is made.

    Raises PlacementError or ValueError for a model whose sequences cannot be divided.
    """
    axis = place.axis(CONTEXT.name)
    parts = parts_of(settings, axis.size)
    if parts == 1:
        return WholeSequences(*finish(model, loss))
    algorithm = INVARIANT if settings.reproducible else settings.context
    multiple = shards_of(settings, place.mesh) if settings.sequence_parallel else 1
    if multiple > 1 and (settings.reproducible or parts > axis.size):
        _expect_one_use(model)
    models = ModelsByLength(model, loss, axis, parts, algorithm, finish, multiple)
    _check_placements(*models.of(1)[:2])
    return models


def _check_placements(model: Operator, loss: Any, *without: Axis) -> None:
    """Raise PlacementError if a model and its loss do not fit the axes; some are not checked (yet)."""
    inputs = {axis.name: axis.input for axis in AXES.values() if axis.input is not None and axis not in without}
    check_placements(model, loss, inputs, {axis.name for axis in AXES.values() if axis.sums_gradients})


def _expect_one_use(model: Operator) -> None:
    """Raise ValueError if a parameter that is not cut has several uses: the order of the sums would depend on ranks."""
    for parameter in model.parameters():
        if parameter.uses > 1 and parameter.cut is None:
            expected = "expected one use of every tensor that is not cut, on slices of the parts of a sequence"
            raise ValueError(f"sequence_parallel: {expected}; found {parameter.uses} of {parameter.name}")


def expert_division(model: Operator, mesh: Mesh, settings: Settings) -> ExpertDivision | None:
    """Division of a model's experts on a mesh; None if every rank has all. ValueError if it cannot be divided.

    Also if settings divide experts, and the model has none.
    """
    if settings.expert_shards is not None and not any(isinstance(one, ExpertGroup) for one in operators_in(model)):
        raise ValueError(f"expert_shards: {settings.expert_shards} is for models with mixtures of experts; found none")
    if mesh.ep * mesh.etp == 1:
        return None
    share = mesh.expert_replicas  # 1: experts are divided along tp alone
    holders = holders_of(model, share)
    if mesh.sizes.get(TENSOR.name, 1) > 1 and not any(isinstance(one, GroupShards) for one in operators_in(model)):
        raise ValueError(
            f"mesh: {mesh} needs a model with mixtures in its table `cuts`, as `experts`; found none there"
        )
    return None if share == 1 else ExpertDivision(ExpertTeams(share, settings.reproducible), holders)


def _logical_blocks(whole: Operator, model: Operator, axis: MeshAxis) -> LogicalBlocks:
    """Blocks of the vector of a model with all shards, `whole`; a rank has those of its `model`. Collective."""
    return LogicalBlocks(axis, tensors_of(FlatParams(whole)), axis.comm.allgather(tensors_of(FlatParams(model))))
