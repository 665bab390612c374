"""The record of a rank: entries that the engines write, its memory, and the text on what ranks do."""

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives.engine import interpreter
from collectives.engine.assembly import assemble, calling, new_bases
from collectives.engine.extension import available, engine
from collectives.engine.instructions import CALL_RECORD, CALLS_KEPT, CallState
from collectives.engine.recorder import Recorder
from collectives.runtime.record import watcher, writer
from collectives.runtime.record.causes import are_at_work, calls_of, causes, report, unmatched_call
from collectives.runtime.record.conditions import condition
from collectives.runtime.record.layout import HEADER, MAGIC, NAME, NBYTES, OUTSIDE, VERSION, RankState, parts
from collectives.runtime.record.reader import RankRecord, in_folder, is_active, map_record, read_record, running

ENGINES = [pytest.param("interpreter", id="Python")]
if available():
    ENGINES.append(pytest.param("compiled", id="C"))


@pytest.fixture(params=ENGINES)
def recorded(request, monkeypatch):
    """(class of programs, words, entries) of an engine that writes a new record."""
    words, entries = np.zeros(1, np.int64), np.zeros(CALLS_KEPT, CALL_RECORD)
    if request.param == "compiled":
        engine.set_record(words, entries)
        yield engine.RowProgram, words, entries
        writer._opened = False
        memory = np.zeros(NBYTES, np.uint8)
        engine.set_record(np.zeros(1, np.int64), parts(memory)[1])
        return
    recorder = Recorder()
    recorder.set_record(words, entries)
    monkeypatch.setattr(interpreter, "recorder", recorder)
    yield interpreter.RowProgram, words, entries


def program(kind, function, turns):
    """Program that calls a function until it is true, described by an entry."""
    made = kind(*assemble([[[calling(function)]]], new_bases()))
    entry = np.zeros(1, CALL_RECORD)
    entry["nbytes"], entry["collective"], entry["round"], entry["peer"] = 24, "broadcast", -1, -1
    made.describe(entry, turns)
    return made


def test_starts_and_ends_of_calls(recorded):
    kind, words, entries = recorded
    results, turns = iter([False, True]), np.array([6])
    made = program(kind, lambda: next(results), turns)
    before = time.monotonic_ns()
    made.begin()
    made.advance(0)
    entry = entries[1]
    assert (words[0], turns[0], made.number, entry["number"], entry["turn"]) == (1, 7, 1, 1, 7)
    assert (entry["ended"], entry["state"], entry["nbytes"], entry["collective"]) == (
        0,
        CallState.IS_ACTIVE,
        24,
        b"broadcast",
    )
    made.advance(0)
    assert entry["state"] == CallState.HAS_ENDED and made.number == 0
    assert before <= entry["started"] <= entry["ended"] <= time.monotonic_ns()


def test_the_ring_keeps_the_last_calls(recorded):
    kind, words, entries = recorded
    made = program(kind, lambda: True, np.zeros(1, np.int64))
    for _ in range(CALLS_KEPT + 3):
        made.begin()
        made.advance(0)
    assert words[0] == CALLS_KEPT + 3
    assert sorted(entries["number"]) == list(range(4, CALLS_KEPT + 4))


def test_a_call_that_is_left(recorded):
    kind, _, entries = recorded
    made = program(kind, lambda: False, np.zeros(1, np.int64))
    made.begin()
    made.begin()
    assert [entries[1]["state"], entries[2]["state"]] == [CallState.WAS_LEFT, CallState.IS_ACTIVE]


def test_a_call_that_an_error_has_left(recorded):
    kind, _, entries = recorded
    made = program(kind, lambda: False, np.zeros(1, np.int64))
    made.begin()
    made.note_end(CallState.WAS_LEFT)
    assert entries[1]["state"] == CallState.WAS_LEFT and entries[1]["ended"] and made.is_running
    made.begin()
    made.note_end(CallState.HAS_ENDED)
    assert entries[2]["state"] == CallState.HAS_ENDED and not made.is_running


def test_programs_without_a_description(recorded):
    kind, words, _ = recorded
    made = kind(*assemble([[[calling(lambda: True)]]], new_bases()))
    made.begin()
    assert made.advance(0) == 0 and words[0] == 0


