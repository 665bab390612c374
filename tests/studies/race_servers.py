"""Train with one slow worker under several consistency rules of the parameter server; compare time and clocks.

mpiexec -n 5 python tests/studies/race_servers.py
mpiexec -n 5 python tests/studies/race_servers.py --plot out/clocks.png --rules bsp,ssp:0,ssp:3,async

The first rank is the server. Every part of a step takes 0.03 seconds longer, on the last rank five times as long. Exit
status 1 if the first rule is bsp, and an asynchronous one takes more than 0.7 times its seconds.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import at_least, say
from parallel.asynchronous.server.consistency import rule_of
from parallel.asynchronous.server.server_engine import ParameterServer
from parallel.data import datasets
from parallel.data.sampler import OnDemandSampler, Sampler
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import SGD

BATCH = 16  # samples of a part of a step
DELAY, FACTOR = 0.03, 5.0  # additional seconds of a part, and the factor on the slow worker
GOAL = 0.7  # most seconds of an asynchronous rule, relative to bsp


class RuleResult(NamedTuple):
    """Result of a training under one rule, whole only on rank 0; `ticks` are (seconds, worker, steps made)."""

    rule: str
    seconds: float
    ticks: list[tuple[float, int, int]]
    parts: list[int]
    gaps: Counter[int]


def train(comm: Communicator, rule: str, steps: int, delay: float, factor: float) -> RuleResult:
    """Train under a consistency rule; each part takes `delay` s longer, and the last rank is `factor` times slower."""
    task = datasets.load("digits")
    workers = comm.Get_size() - 1
    sampler = Sampler(len(task.train), BATCH * workers, BATCH)
    model = build("mlp:tiny", task.inputs, task.outputs)
    optimizer = SGD(rate=0.1, momentum=0.9)
    settings = Settings(layout="ps", consistency=rule, delay=delay, slow=f"{comm.Get_size() - 1}:{factor}")
    with ParameterServer(model, SoftmaxCrossEntropy(), comm, optimizer, settings) as engine:
        comm.Barrier()
        began, ends, shares = MPI.Wtime(), [], Counter[int]()
        for number, step in zip(range(steps), sampler.ahead()):
            engine.step(OnDemandSampler(step, task.train))
            ends.append(MPI.Wtime() - began)
            if engine.server is not None:
                shares.update(outcome.worker for outcome in engine.server.work.outcome(number))
        engine.quiesce()
        seconds = comm.allreduce(MPI.Wtime() - began, MPI.MAX)
        ticks = [
            (end, rank - 1, at) for rank, some in enumerate(comm.allgather(ends)) for at, end in enumerate(some, 1)
        ]
        gaps = comm.reduce(Counter() if engine.worker is None else engine.worker.gaps) or Counter()
    return RuleResult(rule, seconds, ticks[steps:], [shares[worker] for worker in range(workers)], gaps)


def main() -> int:
    """Train under each rule, print times; exit status 1 if the first is bsp and an asynchronous one misses `GOAL`."""
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--rules", default="bsp,ssp:3,async", metavar="RULES", help="default bsp,ssp:3,async")
    add("--steps", type=at_least(1, int), default=30, metavar="N", help="default 30")
    add("--plot", type=Path, metavar="FILE", help="clocks over time as a picture")
    args = parser.parse_args()
    comm = Communicator(MPI.COMM_WORLD)
    if comm.Get_size() < 3:
        parser.error(f"expected 3 ranks or more, a server and two workers, found {comm.Get_size()}")
    runs = []
    for rule in ("bsp", "async"):  # compiles the kernels
        train(comm, rule, 2, 0.0, 1.0)
    say(f"{'rule':8}{'seconds':>9}{'to bsp':>8}{'largest gap':>13}  parts of each worker")
    for rule in args.rules.split(","):
        try:
            run = train(comm, rule, args.steps, DELAY, FACTOR)
        except ValueError as error:
            parser.error(str(error))
        runs.append(run)
        ratio = run.seconds / runs[0].seconds
        say(f"{rule:8}{run.seconds:9.2f}{ratio:8.2f}{max(run.gaps, default=0):13}  {' '.join(map(str, run.parts))}")
    if args.plot and comm.Get_rank() == 0:
        from study_plots import plot_clocks

        workers = comm.Get_size() - 1
        title = f"{args.steps} steps on {workers} workers, one {FACTOR:g} times slower"
        plot_clocks(args.plot, {run.rule: run.ticks for run in runs}, workers - 1, title)
    patient = [run for run in runs[1:] if not rule_of(run.rule).synchronous]
    return int(runs[0].rule == "bsp" and any(run.seconds > GOAL * runs[0].seconds for run in patient))


if __name__ == "__main__":
    launcher.run(main)
