"""Every schedule can be drawn, as text and as a picture, and wrong requests are refused in words."""

import pytest
from support.program_runs import call

from collectives.algorithms.catalog import CATALOG, blocks, build_all
from collectives.analysis import draw
from collectives.cli import draw as draw_program
from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Send, one, span

ENTRIES = [(collective, name) for collective in CATALOG for name in CATALOG[collective]]


def script(*arguments):
    return call(draw_program.main, *arguments)


@pytest.mark.parametrize(
    "step, shown",
    [
        (Send(3, span(0, 5)), "→3 [0-4]"),
        (Send(3, ()), "→3"),
        (Recv(1, (range(4, 5), range(0, 2))), "←1 [4,0-1]"),
        (RecvReduce(1, one(2), "left"), "←1 [2] +"),
        (RecvReduce(1, one(2), "right"), "+ ←1 [2]"),
        (Copy(one(7), one(2)), "[2] = [2']"),
        (Reduce(one(7), one(1), "left"), "[1] = [2'] + [1]"),
        (Reduce(span(4, 6), span(1, 3), "right"), "[1-2] = [1-2] + [4,0']"),
    ],
)
def test_steps(step, shown):
    assert draw.step(step, 5) == shown


@pytest.mark.parametrize("collective, name", ENTRIES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_message_is_in_the_table_once_at_each_end(collective, name, size):
    segments = 1 if collective == "barrier" else 2
    schedules = build_all(collective, name, size, 0, segments)
    table = draw.table(schedules, blocks(collective, name, size) * segments)
    steps = [step for schedule in schedules for steps in schedule for step in steps]
    assert table.count("→") == sum(isinstance(step, Send) for step in steps)
    assert table.count("←") == sum(isinstance(step, (Recv, RecvReduce)) for step in steps)
    assert len({line.find("rank 0") for line in table.splitlines()} - {-1}) == 1


def test_a_narrow_table_goes_on_below():
    schedules = build_all("allreduce", "ring", 16)
    wide, narrow = draw.table(schedules, 16), draw.table(schedules, 16, width=60)
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))
    assert narrow.count("→") == wide.count("→")


@pytest.mark.parametrize(
    "collective, name", [("allreduce", "ring"), ("gather", "linear"), ("barrier", "dissemination")]
)
@pytest.mark.parametrize("ranks", ["1", "7"])
def test_pictures(tmp_path, collective, name, ranks):
    pytest.importorskip("matplotlib")
    done = script("--collective", collective, "--algorithm", name, "--ranks", ranks, "-o", str(tmp_path / "a.png"))
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("nodes", [["--per-node", "3"], ["--nodes", "a,b,a,b,c,c,c"]])
@pytest.mark.parametrize("name", ["ring", "hierarchical"])
def test_pictures_of_nodes(tmp_path, nodes, name):
    pytest.importorskip("matplotlib")
    arguments = ("--collective", "allreduce", "--algorithm", name, "--ranks", "7", *nodes)
    done = script(*arguments, "-o", str(tmp_path / "a.png"))
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "allreduce, " + name + ", 7 ranks, 3 nodes" in script(*arguments).stdout


@pytest.mark.parametrize(
    "arguments, told",
    [
        ("--collective allreduce --algorithm ring --per-node 0", "--per-node: expected a whole number from 1 on"),
        ("--collective allreduce --algorithm ring --ranks 3 --nodes a,b", "each of 3 ranks, found 2 names"),
        ("--collective allreduce --algorithm ring --ranks 3 --nodes=", "each of 3 ranks, found 1 names"),
        ("--collective allreduce --algorithm ring --ranks 2 --nodes a,b --per-node 1", "not allowed with"),
        ("--collective allreduce --algorithm rink", "known: linear, mst, ring"),
        ("--collective allreduces --algorithm ring", "invalid choice: 'allreduces'"),
        ("--collective allreduce --algorithm ring --ranks 0", "--ranks: expected a whole number from 1 on"),
        ("--collective allreduce --algorithm ring --root 1", "--root: allreduce has no root"),
        ("--collective reduce --algorithm ring --ranks 4 --root 4", "a rank from 0 to 3, found 4"),
        ("--collective reduce --algorithm ring --segments 0", "--segments: expected a whole number from 1 on"),
        ("--collective barrier --algorithm linear --segments 2", "--segments must be 1 for a barrier"),
        ("--collective reduce --algorithm ring -o ring.txt", "ends in one of .png, .pdf, .svg, .jpg"),
    ],
)
def test_errors(arguments, told):
    done = script(*arguments.split())
    assert done.returncode == 2 and told in done.stderr
