"""Calls of collectives among the neighbours in a topology: their arguments, validated and described as a `Call`."""

from typing import Any, TypeAlias

from mpi4py import MPI

from collectives.algorithms.neighbors import Neighbors
from collectives.buffers import arguments
from collectives.buffers.arguments import Buffer
from collectives.errors import InvalidArgument
from collectives.runtime.arguments.call import BYTE, NONE, Blocks, Call, blocks_of, is_in_place, same_size

Side: TypeAlias = tuple[Buffer | None, tuple[int, ...], Blocks]
"""Buffer, block lengths and offsets of what a rank sends or receives, as of `blocks_of`."""


def neighbor_allgather(sendbuf: Any, recvbuf: Any, neighbors: Neighbors, v_form: bool = False) -> Call:
    target, received, ends = _of_neighbors(recvbuf, neighbors.sources, "recvbuf", v_form, writable=True)
    _no_neighbors_in_place(sendbuf)
    source = arguments.vector(sendbuf, "sendbuf")
    if not v_form and received:
        same_size(source.nbytes, received[0], "a block of recvbuf")
    return _among_neighbors("allgather", neighbors, (source, (source.nbytes,), {0: 0}), (target, received, ends))


def neighbor_alltoall(
    sendbuf: Any, recvbuf: Any, neighbors: Neighbors, v_form: bool = False, typed: bool = False
) -> Call:
    received = _of_neighbors(recvbuf, neighbors.sources, "recvbuf", v_form, True, typed)
    _no_neighbors_in_place(sendbuf)
    sent = _of_neighbors(sendbuf, neighbors.destinations, "sendbuf", v_form, False, typed)
    if not v_form and sent[1] and received[1]:
        same_size(sent[1][0], received[1][0], "a block of recvbuf")
    return _among_neighbors("alltoall", neighbors, sent, received)._replace(typed=typed)


def _no_neighbors_in_place(sendbuf: Any) -> None:
    if is_in_place(sendbuf):
        raise InvalidArgument(MPI.ERR_BUFFER, "sendbuf: MPI.IN_PLACE has no meaning among neighbours")


def _of_neighbors(
    spec: Any, neighbors: tuple[int, ...], name: str, v_form: bool, writable: bool, typed: bool = False
) -> Side:
    """As `blocks_of`. The argument of a rank without neighbours is ignored."""
    if not neighbors:
        return None, (), NONE
    return blocks_of(spec, len(neighbors), name, v_form, writable, typed)


def _among_neighbors(collective: str, neighbors: Neighbors, sent: Side, received: Side) -> Call:
    (source, outgoing, starts), (target, incoming, ends) = sent, received
    ends = {len(outgoing) + place: end for place, end in ends.items()}
    call = Call(collective, (*outgoing, *incoming) or (0,), BYTE, source, target, starts, ends, neighbors=neighbors)
    return call._replace(local_counts=True, v_form=True)
