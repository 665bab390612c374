"""Quantise a trained model, and print loss of accuracy and bytes, layer by layer.

chorus quantize --checkpoint out/digits --spec int4_g32 --method gptq --calibrate digits --report
chorus quantize -n 4 --checkpoint out/gpt --spec int8_row --activations int8 -o out/gpt8.safetensors
chorus quantize --checkpoint out/digits --mixed 3 --spec int3_g32 --search milp --pareto out/pareto.png
chorus quantize --load out/gpt8.safetensors

Several ranks share the samples of the calibration and the layers. Any checkpoint of `chorus train` will do, from any
layout.
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import check_writable
from collectives.cli import launcher
from collectives.cli.arguments import numbers
from collectives.cli.launcher import at_least, say
from collectives.selection.timing_file import machine
from collectives.units import format_bytes
from parallel.checkpoint.checkpoint_files import CheckpointError
from parallel.cli.reports.training_output import format_score
from parallel.cli.train_arguments import picture_error
from parallel.data.datasets import LearningTask
from parallel.nn.operator import Operator
from parallel.nn.transforms.quantizable_layers import layers_of
from parallel.ptq import load_model
from parallel.ptq.calibration import calibrate, dealt
from parallel.ptq.evaluation import LayerErrorRow, compare, evaluate
from parallel.ptq.load_model import TrainedModel
from parallel.ptq.mixed_inputs import input_mixture
from parallel.ptq.mixed_precision import SENSITIVITIES, WIDTHS, PrecisionMixture, mixture, options_of
from parallel.ptq.packed_weights import nbytes
from parallel.ptq.quantize_model import METHODS, check, quantise, with_inputs
from parallel.ptq.tuning import FineTuning, tune_levels, tune_weights
from parallel.runtime.collective_errors import collective_call
from parallel.trainer.records import EvalScore
from quant import PRESETS, PerChannel, PerGroup, QuantSpec, parse
from quant.observers import OBSERVERS
from quant.search import SEARCHES, Choice

BATCH = 64  # samples of a batch: the same on any number of ranks, so that sums over batches are equal
STEPS = 4  # budgets between two widths of the curve

OF_MIXED, OF_SEARCH = ("sensitivity", "pareto"), ("search", "widths")
OF_CHECKPOINT = ("spec", "method", "tune", "activations", "observer", "calibrate", "samples", "mixed", "report")
NEEDED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("checkpoint",): (*OF_CHECKPOINT, "output", "mixed_inputs", *OF_MIXED, *OF_SEARCH),
    ("mixed",): OF_MIXED,
    ("mixed", "mixed_inputs"): OF_SEARCH,
    ("activations",): ("observer", "mixed_inputs"),
}
"""Options that are refused unless one of those before the colon is given."""


USUAL = ("checkpoint", "load", "spec", "method", "activations", "calibrate", "samples", "tune", "report", "output")
"""Options in --help. --help-all has the others."""


def parser() -> launcher.LauncherParser:
    result = launcher.LauncherParser(__doc__, USUAL, usage="%(prog)s (--checkpoint DIR | --load FILE) [options]")
    source = result.add_mutually_exclusive_group(required=True).add_argument
    source("--checkpoint", type=Path, metavar="DIR", help="checkpoint of chorus train, or a folder: its newest")
    source("--load", type=Path, metavar="FILE", help="test a model that -o has written")

    add = result.add_argument_group("number formats").add_argument
    names = f"{', '.join(PRESETS)}; intB or kmeansB, then _gN (groups), _row (a scale per row), _zero (zero points)"
    add("--spec", default="int8", metavar="NAME", help=f"format of weights: {names} (default int8)")
    add("--method", default="rtn", choices=list(METHODS), help="rounding of weights (default rtn: to the nearest)")
    add("--activations", metavar="NAME", help="format of layer inputs, as int8 or int8_zero (default: float32)")
    add("--observer", default="minmax", choices=list(OBSERVERS), help="range of the inputs (default minmax)")
    add("--calibrate", metavar="DATA", help="calibration data, as for chorus train (default: those of the training)")
    add("--samples", type=at_least(1, int), default=512, metavar="N", help="calibration samples (default 512)")

    tune = "epochs of training with the weights rounded to their codes (kmeans: of the levels, with fixed codes)"
    add("--tune", type=at_least(1, int), metavar="N", help=tune)

    add = result.add_argument_group("a width for each layer").add_argument
    add("--mixed", type=float, metavar="BITS", help="bytes of --spec in so many bits, which may be a fraction")
    add("--mixed-inputs", type=float, metavar="BITS", help="bits of the inputs of all layers, on the average")
    add("--search", default="milp", choices=list(SEARCHES), help="default milp")
    add("--sensitivity", default="loss", choices=list(SENSITIVITIES), help="weight of a layer's error (default loss)")
    add("--widths", type=numbers, default=list(WIDTHS), metavar="B,B", help="widths of a layer (default 2 to 8)")
    add("--pareto", type=Path, metavar="PNG", help="picture of uniform widths and of the search's choices")

    add = result.add_argument_group("output").add_argument
    add("--report", action="store_true", help="print errors by layer")
    add("-o", "--output", type=Path, metavar="FILE", help="write the quantised model as safetensors")
    return result


def argument_error(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    for needed, names in NEEDED.items():
        for name in names if all(getattr(args, one) is None for one in needed) else ():
            if getattr(args, name) != parser.get_default(name):
                options = [f"--{one.replace('_', '-')}" for one in (name, *needed)]
                return f"{options[0]} needs {' or '.join(options[1:])}, and would do nothing without it"
    return picture_error("--pareto", args.pareto)


def spec_of(option: str, text: str) -> QuantSpec:
    """Parse the quantisation spec `text`, given to the command-line option `option`. ValueError names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def model_score(comm: Communicator, trained: TrainedModel, model: Operator) -> EvalScore:
    mine = dealt(trained.task.test, len(trained.task.test), BATCH, comm.rank, comm.size)
    return EvalScore.of(evaluate(model, trained.loss, mine, comm, trained.measure), trained.task)


