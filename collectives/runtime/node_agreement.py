"""Node numbers given by the user, validated on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from mpi4py import MPI

from collectives.errors import InvalidArgument, InvalidType


def agree_on_nodes(comm: MPI.Intracomm, nodes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Node numbers as given, or None; raises on all ranks if they differ or are invalid. Collective."""
    given: object = None
    try:
        if nodes is not None:
            given = tuple(index(node) for node in nodes)
    except TypeError:
        given = f"nodes: expected the number of every rank's node, found {nodes!r}"
    by_rank = comm.allgather(given)
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if isinstance(other, str):
            raise InvalidType(MPI.ERR_ARG, f"{other} on rank {rank}")
        if other != first:
            raise InvalidArgument(MPI.ERR_ARG, f"nodes: {first} on rank 0, but {other} on rank {rank}")
    if first is not None and len(first) != len(by_rank):
        raise InvalidArgument(MPI.ERR_ARG, f"nodes: expected a number for each of {len(by_rank)} ranks, found {first}")
    return first
