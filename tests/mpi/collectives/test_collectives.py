"""Every collective, with every algorithm, in every form, on every dtype, count and root, gives exactly what it must."""

from itertools import cycle

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support import argument_spellings
from support.exchange_cases import ENTRIES, FORMS, TABLE, Question, ours, perform

from collectives import Communicator
from collectives.algorithms import catalog
from collectives.runtime.binding import call_binding

DTYPES = [*"bhilqBHILQ", *"efdg", *"FDG", "?", ml_dtypes.bfloat16]
METHODS = [method for method in TABLE if method != "Barrier"]
REDUCING = [method for method in TABLE if TABLE[method].reduces]
ROOTED = [method for method in TABLE if TABLE[method].rooted]

every_entry = pytest.mark.parametrize(("method", "algorithm"), ENTRIES)
every_form = pytest.mark.parametrize("form", FORMS)
blocking_first = pytest.mark.parametrize(
    "form", [FORMS[0], *(pytest.param(form, marks=pytest.mark.full) for form in FORMS[1:])]
)
"""All forms run one program: the default tests take the blocking one."""


def programs():
    """Every algorithm in every form, out of place and in place where its collective can be.

    The default tests take the blocking form of each and one other case: the next one from algorithm to algorithm.
    """
    for number, (method, algorithm) in enumerate(ENTRIES):
        places = [False, True] if TABLE[method].in_place else [False]
        cases = [(form, in_place) for in_place in places for form in FORMS]
        other = 1 + number % (len(cases) - 1)
        for index, (form, in_place) in enumerate(cases):
            marks = [] if index in (0, other) else [pytest.mark.full]
            name = f"{'in place' if in_place else 'out of place'}-{method}-{algorithm}-{form}"
            yield pytest.param(method, algorithm, form, in_place, marks=marks, id=name)


def question(comm, n, dtype, root=0, in_place=False, **more):
    return Question(comm.Get_rank(), comm.Get_size(), root, n, np.dtype(dtype), in_place, **more)


def counts(size):
    return sorted({0, 1, size - 1, size, size + 1, 1000})


def test_every_collective_of_the_catalogue_is_in_the_table():
    assert set(catalog.CATALOG) <= {line.collective for line in TABLE.values()}


@pytest.mark.parametrize(("method", "algorithm", "form", "in_place"), list(programs()))
def test_every_algorithm(comm, method, algorithm, form, in_place):
    line = TABLE[method]
    size, segments, dtypes = comm.Get_size(), cycle([None, 2, None, 3]), cycle("ifd")
    for number, n in enumerate(counts(size)):
        asked = question(comm, n, next(dtypes), number % size, in_place)
        perform(comm, form, method, line.make(asked), algorithm=algorithm, segments=next(segments))


@every_form
@pytest.mark.parametrize("method", METHODS)
def test_every_dtype(comm, method, form):
    """Which algorithm does it is left to the library; one of a few counts, roots and places each."""
    size = comm.Get_size()
    for number, dtype in enumerate(DTYPES):
        n, in_place = (1, size + 1, 40)[number % 3], TABLE[method].in_place and number % 2 == 1
        asked = question(comm, n, dtype, number % size, in_place)
        perform(comm, form, method, TABLE[method].make(asked), turns=1)


@pytest.mark.sweep(3)
@every_entry
@pytest.mark.parametrize("form", ["blocking", pytest.param("non-blocking", marks=pytest.mark.full)])
def test_long_vectors(comm, method, algorithm, form):
    """2.4 MB a vector, or of all blocks together: cut while it is combined."""
    line, size = TABLE[method], comm.Get_size()
    n = 300_000 if line.collective in ("broadcast", "reduce", "allreduce", "scan", "exscan") else 300_000 // size
    perform(comm, form, method, line.make(question(comm, n, "d", size - 1)), turns=1, algorithm=algorithm)


@pytest.mark.parametrize("method", ROOTED)
def test_every_root(comm, method):
    size = comm.Get_size()
    for algorithm in ours(TABLE[method].collective):
        for root in range(size):
            for in_place in {False, TABLE[method].in_place}:
                asked = question(comm, size + 1, "i", root, in_place)
                perform(comm, "blocking", method, TABLE[method].make(asked), turns=1, algorithm=algorithm)


