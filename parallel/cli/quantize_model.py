"""Quantise a trained model, and print the loss of accuracy and the bytes, layer by layer.

chorus quantize --checkpoint out/digits --spec int4_g32 --method gptq --calibrate digits --report
chorus quantize -n 4 --checkpoint out/gpt --spec int8_row --activations int8 -o out/gpt8.safetensors
chorus quantize --checkpoint out/digits --mixed 3 --spec int3_g32 --search milp --pareto out/pareto.png
chorus quantize --load out/gpt8.safetensors

Several ranks share the samples of the calibration and the layers. Any checkpoint of `chorus train` will do, whatever
layout wrote it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import at_least, say
from collectives.cli.writable_files import PICTURES, check_writable
from collectives.selection.timing_file import machine as machine_in_words
from parallel.benchmark.training_output import score_in_words
from parallel.checkpoint.checkpoint_files import CheckpointError
from parallel.nn.operator import Operator
from parallel.ptq import load_model
from parallel.ptq.calibration import OBSERVERS, calibrate, dealt
from parallel.ptq.evaluation import LayerErrorRow, compare, evaluate
from parallel.ptq.load_model import TrainedModel
from parallel.ptq.methods import METHODS
from parallel.ptq.mixed_precision import COSTS, WIDTHS, MixtureOptions, PrecisionMixture, mixture, options_of
from parallel.ptq.packed_weights import nbytes
from parallel.ptq.quantizable_layers import layers_of
from parallel.ptq.quantize_model import check, quantise, with_inputs
from parallel.ptq.sensitivity import SENSITIVITIES
from parallel.runtime.collective_errors import collective_call
from parallel.trainer.trainer import EvalScore
from quant import PRESETS, PerChannel, PerGroup, QuantSpec, parse
from quant.search import SEARCHES, Choice

BATCH = 64
"""Samples of a batch: the same on any number of ranks, which keeps sums over batches equal."""

STEPS = 4
"""Budgets between two widths of the curve."""

PICTURE = Path("out/quantised.png")
"""Default of --plot."""

OF_MIXED = ("search", "sensitivity", "cost", "widths", "groups", "pareto")
OF_CHECKPOINT = ("spec", "method", "activations", "observer", "calibrate", "samples", "mixed", "report", "output")
NEEDED = {"checkpoint": OF_CHECKPOINT + OF_MIXED, "mixed": OF_MIXED, "activations": ("observer",)}
"""Options without effect unless another one is given."""


def numbers(text: str) -> list[int]:
    """Argument type: integers separated by commas.

    >>> numbers("2,4,8")
    [2, 4, 8]
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers as in 2,4,8, found {text!r}") from None


def parser() -> launcher.LauncherParser:
    made = launcher.LauncherParser(__doc__, usage="%(prog)s (--checkpoint DIR | --load FILE) [options]")
    source = made.add_mutually_exclusive_group(required=True).add_argument
    source("--checkpoint", type=Path, metavar="DIR", help="of chorus train: the newest in it, or one of them")
    source("--load", type=Path, metavar="FILE", help="test what -o has written")

    add = made.add_argument_group("how many bits").add_argument
    names = f"{', '.join(PRESETS)}; intB, and behind it _gN (groups), _row (a scale a row), _zero (zero points)"
    add("--spec", default="int8", metavar="NAME", help=f"of weights: {names} (default int8)")
    add("--method", default="rtn", choices=list(METHODS), help="how weights are rounded (default rtn: to the nearest)")
    add("--activations", metavar="NAME", help="of the inputs of layers, as int8 or int8_zero (default: as they are)")
    add("--observer", default="minmax", choices=list(OBSERVERS), help="how their range is found (default minmax)")
    add("--calibrate", metavar="DATA", help="samples to calibrate on, as for train.py (default: those of the training)")
    add("--samples", type=at_least(1, int), default=512, metavar="N", help="how many of them (default 512)")

    add = made.add_argument_group("a width for each layer").add_argument
    add("--mixed", type=float, metavar="BITS", help="cost what --spec would in so many bits, which may be a fraction")
    add("--search", default="milp", choices=list(SEARCHES), help="default milp")
    add("--sensitivity", default="loss", choices=list(SENSITIVITIES), help="what a layer is worth (default loss)")
    add("--cost", default="bytes", choices=list(COSTS), help="what the budget is of (default bytes)")
    add("--widths", type=numbers, default=list(WIDTHS), metavar="B,B", help="that a layer may have (default 2 to 8)")
    add("--groups", type=numbers, metavar="N,N", help="sizes of groups it may have (default: from half to four times)")
    add("--pareto", type=Path, metavar="PNG", help="a picture of uniform widths and of the search's choices")

    add = made.add_argument_group("what is told and kept").add_argument
    report = f"layer by layer, and a picture of that (default {PICTURE})"
    add("--report", nargs="?", type=Path, const=PICTURE, metavar="PNG", help=report)
    add("-o", "--output", type=Path, metavar="FILE", help="keep the model in few bits as safetensors")
    return made


