"""The forecast of random configurations of all strategies is the ledger after all steps, to the byte."""

import numpy as np
import pytest
from mpi4py import MPI
from support.tiers import default

pytest.importorskip("safetensors")

from parallel.data_parallel.layouts import LAYOUTS
from parallel.decentralized.styles import STYLES
from parallel.engine.settings import complete
from parallel.optim.precision import PRECISIONS
from parallel.trainer.trainer import Training

SEEDS = 200
STRATEGIES = ("dp-naive", "dp-bucket", "dp", "zero1", "zero2", "zero3", "pp", "ps", "local", "group", "sgp", "hogwild")
STRATEGIES += ("federated",)


def meshes(ranks):
    """Settings with operators, sequences or both divided over the ranks."""
    replicas = ranks // 2
    yield {"mesh": f"dp={replicas},tp=2", "sequence_parallel": False}
    yield {"mesh": f"dp={replicas},tp=2", "sequence_parallel": True}
    yield {"mesh": f"dp={replicas},cp=2"}
    if replicas % 2 == 0:
        yield {"mesh": f"dp={replicas // 2},cp=2,tp=2"}


def configuration(seed, ranks):
    """Settings that fit so many ranks."""
    random = np.random.default_rng(seed)

    def one(*values):
        return values[random.integers(len(values))]

    layout = STRATEGIES[seed % len(STRATEGIES)]
    if layout == "ps" and ranks < 2:
        layout = "zero3"
    text = random.random() < 0.4 and not (layout == "pp" and ranks > 4)
    chosen = {"layout": layout, "data": "copy" if text else "teacher_classes", "steps": 2, "warm_up": 0}
    chosen |= {"model": "gpt:tiny" if text else one("mlp:tiny", "mlp:small")} | ({"length": 16} if text else {})
    chosen |= {"batch": one(8, 13, 24), "optimizer": one("sgd", "adam", "adamw"), "clip": one(0.0, 0.5)}
    chosen |= {"precision": one(*PRECISIONS), "recompute": one(False, True), "dropout": one(0.0, 0.1)}
    chosen |= {"bucket_bytes": one(1 << 12, 1 << 16, 4 << 20), "first_bytes": one(1, 1 << 12)}
    chosen |= {"reproducible": one(False, True), **one({}, {"micro_batch": 3}, {"accumulate": 2})}
    if layout in STYLES:
        chosen |= {"reproducible": False, "precision": one("fp32", "fp64")}
    if layout == "federated":
        chosen |= {"clients": one(8, 13), "client_fraction": one(0.3, 1.0), "local_epochs": 1, "batch": one(96, 200)}
    if layout == "ps":
        chosen |= {"precision": one("fp32", "fp64", "bf16"), "servers": ranks - 1, "consistency": one("bsp", "async")}
        chosen["reproducible"] &= chosen["consistency"] == "bsp"
    if layout in LAYOUTS and text and ranks % 2 == 0 and random.random() < 0.7:
        chosen |= one(*meshes(ranks))
    if layout == "pp":
        chosen["layout"] = one("pp:1f1b", "pp:gpipe", "pp:zb-h1")
        chosen["model"] = "gpt:tiny" if text else "mlp:small"
        chosen |= {"batch": 24, "stages": min(ranks, 2 if not text else ranks)}
        if ranks % chosen["stages"]:
            chosen["stages"] = 1
        chosen.pop("accumulate", None)
        chosen["micro_batch"] = 12 // (ranks // chosen["stages"])
    return chosen


@pytest.mark.parametrize("seed", default(range(SEEDS), *range(0, 12, 2)))
def test_to_the_byte(comm, seed):
    chosen = configuration(seed, comm.size)
    with Training(complete(chosen), comm) as training:
        list(training.run())
        forecast, ledger = training.forecast, training.engine.ledger
        assert forecast.predicted == ledger.predicted == ledger.allocated, (chosen, MPI.COMM_WORLD.rank)
        assert forecast.needed == ledger.needed, chosen
