"""tests/studies/package_tests.py: tests that pass, fail on Chorus only, are skipped and end the process."""

import package_tests
import pytest
from package_rank import plain_name
from package_tests import Suite
from support.launches import needs_mpiexec

TESTS = """
import os, pytest
from mpi4py import MPI

def test_passes():
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.Get_size()
def test_passes_natively_only():
    assert type(MPI.COMM_WORLD) is MPI.Intracomm
def test_fails_on_one_rank():
    assert MPI.COMM_WORLD.Get_rank() == 0
@pytest.mark.skip("not today")
def test_skipped():
    pass
def test_ends_the_process():
    os._exit(3)
def test_runs_after_it():
    pass
"""

PROGRAM = """
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(1) == 2
raise SystemExit(MPI.COMM_WORLD.Get_rank() and type(MPI.COMM_WORLD) is MPI.Intracomm)
"""


def test_names_without_ranks():
    assert plain_name("tests/a.py::test_b[2-x][Rank 1]") == plain_name("tests/a.py::test_b[2-x][Rank 0]")


@pytest.mark.full
@needs_mpiexec
def test_differences_are_failures(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "source" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "some_program.py").write_text(PROGRAM)
    suite = Suite("1.0", ["tests"], ["tests/some_program.py"])
    monkeypatch.setattr(package_tests, "SUITES", {"some": suite, "missing": suite})

    def installed(package, suite):
        if package == "missing":
            raise RuntimeError("no such release")
        return tmp_path

    monkeypatch.setattr(package_tests, "installed", installed)
    assert package_tests.main(["--ranks", "2", "--limit", "60"]) == 1
    output = capsys.readouterr().out
    assert "left out: missing 1.0: no such release" in output
    # natively: passes, passes natively only, runs after it; the program fails there
    assert [line.split() for line in output.splitlines() if line.startswith("some 1.0")][-1] == ["some", "1.0", *"2321"]
    assert "test_some.py::test_passes_natively_only: rank" in output
    assert "fails natively: tests/some_program.py" in output
