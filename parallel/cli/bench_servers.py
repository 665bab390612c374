"""Compare push and pull of a parameter server with plain MPI Send and Recv of the same bytes.

chorus bench servers -n 2
chorus bench servers -n 2 --mbytes 64

The first rank is the server, the second the worker. A push ends when the server has acknowledged all of it, a pull
when all weights have arrived. The plain messages are as many and as long. The plain push ends with an empty reply. The
two sides take turns, and medians are printed. Exit status 1 if a ratio is below 0.8.
"""

from collections.abc import Callable
from statistics import median

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import at_least, say
from collectives.units import format_bytes
from parallel.asynchronous.server.key_assignment import ServerKey
from parallel.asynchronous.server.server_engine import ParameterServer
from parallel.asynchronous.server.work_assignment import WorkPart
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.linear import Linear
from parallel.nn.loss import MSE
from parallel.optim.optimizers import SGD

WIDTH, BUCKET, TURNS = 1024, 4 << 20, 15
"""Width of the model's layers, bytes of a bucket, and turns after two to warm up."""

GOAL = 0.8  # least ratio to the plain speed


def timed(comm: MPI.Intracomm, work: Callable[[], object]) -> float:
    """Run `work` after a barrier of all ranks. Returns its seconds on this rank."""
    comm.Barrier()
    began = MPI.Wtime()
    work()
    return MPI.Wtime() - began


def plain(comm: MPI.Intracomm, keys: tuple[ServerKey, ...], vector: np.ndarray, source: int, reply: bool) -> None:
    """Send the vector's keys one by one from `source` to the other rank. It sends an empty answer if `reply`."""
    other, nothing = 1 - comm.Get_rank(), np.empty(0)
    for key in keys:
        if comm.Get_rank() == source:
            comm.Send(vector[key.span.start : key.span.stop], other)
        else:
            comm.Recv(vector[key.span.start : key.span.stop], other)
    if reply:
        comm.Recv(nothing, other) if comm.Get_rank() == source else comm.Send(nothing, other)


def timed_round(comm: MPI.Intracomm, engine: ParameterServer, step: int, vector: np.ndarray) -> dict[str, float]:
    """Time a push and a pull, through the parameter server and by plain MPI. Returns seconds on this rank by name."""
    server, worker = engine.server, engine.worker

    def push() -> None:
        assert worker is not None
        for key in engine.keys:
            worker.push(key.number, WorkPart(step, 0), 1, 1, 1.0, vector[key.span.start : key.span.stop], None)
        worker.acknowledged()

    seconds = {"plain push": timed(comm, lambda: plain(comm, engine.keys, vector, 1, True))}
    seconds["push"] = timed(comm, push if server is None else lambda: server.until_made(step + 1))
    if worker is not None:
        worker.tick(step + 1, 1, False)
    seconds["plain pull"] = timed(comm, lambda: plain(comm, engine.keys, vector, 0, False))
    if server is not None:
        seconds["pull"] = timed(comm, server.until_quiescent)
    elif worker is not None:
        seconds["pull"] = timed(comm, worker.copy)
        worker.quiesce()
    return seconds


def main() -> int:
    """Print the speed of push and pull relative to plain MPI. Exit status 1 if a ratio is below `GOAL`."""
    parser = launcher.LauncherParser(__doc__)
    parser.add_argument("--mbytes", type=at_least(1, int), default=32, metavar="N", help="MiB of the model, default 32")
    args = parser.parse_args()
    comm = Communicator(MPI.COMM_WORLD)
    if comm.Get_size() != 2:
        parser.error(f"expected 2 ranks, found {comm.Get_size()}")
    layers = max(1, args.mbytes * 2**20 // (4 * WIDTH * WIDTH))
    model = Sequential([Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    plainly = MPI.Intracomm(comm)
    settings = Settings(layout="ps", bucket_bytes=BUCKET, first_bytes=BUCKET)
    with ParameterServer(model, MSE(), comm, SGD(rate=0.0), settings) as engine:
        vector = np.zeros(engine.flat.length, np.float32)
        rounds = [timed_round(plainly, engine, step, vector) for step in range(TURNS + 2)][2:]
        seconds = {name: median(one[name] for one in rounds) for name in rounds[0]}
    nbytes = engine.flat.length * 4
    medians = comm.bcast(seconds, root=1)  # the worker's clock
    ratios = {what: medians[f"plain {what}"] / medians[what] for what in ("push", "pull")}
    say(f"{format_bytes(nbytes)} in {len(engine.keys)} keys, {MPI.get_vendor()[0]}")
    for what, ratio in ratios.items():
        speeds = nbytes / 1e9 / medians[what], nbytes / 1e9 / medians[f"plain {what}"]
        say(f"{what}: {speeds[0]:.2f} GB/s, plain {speeds[1]:.2f} GB/s, ratio {ratio:.2f}")
    return int(min(ratios.values()) < GOAL)
