"""Draw the parts of a model's tensors that the ranks of a mesh have, as text or picture.

    chorus draw mesh --mesh dp=2,tp=2
    chorus draw mesh --mesh pp=2,cp=2,tp=2 --model gpt:small -o out/mesh.png
    chorus draw mesh --mesh dp=2,tp=2,ep=4 --model gpt-moe:tiny

Of layers with equal parts only the first is drawn; "-" marks a tensor that a rank lacks. Replicas (dp) and ranks that
share sequences (cp) have the same parts; ZeRO divides these further. Stages (pp) have nearly equally many units. Runs
in one process; pictures need matplotlib (the extra "plot").
"""

import argparse
from collections.abc import Sequence

from collectives.benchmark.reports import PICTURES
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.reports.mesh_plots import draw_holdings
from parallel.cli.reports.tensor_parts import Holding, holdings, unlike
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.pipeline.config import schedule_of
from parallel.sharding.mesh import Mesh

SAMPLES = {"gpt": (32,), "gpt-moe": (32,), "mlp": (64,), "convnet": (1, 8, 8)}
"""Shapes of samples, by family."""


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add = result.add_argument
    add("--mesh", default="dp=2,tp=2", metavar="AXES", help="as of chorus train (default dp=2,tp=2)")
    add("--parallel", default="pp", metavar="LAYOUT", help="of stages, as of chorus train, such as pp:zb-v")
    add("--model", default="gpt:tiny", metavar="NAME", help="as of chorus train (default gpt:tiny)")
    add("--classes", type=at_least(1, int), default=256, metavar="N", help="tokens or classes (default 256)")
    add("-o", "--output", type=picture_file, metavar="FILE", help=f"a file {', '.join(PICTURES)}")
    return result


def drawn(mesh: Mesh, model: str, classes: int, layout: str = "pp") -> list[Holding]:
    """Tensors to draw; ValueError if mesh, model or layout do not fit."""
    made = build(model, SAMPLES.get(model.partition(":")[0], ()), classes)
    return unlike(holdings(made, SoftmaxCrossEntropy(), mesh, schedule_of(Settings(layout=layout))))


def as_text(mesh: Mesh, held: Sequence[Holding]) -> str:
    """Table of tensors and ranks; a line above it has the ranks' coordinates."""
    rows = [["tensor", "shape", *(f"rank {rank}" for rank in range(mesh.size))]]
    places = [" ".join(f"{name} {at}" for name, at in mesh.coordinates(rank).items()) for rank in range(mesh.size)]
    rows.append(["", "", *places])
    for one in held:
        here = [one.text(rank) for rank in range(mesh.size)]
        rows.append([one.name, " x ".join(map(str, one.shape)), *here])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(f"{text:<{width}}" for text, width in zip(row, widths)).rstrip() for row in rows)


def main() -> int:
    command = parser()
    arguments = command.parse_args()
    try:
        mesh = Mesh.parse(arguments.mesh)
        held = drawn(mesh, arguments.model, arguments.classes, arguments.parallel)
    except ValueError as error:
        command.error(str(error))
    if arguments.output is None:
        print(as_text(mesh, held))
        return 0
    draw_holdings(arguments.output, mesh, held)
    print(f"{arguments.output} written")
    return 0
