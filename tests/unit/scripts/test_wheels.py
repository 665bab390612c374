"""scripts/wheels: interpreters on PATH or named ones, a table of the checks, and the exit status."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("bash", "cat", "cp", "dirname", "find", "grep", "ls", "mkdir", "mktemp", "rm", "sed", "sh", "timeout", "touch")

STUB = """#!/bin/sh
# A Python whose virtual environments have a pip that makes an empty wheel, and print what a program would.
case "$*" in
    *python_version*) echo {version} ;;
    *venv*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *" wheel "*)
        test -f "$9/setup.py" || exit 1
        mkdir "$8" && touch "$8/chorus-{version}-$CHORUS_PURE.whl" ;;
    *" install "*) echo "installs ${{6##*/}}" >&2 ;;
    *smoke.py) {program} ;;
esac
"""


def wheels(tmp_path, *arguments, **pythons):
    """Run the script with stubs in a folder of its own on PATH: version, and program that is run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, (version, program) in pythons.items():
        stub = folder / name.replace("_", ".")
        stub.write_text(STUB.format(version=version, program=program))
        stub.chmod(0o755)
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    command = [str(ROOT / "scripts" / "wheels"), "--out", str(tmp_path / "out"), *arguments]
    environment = {"PATH": str(folder), "HOME": str(tmp_path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


GOOD = "echo chorus 0.1.0, compiled engine and kernels"


def test_every_python_on_path_and_one_wheel_for_all_others(tmp_path):
    done = wheels(tmp_path, python3_11=("3.11.7", GOOD), python3_14=("3.14.1", GOOD))
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:3] for line in done.stdout.splitlines()]
    assert lines == [
        ["Python", "check", "wheel"],
        ["3.11.7", "passed", "chorus-3.11.7-0.whl"],
        ["3.14.1", "passed", "chorus-3.14.1-0.whl"],
        ["3.11.7", "passed", "chorus-3.11.7-1.whl"],
    ]
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert "installs chorus-3.14.1-0.whl[mpich]" in done.stderr


@pytest.mark.parametrize("program", ["exit 1", "echo chorus 0.1.0, in Python instead of C: _engine"])
def test_a_wheel_that_fails_or_lacks_a_module(tmp_path, program):
    done = wheels(tmp_path, "--mpi", "none", "python3.12", python3_11=("3.11.7", GOOD), python3_12=("3.12.1", program))
    assert done.returncode == 1 and "3.11.7" not in done.stdout
    rows = [line.split()[1] for line in done.stdout.splitlines()[1:]]
    assert rows == ["failed", "failed" if program == "exit 1" else "passed"]  # the pure one has no module in C
    assert "installs chorus-3.12.1-0.whl\n" in done.stderr


def test_wrong_arguments_and_no_python(tmp_path):
    done = wheels(tmp_path)
    assert done.returncode == 1 and "name a Python" in done.stderr
    command = [str(ROOT / "scripts" / "wheels"), "--output"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: scripts/wheels")
