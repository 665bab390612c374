"""The benchmark's parts: sizes, statistics, bandwidths, closed forms, the JSON, and its reader and merger."""

import argparse
import json
from functools import reduce
from itertools import accumulate

import numpy as np
import pytest

from collectives.analysis.cost_functions import ClusteredNetwork, LinearCost
from collectives.benchmark import reports, result_rows, result_table, size_arguments, timing
from collectives.benchmark.calibrate import CalibratedCosts, predicted_us
from collectives.benchmark.cases import CASES, DTYPES, ROOT, CaseBuffers, elements, exact_pattern
from collectives.cli import bench
from collectives.schedule.chunks import even
from collectives.units import format_bytes, format_time

SIZES = (1, 2, 3, 5, 8)


class Seat:
    """A rank's place in a communicator that nobody calls."""

    def __init__(self, rank, size):
        self.Get_rank = lambda: rank
        self.Get_size = lambda: size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8:64", [8, 16, 32, 64]),
        ("8:100", [8, 16, 32, 64]),
        ("8:64M:4", [8 * 4**k for k in range(12)]),
        ("1K,8,64k,1MiB", [8, 1024, 65536, 1048576]),
        ("0,8,4:8", [0, 4, 8]),
        ("7", [7]),
    ],
)
def test_sizes(text, expected):
    assert size_arguments.parse_sizes(text) == expected


@pytest.mark.parametrize("text", ["", "8:", "64:8", "0:8", "8:64:1", "8:64:x", "8:64:2:2", "1T", "-8", "8,,16", "1.5K"])
def test_bad_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError):
        size_arguments.parse_sizes(text)


@pytest.mark.parametrize(
    "value, text", [(0, "0 B"), (1000, "1000 B"), (1536, "1.5 KiB"), (535822336, "511 MiB"), (1072693248, "1023 MiB")]
)
def test_bytes_have_a_unit(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 s"),
        (3e-9, "3 ns"),
        (2e-6, "2 us"),
        (0.0456, "45.6 ms"),
        (119, "119 s"),
        (7200, "2 h"),
        (1.1e8, "3.49 years"),
    ],
)
def test_times_have_a_unit(seconds, text):
    assert format_time(seconds) == text


def test_statistics():
    found = timing.summarise(np.arange(1.0, 1001.0), wrong=3)
    assert (found.median, found.p99, found.low, found.high) == (500.5, 991.0, 1.0, 1000.0)
    assert (found.iterations, found.wrong) == (1000, 3)
    assert timing.summarise(np.array([1.0, 2.0, 50.0])).p99 == 50.0


@pytest.mark.parametrize("iterations", [1, 2, 3, 5, 1000])
def test_first_and_last_call_are_checked(iterations):
    checked = timing.checkpoints(iterations)
    assert {0, iterations - 1} <= checked <= set(range(iterations))
    assert len(checked) == min(iterations, timing.CHECKS)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("allreduce", 1.5), ("broadcast", 1), ("reduce", 1)]
    + [(name, 0.75) for name in ("allgather", "reduce_scatter", "scatter", "gather", "alltoall")],
)
def test_bus_bandwidth(collective, factor):
    assert result_rows.bandwidths(collective, 4, 2_000_000, 1000.0) == (2.0, 2.0 * factor)
    assert result_rows.bandwidths(collective, 1, 0, 0.0) == (0.0, 0.0)


