"""Traces keep to the Trace Event Format: every event is complete, and what a thread does is nested."""

import json
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.span_checks import check

from collectives.algorithms import catalog
from collectives.benchmark import traces

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("algorithm", catalog.names("allreduce"))
def test_the_model_as_a_trace(tmp_path, algorithm):
    path = tmp_path / "new" / "model.json"
    command = (
        f"scripts/trace.py --model --ranks 6 --per-node 4 --collective allreduce --algorithm {algorithm} -o {path}"
    )
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    trace = json.loads(path.read_text())
    threads = check(trace["traceEvents"])
    assert {process for process, _ in threads} == {0, 1}
    sent = [e for e in trace["traceEvents"] if e["name"].startswith("to rank")]
    came = [e for e in trace["traceEvents"] if e["name"].startswith("from rank")]
    assert len(sent) == len(came) > 0
    assert trace["otherData"]["algorithm"] == algorithm


def test_a_run_as_a_trace():
    schedule = catalog.build("allreduce", "ring", 1, 3)
    begins, kinds = [(0, 1), (1, 3), (2, 5), (3, 7)], ["copy", *["start", "wait"] * 4]
    times = [0.1 * moment for moment in range(len(kinds) + 1)]
    entries = traces.of_calls("ring", 1, 0, schedule, 3, begins, kinds, times)
    check([*traces.names([0, 0]), *entries])
    rounds = [entry for entry in entries if entry["cat"] == "round"]
    assert [entry["name"] for entry in rounds] == [f"round {index}" for index in range(4)]
    assert rounds[0]["args"]["steps"] == "→2 [0]  ←0 [2] +"
    assert [(before["ts"] + before["dur"], after["ts"]) for before, after in pairwise(rounds)] == [
        (entry["ts"], entry["ts"]) for entry in rounds[1:]
    ]


class Message:
    def start(self):
        raise NotImplementedError


def test_calls_are_told_by_what_they_do():
    message = Message()
    assert traces.kind_of(message.start, waits=True) == "wait"
    assert traces.kind_of(message.start, waits=False) == "start"
    assert traces.kind_of(partial(np.add, 1), waits=False) == "add"
