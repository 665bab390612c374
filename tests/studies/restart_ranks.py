"""Restart test: kill a random rank of `chorus train --survive` at a random step, and compare with an undisturbed run.

python tests/studies/restart_ranks.py --times 10
python tests/studies/restart_ranks.py --layouts zero3 --times 3 --survive-every 2

A training passes if it exits with status 0, its last checkpoint has the bits of an undisturbed run, it goes on from at
most the given number of steps before the kill, and leaves no memory. MPIEXEC names the mpiexec.
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
from pathlib import Path
from typing import NamedTuple

from kill_ranks import ranks_of
from mpi_launches import ROOT, find_mpiexec

from collectives.cli.launcher import ProgramParser, at_least
from parallel.checkpoint.checkpoint_files import all_in, tensors_in
from parallel.cli.main import LAUNCH_DEFAULTS
from parallel.cli.restarts import MEMORY

LAYOUTS = {
    "dp": ("--layout", "dp"),
    "zero3": ("--layout", "zero3"),
    "pp": ("--layout", "pp", "--stages", "2"),
    "dp x tp": ("--layout", "dp", "--mesh", "dp=2,tp=2"),
}
STEPS = 40
LONGEST = 300.0  # seconds of a training


def command(args: argparse.Namespace, layout: str, folder: Path) -> list[str]:
    start = [sys.executable, "-m", "parallel.cli.main", "train", "-n", str(args.ranks), "--threads", "1"]
    model = ["--data", args.data, "--model", args.model, "--steps", str(args.steps)]
    files = ["--checkpoint", str(folder / "c"), "--every", str(args.steps), "--json", str(folder / "m.jsonl")]
    return [*start, *model, *LAYOUTS[layout], *files]


def rows(path: Path) -> tuple[int, int | None]:
    """Number of complete lines of a file, and its inode. 0 and None without it."""
    try:
        return path.read_bytes().count(b"\n"), path.stat().st_ino
    except FileNotFoundError:
        return 0, None


class RestartedRun(NamedTuple):
    """Result of a training of which a rank was killed, or none."""

    status: int  # of the launcher
    output: str
    first: float | None  # seconds from the start to the end of the first step
    before: int | None  # steps at the kill
    after: int | None  # steps at the restart
    seconds: float | None  # from the kill to the end of the next step


def train(words: list[str], folder: Path, rank: int | None = None, at: int = 0, delay: float = 0.0) -> RestartedRun:
    """Train, killing `rank`, if given, `delay` seconds after step `at`."""
    path = folder / "m.jsonl"
    kill: tuple[int, int | None, float] | None = None
    first: float | None = None
    again: float | None = None
    with (folder / "output").open("wb") as file:
        environment = os.environ | LAUNCH_DEFAULTS | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < LONGEST:
        count, inode = rows(path)
        first = first or (time.monotonic() - began if count else None)
        if rank is not None and kill is None and count >= at:
            time.sleep(delay)
            if (victim := ranks_of(process.pid).get(rank)) is not None:
                kill = (*rows(path), time.monotonic())
                os.kill(victim, signal.SIGKILL)
        elif kill and again is None and inode not in (None, kill[1]):
            start = count
            while rows(path)[0] <= start and process.poll() is None:
                time.sleep(0.005)
            again = time.monotonic() - kill[2]
        time.sleep(0.005)
    if process.poll() is None:
        process.terminate()
    process.wait()
    output = (folder / "output").read_text(errors="replace")
    resumed = re.findall(r"resumed .*?: (\d+) steps were made", output)
    after = int(resumed[-1]) if resumed else None
    return RestartedRun(process.returncode, output, first, kill[0] if kill else None, after, again)


def tensors(folder: Path) -> list[tuple[str, bytes]]:
    return [(name, values.tobytes()) for name, values in tensors_in(all_in(folder / "c")[-1])]


def verdict(run: RestartedRun, folder: Path, usual: list[tuple[str, bytes]], every: int) -> list[str]:
    """List of what is wrong with a training of which a rank was killed."""
    if run.status:
        return [f"status {run.status}"]
    if run.before is None:
        return ["ended before the kill"]
    wrong = {
        "other bits": tensors(folder) != usual,
        "lost more steps": (run.after or 0) < run.before - every,
        "memory is left": any(map(os.path.exists, re.findall(rf"{MEMORY}/chorus-[0-9a-f-]+", run.output))),
    }
    return [text for text, failed in wrong.items() if failed]


def main() -> int:
    """Kill ranks and print a line for each. Exit status 1 if a training did not end as required."""
    made = ProgramParser(__doc__)
    add = made.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--times", type=at_least(1, int), default=10)
    add("--ranks", type=at_least(2, int), default=4)
    add("--data", default="digits")
    add("--model", default="mlp")
    add("--steps", type=at_least(4, int), default=STEPS)
    add("--survive-every", type=at_least(1, int), default=1, metavar="K")
    add("--seed", type=int, default=0)
    args, failed = made.parse_args(), 0
    os.environ.setdefault("MPIEXEC", find_mpiexec() or "mpiexec")
    rng = random.Random(args.seed)
    for layout in args.layouts:
        with tempfile.TemporaryDirectory() as name:
            run = train(command(args, layout, Path(name)), Path(name))
            if run.status:
                print(run.output)
                return 1
            usual = tensors(Path(name))
        for _ in range(args.times):
            rank, at = rng.randrange(args.ranks), rng.randrange(1, args.steps - 3)
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                words = [*command(args, layout, folder), "--survive", "--survive-every", str(args.survive_every)]
                run = train(words, folder, rank, at, rng.random() * 0.03)
                wrong = verdict(run, folder, usual, args.survive_every)
            failed += bool(wrong)
            took = "-" if run.seconds is None else f"{run.seconds:.2f} s"
            text = f"{layout:<8} rank {rank} killed after {run.before} steps, went on from {run.after}"
            text += f", first step {run.first or 0:.2f} s after the start, next one {took} after the kill"
            print(f"{text}: {', '.join(wrong) or 'same bits'}", flush=True)
            if wrong:
                print(run.output)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
