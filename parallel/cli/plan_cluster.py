"""Plan the training of a large model on a cluster: what fits, what it costs, which layout is fastest, without MPI.

    chorus plan --cluster h100:64 --model llama-3-70b --batch 4M-tokens
    chorus plan --cluster h100:64 --model llama-3-70b --batch 512 --fix tp=8,pp=4 --tokens 15T
    chorus plan --cluster lab:16 --presets lab.toml --model mine --batch 256 --json -

All layouts of dp, tp, pp, cp and ep, ZeRO stages, micro-batches, recomputation, pipeline schedules and, with
--compress, compressed gradients are judged: by divisibility, memory, estimated time. Memory and FLOPs follow from the
numbers of the model; times are estimates.
"""

import argparse
import sys
from typing import Any

from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from parallel.benchmark.plan_report import PlanQuestion, as_dict, report
from parallel.cli.plan_arguments import add_json, add_setup, check_files, expect_tokens, setup_of, write_json
from parallel.planner.checked import lookup
from parallel.planner.layout import COMPRESSED_BITS, ClusterLayout
from parallel.planner.presets import Presets, load
from parallel.planner.search import PlanChoice, search

MULTIPLES = {"K": 1 << 10, "M": 1 << 20}
THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_size(text: str) -> tuple[int, str]:
    """Argument type: sequences of a step, or tokens as in 4M-tokens, with K and M for 2^10 and 2^20."""
    number, _, unit = text.partition("-")
    factor = MULTIPLES.get(number[-1:].upper(), 1)
    digits = number[:-1] if factor > 1 else number
    if not digits.isdecimal() or not int(digits) or unit not in ("", "tokens", "sequences"):
        raise argparse.ArgumentTypeError(f"expected a batch such as 512, 512-sequences or 4M-tokens; found {text!r}")
    return int(digits) * factor, unit or "sequences"


def token_count(text: str) -> float:
    """Argument type: number of tokens, as in 15T or 300B."""
    factor = THOUSANDS.get(text[-1:].upper(), 1)
    try:
        count = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        count = 0.0
    if not 0 < count < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of tokens such as 15T or 300B; found {text!r}")
    return count


def fixed_fields(text: str) -> dict[str, Any]:
    """Argument type: fields of a layout that are given, as in tp=8,recompute=full."""
    kinds = {name: type(value) for name, value in ClusterLayout().as_dict().items()}
    found: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name not in kinds:
            raise argparse.ArgumentTypeError(
                f"expected NAME=VALUE with names out of {', '.join(kinds)}; found {word!r}"
            )
        if kinds[name] is not str and not value.isdecimal():
            raise argparse.ArgumentTypeError(f"{name}: expected a whole number, found {value!r}")
        if kinds[name] is bool and value not in ("0", "1"):
            raise argparse.ArgumentTypeError(f"{name}: expected 0 or 1, found {value!r}")
        found[name] = value if kinds[name] is str else bool(int(value)) if kinds[name] is bool else int(value)
    try:
        ClusterLayout(**found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add = result.add_argument
    add_setup(result, stack="megatron-core")
    add("--model", required=True, metavar="NAME", help="a preset, or a model of --presets")
    add("--batch", type=batch_size, required=True, metavar="SIZE", help="of a step: 512, or 4M-tokens (M: 2^20)")
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
    add_json(result)
    add("--plot", type=picture_file, metavar="FILE", help="draw memory over a step of the best layout (PNG, SVG, PDF)")
    add("--plot-nodes", type=picture_file, metavar="FILE", help="draw the best layouts from one node to all devices")
    return result


def plans_by_nodes(
    question: PlanQuestion, fixed: dict[str, Any], compressions: list[str]
) -> list[tuple[PlanQuestion, PlanChoice | None]]:
    """Best plans of 1, 2, 4 ... nodes, up to the devices of the question; None where no layout fits."""
    found: list[tuple[PlanQuestion, PlanChoice | None]] = []
    devices = question.setup.cluster.per_node
    while devices <= question.devices:
        one = question._replace(devices=devices)
        choices = search(one.model, one.setup, devices, one.sequences, fixed, compressions).choices
        found.append((one, choices[0] if choices else None))
        devices *= 2
    return found


def question_of(arguments: argparse.Namespace, presets: Presets) -> PlanQuestion:
    """Model, devices and batch of the arguments; ValueError for unknown names."""
    model = lookup("--model", arguments.model, presets.models)
    name, devices = arguments.cluster
    number, unit = arguments.batch
    sequences = -(-number // model.context) if unit == "tokens" else number
    expect_tokens(sequences, model.context)
    return PlanQuestion(arguments.model, model, name, setup_of(arguments, presets), devices, sequences)


def main(argv: list[str] | None = None) -> int:
    """Print the plan; exit status 1 if no layout fits, 2 for wrong arguments."""
    command = parser()
    arguments = command.parse_args(argv)
    try:
        question = question_of(arguments, load(arguments.presets))
        check_files(arguments, "plot", "plot_nodes", "json")
    except (ValueError, OSError) as error:
        command.error(str(error))
    model, setup = question.model, question.setup
    found = search(model, setup, question.devices, question.sequences, arguments.fix, arguments.compress)
    if not found.choices and not found.rejected:
        given = ", ".join(f"{name}={value}" for name, value in arguments.fix.items())
        command.error(f"--fix: no layout of {question.devices} devices has {given}")
    if arguments.json != "-":
        print(report(question, found, arguments.top, arguments.tokens, arguments.price))
    write_json(arguments.json, as_dict(question, found, arguments.top))
    if arguments.plot and found.choices:
        from parallel.benchmark.plan_plots import draw_memory

        draw_memory(arguments.plot, question, found.choices[0])
        print(f"{arguments.plot} drawn", file=sys.stderr)
    if arguments.plot_nodes and found.choices:
        from parallel.benchmark.plan_plots import draw_nodes

        draw_nodes(arguments.plot_nodes, plans_by_nodes(question, arguments.fix, arguments.compress))
        print(f"{arguments.plot_nodes} drawn", file=sys.stderr)
    return 0 if found.choices else 1
