"""Restart test: kill a random rank of `chorus train --survive` at a random step, and compare with an undisturbed run.

python tests/studies/restart_ranks.py --times 10
python tests/studies/restart_ranks.py --layouts zero3 --times 3 --survive-every 2
python tests/studies/restart_ranks.py --layouts ps "ps ssp:3" --servers --times 5 --kills 2
python tests/studies/restart_ranks.py --ulfm --layouts dp --times 20

A training passes if it exits with status 0, its last checkpoint has the bits of an undisturbed run, it goes on from at
most the given number of steps before each kill, and leaves no memory. Of an asynchronous layout, whose bits differ in
each run, the loss of the test must be near. With --kills 2 another rank is killed after the restart, and with
--servers the same server again. With --ulfm the others go on, without a restart. MPIEXEC names the mpiexec. Times are
of an installation with compiled modules (.pyc files).
"""

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from kill_ranks import ranks_of
from mpi_launches import ROOT, find_mpiexec

from collectives.cli.launcher import ProgramParser, at_least
from parallel.checkpoint.checkpoint_files import all_in, tensors_in
from parallel.cli.main import LAUNCH_DEFAULTS
from parallel.cli.reports.metrics import read
from parallel.cli.restarts import MEMORY

LAYOUTS = {
    "dp": ("--layout", "dp"),
    "zero3": ("--layout", "zero3"),
    "pp": ("--layout", "pp", "--stages", "2"),
    "dp x tp": ("--layout", "dp", "--mesh", "dp=2,tp=2"),
    "ps": ("--layout", "ps", "--servers", "2", "--reproducible"),
    "ps of replicas": ("--layout", "ps", "--servers", "2", "--replicas", "2", "--reproducible"),
    "ps ssp:3": ("--layout", "ps", "--servers", "2", "--consistency", "ssp:3"),
}
SERVERS = 2  # of the layouts with servers
ASYNCHRONOUS = ("ps ssp:3",)
NEAR = 0.1  # relative difference of the loss of an asynchronous layout
STEPS = 40
LONGEST = 300.0  # seconds of a training
LINES = {"noticed": "restart ", "resumed": "resumed "}
"""Parts of the time to go on, by the line of the output at their end."""

MODULES = os.path.join(tempfile.gettempdir(), f"chorus-modules-{os.geteuid()}")
"""Folder of compiled modules."""


def command(args: argparse.Namespace, layout: str, folder: Path) -> list[str]:
    program = [sys.executable, "-m", "parallel.cli.main", "train", "--threads", "1"]
    start = [*program, "-n", str(args.ranks)]
    if args.ulfm:
        options = ["--with-ft", "ulfm", "--map-by", ":oversubscribe", "-n", str(args.ranks)]
        start = [os.environ["MPIEXEC"], *options, *program, "--reproducible"]  # equal bits on fewer ranks
    model = ["--data", args.data, "--model", args.model, "--steps", str(args.steps)]
    files = ["--checkpoint", str(folder / "c"), "--every", str(args.steps), "--json", str(folder / "m.jsonl")]
    return [*start, *model, *LAYOUTS[layout], *files]


def rows(path: Path) -> tuple[int, int | None]:
    """Number of complete lines of a file, and its inode. 0 and None without it."""
    try:
        return path.read_bytes().count(b"\n"), path.stat().st_ino
    except FileNotFoundError:
        return 0, None


class Kill(NamedTuple):
    """Planned kill of a rank."""

    rank: int
    at: int  # steps done
    delay: float  # seconds after them


class MadeKill(NamedTuple):
    """Kill that has been made."""

    before: int  # steps done
    moment: float
    file: int | None  # inode of the lines of this start


class RestartedRun(NamedTuple):
    """Result of a training of which ranks were killed, or none."""

    status: int  # of the launcher
    output: str
    first: float | None  # seconds from the start to the end of the first step
    killed: list[MadeKill]
    after: list[int]  # steps at each restart
    seconds: list[float]  # from each kill to the end of the next step
    parts: list[str]  # of this time, each until a line of the output


