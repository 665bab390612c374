"""Ranks learn to read handwritten digits together, then race our collectives against the MPI's own.

mpirun -n 4 python scripts/demo_digits.py

A small network, data-parallel: every rank computes the gradient on its part of each batch, our allreduce joins them in
an order that does not depend on how many ranks there are, and all ranks stay identical; to one rank alone, too.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the slow imports: Ctrl-C is to end this quietly

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from benchlib import launch, table
from benchlib.launch import say
from benchlib.measure import measure
from benchlib.rows import Report, make_report
from benchlib.sizes import format_size
from benchlib.training import title_of
from collectives import Communicator
from collectives.selection.timing_file import machine
from parallel.settings import complete
from parallel.trainer.trainer import Score, Training

OUT = Path(__file__).resolve().parent.parent / "out"
GOAL = 0.97
RACE = ("allreduce", "broadcast", "allgather", "reduce_scatter")
RACE_SIZES = (8, 1024, 65536, 1048576)


@dataclass
class Course:
    """What a training leaves behind: a line for each step, the last score, and the weights."""

    title: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    score: Score = field(default_factory=lambda: Score(float("nan"), None, None))
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0


def train(comm: Communicator, epochs: int, name: str) -> Course:
    """Train on the ranks of `comm`, one of our communicators. The same on all ranks, and on any number of them."""
    said = {"data": "digits", "model": "mlp", "epochs": epochs, "reproducible": True}
    with Training(complete(said), comm) as training, launch.progress(training.steps, name, "step") as bar:
        course, since = Course(title_of(training)), time.perf_counter()
        for record in training.run():
            course.lines.append(record.line())
            if training.done % training.sampler.steps_per_epoch == 0:
                course.score = training.score()
                course.lines[-1] |= course.score.line()
                words = f"loss {record.report.loss:.3f}, test accuracy {course.score.accuracy:.1%}"
                bar.set_postfix_str(words, refresh=False)
            bar.update()
        course.seconds = time.perf_counter() - since
        course.weights = {place.parameter.name: place.parameter.data.copy() for place in training.engine.flat.places}
    return course


def first_difference(one: Course, other: Course) -> str | None:
    """The first tensor whose bits differ."""
    pairs = zip(one.weights.items(), other.weights.items(), strict=True)
    return next((name for (name, a), (_, b) in pairs if a.tobytes() != b.tobytes()), None)


def doze_until(request: MPI.Request) -> None:
    """Wait without keeping a core busy that another rank could use."""
    while not request.Test():
        time.sleep(0.01)


def ranks_in_words(size: int) -> str:
    """1 rank, 2 ranks, ..."""
    return f"{size} rank{'s' * (size != 1)}"


def learn(plain: MPI.Intracomm, comm: Communicator, epochs: int) -> tuple[Course, bool]:
    """Train on all ranks, then on rank 0 alone, and compare: (together, all is well)."""
    rank, size = plain.Get_rank(), plain.Get_size()
    together = train(comm, epochs, "all ranks together")
    well = True
    if rank == 0:
        alone = train(Communicator(MPI.COMM_SELF), epochs, "rank 0 alone")
        apart, accuracy = first_difference(together, alone), together.score.accuracy or 0.0
        well = apart is None and accuracy >= GOAL
        say(f"{'':22}{'test accuracy':>14}{'test loss':>11}{'seconds':>9}")
        for name, run in ((f"{ranks_in_words(size)} together", together), ("one rank alone", alone)):
            say(f"{name:22}{run.score.accuracy:>14.2%}{run.score.loss:>11.4f}{run.seconds:>9.2f}")
        say()
        say(f"Test accuracy at least {GOAL:.0%}: {'yes' if accuracy >= GOAL else 'NO'}")
        say(f"The same weights as one rank alone, bit for bit: {'yes' if apart is None else f'NO, {apart} differs'}")
    doze_until(plain.Ibarrier())
    return together, bool(plain.bcast(well))


def race(plain: MPI.Intracomm, comm: MPI.Intracomm, seconds: float) -> Report:
    """Race our collectives against the MPI's own at a few sizes, and show who wins."""
    report = make_report(plain.Get_size(), [], against="native")
    for line in table.preamble(report):
        say(line)
    say(f"{'collective':16}{'bytes':>8}{'ours':>12}{'the MPI':>12}   {'ours / the MPI':14}  chosen algorithm")
    settings = [(name, nbytes) for name in RACE for nbytes in RACE_SIZES]
    with launch.progress(len(settings), "racing", "race") as bar:
        for collective, nbytes in settings:
            rows, absent = measure(
                plain, comm, collective=collective, algorithms=["auto"], nbytes=nbytes, seconds=seconds
            )
            if "auto" in absent:
                raise RuntimeError(f"{collective} of {nbytes} bytes failed: {absent['auto']}")
            for row in rows:
                say(race_line(row))
            report["rows"] += rows
            bar.update()
    ratios = [row["ratio"] for row in report["rows"] if row["ratio"] is not None]
    say(f"Ours is faster in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} races.")
    return report


