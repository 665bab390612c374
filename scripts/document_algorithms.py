"""Write docs/algorithms.md, and the table of algorithms in README.md, from the catalogue.

    python scripts/document_algorithms.py
    python scripts/document_algorithms.py --check

With --check nothing is written, and the status is 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from collectives import Communicator, algorithms
from collectives.analysis import draw
from collectives.algorithms.catalog import BOUNDS, CATALOG, Algorithm, blocks, build_all
from collectives.selection.timing_table import NATIVE
from collectives.schedule.semantics import MEANINGS

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- algorithms -->\n", "<!-- end of algorithms -->\n"

METHODS = {
    "barrier": ("Barrier",),
    "broadcast": ("Bcast",),
    "reduce": ("Reduce",),
    "scatter": ("Scatter", "Scatterv"),
    "gather": ("Gather", "Gatherv"),
    "allgather": ("Allgather", "Allgatherv"),
    "reduce_scatter": ("Reduce_scatter_block", "Reduce_scatter"),
    "allreduce": ("Allreduce",),
    "alltoall": ("Alltoall", "Alltoallv"),
    "scan": ("Scan",),
    "exscan": ("Exscan",),
}
"""The methods that run each collective of the catalogue; their docstrings say what it does."""

SMALL, DRAWN = 3, 5
"""Ranks in the drawings of meanings and of schedules."""

NODES, SEGMENTS = (0, 0, 0, 1, 1), 3
"""Where ranks are in drawings of algorithms that know nodes; segments in those that pipeline by themselves."""

HEAD = f"""\
# Algorithms

*Written by `python scripts/document_algorithms.py` from the catalogue; a test compares the two.*

Every algorithm here works for any number of ranks, any root and any count, and can be pipelined over segments
of its data. `python scripts/prove.py` proves that, and holds the schedules against the rounds, bytes and
combined bytes on this page.

## How to read it

**Letters.** p ranks; n bytes in the whole vector, or in all blocks that a rank can hold; q = ⌈log₂ p⌉,
f = ⌊log₂ p⌋, P = 2^f the largest power of two up to p; odd = 0 if p is one, else 1; ones the ones in p-1 written in
binary, hops those in all of 0 to p-1; folds the sum of min(2^i, p-P) over i < f. A message of m bytes costs α + m β,
to combine m bytes costs m γ; a rank sends one message and receives another at the same time. Algorithms that pipeline
by a rule of their own do so in k segments. Those that know which ranks share a node are on N nodes of M ranks here,
qN = ⌈log₂ N⌉, qM = ⌈log₂ M⌉, oddN is odd for N; all else holds for nodes of any sizes as well.

**Tables.** *Rounds* is the longest chain of messages that wait for each other. *Bytes* is what the busiest rank
sends or receives, whichever is more. *Combined* is what the busiest rank combines. *Cost* is the time until
the last rank is done, for the root for which that is longest. After ≤ stand limits that are kept and nearly reached.
*Rank order* says whether ranks are combined in order, as operations that do not commute need; on several nodes,
where it is kept by *neighbours*, only if the ranks of each are. *Lengths* says how blocks of a v-form whose
lengths ranks do not know travel: without them, or after a first run of the same schedule with the lengths
themselves, which costs its rounds once more. The bounds hold one by one: an algorithm need not be able to meet all
of them at once.

**Before and after.** A row per rank, a letter per block: `b1` is block b as rank 1 brought it, `b012` the sum
of those of ranks 0, 1 and 2, and `{draw.IDLE}` may be anything. The root is rank 0.

**Schedules.** For {DRAWN} ranks and root 0, a row per round and a column per rank. Within a round all
messages fly at once, and local work comes after them. Where nodes matter, ranks 0 to 2 are on one and 3 and 4 on
another; what pipelines by itself does so in {SEGMENTS} segments.

```text
{draw.LEGEND}
```