def score_text(score: EvalScore) -> str:
    return format_score(score) + (f", loss {score.loss:.4f}" if score.accuracy is not None else "")


def print_layers(rows: Sequence[LayerErrorRow], specs: Sequence[str]) -> None:
    wide = max(len("layer"), *(len(row.name) for row in rows))
    kind = max(len("spec"), *map(len, specs))
    say(
        f"{'layer':<{wide}}  {'matrix':>11}  {'spec':<{kind}}  {'bits':>5}  {'bytes':>9}  {'float32':>9}"
        "  error of: weights  outputs (alone)  (all)"
    )
    for row, spec in zip(rows, specs):
        sizes = format_bytes(row.nbytes), format_bytes(row.before)
        errors = ["-" if math.isnan(one) else f"{one:.2%}" for one in (row.weights, row.outputs, row.arriving)]
        say(
            f"{row.name:<{wide}}  {f'{row.shape[0]} x {row.shape[1]}':>11}  {spec:<{kind}}  {row.bits:>5.2f}"
            f"  {sizes[0]:>9}  {sizes[1]:>9}  {errors[0]:>17}  {errors[1]:>15}  {errors[2]:>5}"
        )


def short_name(spec: QuantSpec) -> str:
    """Name of a spec: the preset's, otherwise one that `quant.parse` accepts (linear, k-means), otherwise the code's.

    Names of linear codes give bits, groups or rows, and zero points. Rounding and types of scales are left out.

    >>> short_name(parse("int3_g64")), short_name(parse("nf4")), short_name(parse("nf4").replace(scale="fp16"))
    ('int3_g64', 'NF4', 'nf4')
    """
    for name, preset in PRESETS.items():
        if spec == preset:
            return name
    if not spec.linear and spec.code != "kmeans":
        return spec.code
    text = f"{'int' if spec.linear else spec.code}{spec.bits}"
    text += f"_g{spec.granularity.size}" if isinstance(spec.granularity, PerGroup) else ""
    text += "_row" * isinstance(spec.granularity, PerChannel)
    return text + "_zero" * (not spec.symmetric)


