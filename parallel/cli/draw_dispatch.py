"""Draw how a few tokens travel to experts on other ranks: as text, or as a picture with -o.

    chorus draw dispatch --ranks 4 --per-node 2 --choices 4
    chorus draw dispatch --ranks 4 --per-node 2 --choices 4 --route hierarchical -o out/dispatch.png
    chorus draw dispatch --ranks 4 --per-node 2 --choices 4 --route hierarchical --combine

Numbers are tokens. With --combine results travel back and are added, and are chunks 1 to k of a token. Below the
messages: copies of a token between nodes, and the predicted time of the exchange for many tokens of --row-bytes, on a
network of 2 Gbit/s with shared memory within nodes. The schedule is proved first. Runs in one process. Pictures need
matplotlib (the extra "plot").
"""

from __future__ import annotations

import argparse
import shutil
import sys

import numpy as np

from collectives.analysis import draw
from collectives.analysis.cost_functions import ClusteredNetwork, LinearCost
from collectives.analysis.simulate import price
from collectives.cli.arguments import picture_file
from collectives.cli.draw import picture
from collectives.cli.launcher import ProgramParser, at_least
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.topology import Nodes, regular
from collectives.units import format_bytes, format_time
from parallel.cli.reports.token_choices import token_choices
from parallel.sharding.expert.dispatch import ROUTES
from parallel.sharding.expert.dispatch_schedule import DispatchSchedule, combine_schedule, dispatch_schedule

INSIDE, BETWEEN = LinearCost(1e-6, 1e-10), LinearCost(20e-6, 4e-9)
"""Seconds of a message and of a byte: in shared memory, and over a network of 2 Gbit/s (TCP)."""


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add, count, size = result.add_argument, at_least(1, int, 1 << 12), at_least(1, int)
    add("--ranks", type=count, default=4, metavar="P", help="default 4")
    add("--per-node", type=count, metavar="N", help="ranks of a node (default: all)")
    add("--tokens", type=count, default=1, metavar="T", help="tokens of each rank (default 1)")
    add("--experts", type=count, default=2, metavar="E", help="experts of each rank (default 2)")
    add("--choices", type=count, default=2, metavar="K", help="experts of a token (default 2)")
    add("--token-nodes", type=count, metavar="M", help="nodes of a token's experts (default 2, if there are)")
    add("--route", choices=ROUTES, default="direct", help="default direct")
    add("--combine", action="store_true", help="the way back of the results, and their sums")
    add("--row-bytes", type=size, default=4 << 20, metavar="B", help="bytes of a token's row (default 4 MiB)")
    add("--seed", type=at_least(0, int), default=0, metavar="S", help="of the choices (default 0)")
    add("-o", "--output", type=picture_file, metavar="FILE", help="a picture")
    return result


def schedule_of(options: argparse.Namespace, nodes: Nodes) -> DispatchSchedule:
    """Proved schedule of random choices. ValueError if tokens cannot have this number of experts."""
    owners = [options.experts] * options.ranks
    limit = options.token_nodes or min(2, max(nodes) + 1)
    of_expert = np.repeat(nodes, owners).tolist()
    choices = [
        token_choices(options.tokens, options.choices, of_expert, limit, seed=options.seed * options.ranks + rank)
        for rank in range(options.ranks)
    ]
    make = combine_schedule if options.combine else dispatch_schedule
    schedule = make(choices, owners, options.route, nodes)
    schedule.prove()
    return schedule


def summary(schedule: DispatchSchedule, nodes: Nodes, row_bytes: int) -> str:
    """Line on the copies between nodes and the predicted time."""
    copies = schedule.crossings(nodes)
    network = ClusteredNetwork(nodes, INSIDE, BETWEEN, LinearCost(0, 0))
    seconds = price(schedule.schedules, ChunkLayout.packed((row_bytes,) * schedule.tokens), 1, network).seconds
    return (
        f"{copies} copies of {schedule.tokens} tokens between {max(nodes) + 1} nodes; predicted {format_time(seconds)} "
        f"for rows of {format_bytes(row_bytes)}"
    )


def main(argv: list[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(argv)
    if options.route == "hierarchical" and options.per_node is None:
        command.error("--route: hierarchical needs nodes, as of --per-node 2")
    nodes = regular(options.ranks, min(options.per_node or options.ranks, options.ranks))
    try:
        schedule = schedule_of(options, nodes)
    except ValueError as error:
        command.error(str(error))
    what = (
        f"combine of {schedule.tokens} tokens from" if options.combine else f"dispatch of {schedule.tokens} tokens to"
    )
    title = f"{options.route} {what} {options.choices} experts each"
    if options.output is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0  # 0: no limit in a file or a pipe
        print(f"{title}\n\n{draw.table(schedule.schedules, max(schedule.tokens, 1), width)}\n")
    else:
        picture(options.output, title, schedule.schedules, schedule.tokens, nodes if max(nodes) else None)
        print(f"{options.output} written")
    print(summary(schedule, nodes, options.row_bytes))
    return 0
