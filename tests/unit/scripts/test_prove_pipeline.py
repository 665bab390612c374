"""chorus prove pipelines proves the table, and ends with a status other than 0 at a planted fault."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import SOURCES

from parallel.pipeline.schedule import formulas
from parallel.pipeline.schedule.actions import BW, F
from parallel.pipeline.schedule.formulas import Formulas
from parallel.pipeline.schedule.schedules import SCHEDULES, ScheduleEntry, gpipe

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ("-m", "parallel.cli.main", "prove", "pipelines")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def test_the_table_is_proved_from_the_command_line():
    done = subprocess.run(
        [sys.executable, *PROGRAM, "--stages", "3", "--microbatches", "6", "--jobs", "1"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:-2]}
    assert list(rows) == list(SCHEDULES)
    assert rows["1f1b"] == ["24", "25.0%", "3", "24", "(p-1)*(F+B+W)"]
    assert rows["zb-h1"] == ["20", "10.0%", "3", "24", "(p-1)*(F+B-W)"]
    assert lines[-1].startswith("proved 288 plans of 11 schedules for up to 3 stages and 6 micro-batches")


@pytest.fixture
def module():
    spec = importlib.util.spec_from_file_location(
        "prove_pipeline_under_test", SOURCES / "parallel" / "cli" / "prove_pipeline.py"
    )
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def stuck(stage, stages, microbatches):
    """The last micro-batch comes back before it has gone forward, from the third stage on."""
    for m in range(microbatches):
        yield from [F(stage, m), BW(stage, m)][:: -1 if stage > 1 and m == microbatches - 1 else 1]


def test_a_planted_deadlock_is_found(module, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "planted", ScheduleEntry(stuck))
    assert module.first_fault("planted", 2, 4) == (None, 4)
    found, count = module.first_fault("planted", 3, 4)
    assert count == 0 and "stages=3" in found and "deadlock" in found and "\nstage  2" in found


@pytest.mark.parametrize(
    "says, told",
    [
        (Formulas("(p-1)*(F+B)", "m"), "planted: idle for 3, expected (p-1)*(F+B) = 2"),
        (Formulas("(p-1)*(F+B+W)", "min(m, p)"), "planted: stage 0 keeps 3 micro-batches, expected min(m, p) = 2"),
    ],
)
def test_a_formula_that_is_wrong_is_found(module, monkeypatch, says, told):
    monkeypatch.setitem(SCHEDULES, "planted", ScheduleEntry(gpipe))
    monkeypatch.setitem(formulas.FORMULAS, "planted", says)
    found, _ = module.first_fault("planted", 2, 9)
    assert told in found


def test_what_holds_nowhere_is_not_compared(module, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "planted", ScheduleEntry(gpipe))
    monkeypatch.setitem(formulas.FORMULAS, "planted", Formulas("0", "0", holds="m > 100"))
    assert module.first_fault("planted", 2, 3) == (None, 3)


@pytest.mark.parametrize("argument", ["--stages", "--microbatches", "--jobs"])
def test_wrong_requests(argument):
    done = subprocess.run(
        [sys.executable, *PROGRAM, argument, "0"], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and f"argument {argument}: expected a whole number from 1 on, found '0'" in done.stderr
