"""Logs, early stops and best checkpoints of `chorus train`."""

import csv
import json
import sys

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("threadpoolctl")

from parallel.checkpoint.checkpoint_files import all_in
from parallel.cli import train
from parallel.cli.reports.metrics import check_tensorboard

TASK = ["--data", "teacher_classes", "--model", "mlp:tiny", "--batch", "512", "--threads", "1", "--test-every", "2"]


def run(*arguments):
    return train.main([str(one) for one in (*TASK, *arguments)])


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_table_is_that_of_the_json_lines(tmp_path):
    files = ["--csv", tmp_path / "m.csv", "--json", tmp_path / "m.jsonl"]
    assert run("--steps", 4, "--checkpoint", tmp_path / "c", *files) == 0
    assert run("--steps", 6, "--resume", all_in(tmp_path / "c")[-1], *files) == 0
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    rows = rows_of(tmp_path / "m.csv")
    assert [int(row["step"]) for row in rows] == [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]
    for row, line in zip(rows, lines):
        assert {name: value for name, value in row.items() if value} == {
            name: str(line[name]) for name in row if line.get(name) is not None
        }
    assert rows[1]["test_loss"] and not rows[2]["test_loss"] and rows[-1]["final"] == "True"


def test_an_early_stop(tmp_path, capsys):
    """With a learning rate of 0 the second test is no better, and the third one neither."""
    metrics = tmp_path / "m.csv"
    assert run("--steps", 40, "--rate", 0, "--early-stop", 2, "--csv", metrics) == 0
    assert "ended after step 7: 2 tests in a row had no better loss" in capsys.readouterr().out
    assert [row["step"] for row in rows_of(metrics)][-2:] == ["7", "7"]


def test_a_plateau_continues_after_a_restart(tmp_path):
    """The rate falls after the third test, and stays there."""
    options = ["--rate", 1e-9, "--warm-up", 40, "--plateau", 1, "--plateau-factor", 0.5, "--csv"]
    assert run("--steps", 12, *options, tmp_path / "whole.csv") == 0
    files = ["--checkpoint", tmp_path / "c"]
    assert run("--steps", 12, *options, tmp_path / "part.csv", *files, "--every", 5) == 0
    (found,) = [path for path in all_in(tmp_path / "c") if path.name.endswith("5")]
    assert run("--resume", found, *options, tmp_path / "part.csv") == 0
    whole, part = (
        [(row["step"], row["rate"], row["loss"]) for row in rows_of(tmp_path / name)]
        for name in ("whole.csv", "part.csv")
    )
    assert whole == part
    rates = [float(rate) for _, rate, _ in whole if rate]
    assert rates[6] < rates[5] and rates[1] > rates[0]


def test_the_best_checkpoints(tmp_path):
    """Rates that destroy the model: the first tests are the best ones."""
    options = ["--steps", 12, "--rate", 3, "--optimizer", "sgd", "--clip", 0, "--json", tmp_path / "m.jsonl"]
    assert run(*options, "--checkpoint", tmp_path / "c", "--keep", 1, "--keep-best", 2) == 0
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["test_loss"] for line in lines if "test_loss" in line and not line.get("final")}
    assert len(scores) == 6
    best = sorted(scores, key=scores.get)[:2]
    assert [int(path.name[5:]) for path in all_in(tmp_path / "c")] == sorted({*best, 12})


def test_event_files(tmp_path):
    events = pytest.importorskip("tensorboardX.proto.event_pb2")

    assert run("--steps", 4, "--tensorboard", tmp_path / "events") == 0
    (file,) = (tmp_path / "events").iterdir()
    data, found, at = file.read_bytes(), [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        event = events.Event.FromString(data[at + 12 : at + 12 + length])
        found += [(value.tag, event.step) for value in event.summary.value]
        at += 16 + length
    assert {("loss", step) for step in range(1, 5)} <= set(found) and ("test_loss", 2) in found


def test_event_files_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="event files need the library tensorboardX: pip install"):
        check_tensorboard(tmp_path / "events")
    assert not (tmp_path / "events").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep-best", "2"], "--keep-best: expected a number from 0 on, and --checkpoint DIR; found 2"),
        (["--plateau-factor", "0.5"], "plateau_factor: it belongs to plateau, which is not given"),
        (["--early-stop", "0"], "early_stop: expected a number from 1 on, found 0"),
        (["--drop-last", "--batch", "5000"], "drop_last: 4096 samples make no step of 5000"),
        (["--drop-last", "--parallel", "federated"], "drop_last: it belongs to"),
    ],
)
def test_refused_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert message in capsys.readouterr().err
