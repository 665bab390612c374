"""Text drawings of schedules (messages by round and rank) and of the semantics of collectives."""

from collections.abc import Sequence

from collectives.schedule import semantics
from collectives.schedule.semantics import Value
from collectives.schedule.steps import Chunks, Copy, Recv, RecvReduce, Reduce, Schedule, Send, Step

IDLE = "·"

LEGEND = """\
→3 [0-4]     sends chunks 0 to 4 to rank 3
←1 [2]       receives chunk 2 from rank 1
←1 [2] +     receives it and combines: the incoming operand is on the left
+ ←1 [2]     the same, on the right
[2] = [7]    copies chunk 7 to chunk 2; [2] = [7] + [2] combines them
[2']         a spare copy of chunk 2
·            waits for the others, or is done"""


def chunks(what: Chunks, count: int) -> str:
    """Format chunk numbers, such as ``[6-7,0-1]``. Chunks of the k-th spare copy of the `count` chunks get k primes.

    >>> chunks((range(6, 8), range(0, 2)), 8), chunks((range(9, 11),), 8), chunks((), 8)
    ('[6-7,0-1]', "[1'-2']", '')
    """
    parts = []
    for part in what:
        for lap in range(part.start // count, -(-part.stop // count)):
            first, last = max(part.start, lap * count), min(part.stop, (lap + 1) * count) - 1
            ends = sorted({first, last})
            parts.append("-".join(f"{chunk % count}{chr(39) * lap}" for chunk in ends))
    return f"[{','.join(parts)}]" if parts else ""


def step(it: Step, count: int) -> str:
    """Format one step by `LEGEND`, such as ``→3 [0-4]`` for a send of 5 chunks to rank 3.

    >>> from collectives.schedule.steps import one
    >>> step(RecvReduce(1, one(2)), 5), step(RecvReduce(1, one(2), "right"), 5)
    ('←1 [2] +', '+ ←1 [2]')
    """
    match it:
        case Send(peer, what):
            return f"→{peer} {chunks(what, count)}".rstrip()
        case Recv(peer, what):
            return f"←{peer} {chunks(what, count)}".rstrip()
        case RecvReduce(peer, what, side):
            incoming = f"←{peer} {chunks(what, count)}"
            # the side of the sign shows the order of operands, which matters if they do not commute
            return f"{incoming} +" if side == "left" else f"+ {incoming}"
        case Reduce(source, target, side):
            mine = chunks(target, count)
            both = (chunks(source, count), mine) if side == "left" else (mine, chunks(source, count))
            return f"{mine} = {' + '.join(both)}"
        case Copy(source, target):
            return f"{chunks(target, count)} = {chunks(source, count)}"
    raise TypeError(f"expected a step, found {it!r}")


def table(schedules: Sequence[Schedule], count: int, width: int = 0) -> str:
    """Text table of the ranks' schedules: a row per round, a column per rank, a line per step.

    The data has `count` chunks. Numbers beyond are spare copies. Ranks that do not fit in `width` columns of text
    follow below. 0 for no limit.

    >>> from collectives.algorithms.catalog import build_all
    >>> print(table(build_all("broadcast", "mst", 3), 3))
    round  rank 0    rank 1    rank 2
    0      →2 [0-2]  ·         ←0 [0-2]
    1      →1 [0-2]  ←0 [0-2]  ·
    """
    rounds = max(map(len, schedules), default=0)
    columns = [
        [[f"rank {rank}"], *([step(it, count) for it in steps] or [IDLE] for steps in schedule)]
        + [[IDLE]] * (rounds - len(schedule))
        for rank, schedule in enumerate(schedules)
    ]
    numbering = [["round"], *([str(index)] for index in range(rounds))]
    bands: list[list[list[list[str]]]] = [[numbering]]
    for column in columns:
        # one column fits always
        if width and len(bands[-1]) > 1 and sum(2 + _width(one) for one in (*bands[-1], column)) - 2 > width:
            bands.append([numbering])
        bands[-1].append(column)
    return "\n\n".join("\n".join(_rows(band)) for band in bands)


def _width(column: list[list[str]]) -> int:
    return max(len(line) for cell in column for line in cell)


def _rows(columns: list[list[list[str]]]) -> list[str]:
    """Lines of a text table made of columns of cells. A cell is a list of lines."""
    rows = []
    widths = [_width(column) for column in columns]
    for cells in zip(*columns, strict=True):
        for line in range(max(map(len, cells))):
            rows.append(_aligned([cell[line] if line < len(cell) else "" for cell in cells], widths, "  "))
    return rows


def _aligned(texts: Sequence[str], widths: Sequence[int], gap: str) -> str:
    return gap.join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip()


def meaning(collective: str, size: int, root: int = 0) -> str:
    """Text table of each rank's input and required output: ``b1`` is block b of rank 1, ``b01`` the sum of two ranks'.

    >>> print(meaning("reduce_scatter", 3))
    rank  before    after
    0     a0 b0 c0  a012 ·    ·
    1     a1 b1 c1  ·    b012 ·
    2     a2 b2 c2  ·    ·    c012
    """
    blocks = semantics.MEANINGS[collective].blocks(size)
    had: list[dict[int, Value]] = [
        {block: ((rank, block),) for block in semantics.before(collective, rank, size, root)} for rank in range(size)
    ]
    wanted = [semantics.after(collective, rank, size, root) for rank in range(size)]
    ranks = [["rank"], *([str(rank)] for rank in range(size))]
    return "\n".join(_rows([ranks, [["before"], *_states(had, blocks)], [["after"], *_states(wanted, blocks)]]))


def _states(states: Sequence[dict[int, Value]], blocks: int) -> list[list[str]]:
    cells = [[_value(state.get(block)) for block in range(blocks)] for state in states]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [[_aligned(row, widths, " ")] for row in cells]


def _value(value: Value | None) -> str:
    if value is None:
        return IDLE
    block = value[0][1]
    letter = chr(ord("a") + block) if block < 26 else f"({block})"
    return letter + "".join(str(rank) for rank, _ in value)
