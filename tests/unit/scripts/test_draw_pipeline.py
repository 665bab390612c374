"""chorus draw pipeline: text, pictures and CSV; what was measured; wrong requests."""

import json
from unittest import mock

import pytest
from support.program_runs import call

from parallel.cli import draw_pipeline
from parallel.cli.reports import timelines
from parallel.pipeline.schedule.actions import from_csv
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.schedules import SCHEDULES


def script(*arguments):
    with mock.patch.dict(SCHEDULES):  # a schedule from a file must not stay for other tests
        return call(draw_pipeline.main, *arguments)


def test_as_text():
    done = script("--schedule", "zb-h1", "--schedule", "1f1b", "--stages", 2, "--microbatches", 3)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "zb-h1, 2 stages, 3 micro-batches"
    assert lines[1] == "takes 10, idle 10.0% (1/10); keeps 2, 2 micro-batches; 6 messages"
    assert lines[3] == "stage 0  F0 F1 ·  B0 W0 F2 B1 W1 B2 W2"
    assert "1f1b, 2 stages, 3 micro-batches" in lines


def test_pairs_of_passes():
    done = script("--schedule", "dualpipe", "--schedule", "1f1b", "--stages", 2, "--overlap", 1)
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        "dualpipe, 2 stages, 8 micro-batches, 12 pairs",
        "takes 18, idle 0.0%; keeps 3, 3 micro-batches in one of 2 chunks; 16 messages",
    ]
    assert "1f1b, 2 stages, 8 micro-batches" in lines


@pytest.mark.parametrize("name", ["zb-v", "pipedream"])
def test_as_a_picture(tmp_path, name):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "a.png"
    done = script("--schedule", name, "--message", "1/4", "-o", path)
    assert done.returncode == 0 and done.stderr == ""
    assert path.read_bytes().startswith(b"\x89PNG")


def test_as_a_table_and_back(tmp_path):
    table = tmp_path / "mine.CSV"
    assert script("--schedule", "zb-v", "--stages", 3, "--microbatches", 4, "-o", table).returncode == 0
    assert from_csv(table.read_text()) == build("zb-v", 3, 4).actions
    done = script("--schedule", table, "--placement", "vee")
    assert done.returncode == 0, done.stderr
    assert f"{table}, 3 stages, 4 micro-batches" in done.stdout


def trace_of(path, steps, missing=()):
    """A run of two stages and one micro-batch: every step a millisecond for each action, 10 ms between steps."""
    when = {"0F0": 0, "1F0": 1, "1B0": 2, "1W0": 3, "0B0": 3, "0W0": 4}
    entries = [{"name": "thread_name", "ph": "M", "ts": 0, "pid": 0, "tid": 0, "args": {"name": "rank 0"}}]
    for step in range(steps):
        for name, start in when.items():
            if name not in missing:
                stage = int(name[0])
                for replica in (0, 10):
                    entries.append(
                        {"name": name, "ph": "X", "pid": 0, "tid": stage + replica,
                         "ts": 1000 * (10 * step + start + replica), "dur": 500 * (1 + step)}
                    )  # fmt: skip
        entries.append({"name": "allreduce", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 5})
    path.write_text(json.dumps({"traceEvents": entries}))
    return path


def test_the_last_step_that_was_measured(tmp_path):
    band = timelines.measured(trace_of(tmp_path / "a.json", 3))
    assert [[str(event.action) for event in line] for line in band.lines] == [
        ["0F0", "0B0", "0W0"],
        ["1F0", "1B0", "1W0"],
    ]
    assert [event.start for event in band.lines[0]] == pytest.approx([0, 0.003, 0.004])
    assert [event.end - event.start for event in band.lines[1]] == pytest.approx([0.0015] * 3)
    assert band.title == "measured: 5.5 ms, idle 31.8%"  # computations at once count once


def test_a_last_step_of_fewer_micro_batches_is_not_mixed_with_the_one_before(tmp_path):
    starts = [*enumerate(["0F0", "0F1", "0BW0", "0BW1"]), *enumerate(["0F0", "0BW0"], start=9)]
    entries = [{"name": name, "ph": "X", "pid": 0, "tid": 0, "ts": at * 1000, "dur": 500} for at, name in starts]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": entries}))
    (line,) = timelines.measured(tmp_path / "a.json").lines
    assert [str(event.action) for event in line] == ["0F0", "0BW0"]


@pytest.mark.parametrize("steps", [1, 3])  # of the last step some computations overlap, as those of pairs do
def test_measured_below_simulated(tmp_path, steps):
    pytest.importorskip("matplotlib")
    trace, path = trace_of(tmp_path / "a.json", steps), tmp_path / "both.png"
    done = script("--schedule", "zb-h1", "--stages", 2, "--microbatches", 1, "--measured", trace, "-o", path)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "expected a trace"),
        ("[]", "expected a trace"),
        ('{"traceEvents": [{"name": "allreduce", "ph": "X"}]}', "nothing in this trace is named like an action"),
    ],
)
def test_traces_without_a_step_are_refused(tmp_path, text, told):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        timelines.measured(tmp_path / "a.json")


@pytest.mark.parametrize(
    "arguments, told",
    [
        ("--schedule 1f1c", "schedule: expected one of naive, gpipe"),
        ("--schedule 1f1b --stages 0", "stages: expected a whole number from 1 on, found '0'"),
        ("--schedule 1f1b --virtual 2", "virtual: 1f1b has 1 parts"),
        ("--schedule 1f1b --forward -1", "-1: expected a number from 0 on"),
        ("--schedule 1f1b --message 1/0", "1/0: expected a number from 0 on"),
        ("--schedule 1f1b -o a.txt", "a.txt: expected a name that ends in .png, .pdf, .svg, .jpg, .csv"),
        ("--schedule 1f1b --schedule gpipe -o a.csv", "expected one for a .csv, found 2"),
        ("--schedule nowhere.csv", "No such file or directory: 'nowhere.csv'"),
        ("--schedule 1f1b --measured nowhere.json", "nowhere.json: expected a trace"),
    ],
)
def test_wrong_requests(arguments, told):
    done = script(*arguments.split())
    assert done.returncode == 2 and told in done.stderr
