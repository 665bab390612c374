"""Demonstration: all ranks learn to read handwritten digits, then collectives race against the MPI's own.

chorus demo
chorus demo -n 2 --epochs 5 --no-race

A small network, data-parallel: every rank computes the gradient on its share of each batch, and Allreduce adds them in
an order that is independent of the number of ranks. All ranks have the same weights, and one rank alone gets them too.
Without scikit-learn (it has the digits) the task is a made-up one.
"""

import time
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark import result_table
from collectives.benchmark.measure import RaceOptions, measure
from collectives.benchmark.result_rows import Report, make_report
from collectives.cli import launcher
from collectives.cli.launcher import say
from collectives.selection.timing_file import machine
from collectives.units import format_bytes
from parallel.cli.reports.training_output import title_of
from parallel.trainer.recipes import complete
from parallel.trainer.records import EvalScore
from parallel.trainer.trainer import Training

OUT = Path("out")
GOALS = {"digits": 0.97, "teacher_classes": 0.7}  # test accuracy to reach, by task

RACE = ("allreduce", "broadcast", "allgather", "reduce_scatter")
RACE_SIZES = (8, 1024, 65536, 1048576)
RACE_SECONDS = 0.2  # limit of each measurement


class TrainingHistory(NamedTuple):
    """Results of a training: metrics of each step, test score at the end, final weights, seconds."""

    title: str
    lines: list[dict[str, Any]]
    score: EvalScore
    weights: dict[str, np.ndarray]
    seconds: float


def train(comm: Communicator, epochs: int, name: str, task: str = "digits") -> TrainingHistory:
    """Train an MLP reproducibly: the result is the same on all ranks, and for any number of them. Collective."""
    settings = {"data": task, "model": "mlp", "epochs": epochs, "reproducible": True}
    with Training(complete(settings), comm) as training, launcher.progress(training.steps, name, "step") as bar:
        lines, began = [], time.perf_counter()
        for record in training.run():
            lines.append(record.line())
            if training.done % training.sampler.steps_per_epoch == 0:
                score = training.score()
                lines[-1] |= score.line()
                epoch = training.done // training.sampler.steps_per_epoch
                text = f"epoch {epoch}: loss {record.report.loss:.3f}, test accuracy {score.accuracy:.1%}"
                bar.set_postfix_str(text, refresh=False)
            bar.update()
        seconds = time.perf_counter() - began
        weights = {place.parameter.name: place.parameter.data.copy() for place in training.engine.flat.places}
        return TrainingHistory(title_of(training), lines, score, weights, seconds)


def first_difference(one: TrainingHistory, other: TrainingHistory) -> str | None:
    pairs = zip(one.weights.items(), other.weights.items(), strict=True)
    return next((name for (name, a), (_, b) in pairs if a.tobytes() != b.tobytes()), None)


def ranks_text(size: int) -> str:
    return f"{size} rank{'s' * (size != 1)}"


def learn(plain: MPI.Intracomm, comm: Communicator, epochs: int, task: str) -> tuple[TrainingHistory, bool]:
    """Train on all ranks, then on rank 0 alone. Returns the first result, and True if accurate and bitwise equal."""
    goal = GOALS[task]
    parallel = train(comm, epochs, "all ranks together", task)
    passed = True
    if plain.Get_rank() == 0:
        alone = train(Communicator(MPI.COMM_SELF), epochs, "rank 0 alone", task)
        different, accuracy = first_difference(parallel, alone), parallel.score.accuracy or 0.0
        passed = different is None and accuracy >= goal
        say(f"{'':22}{'test accuracy':>14}{'test loss':>11}{'seconds':>9}")
        for name, run in ((f"{ranks_text(plain.Get_size())} together", parallel), ("one rank alone", alone)):
            say(f"{name:22}{run.score.accuracy:>14.2%}{run.score.loss:>11.4f}{run.seconds:>9.2f}")
        equal = "yes" if different is None else f"NO, {different} differs"
        say(f"\nTest accuracy at least {goal:.0%}: {'yes' if accuracy >= goal else 'NO'}")
        say(f"The same weights as one rank alone, bit for bit: {equal}")
    barrier = plain.Ibarrier()
    while not barrier.Test():
        time.sleep(0.01)  # leaves the core to rank 0, since others may share it
    return parallel, bool(plain.bcast(passed))