# ------------------------------------------------------------------------------------------ memory and text


def record(rank=0, rank_state=RankState.RUNS, calls=(), pid=None, **more):
    """Record of a rank with calls of (turn, started, ended, round, peer), and `more` fields of its last one."""
    memory = np.zeros(NBYTES, np.uint8)
    header, entries = parts(memory)
    header["magic"], header["version"], header["rank"], header["size"] = MAGIC, VERSION, rank, 4
    header["pid"], header["state"], header["job"] = os.getpid() if pid is None else pid, rank_state, "7"
    header["command"], header["last"] = "train.py", len(calls)
    for number, (turn, started, ended, place, peer) in enumerate(calls, 1):
        entry = entries[number]
        entry["number"], entry["turn"], entry["started"], entry["ended"] = number, turn, started, ended
        entry["round"], entry["peer"], entry["root"], entry["nbytes"] = place, peer, -1, 1 << 20
        entry["collective"], entry["algorithm"], entry["dtype"], entry["op"] = "allreduce", "ring", "float32", "SUM"
        entry["state"] = CallState.HAS_ENDED if ended else CallState.IS_ACTIVE
    for name, value in more.items():
        entries[len(calls)][name] = value
    return memory


def of(memory):
    header, entries = parts(memory)
    return RankRecord(header[0], entries)


CALL = "allreduce (ring, 1 MiB, float32 SUM) #3"


@pytest.mark.parametrize(
    "memory, expected",
    [
        (record(calls=[(3, 10**9, 0, -1, -1)]), f"waits 4 s in {CALL} of communicator 0"),
        (record(calls=[(3, 10**9, 0, 2, 1)]), f"waits 4 s in {CALL} of communicator 0, in round 2, for rank 1"),
        (record(calls=[(3, 10**9, 2 * 10**9, 2, 1)]), f"is in its own code since 3 s, after {CALL}"),
        (record(), "is in its own code since 5 s, before its first call"),
        (record(rank_state=RankState.HAS_LEFT), "has left the program, before its first call"),
        (record(pid=(1 << 22) + 1), "has died, before its first call"),
    ],
    ids=["waits", "for a rank", "ended", "no call", "left", "died"],
)
def test_text_on_a_rank(memory, expected):
    assert condition(of(memory), 5 * 10**9) == expected


def test_report_by_jobs():
    lines = list(report([of(record(1)), of(record(0))], 0, 0))
    assert lines[0] == "job 7: 2 of 4 ranks, train.py"
    assert [line.split()[1] for line in lines[1:]] == ["0", "1"]


def test_files_of_records(tmp_path):
    (tmp_path / f"7-1.{NAME}").write_bytes(record(1, calls=[(1, 1, 2, -1, -1)]).tobytes())
    (found,) = in_folder(tmp_path)
    assert found.rank == 1 and len(found.calls) == 1 and not any(map(is_active, found.calls))
    for text in (b"", bytes(NBYTES)):
        (tmp_path / f"8-1.{NAME}").write_bytes(text)
        for read in (read_record, map_record):
            with pytest.raises((ValueError, OSError)):
                read(tmp_path / f"8-1.{NAME}")


def test_the_record_of_a_process_is_found(tmp_path):
    memory = writer._memory()
    header, _ = parts(memory)
    header["magic"], header["version"], header["pid"], header["rank"] = MAGIC, VERSION, os.getpid(), 5
    for take in (read_record, map_record):
        found = [one for one in running(take) if one.header["pid"] == os.getpid()]
        assert 5 in [one.rank for one in found] or writer.record() is not None


def test_records_in_a_folder_are_found_while_their_process_runs(tmp_path, monkeypatch):
    monkeypatch.setenv(writer.FOLDER, str(tmp_path))
    header, _ = parts(writer._memory())
    header["magic"], header["version"], header["pid"], header["rank"] = MAGIC, VERSION, os.getpid(), 6
    assert [one.rank for one in in_folder(tmp_path)] == [6]
    (path,) = tmp_path.iterdir()
    found = map_record(path)
    header["rank"] = 4
    assert found.rank == 4
    assert str(path) in [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]


WAITS, MADE = (3, 10**9, 0, 1, 2), (2, 1, 2, -1, -1)


