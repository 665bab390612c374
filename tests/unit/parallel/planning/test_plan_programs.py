"""Words of a chosen layout, errors of the program, and the comparison of predicted with measured steps."""

import argparse
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("safetensors")

import plan_accuracy
import verify_plan
from mpi4py import MPI

from collectives import Communicator
from parallel.cli import plan, plan_layout
from parallel.cli.main import UsageError, find, take_ranks
from parallel.cli.reports.plan_plots import draw_step
from parallel.cli.train_arguments import add_settings
from parallel.nn.recompute import recompute_kinds
from parallel.planning.measured.layout_choice import candidates
from parallel.planning.measured.step_timeline import CAUSES, StepTimeline
from parallel.trainer.recipes import complete

SEARCHED = [*plan_layout.FOUND, "compress"]


def test_the_option_selects_the_program():
    assert find(["plan", "--search", "--model", "mlp"]) == ("plan --search", ["--search", "--model", "mlp"])
    assert find(["plan", "--model", "mlp", "--run"])[0] == "plan --run"


def test_words_give_the_settings():
    """Options of a layout, read by the parser of `chorus train`, are its settings."""
    wanted = {"layout": "pp:1f1b", "mesh": "pp=2,dp=2", "microbatches": 4, "cuts": "0,1,2", "recompute": "full"}
    words = plan_layout.words_of(complete(wanted))
    assert dict(zip(words[::2], words[1::2])) == {
        "--layout": "pp:1f1b",
        "--mesh": "pp=2,dp=2",
        "--microbatches": "4",
        "--cuts": "0,1,2",
        "--recompute": "full",
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_candidate_can_be_trained(ranks):
    """The words of each are options of `chorus train` that give its settings."""
    parser = argparse.ArgumentParser()
    add_settings(parser)
    given = complete({"data": "copy", "model": "gpt-moe:tiny", "compress": "auto"})
    for each in candidates(given, ranks, experts=True):
        args = parser.parse_args(plan_layout.words_of(each, compress=True))
        read = complete({"data": given.data, "model": given.model, **{name: getattr(args, name) for name in SEARCHED}})
        assert [getattr(read, name) for name in SEARCHED] == [getattr(each, name) for name in SEARCHED]
        recompute_kinds(read.recompute, 2)


def test_words_of_compressed_layouts():
    """With a compression to choose from, the words say that there is none."""
    none, some = (complete({"recompute": "none", "compress": each}) for each in ("none", "int8"))
    assert plan_layout.words_of(none) == ["--layout", "dp"]
    assert plan_layout.words_of(none, compress=True)[-2:] == ["--compress", "none"]
    assert plan_layout.words_of(some)[-2:] == ["--compress", "int8"]


def test_candidates():
    """Meshes of all axes; with a compression, layouts with and without it, where there is a gradient to exchange."""
    given = complete({"data": "copy", "model": "gpt:tiny"})
    found = list(candidates(given, 4))
    assert len(found) == len(set(found)) and {each.compress for each in found} == {"none"}
    assert {each.mesh for each in found} >= {None, "cp=4", "cp=2,tp=2", "dp=2,tp=2", "tp=4", "pp=4,dp=1"}
    assert "dp=4,ep=2" in {each.mesh for each in candidates(given, 4, experts=True)}
    for compress, names in {"auto": {"none", "int8", "int4"}, "sign": {"none", "sign"}}.items():
        more = list(candidates(replace(given, compress=compress), 4))
        assert {each.compress for each in more} == names and len(more) == len(set(more)) > len(found)
        assert [each for each in more if each.compress == "none"] == found
        assert not {each.mesh for each in more if each.compress != "none"} & {"tp=4", "pp=4,dp=1"}


def test_own_options_are_not_for_the_training():
    words = ["--run", "--model", "mlp", "--top", "3", "--steps=5", "--limit", "1e9"]
    assert plan_layout._words_for_training(words) == ["--model", "mlp", "--steps=5"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "zero1"], "--layout: expected none, as the search finds it; found zero1"),
        (["--mesh", "tp=2"], "--mesh: expected none, as the search finds it; found tp=2"),
        (["--model", "gpt5"], "model: expected one of mlp, "),
        (["--top", "0"], "argument --top: "),
        (["--limit", "-1"], "argument --limit: "),
        (["--compress", "zip"], "compress: expected one of int8, "),
        (["--batch", "0"], "batch: expected a number from 1 on, found 0"),
        (["--batch", "4M"], "argument --batch: expected a whole number, found '4M'"),
        (["--limit", "nan"], "argument --limit: expected a number from 1 on, found 'nan'"),
        (["--threads", "0"], "--threads: expected 1 or more, found 0"),
        (["--threads", "9" * 20], "--threads: expected at most 65536, found 99999"),
        (["--epochs", "1e308"], "epochs: expected a number of steps, found 1e+308 epochs"),
        (["--plan-json", "/dev/null/plan.json"], "--plan-json: expected a file that can be written, found '/dev/null/"),
        (["--run", "--json", "/dev/null/a"], "--json: expected a file that can be written, found '/dev/null/a'"),
        (["--run", "--trace", "/dev/null/a"], "--trace: expected a file that can be written, found '/dev/null/a'"),
        (["--run", "--resume", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["chorus plan --search"])
    with pytest.raises(SystemExit) as exit_:
        plan_layout.main(["--search", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and message in line


@pytest.mark.parametrize(("option", "value"), [("--threads", "0"), ("--epochs", "1e308"), ("--threads", "9" * 20)])
def test_wrong_arguments_of_a_forecast(monkeypatch, capsys, option, value):
    monkeypatch.setattr(sys, "argv", ["chorus plan"])
    with pytest.raises(SystemExit) as exit_:
        plan.main([option, value])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and f"{option.strip('-')}: expected " in line


@pytest.mark.parametrize("count", ["0", "-3", "nan", "²", "1e9", "9" * 5000, ""])
def test_wrong_numbers_of_ranks(count):
    with pytest.raises(UsageError, match=r"^-n: expected a number of ranks, 1 or more, found "):
        take_ranks(["plan", "--search", "-n", count])


def rows(noise):
    """Rows of all cases whose measured times are 1.2, 0.9, 2 and 1.1 times the parts, and 1 ms, but for `noise`."""
    random, found = np.random.default_rng(0), []
    for case in verify_plan.CASES:
        parts = dict(zip(("compute", "update", "shared memory", "network"), random.uniform(0.01, 0.1, 4)))
        seconds = sum(factor * part for factor, part in zip((1.2, 0.9, 2.0, 1.1), parts.values())) + 1e-3
        measured = seconds * random.uniform(1, 1 + noise)
        found.append(plan_accuracy.CaseRow(case.name, case.question, measured, parts, case.fitted))
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


def test_comparison():
    found = plan_accuracy.compare([rows(noise=0.0)])
    assert found.within_bounds and found.correlation > 0.98
    assert list(found.lines())[32].startswith("30 steps: mean error ")
    assert not plan_accuracy.compare([rows(noise=3.0)]).within_bounds


def test_regret_of_the_layout_that_is_chosen():
    """Of two layouts the one that is predicted to be faster takes a quarter longer."""
    question = ("node", 2, "mlp")
    pair = [
        plan_accuracy.CaseRow(name, question, measured, {"compute": predicted})
        for name, measured, predicted in (("one", 1.25, 1.0), ("two", 1.0, 1.125))
    ]
    found = plan_accuracy.compare([pair])
    assert found.regrets == {question: 0.25} and not found.within_bounds
    assert list(found.lines())[-1].startswith("chosen layout of node 2 mlp: 25.0% slower")


def test_the_turn_with_the_median_quotient_counts():
    """A machine that is slow in a turn is slow for prediction and measurement."""
    turns = [
        [plan_accuracy.CaseRow("one", ("node", 2, "mlp"), measured, {"compute": predicted})]
        for measured, predicted in ((2.2, 2.0), (1.0, 1.0), (3.0, 1.5))
    ]
    found = plan_accuracy.compare(turns)
    assert [row.measured for row in found.rows] == [2.2] and found.errors == pytest.approx(2 / 2.2 - 1)


def test_steps_are_predicted_again_from_the_file(tmp_path, monkeypatch, capsys):
    """The program predicts from a file what it predicted when it measured, without its ranks."""
    case = verify_plan.TrainingCase("node", 1, "mlp:tiny", "dp", fitted=True)
    monkeypatch.setattr(verify_plan, "CASES", [case])
    monkeypatch.setattr(verify_plan, "SECONDS", 0.01)
    path = tmp_path / "rows.json"
    with Communicator(MPI.COMM_SELF) as comm:
        verify_plan.measure(comm, path, "node", turns=1)
    (turn,) = verify_plan.read_turns(path)
    assert len(turn.steps[case.name]) >= verify_plan.BLOCKS * verify_plan.STEPS[0]
    assert all("'update'" in str(record["values"]) for record in turn.records) and len(turn.records) == 2
    ((row,),) = verify_plan.rows_of([turn])
    ((later,),) = verify_plan.rows_of([turn._replace(records=turn.records[1:])])
    assert f" and {1e3 * sum(later.parts.values()):8.2f}: compute" in capsys.readouterr().out
    assert row.fitted and row.measured == later.measured and row.parts != later.parts
    with pytest.raises(ValueError, match="expected a record with the measurement"):
        verify_plan.rows_of([turn._replace(records=[{**record, "values": {}} for record in turn.records])])
    old = [turn._replace(records=[{**record, "values": {}} for record in turn.records])._asdict()]
    for text, message in (("[1]", "no file of this program"), (json.dumps(old), "remove the file and measure again")):
        path.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            verify_plan.main(["--rows", str(path)])
        assert message in capsys.readouterr().err
