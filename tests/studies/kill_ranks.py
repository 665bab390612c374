"""Fault-tolerance test: kill a server or worker of a training at random moments, and check that trainings end well.

python tests/studies/kill_ranks.py --kill servers --times 20
python tests/studies/kill_ranks.py --kill workers --times 20 --consistency ssp:3

Needs Open MPI built with ULFM (its wheel is), which keeps the other ranks alive; MPIEXEC names its mpiexec. Every
training must end with as many updates as an undisturbed one, with about the same accuracy, and at most ten seconds
later than the slowest undisturbed one. A training that ended before its rank could be killed is repeated.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpi_launches import find_mpiexec

from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.reports.metrics import read
from parallel.cli.watchdog import children

WORKERS = 3
EXTRA_SECONDS = 10.0  # allowed excess of a run with a killed rank over the slowest undisturbed run
LOWER = 0.03  # allowed drop of accuracy below the worst undisturbed run
UNDISTURBED = 3  # number of runs without a killed rank, to compare with
HANGING_SECONDS = 60.0  # seconds after which a training counts as hanging


class KilledRun(NamedTuple):
    """Result of a training run: exit status (None if it hung), seconds after the first step, last line of metrics.

    `reached` is the number of steps in the metrics when a rank was killed; None if none was killed.
    """

    code: int | None
    seconds: float
    final: dict[str, Any]
    output: str
    reached: int | None

    @property
    def accuracy(self) -> float:
        return float(self.final.get("test_accuracy", 0))

    def row(self, name: str, note: str = "") -> str:
        return f"{name:<36}{self.seconds:>9.1f}{self.final.get('updates', '-'):>9}{self.accuracy:>10.2%}  {note}"


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add = result.add_argument
    add("--kill", choices=["servers", "workers"], default="servers", help="which ranks (default servers)")
    add("--times", type=at_least(1, int), default=20, metavar="N", help="trainings (default 20)")
    add("--servers", type=at_least(1, int), default=2, metavar="S", help=f"beside {WORKERS} workers (default 2)")
    add("--replicas", type=at_least(1, int), default=2, metavar="K", help="default 2")
    add("--consistency", default="bsp", metavar="RULE", help="as of chorus train (default bsp)")
    add("--seed", type=int, default=0, metavar="N", help="of victims and moments (default 0)")
    return result


def command(args: argparse.Namespace, mpiexec: str, metrics: Path) -> list[str]:
    start = [mpiexec, "--with-ft", "ulfm", "--map-by", ":oversubscribe", "-n", str(args.servers + WORKERS)]
    start += [sys.executable, "-m", "parallel.cli.main", "train"]
    options = {"parallel": "ps", "servers": args.servers, "replicas": args.replicas, "consistency": args.consistency}
    options |= {"data": "digits", "model": "mlp", "threads": 1, "json": metrics}
    return start + [word for name, value in options.items() for word in (f"--{name}", str(value))]


RANK = re.compile(rb"(?:^|\0)(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)")


def ranks_of(launcher: int) -> dict[int, int]:
    """Process of every rank that a launcher has started."""
    found: dict[int, int] = {}
    for process in descendants(launcher):
        with suppress(OSError):
            if rank := RANK.search(Path(f"/proc/{process}/environ").read_bytes()):
                found.setdefault(int(rank[1]), process)  # not processes that a rank has started
    return found


def descendants(process: int) -> Iterator[int]:
    for child in children(process):
        yield child
        yield from descendants(child)


def run(args: argparse.Namespace, mpiexec: str, victim: int | None = None, moment: float = 0.0) -> KilledRun:
    """Train in a subprocess; kill `victim`, if given and alive, `moment` s after step 1; returns the result."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, output = Path(folder) / "metrics.json", Path(folder) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(command(args, mpiexec, metrics), stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + HANGING_SECONDS
        while not read(metrics) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        began, reached = time.monotonic(), None
        if victim is not None:
            time.sleep(moment)
            target, rows = ranks_of(process.pid).get(victim), read(metrics)
            if target is not None and not any("final" in row for row in rows):
                os.kill(target, signal.SIGKILL)
                reached = len(rows)
        with suppress(subprocess.TimeoutExpired):
            process.wait(HANGING_SECONDS)
        code = process.poll()
        if code is None:
            for rank in (*ranks_of(process.pid).values(), process.pid):
                os.kill(rank, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - began
        return KilledRun(code, seconds, (read(metrics) or [{}])[-1], output.read_text(errors="replace"), reached)


def verdict(killed: KilledRun, usual: list[KilledRun]) -> str:
    """Text of how a run with a killed rank is worse than the `usual` undisturbed ones; empty if within limits."""
    updates = killed.final.get("updates")
    wrong = {
        f"exit status {killed.code}": killed.code != 0,
        f"{updates} updates": updates != usual[0].final["updates"],
        "accuracy": killed.accuracy < min(other.accuracy for other in usual) - LOWER,
        f"{EXTRA_SECONDS:.0f} s longer": killed.seconds > max(other.seconds for other in usual) + EXTRA_SECONDS,
    }
    return ", ".join(text for text, failed in wrong.items() if failed)


def main() -> int:
    """Kill ranks in many trainings and print a table; exit status 1 if one of them did not end as required."""
    made = parser()
    args, mpiexec = made.parse_args(), find_mpiexec()
    if mpiexec is None:
        made.error("there is no mpiexec: set MPIEXEC to that of an Open MPI")
    print(" ".join(command(args, mpiexec, Path("FILE"))))
    print(f"{'killed':<36}{'seconds':>9}{'updates':>9}{'accuracy':>10}")
    usual = []
    for _ in range(UNDISTURBED):
        usual.append(run(args, mpiexec))
        print(usual[-1].row("nobody"), flush=True)
        if usual[-1].code != 0 or "updates" not in usual[-1].final:
            print(usual[-1].output)
            return 1
    rng, failed = random.Random(args.seed), 0
    first, count = (0, args.servers) if args.kill == "servers" else (args.servers, WORKERS)
    kills, span = 0, min(other.seconds for other in usual)
    while kills < args.times:
        victim, moment = first + rng.randrange(count), rng.random() * span
        killed = run(args, mpiexec, victim, moment)
        if killed.reached is None:
            span *= 0.9  # the machine has become faster
            continue
        kills += 1
        wrong = verdict(killed, usual)
        failed += bool(wrong)
        name = f"rank {victim} after {moment:.2f} s, {killed.reached} steps"
        print(killed.row(name, wrong or "as it should be"), flush=True)
        if wrong:
            print(killed.output)
    print(f"{args.times - failed} of {args.times} as they should be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
