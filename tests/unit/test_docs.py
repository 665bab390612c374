"""What the documentation says is so: its programs run, its commands exist, its links lead somewhere."""

import ast
import doctest
import importlib
import json
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import collectives
import parallel
import quant
from collectives.algorithms.catalog import CATALOG, build_all
from collectives.algorithms.catalog import blocks as blocks_of
from collectives.schedule.chunks import Layout
from collectives.schedule.semantics import MEANINGS, vector
from collectives.analysis.prove import Uniform, price

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

MPIEXEC = os.environ.get("MPIEXEC") or shutil.which(
    "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)

PYTHON_LANGUAGES, SHELL_LANGUAGES = ("python",), ("console", "bash", "sh")
CHEAP = {
    "scripts/prove.py": [],
    "scripts/draw_schedule.py": [],
    "scripts/draw_pipeline.py": [],
    "scripts/prove_pipeline.py": ["--stages", "3", "--microbatches", "4", "--jobs", "1"],
    "scripts/document_algorithms.py": [],
    "scripts/simulate.py": ["--up-to", "64", "--sizes", "8,1M"],
    "scripts/trace.py": [],
}
"""Scripts whose commands are run, with what is put behind them so that they end soon. What needs an mpirun is not."""

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
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        # As scripts/_environment.sh sets them, for a run of pytest by hand.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False, **options
    )


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_every_block_has_a_language(path):
    known = {*PYTHON_LANGUAGES, *SHELL_LANGUAGES, "json", "text"}
    assert [block for block in blocks(path) if block.language not in known] == []


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("path", [path for path in PAGES if "```python" in path.read_text(encoding="utf-8")], ids=shown)
def test_python_runs(path, ranks):
    """All of a page's programs, one after another; a block of text right after one is what it prints."""
    every = blocks(path)
    programs = [block for block in every if block.language in PYTHON_LANGUAGES]
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


@cache
def options_of(script):
    """The text in which a script says what options it has: its --help, or itself where it is a shell script."""
    if not script.endswith(".py"):
        return (ROOT / script).read_text()
    done = run([sys.executable, script, "--help"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_command(command, execute=False):
    """Whatever the command names must exist: scripts and their options, files, extras. Cheap ones may be run."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    if not words:
        return
    launched = words[0] in ("mpirun", "mpiexec")
    if launched:
        assert words[1] == "-n" and words[2].isdigit(), "say how many ranks"
        del words[:3]
        if words[:2] == ["--with-ft", "ulfm"]:  # Open MPI's
            del words[:2]
    if words[:3] == ["python", "-m", "pytest"] or words[0] == "pytest":
        paths = [word for word in words if word.startswith("tests")]
        assert paths and all((ROOT / path).exists() for path in paths)
        return
    if words[:2] == ["pip", "install"]:
        for extra in re.findall(r"\[(.*?)\]", words[-1]):
            assert extra in EXTRAS
        return
    if words[0] == "python":
        del words[0]
    script, *arguments = words
    assert script.startswith("scripts/"), f"this test does not know how to check {script}"
    assert (ROOT / script).exists(), f"there is no {script}"
    assert script.endswith(".py") or os.access(ROOT / script, os.X_OK), f"{script} is not executable"
    for argument in arguments:
        if argument == "--":
            break
        if argument.startswith("-"):
            option = argument.split("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", options_of(script)), f"no option {option}"
    if execute and script in CHEAP and not launched:
        done = run([sys.executable, script, *arguments, *CHEAP[script]])
        assert done.returncode == 0, done.stderr


COMMANDS = [(path, line, command) for path in PAGES for line, command in commands(path)]


@pytest.mark.parametrize("path, line, command", COMMANDS, ids=[f"{shown(path)}:{line}" for path, line, _ in COMMANDS])
def test_commands_exist(path, line, command):
    check_command(command, execute=True)


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_commands_in_sentences_exist(path):
    prose = re.sub(r"^```(?:.*\n)*?```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for command in re.findall(r"`((?:python |mpirun |mpiexec |pip )?[^`\s]*(?: [^`]*)?)`", prose):
        if re.match(r"(?:python )?scripts/\w+|pip install|python -m pytest", command):
            check_command(command)


def anchors(path):
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=shown)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_files_that_are_named_exist(path):
    """Names in backticks that look like a file of the project; places relative to a package count."""
    for name in re.findall(r"`([\w/.-]+/[\w.-]*)`", path.read_text(encoding="utf-8")):
        homes = (ROOT, ROOT / "collectives", path.parent)
        assert any((home / name).exists() for home in homes), f"{name} does not exist"


def test_generated_pages_are_up_to_date():
    done = run([sys.executable, "scripts/document_algorithms.py", "--check"])
    assert done.returncode == 0, f"{done.stdout}{done.stderr}python scripts/document_algorithms.py writes them anew"


ENTRIES = [(collective, name) for collective in CATALOG for name in CATALOG[collective]]


@pytest.mark.parametrize("collective, name", ENTRIES)
def test_costs_are_what_the_clock_says(collective, name):
    """The costs on the page of algorithms hold for blocks of a byte, every rank count, and the worst root."""
    meaning, entry = MEANINGS[collective], CATALOG[collective][name]
    for size in range(1, 13):
        roots = range(size) if meaning.rooted else [0]
        schedules = [build_all(collective, name, size, root) for root in roots]
        blocks = blocks_of(collective, name, size)
        nbytes, layout = vector(collective, size, blocks), Layout.packed([1] * blocks)
        for network in (Uniform(1, 0, 0), Uniform(0, 1, 0), Uniform(0, 0, 1), Uniform(1024, 1, 1)):
            seconds = max(price(one, layout, 1, network).seconds for one in schedules)
            says = entry.seconds(size, nbytes, *network)
            assert seconds == says if entry.exact else seconds <= says <= 2 * seconds, (size, network)


def test_the_house_is_complete():
    """docs/architecture.md has every module, on the floor where the test of imports sees it."""
    floors = runpy.run_path(str(ROOT / "tests/unit/test_floors.py"))
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    described = {
        name.strip("/") if "." in name else f"collectives.{name.strip('/')}": int(floor)
        for floor, names in re.findall(r"^\| (\d) \| (.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`([\w.]+/?)`", names)
    }
    standing = {module: floors["floor_of"](module) for module in floors["MODULES"] if module.count(".") == 1}
    assert described == standing


MODULES = [
    module.name
    for package in (collectives, parallel, quant)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("path", SCRIPTS, ids=shown)
def test_examples_in_scripts(path):
    done = run([sys.executable, "-m", "doctest", path])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_there(name):
    """Every public module, class and function says what it is; a compiled kernel does so where its reference is."""
    path = ROOT.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    missing = [] if ast.get_docstring(tree) else ["the module"]
    elsewhere: list[str] = []
    if path.stem in ("compiled", "device") and path.with_name("reference.py").exists():
        elsewhere = dir(importlib.import_module(f"{name.rpartition('.')[0]}.reference"))
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            missing += [] if ast.get_docstring(node) or node.name in elsewhere else [node.name]
    assert missing == []
