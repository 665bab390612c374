"""Compare models that are made small after training with models that are trained small, over several seeds.

mpiexec -n 2 python tests/studies/compare_small_models.py --model convnet --specs int4,int2_g32 --seeds 0:5 --tune 10
mpiexec -n 2 python tests/studies/compare_small_models.py --prune 0.5,0.8,0.9 --pattern elements --plot out/pruned.png
mpiexec -n 2 python tests/studies/compare_small_models.py --products fp8,mxfp8 --seeds 3 --methods trained

Settings are those of `chorus train` for the data and model. Methods: plain training; after it, weights rounded to the
nearest (rtn) or by gptq, trained for their format (tuned), or pruned by magnitude; and training with fake quantisation,
products or pruning (trained).
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from recipes import add_recipe, recipe_settings

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.arguments import numbers
from collectives.cli.launcher import at_least, say
from collectives.selection.timing_file import machine
from parallel.cli.train_arguments import picture_error
from parallel.engine.settings import Settings
from parallel.nn.operator import Operator
from parallel.nn.transforms.quantizable_layers import layers_of
from parallel.ptq.calibration import dealt
from parallel.ptq.evaluation import evaluate
from parallel.ptq.quantize_model import quantise
from parallel.ptq.tuning import FineTuning, tune_weights
from parallel.trainer.model_transforms import prune
from parallel.trainer.records import EvalScore
from parallel.trainer.task_setup import loss_of, measure_of
from parallel.trainer.trainer import Training
from quant import parse

BATCH, SAMPLES = 64, 512  # of calibration and test


class Variant(NamedTuple):
    """A way to make a model small: its group (spec, products, or pattern), its method, and the pruned fraction."""

    group: str
    method: str
    sparsity: float = 0.0

    def __str__(self) -> str:
        return f"{self.group} {self.sparsity:.0%}" if self.sparsity else self.group


PLAIN = Variant("stored", "plain")

ROUNDING = ("rtn", "gptq")  # methods of rounding after training

METHODS = ("plain", *ROUNDING, "tuned", "magnitude", "trained")


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def variants(args: argparse.Namespace) -> dict[Variant, dict[str, Any]]:
    """Variants that the options select, each with the settings by which it is trained."""
    pruned = [(one, {"prune": one, "prune_pattern": args.pattern}) for one in args.prune]
    found: dict[Variant, dict[str, Any]] = {PLAIN: {}}
    found |= {Variant(spec, method): {} for spec in args.specs for method in ROUNDING}
    found |= {Variant(spec, "tuned"): {} for spec in args.specs if args.tune}
    found |= {Variant(args.pattern, "magnitude", one): {} for one in args.prune}
    found |= {Variant(spec, "trained"): {"fake_quant": spec} for spec in args.specs}
    found |= {Variant(products, "trained"): {"products": products} for products in args.products}
    found |= {Variant(args.pattern, "trained", one): change for one, change in pruned}
    return {variant: change for variant, change in found.items() if variant.method in args.methods}


def scores(
    comm: Communicator, base: Settings, chosen: dict[Variant, dict[str, Any]], tune: int
) -> Iterator[tuple[Variant, EvalScore]]:
    """Train with one seed; yield the score of every variant as it is known. `tune` is in epochs. Collective."""
    later = [variant for variant in chosen if variant.method != "trained"]
    if later:
        with Training(base, comm) as training:
            plain, score = _trained(training), _scorer(training, comm, tune)
            for variant in later:
                yield variant, plain if variant == PLAIN else score(variant)
    for variant, change in chosen.items():
        if variant not in later:
            with Training(replace(base, **change), comm) as training:
                yield variant, _trained(training)


def _trained(training: Training) -> EvalScore:
    for _ in training.run():
        pass
    return training.score()


def _scorer(training: Training, comm: Communicator, tune: int) -> Callable[[Variant], EvalScore]:
    """Function that tests a trained model made small after its training; leaves the model unchanged. Collective."""
    model, task = training.model, training.task
    samples = dealt(task.train, SAMPLES, BATCH, comm.rank, comm.size)
    test = dealt(task.test, len(task.test), BATCH, comm.rank, comm.size)

    def score(made: Operator) -> EvalScore:
        return EvalScore.of(evaluate(made, loss_of(task), test, comm, measure_of(task)), task)

    def small(variant: Variant) -> EvalScore:
        if variant.method == "tuned":
            specs = [parse(variant.group)] * len(layers_of(model))
            tuning = FineTuning(tune, training.settings.batch, training.settings.seed)
            return score(tune_weights(model, specs, task, comm, tuning))
        if variant.method in ROUNDING:
            return score(quantise(model, parse(variant.group), samples, comm, method=variant.method))
        before = {parameter: parameter.data for parameter in model.parameters()}
        prune(model, replace(training.settings, prune=variant.sparsity, prune_pattern=variant.group), 0, 0)
        try:
            return score(model)
        finally:
            for parameter, data in before.items():
                parameter.data = data

    return small


def row(variant: Variant, found: Sequence[EvalScore]) -> str:
    """Line of the table: variant, means over the seeds, and the worst."""
    losses = [score.loss for score in found]
    right = [100 * score.accuracy for score in found if score.accuracy is not None]
    accuracy = f"{np.mean(right):.2f} | {min(right):.2f}" if right else " | "
    return f"| {variant} | {variant.method} | {np.mean(losses):.4f} | {accuracy} |"


def arguments() -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add_recipe(parser)
    add = parser.add_argument
    add("--seeds", type=numbers, default=[0], metavar="LIST", help="as in 3,4 or 0:5 (default 0)")
    add("--methods", type=words, default=list(METHODS), metavar="NAME,...", help=f"some of {', '.join(METHODS)}")
    add("--specs", type=words, default=[], metavar="SPEC,...", help="formats of weights")
    add("--tune", type=at_least(1, int), default=0, metavar="N", help="epochs of training the rounded weights")
    add("--products", type=words, default=[], metavar="NAME,...", help="formats of products")
    add("--prune", type=lambda text: [float(word) for word in words(text)], default=[], metavar="S,...")
    add("--pattern", default="elements", metavar="P", help="pattern of pruned weights (default elements)")
    add("--plot", type=Path, metavar="FILE", help="accuracy by pruned fraction as a picture")
    args = parser.parse_args()
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"--methods: expected some of {', '.join(METHODS)}, found {', '.join(sorted(unknown))}")
    if args.tune and not args.specs:
        parser.error("--tune: expected --specs, the formats to train for")
    if args.plot and not (args.prune and {"plain", "magnitude", "trained"} <= set(args.methods)):
        parser.error("--plot: expected --prune, and the methods plain, magnitude and trained")
    if problem := picture_error("--plot", args.plot):
        parser.error(problem)
    return args


def main() -> int:
    """Train all variants with every seed; print a line for each, then a table of mean test losses and accuracies."""
    args = arguments()
    comm = Communicator(MPI.COMM_WORLD)
    base, found = recipe_settings(args, comm), dict[Variant, list[EvalScore]]()
    for seed in args.seeds:
        for variant, score in scores(comm, replace(base, seed=seed), variants(args), args.tune):
            found.setdefault(variant, []).append(score)
            right = "" if score.accuracy is None else f", {100 * score.accuracy:.2f} % right"
            say(f"seed {seed}, {variant} {variant.method}: test loss {score.loss:.4f}{right}")
    say("| format or pattern | made | test loss | accuracy, mean | least |")
    say("| --- | --- | --- | --- | --- |")
    for variant, some in found.items():
        say(row(variant, some))
    if args.plot and comm.Get_rank() == 0:
        _draw(args, found)
        say(f"{args.plot} drawn")
    return 0


def _draw(args: argparse.Namespace, found: dict[Variant, list[EvalScore]]) -> None:
    from study_plots import plot_pruning

    def mean(variant: Variant) -> float:
        return float(np.mean([math.nan if score.accuracy is None else score.accuracy for score in found[variant]]))

    curves = {
        name: [(fraction, mean(Variant(args.pattern, method, fraction))) for fraction in args.prune]
        for name, method in (("after training", "magnitude"), ("in training", "trained"))
    }
    plot_pruning(args.plot, curves, mean(PLAIN), f"{args.model} on {args.data}, {args.pattern} pruned", machine())


if __name__ == "__main__":
    launcher.run(main)
