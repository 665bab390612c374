"""The MPI's own collectives, asked for by name: in every form, on whatever our algorithms take, beside all else."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support import argument_spellings
from support.exchange_cases import FORMS, TABLE, Question, perform

from collectives import Communicator, algorithms
from collectives.errors import InvalidArgument
from collectives.runtime.builders import native

METHODS = [method for method in TABLE if method != "Barrier"]
REDUCING = [method for method in TABLE if TABLE[method].reduces]


def question(comm, n, dtype, root=0, in_place=False, **more):
    return Question(comm.Get_rank(), comm.Get_size(), root, n, np.dtype(dtype), in_place, **more)


def questions(comm, line):
    """A few of all: counts, dtypes, roots, places."""
    size = comm.Get_size()
    for number, n in enumerate((0, 1, size - 1, size + 1, 1000, 100_000)):
        for in_place in (False, True)[: 1 + line.in_place]:
            yield question(comm, n, "ifd"[number % 3], number % size, in_place)


def right(world, form, method):
    """Whether this MPI has the persistent form, and performs it right: some accept it and give wrong results."""
    faults = []

    def judged(asked):
        exchange = TABLE[method].make(asked)
        exchange.keeps_inputs = not asked.in_place  # MPIs may write all over what they are given
        check = exchange.check

        def note(turn):
            try:
                check(turn)
            except AssertionError as fault:
                faults.append(fault)

        exchange.check = note
        return exchange

    for asked in questions(world, TABLE[method]) if form == "persistent" else ():
        try:
            perform(world, form, method, judged(asked), turns=4)
        except (NotImplementedError, MPI.Exception) as fault:
            faults.append(fault)
    return world.allreduce(not faults, MPI.LAND)


@pytest.mark.timeout(240)  # MPIs that wait without pause take their time with more ranks than cores
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", TABLE)
def test_every_form(world, comm, method, form):
    wrong = native.unsound(method, form)
    if wrong is not None:
        with pytest.raises(InvalidArgument, match=wrong):
            perform(comm, form, method, TABLE[method].make(question(comm, 1, "i")), algorithm="native")
        return
    if not right(world, form, method):
        pytest.skip(f"this MPI's {form} {method} is not right")
    for asked in questions(comm, TABLE[method]):
        perform(comm, form, method, TABLE[method].make(asked), turns=4, algorithm="native")


@pytest.mark.parametrize("method", METHODS)
def test_every_dtype(comm, method):
    """Data that only moves goes as bytes, so that MPI need not know its type."""
    known, unknown = "?bhilqBHILQfdFD", ["e", ml_dtypes.bfloat16]
    reduces, size = TABLE[method].reduces, comm.Get_size()
    for dtype in known if reduces else [*known, *unknown]:
        op, function = (MPI.LOR, np.logical_or) if dtype == "?" else (MPI.SUM, np.add)
        asked = question(comm, 40, dtype, size - 1, op=op, function=function)
        perform(comm, "blocking", method, TABLE[method].make(asked), turns=3, algorithm="native")


def test_what_mpi_cannot_add_is_refused(comm):
    mine = np.ones(3, np.float16)
    with pytest.raises(InvalidArgument, match=r"native.*float16"):
        comm.Allreduce(mine, np.empty_like(mine), algorithm="native")
    flags = np.ones(3, bool)
    with pytest.raises(InvalidArgument, match=r"native.*does not define this operation on elements of bool"):
        comm.Allreduce(flags, np.empty_like(flags), MPI.SUM, algorithm="native")
    with pytest.raises(InvalidArgument, match="segments"):
        comm.Barrier(algorithm="native", segments=2)


@pytest.mark.parametrize("commute", [True, False])
@pytest.mark.parametrize("method", REDUCING)
def test_operations_of_one_s_own(comm, method, commute):
    op = (
        MPI.Op.Create(argument_spellings.join_buffers, commute=False)
        if not commute
        else MPI.Op.Create(add, commute=True)
    )
    more = (
        {}
        if commute
        else {
            "function": argument_spellings.join,
            "values": lambda r, n, dtype, turn: argument_spellings.letters(r, n, turn),
        }
    )
    for n in (3, 1000):
        asked = question(comm, n, "i8", comm.Get_size() - 1, op=op, **more)
        perform(comm, "blocking", method, TABLE[method].make(asked), algorithm="native")
    op.Free()


def add(left, inout, datatype):
    mine = np.frombuffer(inout, "i8")
    mine += np.frombuffer(left, "i8")


def test_strided_memory(comm):
    """Ranks may describe the same data differently: here a column, elsewhere a plain vector."""
    table = np.zeros((6, 4), "i4")
    column = MPI.INT.Create_vector(6, 1, 4).Commit()
    for turn in range(3):
        root = turn % comm.Get_size()
        plain = np.full(6, turn + 1, "i4")
        table[:] = turn + 1 if comm.Get_rank() == root else 0
        buffer = [table, 1, column] if comm.Get_rank() % 2 else plain
        comm.Bcast(buffer, root, algorithm="native")
        assert ((table[:, 0] if comm.Get_rank() % 2 else plain) == turn + 1).all()
    column.Free()


def test_others_go_on_while_it_waits_inside_mpi(comm):
    """Rank 0 waits inside MPI for the others, who wait for a collective that rank 0 takes part in."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI is not for several threads")
    total = np.empty(4)
    for _ in range(5):
        request = comm.Iallreduce(np.ones(4), total, algorithm="linear")
        if comm.Get_rank():
            request.Wait()
        comm.Barrier(algorithm="native")
        request.Wait()
        assert (total == comm.Get_size()).all()


def test_it_is_listed():
    assert all(algorithms(line.collective)[-1] == "native" for line in TABLE.values())


def test_debug_mode_compares_it_too(world):
    if world.Get_size() == 1:
        pytest.skip("one rank agrees with itself")
    with Communicator(world, debug=True) as comm:
        comm.Barrier(algorithm="native")
        name = "native" if comm.Get_rank() else "dissemination"
        with pytest.raises(MPI.Exception, match="native"):
            comm.Barrier(algorithm=name)
