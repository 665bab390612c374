"""Restart test: kill a random rank of `chorus train --survive` at a random step, and compare with an undisturbed run.

python tests/studies/restart_ranks.py --times 10
python tests/studies/restart_ranks.py --layouts zero3 --times 3 --survive-every 2

A training passes if it exits with status 0, its last checkpoint has the bits of an undisturbed run, it goes on from at
most the given number of steps before the kill, and leaves no memory. MPIEXEC names the mpiexec.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kill_ranks import ranks_of
from mpi_launches import ROOT, find_mpiexec

from collectives.cli.launcher import ProgramParser, at_least
from parallel.checkpoint.checkpoint_files import all_in, tensors_in
from parallel.cli.main import LAUNCH_DEFAULTS
from parallel.cli.restarts import MEMORY

LAYOUTS = {
    "dp": ("--parallel", "dp"),
    "zero3": ("--parallel", "zero3"),
    "pp": ("--parallel", "pp", "--stages", "2"),
    "dp x tp": ("--parallel", "dp", "--tensor", "2"),
}
STEPS = 40
LONGEST = 120.0  # seconds of a training


def command(args, layout, folder):
    start = [sys.executable, "-m", "parallel.cli.main", "train", "-n", str(args.ranks), "--threads", "1"]
    model = ["--data", args.data, "--model", args.model, "--steps", str(args.steps)]
    files = ["--checkpoint", str(folder / "c"), "--every", str(args.steps), "--json", str(folder / "m.jsonl")]
    return [*start, *model, *LAYOUTS[layout], *files]


def rows(path):
    """Number of complete lines of a file, and its inode. None without it."""
    try:
        return path.read_bytes().count(b"\n"), path.stat().st_ino
    except FileNotFoundError:
        return 0, None


def train(words, folder, rank=None, at=0, delay=0.0):
    """Train, killing `rank`, if given, `delay` seconds after step `at`. Returns status, output, steps, seconds.

    Steps are those at the kill and those at the restart. Seconds are from the kill to the end of the next step.
    """
    path, kill, again = folder / "m.jsonl", None, None
    with (folder / "output").open("wb") as file:
        environment = os.environ | LAUNCH_DEFAULTS | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < LONGEST:
        count, inode = rows(path)
        if rank is not None and kill is None and count >= at:
            time.sleep(delay)
            if (victim := ranks_of(process.pid).get(rank)) is not None:
                kill = (*rows(path), time.monotonic())
                os.kill(victim, signal.SIGKILL)
        elif kill and again is None and inode not in (None, kill[1]):
            start = count
            while (found := rows(path)[0]) <= start and process.poll() is None:
                time.sleep(0.005)
            again = (found - 1, time.monotonic() - kill[2])
        time.sleep(0.005)
    if process.poll() is None:
        process.terminate()
    process.wait()
    output = (folder / "output").read_text(errors="replace")
    resumed = re.findall(r"resumed .*?: (\d+) steps were made", output)
    return process.returncode, output, (kill and kill[0], int(resumed[-1]) if resumed else None), again and again[1]


def tensors(folder):
    return [(name, values.tobytes()) for name, values in tensors_in(all_in(folder / "c")[-1])]


def main():
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
        with tempfile.TemporaryDirectory() as folder:
            status, output, *_ = train(command(args, layout, Path(folder)), Path(folder))
            if status:
                print(output)
                return 1
            usual = tensors(Path(folder))
        for _ in range(args.times):
            rank, at = rng.randrange(args.ranks), rng.randrange(1, args.steps - 3)
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                words = [*command(args, layout, folder), "--survive", "--survive-every", str(args.survive_every)]
                status, output, (before, after), seconds = train(words, folder, rank, at, rng.random() * 0.03)
                wrong = [f"status {status}"] if status else []
                if not wrong and before is None:
                    wrong.append("ended before the kill")
                if not wrong and tensors(folder) != usual:
                    wrong.append("other bits")
                if not wrong and (after or 0) < before - args.survive_every:
                    wrong.append("lost more steps")
                wrong += [f"{path} is left" for path in MEMORY.glob(f"chorus-{os.geteuid()}-*")]
                failed += bool(wrong)
                took = "-" if seconds is None else f"{seconds:.2f} s"
                text = f"{layout:<8} rank {rank} killed after {before} steps, went on from {after}"
                print(f"{text}, next step after {took}: {', '.join(wrong) or 'same bits'}", flush=True)
                if wrong:
                    print(output)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
