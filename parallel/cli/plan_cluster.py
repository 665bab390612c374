"""Plan the training of a large model on a cluster: fitting layouts, their costs, the fastest one, without MPI.

    chorus plan --cluster h100:64 --model llama-3-70b --batch 4M-tokens
    chorus plan --cluster h100:64 --model llama-3-70b --batch 512 --fix tp=8,pp=4 --tokens 15T
    chorus plan --cluster lab:16 --presets lab.toml --model mine --batch 256 --json -

All layouts of dp, tp, pp, cp and ep, ZeRO stages, micro-batches, recomputation, pipeline schedules and, with
--compress, compressed gradients are judged: by divisibility, memory, estimated time. Memory and FLOPs follow from the
numbers of the model. Times are estimates.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.plan_arguments import (
    MOST_DEVICES,
    add_json,
    add_setup,
    check_files,
    expect_tokens,
    positive,
    presets_of,
    setup_of,
    write_json,
)
from parallel.cli.reports.plan_report import PlanQuestion, as_dict, operator_lines, report
from parallel.planning.analytic.checked import lookup
from parallel.planning.analytic.layout import COMPRESSED_BITS, ClusterLayout
from parallel.planning.analytic.presets import Presets
from parallel.planning.analytic.search import PlanChoice, candidates, search

MULTIPLES = {"K": 1 << 10, "M": 1 << 20}
THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_size(text: str) -> tuple[int, str]:
    """Argument type: sequences of a step, or tokens such as 4M-tokens, with K and M for 2^10 and 2^20 of a unit."""
    number, dash, unit = text.partition("-")
    factor = MULTIPLES.get(number[-1:].upper(), 1)
    count = positive(number[:-1] if factor > 1 else number)
    if not count or (dash and unit not in ("tokens", "sequences")):
        raise argparse.ArgumentTypeError(f"expected a batch such as 512, 512-sequences or 4M-tokens; found {text!r}")
    if factor > 1 and not unit:  # 4M alone may be sequences or tokens
        raise argparse.ArgumentTypeError(f"expected a unit, as {text}-tokens or {text}-sequences; found {text!r}")
    return count * factor, unit or "sequences"


def token_count(text: str) -> float:
    """Argument type: number of tokens, such as 15T or 300B."""
    factor = THOUSANDS.get(text[-1:].upper(), 1)
    try:
        count = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        count = 0.0
    if not 0 < count < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of tokens such as 15T or 300B; found {text!r}")
    return count


def fixed_fields(text: str) -> dict[str, Any]:
    """Argument type: given fields of a layout, such as tp=8,recompute=full."""
    kinds = {name: type(value) for name, value in ClusterLayout().as_dict().items()}
    found: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name not in kinds:
            raise argparse.ArgumentTypeError(
                f"expected NAME=VALUE with names out of {', '.join(kinds)}; found {word!r}"
            )
        if name in found:
            raise argparse.ArgumentTypeError(f"{name}: expected one value, found {text!r}")
        try:
            found[name] = READERS[kinds[name]](value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}, found {value!r}") from None
    try:
        ClusterLayout(**found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def whole_number(text: str) -> int:
    """Whole number of up to nine decimal digits. ValueError for another text."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
        raise ValueError(f"expected a whole number of at most {MOST_DIGITS} digits")
    return int(text)


def truth(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def layer_numbers(text: str) -> tuple[int, ...]:
    """Layers of each part of the model, empty for even ones. ValueError for another text.

    >>> layer_numbers("3x8+6")
    (8, 8, 8, 6)
    """
    found: list[int] = []
    for word in text.split("+") if text != EVEN else ():
        count, times, number = word.rpartition("x")
        try:
            repeats = min(whole_number(count), MOST_DEVICES) if times else 1
            if not repeats:
                raise ValueError
            found += [whole_number(number)] * repeats
        except ValueError:
            raise ValueError(f"expected {EVEN}, or layers of every part as 3x8+6") from None
    return tuple(found)


MOST_DIGITS, EVEN = 9, "even"
USUAL = ("cluster", "presets", "precision", "recipe", "model", "batch", "top", "tokens", "price", "plot")
"""Options in --help. --help-all has the others."""

READERS: dict[type, Callable[[str], Any]] = {str: str, int: whole_number, bool: truth, tuple: layer_numbers}
"""Readers of a layout's fields by their type."""


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__, USUAL)
    add = result.add_argument
    add_setup(result, stack="megatron-core")
    add("--model", required=True, metavar="NAME", help="a preset, or a model of --presets")
    add(
        "--batch",
        type=batch_size,
        required=True,
        metavar="SIZE",
        help="of a step: 512 sequences, or 4M-tokens (M: 2^20)",
    )
    add("--fix", type=fixed_fields, default={}, metavar="NAME=VALUE,...", help="fields of the layout that are given")
    add(
        "--compress",
        action="append",
        choices=COMPRESSED_BITS,
        default=[],
        help="sum gradients so, too; may be repeated",
    )
    add("--top", type=at_least(1, int), default=5, metavar="K", help="layouts to print (default 5)")
    add("--tokens", type=token_count, metavar="COUNT", help="tokens of the whole training, for its time: 15T")
    add("--price", type=at_least(0, float), metavar="PRICE", help="of an hour of one device")
    add("--operators", action="store_true", help="print the matrix products, and what limits each on the device")
    add_json(result)
    add("--plot", type=picture_file, metavar="FILE", help="draw memory over a step of the best layout (PNG, SVG, PDF)")
    add("--plot-step", type=picture_file, metavar="FILE", help="draw its stages over time, by cause")
    add("--plot-nodes", type=picture_file, metavar="FILE", help="draw the best layouts from one node to all devices")
    return result


