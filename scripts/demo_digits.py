"""Ranks learn to read handwritten digits together, then race our collectives against the MPI's own.

mpirun -n 4 python scripts/demo_digits.py

Softmax regression, data-parallel: every rank holds its own shard of the training images and computes the
gradient on the part of each batch that it holds; one Allreduce per step joins the gradients, and all ranks
stay identical.
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
from numpy.typing import NDArray

from benchlib import launch, ours, table
from benchlib.launch import say
from benchlib.measure import measure
from benchlib.rows import Report, make_report
from benchlib.sizes import format_size

Array = NDArray[np.float64]

OUT = Path(__file__).resolve().parent.parent / "out"
CLASSES = 10
GOAL = 0.95
RACE = ("allreduce", "broadcast", "allgather", "reduce_scatter")
RACE_SIZES = (8, 1024, 65536, 1048576)


@dataclass(frozen=True)
class Digits:
    """Images as rows of 65 numbers (8 x 8 pixels and a constant 1), and which digit each one shows."""

    images: Array
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Any) -> Digits:
        return Digits(self.images[indices], self.labels[indices])


def load(seed: int = 7) -> tuple[Digits, Digits]:
    """Scikit-learn's 1797 digits shuffled, as (training set, test set): every fifth one is for testing."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = np.column_stack([raw.data / 16.0, np.ones(len(raw.data))])
    order = np.random.default_rng(seed).permutation(len(images))
    everything = Digits(images[order], raw.target[order].astype(np.int64))
    test = np.arange(len(everything)) % 5 == 0
    return everything.take(~test), everything.take(test)


def probabilities(weights: Array, images: Array) -> Array:
    """Softmax of the scores, one row per image."""
    scores = images @ weights
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def loss_and_gradient(weights: Array, part: Digits, gradient: Array) -> float:
    """Cross entropy summed over `part`; its gradient, summed likewise, is written to `gradient`."""
    guess = probabilities(weights, part.images)
    rows = np.arange(len(part))
    loss = -float(np.log(guess[rows, part.labels]).sum())
    guess[rows, part.labels] -= 1
    np.matmul(part.images.T, guess, out=gradient)
    return loss


def accuracy(weights: Array, data: Digits) -> float:
    """The share of images whose most probable digit is the right one."""
    return float(np.mean(np.argmax(data.images @ weights, axis=1) == data.labels))


@dataclass
class Training:
    """What a training run leaves behind: the weights, and loss and test accuracy after each epoch."""

    weights: Array
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train(
    comm: MPI.Intracomm,
    shard: Digits,
    positions: NDArray[np.int64],
    total: int,
    test: Digits,
    *,
    epochs: int,
    batch: int = 128,
    rate: float = 0.5,
    momentum: float = 0.9,
    bar: Any = None,
) -> Training:
    """Train on the ranks of `comm`, each holding one shard of a training set of `total` images.

    Parameters
    ----------
    comm
        Our communicator.
    shard, positions
        This rank's images, and where each of them stands in the whole training set.
    total
        Images in the whole training set.
    test
        Measured after every epoch, on every rank alike.
    epochs, batch, rate, momentum
        Of stochastic gradient descent; `batch` counts images over all ranks together.
    bar
        A progress bar that is told each epoch's loss and accuracy.

    Returns
    -------
    Training
        The same on all ranks.
    """
    run = Training(np.zeros((shard.images.shape[1], CLASSES)))
    velocity = np.zeros_like(run.weights)
    # One message per step: the gradient, then the loss, then how many images they are sums over.
    mine = np.zeros(run.weights.size + 2)
    joined = np.zeros_like(mine)
    my_gradient = mine[:-2].reshape(run.weights.shape)
    gradient = joined[:-2].reshape(run.weights.shape)
    since = time.perf_counter()
    for epoch in range(epochs):
        turn = np.empty(total, np.int64)  # when each image of the whole set is looked at in this epoch
        turn[np.random.default_rng(epoch).permutation(total)] = np.arange(total)
        my_turns = turn[positions]
        loss = 0.0
        for start in range(0, total, batch):
            part = shard.take((start <= my_turns) & (my_turns < start + batch))
            mine[-2] = loss_and_gradient(run.weights, part, my_gradient)
            mine[-1] = len(part)
            comm.Allreduce(mine, joined)
            velocity *= momentum
            velocity -= rate / joined[-1] * gradient  # shards differ in length: sum everywhere, divide once
            run.weights += velocity
            loss += joined[-2]
        run.losses.append(loss / total)
        run.accuracies.append(accuracy(run.weights, test))
        if bar is not None:
            bar.set_postfix_str(
                f"loss {run.losses[-1]:.3f}, test accuracy {run.accuracies[-1]:.1%}", refresh=False
            )
            bar.update()
    run.seconds = time.perf_counter() - since
    return run


