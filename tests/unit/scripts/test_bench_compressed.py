"""The race of encoded sums: its arguments, and a short run of it on one rank."""

import json

import pytest

from collectives.cli import bench_compressed
from collectives.compressed.compression_model import CompressionForecast


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--specs", "int8_g128,int99"], "int99"),
        (["--specs", "int8_row"], "a vector has no channels"),
        (["--specs", "int8,nf4", "--ways", "shared_scale"], "found nf4"),
        (["--specs", "int8_g32_zero", "--ways", "shared_scale"], "found int8_g32_zero"),
        (["--ways", "two_shot,three_shot"], "three_shot"),
        (["--turns", "0"], "below 1"),
        (["--sizes", "x"], "--sizes"),
    ],
)
def test_bad_arguments_are_told(capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        bench_compressed.parse(argv)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_every_way_races_every_encoding(tmp_path, capsys):
    path = tmp_path / "race.json"
    ways = [*bench_compressed.WAYS, bench_compressed.SHARED]
    argv = ["--sizes", "4,64K", "--specs", "int8_g128,int4_g32", "--ways", ",".join(ways), "--turns", "2"]
    assert bench_compressed.main([*argv, "--json", str(path)]) == 0
    names = {*bench_compressed.PLAIN, *(f"{way} {spec}" for way in ways for spec in ("int8_g128", "int4_g32"))}
    rows = json.loads(path.read_text())["rows"]
    assert {(row["bytes"], row["name"]) for row in rows} == {(size, name) for size in (4, 1 << 16) for name in names}
    for row in rows:
        assert row["ranks"] == 1 and 0 < row["q1"] <= row["median"] <= row["q3"]
        assert set(row["forecast"]) == {"int8_g128", "int4_g32"}
        few, plain = "int8" in row["name"], row["name"] in bench_compressed.PLAIN
        assert row["error"] == 0 if plain else row["error"] < (0.02 if few else 0.3)
    shown = capsys.readouterr().out
    assert all(name in shown for name in names) and shown.count("forecast for") == 4


def test_what_pays_is_said(capsys):
    rows = [
        {"bytes": 1024, "name": "plain", "median": 1e-3, "q1": 1e-3, "q3": 2e-3, "error": 0.0, "ratio": {"median": 1}}
    ]
    bench_compressed.show(
        rows, {"int8": CompressionForecast(2e-3, 1e-3, 0.5e-3), "int4": CompressionForecast(1e-3, 1e-3, 1e-3)}
    )
    told = capsys.readouterr().out.splitlines()
    assert told[-2].endswith("it pays") and told[-1].endswith("plain is quicker")
