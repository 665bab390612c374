"""Prices on paper: formulas where nobody could play, bounds that nothing beats, a table and a picture."""

import pytest

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import LinearCost
from collectives.cli import simulate
from collectives.cli.simulate import CostPrediction, by_formula, row, simulated_seconds
from collectives.selection.timing_file import default_path

PLAIN = CostPrediction(1, LinearCost(1.5e-6, 1e-10), LinearCost(2e-5, 8e-10), 5e-11)
NODES = CostPrediction(4, LinearCost(1.5e-6, 1e-10), LinearCost(2e-5, 8e-10), 5e-11)
ENTRIES = [(collective, name) for collective in catalog.CATALOG for name in catalog.names(collective)]


@pytest.mark.parametrize(("collective", "name"), ENTRIES)
@pytest.mark.parametrize("within", [PLAIN, NODES], ids=["apart", "nodes"])
def test_nothing_beats_the_bound(collective, name, within):
    for size in (1, 2, 5, 16, 32):
        for nbytes in (0, 32, 1 << 20):
            found = row(collective, name, size, nbytes, within)
            assert found.simulated
            assert found.seconds >= found.bound * (1 - 1e-9), (size, nbytes)


@pytest.mark.parametrize(("collective", "name"), [entry for entry in ENTRIES if catalog.find(*entry).exact])
def test_formula_and_clock_agree_where_all_edges_are_alike(collective, name):
    if catalog.find(collective, name).placed:
        pytest.skip("its formulas count nodes")
    by_clock = simulated_seconds(collective, name, 16, 1 << 20, PLAIN)
    assert by_formula(collective, name, 16, 1 << 20, PLAIN) == pytest.approx(by_clock)


@pytest.mark.parametrize("entry", [("allreduce", "ring"), ("alltoall", "pairwise"), ("gather", "linear")])
def test_formulas_take_shared_cards_from_a_sample(entry):
    """On nodes the formula alone would be far off for an alltoall: all ranks of a node use the card at once."""
    by_clock = simulated_seconds(*entry, 256, 1 << 20, NODES)
    assert by_formula(*entry, 256, 1 << 20, NODES) == pytest.approx(by_clock, rel=0.2)


def test_log_rounds_are_played_and_rings_are_not():
    assert simulate.is_quick_to_simulate("allreduce", "rabenseifner", 65536)
    assert not simulate.is_quick_to_simulate("allreduce", "ring", 65536)
    assert not simulate.is_quick_to_simulate("alltoall", "bruck", 65536)


def test_the_table(capsys):
    arguments = "--ranks 1024 --per-node 8 --bytes 1M --algorithm ring,rabenseifner --alpha 20us --beta 10Gbit/s"
    assert simulate.main(arguments.split()) == 0
    title, told, heading, ring, rabenseifner, best = capsys.readouterr().out.splitlines()
    assert title == "# allreduce, 1024 ranks on 128 nodes, 1 MiB"
    assert "a node's card: 20 us a message, 1.25 GB/s" in told
    assert ring.split()[:3] == ["ring", "2046", "2"] and ring.endswith("formula")
    assert rabenseifner.startswith("rabenseifner *") and rabenseifner.endswith("clock")
    assert heading.split()[0] == "algorithm" and best == "* the best"


def test_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "scale.png"
    arguments = f"--collective reduce --ranks 16 --per-node 4 --up-to 32 --sizes 8:1M:64 --plot {path}"
    assert simulate.main(arguments.split()) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1] == f"{path} written"


@pytest.mark.parametrize(
    ("text", "expected"), [("5us", 5e-6), ("0.2ms", 2e-4), ("2e-6", 2e-6), ("30ns", 3e-8), ("1 s", 1.0)]
)
def test_times(text, expected):
    assert simulate.seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"), [("12.5GB/s", 8e-11), ("10Gbit/s", 8e-10), ("8e-11", 8e-11), ("100MB/s", 1e-8)]
)
def test_rates(text, expected):
    assert simulate.per_byte(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--collective allreduces", "invalid choice: 'allreduces'"),
        ("--algorithm rink", "unknown algorithm 'rink' for allreduce; known: linear, mst, ring"),
        ("--ranks 0", "--ranks: expected a whole number from 1 on"),
        ("--per-node 0", "--per-node: expected a whole number from 1 on"),
        ("--alpha soon", "'soon' is no time"),
        ("--beta 0GB/s", "'0GB/s' is no rate"),
        ("--table nowhere.json", "nowhere.json"),
        ("--bytes much", "expected a number and perhaps K, M or G, as in 64K; found 'much'"),
    ],
)
def test_errors(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.main(arguments.split())
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_own_table_that_cannot_be_used(monkeypatch, tmp_path, capsys, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path()
    path.parent.mkdir()
    path.mkdir() if content is None else path.write_text(content)
    simulate.main(["--ranks", "2", "--algorithm", "ring"])
    printed = capsys.readouterr()
    assert "ring" in printed.out
    assert printed.err.count(str(path)) == 1 and "continuing without a tuned table" in printed.err
