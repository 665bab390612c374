"""Speed and memory of meshes: arguments, a short run on the ranks here, and the plot."""

import json

import pytest

pytest.importorskip("safetensors")

from parallel.cli import bench_meshes
from parallel.engine.memory_ledger import KINDS


@pytest.mark.parametrize(
    "argv", [[], ["--plot", "a.png"], ["a.json"], ["--output", "b.json", "--plot", "a.png", "a.json"]]
)
def test_bad_arguments_end_all_ranks_with_one_message(world, capsys, argv):
    with pytest.raises(SystemExit) as caught:
        bench_meshes.parse(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "expected --output FILE, or --plot FILE" in error if world.Get_rank() == 0 else not error


@pytest.mark.timeout(120)
def test_rows_and_plot(world, folder, capsys):
    """A row for each number of ranks, half of the parameters with twice the ranks; seconds of the steps that count."""
    argv = ["--output", str(folder / "rows.json"), "--model", "gpt:tiny", "--length", "16", "--batch", "2"]
    assert bench_meshes.main([*argv, "--steps", "1", "--turns", "2"]) == 0
    shown = capsys.readouterr().out
    assert bench_meshes.main(["--plot", str(folder / "plot.png"), str(folder / "rows.json")]) == 0
    if world.Get_rank() == 0:
        rows = json.loads((folder / "rows.json").read_text())["rows"]
        counts = [count for count in (1, 2, 4, 8) if count <= world.Get_size()]
        assert [(row["tp"], row["sequence_parallel"]) for row in rows] == list(bench_meshes.variants(counts))
        assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
        assert all(tuple(row["bytes"]) == KINDS for row in rows)
        assert all(row["bytes"]["optimizer"] < rows[0]["bytes"]["optimizer"] for row in rows[1:])
        assert shown.count("tokens/s") == len(rows)
        assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
