"""tests/studies/mpi4py_tests.py: what it makes of tests that pass, fail, hang and end the process."""

import mpi4py_tests
import pytest
from mpi4py_files import FILES, reason
from support.launches import MPIEXEC, needs_mpiexec

TESTS = """
import os, time, unittest
from mpi4py import MPI

class Test(unittest.TestCase):
    def test_a_passes(self):
        self.assertEqual(type(MPI.COMM_WORLD).__name__, "Communicator")
    def test_b_fails_on_rank_1(self):
        self.assertNotEqual(MPI.COMM_WORLD.Get_rank(), 1)
    def test_c_hangs(self):
        if MPI.COMM_WORLD.Get_rank() == 0:
            time.sleep(1000)
    def test_d_ends_the_process(self):
        if MPI.COMM_WORLD.Get_rank() == 0:
            os._exit(3)
        time.sleep(2)
    def test_e_passes(self):
        self.skipTest("not today") if MPI.COMM_WORLD.Get_size() > 2 else None
"""


@pytest.mark.full
@needs_mpiexec
def test_every_test_has_an_outcome(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "arrayimpl.py").write_text("ArrayBackends = []")
    monkeypatch.setattr(mpi4py_tests, "fetched", lambda: tmp_path)
    outcomes = mpi4py_tests.run(MPIEXEC, 2, "test_some", seconds=20, limit=200)
    kinds = {name.rpartition(".")[2]: kind for name, (kind, _) in outcomes.items()}
    assert kinds == {
        "test_a_passes": "passed",
        "test_b_fails_on_rank_1": "failed",
        "test_c_hangs": "failed",
        "test_d_ends_the_process": "failed",
        "test_e_passes": "passed",
    }
    assert "time.sleep" in outcomes["test_some.Test.test_c_hangs"].text or "in test_c_hangs" in str(outcomes)
    failed = [name for name, (kind, _) in outcomes.items() if kind == "failed"]
    without = [name for name in outcomes if name not in failed[:1]]
    natively = mpi4py_tests.run(MPIEXEC, 2, "test_some", 20, limit=200, native=True, without=without)
    assert list(natively) == failed[:1] and natively[failed[0]].kind == "failed"
    assert mpi4py_tests.cell(outcomes, {"test_some.Test.test_c_hangs"}) == "2, 2 FAILED, 1 failed, natively too"


def test_cases_left_out_have_a_reason():
    assert reason("test_objmodel.TestObjModel.testCAPI")
    assert reason("test_cco_buf.TestCCOBufWorld.testBcast") is None
    assert len(set(FILES)) == len(FILES)