@every_form
@pytest.mark.parametrize("method", ["Gatherv", "Scatterv", "Alltoallv"])
def test_lengths_that_change_from_call_to_call(comm, method, form):
    """Ranks whose own block stays as long must notice that others' change."""
    size = comm.Get_size()
    for algorithm in ["auto", *ours(method.lower())]:
        for turn in range(5):
            asked = question(comm, (4, 0, 9, 4, 1500)[turn], "d", turn // 3 % size)
            perform(comm, form, method, TABLE[method].make(asked), algorithm=algorithm, segments=1 + turn % 2)


@pytest.mark.parametrize("method", METHODS)
def test_a_few_calls_after_another_on_changing_arrays(comm, method):
    """What the library keeps of a call must not show in the next: shapes, addresses, dtypes and roots change."""
    size = comm.Get_size()
    for turn in range(12):
        n, dtype = (3, 700, 3, 5)[turn % 4], "idf"[turn % 3]
        asked = question(comm, n, dtype, turn % size, TABLE[method].in_place and turn % 5 == 4)
        perform(comm, "blocking", method, TABLE[method].make(asked), turns=1 + turn % 2)


# ------------------------------------------------------------------------------------------ several nodes

PLACEMENTS = {
    "interleaved": lambda size: [rank % 2 for rank in range(size)],
    "uneven": lambda size: [0] * (size - 1) + [1],
    "apart": lambda size: list(range(size)),
}
KNOWING = {name for entries in catalog.CATALOG.values() for name, entry in entries.items() if entry.placed}


@pytest.fixture(scope="module", params=PLACEMENTS)
def cluster(world, request):
    """The ranks on several nodes: shared memory within them, MPI between them."""
    shared = not request.config.getoption("--apart")
    with Communicator(world, nodes=PLACEMENTS[request.param](world.Get_size()), shared=shared) as comm:
        yield comm


@blocking_first
@pytest.mark.parametrize(("method", "algorithm"), [entry for entry in ENTRIES if entry[1] in KNOWING])
def test_algorithms_that_know_nodes(cluster, method, algorithm, form):
    line, size, segments = TABLE[method], cluster.Get_size(), cycle([None, 2])
    for number, n in enumerate((0, 1, size + 1, 1000)):
        asked = question(cluster, n, "ifd"[number % 3], number % size, line.in_place and number % 2 == 1)
        perform(cluster, form, method, line.make(asked), algorithm=algorithm, segments=next(segments))


@pytest.mark.parametrize("method", METHODS)
def test_all_others_do_not_mind_nodes(cluster, monkeypatch, method):
    monkeypatch.setattr(call_binding, "SEGMENT", 1 << 13)  # so that messages between nodes are cut, and paced
    line, size = TABLE[method], cluster.Get_size()
    for number, algorithm in enumerate(["auto", *ours(line.collective)]):
        asked = question(cluster, (size + 1, 20_000)[number % 2], "d", number % size)
        perform(cluster, "blocking", method, line.make(asked), algorithm=algorithm)


# ------------------------------------------------------------------------------------------ operations


@pytest.fixture(scope="module")
def joining():
    """The operation of `words`, which does not commute."""
    op = MPI.Op.Create(argument_spellings.join_buffers, commute=False)
    yield op
    op.Free()


@pytest.fixture(scope="module")
def adding():
    """A sum of one's own."""

    def add(left, inout, datatype):
        mine = np.frombuffer(inout, "i8")
        mine += np.frombuffer(left, "i8")

    op = MPI.Op.Create(add, commute=True)
    yield op
    op.Free()


def letters(rank, count, dtype, turn):
    return argument_spellings.letters(rank, count, turn)


@every_form
@pytest.mark.parametrize("method", REDUCING)
def test_operations_that_do_not_commute_take_ranks_in_order(comm, joining, method, form):
    line, size = TABLE[method], comm.Get_size()
    able = [name for name in ours(line.collective) if catalog.find(line.collective, name).ordered]
    for algorithm in ["auto", *able]:
        for number, n in enumerate((0, 1, size + 1, 1000)):
            in_place = number % 2 == 1
            asked = question(
                comm,
                n,
                argument_spellings.DTYPE,
                number % size,
                in_place,
                op=joining,
                function=argument_spellings.join,
                values=letters,
            )
            perform(comm, form, method, line.make(asked), algorithm=algorithm, segments=1 + number % 2)


@pytest.mark.parametrize("method", REDUCING)
def test_long_words_too(comm, joining, method):
    """320 kB of words: cut in parts, each of which must keep its order."""
    line, size = TABLE[method], comm.Get_size()
    n = 40_000 if line.collective != "reduce_scatter" else 40_000 // size
    for algorithm in ["auto", ours(line.collective)[0]]:
        asked = question(
            comm, n, argument_spellings.DTYPE, size - 1, op=joining, function=argument_spellings.join, values=letters
        )
        perform(comm, "blocking", method, line.make(asked), turns=1, algorithm=algorithm)


@pytest.mark.parametrize("method", REDUCING)
def test_rank_order_on_nodes(cluster, joining, method):
    """Kept where the ranks of every node are neighbours; where they are not, the call is refused."""
    line, size = TABLE[method], cluster.Get_size()
    for name in ours(line.collective):
        asked = question(
            cluster,
            30,
            argument_spellings.DTYPE,
            size - 1,
            op=joining,
            function=argument_spellings.join,
            values=letters,
        )
        if catalog.find(line.collective, name).keeps_order(cluster.nodes):
            perform(cluster, "blocking", method, line.make(asked), algorithm=name)
        else:
            with pytest.raises(ValueError, match="does not keep rank order"):
                perform(cluster, "blocking", method, line.make(asked), algorithm=name)


@every_form
@pytest.mark.parametrize("method", REDUCING)
def test_operations_of_one_s_own(comm, adding, method, form):
    for name in ["auto", *ours(TABLE[method].collective)]:
        asked = question(comm, 30, "i8", comm.Get_size() - 1, op=adding)
        perform(comm, form, method, TABLE[method].make(asked), algorithm=name)


PREDEFINED = {
    **dict.fromkeys(["SUM", "PROD"], "bhilqBHILQefdFD"),
    **dict.fromkeys(["MAX", "MIN"], "bhilqBHILQefd"),
    **dict.fromkeys(["LAND", "LOR", "LXOR"], "bhilqBHILQ?"),
    **dict.fromkeys(["BAND", "BOR", "BXOR"], "bhilqBHILQ"),
}


def operands(rank, dtype):
    """Zeros, ties, both orders; products stay small; no two ranks alike."""
    numbers = (np.arange(13) + rank) % 3
    if np.dtype(dtype).kind in "ifc":
        numbers = numbers * np.where((np.arange(13) + rank) % 2, 1, -1)
    return numbers.astype(dtype)


@pytest.mark.parametrize("name", PREDEFINED)
def test_predefined_operations_give_what_the_mpi_gives(world, comm, name):
    op, compared = getattr(MPI, name), 0
    for dtype in PREDEFINED[name]:
        mine = operands(comm.Get_rank(), dtype)
        theirs, ours = np.zeros_like(mine), np.zeros_like(mine)
        comm.Allreduce(mine, ours, op)
        try:
            world.Allreduce(mine, theirs, op)
        except (MPI.Exception, KeyError, ValueError):  # this MPI has no such type, or not with this operation
            continue
        compared += 1
        assert (ours == theirs).all(), f"{name} on {mine.dtype}: {ours} instead of {theirs}"
    assert compared >= 8


def test_small_floats_that_mpi_cannot_reduce(comm):
    size = comm.Get_size()
    for dtype in (np.float16, ml_dtypes.bfloat16):
        mine = np.full(5, comm.Get_rank() + 1, dtype)
        for op, expected in ((MPI.SUM, size * (size + 1) // 2), (MPI.MAX, size), (MPI.MIN, 1)):
            total = np.zeros_like(mine)
            comm.Allreduce(mine, total, op)
            assert (total == np.full(5, expected, dtype)).all()


@pytest.mark.parametrize("name", ["MAXLOC", "MINLOC"])
@pytest.mark.parametrize("pair", ["FLOAT_INT", "DOUBLE_INT", "LONG_INT", "TWOINT", "SHORT_INT"])
def test_extremes_and_where_they_are(world, comm, name, pair):
    """Against the MPI, with ties; as pairs of one's own layout and as [array, datatype]."""
    value = {"FLOAT_INT": "f4", "DOUBLE_INT": "f8", "LONG_INT": "i8", "TWOINT": "i4", "SHORT_INT": "i2"}[pair]
    dtype = np.dtype([("val", value), ("loc", "i4")], align=True)
    mine = np.zeros(11, dtype)
    mine["val"] = (np.arange(11) * 3 + comm.Get_rank() * 2) % 5 - 2
    mine["loc"] = comm.Get_rank() * 100 + np.arange(11)
    op, datatype = getattr(MPI, name), getattr(MPI, pair)
    theirs, ours, plain = (np.zeros(11, dtype) for _ in range(3))
    world.Allreduce([mine, datatype], [theirs, datatype], op)
    comm.Allreduce([mine, datatype], [ours, datatype], op)
    comm.Allreduce(mine, plain, op, algorithm="ring")
    for found in (ours, plain):
        assert (found["val"] == theirs["val"]).all()
        assert (found["loc"] == theirs["loc"]).all()


def test_keeping_the_first_or_the_last(comm):
    """REPLACE keeps the last rank's vector, NO_OP the first one's, whatever the algorithm's brackets."""
    mine = np.full(6, comm.Get_rank(), "i4")
    for op, kept in ((MPI.REPLACE, comm.Get_size() - 1), (MPI.NO_OP, 0)):
        for algorithm in ("auto", "linear", "mst", "recursive_doubling"):
            total = np.full(6, -1, "i4")
            comm.Allreduce(mine, total, op, algorithm=algorithm)
            assert total.tolist() == [kept] * 6


def test_all_ranks_get_the_same_bits(comm):
    """Sums of floats depend on the order; no two ranks may see different ones."""
    mine = (0.1 + comm.Get_rank()) ** np.arange(1, 60)
    alike = [name for name in ours("allreduce") if catalog.find("allreduce", name).alike]
    for algorithm in ["auto", *alike]:
        total = np.zeros_like(mine)
        comm.Allreduce(mine, total, algorithm=algorithm)
        assert len(set(comm.allgather(total.tobytes()))) == 1


def test_alone():
    """On one rank every collective is a copy, or nothing."""
    with Communicator(MPI.COMM_SELF) as comm:
        for method, line in TABLE.items():
            for form in FORMS:
                for n in (0, 1, 5, 2000):
                    perform(comm, form, method, line.make(Question(0, 1, 0, n, np.dtype("d"))))
