"""Records as files of other programs: PyTorch's analyser of its flight recorder comes to the same verdicts as ours."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from collectives.cli import record_files
from collectives.engine.instructions import CallState
from collectives.runtime.record.causes import causes
from collectives.runtime.record.layout import MAGIC, NBYTES, VERSION, parts
from collectives.runtime.record.reader import RankRecord

DONE, UNDER_WAY = 2, 0


def rank(number, *calls, size=3):
    """Record of a rank with calls of (collective, ended, further fields)."""
    header, entries = parts(np.zeros(NBYTES, np.uint8))
    header["magic"], header["version"], header["rank"], header["size"] = MAGIC, VERSION, number, size
    header["pid"], header["last"], header["job"], header["line"] = 1, len(calls), "7", "train.py:8 in step: x"
    entries["root"] = entries["peer"] = entries["round"] = -1
    for turn, (name, ended, more) in enumerate(calls, 1):
        entry = entries[turn]
        reduces = "reduce" in name
        fields = {
            "number": turn, "turn": turn, "started": turn, "ended": ended and turn + ended, "nbytes": 96,
            "collective": name, "algorithm": "ring", "dtype": "float32" * reduces, "op": "SUM" * reduces,
            "state": CallState.HAS_ENDED if ended else CallState.IS_ACTIVE, **more,
        }  # fmt: skip
        for field, value in fields.items():
            entry[field] = value
    return RankRecord(header[0], entries)


def call(name="allreduce", ended=UNDER_WAY, **more):
    return name, ended, more


FIRST = call(ended=DONE)

DESYNCS = {
    "a rank makes no call": ([FIRST, call()], [FIRST, call()], [FIRST]),
    "two ranks make none": ([FIRST, call(peer=1)], [FIRST], [FIRST]),
    "one call more": ([FIRST, FIRST, call()], [FIRST, FIRST], [FIRST, FIRST]),
    "never a call": ([call(peer=2)], [call(peer=2)], []),
    "another collective": ([FIRST, call()], [FIRST, call()], [FIRST, call("broadcast", root=0)]),
    "two others": ([FIRST, call("reduce", root=0)], [FIRST, call("allgather")], [FIRST, call("allgather")]),
    "another length": ([FIRST, call(nbytes=48)], [FIRST, call()], [FIRST, call()]),
    "another type": ([FIRST, call()], [FIRST, call(dtype="int64")], [FIRST, call()]),
    "another order": (
        [FIRST, call("broadcast", root=0)], [FIRST, call("broadcast", root=0)], [FIRST, call("allreduce")]
    ),
    "lengths of a broadcast": (
        [FIRST, call("broadcast", root=0, nbytes=8)], [FIRST, call("broadcast", root=0)],
        [FIRST, call("broadcast", root=0)],
    ),
}  # fmt: skip
"""Calls of three ranks."""


def named(text, pattern):
    """Numbers in all places of a text where a pattern is."""
    return {int(number) for found in re.findall(pattern, text) for number in found.split(", ")}


ANALYSE = """
import sys
from torch.distributed.flight_recorder import fr_trace
for folder in sys.argv[1:]:
    print("next", file=sys.stderr, flush=True)
    fr_trace.main([folder])
"""


def records_of(desync):
    return [rank(number, *calls) for number, calls in enumerate(DESYNCS[desync])]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Outputs of PyTorch's analyser on dumps of all desyncs, in one process, as it takes seconds to start."""
    folders = []
    for desync in DESYNCS:
        folders.append(tmp_path_factory.mktemp("dumps"))
        record_files.flight_recorder(records_of(desync), folders[-1])
        assert sorted(path.name for path in folders[-1].iterdir()) == ["rank_0", "rank_1", "rank_2"]
    words = [sys.executable, "-c", ANALYSE, *map(str, folders)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    if "ModuleNotFoundError" in done.stdout:
        pytest.skip("no PyTorch with an analyser of the recorder")
    assert not done.returncode, done.stdout
    return dict(zip(DESYNCS, done.stdout.split("next\n")[1:], strict=True))


@pytest.mark.parametrize("desync", DESYNCS)
def test_verdicts_of_pytorch(verdicts, desync):
    """The same ranks are missing, or calls differ."""
    ours, theirs = "\n".join(causes(records_of(desync), 9)), verdicts[desync]
    missing = named(ours, r"rank (\d+) is in its own code")
    assert missing == named(theirs, r"missing ranks: {([\d, ]+)}"), (ours, theirs)
    assert ("ranks make different calls" in ours) == ("has errors" in theirs) == (not missing), (ours, theirs)


def test_a_trace_of_calls(tmp_path):
    path = tmp_path / "calls.json"
    record_files.trace(records_of("a rank makes no call"), path, 9)
    spans = [entry for entry in json.loads(path.read_text())["traceEvents"] if entry["ph"] == "X"]
    assert [(span["tid"], span["name"], span["cat"]) for span in spans] == [
        *[(0, "allreduce", "has_ended"), (0, "allreduce", "is_active"), (1, "allreduce", "has_ended")],
        *[(1, "allreduce", "is_active"), (2, "allreduce", "has_ended")],
    ]
    assert spans[1]["dur"] == pytest.approx(7e-3)  # microseconds, up to the moment of the trace