class QuantizeJob(NamedTuple):
    """Trained model to quantise, specs and command-line options, and this rank's calibration batches (`mine`)."""

    comm: Communicator
    args: argparse.Namespace
    trained: TrainedModel
    spec: QuantSpec
    activations: QuantSpec | None
    mine: list[Any]

    def score_text(self, model: Operator) -> str:
        return score_text(model_score(self.comm, self.trained, model))


def mixture_of(job: QuantizeJob) -> PrecisionMixture:
    args, spec, model = job.args, job.spec, job.trained.model
    layers = layers_of(model)
    check(layers, spec, args.method, job.activations, args.observer)
    specs = options_of(spec, args.widths)
    seen = {} if METHODS[args.method].blind else calibrate(model, layers, job.mine, job.comm)
    estimate = SENSITIVITIES[args.sensitivity](model, job.trained.loss, layers, job.mine, job.comm)
    return mixture(model, layers, specs, seen, args.method, estimate, job.comm)


def draw_pareto(job: QuantizeJob, mixed: PrecisionMixture) -> None:
    """Plot test results against bits per weight: uniform widths, and the searched mixtures of widths. Collective."""
    from parallel.cli.reports.training_plots import ParetoPoint, plot_pareto

    args, trained = job.args, job.trained

    def point(bits: float, model: Operator, name: str = "") -> ParetoPoint:
        score = model_score(job.comm, trained, model)
        return ParetoPoint(bits, score.loss, score.accuracy, name)

    def quantised(choice: Choice, name: str = "") -> ParetoPoint:
        return point(mixed.bits(choice), mixed.chosen(choice), name)

    widths = sorted(set(args.widths))
    alike = {width: mixed.uniform(job.spec.replace(bits=width)) for width in widths}
    uniform = [quantised(choice, f"{width}") for width, choice in alike.items() if mixed.has(choice)]
    budgets = [low + (high - low) * i / STEPS for low, high in pairwise(widths) for i in range(STEPS)]
    choices = {mixed.choose(args.search, mixed.budget(job.spec, bits), job.comm) for bits in [*budgets, widths[-1]]}
    curve = [quantised(choice) for choice in sorted(choices)]
    whole = point(32.0, trained.model, "float32")
    title = f"{trained.settings.model} on {trained.task.name}, {args.method}, bits by {args.search} on "
    draw = partial(plot_pareto, args.pareto, uniform, curve, whole, title + args.sensitivity, machine())
    collective_call(job.comm, draw, f"{args.pareto} was not drawn", root=0)
    say(f"{args.pareto} drawn")


def search_widths(job: QuantizeJob) -> tuple[Operator, list[QuantSpec]]:
    """Choose each layer's bit width, print (and plot) results. Returns quantised model, spec by layer. Collective."""
    args, mixed = job.args, mixture_of(job)
    choice = mixed.choose(args.search, mixed.budget(job.spec, args.mixed), job.comm)
    if args.mixed in args.widths and mixed.has(same := mixed.uniform(job.spec.replace(bits=int(args.mixed)))):
        text = job.score_text(mixed.chosen(same))
        say(f"{short_name(mixed.specs[same[0]])} for all: {text}, {mixed.bits(same):.3f} bits a weight")
    say(f"mixed by {args.search}: {job.score_text(mixed.chosen(choice))}, {mixed.bits(choice):.3f} bits a weight")
    if args.pareto:
        draw_pareto(job, mixed)
    return mixed.chosen(choice), [mixed.specs[at] for at in choice]


def tuned(job: QuantizeJob, made: Operator, specs: list[QuantSpec], data: LearningTask) -> Operator:
    """Train a model for its format, by layer: levels of k-means with the codes of `made`, else weights. Collective."""
    settings = job.trained.settings
    tuning = FineTuning(job.args.tune, settings.batch, settings.seed, settings)
    if job.spec.code == "kmeans":
        return tune_levels(job.trained.model, made, data, job.comm, tuning)
    return tune_weights(job.trained.model, specs, data, job.comm, tuning)