`python scripts/draw_schedule.py` draws any of them, for any number of ranks, root and segments, as text or as
a picture.
"""


def pretty(formula: str) -> str:
    """A formula of the catalogue for people.

    >>> pretty("2*(p-1)/p")
    '2(p−1)/p'
    """
    return formula.replace("*", "").replace("-", "−").replace("+", " + ")


def times(formula: str, unit: str) -> str:
    """A formula as a factor of `unit`; nothing for zero.

    >>> times("q+p-1", "α"), times("1", "n β"), times("0", "γ")
    ('(q + p−1) α', 'n β', '')
    """
    if formula in ("0", "1"):
        return unit * int(formula)
    tree = ast.parse(formula, mode="eval").body
    is_sum = isinstance(tree, ast.BinOp) and isinstance(tree.op, (ast.Add, ast.Sub))
    return f"({pretty(formula)}) {unit}" if is_sum else f"{pretty(formula)} {unit}"


def cost(entry: Algorithm) -> str:
    """What an algorithm costs, in alpha, beta and gamma."""
    terms = (
        times(entry.rounds, "α"),
        times(entry.beta or entry.volume, "n β"),
        times(entry.gamma or entry.combined, "n γ"),
    )
    return at_most(entry, " + ".join(filter(None, terms)))


def at_most(entry: Algorithm, formula: str) -> str:
    """The formula, marked if it is a limit."""
    return f"≤ {formula}" if formula and not entry.exact else formula


def order(entry: Algorithm) -> str:
    """Whether rank order is kept."""
    if not entry.ordered:
        return "no"
    return "by neighbours" if entry.placed else "kept"


def source(entry: Algorithm) -> str:
    """Where an algorithm comes from: the brackets with a year in its docstring, or else in its module's."""
    for described in (entry.generate, inspect.getmodule(entry.generate)):
        text = " ".join((inspect.getdoc(described) or "").split())
        found = re.findall(r"\(([^()]*\b(?:19|20)\d\d\b[^()]*)\)", text)
        if found:
            return str(found[-1]).rstrip(".")
    return ""


def first_line(described: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(described) or "").splitlines()[0]


def rows(heads: list[str], lines: list[list[str]]) -> str:
    """A Markdown table without the columns that are empty."""
    kept = [column for column in range(len(heads)) if any(line[column] for line in lines)]
    table = [[row[column] for column in kept] for row in [heads, ["---"] * len(heads), *lines]]
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def fenced(text: str) -> str:
    """A block of text, as it is."""
    return f"```text\n{text}\n```\n"


def bounds(collective: str) -> str:
    """The lower bounds in a sentence."""
    bound = BOUNDS[collective]
    parts = [f"{pretty(bound.rounds)} rounds"]
    if bound.volume != "0":
        parts.append(f"{times(bound.volume, 'n')} bytes in or out of the busiest rank")
    if bound.combined != "0":
        parts.append(f"{times(bound.combined, 'n')} bytes combined at the busiest rank")
    return f"**Bounds:** at least {'; '.join(parts)}."


def table(collective: str) -> str:
    """The algorithms of a collective."""
    reduces = MEANINGS[collective].reduces
    v_forms = any(entry.private for entry in CATALOG[collective].values())
    heads = ["algorithm", "idea", "rounds", "bytes", "combined", "cost", "rank order", "lengths", "source"]
    lines = [
        [
            f"`{name}`",
            entry.idea,
            at_most(entry, pretty(entry.rounds)),
            at_most(entry, times(entry.volume, "n")),
            at_most(entry, times(entry.combined, "n")),
            cost(entry),
            order(entry) if reduces else "",
            ("not needed" if entry.private else "sent ahead") if v_forms else "",
            source(entry),
        ]
        for name, entry in CATALOG[collective].items()
    ]
    return rows(heads, lines)


def chapter(collective: str) -> Iterator[str]:
    """All about one collective."""
    meaning = MEANINGS[collective]
    yield f"## {collective}\n"
    for method in METHODS[collective]:
        yield f"- `{method}`: {first_line(getattr(Communicator, method))}"
    yield ""
    if meaning.synchronises:
        yield "No data moves: what counts is that nobody leaves before everybody came.\n"
    else:
        yield fenced(draw.meaning(collective, SMALL))
    yield f"{bounds(collective)}\n"
    yield table(collective)
    for name, entry in CATALOG[collective].items():
        yield f"### {collective}: {name}\n\n{entry.idea}\n"
        segments = SEGMENTS if entry.cuts else 1
        schedules = build_all(collective, name, DRAWN, 0, segments, NODES)
        yield fenced(draw.table(schedules, blocks(collective, name, DRAWN) * segments))


def page() -> str:
    """docs/algorithms.md."""
    contents = " · ".join(f"[{collective}](#{collective})" for collective in CATALOG)
    chapters = (line for collective in CATALOG for line in chapter(collective))
    return f"{HEAD}\n{contents}\n\n" + "\n".join(chapters).rstrip() + "\n"


def readme(text: str) -> str:
    """README.md with the table between the two marks made anew."""
    methods: dict[tuple[str, ...], list[str]] = {}
    for collective in CATALOG:
        for method in METHODS[collective]:
            asked = algorithms(method.lower() if method.endswith("v") else collective)
            named = [name for name in asked if name != NATIVE]
            methods.setdefault((collective, *named), []).append(f"`{method}`")
    lines = [
        [", ".join(together), ", ".join(f"`{name}`" for name in named)] for (_, *named), together in methods.items()
    ]
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rows(['method', 'algorithms'], lines)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file is out of date")
    arguments = parser.parse_args()
    late = False
    for path, make in ((ROOT / "docs/algorithms.md", lambda old: page()), (ROOT / "README.md", readme)):
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = make(old)
        if new == old:
            continue
        late = True
        if not arguments.check:
            path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'is out of date' if arguments.check else 'written'}")
    return int(late and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
