"""chorus draw program: the rows of a bound call as a table, and wrong requests."""

import numpy as np
import pytest
from support.plain_node import CELL, PlainHub
from support.program_runs import call
from support.schedule_cases import Case

from collectives.cli import draw_program
from collectives.engine.assembly import Instruction, MemoryOperand, Place, Point, assemble, calling, new_bases, waiting
from collectives.engine.extension import reduction_number
from collectives.engine.instructions import ABSOLUTE, COPY, LANDING, NET_MESSAGE, SCRATCH, SOURCE, TARGET, Kind
from collectives.transport.wire import Piece


def lines(rows, peers):
    """Lines of a table below its heading, as cells by column."""
    heading, *found = draw_program.table(rows, peers).splitlines()
    starts = [heading.index(name) for name in draw_program.COLUMNS]
    return [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None])] for line in found]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("collective, name", [("allreduce", "ring"), ("broadcast", "mst"), ("alltoall", "pairwise")])
def test_every_row_has_a_line(collective, name, size):
    case = Case(collective, name, size, 3 * CELL, hub=PlainHub(size))
    tables = [lines(program.rows, draw_program.peers_of(program)) for program in case.programs]
    for rank, table in enumerate(tables):
        assert [cells[0] for cells in table] == [str(number) for number in range(len(table))]
        for cells in table:
            if cells[3] == "SEND":  # the peer receives the message, with the same bytes and label
                bytes_and_label = cells[5].split()[0], cells[7].split()[0]
                arriving = [one for one in tables[int(cells[4])] if one[3] == "RECV" and one[4] == str(rank)]
                assert bytes_and_label in [(one[5].split()[0], one[7].split()[0]) for one in arriving]


class Message:
    def describe(self, record):
        record["peer"], record["tag"] = 7, 1


def test_cells_of_every_kind():
    hub, array = PlainHub(2), np.zeros(4)
    wire, add = hub.wire(0), reduction_number(np.add, np.add, np.dtype("f8"))
    piece = Piece(array.nbytes, Place(ABSOLUTE, array.ctypes.data))
    places = Place(SOURCE, 8), Place(SCRATCH, 16), Place(TARGET, 24)
    send = Instruction(Kind.SEND, [MemoryOperand(8, Place(SOURCE, 0))], hub.edges[0][1], 5 * 64 + 8)
    first = [
        send,
        Instruction(Kind.WAIT_READ, after=send),
        Instruction(Kind.LOCAL, [MemoryOperand(8, places[0], out=places[2])], reduction=COPY),
        Instruction(Kind.LOCAL, [MemoryOperand(8, *places)], reduction=add),
        Instruction(Kind.RECV, [MemoryOperand(8, places[0], out=places[2])], hub.edges[0][1], reduction=add),
        calling(array.sum),
    ]
    message = Message()
    second = [
        waiting(Point(first, 2)),
        Instruction(Kind.NET_RECV, [MemoryOperand(8, out=Place(LANDING, 0))], message=message),
        Instruction(Kind.NET_WAIT, message=message),
        *wire.guard_root()[0][:1],
    ]
    rows = assemble([[first, second]], new_bases())
    assert rows.messages.dtype == NET_MESSAGE and piece.nbytes == 32
    table = lines(rows, [1])
    assert [cells[3:] for cells in table[:9]] == [
        ["SEND", "1", "8 B source+0", "", "5.8", ""],
        ["WAIT_READ", "", "", "", "", "row 0 is read"],
        ["LOCAL", "", "8 B source+8 -> target+24", "", "", ""],
        ["LOCAL", "", "8 B source+8, scratch+16 -> target+24", "add float64", "", ""],
        ["RECV", "1", "8 B message, source+8 -> target+24", "add float64", "0.0", ""],
        ["CALL", "", "ndarray.sum", "", "", ""],
        ["WAIT_STREAM", "", "", "", "", "row 1"],
        ["NET_RECV", "7 by MPI", "8 B -> landing+0", "", "", ""],
        ["NET_WAIT", "7 by MPI", "", "", "", ""],
    ]
    assert table[9][3:5] == ["EXPECT_NONE", "1"]
    assert [cells[2] for cells in table] == ["0"] * 6 + ["1"] * 4


def test_the_program_of_one_rank():
    done = call(draw_program.main, "--collective", "allreduce", "--algorithm", "ring", "--bytes", "64", "--rank", "0")
    assert done.returncode == 0 and done.stdout.startswith("allreduce, ring, 64 B of float32, rank 0 of 1")
    assert "64 B source+0 -> target+0" in done.stdout


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--rank", "1"], "argument --rank: expected a rank from 0 to 0, found 1"),
        (["--algorithm", "zigzag"], "argument --algorithm: "),
    ],
)
def test_wrong_requests(wrong, message):
    done = call(draw_program.main, "--collective", "allreduce", "--algorithm", "ring", *wrong)
    assert done.returncode == 2 and message in done.stderr
