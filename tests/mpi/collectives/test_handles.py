"""Operations and datatypes that come and go: what was kept for one of them never serves another."""

import numpy as np
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.ranks(1, 2)


def larger(sent, result, datatype):
    """The larger of two float64."""
    a, b = np.frombuffer(sent, "f8"), np.frombuffer(result, "f8")
    b[...] = np.maximum(a, b)


REDUCTIONS = {
    "Allreduce": lambda comm, x, out, op: comm.Allreduce(x, out, op),
    "in place": lambda comm, x, out, op: (np.copyto(out, x), comm.Allreduce(MPI.IN_PLACE, out, op)),
    "Iallreduce": lambda comm, x, out, op: comm.Iallreduce(x, out, op).Wait(),
    "Scan": lambda comm, x, out, op: comm.Scan(x, out, op),
}


@pytest.mark.parametrize("form", REDUCTIONS)
def test_a_copy_of_a_predefined_operation_and_its_successor(comm, form):
    """The user's operation is likely to get the address of the copy that was deleted."""
    rank, size = comm.Get_rank(), comm.Get_size()
    x, out = np.full(3, rank + 1.0), np.empty(3)
    last = rank + 1 if form == "Scan" else size
    for _ in range(50):
        op = MPI.Op(MPI.SUM)
        for _ in range(3):
            REDUCTIONS[form](comm, x, out, op)
            assert out.tolist() == [last * (last + 1) / 2] * 3
        del op
        op = MPI.Op.Create(larger, commute=True)
        for _ in range(3):
            REDUCTIONS[form](comm, x, out, op)
            assert out.tolist() == [last] * 3
        op.Free()
        del op


@pytest.mark.parametrize("form", REDUCTIONS)
def test_an_operation_gets_the_datatype_of_its_own_call(comm, form):
    """Two derived datatypes of one size, on the same memory, with an operation that looks at them."""
    met = []

    def both(sent, result, datatype):
        if datatype.Get_envelope()[-1] == MPI.COMBINER_DUP:
            datatype = datatype.Get_contents()[-1][0]
        met.append(datatype.Get_contents()[-1][0].Get_size())
        a, b = np.frombuffer(sent, "i4"), np.frombuffer(result, "i4")
        b += a

    x, out = np.ones(8, "i4"), np.empty(8, "i4")
    op = MPI.Op.Create(both, commute=True)
    for part in (MPI.INT, MPI.SHORT) * 2:
        whole = part.Create_contiguous(8 // part.Get_size()).Commit()
        for _ in range(2):
            met.clear()
            arguments = (out, [x, 4, whole], [out, 4, whole])
            if form == "in place":
                out[...] = x
                comm.Allreduce(MPI.IN_PLACE, arguments[2], op)
            else:
                REDUCTIONS[form](comm, arguments[1], arguments[2], op)
            terms = comm.Get_rank() + 1 if form == "Scan" else comm.Get_size()
            assert out.tolist() == [terms] * 8
            assert set(met) <= {part.Get_size()}, "the operation was called with the datatype of another call"
        whole.Free()
    op.Free()


def freed_copy(datatype):
    """The type is met in a copy that the user frees."""
    copy = MPI.Datatype(datatype)
    return copy, copy.free


def contiguous(datatype):
    """The type is met as what a contiguous one consists of."""
    made = datatype.Create_contiguous(1).Commit()
    return made, made.Free


def duplicate(datatype):
    """The type is met as what another is a duplicate of."""
    made = datatype.Dup()
    return made, made.Free


@pytest.mark.parametrize("meet", [freed_copy, contiguous, duplicate])
@pytest.mark.parametrize(
    ("name", "dtype"), [("INT", "i4"), ("DOUBLE_INT", [("val", "f8"), ("loc", "i4")]), ("SHORT", "i2")]
)
def test_a_type_that_is_first_met_inside_another(comm, monkeypatch, meet, name, dtype):
    """It goes on to serve operations of the user, and those of pairs, when the derived type is freed."""
    from collectives.buffers import arguments, datatypes

    dense = {}
    for cache in ("_elements_by_handle", "_elements_by_code", "_elements_by_dtype"):
        monkeypatch.setattr(datatypes, cache, {})
    for module in (arguments, datatypes):
        monkeypatch.setattr(module, "dense_elements", dense)
    rank, size = comm.Get_rank(), comm.Get_size()
    datatype = getattr(MPI, name)
    dtype = np.dtype(dtype, align=True)
    vector = np.zeros(3, dtype)
    met, free = meet(datatype)
    comm.Bcast([vector, 3, met])
    free()
    if name == "DOUBLE_INT":
        vector["val"], vector["loc"] = rank, rank
        out = np.zeros_like(vector)
        comm.Allreduce([vector, 3, datatype], [out, 3, datatype], MPI.MAXLOC)
        assert out["loc"].tolist() == [size - 1] * 3
        return

    def add(sent, result, datatype):
        a, b = np.frombuffer(sent, dtype), np.frombuffer(result, dtype)
        b += a

    op = MPI.Op.Create(add, commute=True)
    out = np.zeros_like(vector)
    comm.Allreduce(np.full(3, rank, dtype), out, op)
    comm.Allreduce([np.full(3, rank, dtype), datatype], [out, datatype], op)
    assert out.tolist() == [size * (size - 1) // 2] * 3
    op.Free()
