"""chorus draw experts: tables and pictures of loads, from files of metrics."""

import json

import numpy as np
import pytest
from support.program_runs import call

from parallel.cli import draw_experts
from parallel.cli.reports.expert_load import expert_loads, expert_traffic

LINES = [
    {"step": 1, "counts": {"1.router chosen": [4, 4], "1.router dropped": [0, 2]}},
    {"step": 1, "test_loss": 3.0},
    {"step": 2, "counts": {"1.router chosen": [8, 0], "1.router dropped": [0, 0], "2 predicted": [3]}},
    {"step": 3, "counts": {"1.router chosen": [6, 2], "1.router dropped": [4, 0]}},
]


def script(*arguments):
    return call(draw_experts.main, *arguments)


def written(folder, lines):
    path = folder / "moe.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_loads():
    (load,) = expert_loads(LINES)
    assert load.router == "1.router"
    np.testing.assert_array_equal(load.steps, [1, 2, 3])
    np.testing.assert_array_equal(load.share, [[1, 1], [2, 0], [1.5, 0.5]])
    np.testing.assert_allclose(load.entropy, [1, 0, -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))])
    np.testing.assert_allclose(load.drop_rate, [0.25, 0, 0.5])


@pytest.mark.parametrize("parts, steps, chosen", [(1, [3], [[18, 6]]), (3, [1, 2, 3], [[4, 4], [8, 0], [6, 2]])])
def test_sums_of_neighbouring_steps(parts, steps, chosen):
    (load,) = expert_loads(LINES)
    short = load.mean_of(parts)
    np.testing.assert_array_equal(short.steps, steps)
    np.testing.assert_array_equal(short.chosen, chosen)
    np.testing.assert_array_equal(load.mean_of(99).chosen, load.chosen)


def test_as_text(tmp_path):
    done = script(written(tmp_path, LINES), "--rows", 3)
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()[2:4]] == [
        ["1", "1.00", "1.000", "25.0%"],
        ["2", "2.00", "0.000", "0.0%"],
    ]


def test_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    done = script(written(tmp_path, LINES), "-o", tmp_path / "new" / "a.png")
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_requests(tmp_path):
    path = written(tmp_path, LINES[1:2])
    for arguments, message in (
        ((path,), "expected the metrics of a model with mixtures of experts"),
        ((tmp_path / "none",), "found no such file"),
        ((path, "--rows", 0), "--rows: expected a whole number from 1 on, found '0'"),
    ):
        done = script(*arguments)
        assert done.returncode == 2 and message in done.stderr


TRAFFIC = [
    {
        **LINES[0],
        "seconds": 2.0,
        "traffic": {"1.experts copies": 6, "1.experts between nodes": 2, "1.experts seconds": 0.5},
    },
    {
        "step": 2,
        "counts": LINES[2]["counts"],
        "seconds": 1.0,
        "traffic": {"1.experts copies": 2, "1.experts between nodes": 0, "1.experts seconds": 0.75},
    },
]


def test_traffic():
    (traffic,) = expert_traffic(TRAFFIC)
    assert traffic.experts == "1.experts"
    for found, expected in zip(traffic[1:], ([1, 2], [6, 2], [2, 0], [0.25, 0.75])):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(traffic.mean_of(1)[1:], ([2], [4], [1], [0.5])):
        np.testing.assert_array_equal(found, expected)
    assert expert_traffic(LINES) == []


def test_copies_between_nodes_of_a_resumed_training():
    """Choices are those of the same steps, whatever the number of the first one."""
    (load,), (traffic,) = expert_loads(TRAFFIC), expert_traffic(TRAFFIC)
    resumed = [{**line, "step": line["step"] + 100} for line in TRAFFIC]
    (later,), (traffic_later,) = expert_loads(resumed), expert_traffic(resumed)
    assert traffic_later.between_nodes_per_choice(later, 1) == 2 / load.chosen.sum()
    for parts in (1, 2):
        first, other = (
            traffic.between_nodes_per_choice(load, parts),
            traffic_later.between_nodes_per_choice(later, parts),
        )
        np.testing.assert_array_equal(first, other)
    (without_first,) = expert_traffic(TRAFFIC[1:])
    assert without_first.between_nodes_per_choice(load, 2) == [0]


def test_table_and_picture_of_traffic(tmp_path):
    found = script(written(tmp_path, TRAFFIC), "--rows", 2)
    assert found.stdout.split("\n\n")[1].split() == (
        ["1.experts", "step", "copies", "between", "nodes", "exchange", "1", "6", "2", "25.0%", "2", "2", "0", "75.0%"]
    )
    pytest.importorskip("matplotlib")
    path = tmp_path / "traffic.svg"
    assert script(written(tmp_path, TRAFFIC), "-o", path).returncode == 0 and "<svg" in path.read_text()