def round_inputs(job: QuantizeJob, made: Operator, spec: QuantSpec) -> Operator:
    """Quantise the inputs of all layers of a quantised model, in chosen widths if so asked for. Collective."""
    args = job.args
    alike = with_inputs(made, spec, args.observer, job.mine, job.comm)
    if args.mixed_inputs is None:
        return alike
    mixed = input_mixture(made, job.trained.loss, spec, args.widths, args.observer, job.mine, job.comm)
    choice = mixed.choose(args.search, args.mixed_inputs, job.comm)
    say(f"inputs in {args.activations} for all: {job.score_text(alike)}")
    say("bits of inputs: " + ", ".join(f"{name} {mixed.specs[at].bits}" for name, at in zip(mixed.names, choice)))
    return mixed.chosen(choice)


def quantize(comm: Communicator, args: argparse.Namespace) -> None:
    """Quantise a checkpoint's model, print test results, and write the model and plots as asked for. Collective."""
    spec = spec_of("--spec", args.spec)
    if args.tune is not None and spec.code != "kmeans" and args.method != "rtn":
        raise ValueError(
            f"--tune: weights trained in codes {spec.code} are rounded by rtn, found --method {args.method}"
        )
    activations = spec_of("--activations", args.activations) if args.activations else None
    trained = load_model.from_checkpoint(comm, args.checkpoint)
    for path in filter(None, (args.pareto, args.output)):  # an error here, not after the work
        collective_call(comm, partial(check_writable, path), f"{path} cannot be written", root=0)
    data = load_model.task_for(comm, trained, args.calibrate or trained.settings.data)
    mine = dealt(data.train, args.samples, BATCH, comm.rank, comm.size)
    job = QuantizeJob(comm, args, trained, spec, activations, mine)
    layers, name = layers_of(trained.model), f"{trained.settings.model} on {trained.task.name}"
    shown = min(args.samples, len(data.train))
    say(f"{name}: {len(layers)} layers, calibrated on {shown} samples of {data.name}")
    say(f"float32: {job.score_text(trained.model)}, {format_bytes(nbytes(trained.model))}")
    if args.mixed is None:
        check(layers, spec, args.method, activations, args.observer)  # search_widths has its own
        made, specs = quantise(trained.model, spec, mine, comm, method=args.method), [spec] * len(layers)
    else:
        made, specs = search_widths(job)
    text = f"{args.spec if args.mixed is None else 'mixed'}, {args.method}"
    if args.tune is not None:
        say(f"{text}: {job.score_text(made)}")
        made, text = tuned(job, made, specs, data), f"{text}, tuned"
    # after the tuning, which changes the ranges of the inputs
    made = made if activations is None else round_inputs(job, made, activations)
    text += f", inputs in {args.activations if args.mixed_inputs is None else 'mixed'}" if args.activations else ""
    smaller = nbytes(trained.model) / nbytes(made)
    say(f"{text}: {job.score_text(made)}, {format_bytes(nbytes(made))} ({smaller:.2f} times less)")
    if args.report:
        rows = compare(trained.model, made, layers, mine, comm)
        print_layers(rows, [short_name(METHODS[args.method].spec(one)) for one in specs])
    if args.output:
        save = partial(load_model.save, args.output, trained, made)
        collective_call(comm, save, f"{args.output} was not written", root=0)
        say(f"{args.output} written")


def main(argv: list[str] | None = None) -> int:
    """Quantise a trained model (--checkpoint), or test an already quantised one (--load). Exit status 2 on errors."""
    made = parser()
    args = made.parse_args(argv)
    if problem := argument_error(made, args):
        made.error(problem)
    comm = Communicator(MPI.COMM_WORLD)
    try:
        if args.load is None:
            quantize(comm, args)
        else:
            loaded = collective_call(comm, partial(load_model.load, args.load), f"{args.load} cannot be used")
            text = score_text(model_score(comm, loaded, loaded.model))
            say(f"{loaded.settings.model} on {loaded.task.name}: {text}, {format_bytes(nbytes(loaded.model))}")
    except (CheckpointError, ValueError, ImportError, OSError) as error:
        made.error(str(error))
    return 0
