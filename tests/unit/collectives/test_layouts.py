"""Rows of buffers: packed data is where the MPI packs it from, for datatypes of all constructors, nested at random."""

from random import Random

import numpy as np
import pytest
from mpi4py import MPI

from collectives.buffers import layouts
from collectives.buffers.arguments import blocks_v, blocks_w, vector
from collectives.buffers.layouts import TooMany, rows_of, runs_of
from collectives.buffers.staging import PackedStaging

MAKERS = {
    "contiguous": lambda base, n: base.Create_contiguous(n),
    "dup": lambda base, n: base.Dup(),
    "vector": lambda base, n: base.Create_vector(n, 2, 3),
    "hvector": lambda base, n: base.Create_hvector(n, 1, 2 * base.Get_extent()[1] + 8),
    "indexed": lambda base, n: base.Create_indexed([n, 0, 1], [4, 0, 1]),
    "hindexed": lambda base, n: base.Create_hindexed([1, n], [0, 3 * base.Get_extent()[1]]),
    "indexed block": lambda base, n: base.Create_indexed_block(2, [2 * n, 0]),
    "hindexed block": lambda base, n: base.Create_hindexed_block(n, [n * base.Get_extent()[1], 0]),
    "resized": lambda base, n: base.Create_resized(0, base.Get_extent()[1] + 8 * n),
    "subarray": lambda base, n: base.Create_subarray([3, n + 2, 4], [2, n, 3], [1, 2, 0]),
    "Fortran": lambda base, n: base.Create_subarray([3, n + 1], [2, n], [0, 1], MPI.ORDER_F),
    "struct": lambda base, n: MPI.Datatype.Create_struct([n, 1], [base.Get_extent()[1] + 8, 0], [base, MPI.INT]),
}


def packed(buffer):
    staging = PackedStaging(buffer, load=True, store=False)
    staging.load()
    return staging.host.tolist()


def taken(memory, buffer, rows):
    start = buffer.address - MPI.Get_address(memory)
    parts = rows.parts(0, rows.starts[-1])
    return [byte for low, high in parts for byte in memory[start + low : start + high].tolist()]


@pytest.mark.parametrize("outer", MAKERS)
@pytest.mark.parametrize("inner", MAKERS)
def test_rows_are_where_the_mpi_packs_from(outer, inner):
    chance = Random(f"{outer} {inner}")
    made = MAKERS[inner](MPI.DOUBLE, chance.randrange(1, 4))
    datatype = MAKERS[outer](made, chance.randrange(1, 4)).Commit()
    made.Free()
    low, span = datatype.Get_true_extent()
    memory = np.random.default_rng(1).integers(0, 256, 3 * max(low + span, datatype.Get_extent()[1]), np.uint8)
    for buffer in (vector([memory, 2, datatype], "x"), blocks_v([memory, [1, 0, 1], [1, 0, 0], datatype], 3, "x")):
        rows = rows_of(buffer)
        assert taken(memory, buffer, rows) == packed(buffer)
        assert all(high > low for low, high in zip(rows.starts, rows.starts[1:]))
        middle = rows.starts[-1] // 3
        halves = [part for ends in ((0, middle), (middle, rows.starts[-1])) for part in rows.parts(*ends)]
        assert sum(high - low for low, high in halves) == buffer.nbytes
    datatype.Free()


def test_rows_that_touch_are_one():
    whole = MPI.INT.Create_subarray([4, 6], [2, 6], [1, 0])
    assert [one.tolist() for one in runs_of(whole)] == [[24], [48]]
    whole.Free()
    twice = vector([np.zeros(9), 3, MPI.DOUBLE], "x")
    assert rows_of(twice) == ([0, 24], [0])


def test_too_many_rows_and_pairs_with_padding_have_none(monkeypatch):
    column = MPI.DOUBLE.Create_vector(100, 1, 2).Commit()
    buffer = vector([np.zeros(200), 1, column], "x")
    assert len(rows_of(buffer).offsets) == 100
    monkeypatch.setattr(layouts, "MOST_ROWS", 99)
    assert rows_of(buffer) is None
    column.Free()
    with pytest.raises(TooMany):
        runs_of(MPI.DOUBLE_INT)


def test_blocks_of_a_datatype_each():
    column = MPI.INT.Create_vector(2, 1, 3).Commit()
    memory = np.arange(20, dtype="i4")
    buffer, lengths = blocks_w([memory, [1, 2, 0], [4, 40, 0], [column, MPI.INT, MPI.DOUBLE]], 3, "x")
    assert lengths == (8, 8, 0)
    assert np.array(packed(buffer), np.uint8).view("i4").tolist() == [1, 4, 10, 11]
    again, _ = blocks_w([memory, ([1, 2, 0], [4, 40, 0]), [column, MPI.INT, MPI.DOUBLE]], 3, "x")
    assert again.datatype is buffer.datatype
    dense, lengths = blocks_w([memory, [MPI.INT, MPI.DOUBLE]], 2, "x")
    assert (dense.contiguous, dense.counts, dense.displs) == (True, (4, 8), (0, 0)) and lengths == (4, 8)
    column.Free()


def test_displacements_from_the_bottom_are_addresses():
    column, memory = MPI.INT.Create_vector(2, 1, 3).Commit(), np.arange(20, dtype="i4")
    at = MPI.Get_address(memory)
    for types, values in (([column, MPI.INT], [5, 8, 2]), ([MPI.INT, MPI.INT], [5, 2])):
        buffer, _ = blocks_w([MPI.BOTTOM, [1, 1], [at + 20, at + 8], types], 2, "x")
        if buffer.contiguous:
            places = [buffer.address - at + displ for displ in buffer.displs]
            assert [memory[place // 4] for place in places] == values
        else:
            assert np.array(packed(buffer), np.uint8).view("i4").tolist() == values
    column.Free()
    assert blocks_w([MPI.BOTTOM, [0], [0], [MPI.INT]], 1, "x")[1] == (0,)


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        (np.zeros(4), ValueError, r"expected \[array, counts, displs, datatypes\]"),
        ([np.zeros(4), [MPI.INT]], ValueError, "expected 2 datatypes"),
        ([np.zeros(4), ["i", "i"]], TypeError, "expected datatypes"),
        ([np.zeros(4), [1], [MPI.INT] * 2], ValueError, "expected a pair"),
        ([np.zeros(4), 1, 0, [MPI.INT] * 2], TypeError, "counts: expected 2 integers, found 1"),
        ([np.zeros(4), [1, -1], [0, 0], [MPI.INT] * 2], ValueError, "no negative number"),
        ([np.zeros(4), [1, 1], [0, 30], [MPI.INT] * 2], ValueError, "needs 34 bytes"),
        ([np.zeros(4), [1, 1], [0, 0.5], [MPI.INT] * 2], TypeError, "expected an integer"),
        ([np.zeros(4), [MPI.INT, MPI.DATATYPE_NULL]], ValueError, "DATATYPE_NULL"),
        ([MPI.BOTTOM, [1, 1], None, [MPI.INT] * 2], ValueError, "MPI.BOTTOM needs counts and displacements"),
        ([MPI.BOTTOM, None, [0, 0], [MPI.INT] * 2], ValueError, "MPI.BOTTOM needs counts and displacements"),
        ([MPI.BOTTOM, [MPI.INT] * 2], ValueError, "MPI.BOTTOM needs counts and displacements"),
    ],
)
def test_wrong_blocks(spec, error, text):
    with pytest.raises(error, match=text):
        blocks_w(spec, 2, "sendbuf")