def race(plain: MPI.Intracomm, comm: MPI.Intracomm) -> Report:
    """Time Chorus collectives against the MPI library's at a few sizes. Print and return the results. Collective."""
    report = make_report(plain.Get_size(), [], against="native")
    for line in result_table.preamble(report):
        say(line)
    say(f"{'collective':16}{'bytes':>8}{'Chorus':>12}{'the MPI':>12}   {'Chorus / the MPI':19}  chosen algorithm")
    cases, options = list(product(RACE, RACE_SIZES)), RaceOptions(limits={"seconds": RACE_SECONDS})
    with launcher.progress(len(cases), "racing", "race", prints=True) as bar:
        for collective, nbytes in cases:
            rows, absent = measure(plain, comm, collective, ["auto"], nbytes, options=options)
            if "auto" in absent:
                raise RuntimeError(f"{collective} of {nbytes} bytes failed: {absent['auto']}")
            for row in rows:
                say(race_line(row))
            report["rows"] += rows
            bar.update()
    ratios = [row["ratio"] for row in report["rows"] if row["ratio"] is not None]
    say(f"Chorus is faster in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} races.")
    return report


def race_line(row: dict[str, Any]) -> str:
    """Format a row of benchmark results: times of Chorus and MPI, their ratio, and a bar in proportion to it."""
    native, ratio = row["native_us"], row["ratio"]
    theirs = "-" if native is None else f"{native:.1f} us"
    verdict = "" if ratio is None else f"{ratio:5.2f} {'#' * min(12, round(4 * ratio))}"
    wrong = f"  WRONG: {row['wrong']} elements" if row["wrong"] else ""
    name, size = row["collective"].replace("_", "-"), format_bytes(row["bytes"])
    return f"{name:16}{size:>8}{row['ours_us']:>9.1f} us{theirs:>12}   {verdict:19} {row['chosen']}{wrong}"


def draw(trained: TrainingHistory, ranks: int, report: Report | None) -> None:
    """Plot the learning curve and, if given, the benchmark results into `OUT`. Without matplotlib print a hint."""
    try:
        from collectives.benchmark.race_plots import plot_race
        from parallel.cli.reports.training_plots import plot_learning
    except ImportError:
        say("No pictures: matplotlib is not installed (pip install 'chorus-mpi[plot]').")
        return
    plot_learning(OUT / "training.png", trained.lines, f"{trained.title}, {ranks_text(ranks)}", machine())
    say(f"\nPictures:\n  {OUT / 'training.png'}")
    if report is not None:
        plot_race(OUT / "race.png", report)
        say(f"  {OUT / 'race.png'}")


def main() -> int:
    """Train, time collectives, and plot. Exit status 0 if accuracy, equality of weights and all results are right."""
    parser = launcher.LauncherParser(__doc__)
    at_least_one = launcher.at_least(1, int)
    parser.add_argument("--epochs", type=at_least_one, default=15, help="passes over the training set (default 15)")
    parser.add_argument("--no-race", action="store_true", help="train only")
    args = parser.parse_args()
    plain = MPI.COMM_WORLD
    comm = Communicator(plain)
    task = "digits" if find_spec("sklearn") else "teacher_classes"
    if task != "digits":
        say("scikit-learn, which holds the digits, is not installed (pip install 'chorus-mpi[train]'): made-up task.\n")
    say(f"1. Training on {task}, gradients added by Chorus's Allreduce\n")
    trained, passed = learn(plain, comm, args.epochs, task)
    report = None
    if not args.no_race:
        say("\n2. The race: collectives of Chorus, in Python, against those of the MPI library, in C\n")
        report = race(plain, comm)
        passed = passed and not any(row["wrong"] for row in report["rows"])
    if plain.Get_rank() == 0:
        draw(trained, plain.Get_size(), report)
    return 0 if passed else 1
