"""Draw the work of ring attention: rank and step of every score, as text or picture.

    chorus draw attention --ranks 4
    chorus draw attention --ranks 4 --length 64 --window 16
    chorus draw attention --ranks 4 -o attention.png

A step takes as long as the rank with most pairs of query and key. "computing" is the share of time in which ranks
compute. Runs in one process. Pictures need matplotlib (the extra "plot").
"""

import argparse

from collectives.benchmark.reports import PICTURES
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.reports.attention_plots import draw_divisions
from parallel.nn.attention_mask import AttentionMask
from parallel.sharding.context.cost_formulas import ring_work
from parallel.sharding.context.sequence_division import DIVISIONS, SequenceDivision


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add, count, width = result.add_argument, at_least(1, int, 1 << 17), at_least(0, int)
    add("--ranks", type=count, default=4, metavar="C", help="ranks that share a sequence (default 4)")
    add("--length", type=count, default=32, metavar="S", help="positions of the sequence (default 32)")
    add("--division", choices=list(DIVISIONS), action="append", metavar="NAME", help="default: all; may be repeated")
    add("--full", action="store_true", help="no causal mask: queries see later keys too")
    add("--window", type=width, default=0, metavar="W", help="queries see keys at a distance below W (default: any)")
    add("-o", "--output", type=picture_file, metavar="FILE", help=f"a file {', '.join(PICTURES)}")
    return result


def as_text(division: SequenceDivision, mask: AttentionMask) -> str:
    """Table of pairs by step and rank."""
    work = ring_work(division, mask)
    width = max(8, len(str(work.pairs.max())) + 2)
    names = "".join(f"{f'rank {rank}':>{width}}" for rank in range(division.ranks))
    lines = [f"{division.name}, {work.efficiency:.0%} computing", f"{'step':>6}{names}"]
    lines += [f"{step:>6}" + "".join(f"{pairs:>{width}}" for pairs in row) for step, row in enumerate(work.pairs)]
    return "\n".join(lines)


def main() -> int:
    command = parser()
    arguments = command.parse_args()
    try:
        mask = AttentionMask(not arguments.full, arguments.window)
        names = arguments.division or list(DIVISIONS)
        divisions = [SequenceDivision(name, arguments.length, arguments.ranks) for name in names]
    except ValueError as error:
        command.error(str(error))
    if arguments.output is None:
        print("\n\n".join(as_text(division, mask) for division in divisions))
        return 0
    draw_divisions(arguments.output, divisions, mask)
    print(f"{arguments.output} written")
    return 0