def race_line(row: dict[str, Any]) -> str:
    """One race in words: times, and a bar that is short when we are fast."""
    native, ratio = row["native_us"], row["ratio"]
    theirs = "-" if native is None else f"{native:.1f} us"
    verdict = "" if ratio is None else f"{ratio:5.2f} {'#' * min(12, round(4 * ratio))}"
    wrong = f"  WRONG: {row['wrong']} elements" if row["wrong"] else ""
    name = row["collective"].replace("_", "-")
    size = format_size(row["bytes"])
    return f"{name:16}{size:>8}{row['ours_us']:>9.1f} us{theirs:>12}   {verdict:19} {row['chosen']}{wrong}"


def main() -> int:
    """Learn, race, draw; 0 if the goal is reached, the results agree, and nothing was wrong."""
    parser = launch.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training set (default 15)")
    parser.add_argument("--seconds", type=float, default=0.2, help="per contestant and race (default 0.2)")
    parser.add_argument("--no-race", action="store_true", help="only learn")
    args = parser.parse_args()
    if args.epochs < 1 or args.seconds < 0:
        parser.error("--epochs must be at least 1 and --seconds must not be negative")

    plain = MPI.COMM_WORLD
    comm = Communicator(plain)
    say("1. Learning to read digits, the gradients joined by our Allreduce")
    say()
    together, well = learn(plain, comm, args.epochs)
    pictures = []
    if plain.Get_rank() == 0:
        pictures += draw_training(together, plain.Get_size())
    if not args.no_race:
        say()
        say("2. The race: our collectives, written in Python, against those of the MPI library, written in C")
        say()
        report = race(plain, comm, args.seconds)
        well = well and not any(row["wrong"] for row in report["rows"])
        if plain.Get_rank() == 0:
            pictures += draw_race(report)
    if pictures:
        say()
        say("Pictures:")
        for picture in pictures:
            say(f"  {picture}")
    return 0 if well else 1


def draw_training(course: Course, ranks: int) -> list[Path]:
    """The training's course as a PNG; nothing if matplotlib is not installed."""
    try:
        from benchlib.plots import plot_learning
    except ImportError:
        say("No pictures: matplotlib is not installed (pip install 'chorus-mpi[plot]').")
        return []
    OUT.mkdir(exist_ok=True)
    plot_learning(OUT / "digits.png", course.lines, f"{course.title}, {ranks_in_words(ranks)}", machine())
    return [OUT / "digits.png"]


def draw_race(report: Report) -> list[Path]:
    """The race as a PNG; nothing if matplotlib is not installed."""
    try:
        from benchlib.plots import plot_race
    except ImportError:
        return []
    OUT.mkdir(exist_ok=True)
    plot_race(OUT / "race.png", report)
    return [OUT / "race.png"]


if __name__ == "__main__":
    launch.run(main)