def plans_by_nodes(
    question: PlanQuestion, fixed: dict[str, Any], compressions: list[str]
) -> list[tuple[PlanQuestion, PlanChoice | None]]:
    """Best plans of 1, 2, 4 ... nodes, up to the devices of the question. None where no layout fits."""
    found: list[tuple[PlanQuestion, PlanChoice | None]] = []
    devices = question.setup.cluster.per_node
    while devices <= question.devices:
        one = question._replace(devices=devices)
        choices = search(one.model, one.setup, devices, one.sequences, fixed, compressions).choices
        found.append((one, choices[0] if choices else None))
        devices *= 2
    return found


def question_of(arguments: argparse.Namespace, presets: Presets) -> PlanQuestion:
    """Model, devices and batch of the arguments. ValueError for unknown names."""
    model = lookup("--model", arguments.model, presets.models)
    name, devices = arguments.cluster
    number, unit = arguments.batch
    sequences = -(-number // model.context) if unit == "tokens" else number
    expect_tokens(sequences, model.context)
    return PlanQuestion(arguments.model, model, name, setup_of(arguments, presets), devices, sequences)


def expect_layouts(question: PlanQuestion, fixed: Mapping[str, Any]) -> None:
    """Raise ValueError if no layout has the fields of --fix, or their layers do not match the model's."""
    model, setup, devices = question.model, question.setup, question.devices
    layers = fixed.get("layers", ())
    if layers and sum(layers) != model.layers:
        raise ValueError(f"--fix: layers: expected {model.layers} layers together, found {sum(layers)}")
    even = {"layers": ()}
    if not fixed or any(candidates(model, setup, devices, dict(fixed) | even)):
        return
    # a field that no layout has even alone is the mistake; otherwise only their combination is
    for name, value in fixed.items():
        if name != "layers" and not any(candidates(model, setup, devices, {name: value} | even)):
            known = sorted({getattr(each, name) for each in candidates(model, setup, devices, even)})
            of = f"of {devices} device{'s' * (devices > 1)}"
            raise ValueError(f"--fix: {name}: expected {', '.join(map(str, known))} for layouts {of}, found {value}")
    given = ", ".join(f"{name}={value}" for name, value in fixed.items() if name != "layers")
    raise ValueError(f"--fix: expected fields that a layout of {devices} devices has together, found {given}")


def main(argv: list[str] | None = None) -> int:
    """Print the plan. Exit status 1 if no layout fits, 2 for wrong arguments."""
    command = parser()
    arguments = command.parse_args(argv)
    try:
        question = question_of(arguments, presets_of(arguments))
        expect_layouts(question, arguments.fix)
        check_files(arguments, "plot", "plot_step", "plot_nodes", "json")
    except (ValueError, OSError) as error:
        command.error(str(error))
    model, setup = question.model, question.setup
    found = search(model, setup, question.devices, question.sequences, arguments.fix, arguments.compress)
    if arguments.json != "-":  # else the standard output is JSON only; so notes go to standard error
        print(report(question, found, arguments.top, arguments.tokens, arguments.price))
        if arguments.operators:
            print("\n" + "\n".join(operator_lines(question)))
    write_json(arguments.json, as_dict(question, found, arguments.top))
    if arguments.plot and found.choices:
        from parallel.cli.reports.plan_plots import draw_memory

        draw_memory(arguments.plot, question, found.choices[0])
        print(f"{arguments.plot} drawn", file=sys.stderr)
    if arguments.plot_step and found.choices:
        from parallel.cli.reports.plan_plots import draw_step
        from parallel.cli.reports.plan_timeline import predicted_timeline, title

        draw_step(
            arguments.plot_step, title(question, found.choices[0]), predicted_timeline(question, found.choices[0])
        )
        print(f"{arguments.plot_step} drawn", file=sys.stderr)
    if arguments.plot_nodes and found.choices:
        from parallel.cli.reports.plan_plots import draw_nodes

        draw_nodes(arguments.plot_nodes, plans_by_nodes(question, arguments.fix, arguments.compress))
        print(f"{arguments.plot_nodes} drawn", file=sys.stderr)
    return 0 if found.choices else 1
