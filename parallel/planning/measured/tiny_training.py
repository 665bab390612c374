"""Measured step of a tiny training: what every step costs beside computation and exchanges of its own model.

That is the work of the engine in Python, the thread that prepares batches, and small collectives: micro-batch numbers,
sums of losses, squares of gradients, each with the wait for the slowest rank.
"""

from statistics import median

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.engine.settings import Settings
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

WARM_UP, STEPS = 5, 41
"""Steps before the measured ones, and these; the median counts."""


def tiny_settings(layout: str, ranks: int, servers: int) -> Settings:
    """Settings of a training of the smallest model, with one sample for each rank."""
    options = {"data": "digits", "model": "mlp:tiny", "dropout": 0.0, "steps": WARM_UP + STEPS}
    return complete({**options, "layout": layout, "batch": ranks, "servers": servers})


def tiny_step_seconds(settings: Settings, comm: Communicator | None) -> float:
    """Median seconds of a step on the slowest rank. Collective."""
    assert comm is not None  # a record without ranks measures nothing
    with Training(settings, comm) as training:
        seconds = np.array([record.seconds for record in training.run()][WARM_UP:])
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return float(median(seconds.tolist()))
