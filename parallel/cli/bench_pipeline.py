"""Compare measured with simulated idle time of every pipeline schedule. Stages sleep for known times.

chorus bench pipeline -n 4
chorus bench pipeline -n 2 --schedules 1f1b,zb-h1 --microbatches 16 --milliseconds 5

Messages are real. Sleeping replaces computation, so that there may be more ranks than cores. The idle share counts all
ranks' time from the common start to the last end. The median of several runs counts. Stages that do nothing at all
show the runner's own time per action.

Exit status 1 if an idle share is more than 10 % off, or an action takes 30 microseconds or more.
"""

import time
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.cli import launcher
from collectives.cli.arguments import names_of
from collectives.cli.launcher import at_least, say
from parallel.nn.operator import ArraySpec
from parallel.pipeline.runner import ScheduleRunner, bind_actions
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.simulator import ActionTimes, simulate
from parallel.runtime.profiler import Profiler

TOLERANCE = 0.10  # largest relative error of the idle share
BYTES, TIMES = 4096, 3  # length of a message, and runs of each schedule
MOST_SECONDS = 30e-6  # most seconds of the runner per action


class SleepingStage:
    """Pipeline stage that sleeps instead of computing: `seconds` for F, B or W each, twice for a whole backward."""

    def __init__(self, seconds: float):
        self._seconds, self._array = seconds, np.zeros(BYTES, np.uint8)

    def output_spec(self, part: int, microbatch: int) -> ArraySpec:
        return ArraySpec((BYTES,), np.dtype(np.uint8))

    def forward(self, chunk: int, microbatch: int, x: Any) -> Any:
        return self._sleep(1)

    def backward(self, chunk: int, microbatch: int, dy: Any, whole: bool) -> Any:
        return self._sleep(2 if whole else 1)

    def weights(self, chunk: int, microbatch: int) -> None:
        self._sleep(1)

    def update(self, chunk: int, number: int) -> None:
        """No-op."""

    def _sleep(self, times: int) -> np.ndarray:
        if self._seconds:
            time.sleep(times * self._seconds)
        return self._array


def run(comm: MPI.Intracomm, plan: PipelinePlan, seconds: float) -> tuple[float, float, float]:
    """Run a plan with sleeping stages. Returns this rank's seconds: in all, computing, waiting. Collective."""
    recorder = Profiler()
    runner, actions = ScheduleRunner(comm, recorder), bind_actions(plan, comm.Get_rank())
    stage = SleepingStage(seconds)
    comm.Barrier()
    began = time.perf_counter()
    runner.run(actions, stage)
    whole = time.perf_counter() - began
    return whole, recorder.seconds["compute"], recorder.seconds["communication"]


def idle(comm: MPI.Intracomm, plan: PipelinePlan, seconds: float) -> float:
    shares = []
    for _ in range(TIMES):
        whole, computing, _ = run(comm, plan, seconds)
        shares.append(1 - comm.allreduce(computing) / (comm.allreduce(whole, MPI.MAX) * comm.Get_size()))
    return float(median(shares))


def overhead(comm: MPI.Intracomm, plan: PipelinePlan) -> float:
    """Runner overhead in seconds per action, without computation and waiting, on the slowest rank. Collective."""
    runs = [run(comm, plan, 0.0) for _ in range(TIMES)]
    actions = max(1, len(plan.actions[comm.Get_rank()]))
    return float(comm.allreduce(median((whole - waiting) / actions for whole, _, waiting in runs), MPI.MAX))


def main(argv: list[str] | None = None) -> int:
    """Print measured against simulated idle time by schedule. Exit status 1 if a value is out of bounds."""
    parser = launcher.LauncherParser(__doc__)
    add, named = parser.add_argument, names_of("schedule", SCHEDULES)
    add("--schedules", type=named, default=list(SCHEDULES), metavar="NAMES", help="default all")
    add("--microbatches", type=at_least(1, int, 1 << 16), default=8, metavar="M", help="default 8")
    add("--milliseconds", type=at_least(0.0, float, 1e6), default=100.0, metavar="T", help="of F, B, W (default 100)")
    args, comm = parser.parse_args(argv), MPI.COMM_WORLD.Dup()
    ranks, good = comm.Get_size(), True
    say(f"{ranks} stages, {args.microbatches} micro-batches, F, B and W of {args.milliseconds:g} ms each")
    say(f"{'schedule':14} {'simulated':>10} {'measured':>10} {'apart':>8} {'messages':>9} {'us per action':>14}")
    for name in args.schedules:
        plan = lower(build(name, ranks, args.microbatches))
        expected = float(simulate(plan, ActionTimes()).bubble)
        found, taken = idle(comm, plan, args.milliseconds / 1e3), overhead(comm, plan)
        apart = abs(found - expected) / expected if expected else found
        good = good and apart <= TOLERANCE and taken < MOST_SECONDS
        messages = sum(plan.messages().values())
        say(f"{name:14} {expected:10.4f} {found:10.4f} {apart:7.1%} {messages:9} {taken * 1e6:14.1f}")
    comm.Free()
    say("all within bounds" if good else f"not all within {TOLERANCE:.0%} and {MOST_SECONDS * 1e6:.0f} us")
    return 0 if good else 1
