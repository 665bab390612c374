"""Style rules that can be counted over the syntax trees: docstrings, sizes, parameters, unique class names."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from support.sources import SOURCES

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for package in ("collectives", "parallel", "quant") for path in (SOURCES / package).rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))

LONGEST_FILE = 600
LONG_FILE = 350
LONG_FILES = 12
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 9
DOCSTRING_SHARE = 0.20
PROSE_WORDS = 39_100
PROSE_COLUMNS = 120

LONG_FUNCTIONS: dict[str, str] = {}
"""Functions above `LONGEST_FUNCTION` lines, with the reason."""

OPENINGS = re.compile(r"(What|Who|Whose|Whom|Whether|Of|Where|When|How|Which|Why)\b")
VAGUE = re.compile(
    r"\b(whoever|whatever|wherever|whenever|the news|a wish|comes to|is told|are told|tells|speaks|asks|says|said|"
    r"hears|makes of|talks?|whom|kin)\b",
    re.IGNORECASE,
)
"""Words for persons where the subject is data: STYLE of the project wants the field's verbs."""


def relative(path):
    """Path of a module or script as in the project."""
    return str(path.relative_to(ROOT if path in SCRIPTS else SOURCES))


@cache
def trees():
    """Path and syntax tree of every module of the packages."""
    return [(path, ast.parse(path.read_text())) for path in FILES]


def documented(tree):
    """Line, name and docstring of every module, class and function that has one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), getattr(node, "name", "module"), text


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_docstrings_open_with_a_noun_or_an_imperative(path):
    wrong = [
        f"{relative(path)}:{line} {name}: {text.splitlines()[0]}"
        for line, name, text in documented(dict(trees())[path])
        if OPENINGS.match(text) or VAGUE.search(text.splitlines()[0])
    ]
    assert not wrong, "\n".join(wrong)


def functions():
    """Name with its file, and syntax tree, of every function."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{relative(path)} {node.name}", node


def line_count(path):
    return len(path.read_text().splitlines())


def test_files_fit_a_sitting():
    lines = {relative(path): line_count(path) for path in FILES + SCRIPTS}
    assert not {name: count for name, count in lines.items() if count > LONGEST_FILE}
    assert sum(count > LONG_FILE for count in lines.values()) <= LONG_FILES


def test_functions_fit_a_screen():
    long = {name for name, node in functions() if node.end_lineno - node.lineno >= LONGEST_FUNCTION}
    assert long == set(LONG_FUNCTIONS)


def test_functions_have_few_parameters():
    counts = {}
    for name, node in functions():
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        counts[name] = sum(argument.arg not in ("self", "cls") for argument in every)
    assert not {name: count for name, count in counts.items() if count > MOST_PARAMETERS}


def test_docstrings_are_the_smaller_part():
    lines = 0
    for _, tree in trees():
        for node in ast.walk(tree):
            for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", None), list) else ():
                if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
                    lines += statement.end_lineno - statement.lineno + 1
    assert lines < DOCSTRING_SHARE * sum(map(line_count, FILES))


def test_class_names_are_unique():
    places = defaultdict(list)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(relative(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def pages():
    return [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_readme_and_docs_are_short():
    assert sum(len(page.read_text().split()) for page in pages()) <= PROSE_WORDS


@pytest.mark.parametrize("page", [*pages(), ROOT / "CHANGELOG.md"], ids=relative)
def test_paragraphs_are_wrapped(page):
    """Tables and blocks of code may be wider."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not [line for line in text.splitlines() if len(line) > PROSE_COLUMNS and not line.startswith("|")]
