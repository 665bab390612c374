"""Kill a server or a worker of a training at a random moment, many times, and check how the trainings end.

python scripts/kill_ranks.py --kill servers --times 20
python scripts/kill_ranks.py --kill workers --times 20 --consistency ssp:3

Needs Open MPI built with ULFM (its wheel is), which keeps the other ranks alive. Every training must end with as many
updates as an undisturbed one, with about the same accuracy, and at most ten seconds later than the slowest undisturbed
one. A training that ended before its rank could be killed is repeated.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from collectives.cli.launcher import ProgramParser, at_least
from parallel.benchmark.metrics import read
from parallel.cli.watchdog import children

EXTRA_SECONDS = 10.0
"""Most seconds that a training with a death may take longer than the slowest without one."""

LOWER = 0.03
"""Most that the accuracy may be below the worst undisturbed one."""

UNDISTURBED = 3
"""Number of trainings to compare with."""

SHORTER = 0.9
"""Factor on the range of moments, after one was too late."""

HANGING_SECONDS = 60.0
"""Seconds after which a training counts as hanging."""


class KilledRun(NamedTuple):
    """Result of a training.

    Attributes
    ----------
    code : int or None
        Exit status; None if it hung.
    reached : int or None
        Steps in the metrics when a rank was killed; None if none was killed.
    seconds : float
        Time from its first line on.
    """

    code: int | None
    reached: int | None
    seconds: float
    updates: int | None
    accuracy: float | None
    output: str


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add = result.add_argument
    add("--kill", choices=["servers", "workers"], default="servers", help="which ranks (default servers)")
    add("--times", type=at_least(1, int), default=20, metavar="N", help="trainings (default 20)")
    add("--servers", type=at_least(1, int), default=2, metavar="S", help="default 2")
    add("--workers", type=at_least(2, int), default=3, metavar="W", help="default 3")
    add("--replicas", type=at_least(1, int), default=2, metavar="K", help="default 2")
    add("--consistency", default="bsp", metavar="RULE", help="as of chorus train (default bsp)")
    add("--epochs", type=at_least(0, float), default=15, metavar="N", help="of a training (default 15)")
    add("--seed", type=int, default=0, metavar="N", help="of victims and moments (default 0)")
    add("--mpiexec", default=str(Path(sys.executable).with_name("mpiexec")), help="of an Open MPI")
    return result


def command(args: argparse.Namespace, metrics: Path) -> list[str]:
    """Command line of a training."""
    ranks = args.servers + args.workers
    start = [args.mpiexec, "--with-ft", "ulfm", "--map-by", ":oversubscribe", "-n", str(ranks)]
    start += [sys.executable, "-m", "parallel.cli.main", "train"]
    options = {"parallel": "ps", "servers": args.servers, "replicas": args.replicas, "consistency": args.consistency}
    options |= {"data": "digits", "model": "mlp", "epochs": args.epochs, "threads": 1, "json": metrics}
    return start + [word for name, value in options.items() for word in (f"--{name}", str(value))]


def ranks_of(launcher: int) -> dict[int, int]:
    """Processes of a launcher, by rank."""
    found: dict[int, int] = {}
    for process in descendants(launcher):
        try:
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for word in words:
            if word.startswith(b"OMPI_COMM_WORLD_RANK="):
                found.setdefault(int(word.partition(b"=")[2]), process)  # not processes that a rank has started
    return found


def descendants(process: int) -> Iterator[int]:
    """All descendants of a process."""
    for child in children(process):
        yield child
        yield from descendants(child)


def run(args: argparse.Namespace, victim: int | None = None, moment: float = 0.0) -> KilledRun:
    """Run a training, and kill a rank `moment` seconds after its start."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, output = Path(folder) / "metrics.json", Path(folder) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(command(args, metrics), stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + HANGING_SECONDS
        while b"ranks of" not in output.read_bytes() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        began, reached = time.monotonic(), None
        if victim is not None:
            time.sleep(moment)
            target, rows = ranks_of(process.pid).get(victim), read(metrics)
            if target is not None and not any("final" in row for row in rows):
                os.kill(target, signal.SIGKILL)
                reached = len(rows)
        code: int | None = None
        try:
            code = process.wait(HANGING_SECONDS)
        except subprocess.TimeoutExpired:
            for rank in ranks_of(process.pid).values():
                os.kill(rank, signal.SIGKILL)
            process.kill()
            process.wait()
        seconds = time.monotonic() - began
        last = (read(metrics) or [{}])[-1]
        text = output.read_text(errors="replace")
    return KilledRun(code, reached, seconds, last.get("updates"), last.get("test_accuracy"), text)


def verdict(killed: KilledRun, usual: list[KilledRun]) -> str:
    """Differences to undisturbed trainings that are too large; empty if there are none."""
    slowest, worst = max(other.seconds for other in usual), min(other.accuracy or 0 for other in usual)
    wrong = {
        f"exit status {killed.code}": killed.code != 0,
        f"{killed.updates} updates": killed.updates != usual[0].updates,
        "accuracy": (killed.accuracy or 0) < worst - LOWER,
        f"{EXTRA_SECONDS:.0f} s longer": killed.seconds > slowest + EXTRA_SECONDS,
    }
    return ", ".join(text for text, failed in wrong.items() if failed)


def row(name: str, ran: KilledRun, note: str) -> str:
    """Row of the table."""
    accuracy = "-" if ran.accuracy is None else f"{ran.accuracy:.2%}"
    return f"{name:<36}{ran.seconds:>9.1f}{ran.updates if ran.updates is not None else '-':>9}{accuracy:>10}  {note}"


def main() -> int:
    """1 if a training failed."""
    args = parser().parse_args()
    if shutil.which(args.mpiexec) is None:
        sys.exit(f"--mpiexec: there is no {args.mpiexec}")
    print(" ".join(command(args, Path("FILE"))))
    print(f"{'killed':<36}{'seconds':>9}{'updates':>9}{'accuracy':>10}")
    usual = []
    for _ in range(UNDISTURBED):
        usual.append(run(args))
        print(row("nobody", usual[-1], ""), flush=True)
        if usual[-1].code != 0 or usual[-1].updates is None:
            print(usual[-1].output)
            return 1
    rng, failed = random.Random(args.seed), 0
    first, count = (0, args.servers) if args.kill == "servers" else (args.servers, args.workers)
    kills, span = 0, min(other.seconds for other in usual)
    while kills < args.times:
        victim, moment = first + rng.randrange(count), rng.random() * span
        killed = run(args, victim, moment)
        if killed.reached is None:
            span *= SHORTER  # the machine has become faster
            continue
        kills += 1
        wrong = verdict(killed, usual)
        failed += bool(wrong)
        name = f"rank {victim} after {moment:.2f} s, {killed.reached} steps"
        print(row(name, killed, wrong or "as it should be"), flush=True)
        if wrong:
            print(killed.output)
    print(f"{args.times - failed} of {args.times} as they should be")
    return int(failed > 0)