@pytest.mark.parametrize("name", [name for name in CASES if name != "barrier"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes_become_whole_and_equal_blocks(name, size):
    for nbytes in (0, 1, 4, 8, 1000):
        n = elements(CASES[name], nbytes, 4, size)
        assert nbytes <= 4 * n < nbytes + 4 * size
        assert not CASES[name].equal or n % size == 0


def result(name, gives, rank, size, n):
    """What MPI defines, from every rank's input: the slow and obvious form."""
    cuts = [0, *accumulate(even(n, size))]
    mine = slice(cuts[rank], cuts[rank + 1])
    at_root = rank == ROOT
    match name.removesuffix("v"):
        case "broadcast":
            return gives[ROOT]
        case "scatter":
            return gives[ROOT][mine]
        case "gather":
            return np.concatenate(gives) if at_root else None
        case "allgather":
            return np.concatenate(gives)
        case "alltoall":
            return np.concatenate([x[mine] for x in gives])
        case "reduce":
            return sum(gives) if at_root else None
        case "allreduce":
            return sum(gives)
        case "reduce_scatter":
            return sum(gives)[mine]
        case "scan":
            return sum(gives[: rank + 1])
        case "exscan":
            return sum(gives[:rank]) if rank else None
    return None


@pytest.mark.parametrize("name", [name for name in CASES if name != "barrier"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_closed_forms(name, size, dtype):
    """Right results pass, and results of the call before do not."""
    n = elements(CASES[name], 70, 1, size)
    ranks = [CaseBuffers(CASES[name], Seat(r, size), n, DTYPES[dtype]) for r in range(size)]
    for _ in range(4):
        for one in ranks:
            one.advance()
            one.poison()
        stale = sum(one.wrong() for one in ranks)
        assert stale > 0 or (name == "broadcast" and size == 1) or (name == "exscan" and size == 1)
        gives = [None if one._gives is None else one._gives.astype(float) for one in ranks]
        for rank, one in enumerate(ranks):
            expected = result(name, gives, rank, size, n)
            assert (expected is None) == (one._result is None)
            if expected is not None:
                one._result[:] = expected
        assert [one.wrong() for one in ranks] == [0] * size


@pytest.mark.parametrize(("dtype", "size"), [("int8", 64), ("uint8", 128), ("bfloat16", 128), ("bfloat16", 300)])
def test_sums_over_many_ranks_are_exact_in_any_order(dtype, size):
    pattern = exact_pattern(size, DTYPES[dtype])
    assert pattern.modulus == 1, "so rank r has the input of rank r mod stride"
    ranks = [CaseBuffers(CASES["reduce"], Seat(r, size), 3, DTYPES[dtype]) for r in range(pattern.stride)]
    root = ranks[ROOT]
    for _ in range(3):
        for one in ranks:
            one.advance()
        gives = [ranks[r % pattern.stride]._gives for r in range(size)]
        in_order = reduce(np.add, gives)
        while len(gives) > 1:
            gives = [reduce(np.add, gives[i : i + 2]) for i in range(0, len(gives), 2)]
        for found in (in_order, gives[0]):
            root.poison()
            assert root.wrong() > 0
            root._result[:] = found
            assert root.wrong() == 0


def make_row(**labels):
    ours = timing.summarise(np.array([10.0, 20.0, 30.0]))
    native = timing.summarise(np.array([40.0, 40.0, 40.0]))
    return result_rows.make_row(
        "allreduce", "ring", 4, 1024, ours, native, predicted_us=12.5, mode="blocking", **labels
    )


def test_json_holds_what_readers_expect(tmp_path):
    reports.write(tmp_path / "a.json", result_rows.make_report(4, [make_row()]))
    report = json.loads((tmp_path / "a.json").read_text())
    assert set(report) >= {"mpi", "ranks", "machine", "rows"}
    expected = {
        "collective": "allreduce",
        "algorithm": "ring",
        "dtype": "float32",
        "bytes": 1024,
        "memory": "plain",
        "ours_us": 20.0,
        "native_us": 40.0,
        "ratio": 0.5,
        "p99_us": 30.0,
        "algbw_gbs": 0.0512,
        "busbw_gbs": pytest.approx(0.0768),
        "predicted_us": 12.5,
        "wrong": 0,
        "iterations": 3,
    }
    assert {name: report["rows"][0][name] for name in expected} == expected


def test_no_native_time_is_null_and_a_dash():
    row = result_rows.make_row("allreduce", "ring", 2, 8, timing.summarise(np.ones(3)), None)
    assert row["native_us"] is None and row["ratio"] is None
    assert result_table.TableStyle().line(row).split()[:6] == ["8", "B", "ring", "1.00", "-", "-"]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("memories", [["plain"], ["plain", "symmetric"]])
@pytest.mark.parametrize("modes", [["blocking"], ["blocking", "persistent"]])
def test_table_lines_up_with_its_heading(full, memories, modes):
    look = result_table.TableStyle(full, memories, modes)
    heading, line, title = look.heading(), look.line(make_row()), look.title(make_row())
    assert heading.startswith("# Size")
    assert len(line) == len(heading)
    assert ("Memory" in heading) == (len(memories) > 1) == ("memory" not in title)
    assert ("Mode" in heading) == (len(modes) > 1) == ("blocking" not in title)


def test_the_model_is_judged_by_the_long_rows():
    told = [make_row() | {"bytes": 1 << 20, "ours_us": 100.0, "predicted_us": us} for us in (76, 100, 140, 250)]
    told += [make_row(), make_row() | {"bytes": 1 << 20, "predicted_us": None}]  # a short row, and one without
    (line,) = result_table.model_errors(told)
    assert line.startswith("# Predicted from timed messages: 2 of 4 rows above 64 KiB within 25%")
    assert line.endswith("median error 32%")
    assert result_table.model_errors([make_row()]) == []


def test_verdict_on_auto():
    def row(algorithm, nbytes, us, **labels):
        return make_row() | {"algorithm": algorithm, "bytes": nbytes, "ours_us": us} | labels

    near = [row("auto", 8, 110.0, expected_us=137.5), row("ring", 8, 100.0), row("linear", 8, 500.0)]
    slow = [row("auto", 64, 111.0, expected_us=83.0), row("ring", 64, 100.0)]
    faster = [row("auto", 8, 50.0, memory="symmetric"), row("ring", 8, 100.0, memory="symmetric")]  # no expected time
    alone = [row("auto", 1024, 1.0, expected_us=1.0), row("ring", 4096, 1.0)]
    found = bench.judge([*near, *slow, *faster, *alone])
    assert found == bench.Verdict(compared=3, near_best=2, expected=2, near_expected=1)
    assert found.lines() == [
        "# auto: 2 of 3 points within 10% of the best algorithm",
        "# auto's expected time: 1 of 2 points within 25% of the measured time",
    ]
    assert bench.judge(alone).lines() == []


LINES = CalibratedCosts(
    ClusteredNetwork((0, 0, 0, 0), LinearCost(1.0, 1.0), LinearCost(0, 0), LinearCost(0, 0.5)), LinearCost(0, 10.0)
)


@pytest.mark.parametrize(
    ("setting", "seconds"),
    [
        (("allreduce", "recursive_doubling", 4, 100), 2 * (1 + 100 + 50)),
        (("broadcast", "mst", 4, 100), 2 * (1 + 100)),  # the root works in one array: no copy
        (("allgather", "circulant", 4, 100), (1 + 25) + (1 + 50) + 250),  # and the own block, copied home
        (("alltoall", "pairwise", 4, 100), 3 * (1 + 25) + 250),
        (("reduce_scatter", "circulant", 4, 100), (1 + 50 + 25) + (1 + 25 + 12.5)),
    ],
)
def test_predictions_count_messages_additions_and_the_copy_home(setting, seconds):
    assert predicted_us(LINES, *setting) == pytest.approx(1e6 * seconds)


def test_what_lies_in_place_is_not_copied():
    assert predicted_us(LINES, "allgather", "circulant", 4, 100, in_place=True) == 77e6


def test_symmetric_arrays_are_asked_for_alike_on_all_ranks():
    """Whoever has less to hold, or nothing, asks for the same shape at the same time."""

    class Rank(Seat):
        def __init__(self, rank, size):
            super().__init__(rank, size)
            self.asked = []

        def allreduce(self, count, op):
            self.asked.append(count)
            return 100

        def empty(self, shape, dtype):
            self.asked.append(shape)
            return np.empty(shape, dtype)

    for name, case in CASES.items():
        n = elements(case, 70, 1, 3)
        ranks = [Rank(rank, 3) for rank in range(3)]
        for rank in ranks:
            CaseBuffers(case, rank, n, DTYPES["int8"], "symmetric")
        assert len({tuple(rank.asked[1::2]) for rank in ranks}) == 1, name
        assert all(count <= 100 for rank in ranks for count in rank.asked), name


def test_merge_takes_medians_over_launches():
    launches = [
        result_rows.make_report(4, [make_row() | {"ours_us": us, "ratio": us / 40}]) for us in (10.0, 90.0, 20.0)
    ]
    merged = result_rows.merge(launches)
    (row,) = merged["rows"]
    assert (row["ours_us"], row["ratio"], row["ratio_min"], row["ratio_max"]) == (20.0, 0.5, 0.25, 2.25)
    assert (row["launches"], row["iterations"], row["wrong"], merged["launches"]) == (3, 9, 0, 3)


def test_lists_without_a_name_are_refused():
    with pytest.raises(ValueError, match="expected a name, found none; known: auto, "):
        bench.resolve("allreduce", [])


def test_merge_keeps_different_measurements_apart_and_refuses_different_machines():
    both = [make_row(), make_row(memory="symmetric")]
    assert len(result_rows.merge([result_rows.make_report(4, both)] * 2)["rows"]) == 2
    with pytest.raises(ValueError, match="ranks"):
        result_rows.merge([result_rows.make_report(4, both), result_rows.make_report(2, both)])


def test_the_race_becomes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from collectives.benchmark.race_plots import plot_race

    race = [make_row() | {"bytes": 8 << k} for k in range(5)]
    race += [row | {"collective": "broadcast", "native_us": None, "ratio": None} for row in race]
    race += [row | {"memory": "symmetric"} for row in race] + [row | {"mode": "persistent"} for row in race]
    plot_race(tmp_path / "race.png", result_rows.make_report(4, race))
    assert (tmp_path / "race.png").stat().st_size > 10_000


@pytest.mark.parametrize("steps", [0, 1, 200])
@pytest.mark.parametrize("measure", [{}, {"test_accuracy": 0.9}, {"bits_per_byte": 2.5}], ids=["loss", "right", "bits"])
def test_a_training_becomes_a_picture(tmp_path, steps, measure):
    pytest.importorskip("matplotlib")
    from parallel.cli.reports.training_plots import plot_learning

    lines = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)]
    plot_learning(tmp_path / "all.png", [*lines, {"final": True, "step": steps, "test_loss": 0.1, **measure}], "a", "b")
    assert (tmp_path / "all.png").stat().st_size > 5_000
