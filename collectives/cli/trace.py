"""Record one collective call on all ranks as a trace that ui.perfetto.dev and chrome://tracing open.

    chorus trace -n 4 --collective allreduce --algorithm ring --bytes 1M -o out/trace.json

The beginning and end of each step of the program are recorded on every rank, on a clock that all ranks share up to half
a message's round trip.
"""

import argparse
import time
from itertools import chain
from pathlib import Path

from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import catalog
from collectives.benchmark import traces
from collectives.benchmark.cases import CASES, DTYPES, MEMORIES, CaseBuffers, elements
from collectives.benchmark.size_arguments import parse_size
from collectives.cli import launcher
from collectives.cli.arguments import check_schedule, expect_writable
from collectives.engine import interpreter
from collectives.runtime.execution.program import Program
from collectives.units import format_bytes

WARMUP = 5
POLLS = 1000


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--collective", default="allreduce", choices=list(catalog.CATALOG), metavar="NAME", help="the catalogue's")
    add("--algorithm", default="ring", metavar="NAME", help="the catalogue's (default ring)")
    add(
        "--segments",
        type=launcher.at_least(1, int),
        default=1,
        metavar="K",
        help="pipeline K segments of the data (default 1)",
    )
    add("--bytes", type=parse_size, default="1M", metavar="SIZE", help="of the whole array (default 1M)")
    add("--memory", choices=MEMORIES, default="plain", help="where the arrays lie (default plain)")
    add("-o", "--output", type=Path, default=Path("out/trace.json"), metavar="FILE", help="default out/trace.json")
    arguments = parser.parse_args(argv)
    check_schedule(parser, arguments)
    expect_writable(parser, arguments.output)
    return arguments


def recorded(arguments: argparse.Namespace, plain: MPI.Intracomm) -> list[traces.Entry] | None:
    """Run and record one collective. Return the trace entries of all ranks on rank 0, None on the others."""
    comm = Communicator(plain)
    rank, size = plain.Get_rank(), plain.Get_size()
    nodes = comm.nodes or (0,) * size
    collective, name, segments = arguments.collective, arguments.algorithm, arguments.segments
    case, kind = CASES[collective], DTYPES["float32"]
    n = elements(case, arguments.bytes, kind.itemsize, size)
    buffers = CaseBuffers(case, comm, n, kind, arguments.memory)
    request = getattr(comm, case.method + "_init")(*buffers.args, algorithm=name, segments=segments)
    program = request.program
    for _ in range(WARMUP):
        buffers.advance()
        request.Start()
        request.Wait()
    ahead = traces.offset(plain)
    buffers.advance()
    buffers.poison()
    plain.Barrier()
    finished, times = recorded_rows(program)
    if buffers.wrong():
        raise RuntimeError(f"rank {rank}: the result of the recorded call is wrong")
    kinds = [traces.kind_of(program.rows.rows[row]) for row in finished]
    schedule = catalog.build(collective, name, rank, size, 0, segments, nodes)
    count = catalog.blocks(collective, name, size) * segments
    start = plain.allreduce(times[0] - ahead, MPI.MIN)
    aligned = [moment - ahead - start for moment in times]
    title = f"{collective}, {name}, {format_bytes(n * kind.itemsize)}"
    mine = traces.of_calls(title, rank, nodes[rank], schedule, count, first_rows(program), kinds, aligned)
    request.Free()
    entries = plain.gather(mine)
    return None if entries is None else [*traces.names(nodes), *chain.from_iterable(entries)]


def recorded_rows(program: Program) -> tuple[list[int], list[float]]:
    """Run a program in the interpreter. Return its rows in the order of their ends, and the start and these ends."""
    finished, times = [], [time.perf_counter()]
    engine = interpreter.RowProgram(*program.rows)

    def note(row: int) -> None:
        finished.append(row)
        times.append(time.perf_counter())

    engine.finished = note
    engine.begin()
    while engine.is_running:
        program.note(engine.advance(POLLS))
    return finished, times


def first_rows(program: Program) -> list[tuple[int, int]]:
    """Rounds of the schedule, and the number of rows before each."""
    rows = program.rows
    return [(index, int(rows.streams["first"][rows.rounds[number]])) for index, number in program.begins]


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    entries = recorded(arguments, MPI.COMM_WORLD)
    if entries is not None:
        about = {name: str(value) for name, value in vars(arguments).items() if name != "output"}
        traces.write(arguments.output, entries, **about)
    launcher.say(f"{arguments.output} written; ui.perfetto.dev opens it")
    return 0
