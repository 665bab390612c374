"""Predictions of an engine beside the scores of the same model on one rank, and in PyTorch where it is installed."""

from importlib.util import find_spec
from typing import Any

import numpy as np

from parallel import SGD, Engine
from support.differential.columns import Column
from support.differential.tasks import Task

TOLERANCE = 1e-12
SAMPLES = 11
"""Number that no column divides evenly."""


def prediction_problem(comm: Any, task: Task, column: Column) -> str:
    """Difference of the scores after a step as text; empty if there is none. Collective."""
    (x, _), settings = task.batch(0, SAMPLES), {"precision": "fp64", "batch": 4, "micro_batch": 2, **column.settings}
    with Engine(task.model(), task.loss(), comm, SGD(lr=0.1), **settings) as engine:
        if column.kind != "federated":
            engine.step(*task.batch(1, min(column.samples, 4)))
        out = np.zeros_like(engine.predict(x))
        found, state, alone = engine.predict(x, out), engine.state_dict(), engine.model_on_one_rank()
    expected = [alone(x)]
    if task.twin is not None and find_spec("torch"):
        import torch

        tensors = {name: torch.tensor(values) for name, values in state.items()}
        expected.append(task.twin(torch, tensors, x).numpy())
    for scores in expected:
        if found.dtype != np.float64 or found.shape != scores.shape:
            return f"expected float64 of shape {scores.shape}, found {found.dtype} of shape {found.shape}"
        if not (off := np.abs(found - scores).max()) <= TOLERANCE:
            return f"expected the scores, found others by {off}"
    return ""
