"""Batch normalisation by the statistics of all replicas: `BatchNorm` with `sync` in data-parallel layouts."""

from typing import Any

from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.settings import Settings
from parallel.nn.batch_norm import BatchNorm
from parallel.nn.operator import Operator
from parallel.nn.rewrite import inherit, operators_in, replaced
from parallel.sharding.device_mesh import MeshAxis
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor.exchange import allreduce
from quant.types import Array


class SynchronisedBatchNorm(BatchNorm):
    """Batch normalisation whose sums in training are those of all ranks along an axis, which pass together."""

    exchanges = True

    def __init__(self, whole: BatchNorm, axis: MeshAxis):
        inherit(self, whole)
        self._axis: Any = axis

    def _total(self, values: Array) -> Array:
        return allreduce(self._axis, values)


def is_synchronised(model: Operator) -> bool:
    """True if an operator of the model takes statistics of all replicas."""
    return any(isinstance(one, BatchNorm) and one.sync for one in operators_in(model))


def synchronised(model: Operator, settings: Settings, mesh: Mesh, replicas: Any) -> Operator:
    """Copy of a model whose `BatchNorm` with `sync` exchange with the ranks of `replicas`.

    ValueError for settings with which replicas do not pass together.
    """
    if not is_synchronised(model):
        return model
    for name, is_given in (
        ("layout", settings.layout not in LAYOUTS),
        ("reproducible", settings.reproducible),
        ("pool", settings.pool),
        ("mesh", mesh.expert_replicas > 1),
    ):
        if is_given:
            raise ValueError(f"{name}: {getattr(settings, name)} is for BatchNorm without sync")
    axis = MeshAxis("replicas", replicas.Get_rank(), replicas.Get_size(), replicas)

    def replacement(one: Operator) -> Operator | None:
        return SynchronisedBatchNorm(one, axis) if isinstance(one, BatchNorm) and one.sync else None

    return replaced(model, replacement)
