"""Trainings with one slow rank: check that no message of the watcher appears.

python tests/studies/slow_rank.py --minutes 60

Trainings of several layouts run one after another on an emulated cluster (`scripts/cluster`, Linux, root) whose last
host has a single rank and runs a fifth of the time. Ranks report waits of three seconds, ten times sooner than by
default. The exit status is 1 if a training fails or anything is reported.
"""

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import count

from mpi_launches import ROOT, exit_on_signals

from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.main import LAUNCH_DEFAULTS

LAYOUTS = {
    "dp": (3, "--layout dp"),
    "zero1": (2, "--layout zero1"),
    "zero3": (3, "--layout zero3"),
    "pp": (2, "--layout pp --stages 2"),
    "tp": (2, "--layout dp --mesh tp=2"),
    "ps": (3, "--layout ps"),
    "dp x pp": (4, "--layout pp --stages 2"),
    "sgp": (3, "--layout sgp"),
}
"""Ranks and options of trainings."""

LONGEST = 300.0
"""Seconds of a training, which otherwise hangs."""

REPORTS = "chorus: ", "cause: ", "Error"


def parse(words: Sequence[str] | None = None) -> Namespace:
    parser = ProgramParser(__doc__)
    parser.add_argument("--minutes", type=at_least(0, float), default=60.0, metavar="M")
    parser.add_argument("--slow", type=at_least(1, float), default=5.0, metavar="FACTOR")
    parser.add_argument("--patience", type=at_least(0.1, float), default=3.0, metavar="S")
    parser.add_argument("--mpi", choices=("auto", "mpich", "openmpi"), default="auto")
    return parser.parse_args(words)


def train(options: Namespace, layout: str) -> tuple[int, str]:
    """Train once. Returns the status and the output."""
    ranks, words = LAYOUTS[layout]
    hosts = ["--per-host", f"{ranks - 1},1", "--slow-host", f"2={options.slow:g}", "--mpi", options.mpi]
    program = ["python", "-m", "parallel.cli.main", "train", "--data", "digits", "--model", "mlp", "--epochs", "6"]
    times = LAUNCH_DEFAULTS | {"CHORUS_PATIENCE": str(options.patience), "PYTHONPATH": str(ROOT)}
    command = ["scripts/cluster", *hosts, "--", *program, *words.split()]
    with exit_on_signals():  # the cluster ends with its script
        found = subprocess.run(
            command, cwd=ROOT, env=os.environ | times, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LONGEST,
        )  # fmt: skip
    return found.returncode, found.stdout


def main() -> int:
    options = parse()
    began, wrong = time.monotonic(), 0
    for number in count():
        if time.monotonic() - began > 60 * options.minutes:
            break
        start, layout = time.monotonic(), list(LAYOUTS)[number % len(LAYOUTS)]
        status, text = train(options, layout)
        is_wrong = status != 0 or any(report in text for report in REPORTS)
        wrong += is_wrong
        took = time.monotonic() - start
        print(f"{layout:<8} {LAYOUTS[layout][0]} ranks {took:6.1f} s {'WRONG' if is_wrong else 'right'}", flush=True)
        if is_wrong:
            print(f"status {status}\n{text}", flush=True)
    print(f"{number - wrong} of {number} trainings without a report, in {(time.monotonic() - began) / 60:.0f} minutes")
    return int(wrong > 0 or not number)


if __name__ == "__main__":
    sys.exit(main())
