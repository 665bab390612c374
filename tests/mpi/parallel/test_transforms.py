"""Transformed models train alike in all layouts, and what they need is in checkpoints and forecasts."""

import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("safetensors")

from collectives import Communicator
from parallel import SGD, Engine, StepFailed, nn
from parallel.checkpoint.checkpoint_files import Checkpoint
from parallel.ptq import load_model
from parallel.ptq.calibration import dealt
from parallel.ptq.evaluation import evaluate
from parallel.ptq.quantize_model import quantise
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training
from quant import parse

TRANSFORMS = {
    "fp8": {"products": "fp8"},
    "rounded and pruned": {"fake_quant": "int4_g32", "fake_quant_inputs": "int8_zero", "prune": 0.5},
}
transforms = pytest.mark.parametrize("name", TRANSFORMS)
BASE = {"data": "teacher_classes", "model": "mlp:small", "batch": 16, "micro_batch": 4, "optimizer": "sgd"}


def trained(comm, steps=4, **settings):
    """(weights' first bits of the last steps' losses, test score, forecast, ledger)."""
    with Training(complete({**BASE, "steps": steps, **settings}), comm) as made:
        losses = [record.report.loss for record in made.run()]
        return losses, made.score(), made.forecast, made.engine.ledger


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp"])
@transforms
def test_the_same_bits_in_all_layouts(comm, layout, name):
    if layout == "pp" and comm.size > 3:
        pytest.skip("more stages than units")
    settings = {"reproducible": True, "recompute": True, **TRANSFORMS[name]}
    losses, score, forecast, ledger = trained(comm, layout=layout, **settings)
    alone = Communicator(MPI.COMM_SELF)
    assert (losses, score) == trained(alone, layout="dp", **settings)[:2]
    assert forecast.predicted == ledger.predicted == ledger.allocated
    alone.close()


def test_ranges_are_in_checkpoints(comm, tmp_path_factory):
    folder = MPI.COMM_WORLD.bcast(tmp_path_factory.mktemp("ranges"))
    settings = complete({**BASE, **TRANSFORMS["rounded and pruned"], "steps": 6, "reproducible": True})
    with Training(settings, comm) as made:
        whole = []
        for record in made.run():
            whole.append(record.report.loss)
            if made.done == 3:
                path = made.save(folder)
                ranges = made.engine.state()["ranges"]
    assert list(ranges) == ["0.1", "1.0", "2.0"] and all(low < high for low, high in ranges.values())
    with Training(settings, comm) as made:
        found = Checkpoint(comm, path)
        made.resume(found)
        assert made.engine.state()["ranges"] == found.facts["engine"]["ranges"] == ranges
        assert [record.report.loss for record in made.run()] == whole[3:]


def test_a_failed_step_moves_no_range(comm):
    options = {"fake_quant_inputs": "int8_zero", "batch": 12, "micro_batch": 3}
    x, y = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
    loss = nn.SoftmaxCrossEntropy()
    with Engine(nn.mlp([4, 8, 3]), loss, comm, SGD(lr=0.1), **options) as engine:
        engine.step(x, y)
        before = engine.inner.state()["ranges"]
        with pytest.raises(StepFailed):
            engine.step(100 * x, np.full(12, 99))
        assert engine.inner.state()["ranges"] == before
        engine.step(x, y)
        assert engine.inner.state()["ranges"]["0.1"] == before["0.1"]


def test_what_was_trained_is_what_is_quantised(comm, tmp_path_factory):
    """Rounding the weights of a checkpoint to the nearest gives the model that the training has tested."""
    folder = MPI.COMM_WORLD.bcast(tmp_path_factory.mktemp("rounded"))
    settings = complete({**BASE, "fake_quant": "int3_g32", "prune": 0.5, "steps": 5})
    with Training(settings, comm) as made:
        list(made.run())
        score = made.score()
        made.save(folder)
    loaded = load_model.from_checkpoint(comm, folder)
    zeros = [(p.data == 0).mean() for p in loaded.model.parameters() if p.decay]
    assert np.allclose(zeros, 0.5, atol=1e-3)
    mine = dealt(loaded.task.test, len(loaded.task.test), 64, comm.rank, comm.size)
    rounded = quantise(loaded.model, parse("int3_g32"), [], comm)
    found = evaluate(rounded, loaded.loss, mine, comm, loaded.measure)
    assert found.measure == score.accuracy and abs(found.loss - score.loss) < 1e-5
