"""The race of encoded sums: its arguments, and a short run of it on one rank."""

import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import bench_compressed


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--specs", "int8_g128,int99"], "int99"),
        (["--specs", "int8_row"], "a vector has no channels"),
        (["--specs", "int8,nf4", "--ways", "shared_scale"], "found nf4"),
        (["--specs", "int8_g32_zero", "--ways", "shared_scale"], "found int8_g32_zero"),
        (["--ways", "two_shot,three_shot"], "three_shot"),
        (["--turns", "0"], "a whole number from 1 on"),
        (["--sizes", "x"], "--sizes"),
    ],
)
def test_bad_arguments_are_told(capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        bench_compressed.parse(argv)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_every_way_races_every_encoding(capsys):
    ways = [*bench_compressed.WAYS, bench_compressed.SHARED]
    argv = ["--sizes", "4,64K", "--specs", "int8_g128,int4_g32", "--ways", ",".join(ways), "--turns", "2"]
    names = {*bench_compressed.PLAIN, *(f"{way} {spec}" for way in ways for spec in ("int8_g128", "int4_g32"))}
    with Communicator(MPI.COMM_SELF) as comm:
        for nbytes in (4, 1 << 16):
            rows = bench_compressed.race(comm, nbytes, bench_compressed.parse(argv))
            assert {row["name"] for row in rows} == names
            for row in rows:
                assert 0 < row["q1"] <= row["median"] <= row["q3"]
                few, plain = "int8" in row["name"], row["name"] in bench_compressed.PLAIN
                assert row["error"] == 0 if plain else row["error"] < (0.02 if few else 0.3)
    assert bench_compressed.main(argv) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names) and shown.count("forecast for") == 4
