"""Text rendering of a timeline: one row per stage, one column per unit of time."""

import math
from collections.abc import Sequence
from fractions import Fraction

from parallel.pipeline.schedule.simulator import PipelineEvent, Timeline

IDLE, CONTINUED = "·", "─"
MOST = 2000
"""Most columns of a table."""


def table(timeline: Timeline, width: int = 0) -> str:
    """Format a timeline (integer or fractional times) as a text table, wrapped after `width` characters (0: never).

    Raises ValueError if the table needs more than `MOST` columns.

    >>> from parallel.pipeline.schedule.lowering import lower
    >>> from parallel.pipeline.schedule.pipeline_plan import build
    >>> from parallel.pipeline.schedule.simulator import simulate
    >>> print(table(simulate(lower(build("1f1b", stages=2, microbatches=2)))))
    stage 0  F0  F1  ·   ·   BW0 ─   ·   BW1 ─
    stage 1  ·   F0  BW0 ─   F1  BW1 ─   ·   ·
    """
    moments = [Fraction(moment) for line in timeline.computed for event in line for moment in (event.start, event.end)]
    unit = Fraction(math.gcd(*(m.numerator for m in moments)) or 1, math.lcm(*(m.denominator for m in moments)))
    columns = math.ceil(Fraction(timeline.makespan) / unit)
    if columns > MOST:  # the common unit of floats may be a tiny power of two
        raise ValueError(f"timeline: expected times with a common unit, found {columns} columns")
    rows = [_cells(line, unit, columns) for line in timeline.computed]
    cell = max((len(text) for row in rows for text in row), default=1)
    names = [f"stage {stage}" for stage in range(len(rows))]
    margin = max(map(len, names)) + 2
    across = max(1, (width - margin) // (cell + 1)) if width else columns or 1
    bands = [range(start, min(start + across, columns)) for start in range(0, columns, across)]
    return "\n\n".join(
        "\n".join(
            (name.ljust(margin) + " ".join(row[column].ljust(cell) for column in band)).rstrip()
            for name, row in zip(names, rows)
        )
        for band in bands
    )


def _cells(line: Sequence[PipelineEvent], unit: Fraction, columns: int) -> list[str]:
    row = [IDLE] * columns
    for event in line:
        first, stop = (int(Fraction(moment) / unit) for moment in (event.start, event.end))
        kind, primes, number = event.action.kind, "'" * event.action.chunk, event.action.microbatch  # as in BW'5
        row[first:stop] = [f"{kind}{primes}{number}", *[CONTINUED] * (stop - first - 1)] if stop > first else []
    return row
