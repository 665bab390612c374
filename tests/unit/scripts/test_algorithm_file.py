"""Algorithms that users name as file.py:function on the command line."""

import sys

import pytest

from collectives.algorithms.catalog import CATALOG
from collectives.cli import draw, prove, simulate
from collectives.cli.algorithm_file import MOST, entry_name

SOURCE = '''
from collectives.algorithms.catalog import Algorithm
from collectives.schedule.steps import Recv, Send, one


def mine(rank, size):
    """Send in each round the block received in the round before."""
    for step in range(size - 1):
        there, here = one((rank - step) % size), one((rank - step - 1) % size)
        yield [Send((rank + 1) % size, there), Recv((rank - 1) % size, here)]


def wrong(rank, size):
    yield [Send((rank + 1) % size, one(rank))]


def crash(rank, size):
    yield [1 / 0]


exact, optimistic = Algorithm(mine, "p-1", "(p-1)/p"), Algorithm(mine, "q", "(p-1)/p")
'''


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setitem(CATALOG, "allgather", dict(CATALOG["allgather"]))
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return path


def test_an_algorithm_of_a_file_is_drawn_proved_and_priced(source, monkeypatch, capsys):
    def shown(main, text):
        monkeypatch.setattr(sys, "argv", ["chorus", *text.split()])
        assert main() == 0
        return capsys.readouterr().out

    given = f"--collective allgather --algorithm {source}:mine"
    assert "own.mine, 3 ranks\nSend in each round" in shown(draw.main, f"{given} --ranks 3")
    assert "own.mine" in shown(prove.main, f"{given} --max-size 5") and CATALOG["allgather"]["own.mine"].rounds == ""
    lines = shown(lambda: simulate.main(None), f"{given},ring,{source}:exact --ranks 6").splitlines()
    mine, ring, exact = ([word for word in line.split() if word != "*"][1:] for line in lines[3:6])
    assert mine == ring == exact


@pytest.mark.parametrize(
    "name, size, message",
    [
        ("wrong", 3, "own.wrong is wrong for 3 ranks: rank 0, round 0, step 0: "),
        ("crash", 3, "own.crash: expected rounds for 3 ranks, found ZeroDivisionError"),
        ("nosuch", 3, "expected one of mine, wrong, crash, exact, optimistic; found 'nosuch'"),
        ("mine", MOST + 1, f"expected at most {MOST} ranks for a function"),
    ],
)
def test_wrong_algorithms_are_refused(source, name, size, message):
    with pytest.raises(ValueError, match=message):
        entry_name("allgather", f"{source}:{name}", size)


def test_wrong_files_and_wrong_formulas_are_refused(source, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"none.py: expected a Python file that can be run, found FileNotFoundError"):
        entry_name("allgather", f"{tmp_path}/none.py:mine")
    monkeypatch.setattr(sys, "argv", ["chorus", "--collective", "allgather", "--algorithm", f"{source}:optimistic"])
    assert prove.main() == 1 and "rounds: the catalogue expects q = 2, found 3" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        simulate.main(f"--collective allgather --algorithm {source}:mine --ranks 4 --plot out.png".split())
    assert "--plot: expected algorithms with cost formulas" in capsys.readouterr().err
