"""Draw the packages of the source tree and which imports which.

    python tests/studies/draw_imports.py -o docs/images/imports.png

An arrow goes from a package to one that it imports; its width is the number of imports. Arrows that follow from others
are left out: a package may import all those that its arrows lead to, over any number of steps. Packages stand above
all those that they import.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from collectives.benchmark.race_plots import OURS
from parallel.cli.reports.training_plots import picture

SOURCES = Path(__file__).resolve().parents[2]

PACKAGES = ("quant", "collectives", "parallel")

Arrows = Counter[tuple[str, str]]
"""Numbers of imports by importing and imported package."""


def package_of(module: str) -> str:
    """Package of a module, of two levels at most; modules beside packages count as such, but for `__init__`.

    >>> package_of("collectives.runtime.planning.planner"), package_of("quant.types.Array"), package_of("quant")
    ('collectives.runtime', 'quant.types', 'quant')
    """
    first, *rest = module.split(".")
    place = SOURCES / first / (rest[0] if rest else "")
    return f"{first}.{rest[0]}" if rest and (place.is_dir() or place.with_suffix(".py").is_file()) else first


def imported(path: Path) -> Iterator[str]:
    """Modules of the packages that a file imports, at any depth, but for those that only type checkers see."""
    tree = ast.parse(path.read_text())
    unseen = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def arrows() -> Arrows:
    """Imports between packages."""
    found: Arrows = Counter()
    for path in (path for package in PACKAGES for path in sorted((SOURCES / package).rglob("*.py"))):
        own = package_of(".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"))
        for name in imported(path):
            if name.split(".")[0] in PACKAGES and (other := package_of(name)) != own:
                found[own, other] += 1
    return found


def reduced(found: Arrows) -> Arrows:
    """Arrows that do not follow from others; ValueError if packages import each other in a circle."""
    levels(found)

    @cache
    def reached(package: str) -> frozenset[str]:
        below = frozenset(other for one, other in found if one == package)
        return below.union(*map(reached, below))

    follows = {(one, far) for one, near in found for far in reached(near)}
    return Counter({arrow: count for arrow, count in found.items() if arrow not in follows})


def levels(found: Arrows) -> dict[str, int]:
    """Level of each package: 0 if it imports none, else one above the highest of those that it imports."""
    level: dict[str, int] = {}
    rest = sorted({package for arrow in found for package in arrow})
    while rest:
        below = {one: [other for first, other in found if first == one] for one in rest}
        ready = [one for one in rest if all(other in level for other in below[one])]
        if not ready:
            raise ValueError(f"expected no circle of imports, found one among {', '.join(rest)}")
        for one in ready:
            level[one] = 1 + max((level[other] for other in below[one]), default=-1)
        rest = [one for one in rest if one not in level]
    return level


def places(found: Arrows) -> dict[str, tuple[float, float]]:
    """Coordinates of each package: its level, and within it the mean of those it imports, spread to a row."""
    level, across = levels(found), dict[str, float]()
    for height in sorted(set(level.values())):
        row = [package for package, own in level.items() if own == height]
        wish = {one: np.mean([across[other] for first, other in found if first == one] or [0.0]) for one in row}
        row.sort(key=lambda one: (PACKAGES.index(one.split(".")[0]) if height == 0 else 0, wish[one], one))
        for number, one in enumerate(row):
            across[one] = number - (len(row) - 1) / 2
    return {package: (across[package], float(own)) for package, own in level.items()}


def draw(axis: Axes, found: Arrows) -> None:
    at = places(found)
    widths, heights = zip(*at.values())
    axis.set(xlim=(min(widths) - 0.6, max(widths) + 0.6), ylim=(min(heights) - 0.6, max(heights) + 0.6))
    axis.axis("off")
    colors = dict(zip(PACKAGES, OURS))
    boxes = {}
    for package, (x, y) in at.items():
        box = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": colors[package.split(".")[0]], "lw": 1.6}
        name = package.replace(".", "\n", 1)
        boxes[package] = axis.text(x, y, name, ha="center", va="center", fontsize=7.5, bbox=box, zorder=3)
    axis.figure.canvas.draw()  # places the boxes, at whose edges arrows end
    for (one, other), count in found.items():
        ends = {name: boxes[package].get_bbox_patch() for name, package in (("patchA", one), ("patchB", other))}
        look = {"arrowstyle": "-|>", "color": "0.6", "lw": 0.6 + np.log10(count), "shrinkA": 0, "shrinkB": 2} | ends
        axis.annotate("", at[other], at[one], arrowprops=look, zorder=1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("out/imports.png"), metavar="FILE")
    path = parser.parse_args(argv).output
    found = arrows()
    shown = reduced(found)
    rows = levels(shown)
    size = 1.5 * max(Counter(rows.values()).values()) + 1, 0.75 * (max(rows.values()) + 1) + 1
    with picture(path, size, 1, f"{len(rows)} packages, {len(found)} imports between them") as (axis,):
        draw(axis, shown)
    print(f"{path}: {len(rows)} packages, {len(found)} pairs of which one imports the other, {len(shown)} shown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
