"""The table of measured times and its file: what lies between sizes, and that nothing in a file can do harm."""

import json

import pytest

from collectives.analysis.cost_functions import UniformNetwork
from collectives.errors import InvalidType
from collectives.selection import timing_file
from collectives.selection.cost_model import BUILT_IN, Costs
from collectives.selection.select import CallTraits, Selector
from collectives.selection.timing_file import (
    TableError,
    broadcast_table,
    default_path,
    read,
    to_json,
    warn_without_table,
    write,
)
from collectives.selection.timing_table import AlgorithmChoice, TimingKey, TimingTable, interpolate, parse, shape

RING, CHAIN = AlgorithmChoice("ring"), AlgorithmChoice("chain", 16)
KEY = TimingKey("allreduce", "blocking", 4, "4")
TABLE = TimingTable(Costs(UniformNetwork(1e-6, 2e-9, 3e-10)), {KEY: {8: {RING: 1e-6, CHAIN: 2e-6}, 1024: {RING: 4e-6}}})


class Alone:
    """One rank that stands for all."""

    def Get_rank(self):
        return 0

    def bcast(self, value):
        return value


# ------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("choice", [RING, CHAIN, AlgorithmChoice("recursive_doubling", 4)])
def test_a_choice_is_read_back_from_its_text(choice):
    assert parse(str(choice)) == choice


def test_times_lie_on_straight_lines_between_the_measured_ones():
    rows = {7: {RING: 1e-6, CHAIN: 1e-6}, 511: {RING: 64e-6, CHAIN: 1e-6}}  # 1 + bytes: 8 and 512
    assert interpolate(rows, 63)[RING] == pytest.approx(8e-6)
    assert interpolate(rows, 63)[CHAIN] == pytest.approx(1e-6)
    assert interpolate(rows, 511) == rows[511]


def test_outside_the_nearest_row_speaks_but_not_for_far_ones():
    rows = {64: {RING: 1.0}, 1024: {RING: 2.0}}
    assert interpolate(rows, 16) == rows[64]
    assert interpolate(rows, 4096) == rows[1024]
    assert interpolate(rows, 15) == interpolate(rows, 4097) == {}
    assert interpolate({}, 8) == {}
    assert interpolate({0: {RING: 1.0}}, 0) == {RING: 1.0}


def test_who_dropped_out_is_not_asked_for_between():
    rows = {8: {RING: 1.0, CHAIN: 9.0}, 64: {RING: 2.0}}
    assert set(interpolate(rows, 16)) == {RING}


def test_merging_keeps_what_was_there_and_takes_what_is_new():
    new = TimingTable(BUILT_IN, {KEY: {8: {RING: 5e-6}, 64: {RING: 6e-6}}, KEY._replace(ranks=2): {8: {RING: 1.0}}})
    both = TABLE.merged(new)
    assert list(both.entries[KEY]) == [8, 64, 1024]
    assert both.entries[KEY][8] == {RING: 5e-6}
    assert both.entries[KEY][1024] == {RING: 4e-6}
    assert len(both.entries) == 2
    assert both.costs == BUILT_IN


def test_shapes_tell_placements_apart():
    assert shape((0,) * 8 + (1,) * 8 + (2,) * 8, 24) == "3x8"
    assert shape((0, 0, 1, 2, 2), 5) == "2+1+2"
    assert shape((0, 1, 1, 0), 4) == "2x2 scattered"


# ------------------------------------------------------------------------------------------ the file


