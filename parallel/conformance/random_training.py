"""Random trainings of every strategy, and the difference between the memory forecast of one and its ledger."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.data_parallel.layouts import LAYOUTS
from parallel.decentralized.styles import STYLES
from parallel.engine.settings import Settings, complete
from parallel.optim.precision import PRECISIONS
from parallel.trainer.trainer import Training

STRATEGIES = (*LAYOUTS, "pp", "ps", *STYLES)


def draw_settings(seed: int, ranks: int) -> Settings:
    """Settings of a short training on so many ranks; neighbouring seeds have the strategies in turn."""
    random = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[random.integers(len(values))]

    layout = STRATEGIES[seed % len(STRATEGIES)]
    if layout == "ps" and ranks < 2:
        layout = "zero3"
    text = random.random() < 0.4 and not (layout == "pp" and ranks > 4)
    chosen: dict[str, Any] = {"layout": layout, "data": "copy" if text else "teacher_classes", "steps": 2, "warm_up": 0}
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
        chosen |= one(*_meshes(ranks))
    if layout == "pp":
        chosen["layout"] = one("pp:1f1b", "pp:gpipe", "pp:zb-h1")
        chosen["model"] = "gpt:tiny" if text else "mlp:small"
        chosen |= {"batch": 24, "stages": min(ranks, 2 if not text else ranks)}
        if ranks % chosen["stages"]:
            chosen["stages"] = 1
        chosen.pop("accumulate", None)
        chosen["micro_batch"] = 12 // (ranks // chosen["stages"])
    return complete(chosen)


def _meshes(ranks: int) -> Iterator[dict[str, Any]]:
    """Settings with operators, sequences or both divided over an even number of ranks."""
    replicas = ranks // 2
    yield {"mesh": f"dp={replicas},tp=2", "sequence_parallel": False}
    yield {"mesh": f"dp={replicas},tp=2", "sequence_parallel": True}
    yield {"mesh": f"dp={replicas},cp=2"}
    if replicas % 2 == 0:
        yield {"mesh": f"dp={replicas // 2},cp=2,tp=2"}


def forecast_difference(settings: Settings, comm: Communicator) -> str:
    """Difference on this rank between the forecast of a training and its ledger after all steps, or "". Collective."""
    with Training(settings, comm) as training:
        for _ in training.run():
            pass
        forecast, ledger = training.forecast, training.engine.ledger
        for name, expected, found in (
            ("forecast and ledger", forecast.predicted, ledger.predicted),
            ("forecast and arrays", forecast.predicted, ledger.allocated),
            ("needed bytes", forecast.needed, ledger.needed),
        ):
            if expected != found:
                return f"{name}: expected {expected}, found {found}"
    return ""
