"""Compare models that are made small after training with models that are trained small, over several seeds.

mpiexec -n 2 python scripts/compare_small_models.py --model convnet --specs int4_g32,int2_g32 --seeds 5
mpiexec -n 2 python scripts/compare_small_models.py --prune 0.5,0.8,0.9 --pattern elements --plot out/pruned.png
mpiexec -n 2 python scripts/compare_small_models.py --products fp8,mxfp8

Settings are those of `chorus train` for the data and model. After training, weights are rounded to the nearest (rtn) or
by gptq, and pruned by magnitude; trained are fake quantisation and pruning as in `chorus train`.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import say
from collectives.selection.timing_file import machine
from parallel.benchmark.workload import COUNT, add_recipe, recipe_settings
from parallel.cli.train_arguments import picture_error
from parallel.engine.settings import Settings
from parallel.nn.operator import Operator
from parallel.ptq.calibration import dealt
from parallel.ptq.evaluation import evaluate
from parallel.ptq.quantize_model import quantise
from parallel.trainer.records import EvalScore
from parallel.trainer.task_setup import loss_of, measure_of
from parallel.trainer.trainer import Training
from parallel.transforms.apply import prune
from quant import parse

BATCH, SAMPLES = 64, 512  # of calibration and test

METHODS = ("rtn", "gptq")  # of rounding after training


class Variant(NamedTuple):
    """A way to make a model small: its group (spec, products, or pattern), its method, and the pruned fraction."""

    group: str
    method: str
    sparsity: float = 0.0


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def scores(comm: Communicator, base: Settings, args: argparse.Namespace) -> Iterator[tuple[Variant, EvalScore]]:
    """Train with one seed; yield the score of every variant. Collective."""
    with Training(base, comm) as training:
        yield Variant("stored", "trained"), _trained(training)
        model, task = training.model, training.task
        samples = dealt(task.train, SAMPLES, BATCH, comm.rank, comm.size)

        def score(made: Operator) -> EvalScore:
            test = dealt(task.test, len(task.test), BATCH, comm.rank, comm.size)
            return EvalScore.of(evaluate(made, loss_of(task), test, comm, measure_of(task)), task)

        for spec in args.specs:
            for method in METHODS:
                yield Variant(spec, method), score(quantise(model, parse(spec), samples, comm, method=method))
        before = {parameter.name: parameter.data.copy() for parameter in model.parameters()}
        for sparsity in args.prune:
            prune(model, replace(base, prune=sparsity, prune_pattern=args.pattern), 0, 0)
            yield Variant(args.pattern, "after training", sparsity), score(model)
            for parameter in model.parameters():
                parameter.data = before[parameter.name]
    changes = {Variant(spec, "trained"): {"fake_quant": spec} for spec in args.specs}
    changes |= {Variant(products, "trained"): {"products": products} for products in args.products}
    for sparsity in args.prune:
        changes[Variant(args.pattern, "trained", sparsity)] = {"prune": sparsity, "prune_pattern": args.pattern}
    for variant, change in changes.items():
        with Training(replace(base, **change), comm) as training:
            yield variant, _trained(training)


def _trained(training: Training) -> EvalScore:
    for _ in training.run():
        pass
    return training.score()


def row(variant: Variant, found: Sequence[EvalScore]) -> str:
    """Line of the table: variant, means over the seeds, and the worst."""
    losses = [score.loss for score in found]
    right = [100 * score.accuracy for score in found if score.accuracy is not None]
    accuracy = f"{np.mean(right):.2f} | {min(right):.2f}" if right else " | "
    pruned = f" {variant.sparsity:.0%}" if variant.sparsity else ""
    return f"| {variant.group}{pruned} | {variant.method} | {np.mean(losses):.4f} | {accuracy} |"


def main() -> int:
    """Train all variants with every seed; print a table of mean test losses and accuracies, and perhaps plot them."""
    parser = launcher.LauncherParser(__doc__)
    add_recipe(parser)
    add = parser.add_argument
    add("--seeds", type=COUNT, default=1, metavar="N", help="models of each variant, seeds 0 to N - 1 (default 1)")
    add("--specs", type=words, default=[], metavar="SPEC,...", help="formats of weights")
    add("--products", type=words, default=[], metavar="NAME,...", help="formats of products")
    add("--prune", type=lambda text: [float(word) for word in words(text)], default=[], metavar="S,...")
    add("--pattern", default="elements", metavar="P", help="pattern of pruned weights (default elements)")
    add("--plot", type=Path, metavar="FILE", help="accuracy by pruned fraction as a picture")
    args = parser.parse_args()
    if problem := picture_error("--plot", args.plot):
        parser.error(problem)
    comm = Communicator(MPI.COMM_WORLD)
    base, found = recipe_settings(args, comm), dict[Variant, list[EvalScore]]()
    for seed in range(args.seeds):
        for variant, score in scores(comm, replace(base, seed=seed), args):
            found.setdefault(variant, []).append(score)
    say("| format or pattern | made | test loss | accuracy, mean | least |")
    say("| --- | --- | --- | --- | --- |")
    for variant, some in found.items():
        say(row(variant, some))
    if args.plot and comm.Get_rank() == 0:
        _draw(args, found)
        say(f"{args.plot} drawn")
    return 0


def _draw(args: argparse.Namespace, found: dict[Variant, list[EvalScore]]) -> None:
    from parallel.benchmark.training_plots import plot_pruning

    def mean(variant: Variant) -> float:
        return float(np.mean([math.nan if score.accuracy is None else score.accuracy for score in found[variant]]))

    methods = ("after training", "trained")
    curves = {
        way: [(fraction, mean(Variant(args.pattern, way, fraction))) for fraction in args.prune] for way in methods
    }
    title = f"{args.model} on {args.data}, {args.pattern} pruned"
    plot_pruning(args.plot, curves, mean(Variant("stored", "trained")), title, machine())