def refuse(made: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """Error in the arguments, or None."""
    for needed, names in NEEDED.items():
        if getattr(args, needed) is None:
            for name in names:
                if getattr(args, name) != made.get_default(name):
                    return f"--{name} needs --{needed}, and would do nothing without it"
    for name in ("report", "pareto"):
        if (path := getattr(args, name)) is not None:
            if path.suffix not in PICTURES:
                return f"--{name}: expected a name that ends in one of {', '.join(PICTURES)}, found {path}"
            try:
                import matplotlib  # noqa: F401
            except ImportError:
                return f"--{name} draws a picture, which needs matplotlib: pip install 'chorus-mpi[plot]'"
    return None


def spec_of(option: str, text: str) -> QuantSpec:
    """Spec by its name; ValueError names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def in_words(score: EvalScore) -> str:
    """Score as text."""
    return score_in_words(score) + (f", loss {score.loss:.4f}" if score.accuracy is not None else "")


def tested(comm: Communicator, job: TrainedModel, model: Operator) -> EvalScore:
    """Score of a model on the test set."""
    mine = dealt(job.task.test, len(job.task.test), BATCH, comm.rank, comm.size)
    return job.score(evaluate(model, job.loss, mine, comm, job.measure))


def told(rows: Sequence[LayerErrorRow], specs: Sequence[str]) -> None:
    """Table of the layers."""
    wide = max(len("layer"), *(len(row.name) for row in rows))
    kind = max(len("spec"), *map(len, specs))
    say(
        f"{'layer':<{wide}}  {'matrix':>11}  {'spec':<{kind}}  {'bits':>5}  {'bytes':>9}  {'float32':>9}"
        "  error of: weights  outputs (alone)  (all)"
    )
    for row, spec in zip(rows, specs):
        say(
            f"{row.name:<{wide}}  {f'{row.shape[0]} x {row.shape[1]}':>11}  {spec:<{kind}}  {row.bits:>5.2f}"
            f"  {row.nbytes:>9}  {row.before:>9}  {row.weights:>17.2%}  {row.outputs:>15.2%}  {row.arriving:>5.2%}"
        )


def short_name(spec: QuantSpec) -> str:
    """Name of a spec for `quant.parse`, or its description.

    >>> short_name(parse("int3_g64")), short_name(parse("nf4"))
    ('int3_g64', 'NF4')
    """
    for name, preset in PRESETS.items():
        if spec == preset:
            return name
    words = f"int{spec.bits}" if spec.linear else spec.code
    words += f"_g{spec.granularity.size}" if isinstance(spec.granularity, PerGroup) else ""
    words += "_row" * isinstance(spec.granularity, PerChannel)
    return words + "_zero" * (not spec.symmetric)


def mix(
    comm: Communicator, args: argparse.Namespace, job: TrainedModel, spec: QuantSpec, mine: list[Any]
) -> PrecisionMixture:
    """Options of every layer for a search."""
    layers = layers_of(job.model)
    activations = spec_of("--activations", args.activations) if args.activations else None
    check(layers, spec, args.method, activations, args.observer)
    own = [spec.granularity.size] if isinstance(spec.granularity, PerGroup) else None
    specs = list(dict.fromkeys([*options_of(spec, args.widths, args.groups), *options_of(spec, args.widths, own)]))
    seen = {} if METHODS[args.method].blind else calibrate(job.model, layers, mine, comm)
    options = MixtureOptions(args.method, SENSITIVITIES[args.sensitivity], args.cost, activations)
    return mixture(job.model, job.loss, layers, specs, seen, mine, comm, options)


def pareto(
    comm: Communicator, args: argparse.Namespace, job: TrainedModel, mixed: PrecisionMixture, spec: QuantSpec
) -> None:
    """Test uniform widths and the results of searches between them; draw both."""
    from parallel.benchmark.precision_plots import ParetoPoint, plot_pareto

    def point(choice: Choice, name: str = "") -> ParetoPoint:
        score = tested(comm, job, mixed.chosen(choice))
        return ParetoPoint(mixed.bits(choice), score.loss, score.accuracy, name)

    widths = sorted(set(args.widths))
    uniform = [point(mixed.uniform(spec.replace(bits=width)), f"{width}") for width in widths]
    budgets = [low + (high - low) * i / STEPS for low, high in pairwise(widths) for i in range(STEPS)]
    choices = {mixed.choose(args.search, mixed.budget(spec, bits), comm) for bits in [*budgets, widths[-1]]}
    curve = [point(choice) for choice in sorted(choices)]
    score = tested(comm, job, job.model)
    whole = ParetoPoint(32.0, score.loss, score.accuracy, "float32")
    title = f"{job.settings.model} on {job.task.name}, {args.method}, bits by {args.search} on {args.sensitivity}"
    draw = partial(plot_pareto, args.pareto, uniform, curve, whole, title, machine_in_words())
    collective_call(comm, draw, f"{args.pareto} was not drawn", root=0)
    say(f"{args.pareto} drawn")


def by_search(comm: Communicator, args: argparse.Namespace, job: TrainedModel, spec: QuantSpec, mine: list[Any]) -> Any:
    """Search a width for each layer: the model, and the specs of its layers."""
    mixed = mix(comm, args, job, spec, mine)
    budget = mixed.budget(spec, args.mixed)
    choice = mixed.choose(args.search, budget, comm)
    if args.mixed in args.widths:
        same = mixed.uniform(spec.replace(bits=int(args.mixed)))
        words = in_words(tested(comm, job, mixed.chosen(same)))
        say(f"{short_name(mixed.specs[same[0]])} for all: {words}, {mixed.bits(same):.3f} bits a weight")
    words = in_words(tested(comm, job, mixed.chosen(choice)))
    say(f"mixed by {args.search}: {words}, {mixed.bits(choice):.3f} bits a weight")
    if args.pareto:
        pareto(comm, args, job, mixed, spec)
    return mixed.chosen(choice), [mixed.specs[at] for at in choice]


def quantize(comm: Communicator, args: argparse.Namespace) -> None:
    """Quantise, test and write; errors of the user are ValueErrors."""
    spec = spec_of("--spec", args.spec)
    activations = spec_of("--activations", args.activations) if args.activations else None
    job = load_model.from_checkpoint(comm, args.checkpoint)
    for path in filter(None, (args.report, args.pareto, args.output)):
        collective_call(comm, partial(check_writable, path), f"{path} cannot be written", root=0)
    data = load_model.task_for(comm, job, args.calibrate or job.settings.data)
    mine = dealt(data.train, args.samples, BATCH, comm.rank, comm.size)
    layers = layers_of(job.model)
    shown = min(args.samples, len(data.train))
    say(f"{job.settings.model} on {job.task.name}: {len(layers)} layers, calibrated on {shown} samples of {data.name}")
    say(f"float32: {in_words(tested(comm, job, job.model))}, {nbytes(job.model)} bytes")
    if args.mixed is None:
        how = {"method": args.method, "activations": activations, "observer": args.observer}
        made, specs = quantise(job.model, spec, mine, comm, **how), [spec] * len(layers)
    else:
        made, specs = by_search(comm, args, job, spec, mine)
        made = made if activations is None else with_inputs(made, activations, args.observer, mine, comm)
    words = f"{args.spec}, {args.method}" if args.mixed is None else f"mixed, {args.method}"
    words += f", inputs in {args.activations}" if args.activations else ""
    smaller = nbytes(job.model) / nbytes(made)
    say(f"{words}: {in_words(tested(comm, job, made))}, {nbytes(made)} bytes ({smaller:.2f} times less)")
    if args.report:
        rows = compare(job.model, made, layers, mine, comm)
        told(rows, [short_name(METHODS[args.method].spec(one)) for one in specs])
        title = f"{job.settings.model} on {job.task.name}: {words}"
        collective_call(comm, partial(draw, args.report, rows, title), f"{args.report} was not drawn", root=0)
        say(f"{args.report} drawn")
    if args.output:
        collective_call(
            comm, partial(load_model.save, args.output, job, made), f"{args.output} was not written", root=0
        )
        say(f"{args.output} written")


def draw(path: Path, rows: Sequence[LayerErrorRow], title: str) -> None:
    """Draw the errors of the layers."""
    from parallel.benchmark.precision_plots import plot_layers

    plot_layers(path, rows, title, machine_in_words())


def main(argv: list[str] | None = None) -> int:
    """Quantise, or test a quantised model."""
    made = parser()
    args = made.parse_args(argv)
    if problem := refuse(made, args):
        made.error(problem)
    comm = Communicator(MPI.COMM_WORLD)
    try:
        if args.load is None:
            quantize(comm, args)
        else:
            job = collective_call(comm, partial(load_model.load, args.load), f"{args.load} cannot be used")
            words = in_words(tested(comm, job, job.model))
            say(f"{job.settings.model} on {job.task.name}: {words}, {nbytes(job.model)} bytes")
    except (CheckpointError, ValueError, ImportError, OSError) as error:
        made.error(str(error))
    return 0