def test_a_table_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "folder" / "table.json"
    write(path, TABLE)
    assert read(path) == TABLE
    write(path, TimingTable())
    assert read(path) == TimingTable()
    assert [each.name for each in path.parent.iterdir()] == ["table.json"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write(path, TABLE)

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(timing_file.json, "dump", full)
    with pytest.raises(OSError, match="no space left"):
        write(path, TimingTable())
    monkeypatch.undo()
    assert read(path) == TABLE
    assert len(list(tmp_path.iterdir())) == 1


def changed(**more):
    return json.dumps(to_json(TABLE) | more)


BAD = {
    "empty": ("", "damaged"),
    "binary": (b"\x80\x81\xff", "damaged"),
    "half": (changed()[:100], "damaged"),
    "a list": ("[]", "no table"),
    "another program's": ('{"format": "wisdom"}', "no table"),
    "newer": (changed(version=2), "of version 2, and this Chorus reads 1"),
    "no version": (json.dumps({"format": "chorus tuning"}), "of version None"),
    "another MPI's": (changed(mpi="LAM 7.1"), "another mpi: expected .* found 'LAM 7.1'"),
    "another machine's": (changed(machine="Cray-1"), "another machine: expected .* found 'Cray-1'"),
    "without entries": (changed(entries=None), "damaged"),
    "costs below zero": (
        changed(costs={"shared": {"alpha": -1, "beta": 1, "gamma": 1}}),
        "damaged.*alpha: expected a .*, found -1",
    ),
    "unknown wires": (changed(costs={"pigeon": {"alpha": 1, "beta": 1, "gamma": 1}}), "damaged"),
    "no times": (changed(entries=[{**KEY._asdict(), "rows": [{"bytes": 8}]}]), "damaged.*seconds"),
    "words for times": (
        changed(entries=[{**KEY._asdict(), "rows": [{"bytes": 8, "seconds": {"ring": "quick"}}]}]),
        "damaged",
    ),
    "deeper than Python reads": ("[" * 100_000, "damaged"),
    "costs beyond all numbers": (
        changed(costs={"shared": {"alpha": 10**400, "beta": 1, "gamma": 1}}),
        "damaged: OverflowError",
    ),
    **{
        f"ranks {ranks!s:.5}": (changed(entries=[{**KEY._asdict(), "ranks": ranks, "rows": []}]), "damaged.*integer")
        for ranks in (0, -1, 1e999, 2.5, 10**400)
    },
    **{
        f"bytes {nbytes!s:.5}": (
            changed(entries=[{**KEY._asdict(), "rows": [{"bytes": nbytes, "seconds": {"ring": 1}}]}]),
            "damaged.*integer",
        )
        for nbytes in (-5, -1, 1e999, 2.5, 10**400)
    },
    **{
        label: (
            changed(entries=[{**KEY._asdict(), "rows": [{"bytes": 8, "seconds": {label: 1}}]}]),
            f"damaged.*segments: expected at least 1, found '{label}'",
        )
        for label in ("ring x0", "ring x-2")
    },
    "a row without times": (changed(entries=[{**KEY._asdict(), "rows": [{"bytes": 8, "seconds": {}}]}]), "found none"),
    "infinite times": (
        changed(entries=[{**KEY._asdict(), "rows": [{"bytes": 8, "seconds": {"ring": 1e999}}]}]),
        "damaged",
    ),
}


def check_is_told_of(path, message):
    """There is no table, and rank 0 warns of that."""
    table, error = broadcast_table(Alone(), path)
    assert table is None
    with pytest.warns(UserWarning, match=f"continuing without a tuned table: .*{message}"):
        warn_without_table(error)


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_told_of_and_not_used(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / "table.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TableError, match=message):
        read(path)
    check_is_told_of(path, message)


def test_a_folder_and_nothing_at_all_are_told_of(tmp_path):
    for path in (tmp_path, tmp_path / "missing.json"):
        check_is_told_of(path, "")


def test_the_user_s_table_is_looked_for_in_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path().is_relative_to(tmp_path / "chorus")
    assert broadcast_table(Alone(), True) == (None, None)  # nobody has tuned yet: nothing to tell
    write(default_path(), TABLE)
    assert broadcast_table(Alone(), True) == (TABLE, None)
    assert broadcast_table(Alone(), False) == broadcast_table(Alone(), None) == (None, None)
    assert broadcast_table(Alone(), TABLE) == (TABLE, None)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path().is_relative_to(tmp_path / ".cache" / "chorus")


def test_other_things_than_paths_are_refused():
    with pytest.raises(InvalidType, match=r"tuning: expected a path, True, False or None, found 3\.5"):
        broadcast_table(Alone(), 3.5)


def test_segments_that_no_program_could_hold_are_not_taken():
    table = TimingTable(entries={KEY: {8: {AlgorithmChoice("ring", 10**9): 1e-9, RING: 1.0}}})
    assert Selector(4, table=table).decide(CallTraits("allreduce", 8))[:2] == RING


# ------------------------------------------------------------------------------------------ the tuner's own parts


def test_costs_are_fitted():
    from collectives.benchmark.tuner import fit

    alpha, beta = fit({n: 3e-6 + 2e-10 * n for n in (8, 4096, 1 << 16, 1 << 20)})
    assert alpha == pytest.approx(3e-6)
    assert beta == pytest.approx(2e-10)
    assert min(fit({8: 5e-6, 1 << 20: 1e-6})) > 0  # noise, not a wire: still no negative costs


def test_who_lost_by_far_at_two_sizes_in_a_row_is_out():
    from collectives.benchmark.tuner import TunerCandidates

    field, native = TunerCandidates(), AlgorithmChoice("native")
    everyone = [RING, CHAIN, AlgorithmChoice("chain"), native]
    field.note({RING: 1.0, CHAIN: 4.0, AlgorithmChoice("chain"): 5.0, native: 9.0})
    assert field.left(everyone) == everyone
    field.note({RING: 1.0, CHAIN: 2.0, AlgorithmChoice("chain"): 50.0, native: 9.0})
    field.note({RING: 1.0, CHAIN: 4.0, native: 9.0})
    assert field.left(everyone) == everyone
    field.note({RING: 1.0, CHAIN: 4.0, native: 9.0})
    assert field.left(everyone) == [RING, native]


def test_candidates_are_what_auto_may_take():
    from collectives.benchmark.tuner import candidates

    short, long = (candidates("allreduce", nbytes, 16, None, BUILT_IN) for nbytes in (8, 1 << 24))
    assert AlgorithmChoice("native") in short
    assert AlgorithmChoice("census") not in short
    assert AlgorithmChoice("hierarchical") not in short
    assert all(choice.segments == 1 for choice in short)
    assert any(choice.segments > 1 for choice in long)
    assert AlgorithmChoice("hierarchical") in candidates("allreduce", 8, 4, (0, 0, 1, 1), BUILT_IN)
    assert all(choice.segments == 1 for choice in candidates("gatherv", 1 << 24, 4, None, BUILT_IN))
    pair = candidates("broadcast", 8, 2, None, BUILT_IN)
    assert len(pair) < 6, "on two ranks most algorithms are the same"
