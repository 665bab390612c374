"""Place a model's operators on the devices of a mesh: cheapest rule for each, without MPI.

    chorus plan --graph two-layers --cluster a100:2 --batch 64 --fix A=column,B=row --fix A=row,B=column
    chorus plan --graph gpt-3 --cluster a100:8 --mesh 2x4 --batch 8
    chorus plan --graph mine.toml --cluster h100:16 --stages --microbatches 8
    chorus plan --graph gpt-3 --cluster a100:8 --mesh 2x4 --resharding 1M

GRAPH is a preset model, whose transformer block is placed, two-layers (products with matrices A and B and an
activation between), or a TOML file. Placements are found by integer programming (scipy), stages by dynamic
programming.

A TOML file has the input's `shape` (batch, length, width), optionally `repeated`, and tables ``[operators.NAME]`` in
order, with the fields of `GraphOperator` as keys.
"""

import argparse
import tomllib
from math import prod
from pathlib import Path

from collectives.benchmark.size_arguments import parse_size
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.plan_arguments import (
    add_json,
    add_setup,
    check_files,
    positive,
    presets_of,
    setup_of,
    write_json,
)
from parallel.cli.reports.graph_report import as_dict, plan_lines, resharding_lines, stage_lines
from parallel.planning.analytic.checked import from_table, lookup
from parallel.planning.analytic.graph_costs import GraphCosts, GraphPlan
from parallel.planning.analytic.graph_stages import StagePlanner, mesh_of
from parallel.planning.analytic.operator_graph import GraphOperator, OperatorGraph
from parallel.planning.analytic.presets import Presets
from parallel.planning.analytic.step_time import Setup
from parallel.planning.analytic.transformer import Transformer


def transformer_block(model: Transformer, batch: int) -> OperatorGraph:
    """One of a model's equal layers: attention and a plain FFN, each after a norm and added to the layer's input.

    ValueError for models whose layers are others: grouped heads, latent attention, gates or experts.
    """
    others = {
        "fewer kv heads": model.kv_heads != model.heads,
        "latent attention": model.latent is not None,
        "a gated FFN": model.gated,
        "experts": model.experts is not None,
        "heads of another width": model.heads * model.head_width != model.width,
    }
    if found := [name for name, has in others.items() if has]:
        raise ValueError(f"model: expected a plain transformer for a graph of its block, found {', '.join(found)}")

    def linear(source: str, features: int) -> GraphOperator:
        return GraphOperator("linear", (source,), features)

    operators = {
        "x": GraphOperator("input"),
        "norm 1": GraphOperator("norm", ("x",)),
        "queries, keys, values": linear("norm 1", 3 * model.width),
        "attention": GraphOperator("attention", ("queries, keys, values",), model.width, model.heads),
        "projection": linear("attention", model.width),
        "add 1": GraphOperator("add", ("projection", "x")),
        "norm 2": GraphOperator("norm", ("add 1",)),
        "FFN in": linear("norm 2", model.ffn),
        "activation": GraphOperator("elementwise", ("FFN in",)),
        "FFN out": linear("activation", model.width),
        "add 2": GraphOperator("add", ("FFN out", "add 1")),
    }
    return OperatorGraph(operators, (batch, model.context, model.width), repeated=True)


def two_layers(rows: int, width: int, hidden: int) -> OperatorGraph:
    """Products with A and B, and an activation between: the smallest example of tensor parallelism."""
    operators = {
        "x": GraphOperator("input"),
        "A": GraphOperator("linear", ("x",), hidden),
        "activation": GraphOperator("elementwise", ("A",)),
        "B": GraphOperator("linear", ("activation",), width),
        "y": GraphOperator("output", ("B",)),
    }
    return OperatorGraph(operators, (rows, 1, width))


def read_graph(path: Path, batch: int | None = None) -> OperatorGraph:
    """Graph of a TOML file, with another batch if given. ValueError, with the file's name, if something is wrong."""
    try:
        table = tomllib.loads(path.read_text())
    # RecursionError: arrays nested too deep for the parser
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected a TOML file, found: {getattr(error, 'strerror', None) or error}") from None
    known = ("shape", "repeated", "operators")
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    shape = table.get("shape")
    # type(), as isinstance() takes true for an int
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(size) is int and size > 0 for size in shape)):
        raise ValueError(f"{path}: shape: expected [batch, length, width], found {shape!r}")
    if type(table.get("repeated", False)) is not bool:
        raise ValueError(f"{path}: repeated: expected true or false, found {table['repeated']!r}")
    entries = table.get("operators")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{path}: operators: expected tables [operators.NAME], found {entries!r}")
    operators = {name: from_table(GraphOperator, entry, f"{path}: {name}") for name, entry in entries.items()}
    try:
        return OperatorGraph(operators, (batch or shape[0], shape[1], shape[2]), table.get("repeated", False))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


TWO_LAYERS = "two-layers"
WIDTH, HIDDEN = 8192, 32768
"""Graph that is no preset model, and its widths."""


def mesh_sizes(text: str) -> tuple[int, ...]:
    """Argument type: sizes of one or two axes, such as 8 or 2x4."""
    sizes = text.split("x")
    if len(sizes) > 2 or not all(map(positive, sizes)):
        raise argparse.ArgumentTypeError(f"expected a mesh of one or two axes, as 8 or 2x4; found {text!r}")
    return tuple(map(int, sizes))


