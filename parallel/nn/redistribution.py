"""Collectives that change the placement of a value along one mesh axis, forward and backward. No arrays, no MPI.

The operators in `parallel.sharding.tensor.redistribute` do this, and the planner prices it.
"""

from parallel.nn.placement import Partial, Placement, Replicate, Shard

COLLECTIVES: dict[tuple[type[Placement], type[Placement]], str] = {
    (Replicate, Replicate): "",
    (Replicate, Partial): "",  # one rank keeps the value, the others have zeros
    (Replicate, Shard): "",  # each rank keeps its part
    (Partial, Replicate): "allreduce",
    (Partial, Partial): "",
    (Partial, Shard): "reduce_scatter",
    (Shard, Replicate): "allgather",
    (Shard, Partial): "",  # zeros around each part
    (Shard, Shard): "alltoall",
}
"""Collective, as the catalogue of `collectives` names it, from one placement of a value to another; "" for none."""


def collective(source: Placement, target: Placement) -> str:
    """Collective that changes a value's placement; "" if no rank needs data of another.

    >>> collective(Partial(), Shard(1)), collective(Shard(0), Shard(-1)), collective(Shard(0), Shard(0))
    ('reduce_scatter', 'alltoall', '')
    """
    if isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim:
        return ""
    return COLLECTIVES[type(source), type(target)]


def gradient(placement: Placement) -> Placement:
    """Placement of the gradient of a value: see the table in `parallel.nn.placement`."""
    if isinstance(placement, Partial):
        return Replicate()
    return Partial() if placement == Replicate(partial=True) else placement


def exchanges(source: Placement, target: Placement) -> tuple[str, str]:
    """Collectives of the forward and the backward pass where a value is taken with another placement than it has.

    >>> exchanges(Replicate(), Replicate(partial=True)), exchanges(Partial(), Replicate())  # Megatron-LM's f and g
    (('', 'allreduce'), ('allreduce', ''))
    >>> exchanges(Shard(1), Replicate(partial=True)), exchanges(Partial(), Shard(1))  # with sequence parallelism
    (('allgather', 'reduce_scatter'), ('reduce_scatter', 'allgather'))
    """
    return collective(source, target), collective(gradient(target), gradient(source))