@pytest.mark.parametrize(
    "memories, expected",
    [
        ([record(0, calls=[MADE]), record(1, calls=[MADE])], []),
        (
            [record(0, calls=[MADE, WAITS]), record(1, calls=[MADE, WAITS]), record(2, calls=[MADE])],
            [r"rank 2 is in its own code since .*; ranks 0, 1 wait for it in allreduce .* #3"],
        ),
        (
            [record(0, calls=[MADE, WAITS]), record(2, calls=[MADE], rank_state=RankState.HAS_LEFT)],
            [r"rank 2 has left the program, after .* #2; rank 0 waits for it in allreduce .* #3"],
        ),
        (
            [record(0, calls=[WAITS]), record(2)],
            [r"rank 2 is in its own code since .*, before its first call; rank 0 waits for it in allreduce .* #3"],
        ),
        (
            [record(0, calls=[WAITS]), record(1, calls=[WAITS], root=1, collective="reduce")],
            [r"ranks make different calls: rank 0 allreduce \(.*\) #3, rank 1 reduce with root 1 \(.*\) #3"],
        ),
        (
            [record(0, calls=[(3, 1, 0, 1, 1)]), record(1, calls=[(7, 1, 0, 1, 0)], communicator=2)],
            [r"ranks wait for each other in different calls: rank 1 waits .* 2, in .*; rank 0 waits .* 0, in .*"],
        ),
        ([record(0, calls=[WAITS])], ["rank 2 has no record on this node"]),
        (
            [record(0, calls=[WAITS]), record(2, calls=[(3, 1, 2, -1, -1)], state=CallState.WAS_LEFT)],
            [r"rank 2 has left allreduce .* #3 before its end"],
        ),
        ([record(0, calls=[(3, 1, 0, -1, 2)], pid=(1 << 22) + 1)], ["rank 2 has no record.*", "rank 0 has died.*"]),
        (
            [
                record(0, calls=[(2, 1, 0, -1, 1)]),
                record(1, calls=[(2, 1, 0, -1, -1)], pid=(1 << 22) + 1),
                record(2, calls=[MADE], rank_state=RankState.HAS_LEFT),
            ],
            [r"rank 1 has died, after .* #2"],
        ),
    ],
    ids=[
        "none",
        "own code",
        "left",
        "never",
        "other call",
        "order",
        "unknown",
        "left the call",
        "dead",
        "dead in a call",
    ],
)
def test_causes_of_waits(memories, expected):
    found = causes(map(of, memories), 5 * 10**9)
    assert len(found) == len(expected), found
    assert all(re.fullmatch(one, text) for one, text in zip(expected, found)), found


def test_a_call_that_one_rank_has_not_made():
    ranks = [calls_of(of(record(0, calls=[MADE, (3, 1, 2, -1, -1)]))), calls_of(of(record(1, calls=[MADE])))]
    ahead, text = unmatched_call(ranks, 1, 0)
    assert ahead == 0 and re.fullmatch(r"rank 0 has made allreduce \(.*\) #3, and rank 1 has not", text)
    assert unmatched_call(ranks[:1], 1, 7) == unmatched_call([ranks[1], ranks[1]], 1, 0) == (-1, "")
    ranks[1] = calls_of(of(record(1)))
    assert unmatched_call(ranks, 1, 7) == (-1, "")  # it may not be a rank of this communicator
    assert unmatched_call(ranks, 1, 0) == (ahead, text)


@pytest.mark.parametrize(
    "late, expected", [(range(9), r", is slow \(it came last to 9 of 9 calls, by 300 ms\)"), ([3], "")]
)
def test_a_rank_that_comes_last_to_most_calls_is_slow(late, expected):
    def calls(delays):
        return [(turn, 10**9 * turn + delay, 10**9 * turn + 5 * 10**8, -1, -1) for turn, delay in enumerate(delays, 1)]

    slow = calls([3 * 10**8 if turn in late else -1 for turn in range(9)])
    even = [*calls([0] * 9), (10, 10**10, 0, 1, 2)]
    (text,) = causes(map(of, [record(0, calls=even), record(2, calls=slow)]), 11 * 10**9)
    assert re.fullmatch(rf"rank 2 is in its own code since .* #9{expected}; rank 0 waits for it in .*", text), text


