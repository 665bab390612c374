"""Communicators with a topology: mpi4py's classes and methods, and collectives of the neighbours in every form."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CartCommunicator, Communicator, DistGraphCommunicator, GraphCommunicator

CLASSES = {
    MPI.Cartcomm: CartCommunicator,
    MPI.Graphcomm: GraphCommunicator,
    MPI.Distgraphcomm: DistGraphCommunicator,
}


def ring(comm):
    size = comm.Get_size()
    edges = [peer for rank in range(size) for peer in ((rank - 1) % size, (rank + 1) % size)]
    return comm.Create_graph(list(range(2, 2 * size + 1, 2)), edges)


def ahead(comm):
    """Each rank sends to the two after it, with two edges to the first; so do some of the MPIs wrongly."""
    rank, size = comm.Get_rank(), comm.Get_size()
    return comm.Create_dist_graph_adjacent(
        [(rank - by) % size for by in (2, 1, 1)], [(rank + by) % size for by in (1, 2, 1)]
    )


def to_first(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    return comm.Create_dist_graph_adjacent(list(range(size)) if rank == 0 else [], [0])


MAKERS = {
    "line": lambda c: c.Create_cart([c.Get_size()]),
    "torus": lambda c: c.Create_cart(MPI.Compute_dims(c.Get_size(), 2), [True, True]),
    "tube": lambda c: c.Create_cart(MPI.Compute_dims(c.Get_size(), 2), [False, True], reorder=True),
    "ring": ring,
    "ahead": ahead,
    "to the first": to_first,
    "distributed": lambda c: c.Create_dist_graph([c.Get_rank()], [1], [(c.Get_rank() + 1) % c.Get_size()]),
    "without edges": lambda c: c.Create_dist_graph_adjacent([], []),
}

FORMS = ("blocking", "repeated", "non-blocking", "persistent")


@pytest.fixture(params=MAKERS)
def made(comm, request):
    found = MAKERS[request.param](comm)
    yield found
    found.Free()


def expected_places(made):
    """For each source, the rank and the number of its edge whose block arrives from it; None where there is none."""
    sources, destinations = made.inoutedges
    everyone = made.allgather(list(destinations))
    if isinstance(made, MPI.Cartcomm):
        return [None if peer < 0 else (peer, place ^ 1) for place, peer in enumerate(sources)]
    found, used = [], {}
    for peer in sources:
        edges = [number for number, other in enumerate(everyone[peer]) if other == made.Get_rank()]
        used[peer] = used.get(peer, -1) + 1
        found.append((peer, edges[used[peer]]))
    return found


def run(made, name, form, *arguments):
    if form == "non-blocking":
        getattr(made, f"I{name.lower()}")(*arguments).Wait()
    elif form == "persistent":
        request = getattr(made, f"{name}_init")(*arguments)
        for _ in range(2):
            request.Start()
            request.Wait()
        request.Free()
    else:
        for _ in range(20 if form == "repeated" else 1):
            getattr(made, name)(*arguments)


def test_classes_and_methods_are_mpi4py_s(comm, made):
    kind = next(kind for kind in CLASSES if isinstance(made, kind))
    assert type(made) is CLASSES[kind] and isinstance(made, MPI.Topocomm) and isinstance(made, Communicator)
    twin = made.Dup()
    part = made.Split(0)
    assert type(twin) is type(made) and type(part) is Communicator
    assert twin.inoutedges == made.inoutedges and twin.Get_topology() == made.Get_topology()
    for other in (twin, part, made):
        total = np.zeros(3)
        other.Allreduce(np.ones(3), total)
        assert (total == comm.Get_size()).all()
    unbound = MPI.Comm.Dup(made)
    assert type(unbound) is type(made)
    assert unbound.neighbor_allgather(7) == [None if peer < 0 else 7 for peer in made.inedges]
    for other in (twin, part, unbound):
        other.Free()


def test_grids(comm):
    size = comm.Get_size()
    plain = MPI.Intracomm(comm).Create_cart([size, 1], [True, False])
    with Communicator(plain) as grid:
        assert type(grid) is CartCommunicator
        assert grid.Get_topo() == plain.Get_topo() and grid.topo == plain.topo and grid.dims == [size, 1]
        assert [grid.Shift(0, by) for by in (-1, 1, 2)] == [plain.Shift(0, by) for by in (-1, 1, 2)]
        assert grid.Get_cart_rank(grid.coords) == grid.Get_rank()
        for remain in ([True, False], [False, True]):
            line = grid.Sub(remain)
            assert type(line) is CartCommunicator and line.Get_size() == (size if remain[0] else 1)
            assert line.neighbor_allgather(0) == [None if peer < 0 else 0 for peer in line.inedges]
            line.Free()
    plain.Free()
    few = comm.Create_cart([max(1, size - 1)])
    assert (few == MPI.COMM_NULL) == (comm.Get_rank() == size - 1 > 0)
    if few != MPI.COMM_NULL:
        line = few.Sub([True])
        assert line.neighbor_allgather(few.Get_rank()) == [None if peer < 0 else peer for peer in few.inedges]
        line.Free()
        few.Free()


@pytest.mark.parametrize("form", FORMS)
def test_each_source_s_block_arrives_in_its_place(made, form):
    rank, places = made.Get_rank(), expected_places(made)
    sources, destinations = (len(side) for side in made.inoutedges)
    for n in (1, 100, 5000):
        sent = rank * 100.0 + np.arange(destinations)[:, None] + np.zeros(n)
        mine = np.full(n, float(rank))
        found, gathered = np.full((sources, n), -1.0), np.full((sources, n), -1.0)
        run(made, "Neighbor_alltoall", form, sent, found)
        run(made, "Neighbor_allgather", form, mine, gathered)
        for place, one in enumerate(places):
            assert (found[place] == (-1 if one is None else one[0] * 100 + one[1])).all(), (n, place)
            assert (gathered[place] == (-1 if one is None else one[0])).all(), (n, place)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_any_length_and_datatype(made, form):
    rank, places = made.Get_rank(), expected_places(made)
    sources, destinations = (len(side) for side in made.inoutedges)
    counts = [1 + (rank + number) % 3 for number in range(destinations)]
    arriving = [0 if one is None else 1 + sum(one) % 3 for one in places]
    sent = np.concatenate([np.zeros(0), *(np.full(n, rank * 100.0 + k) for k, n in enumerate(counts))])
    found = np.full(4 * sources, -1.0)
    run(made, "Neighbor_alltoallv", form, [sent, counts], [found, (arriving, list(range(0, 4 * sources, 4)))])
    lengths = [0 if one is None else 1 + one[0] % 3 for one in places]
    gathered = np.full(sum(lengths), -1.0)
    run(made, "Neighbor_allgatherv", form, np.full(1 + rank % 3, float(rank)), [gathered, lengths])
    every_second = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    typed, out = np.full((sources, 3), -1.0), rank * 100.0 + np.arange(2.0 * destinations)
    run(
        *(made, "Neighbor_alltoallw", form),
        [out, [2] * destinations, [16 * k for k in range(destinations)], [MPI.DOUBLE] * destinations],
        [typed, ([1] * sources, [24 * k for k in range(sources)]), [every_second] * sources],
    )
    every_second.Free()
    start = 0
    for place, one in enumerate(places):
        row, n = found[4 * place : 4 * place + 4], arriving[place]
        assert (row[n:] == -1).all()
        assert typed[place, 1] == -1
        if one is not None:
            assert (row[:n] == one[0] * 100 + one[1]).all()
            assert typed[place, ::2].tolist() == [one[0] * 100 + 2 * one[1] + k for k in range(2)]
            assert (gathered[start : start + lengths[place]] == one[0]).all()
        else:
            assert (typed[place] == -1).all(), "a block that nobody sends"
        start += lengths[place]


def test_objects(made):
    rank, places = made.Get_rank(), expected_places(made)
    found = made.neighbor_alltoall([(rank, number, "x" * 700) for number in range(len(made.outedges))])
    assert found == [None if one is None else (*one, "x" * 700) for one in places]
    assert made.neighbor_allgather({rank}) == [None if one is None else {one[0]} for one in places]
    with pytest.raises(ValueError, match=r"expected \d+ objects"):
        made.neighbor_alltoall([None] * (len(made.outedges) + 1))
    with pytest.raises((ValueError, TypeError, AttributeError)):
        made.neighbor_allgather(lambda: None)


def test_many_under_way_at_once(comm):
    grid = comm.Create_cart([comm.Get_size()], [True])
    rank, size = grid.Get_rank(), grid.Get_size()
    found = np.zeros((9, 2))
    requests = [grid.Ineighbor_alltoall(np.array([rank, rank + 0.5]) + 10 * k, found[k]) for k in range(9)]
    total = np.zeros(1)
    requests.append(grid.Iallreduce(np.ones(1), total))
    MPI.Request.Waitall(requests)
    assert total[0] == size
    for k in range(9):
        assert found[k].tolist() == [(rank - 1) % size + 0.5 + 10 * k, (rank + 1) % size + 10 * k]
    grid.Free()


@pytest.mark.parametrize("options", [{"debug": True}, {"shared": False}, {"nodes": "alternating"}, {"timeout": 60}])
def test_settings_are_those_of_the_communicator_it_was_made_of(world, options):
    size = world.Get_size()
    if "nodes" in options:
        options = {"nodes": [rank % 2 for rank in range(size)]}
    with Communicator(world, **options) as comm:
        grid = comm.Create_cart([size], [True])
        assert grid.nodes == comm.nodes
        for n in (1, 60_000):
            found = np.zeros((2, n))
            grid.Neighbor_allgather(np.full(n, float(grid.Get_rank())), found)
            assert (found == np.array(grid.inedges)[:, None]).all()
        if options.get("debug"):
            with pytest.raises(ValueError, match=r"refuses its arguments|sendbuf holds 16 bytes"):
                grid.Neighbor_allgather(np.zeros(2), np.zeros(2))  # refused on all ranks
        grid.Free()


def test_wrong_arguments(comm):
    grid = comm.Create_cart([comm.Get_size()])
    two, four = np.zeros(2), np.zeros(4)
    other = "expected 'auto' or 'neighbors', found 'ring'"
    longer = "sendbuf holds 16 bytes, but a block of recvbuf holds 8"
    for error, text, call in (
        (ValueError, "no meaning among neighbours", lambda: grid.Neighbor_alltoall(MPI.IN_PLACE, two)),
        (ValueError, other, lambda: grid.Neighbor_allgather(two, four, algorithm="ring")),
        (ValueError, longer, lambda: grid.Neighbor_allgather(two, two)),
        (ValueError, "cannot be divided into 2", lambda: grid.Neighbor_alltoall(np.zeros(3), two)),
        (TypeError, "sendbuf", lambda: grid.Neighbor_alltoall(3, two)),
        (ValueError, "expected 2 items", lambda: grid.Neighbor_alltoallv([two, [1]], two)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    grid.Neighbor_alltoall(two, np.zeros(2), algorithm="neighbors")
    grid.Free()
    assert not hasattr(comm, "Neighbor_alltoall")
