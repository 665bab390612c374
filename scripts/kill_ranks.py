"""Kill a server or a worker of a training, at a random moment, many times over, and see how the trainings end.

python scripts/kill_ranks.py --kill servers --times 20
python scripts/kill_ranks.py --kill workers --times 20 --consistency ssp:3

Needs Open MPI built with ULFM (its wheel is), since the others must live on. Every training must end with as many
updates as one that nobody disturbs, read as many digits right, and take no more than ten seconds longer than the
slowest of those. One that was over before its rank could be killed does not count, and is repeated.
"""

from __future__ import annotations

import argparse
import json
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
from typing import Any, NamedTuple

from benchlib.launch import at_least

TRAIN = Path(__file__).with_name("train.py")
LONGER = 10.0
"""Seconds that a training with a death may take longer than the slowest without one."""

LOWER = 0.03
"""How far its accuracy may lie below the worst of those."""

UNDISTURBED = 3
"""Trainings to compare with."""

SHORTER = 0.9
"""Of the moments to choose from, if one was too late."""

VOID = 60.0
"""Seconds after which a training is taken to hang."""


class Ran(NamedTuple):
    """What became of a training.

    Attributes
    ----------
    code : int or None
        Its exit status; None if it hung.
    reached : int or None
        Steps that it had told of when a rank was killed; None if none was.
    seconds : float
        Of training, from its first line on.
    updates : int or None
    accuracy : float or None
    said : str
        All that it printed.
    """

    code: int | None
    reached: int | None
    seconds: float
    updates: int | None
    accuracy: float | None
    said: str


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kill", choices=["servers", "workers"], default="servers", help="which ranks (default servers)")
    made.add_argument("--times", type=at_least(1, int), default=20, metavar="N", help="trainings (default 20)")
    made.add_argument("--servers", type=at_least(1, int), default=2, metavar="S", help="default 2")
    made.add_argument("--workers", type=at_least(2, int), default=3, metavar="W", help="default 3")
    made.add_argument("--replicas", type=at_least(1, int), default=2, metavar="K", help="default 2")
    made.add_argument("--consistency", default="bsp", metavar="RULE", help="as of train.py (default bsp)")
    made.add_argument("--epochs", type=at_least(0, float), default=15, metavar="N", help="of a training (default 15)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of victims and moments (default 0)")
    made.add_argument("--mpiexec", default=str(Path(sys.executable).with_name("mpiexec")), help="of an Open MPI")
    return made


def command(args: argparse.Namespace, metrics: Path) -> list[str]:
    """How a training is started."""
    ranks = args.servers + args.workers
    start = [args.mpiexec, "--with-ft", "ulfm", "-n", str(ranks), sys.executable, str(TRAIN)]
    options = {"parallel": "ps", "servers": args.servers, "replicas": args.replicas, "consistency": args.consistency}
    options |= {"data": "digits", "model": "mlp", "epochs": args.epochs, "threads": 1, "json": metrics}
    return start + [word for name, value in options.items() for word in (f"--{name}", str(value))]


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes that a launcher has started, by their rank."""
    found: dict[int, int] = {}
    for process in _below(launcher):
        try:
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for word in words:
            if word.startswith(b"OMPI_COMM_WORLD_RANK="):
                found.setdefault(int(word.partition(b"=")[2]), process)  # not what a rank has started itself
    return found


def _below(process: int) -> Iterator[int]:
    """All processes that descend from one."""
    children = Path(f"/proc/{process}/task/{process}/children")
    for child in map(int, children.read_text().split() if children.exists() else ()):
        yield child
        yield from _below(child)


def run(args: argparse.Namespace, victim: int | None, moment: float) -> Ran:
    """A training in which a rank is killed so many seconds after it has begun."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, output = Path(folder) / "metrics.json", Path(folder) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(command(args, metrics), stdout=file, stderr=subprocess.STDOUT)
        began = time.monotonic()
        while b"ranks of" not in output.read_bytes() and process.poll() is None and time.monotonic() - began < VOID:
            time.sleep(0.02)
        began = time.monotonic()
        reached = None
        if victim is not None:
            time.sleep(moment)
            target, told = ranks_of(process.pid).get(victim), lines_of(metrics)
            if target is not None and not any("final" in line for line in told):
                os.kill(target, signal.SIGKILL)
                reached = len(told)
        code: int | None
        try:
            code = process.wait(VOID)
        except subprocess.TimeoutExpired:
            code = None
            for rank in ranks_of(process.pid).values():
                os.kill(rank, signal.SIGKILL)
            process.kill()
            process.wait()
        seconds = time.monotonic() - began
        last = (lines_of(metrics) or [{}])[-1]
        said = output.read_text(errors="replace")
    return Ran(code, reached, seconds, last.get("updates"), last.get("test_accuracy"), said)


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    """What a training has told of, step by step, but for a line that is not whole."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def verdict(ran: Ran, usual: list[Ran]) -> str:
    """What is wrong with a training, compared with undisturbed ones; nothing if it is as it should be."""
    slowest, worst = max(other.seconds for other in usual), min(other.accuracy or 0 for other in usual)
    wrong = {
        f"exit status {ran.code}": ran.code != 0,
        f"{ran.updates} updates": ran.updates != usual[0].updates,
        "accuracy": (ran.accuracy or 0) < worst - LOWER,
        f"{LONGER:.0f} s longer": ran.seconds > slowest + LONGER,
    }
    return ", ".join(what for what, so in wrong.items() if so)


def row(name: str, ran: Ran, note: str) -> str:
    """A line of the table."""
    accuracy = "-" if ran.accuracy is None else f"{ran.accuracy:.2%}"
    return f"{name:<36}{ran.seconds:>9.1f}{ran.updates if ran.updates is not None else '-':>9}{accuracy:>10}  {note}"


def main() -> int:
    """1 if a training did not end as it should."""
    args = parser().parse_args()
    if shutil.which(args.mpiexec) is None:
        sys.exit(f"--mpiexec: there is no {args.mpiexec}")
    print(" ".join(command(args, Path("FILE"))))
    print(f"{'killed':<36}{'seconds':>9}{'updates':>9}{'accuracy':>10}")
    usual = []
    for _ in range(UNDISTURBED):
        usual.append(run(args, None, 0))
        print(row("nobody", usual[-1], ""), flush=True)
        if usual[-1].code != 0 or usual[-1].updates is None:
            print(usual[-1].said)
            return 1
    rng, failed = random.Random(args.seed), 0
    first, count = (0, args.servers) if args.kill == "servers" else (args.servers, args.workers)
    kills, span = 0, min(other.seconds for other in usual)
    while kills < args.times:
        victim, moment = first + rng.randrange(count), rng.random() * span
        ran = run(args, victim, moment)
        if ran.reached is None:
            span *= SHORTER  # the machine has become faster
            continue
        kills += 1
        wrong = verdict(ran, usual)
        failed += bool(wrong)
        name = f"rank {victim} after {moment:.2f} s, {ran.reached} steps"
        print(row(name, ran, wrong or "as it should be"), flush=True)
        if wrong:
            print(ran.said)
    print(f"{args.times - failed} of {args.times} as they should be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
