"""``chorus run``: programs of mpi4py on communicators of Chorus, and their profiles."""

import json
import os

import pytest
from support.launches import ROOT, ended, needs_mpiexec, start_ranks

from collectives.cli.run import program_at

pytestmark = [needs_mpiexec, pytest.mark.timeout(120)]

KINDS = """
import sys
from mpi4py import MPI
from mpi4py.MPI import COMM_WORLD
made = [COMM_WORLD, MPI.COMM_SELF, COMM_WORLD.Dup(), COMM_WORLD.Split(0)]
print(*(type(comm).__name__ for comm in made), COMM_WORLD.allreduce(1), __name__, *sys.argv[1:], sep=",")
"""

LATE = """
import sys, time
import numpy as np
from mpi4py import MPI

def slow(total):
    comm, one = MPI.COMM_WORLD, np.ones(8)
    time.sleep(0.05 if comm.rank == int(sys.argv[1]) else 0)
    comm.Allreduce(one, total)  # waits

def fast(large):
    MPI.COMM_WORLD.Bcast(large)

total, large = np.zeros(8), np.zeros(100_000)
MPI.COMM_WORLD.Barrier()
for _ in range(20):
    slow(total)
    fast(large)
assert (total == MPI.COMM_WORLD.size).all() and not large.any()
request = MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, total)
request.Wait()
print("summed", total[0])
"""

SLOW = """
import sys, time
import numpy as np
from mpi4py import MPI

comm, slow, mib = MPI.COMM_WORLD, sys.argv[1], int(sys.argv[2])
small, large = np.ones(4), np.ones(mib << 17)
late = comm.size - 1
calls = {
    "broadcast": lambda x: comm.Bcast(x),
    "allreduce": lambda x: comm.Allreduce(x, np.empty_like(x)),
    "reduce": lambda x: comm.Reduce(x, np.empty_like(x)),
    "allgather": lambda x: comm.Allgather(x, np.empty(comm.size * len(x))),
    "alltoall": lambda x: comm.Alltoall(x, np.empty_like(x)),
}
for turn in range(12):
    time.sleep(0.15 if comm.rank == late else 0)
    comm.Barrier()  # waits for the late rank
    for name, call in calls.items():
        call(large if name == slow else small)
        comm.Barrier()
"""


OTHERS = """
import threading
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
calls = []

def add(a, b, kind):
    calls.append(1)
    np.frombuffer(b, "f8")[:] += np.frombuffer(a, "f8")

counting = MPI.Op.Create(add, True)
apart = [comm.Dup() for _ in range(2)]

def work(own, count):
    for _ in range(count):
        half, total, held = np.ones(3, np.float16), np.zeros(3, np.float16), bytearray(24)
        own.Allreduce(half, total)
        own.Allreduce([np.ones(3), MPI.DOUBLE], [held, MPI.DOUBLE])
        own.Allreduce(MPI.IN_PLACE, [summed := np.ones(3), MPI.DOUBLE])
        own.Allreduce(np.ones(3), other := np.zeros(3), counting)
        own.Bcast(total if own.rank else total.copy())
        assert all((each == own.size).all() for each in (total, np.frombuffer(held), summed, other))

threads = [threading.Thread(target=work, args=(own, count)) for own, count in zip(apart, (12, 40))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
work(comm, 9)
print("right", len(calls))
"""


def run(ranks, *words, **environment):
    process = start_ranks(ranks, ["-m", "collectives", *map(str, words)], **environment)
    return ended(process), process.returncode


@pytest.mark.parametrize(
    "words, at",
    [
        (["program.py", "--profile"], 0),
        (["--profile", "-m", "module"], 1),
        (["--profile-files", "out/p", "-c", "pass"], 2),
        (["--profile"], 1),
        ([], 0),
    ],
)
def test_options_end_where_the_program_begins(words, at):
    assert program_at(words) == at


def test_all_communicators_are_of_chorus(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(KINDS)
    (tmp_path / "of_a_module.py").write_text(KINDS)
    kinds = ",".join(["Communicator"] * 4)
    for words in ([program], ["-c", KINDS], ["-m", "of_a_module"]):
        output, status = run(2, *words, "-n", "7", PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]))
        assert status == 0
        assert output.count(f"{kinds},2,__main__,-n,7\n") == 2


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.full), 2])
def test_a_profile_names_the_late_rank_and_its_line(tmp_path, late):
    program = tmp_path / "program.py"
    program.write_text(LATE)
    output, status = run(3, "--profile", "--profile-files", tmp_path / "found", program, late)
    assert status == 0
    assert output.count("summed 9.0") == 3
    found = json.loads((tmp_path / "found.json").read_text())
    lines = {(line["collective"], line["form"]): line for line in found["lines"]}
    waits = lines["allreduce", "blocking"]
    assert waits["late_rank"] == late
    number = 1 + LATE.splitlines().index("    comm.Allreduce(one, total)  # waits")
    assert waits["site"] == f"{program}:{number}"
    assert waits["calls"] == 60 and waits["bytes"] == 60 * 64 and waits["of_native"] > 0
    assert waits["seconds"] >= waits["waiting"] > 0.5  # in 20 calls two ranks of three wait 50 ms
    assert lines["broadcast", "blocking"]["calls"] == 60
    assert lines["allreduce", "non-blocking"]["calls"] == 3
    assert f"rank {late}" in output
    spans = [
        entry for entry in json.loads((tmp_path / "found.trace.json").read_text())["traceEvents"] if "dur" in entry
    ]
    assert len(spans) == sum(line["calls"] for line in found["lines"])


