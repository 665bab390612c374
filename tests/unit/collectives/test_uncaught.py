"""An exception that nobody catches ends the job: traceback first, status 1, at once, wherever the other ranks are.

Each test runs a program under mpiexec whose last rank raises. Without an abort the others wait for it for ever.
"""

import re
import subprocess
import time
from pathlib import Path

import pytest
from support.launches import ended, needs_mpiexec, start_ranks
from support.tiers import default

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [needs_mpiexec, pytest.mark.timeout(300)]

LIMIT = 280
"""Seconds for a program with its start, on a machine that has other things to do."""

AT_ONCE = 15
"""Seconds from the exception to the end of the job, or five times those from its start to the exception if more."""

START = """
import sys, threading, time
import numpy as np
from mpi4py import MPI
from collectives import Communicator

def fail(error=ValueError("no such sample")):
    if rank == size - 1:
        sys.stdout.write("unflushed")
        sys.stderr.write(f"failed at {time.time()}\\n")
        sys.stderr.flush()
        raise error

def work(comm):
    for _ in range(3):
        comm.Allreduce(small, total)
        comm.Allreduce(large, large.copy())

comm = Communicator(MPI.COMM_WORLD, shared=SHARED)
rank, size = comm.Get_rank(), comm.Get_size()
small, large, total = np.ones(4), np.ones(100_000), np.zeros(4)
work(comm)
"""

MODEL = """
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import mlp
from parallel.optim.optimizers import SGD
from parallel.data.sampler import Batch
batch = [Batch(rank, np.ones((4, 8), np.float32), np.zeros(4, int), np.arange(4))]
"""

BLOCKS = {
    "the others are in a collective": "fail()\nwork(comm)\n",
    "the others have ended": "fail()\n",
    "in a with block": "with comm.Dup() as ours:\n    work(ours)\n    fail()\n    work(ours)\n",
    "requests are under way": """
large_total = large.copy()
request, other = comm.Allreduce_init(large, large_total), comm.Ibarrier()
request.Start()
fail()
request.Wait()
other.Wait()
""",
    "symmetric arrays and native collectives": """
kept = comm.full(300_000, 1.0)
comm.Allreduce(MPI.IN_PLACE, kept)
fail()
comm.Allreduce(kept, comm.like(kept), algorithm="native")
""",
    "a thread waits for the others": """
ours = comm.Dup()
started = threading.Event()
def wait():
    started.set()
    ours.Barrier()
threading.Thread(target=wait).start() if rank == size - 1 else None
if rank == size - 1:
    started.wait()
    fail()
comm.Barrier()
""",
    "in an engine's with block": MODEL
    + """
with DataParallelEngine(mlp([8, 8, 2]), SoftmaxCrossEntropy(), comm, SGD(rate=0.1), Settings(layout="zero3")) as engine:
    engine.step(batch)
    fail()
    engine.step(batch)
""",
    "in a pipeline's with block": MODEL
    + """
from parallel.pipeline.pipeline_engine import Pipeline
with Pipeline(mlp([8, 8, 8, 2]), SoftmaxCrossEntropy(), comm, SGD(rate=0.1), Settings(mesh="pp=3")) as engine:
    fail()
    engine.step(batch)
""",
    "in a parameter server's with block": MODEL
    + """
from parallel.asynchronous.server.server_engine import ParameterServer
with ParameterServer(mlp([8, 8, 2]), SoftmaxCrossEntropy(), comm, SGD(rate=0.1)) as engine:
    engine.quiesce()
    fail()
    engine.quiesce()
    engine.step(batch)
""",
    "in a training": """
from parallel.trainer.trainer import Training
from parallel.trainer.recipes import complete
said = complete({"data": "teacher_classes", "model": "mlp:tiny", "batch": 48, "steps": 60, "layout": "zero2"})
with Training(said, comm) as training:
    for record in training.run():
        if training.done == 3:
            fail()
""",
}


def run(source, *, shared=True, before=(), **more):
    """Run a program on three ranks: its exit status, output, and whether it ended at once after it had failed."""
    program, began = START.replace("SHARED", str(shared)) + source, time.time()
    process = start_ranks(3, (*before, "-c", program), **more)
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        pytest.fail(f"the job has not ended after {LIMIT} s:\n{ended(process)}")
    end, output = time.time(), ended(process)
    failed = max((float(text) for text in re.findall(r"failed at ([\d.]+)", output)), default=end)
    return process.returncode, output, end - failed < max(AT_ONCE, 5 * (failed - began))


def check(done, error="ValueError: no such sample", status=1):
    """Traceback, what was printed before it, status and time are as they should be."""
    code, output, at_once = done
    assert error in output and "unflushed" in output, output
    assert code == status, output
    assert at_once, output


@pytest.mark.parametrize(
    "block", default(BLOCKS, "the others are in a collective", "requests are under way", "in a training")
)
def test_the_job_ends(block):
    check(run(BLOCKS[block]))


def test_the_job_ends_without_shared_memory():
    check(run(BLOCKS["the others are in a collective"], shared=False))


@pytest.mark.parametrize("block", ["the others have ended", "in a with block"])
def test_the_job_ends_under_mpi4py_s_own_runner(block):
    check(run(BLOCKS[block], before=("-m", "mpi4py")))


def test_an_exit_status_ends_the_job_under_mpi4py_s_own_runner():
    """Without the runner, ``sys.exit`` ends a rank in order, whatever the status: all ranks may do so together."""
    code, output, at_once = run("fail(SystemExit(3))\nwork(comm)\n", before=("-m", "mpi4py"))
    assert code == 3 and at_once, output


def test_all_ranks_may_exit_with_a_status():
    code, output, _ = run("work(comm)\nsys.exit(3)\n")
    assert code == 3 and "Abort" not in output, output


def test_ctrl_c_within_python_ends_the_job():
    check(run("fail(KeyboardInterrupt())\nwork(comm)\n"), "KeyboardInterrupt", 130)


def test_a_hook_of_the_user_is_kept():
    """Also one that came before the library and one that came after it and calls no other."""
    hook = "sys.excepthook = lambda *_: sys.stderr.write('ValueError: no such sample\\n')\n"
    check(run(hook + "fail()\nwork(comm)\n"))


@pytest.mark.parametrize("before", [(), ("-m", "mpi4py")], ids=["python", "python -m mpi4py"])
def test_after_an_exception_that_is_caught_all_goes_on(before):
    """On one rank, outside of collectives; and on all of them, in a ``with`` block."""
    code, output, _ = run(
        """
def test():
    try:
        fail()
    except ValueError as error:  # recorded as pytest does it
        sys.last_exc = sys.last_value = error
        sys.last_traceback = error.__traceback__
test()
work(comm)
try:
    with comm.Dup() as ours:
        work(ours)
        raise ValueError
except ValueError:
    ours.Free()
thread = threading.Thread(target=work, args=[comm])
thread.start()
thread.join()
work(comm)
""",
        before=before,
    )
    assert code == 0, output
    assert re.sub(r"failed at [\d.]+", "", output).split() == ["unflushed"], output
