"""Tests of the documentation: programs run, commands and files exist, links resolve, costs are exact."""

import argparse
import ast
import contextlib
import doctest
import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from site_algorithms import page
from site_pages import options_page
from support.launches import MPIEXEC, launch_environment
from support.program_runs import call
from support.sources import SOURCES

import collectives
import parallel
import quant
from collectives.algorithms.catalog import CATALOG, build_all
from collectives.algorithms.catalog import blocks as blocks_of
from collectives.analysis.cost_functions import UniformNetwork
from collectives.analysis.simulate import price
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.semantics import MEANINGS, vector
from parallel.cli.main import find, take_ranks
from parallel.cli.programs import PROGRAMS
from parallel.cli.train_arguments import add_settings
from parallel.engine.settings import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = ROOT / "docs/reference/algorithms.md"
"""A page that exists only in the site; see scripts/site_pages.py."""

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

PYTHON_LANGUAGES, SHELL_LANGUAGES = ("python",), ("console", "bash", "sh")
CHEAP = {
    "chorus prove collectives": [],
    "chorus draw collective": [],
    "chorus draw program": [],
    "chorus draw pipeline": [],
    "chorus draw attention": [],
    "chorus draw mesh": [],
    "chorus prove pipelines": ["--stages", "3", "--microbatches", "4", "--jobs", "1"],
    "chorus simulate": ["--ranks", "64", "--up-to", "64", "--sizes", "8,1M"],
}
"""Programs whose commands are run, with arguments appended that keep them short. Commands under mpiexec are not run."""

EXTERNAL = ("srun", "sbatch", "squeue", "scancel", "scontrol", "qsub", "kubectl", "podman", "apptainer")
EXTERNAL += ("export", "module", "mkdocs", "python -m build", "tail -q", "    {")
"""Commands of other programs, which are not checked."""

RUNNER = """
import contextlib, io, json, sys
namespace = {"__name__": "__main__"}
outputs = []
for path, line, source in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile("\\n" * line + source, path, "exec"), namespace)
    outputs.append(output.getvalue())
print(json.dumps(outputs))
"""

pytestmark = pytest.mark.timeout(120)


class Block(NamedTuple):
    """A fenced block of a page; `line` is that of its fence."""

    language: str
    text: str
    line: int


def blocks(path):
    pattern = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
    text = path.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in pattern.finditer(text)]


def commands(path):
    """(line, command) of all that is to be typed into a shell: after ``$ ``, or every line where there is none."""
    for block in blocks(path):
        if block.language in SHELL_LANGUAGES:
            lines = list(enumerate(block.text.splitlines(), block.line + 1))
            typed = [(number, line[2:]) for number, line in lines if line.startswith("$ ")]
            yield from typed or lines


def shown(path):
    return str(path.relative_to(ROOT))


