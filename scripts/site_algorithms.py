"""Page of all algorithms of the documentation site, with costs and drawings, generated from the catalogue."""

import ast
import inspect
import re
from collections.abc import Iterator

from collectives import Communicator
from collectives.algorithms.catalog import BOUNDS, CATALOG, Algorithm, blocks, build_all
from collectives.analysis import draw
from collectives.benchmark.cases import CASES
from collectives.schedule.semantics import MEANINGS

SMALL, DRAWN = 3, 5
"""Ranks in the drawings of meanings and of schedules."""

NODES, SEGMENTS = (0, 0, 0, 1, 1), 3
"""Node of each rank in drawings of algorithms that use the topology; segments of self-pipelining ones."""

HEAD = f"""\
# Algorithms

Every algorithm works for any number of ranks, any root and any length, and can be pipelined over segments of its data.
This page is generated from the catalogue. `chorus prove collectives` proves every schedule and compares it with the
rounds and bytes given here.

## Notation

- p ranks; n bytes in the whole vector, or in all blocks together. A message of m bytes costs α + m β; combining m bytes
  costs m γ. A rank sends one message and receives one message at a time.
- q = ⌈log₂ p⌉; f = ⌊log₂ p⌋; P = 2^f, the largest power of two up to p; odd = 0 if p = P, else 1.
- ones: the number of one bits of p-1. hops: the number of one bits of all integers from 0 to p-1.
  folds: the sum of min(2^i, p-P) over i < f.
- k segments, for algorithms with a pipelining rule of their own. N nodes of M ranks each, for algorithms that use the
  topology; qN = ⌈log₂ N⌉, qM = ⌈log₂ M⌉, oddN = odd for N. They work for nodes of any size.

**Columns.** *Rounds*: longest chain of dependent messages. *Bytes*: sent or received by the busiest rank, the larger of
the two. *Combined*: bytes combined by the busiest rank. *Cost*: time until the last rank is done, for the
worst root; ≤ marks an upper limit. *Rank order*: terms are combined in rank order, as operations that do not commute
need; *by neighbours* if the ranks of every node are consecutive. *Lengths*: in a v-form, block lengths that a
forwarding rank does not know are sent ahead by the same schedule. Lower bounds hold separately; no algorithm
need reach all of them.

**Before and after.** One row per rank, one letter per block: `b1` is block b of rank 1, `b012` the sum of block b over
ranks 0, 1 and 2; `{draw.IDLE}` is undefined. The root is rank 0.

**Schedules** are drawn for {DRAWN} ranks and root 0: one row per round, one column per rank. The messages of a round
are concurrent; local work follows them. Algorithms that use the topology are drawn with ranks 0 to 2 on one node and
3 and 4 on another, algorithms with a pipelining rule of their own in {SEGMENTS} segments.

```text
{draw.LEGEND}
```

`chorus draw collective` draws any algorithm for any number of ranks, as text or as a picture.
"""


def pretty(formula: str) -> str:
    """Formula of the catalogue in mathematical notation: ``2(p−1)/p`` for ``2*(p-1)/p``."""
    return formula.replace("*", "").replace("-", "−").replace("+", " + ")


def times(formula: str, unit: str) -> str:
    """Product of a formula of the catalogue and `unit`, in mathematical notation; empty text for zero.

    >>> times("q+p-1", "α"), times("1", "n β"), times("0", "γ")
    ('(q + p−1) α', 'n β', '')
    """
    if formula in ("0", "1"):
        return unit * int(formula)
    tree = ast.parse(formula, mode="eval").body
    is_sum = isinstance(tree, ast.BinOp) and isinstance(tree.op, (ast.Add, ast.Sub))
    return f"({pretty(formula)}) {unit}" if is_sum else f"{pretty(formula)} {unit}"


def cost(entry: Algorithm) -> str:
    factors = {"α": entry.rounds, "n β": entry.beta or entry.volume, "n γ": entry.gamma or entry.combined}
    return at_most(entry, " + ".join(filter(None, (times(formula, unit) for unit, formula in factors.items()))))


def at_most(entry: Algorithm, formula: str) -> str:
    """Formula, marked with ≤ if the catalogue states it as an upper limit for the algorithm."""
    return f"≤ {formula}" if formula and not entry.exact else formula


def source(entry: Algorithm) -> str:
    """Literature of an algorithm: the last parenthesis with a year in its docstring, else its module's, else empty."""
    for described in (entry.generate, inspect.getmodule(entry.generate)):
        text = " ".join((inspect.getdoc(described) or "").split())
        found = re.findall(r"\(([^()]*\b(?:19|20)\d\d\b[^()]*)\)", text)
        if found:
            return str(found[-1]).rstrip(".")
    return ""


def fenced(text: str) -> str:
    return f"```text\n{text}\n```\n"


def bounds(collective: str) -> str:
    bound = BOUNDS[collective]
    parts = [f"{pretty(bound.rounds)} rounds"]
    if bound.volume != "0":
        parts.append(f"{times(bound.volume, 'n')} bytes in or out of the busiest rank")
    if bound.combined != "0":
        parts.append(f"{times(bound.combined, 'n')} bytes combined at the busiest rank")
    return f"**Bounds:** at least {'; '.join(parts)}."


def table(collective: str) -> str:
    """Markdown table of a collective's algorithms, without empty columns."""
    reduces = MEANINGS[collective].reduces
    v_forms = any(entry.private for entry in CATALOG[collective].values())
    lines = [
        {
            "algorithm": f"`{name}`",
            "idea": entry.idea,
            "rounds": at_most(entry, pretty(entry.rounds)),
            "bytes": at_most(entry, times(entry.volume, "n")),
            "combined": at_most(entry, times(entry.combined, "n")),
            "cost": cost(entry),
            "rank order": ("no" if not entry.ordered else "by neighbours" if entry.placed else "kept") * reduces,
            "lengths": ("not needed" if entry.private else "sent ahead") * v_forms,
            "source": source(entry),
        }
        for name, entry in CATALOG[collective].items()
    ]
    heads = [head for head in lines[0] if any(line[head] for line in lines)]
    rows = [heads, ["---"] * len(heads), *([line[head] for head in heads] for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def chapter(collective: str) -> Iterator[str]:
    """Markdown lines on one collective: methods, meaning, lower bounds, and every algorithm with its drawing."""
    meaning = MEANINGS[collective]
    yield f"## {collective}\n"
    for method in (CASES[form].method for form in (collective, f"{collective}v") if form in CASES):
        yield f"- `{method}`: {(inspect.getdoc(getattr(Communicator, method)) or '').splitlines()[0]}"
    yield ""
    if meaning.synchronises:
        yield "No data moves: no rank returns before all ranks have entered.\n"
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
    chapters = (line for collective in CATALOG for line in chapter(collective))
    return HEAD + "\n" + "\n".join(chapters).rstrip() + "\n"