def train(words: list[str], folder: Path, kills: Sequence[Kill] = ()) -> RestartedRun:
    """Train. Each kill is made when its steps are done, after the first step that follows the kill before it."""
    path, killed, seconds = folder / "m.jsonl", list[MadeKill](), list[float]()
    parts, read = list[str](), 0
    start, file = 0, None  # steps and file at the start or restart
    first: float | None = None
    with (folder / "output").open("wb") as output:
        environment = os.environ | LAUNCH_DEFAULTS | {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": MODULES}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < LONGEST:
        time.sleep(0.005)
        count, inode = rows(path)
        if inode != file:
            start, file = count, inode
        is_pending = len(killed) > len(seconds)
        if is_pending:
            text = (folder / "output").read_text(errors="replace")
            found = [name for name, line in LINES.items() if line in text[read:]]
            parts[-1] += "".join(
                f", {name} after {time.monotonic() - killed[-1].moment:.2f}" for name in found if name not in parts[-1]
            )
        if count <= start or (is_pending and file == killed[-1].file):
            continue
        first = first or time.monotonic() - began
        if is_pending:
            seconds.append(time.monotonic() - killed[-1].moment)
        if len(killed) < len(kills) and count >= kills[len(killed)].at:
            planned = kills[len(killed)]
            time.sleep(planned.delay)
            if (victim := ranks_of(process.pid).get(planned.rank)) is not None:
                read = (folder / "output").stat().st_size
                parts.append("")
                killed.append(MadeKill(rows(path)[0], time.monotonic(), file))
                os.kill(victim, signal.SIGKILL)
    if process.poll() is None:
        process.terminate()
    process.wait()
    text = (folder / "output").read_text(errors="replace")
    after = [int(steps) for steps in re.findall(r"resumed .*?: (\d+) steps were made", text)]
    return RestartedRun(process.returncode, text, first, killed, after, seconds, parts)


def tensors(folder: Path) -> list[tuple[str, bytes]]:
    return [(name, values.tobytes()) for name, values in tensors_in(all_in(folder / "c")[-1])]


def loss(folder: Path) -> float:
    """Loss of the final test. NaN without one."""
    return float((read(folder / "m.jsonl") or [{}])[-1].get("test_loss") or math.nan)


class Undisturbed(NamedTuple):
    """Result of an undisturbed training."""

    bits: list[tuple[str, bytes]] | None  # None of an asynchronous one
    loss: float

    @classmethod
    def of(cls, layout: str, folder: Path) -> Self:
        return cls(None if layout in ASYNCHRONOUS else tensors(folder), loss(folder))

    def differs(self, folder: Path) -> bool:
        """True if another training has other bits, or if asynchronous no near loss."""
        if self.bits is None:
            return not abs(loss(folder) - self.loss) <= NEAR * self.loss
        return tensors(folder) != self.bits


def verdict(run: RestartedRun, folder: Path, usual: Undisturbed, kills: int, every: int) -> list[str]:
    """List of what is wrong with a training of which ranks were killed."""
    if run.status:
        return [f"status {run.status}"]
    if len(run.killed) < kills:
        return [f"ended before kill {len(run.killed) + 1}"]
    pairs = zip(run.killed, run.after, strict=False)
    wrong = {
        f"{len(run.after)} restarts": len(run.after) != kills,
        "another end": usual.differs(folder),
        "lost more steps": any(after < killed.before - every for killed, after in pairs),
        "memory is left": any(map(os.path.exists, re.findall(rf"{MEMORY}/chorus-[\w-]+", run.output))),
    }
    return [text for text, failed in wrong.items() if failed]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    made = ProgramParser(__doc__)
    add = made.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--times", type=at_least(1, int), default=10)
    add("--kills", type=at_least(1, int), default=1, help="in each training")
    add("--servers", action="store_true", help="kill servers only")
    add("--ulfm", action="store_true", help="with Open MPI's mpiexec --with-ft ulfm, in place of restarts")
    add("--ranks", type=at_least(2, int), default=4)
    add("--data", default="digits")
    add("--model", default="mlp")
    add("--steps", type=at_least(4, int), default=STEPS)
    add("--survive-every", type=at_least(1, int), default=1, metavar="K")
    add("--seed", type=int, default=0)
    return made.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Kill ranks and print a line for each training. Exit status 1 if one did not end as required."""
    args, failed = parse(words), 0
    os.environ.setdefault("MPIEXEC", find_mpiexec() or "mpiexec")
    rng = random.Random(args.seed)
    for layout in args.layouts:
        with tempfile.TemporaryDirectory() as name:
            run = train(command(args, layout, Path(name)), Path(name))
            if run.status:
                print(run.output)
                return 1
            usual = Undisturbed.of(layout, Path(name))
        for _ in range(args.times):
            moments = sorted(rng.sample(range(1, args.steps - 3), args.kills))
            victims = SERVERS if args.servers and layout.startswith("ps") else args.ranks
            ranks = rng.sample(range(victims), args.kills) if args.ulfm else rng.choices(range(victims), k=args.kills)
            if args.servers:
                ranks = ranks[:1] * args.kills
            kills = [Kill(rank, at, rng.random() * 0.03) for rank, at in zip(ranks, moments, strict=True)]
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                words = [*command(args, layout, folder), "--survive", "--survive-every", str(args.survive_every)]
                run = train(words, folder, kills)
                wrong = verdict(run, folder, usual, args.kills, args.survive_every)
            failed += bool(wrong)
            text = f"{layout:<14} first step {run.first or 0:.2f} s after the start"
            everything = zip(kills, run.killed, run.after, run.seconds, run.parts, strict=False)
            for planned, killed, after, took, parts in everything:
                text += f", rank {planned.rank} killed after {killed.before} steps"
                text += f", went on from {after} in {took:.2f} s{parts and f' ({parts[2:]})'}"
            print(f"{text}: {', '.join(wrong) or 'as undisturbed'}", flush=True)
            if wrong:
                print(run.output)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
