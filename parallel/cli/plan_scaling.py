"""Predict how training scales on a cluster: replicas, pipelines, allreduce over nodes, parameter servers. Without MPI.

    chorus plan --scaling --cluster h100:512 --model gpt2-xl
    chorus plan --scaling --cluster a100:64 --model gpt2 --batch 256 --plot out/scaling.png

Replicas have ZeRO-1 and steps of --batch sequences altogether (strong scaling) or each (weak scaling). An allreduce of
256 MiB, and sums of the model's gradients in 16 bit, have one rank on each node. Times follow from the cost model.
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path

from collectives.benchmark.reports import save_figure
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from collectives.units import format_time
from parallel.cli.plan_arguments import add_setup, check_files, expect_tokens, presets_of, setup_of
from parallel.cli.reports.attention_plots import COLOURS
from parallel.planning.analytic.checked import lookup
from parallel.planning.analytic.scaling import (
    BANDWIDTH,
    EXCHANGES,
    MEASURED,
    PIPELINES,
    REPLICAS,
    SERVERS,
    SUMS,
    ScalingTables,
    bus_bandwidth,
    exchange_seconds,
    pipeline_efficiency,
    powers_of_two,
    replica_efficiency,
    sum_costs,
    with_measured,
)
from parallel.planning.analytic.step_time import Setup
from parallel.planning.analytic.transformer import Transformer

DASHES = ("-", (0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))
"""Styles of lines in their order, thinner ones later, so that lines that lie on others are seen."""


def draw_scaling(path: Path, tables: Mapping[str, Mapping[str, Mapping[int, float]]]) -> None:
    """Plot a panel for each table and a line for each of its rows, over logarithmic numbers of ranks or batches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, -(-len(tables) // 2), figsize=(10, 6.4), layout="constrained", squeeze=False)
    for axes, (title, lines) in zip(panels.flat, tables.items()):
        colours = dict(zip((name for name in lines if not name.endswith(MEASURED)), cycle(COLOURS)))
        for number, (name, line) in enumerate(lines.items()):
            if name.endswith(MEASURED):
                colour = colours.get(name.removesuffix(MEASURED), "black")
                axes.plot(list(line), list(line.values()), "o", mfc="white", color=colour, label=name)
                continue
            style = {"color": colours[name], "ls": DASHES[number % len(DASHES)]}
            axes.plot(list(line), list(line.values()), marker=".", lw=2.8 - 0.4 * number, label=name, **style)
        what, _, by = title.partition(", by ")
        axes.set(xlabel=by, title=what, xscale="log", yscale="log" if what.startswith("seconds") else "linear")
        if not what.startswith("seconds"):
            axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_figure(path, figure, 90)


NBYTES = 256 << 20
"""Bytes of the allreduce over nodes."""

STAGES = (2, 4, 8, 16)


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add = result.add_argument
    add("--scaling", action="store_true", required=True, help="selects this program")
    add_setup(result)
    add("--model", default="gpt2-xl", metavar="NAME", help="a preset, or a model of --presets (default gpt2-xl)")
    add("--batch", type=at_least(1, int), default=128, metavar="N", help="sequences (default 128)")
    add("--measured", type=Path, metavar="FILE", help="add points of chorus plan --measure-scaling")
    add("--plot", type=picture_file, metavar="FILE", help="draw the tables (PNG, SVG, PDF)")
    return result


def tables(model: Transformer, setup: Setup, most: int, batch: int) -> ScalingTables:
    """Predicted numbers of all tables."""
    counts = powers_of_two(most)
    several = counts[1:]
    nbytes = 2 * model.parameters
    return {
        REPLICAS: {
            "weak": replica_efficiency(model, setup, counts, batch, strong=False),
            "strong": replica_efficiency(model, setup, counts, batch, strong=True),
        },
        PIPELINES: {
            f"{stages} stages": {count: pipeline_efficiency(stages, count) for count in powers_of_two(64)}
            for stages in STAGES
        },
        BANDWIDTH: {
            name: {nodes: bus_bandwidth(setup.cluster, nodes, NBYTES, name) / 1e9 for nodes in several} for name in SUMS
        },
        EXCHANGES: {
            name: {workers: exchange_seconds(setup.cluster, workers, nbytes)[name] for workers in several}
            for name in SERVERS
        },
    }


def report(found: ScalingTables) -> Iterator[str]:
    """Yield the tables as text."""
    for title, lines in found.items():
        columns = sorted({x for line in lines.values() for x in line})
        yield title
        yield f"{'':28}" + "".join(f"{x:>10}" for x in columns)
        for name, line in lines.items():
            cells = (line.get(x) for x in columns)  # strong scaling lacks replicas that do not divide the batch
            shown = ("" if y is None else format_time(y) if "seconds" in title else f"{y:.3g}" for y in cells)
            yield f"{name:28}" + "".join(f"{cell:>10}" for cell in shown)
        yield ""


def traffic_lines(setup: Setup, nodes: int) -> Iterator[str]:
    """Yield a table of the allreduce over `nodes` by algorithm: time, bandwidth, and traffic in vectors."""
    yield f"256 MiB allreduce among {nodes} nodes; traffic in vectors of 256 MiB"
    yield f"{'':28}{'time':>10}{'bandwidth':>12}{'busiest':>10}{'together':>10}"
    for name, cost in sum_costs(setup.cluster, nodes, NBYTES).items():
        speed, known = (
            f"{cost.bandwidth / 1e9:.3g} GB/s",
            SUMS[name] if SUMS[name] == name else f"{name} ({SUMS[name]})",
        )
        yield f"{known:28}{format_time(cost.seconds):>10}{speed:>12}{cost.busiest:>10.4g}{cost.traffic:>10.4g}"


def main(argv: list[str] | None = None) -> int:
    """Print the tables. Exit status 2 for wrong arguments."""
    command = parser()
    arguments = command.parse_args(argv)
    name, devices = arguments.cluster
    try:
        presets = presets_of(arguments)
        model = lookup("--model", arguments.model, presets.models)
        setup = setup_of(arguments, presets)
        expect_tokens(arguments.batch * devices, model.context)
        check_files(arguments, "plot")
        if devices < 2:
            raise ValueError(f"--cluster: expected 2 devices or more, found {devices}")
        found = tables(model, setup, devices, arguments.batch)
        if arguments.measured:
            found = with_measured(found, arguments.measured)
    except (ValueError, OSError) as error:
        command.error(str(error))
    print(f"{arguments.model} on {name}, predicted\n")
    print("\n".join([*report(found), *traffic_lines(setup, powers_of_two(devices)[-1])]))
    if arguments.plot:
        draw_scaling(arguments.plot, found)
    return 0
