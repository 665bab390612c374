"""Print the rows of a bound call, the instructions that the engine runs on each rank, as a table.

    chorus draw program -n 3 --collective allreduce --algorithm ring --bytes 96
    mpiexec -n 4 chorus draw program --collective broadcast --algorithm mst --bytes 1M --dtype float64 --rank 2

The rows belong to a persistent call on these ranks, in this machine's memory. Columns:

  row         number of the row
  round       round of the program. It begins when all streams of the one before have ended
  stream      stream of the round. The rows of a stream run in order, and streams progress independently
  kind        name in `collectives.engine.instructions.Kind`, where each is explained. LOCAL copies or reduces
  peer        rank that the message comes from or goes to, "by MPI" if not through shared memory
  operands    bytes, and their places as memory+offset. Function of a CALL
  reduction   operation and dtype of a reduction
  label       label of a message as mark.bytes (57: not beside its flag), "or address" if it may be read in place
  after       what the row waits for
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import catalog
from collectives.benchmark.cases import CASES, DTYPES, CaseBuffers, elements
from collectives.benchmark.size_arguments import parse_size
from collectives.cli import launcher
from collectives.cli.arguments import check_schedule
from collectives.engine.assembly import Rows
from collectives.engine.instructions import ABSOLUTE, COPY, LABELS, Kind
from collectives.engine.row_operands import reductions
from collectives.runtime.execution.program import Program
from collectives.units import format_bytes

COLUMNS = "row", "round", "stream", "kind", "peer", "operands", "reduction", "label", "after"

MEMORY_NAMES = "source", "target", "scratch", "landing", "send buffer", "receive buffer", "address"
"""Names of the memories, by their numbers."""

MAILBOX = Kind.SEND, Kind.RECV, Kind.EXPECT_NONE
NETWORK = Kind.NET_SEND, Kind.NET_RECV, Kind.NET_WAIT


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add, size = parser.add_argument, launcher.world_size()
    add("--collective", required=True, choices=list(catalog.CATALOG), metavar="NAME", help="the catalogue's")
    add("--algorithm", required=True, metavar="NAME", help="one of the catalogue's for the collective")
    add("--segments", type=launcher.at_least(1, int), default=1, metavar="K", help="pipeline K segments (default 1)")
    add("--bytes", type=parse_size, default="1K", metavar="SIZE", help="of the whole array (default 1K)")
    add("--dtype", choices=list(DTYPES), default="float32", metavar="NAME", help=f"{', '.join(DTYPES)}")
    add("--rank", type=launcher.at_least(0, int), metavar="R", help="print the program of this rank only")
    arguments = parser.parse_args(argv)
    check_schedule(parser, arguments)
    if arguments.rank is not None and arguments.rank >= size:
        parser.error(f"argument --rank: expected a rank from 0 to {size - 1}, found {arguments.rank}")
    return arguments


def peers_of(program: Program) -> list[int]:
    """Ranks at the other end of the links of a program, in the order of its rows."""
    links: list[Any] = list({id(one.link): one.link for one in program.instructions if one.link is not None}.values())
    return [link.rank for link in links]


def cells(rows: Rows, peers: Sequence[int]) -> Iterator[list[str]]:
    """Cells of the table, row by row. `peers` are the ranks at the other end of the links."""
    for number in range(len(rows.rounds) - 1):
        first, stop = rows.rounds[number : number + 2]
        for index, stream in enumerate(rows.streams[first:stop]):
            for at in range(stream["first"], stream["stop"]):
                row = rows.rows[at]
                place = [str(at), str(number), str(first + index), Kind(row["kind"]).name]
                yield [*place, _peer(row, rows, peers), _operands(row, rows), *_message(row), _after(row, rows)]


def _peer(row: Any, rows: Rows, peers: Sequence[int]) -> str:
    if row["kind"] in NETWORK:
        return f"{rows.messages[row['link']]['peer']} by MPI"
    return str(peers[row["link"]]) if row["kind"] in MAILBOX else ""


def _place(operand: Any, side: str) -> str:
    memory, offset = operand[side], operand[f"{side}_offset"]
    return f"{MEMORY_NAMES[memory]}{'=' if memory == ABSOLUTE else '+'}{offset}"


def _operands(row: Any, rows: Rows) -> str:
    """Operands of a row: bytes, and places that are read and written."""
    kind, found = row["kind"], []
    if kind == Kind.CALL:
        return getattr(rows.calls[row["link"]], "__qualname__", "function")
    for operand in rows.operands[row["first_operand"] :][: row["operands"]]:
        left, right, out = (_place(operand, side) for side in ("left", "right", "out"))
        if kind in (Kind.SEND, Kind.NET_SEND):
            text = left
        elif kind == Kind.LOCAL:
            text = f"{left} -> {out}" if row["reduction"] == COPY else f"{left}, {right} -> {out}"
        elif row["reduction"] == COPY:
            text = f"-> {out}"
        else:
            text = f"{left}, message -> {out}" if row["mine_first"] else f"message, {left} -> {out}"
        found.append(f"{operand['nbytes']} B {text}")
    return "; ".join(found)


def _message(row: Any) -> list[str]:
    """Reduction and label of a row."""
    reduction, label = "", ""
    if row["reduction"] != COPY:
        function, dtype = reductions[row["reduction"]]
        reduction = f"{getattr(getattr(function, 'ufunc', function), '__name__', 'function')} {dtype}"
    if row["kind"] in (Kind.SEND, Kind.RECV):
        label = f"{row['label'] // LABELS}.{row['label'] % LABELS}" + (" or address" if row["address_label"] else "")
        label += f", parts of {row['part']} B" if row["part"] else ""
    return [reduction, label]


def _after(row: Any, rows: Rows) -> str:
    """Dependency of a row: the row of another stream that must be done, or the send that must have been read."""
    if row["kind"] == Kind.WAIT_STREAM:
        return f"row {rows.streams[row['after']]['first'] + row['count'] - 1}"
    return f"row {row['after']} is read" if row["kind"] == Kind.WAIT_READ else ""


def table(rows: Rows, peers: Sequence[int]) -> str:
    """Rows of a program as a table. `peers` are the ranks at the other end of the links."""
    lines = [list(COLUMNS), *cells(rows, peers)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def bound(arguments: argparse.Namespace, plain: MPI.Intracomm) -> str:
    """Bind the call, and return this rank's table. Collective."""
    comm = Communicator(plain)
    case, dtype = CASES[arguments.collective], DTYPES[arguments.dtype]
    n = elements(case, arguments.bytes, dtype.itemsize, plain.Get_size())
    buffers = CaseBuffers(case, comm, n, dtype)
    request = getattr(comm, case.method + "_init")(
        *buffers.args, algorithm=arguments.algorithm, segments=arguments.segments
    )
    program: Program = request.program
    text = table(program.rows, peers_of(program))
    request.Free()
    size = f"{format_bytes(n * dtype.itemsize)} of {np.dtype(dtype)}"
    where = f"rank {plain.Get_rank()} of {plain.Get_size()}"
    return f"{arguments.collective}, {arguments.algorithm}, {size}, {where}\n{text}\n"


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    texts = MPI.COMM_WORLD.gather(bound(arguments, MPI.COMM_WORLD))
    for rank, text in enumerate(texts or ()):
        if arguments.rank in (None, rank):
            sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    launcher.run(main)
