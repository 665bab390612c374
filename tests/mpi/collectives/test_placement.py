"""Which ranks share a node: as the MPI says or as the user names it, and what follows for the wires."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator


def nodes_of(size, kind):
    """A node per rank for any number of ranks: two interleaved, all on their own, all on one."""
    return {"interleaved": [rank % 2 for rank in range(size)], "apart": range(size), "one": [5] * size}[kind]


def on_this_machine(world):
    """The ranks that could share memory with this one, ascending."""
    sharing = world.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = sharing.allgather(world.rank)
    sharing.Free()
    return sorted(ranks)


def sums(comm):
    for algorithm in ("auto", "direct", "ring"):
        for n in (1, 1000, 100_000):
            total = np.empty(n)
            comm.Allreduce(np.full(n, comm.rank + 1.0), total, algorithm=algorithm)
            assert (total == comm.size * (comm.size + 1) / 2).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["interleaved", "apart", "one"])
def test_ranks_of_different_nodes_share_no_memory(world, kind, shared):
    with Communicator(world, nodes=nodes_of(world.size, kind), shared=shared) as comm:
        named = list(nodes_of(world.size, kind))
        alone = len(set(named)) == 1
        assert comm.nodes == (None if alone else tuple(named))
        node = comm._planner.node
        assert (node is not None) == shared
        if shared:
            reached = [rank for rank in range(world.size) if rank in node.places]
            assert reached == [rank for rank in on_this_machine(world) if named[rank] == named[world.rank]]
        sums(comm)


@pytest.mark.parametrize("kind", ["interleaved", "apart", "one"])
def test_repeated_calls_between_nodes(world, kind):
    """Non-blocking calls that are found by their key, once they are frequent, also have messages between nodes."""
    with Communicator(world, nodes=nodes_of(world.size, kind)) as comm:
        counts = [2000 + 10 * rank for rank in range(comm.size)]
        mine = np.repeat(np.arange(comm.size, dtype=float), counts[comm.rank])
        found, expected = np.empty(sum(counts)), np.full(sum(counts), comm.rank)
        for number in range(64):
            found[:] = -1
            comm.Ialltoallv([mine, [counts[comm.rank]] * comm.size], [found, counts]).Wait()
            assert (found == expected).all(), number


def test_the_mpi_says_where_ranks_are(world):
    """One machine, with or without shared memory."""
    sharing = world.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = world.allgather(sharing.bcast(world.rank))
    sharing.Free()
    for shared in (True, False):
        with Communicator(world, shared=shared) as comm:
            assert (comm.nodes is None) == (len(set(leaders)) == 1)


def test_what_is_made_from_it_keeps_the_placement(world):
    size = world.size
    with Communicator(world, nodes=nodes_of(size, "apart")) as comm:
        twin, backwards = comm.Dup(), comm.Split(0, -comm.rank)
        for made in (twin, backwards):
            assert made.nodes == (tuple(range(size)) if size > 1 else None)
            sums(made)
            made.Free()
        half = comm.Split(comm.rank % 2)
        assert half.nodes == (tuple(range(half.size)) if half.size > 1 else None)
        sums(half)
        half.Free()


def test_nodes_that_make_no_sense_are_refused_on_all_ranks(world):
    size = world.size
    with pytest.raises(TypeError, match="nodes: expected the number of every rank's node, found 3"):
        Communicator(world, nodes=3)
    with pytest.raises(TypeError, match="nodes: expected the number of every rank's node"):
        Communicator(world, nodes=["here"] * size)
    with pytest.raises(ValueError, match=f"nodes: expected a number for each of {size} ranks, found"):
        Communicator(world, nodes=[0] * (size + 1))
    if size > 1:
        with pytest.raises(ValueError, match=r"nodes: \(0, .*\) on rank 0, but \(1, .*\) on rank 1"):
            Communicator(world, nodes=[world.rank] * size)
        with pytest.raises(ValueError, match=r"nodes: None on rank 0, but \(0, .*\) on rank 1"):
            Communicator(world, nodes=[0] * size if world.rank else None)
        with pytest.raises(TypeError, match=r"nodes: .* on rank 1"):
            Communicator(world, nodes=[0] * size if world.rank != 1 else 7)
    with Communicator(world) as comm:
        sums(comm)
