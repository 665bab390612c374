"""Traces keep to the Trace Event Format: every event is complete, and what a thread does is nested."""

from itertools import pairwise

import numpy as np
from support.span_checks import check

from collectives.algorithms import catalog
from collectives.benchmark import traces
from collectives.engine.instructions import COPY, ROW, Kind


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


def test_rows_are_told_by_what_they_do():
    def kind(name, reduction=COPY):
        row = np.zeros((), ROW)
        row["kind"], row["reduction"] = Kind[name], reduction
        return traces.kind_of(row)

    names = [kind(name) for name in ("SEND", "RECV", "LOCAL", "WAIT_STREAM", "NET_WAIT", "CALL")]
    assert names == ["send", "receive", "copy", "wait", "wait", "call"] and kind("LOCAL", 3) == "reduce"