def run(arguments, **options):
    return subprocess.run(
        arguments, cwd=ROOT, env=launch_environment(), capture_output=True, text=True, timeout=100, check=False,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_every_block_has_a_language(path):
    known = {*PYTHON_LANGUAGES, *SHELL_LANGUAGES, "json", "text", "toml", "yaml"}
    assert [block for block in blocks(path) if block.language not in known] == []


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("path", [path for path in PAGES if "```python" in path.read_text(encoding="utf-8")], ids=shown)
def test_python_runs(path, ranks):
    """All of a page's programs, one after another; a block of text right after one is what it prints."""
    every = blocks(path)
    programs = [block for block in every if block.language in PYTHON_LANGUAGES]
    for package in ("torch", "autograd"):
        if any(f"import {package}" in block.text for block in programs):
            pytest.importorskip(package)
    given = json.dumps([(str(path), block.line, block.text) for block in programs])
    command = [sys.executable, "-c", RUNNER, given]
    if ranks > 1:
        if MPIEXEC is None:
            pytest.skip("no mpiexec")
        assert (done := run([MPIEXEC, "-n", str(ranks), *command])).returncode == 0, done.stderr
        return
    done = run(command)
    assert done.returncode == 0, done.stderr
    printed = dict(zip(programs, json.loads(done.stdout.splitlines()[-1])))
    for block, following in zip(every, [*every[1:], None]):
        if block in printed:
            expected = following.text if following is not None and following.language == "text" else ""
            assert printed[block] == expected, f"{path}:{block.line} prints something else"


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_json_parses(path):
    for block in blocks(path):
        if block.language == "json":
            json.loads(block.text)


def run_program(program, *arguments):
    """Run a script, or a command of `chorus`, with its `main` in this process if it has one."""
    if program.startswith("chorus "):
        module = PROGRAMS[program.removeprefix("chorus ")].module
    elif program.startswith("tests/studies/"):
        module = Path(program).stem
    elif wrapped := re.search(r'run\("([\w.]+)"', (ROOT / program).read_text(encoding="utf-8")):
        module = wrapped[1]
    else:
        return run([sys.executable, program, *arguments])
    with contextlib.chdir(ROOT), mock.patch.dict(os.environ, COLUMNS="200"):
        return call(importlib.import_module(module).main, *arguments)


@cache
def options_of(program):
    """Text with all options of a program: its --help-all, or the source of a shell script."""
    if program.startswith("scripts/") and not program.endswith(".py"):
        return (ROOT / program).read_text()
    done = run_program(program, *["--help-all"] if program.startswith("chorus ") else ["--help"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def split_program(words):
    """Program and arguments of a command; `chorus` may have a group before its name, and -n."""
    if words[0] != "chorus":
        return words[0], words[1:], False
    name, rest = find(words[1:])
    ranks, rest = take_ranks(rest)
    return f"chorus {name}", rest, ranks is not None


def check_command(command, execute=False):
    """Check that scripts, options, files and extras of a command exist; run a cheap one."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    if not words or command.startswith(EXTERNAL):
        return
    launched = words[0] in ("mpirun", "mpiexec")
    if launched:
        assert words[1] == "-n" and words[2].isdigit(), "expected a number of ranks"
        del words[:3]
        if words[:2] == ["--with-ft", "ulfm"]:  # Open MPI's
            del words[:2]
    if words[:3] == ["python", "-m", "pytest"] or words[0] == "pytest":
        paths = [word for word in words if word.startswith("tests")]
        assert paths and all((ROOT / path).exists() for path in paths)
        return
    if words[:2] == ["pip", "install"]:
        for extras in re.findall(r"\[(.*?)\]", words[-1]):
            assert set(extras.split(",")) <= set(EXTRAS)
        return
    if words[0] == "python":
        del words[0]
    if words[:2] == ["-m", "collectives"]:
        del words[:2]
    if words[0] in ("-c", "program.py"):
        return
    program, arguments, several = split_program(words)
    if not program.startswith("chorus "):
        known = ("scripts/", "tests/studies/", "docs/")
        assert program.startswith(known), f"this test does not know how to check {program}"
        assert (ROOT / program).exists(), f"there is no {program}"
        assert program.endswith(".py") or os.access(ROOT / program, os.X_OK), f"{program} is not executable"
    for argument in arguments:
        if argument == "--":
            break
        if argument.startswith("-"):
            option = argument.split("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", options_of(program)), f"no option {option}"
    if execute and program in CHEAP and not launched and not several:
        done = run_program(program, *arguments, *CHEAP[program])
        assert done.returncode == 0, done.stderr


COMMANDS = [(path, line, command) for path in PAGES for line, command in commands(path)]


@pytest.mark.parametrize("path, line, command", COMMANDS, ids=[f"{shown(path)}:{line}" for path, line, _ in COMMANDS])
def test_commands_exist(path, line, command):
    check_command(command, execute=True)


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_commands_in_sentences_exist(path):
    prose = re.sub(r"^```(?:.*\n)*?```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for command in re.findall(r"`((?:python |mpirun |mpiexec |pip |chorus )?[^`\s]*(?: [^`]*)?)`", prose):
        if re.match(r"(?:python )?(?:scripts|tests/studies)/\w+|chorus \w+|pip install|python -m pytest", command):
            check_command(command)


@cache
def anchors(path):
    """Anchors of the headings of a page, as GitHub and the site make them."""
    text = page() if path == GENERATED else path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=shown)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists() or there == GENERATED, f"{target} does not exist"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_files_that_are_named_exist(path):
    """Names in backticks that look like a file of the project; places relative to a package count."""
    for name in re.findall(r"`([a-z][\w/.-]*/[\w.-]*)`", path.read_text(encoding="utf-8")):
        homes = (ROOT, SOURCES, SOURCES / "collectives", ROOT / "tests/support", path.parent)
        assert any((home / name).exists() for home in homes), f"{name} does not exist"


def test_page_of_algorithms_is_complete():
    """The generated page has a section with a drawing for every algorithm."""
    text = page()
    assert [f"{collective}: {name}" for collective in CATALOG for name in CATALOG[collective]] == re.findall(
        r"^### (.*)$", text, re.MULTILINE
    )


def test_page_of_options_is_complete():
    """The generated page has a row for every option, with the argument of the command line that has it."""
    rows = re.findall(r"^\| `(\w+)` \| (?:`(--[\w-]+)`)? \|", options_page(), re.MULTILINE)
    assert [name for name, _ in rows] == [*OPTIONS]
    parser = argparse.ArgumentParser()
    add_settings(parser)
    named = {one.dest: one.option_strings[0] for one in reversed(parser._actions) if one.dest in OPTIONS}
    assert {name: argument for name, argument in rows if argument} == named


ENTRIES = [(collective, name) for collective in CATALOG for name in CATALOG[collective]]


@pytest.mark.parametrize("collective, name", ENTRIES)
def test_costs_are_what_the_clock_says(collective, name):
    """The costs on the page of algorithms hold for blocks of a byte, every rank count, and the worst root."""
    meaning, entry = MEANINGS[collective], CATALOG[collective][name]
    for size in range(1, 13):
        roots = range(size) if meaning.rooted else [0]
        schedules = [build_all(collective, name, size, root) for root in roots]
        blocks = blocks_of(collective, name, size)
        nbytes, layout = vector(collective, size, blocks), ChunkLayout.packed([1] * blocks)
        for network in (
            UniformNetwork(1, 0, 0),
            UniformNetwork(0, 1, 0),
            UniformNetwork(0, 0, 1),
            UniformNetwork(1024, 1, 1),
        ):
            seconds = max(price(one, layout, 1, network).seconds for one in schedules)
            says = entry.seconds(size, nbytes, network.alpha, network.beta, network.gamma)
            assert seconds == says if entry.exact else seconds <= says <= 2 * seconds, (size, network)


LESSONS = sorted((ROOT / "docs/lessons").glob("*.py"))


@pytest.mark.parametrize("path", LESSONS, ids=shown)
def test_lessons_fit_a_page_and_stand_alone(path):
    """Below 100 lines, with a picture; imports only mpi4py, NumPy, `collectives` and the standard library."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    found = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert found <= {"mpi4py", "numpy", "collectives", *sys.stdlib_module_names}
    page_of_lessons = (ROOT / "docs/lessons/index.md").read_text(encoding="utf-8")
    _, _, section = page_of_lessons.partition(f"[{path.name}]({path.name})")
    assert "![" in section.partition("## ")[0]


@pytest.mark.parametrize("path", [LESSONS[0], ROOT / "docs/examples/heat.py"], ids=shown)
def test_programs_run_under_mpiexec(path):
    """As a reader starts them; all of them run in tests/mpi/docs."""
    if MPIEXEC is None:
        pytest.skip("no mpiexec")
    done = run([MPIEXEC, "-n", "2", sys.executable, str(path)])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_batch_script_saves_and_goes_on(tmp_path):
    """docs/examples/job.sbatch, with stand-ins for srun and the installed program: a run, and one that resumes."""
    if MPIEXEC is None:
        pytest.skip("no mpiexec")
    for name, line in {
        "srun": f'exec {shlex.quote(str(MPIEXEC))} -n 2 "$@"',
        "chorus": f'exec {shlex.quote(sys.executable)} -m parallel.cli.main "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = ["bash", str(ROOT / "docs/examples/job.sbatch"), "--data", "teacher_classes", "--model", "mlp:tiny"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(tmp_path / "run")}
    for steps in ("3", "5"):
        with mock.patch.dict(os.environ, environment):
            done = run([*script, "--steps", steps])
        assert done.returncode == 0, done.stderr
        assert f"after {steps} steps" in done.stdout
    assert "3 steps were made" in done.stdout


def test_every_folder_is_described():
    """docs/internals/architecture.md lists every package folder."""
    text = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
    folders = [
        init.parent.relative_to(ROOT).as_posix()
        for package in ("collectives", "parallel", "quant")
        for init in sorted((ROOT / package).rglob("__init__.py"))
    ]
    assert [folder for folder in folders if f"`{folder}/`" not in text] == []


def test_figures_of_the_readme_are_those_of_the_benchmark():
    """The README shows rows of the table in docs/how-to/benchmark.md."""
    shown_rows, rows = (
        set(re.findall(r"^\| \d.*/.*$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))
        for name in ("README.md", "docs/how-to/benchmark.md")
    )
    assert shown_rows and shown_rows <= rows


def test_site_builds():
    """`mkdocs build --strict`, where mkdocs is installed (the extra docs)."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    done = run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"])
    assert done.returncode == 0, done.stderr


MODULES = [
    module.name
    for package in (collectives, parallel, quant)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith(("._engine", "._codecs", "._operators", "._updates"))  # extensions in C
]
SCRIPTS = [
    path
    for path in [*sorted((ROOT / "scripts").glob("*.py")), *sorted((ROOT / "tests/studies").glob("*.py"))]
    if ">>> " in path.read_text(encoding="utf-8") and path.stem != "site_docstrings"  # it needs the extra docs
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    if name.startswith(("collectives.torch", "parallel.torch")):
        pytest.importorskip("torch")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("path", SCRIPTS, ids=shown)
def test_examples_in_scripts(path):
    assert doctest.testmod(importlib.import_module(path.stem)).failed == 0


SELF_EXPLAINING = 16
"""Lines below which the name of a function and its body may say enough."""


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_there(name):
    """Modules, public classes and all but the shortest public functions have one; a compiled kernel at its reference.

    The entry points of a program (`main`, `parser` ...) need none: its module's docstring describes them.
    """
    path = SOURCES.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    missing = [] if ast.get_docstring(tree) else ["the module"]
    elsewhere = ["main", "parser", "parse", "arguments"] if ".cli." in name else []
    if path.stem.startswith(("compiled_", "device_")):
        for reference in path.parent.glob("reference_*.py"):
            elsewhere += dir(importlib.import_module(f"{name.rpartition('.')[0]}.{reference.stem}"))
    for node in tree.body:
        short = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno < SELF_EXPLAINING
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not (node.name.startswith("_") or short):
            missing += [] if ast.get_docstring(node) or node.name in elsewhere else [node.name]
    assert missing == []
