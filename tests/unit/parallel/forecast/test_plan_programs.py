"""Words of a chosen layout, errors of the program, and the comparison of predicted with measured steps."""

import sys

import numpy as np
import pytest

pytest.importorskip("safetensors")

from parallel.benchmark.plan_plots import draw_step
from parallel.cli import plan_layout, verify_plan
from parallel.cli.main import find
from parallel.engine.settings import complete
from parallel.forecast.step_timeline import CAUSES, StepTimeline


def test_the_option_selects_the_program():
    assert find(["plan", "--search", "--model", "mlp"]) == ("plan --search", ["--search", "--model", "mlp"])
    assert find(["plan", "--model", "mlp", "--run"])[0] == "plan --run"


def test_words_give_the_settings():
    """Options of a layout, read by the parser of `chorus train`, are its settings."""
    wanted = {"layout": "pp:1f1b", "mesh": "pp=2,dp=2", "microbatches": 4, "cuts": "0,1,2", "recompute": "full"}
    words = plan_layout.words_of(complete(wanted))
    assert dict(zip(words[::2], words[1::2])) == {
        "--parallel": "pp:1f1b",
        "--mesh": "pp=2,dp=2",
        "--microbatches": "4",
        "--cuts": "0,1,2",
        "--recompute": "full",
    }


def test_own_options_are_not_for_the_training():
    words = ["--run", "--model", "mlp", "--top", "3", "--steps=5", "--limit", "1e9"]
    assert plan_layout._words_for_training(words) == ["--model", "mlp", "--steps=5"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallel", "zero1"], "layout: the search finds it, found zero1"),
        (["--mesh", "tp=2"], "mesh: the search finds it, found tp=2"),
        (["--model", "gpt5"], "model: expected one of mlp, "),
        (["--top", "0"], "argument --top: "),
        (["--limit", "-1"], "argument --limit: "),
        (["--batch", "0"], "batch: expected a number from 1 on, found 0"),
        (["--plan-json", "/dev/null/plan.json"], "--plan-json"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["chorus plan --search"])
    with pytest.raises(SystemExit) as exit_:
        plan_layout.main(["--search", *words])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def rows(noise):
    """Rows of all cases whose measured times are 1.2, 0.9, 2 and 1.1 times the parts, and 1 ms, but for `noise`."""
    random, found = np.random.default_rng(0), {}
    for case in verify_plan.CASES:
        parts = dict(zip(("compute", "update", "shared memory", "network"), random.uniform(0.01, 0.1, 4)))
        seconds = sum(factor * part for factor, part in zip((1.2, 0.9, 2.0, 1.1), parts.values())) + 1e-3
        found[case.name] = verify_plan.CaseRow(seconds * random.uniform(1, 1 + noise), parts, {})
    return found


def test_picture_of_a_step(tmp_path):
    pytest.importorskip("matplotlib")
    step, path = StepTimeline(), tmp_path / "step.png"
    for cause in CAUSES:
        step.spend(cause, cause, 1e-3)
    step.beside("allreduce", "network", 0.0, 1e-3)
    draw_step(path, "a step", step)
    assert path.stat().st_size > 5000


def test_few_cases_are_fitted():
    assert len(verify_plan.CASES) == len({case.name for case in verify_plan.CASES}) == 30
    assert sum(case.fitted for case in verify_plan.CASES) <= 6
    assert sum(case.place == "cluster" for case in verify_plan.CASES) == 15


def test_comparison(capsys):
    assert verify_plan.compare(rows(noise=0.0))
    assert "30 steps: mean error" in capsys.readouterr().out
    assert not verify_plan.compare(rows(noise=3.0))


def test_the_fastest_of_two_measurements_counts():
    one, other = (verify_plan.CaseRow(*values, {}) for values in ((3.0, {"compute": 1.0}), (2.0, {"compute": 4.0})))
    assert one.fastest(other) == other.fastest(one) == verify_plan.CaseRow(2.0, {"compute": 1.0}, {})
