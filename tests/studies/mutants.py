"""Mutants of the product, and the tests that find them: ``mutants.py TREE... --count 30 --seconds 1200``.

A mutant is one edit of a function (Jia and Harman, IEEE TSE 37(5), 2011). Trees have the same product and other tests.
Tests of the default tier that name the mutant's module run in a copy of every tree: first unit tests, which run once if
their text is the same, then those of tests/mpi on the tree's numbers of ranks. A line per mutant has the first part
that fails in each tree, or "survived".
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mpi_launches import end_ranks, find_mpiexec

LIMIT = 240.0
"""Seconds of one run of tests. A longer run has found the mutant: it hangs."""

PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult FloorDiv"
SWAPS = {getattr(ast, a): getattr(ast, b) for pair in map(str.split, PAIRS.split(",")) for a, b in (pair, pair[::-1])}


def edits(tree: ast.Module) -> Iterator[tuple[int, Callable[[], None]]]:
    """Line and function of every edit: comparison, operator, constant, condition, or statement left out."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in (node for function in functions for node in ast.walk(function)):
        match node:
            case ast.Compare(ops=[op]) if type(op) in SWAPS:
                yield node.lineno, partial(setattr, node, "ops", [SWAPS[type(op)]()])
            case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
                yield node.lineno, partial(setattr, node, "op", SWAPS[type(op)]())
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                yield node.lineno, partial(setattr, node, "value", value + 1)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield node.lineno, partial(setattr, node, "test", ast.UnaryOp(ast.Not(), test))
        for block in (vars(node)[name] for name in ("body", "orelse") if isinstance(vars(node).get(name), list)):
            for index, one in enumerate(block):
                if isinstance(one, ast.Assign | ast.AugAssign) or isinstance(getattr(one, "value", None), ast.Call):
                    yield one.lineno, partial(block.__setitem__, index, ast.Pass())


def files_of(tree: Path, kind: str, module: Path, most: int) -> list[str]:
    """Test files of the package that name the module most often, or its folder if none names the module."""
    texts = {file: file.read_text() for file in (tree / "tests" / kind / module.parts[0]).rglob("test_*.py")}
    for name in (module.stem, module.parent.name):
        counts = {file: len(re.findall(rf"\b{name}\b", text)) for file, text in texts.items()}
        if named := sorted(filter(counts.get, counts), key=lambda file: (-counts[file], file))[:most]:
            return [str(file.relative_to(tree)) for file in named]
    return []


def finder(tree: Path, module: Path, most: int, mpiexec: str, known: dict[str, bool]) -> str:
    """First part of the tests that fails, or "survived"; `known` has results of unit tests by their text."""
    (numbers,) = re.findall(r'default\) ranks="([\d ]+)"', (tree / "scripts/test").read_text())
    for ranks in (0, *map(int, numbers.split())):
        files = files_of(tree, "mpi" if ranks else "unit", module, most)
        text = f"{tree} {ranks}" if ranks else "".join((tree / file).read_text() for file in files)
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full", *files]
        if files and text not in known:
            words = [mpiexec, "-n", str(ranks), *words, "--with-mpi"] if ranks else words
            known[text] = run(words, tree) not in (0, 5)  # 5: no test of these files
        if known.get(text):
            return f"{ranks} ranks" if ranks else "unit"
    return "survived"


def run(words: list[str], tree: Path) -> int | None:
    """Exit status of a command in a tree; None after `LIMIT` seconds."""
    process = subprocess.Popen(
        words, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        end_ranks(process)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--packages", nargs="+", default=["collectives", "parallel", "quant"])
    for name, value in (("count", 30), ("seed", 0), ("files", 4), ("seconds", 1200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    end, chance = time.monotonic() + options.seconds, random.Random(options.seed)
    mpiexec = find_mpiexec() or parser.error("no mpiexec")
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(shutil.copytree(one, Path(folder, str(at)))) for at, one in enumerate(options.trees)]
        modules = [file.relative_to(trees[0]) for name in options.packages for file in (trees[0] / name).rglob("*.py")]
        modules = sorted(one for one in modules if any(edits(ast.parse((trees[0] / one).read_text()))))
        for _ in range(options.count):
            module = chance.choice(modules)
            source = (trees[0] / module).read_text()
            syntax = ast.parse(source)
            line, edit = chance.choice(list(edits(syntax)))
            edit()
            known: dict[str, bool] = {}
            found = []
            for tree in trees:
                (tree / module).write_text(ast.unparse(ast.fix_missing_locations(syntax)))
                found.append(finder(tree, module, options.files, mpiexec, known))
                (tree / module).write_text(source)
            print(f"{module}:{line}", *found, source.splitlines()[line - 1].strip(), sep=" | ", flush=True)
            if time.monotonic() > end:
                return


if __name__ == "__main__":
    main()