def doze_until(request: MPI.Request) -> None:
    """Wait without keeping a core busy that another rank could use."""
    while not request.Test():
        time.sleep(0.01)


def ranks_in_words(size: int) -> str:
    """1 rank, 2 ranks, ..."""
    return f"{size} rank{'s' * (size != 1)}"


def learn(plain: MPI.Intracomm, comm: MPI.Intracomm, epochs: int) -> tuple[Training, Training | None, bool]:
    """Train on all ranks, then on rank 0 alone, and compare: (together, alone on rank 0, all is well)."""
    rank, size = plain.Get_rank(), plain.Get_size()
    training, test = load()
    positions = np.arange(rank, len(training), size)
    shard = training.take(positions)
    held = plain.gather(len(shard))
    if held is not None:
        say(f"{len(training)} training images, {len(test)} test images, {ranks_in_words(size)}.")
        say(f"Images that each rank holds: {', '.join(map(str, held))}")
    with launch.progress(epochs, "all ranks together", "epoch") as bar:
        together = train(comm, shard, positions, len(training), test, epochs=epochs, bar=bar)

    alone, well = None, True
    if rank == 0:
        with launch.progress(epochs, "rank 0 alone", "epoch") as bar:
            everything = np.arange(len(training))
            single = ours.communicator(MPI.COMM_SELF)
            alone = train(single, training, everything, len(training), test, epochs=epochs, bar=bar)
        apart = float(np.abs(together.weights - alone.weights).max() / np.abs(alone.weights).max())
        same = together.accuracies[-1] == alone.accuracies[-1] and apart < 1e-9
        good = together.accuracies[-1] >= GOAL
        well = same and good
        say()
        say(f"{'':22}{'test accuracy':>14}{'loss':>9}{'seconds':>9}")
        for name, run in ((f"{ranks_in_words(size)} together", together), ("one rank alone", alone)):
            say(f"{name:22}{run.accuracies[-1]:>14.2%}{run.losses[-1]:>9.4f}{run.seconds:>9.2f}")
        say()
        say(f"Test accuracy at least {GOAL:.0%}: {'yes' if good else 'NO'}")
        say(
            f"Same accuracy and weights as one rank alone: {'yes' if same else 'NO'} "
            f"(relative difference {apart:.0e}: the rounding of another order of addition)"
        )
    doze_until(plain.Ibarrier())
    return together, alone, bool(plain.bcast(well))


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
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training set (default 60)")
    parser.add_argument("--seconds", type=float, default=0.2, help="per contestant and race (default 0.2)")
    parser.add_argument("--no-race", action="store_true", help="only learn")
    args = parser.parse_args()
    if args.epochs < 1 or args.seconds < 0:
        parser.error("--epochs must be at least 1 and --seconds must not be negative")

    plain = MPI.COMM_WORLD
    comm = ours.communicator(plain)
    say("1. Learning to read digits, the gradients joined by our Allreduce")
    say()
    together, alone, well = learn(plain, comm, args.epochs)
    pictures = []
    if alone is not None:
        pictures += draw_training(together, alone, plain.Get_size())
    if not args.no_race:
        say()
        say("2. The race: our collectives, written in Python, against those of the MPI library, written in C")
        say()
        report = race(plain, comm, args.seconds)
        well = well and not any(row["wrong"] for row in report["rows"])
        if alone is not None:
            pictures += draw_race(report)
    if pictures:
        say()
        say("Pictures:")
        for picture in pictures:
            say(f"  {picture}")
    return 0 if well else 1


def draw_training(together: Training, alone: Training, ranks: int) -> list[Path]:
    """The training curves as a PNG; nothing if matplotlib is not installed."""
    try:
        from benchlib.plots import plot_training
    except ImportError:
        say("No pictures: matplotlib is not installed (pip install 'chorus-mpi[plot]').")
        return []
    OUT.mkdir(exist_ok=True)
    runs = {f"{ranks_in_words(ranks)} together": together, "one rank alone": alone}
    curves = {name: (run.losses, run.accuracies) for name, run in runs.items()}
    plot_training(OUT / "digits.png", curves, together.weights[:-1].T.reshape(CLASSES, 8, 8), GOAL)
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