@pytest.mark.parametrize(
    "looks, moved, expected",
    [(0, 0, True), (1, 0, True), (2, 0, False), (2, 5, False), (2, 8, True)],
    ids=["not seen", "seen once", "stands", "has moved long ago", "goes on"],
)
def test_a_rank_that_goes_on_in_its_own_code_is_at_work(looks, moved, expected):
    """Two looks at the same place show that it stands still; a stopped or dead rank is never at work."""
    waits, free = of(record(0, calls=[MADE, (3, 1, 0, 1, 2)])), of(record(2, calls=[MADE]))
    free.header["line_looks"], free.header["line_moved"], free.header["line_seen"] = looks, moved, 9
    assert are_at_work([waits, free], 7) is expected
    assert not are_at_work([waits, of(record(2, calls=[MADE], rank_state=RankState.HAS_LEFT))], 7)
    assert not are_at_work([waits, of(record(2, calls=[MADE], pid=(1 << 22) + 1))], 7)
    arrived = of(record(2, calls=[MADE, (3, 8, 0, -1, -1)]))
    assert are_at_work([waits, arrived], 7), "it has just begun the call"


def test_looks_at_a_line():
    """Counted while the stack is the same, and no call is made."""
    found = writer.Record(np.zeros(NBYTES, np.uint8))
    header = found._header
    found.at_line("a.py:1 in f", 1)
    assert header["line_looks"] == 1 and header["line_moved"] == 0
    found.at_line("a.py:1 in f", 1)
    assert header["line_looks"] == 2 and header["line_moved"] == 0
    found.at_line("a.py:1 in f", 2)
    assert header["line_looks"] == 1 and header["line_moved"] > 0


def test_a_forked_process_leaves_the_record_alone():
    found = writer.record()
    assert found is not None
    child = os.fork()
    if not child:
        try:
            gone = writer.record() is None
        finally:
            os._exit(0 if gone else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert writer.record() is found


def test_the_header_is_a_page():
    assert (
        HEADER.itemsize == 4096
        and CALL_RECORD.itemsize == 128
        and max(place + kind.itemsize for kind, place in HEADER.fields.values()) <= 4096
    )


def test_times_of_reports(monkeypatch, capsys):
    """Once the patience is over, and after 2, 8 and 32 times as long; and anew for the next wait."""
    found = of(record(calls=[(3, 1, 0, 2, 1)]))
    found.header["rank"] = MPI.COMM_WORLD.Get_rank()
    monkeypatch.setenv("CHORUS_PATIENCE", "3")
    monkeypatch.setattr(watcher, "neighbours", lambda: {0: found})
    monkeypatch.setattr(watcher, "_reports", 0)
    printed = []
    for idle in (1, 2.9, 3, 5, 6, 6.1, 23, 24, 95, 96, 97, 1, 3.5):
        watcher._report_if_due(idle)
        printed += [idle] * capsys.readouterr().err.count("nothing has moved")
    assert printed == [3, 6, 24, 96, 3.5]
    monkeypatch.setenv("CHORUS_PATIENCE", "0")
    watcher._report_if_due(1000)
    assert not capsys.readouterr().err


def waiting(rank, peer, **more):
    """Record of a rank that waits for a message of another one."""
    place = {"channel": OUTSIDE, "communicator": -1 - rank, "collective": "message", "algorithm": "answer"}
    return record(rank, calls=[(1, 10**9, 0, -1, peer)], **(place | more))


def test_causes_of_waits_for_messages():
    """Rank 0 waits for rank 1, and that for rank 2: this one is named, and a rank of a meeting that has not come."""
    (found,) = causes([of(waiting(0, 1)), of(waiting(1, 2)), of(record(2, pid=(1 << 22) + 1))], 5 * 10**9)
    assert found == "rank 2 has died, before its first call; rank 1 waits for it in message (answer)"
    meeting = {"channel": OUTSIDE, "communicator": 5, "collective": "step", "algorithm": "all ranks"}
    late = record(1, calls=[(2, 1, 2, -1, -1)], **meeting)
    (found,) = causes([of(record(0, calls=[(3, 10**9, 0, -1, -1)], **meeting)), of(late)], 5 * 10**9)
    assert found.startswith("rank 1 is in its own code since 5 s, after step (all ranks); rank 0 waits for it in step")
