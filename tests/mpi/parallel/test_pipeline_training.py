"""Trainings in pipelines, by their settings alone."""

import pytest
from mpi4py import MPI
from support.training_states import differing, whole

from collectives import Communicator
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.runtime.consistency_check import RankMismatch
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training, TrainingPlan

pytestmark = pytest.mark.ranks(3)

SAID = {"data": "copy", "model": "gpt:tiny", "length": 16, "batch": 16, "steps": 3, "dropout": 0.1, "warm_up": 0}
UNITS = 4


def trained(comm, **said):
    with Training(complete({**SAID, **said}), comm) as training:
        losses = [record.report.loss for record in training.run()]
        return whole(comm, training.engine), losses, training.score(64), training.resolved


@pytest.fixture(scope="module")
def reference():
    with Communicator(MPI.COMM_SELF) as alone:
        return trained(alone, layout="dp", micro_batch=4, reproducible=True)


@pytest.mark.parametrize("layout", ["pp", "pp:1f1b", "pp:zb-h1"])
def test_a_pipeline_trains_as_one_rank_does(comm, layout, reference):
    """Wherever it is cut, by what was measured; the test included."""
    if comm.size > UNITS:
        pytest.skip("more stages than units")
    state, losses, score, resolved = trained(comm, layout=layout, micro_batch=4, reproducible=True)
    assert losses == reference[1] and score == reference[2]
    assert differing(state, reference[0]) == []
    assert len(resolved.cuts.split(",")) == comm.size + 1
    assert len(set(comm.allgather(resolved))) == 1


def test_replicas_and_said_cuts(comm, reference):
    if 4 % comm.size:
        pytest.skip("four micro-batches do not divide")
    mesh = f"zero1={comm.size},pp=1"
    found = trained(comm, layout="pp:gpipe", mesh=mesh, cuts="0,4", micro_batch=4, reproducible=True)
    assert differing(found[0], reference[0]) == []


def test_the_fastest_way_is_found(comm):
    if comm.size > UNITS:
        pytest.skip("more stages than units")
    _, losses, _, resolved = trained(comm, layout="pp:auto")
    assert len(losses) == 3 and resolved.layout.partition(":")[2] in SCHEDULES
    assert 16 % resolved.microbatches == 0 and len(set(comm.allgather(resolved))) == 1


def test_too_little_memory(comm):
    if comm.size > UNITS:
        pytest.skip("more stages than units")
    with pytest.raises(ValueError, match="the pipeline cannot be cut: limit: no schedule keeps 1000"):
        trained(comm, layout="pp:auto", memory=1000.0, microbatches=4)


def test_more_stages_than_units(comm):
    with pytest.raises(ValueError, match="cannot be cut"):
        trained(comm, layout="pp:interleaved", virtual=5, microbatches=4)


def test_settings_of_a_run_may_differ_between_ranks(comm):
    if comm.size > UNITS:
        pytest.skip("more stages than units")
    settings = complete({**SAID, "layout": "pp", "trace": comm.Get_rank() == 1})
    resolved = TrainingPlan(settings, comm).resolved
    assert resolved.cuts and resolved.trace == (comm.Get_rank() == 1)


def test_cuts_of_one_rank_are_an_error_of_all(comm):
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    with pytest.raises(
        RankMismatch, match=r"ranks differ: rank 0 has cuts: None; ranks? 1(, \d)* (has|have) cuts: 0,1"
    ):
        TrainingPlan(complete({**SAID, "layout": "pp", "cuts": "0,1" if comm.Get_rank() else None}), comm)
