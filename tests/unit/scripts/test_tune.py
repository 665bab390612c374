"""The tuner's command line, and what it makes of files that are there already."""

import argparse
import json

import pytest

from collectives.benchmark.timing import MODES
from collectives.cli import tune
from collectives.cli.arguments import names_of
from collectives.selection import timing_file
from collectives.selection.cost_model import BUILT_IN
from collectives.selection.timing_file import to_json, write
from collectives.selection.timing_table import AlgorithmChoice, TimingKey, TimingTable

ROW = {AlgorithmChoice("ring"): 2e-6, AlgorithmChoice("chain", 4): 1e-6, AlgorithmChoice("native"): 4e-6}
TABLE = TimingTable(
    BUILT_IN,
    {
        TimingKey("allreduce", "blocking", ranks, placement): {
            8: ROW,
            1024: {AlgorithmChoice("native"): 1e-6, AlgorithmChoice("ring"): 2e-6},
        }
        for ranks, placement in ((2, "2"), (4, "2x2"))
    },
)


def arguments(*words):
    return tune.parse(list(words))


def test_short_rows_come_first_and_a_barrier_once():
    args = arguments("--collective", "allreduce,barrier", "--sizes", "1K,8", "--form", "blocking,persistent")
    rows = [(row.nbytes, row.collective, row.form) for row in tune.settings(args)]
    assert [row[0] for row in rows if row[1] == "allreduce"] == [8, 8, 1024, 1024]
    assert [row for row in rows if row[1] == "barrier"] == [(0, "barrier", "blocking"), (0, "barrier", "persistent")]


def test_v_forms_are_measured_when_asked_for():
    assert not any(name.endswith("v") for name in arguments().collective)
    assert arguments("--collective", "gatherv").collective == ["gatherv"]


def test_two_dtypes_do_not_fit_one_table(capsys):
    with pytest.raises(SystemExit):
        arguments("--dtype", "float32,float64")
    assert "argument --dtype: invalid choice" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError, match="unknown form 'lazy'"):
        names_of("form", MODES)("lazy")


def test_a_damaged_table_is_begun_anew_but_no_other_is_touched(tmp_path):
    path = tmp_path / "table.json"
    assert tune.known(path, False) == (TimingTable(), None)
    write(path, TABLE)
    assert tune.known(path, False) == (TABLE, None)
    path.write_text("{")
    for reads_only in (False, True):
        table, message = tune.known(path, reads_only)
        assert table == TimingTable()
        assert "is damaged" in message and ("it is begun anew" in message) != reads_only
    for strange in ({"version": 2}, {"mpi": "LAM"}, {"format": "wisdom"}):
        path.write_text(json.dumps(to_json(TABLE) | strange))
        table, message = tune.known(path, False)
        assert table is None and "move it away" in message
    path.write_text("notes")
    table, message = tune.known(path, False)
    assert table is None and "expected a timing table, found another file; move it away" in message
    assert tune.known(path / "beneath a file", False)[0] is None
    table, message = tune.known(tmp_path, False)
    assert table is None and f"{tmp_path} is no plain file; move it away" in message


def test_the_table_is_shown(monkeypatch, tmp_path, capsys):
    path = tmp_path / "table.json"
    write(path, TABLE)
    monkeypatch.setattr("sys.argv", ["tune.py", "--show", "--table", str(path)])
    assert tune.main() == 0
    shown = capsys.readouterr().out
    assert "# allreduce, blocking, 4 ranks on nodes of 2x2" in shown
    assert "chain x4" in shown
    assert "the MPI's own collective is the fastest in 2" in shown


def test_a_newer_table_is_left_alone(monkeypatch, tmp_path, capsys):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(to_json(TABLE) | {"version": 2}))
    before = path.read_bytes()
    monkeypatch.setattr("sys.argv", ["tune.py", "--collective", "barrier", "--table", str(path)])
    with pytest.raises(SystemExit, match="2"):
        tune.main()
    assert "is of version 2" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_one_rank_can_be_tuned(monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    words = [
        "--collective",
        "allreduce",
        "--sizes",
        "8,64",
        "--seconds",
        "0",
        "--iterations",
        "2",
        "--table",
        str(path),
    ]
    monkeypatch.setattr("sys.argv", ["tune.py", *words])
    assert tune.main() == 0
    assert list(timing_file.read(path).entries) == [TimingKey("allreduce", "blocking", 1, "1")]
