"""Training by its settings with servers: the loop, checkpoints, and what is kept of the order."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.training_states import same, whole

from parallel.checkpoint import checkpoint_files
from parallel.runtime.consistency_check import StepFailed
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

SAID = {"data": "teacher_classes", "model": "mlp:tiny", "steps": 12, "batch": 40, "micro_batch": 10, "clip": 1.0}


@pytest.fixture(autouse=True)
def several(comm):
    if comm.size == 1:
        pytest.skip("one rank is no server and workers")


def run(comm, said, folder=None, resume=None):
    """The state, the lines of all steps, and the score; with a checkpoint of the middle."""
    with Training(complete(said), comm) as training:
        if resume is not None:
            training.resume(checkpoint_files.Checkpoint(comm, resume))
        lines = []
        for record in training.run():
            lines.append(record.line())
            if folder is not None and training.done == 6:
                training.save(folder)
        return whole(comm, training.engine), [line["loss"] for line in lines], training.score()


def test_bsp_is_data_parallel_training(comm):
    said = {**SAID, "reproducible": True, "dropout": 0.1}
    want, losses, score = run(comm, said)
    state, seen, measured = run(comm, {**said, "layout": "ps", "servers": comm.size // 2})
    assert same(state, want)
    assert measured == score
    assert comm.rank or seen == losses


def test_a_checkpoint_goes_on_in_another_layout(comm, tmp_path):
    folder, said = Path(comm.bcast(str(tmp_path))), {**SAID, "reproducible": True}
    want, _, _ = run(comm, {**said, "layout": "ps"}, folder)
    middle = checkpoint_files.latest(comm, folder)
    assert same(run(comm, said, resume=middle)[0], want)
    assert same(run(comm, {**said, "layout": "ps", "servers": comm.size - 1}, resume=middle)[0], want)


@pytest.mark.parametrize("rule", ["bsp", "ssp:1", "async"])
def test_a_replay_is_the_same_training(comm, tmp_path, rule):
    order = str(Path(comm.bcast(str(tmp_path))) / "order")
    said = {**SAID, "layout": "ps", "consistency": rule}
    state, losses, score = run(comm, {**said, "record": order})
    again, seen, measured = run(comm, {**said, "replay": order})
    assert same(again, state)
    assert measured == score
    assert comm.rank or seen == losses


def test_a_replay_that_rests_elsewhere_ends_with_the_reason(comm, tmp_path):
    folder = Path(comm.bcast(str(tmp_path)))
    said = {**SAID, "layout": "ps", "consistency": "async"}
    run(comm, {**said, "record": str(folder / "order")})
    with pytest.raises(StepFailed, match="tests and checkpoints must come after the same steps"):
        run(comm, {**said, "replay": str(folder / "order")}, folder / "saved")


def test_no_workers_are_refused(comm):
    with pytest.raises(ValueError, match="leave no workers"):
        Training(complete({**SAID, "layout": "ps", "servers": comm.size}), comm)
    settings = complete({**SAID, "layout": "ps"})
    assert replace(settings, micro_batch=None).micro(comm.size - 1) == -(-40 // (comm.size - 1))