def fixed_rules(text: str) -> dict[str, tuple[str, ...]]:
    """Argument type: rules of operators, such as A=column,B=row, with a slash between axes: A=batch/column."""
    pairs = [word.partition("=") for word in text.split(",")]
    if not all(name and rules for name, _, rules in pairs):
        raise argparse.ArgumentTypeError(f"expected OPERATOR=RULE,...; found {text!r}")
    if len({name for name, _, _ in pairs}) < len(pairs):  # a dict would silently keep the last rules
        raise argparse.ArgumentTypeError(f"expected every operator once, found {text!r}")
    return {name: tuple(rules.split("/")) for name, _, rules in pairs}


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add = result.add_argument
    add("--graph", required=True, metavar="GRAPH", help="two-layers, a preset model, or a TOML file")
    add_setup(result)
    add("--mesh", type=mesh_sizes, metavar="SIZES", help="one or two axes, as 2x4 (default: one of all devices)")
    add(
        "--batch",
        type=at_least(1, int),
        metavar="N",
        help="sequences, or rows, of a micro-batch (default 1; the file's)",
    )
    add("--microbatches", type=at_least(1, int), default=1, metavar="N", help="of a step (default 1)")
    add("--memory", type=parse_size, metavar="SIZE", help="bytes of a device, as 40G (default: the device's)")
    add(
        "--fix",
        type=fixed_rules,
        action="append",
        default=[],
        metavar="OPERATOR=RULE,...",
        help="also plan with these rules given; may be repeated",
    )
    add(
        "--stages",
        type=at_least(1, int),
        nargs="?",
        const=0,
        metavar="N",
        help="also divide the operators into pipeline stages: N, or the best number",
    )
    add("--resharding", type=parse_size, metavar="SIZE", help="print what changes of a value's placement cost instead")
    add_json(result)
    add("--plot", type=picture_file, metavar="FILE", help="draw the plans (PNG, SVG, PDF)")
    return result


def graph_of(arguments: argparse.Namespace, presets: Presets) -> OperatorGraph:
    """Graph that the arguments name. ValueError if there is none."""
    name, batch = arguments.graph, arguments.batch
    if name == TWO_LAYERS:
        return two_layers(batch or 1, WIDTH, HIDDEN)
    model = None if name.endswith(".toml") else lookup("--graph", name, {TWO_LAYERS: None, **presets.models})
    try:
        return read_graph(Path(name), batch) if model is None else transformer_block(model, batch or 1)
    except ValueError as error:
        raise ValueError(f"--graph: {error}") from None


def plans_of(arguments: argparse.Namespace, graph: OperatorGraph, setup: Setup, limit: float) -> dict[str, GraphPlan]:
    """Best plan, and those with rules given, by name. ValueError if a plan exceeds the memory."""
    sizes = arguments.mesh or (arguments.cluster[1],)
    found = {}
    for fixed in ({}, *arguments.fix):
        name = ",".join(f"{name}={'/'.join(rules)}" for name, rules in fixed.items()) or "best"
        try:
            costs = GraphCosts(graph, mesh_of(sizes, setup.cluster), setup, arguments.microbatches, fixed=fixed)
        except ValueError as error:
            # the graph has passed without fixed rules, in the first turn
            raise ValueError(f"--fix: {error}" if fixed else f"--graph: {error}") from None
        plan = costs.best(limit)
        if plan is None:
            option = "--cluster" if arguments.memory is None else "--memory"
            raise ValueError(f"{option}: expected placements within {limit / 1e9:g} GB of a device, found none: {name}")
        found[name] = plan
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the plans. Exit status 2 for wrong arguments, or if nothing fits."""
    command = parser()
    arguments = command.parse_args(argv)
    name, devices = arguments.cluster
    try:
        presets = presets_of(arguments)
        setup = setup_of(arguments, presets)
        sizes = arguments.mesh or (devices,)
        if prod(sizes) != devices:
            raise ValueError(f"--mesh: expected axes of {devices} devices, found {'x'.join(map(str, sizes))}")
        graph = graph_of(arguments, presets)
        check_files(arguments, "plot", "json")
        if arguments.resharding is not None:
            if not arguments.resharding:
                raise ValueError("--resharding: expected a number of bytes above 0, found 0")
            print("\n".join(resharding_lines(mesh_of(sizes, setup.cluster), arguments.resharding)))
            return 0
        limit = setup.device.memory if arguments.memory is None else arguments.memory
        plans = plans_of(arguments, graph, setup, limit)
        staged = None
        if arguments.stages is not None:
            staged = StagePlanner(graph, setup, arguments.microbatches, limit).best(devices, arguments.stages)
            if staged is None:
                wanted = f"{arguments.stages} stages" if arguments.stages else "stages"
                raise ValueError(f"--stages: expected {wanted} on {devices} devices within their memory, found none")
    except (ValueError, OSError, ImportError) as error:
        command.error(str(error))
    if arguments.json != "-":  # else the standard output is JSON only
        print(f"{arguments.graph}, {devices} x {name}, mesh {'x'.join(map(str, sizes))}; of a micro-batch, per device:")
        print("\n".join([*plan_lines(plans), *(["", *stage_lines(staged)] if staged else [])]))
    write_json(arguments.json, as_dict(plans, staged))
    if arguments.plot:
        from parallel.cli.reports.graph_report import draw_plans

        draw_plans(arguments.plot, graph, sizes, plans, staged)
    return 0