@pytest.mark.parametrize(
    "slow, mib",
    [
        ("alltoall", 32),
        *(
            pytest.param(name, 8, marks=pytest.mark.full)
            for name in ("alltoall", "broadcast", "allreduce", "reduce", "allgather")
        ),
    ],
)
def test_a_profile_names_the_slow_collective_beside_a_late_rank(tmp_path, slow, mib):
    """That of many bytes takes most time beside waiting, and a barrier waits the longest, for the late rank."""
    program = tmp_path / "program.py"
    program.write_text(SLOW)
    _, status = run(2, "--profile", "--profile-files", tmp_path / "found", program, slow, mib)
    assert status == 0
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    slowest = max(lines, key=lambda line: line["seconds"] - line["waiting"])
    assert slowest["collective"] == slow and slowest["calls"] == 24
    longest = max(lines, key=lambda line: line["waiting"])
    assert (longest["collective"], longest["late_rank"]) == ("barrier", 1)
    number = 1 + SLOW.splitlines().index("    comm.Barrier()  # waits for the late rank")
    assert longest["site"] == f"{program}:{number}"


def test_a_profile_has_the_exchanges_of_neighbours(tmp_path):
    text = "from mpi4py import MPI\nimport numpy as np\ngrid = MPI.COMM_WORLD.Create_cart([2])\n"
    text += "found = np.zeros((2, 8))\nfor _ in range(20): grid.Neighbor_alltoall(np.ones((2, 8)), found)\n"
    output, status = run(2, "--profile", "--profile-files", tmp_path / "found", "-c", text)
    assert status == 0
    (line,) = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert (line["collective"], line["algorithm"], line["calls"]) == ("alltoall", "neighbors", 40)
    assert line["of_native"] > 0 and "alltoall (neighbors)" in output


def test_a_profile_repeats_calls_in_a_small_share_of_the_time(tmp_path):
    """Seven of 100 long calls have numbers that are sampled. The first one is, others only after a long time."""
    text = "from mpi4py import MPI\nimport numpy as np\nx = np.ones(1 << 20)\n"
    text += "for _ in range(100): MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x, MPI.MAX)\n"
    text += "profile = __import__('gc').get_objects\n"
    text += "from collectives.cli.call_profile import CallProfile\n"
    text += "(found,) = [one for one in profile() if type(one) is CallProfile]\n"
    text += "print('repeated', len(found.samples))\n"
    output, status = run(2, "--profile", "--profile-files", tmp_path / "found", "-c", text)
    assert status == 0
    counts = [int(line.split()[1]) for line in output.splitlines() if line.startswith("repeated")]
    assert len(counts) == 2 and all(1 <= count <= 4 for count in counts)


def test_a_profile_has_calls_of_objects_on_one_rank(tmp_path):
    methods = ("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan")
    lines = [f"for turn in range(3): MPI.COMM_WORLD.{name}([turn])" for name in methods]
    text = "\n".join(["from mpi4py import MPI", *lines])
    _, status = run(1, "--profile", "--profile-files", tmp_path / "found", "-c", text)
    assert status == 0
    found = json.loads((tmp_path / "found.json").read_text())["lines"]
    expected = {(name, f"<string>:{at}", 3) for at, name in enumerate(methods, 2)}
    assert {(line["collective"], line["site"], line["calls"]) for line in found} == expected


def test_an_exception_of_one_rank_ends_all_with_its_own_lines():
    text = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank: raise KeyError('mine')\nMPI.COMM_WORLD.Barrier()"
    output, status = run(2, "-c", text)
    assert status != 0
    assert "KeyError: 'mine'" in output and "cli/run.py" not in output


@pytest.mark.parametrize(
    "words, problem", [(["missing.py"], "missing.py: No such file"), (["-m"], "a program"), ([], "a program")]
)
def test_wrong_command_lines(words, problem):
    output, status = run(2, *words)
    assert status == 2
    assert output.count("error: ") == 1 and problem in output


def test_a_profile_changes_no_result_and_calls_no_function_of_the_program_more_often(tmp_path):
    """Types that the MPI cannot add, other buffers than arrays, results in place, operations of users, threads."""
    plain, status = run(2, "-c", OTHERS)
    assert status == 0
    profiled, status = run(2, "--profile", "--profile-files", tmp_path / "found", "-c", OTHERS)
    assert status == 0
    right = [[line for line in output.splitlines() if line.startswith("right")] for output in (plain, profiled)]
    assert len(right[0]) == 2 and right[0] == right[1]
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert any(line["of_native"] for line in lines) and not all(line["of_native"] for line in lines)
