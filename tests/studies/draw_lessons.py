"""Draw pictures of docs/lessons that no command of `chorus` draws.

python tests/studies/draw_lessons.py -o docs/images
"""

import argparse
import importlib
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from parallel.cli.reports.timelines import COLOURS, INK
from parallel.cli.reports.training_plots import picture

COMPUTE, NETWORK, WEIGHTS = COLOURS["F"][0], COLOURS["B"][0], COLOURS["W"][0]


def box(axis: Axes, x: float, y: float, width: float, text: str, colour: str, height: float = 0.8) -> None:
    """A filled box with white text; y is that of its lower edge."""
    axis.bar(x, height, width, y, align="edge", color=colour, edgecolor="white", lw=1.5)
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=8)


def plain(axis: Axes, names: list[str]) -> None:
    """Rows with names, the first one at the top, and no frame."""
    axis.set(ylim=(len(names), -0.2), xticks=[], frame_on=False)
    axis.set_yticks([row + 0.4 for row in range(len(names))], names)
    axis.tick_params(length=0)
    axis.grid(visible=False)


def zero3(path: Path) -> None:
    """One step of three layers on one rank: computations, messages, and the layers whose W exists."""
    order = [("F", layer) for layer in range(3)] + [("B", layer) for layer in (2, 1, 0)]
    with picture(path, (11, 3.0), 1, "ZeRO-3: one step of three layers, on each rank") as (axis,):
        plain(axis, ["messages", "computing", "whole W", "own shards"])
        now = 0.0
        for kind, layer in order:
            box(axis, now, 0, 1, f"gather\nW{layer}", NETWORK)
            length = 1.0 if kind == "F" else 2.0
            box(axis, now + 1, 1, length, f"{'forward' if kind == 'F' else 'backward'}\n{layer}", COMPUTE)
            box(axis, now, 2, 1 + length, f"W{layer}", WEIGHTS)
            now += 1 + length
            if kind == "B":
                box(axis, now, 0, 1, "reduce-\nscatter", COLOURS["BW"][0])
                now += 1
        box(axis, now, 1, 1, "Adam", COLOURS["U"][0])
        box(axis, 0, 3, now + 1, "1/p of weights, gradients and Adam's two moments, of all layers", INK)
        axis.set_xlim(0, now + 1)


def bucketed_ddp(path: Path) -> None:
    """Backward pass of five layers with an allreduce per bucket, and with one allreduce after it."""
    with picture(path, (11, 2.9), 1, "Backward pass of five layers, and the sums of their gradients") as (axis,):
        plain(axis, ["backward", "3 buckets", "1 bucket"])
        for place, layer in enumerate((4, 3, 2, 1, 0)):
            box(axis, place, 0, 1, f"dW{layer}", COMPUTE)
        box(axis, 2, 1, 1.5, "allreduce dW4 dW3", NETWORK)
        box(axis, 4, 1, 1.5, "allreduce dW2 dW1", NETWORK)
        box(axis, 5.5, 1, 0.8, "allr. dW0", NETWORK)
        box(axis, 5, 2, 3.4, "allreduce dW4 dW3 dW2 dW1 dW0", NETWORK)
        axis.set_xlim(0, 8.6)


def tensor_parallel_mlp(path: Path) -> None:
    """Parts of A and B on two ranks, with f and g."""
    with picture(path, (11, 3.2), 1, "Tensor-parallel MLP on two ranks: z = relu(x A) B") as (axis,):
        plain(axis, ["rank 0", "rank 1"])
        for rank in range(2):
            texts = ("x", f"A{rank}\ncolumns", "relu", f"B{rank}\nrows", "z")
            for place, text in enumerate(texts):
                whole = text in "xz"
                box(axis, 2 * place, rank, 1, text, INK if whole else WEIGHTS if text != "relu" else COMPUTE)
                if place < 4:
                    arrow = {"arrowstyle": "-|>", "color": INK}
                    axis.annotate("", (2 * place + 2, rank + 0.4), (2 * place + 1, rank + 0.4), arrowprops=arrow)
        exchanges = (
            (1.5, "f", "forward: nothing\nbackward: allreduce"),
            (7.5, "g", "forward: allreduce\nbackward: nothing"),
        )
        for x, name, text in exchanges:
            axis.bar(x - 0.12, 1.8, 0.24, 0, align="edge", color=NETWORK)
            axis.text(x, 0.9, name, ha="center", va="center", color="white", fontweight="bold")
            axis.text(x, 1.9, text, ha="center", va="top", fontsize=8, color=INK)
        axis.set(xlim=(0, 9), ylim=(2.3, -0.2))


def gptq(path: Path) -> None:
    """Error of the layer's output after each input, by GPTQ and by rounding to nearest."""
    lesson = importlib.import_module("gptq")
    random = np.random.default_rng(0)
    w = random.normal(size=(12, 16))
    x = random.normal(size=(64, 4)) @ random.normal(size=(4, 16)) + 0.3 * random.normal(size=(64, 16))
    q = lesson.gptq(w, lesson.cholesky_of_inverse(x.T @ x))
    rounded = lesson.nearest(w.T, np.abs(w).max(axis=1) / 7).T
    with picture(path, (11, 3.6), 2, "GPTQ: 12 x 16 weights of 4 bits, 64 correlated inputs") as axes:
        for name, one, colour in ("rounded to nearest", rounded, NETWORK), ("GPTQ", q, COMPUTE):
            errors = [(one - w)[:, : j + 1] for j in range(16)]
            sums = [np.sum((x[:, : j + 1] @ part.T) ** 2) for j, part in enumerate(errors)]
            axes[0].plot(range(1, 17), [np.sum(part**2) for part in errors], color=colour, label=name)
            axes[1].plot(range(1, 17), sums, color=colour, label=name)
        axes[0].set(title="squared error of the weights", xlabel="inputs rounded", ylim=0)
        axes[1].set(title="squared error of the output", xlabel="inputs rounded", ylim=0)
        axes[0].legend(frameon=False)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder of the pictures")
    folder = command.parse_args().output
    for draw in zero3, bucketed_ddp, tensor_parallel_mlp, gptq:
        draw(folder / f"lesson_{draw.__name__}.png")


if __name__ == "__main__":
    main()
