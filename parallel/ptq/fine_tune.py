"""Training of a model from its present values, for a few epochs, to adapt it to the format of its weights."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from collectives import Communicator
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Sampler
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import DEFAULTS, Settings
from parallel.nn.operator import Operator
from parallel.optim.lr_schedules import LRSchedule
from parallel.optim.optimizers import Adam
from parallel.trainer.engine_checkpoint import state_dict
from parallel.trainer.task_setup import loss_of

RATE = 1e-3
"""Learning rate of Adam in the first step. It falls to 0 as half a cosine."""


class FineTuning(NamedTuple):
    """Length of a fine-tuning in epochs, samples per step over all ranks, seed of their order, settings with a loss."""

    epochs: int
    batch: int
    seed: int = 0
    settings: Settings = DEFAULTS


def fine_tune(model: Operator, task: LearningTask, comm: Communicator, tuning: FineTuning) -> dict[str, np.ndarray]:
    """Train a model with Adam. Return its values by parameter name. Collective. Raises StepFailed like training.

    The training samples of the task are divided among the ranks. Parameters start at their initial values
    (`starting_at`), the learning rate at `RATE`.
    """
    epochs, batch, seed, given = tuning
    sampler = Sampler(len(task.train), batch, -(-batch // comm.Get_size()), seed)
    schedule = LRSchedule("cosine", rate=RATE, steps=max(1, epochs * sampler.steps_per_epoch))
    settings = Settings(layout="dp", seed=seed, batch=batch)
    with DataParallelEngine(model, loss_of(task, given), comm, Adam(rate=schedule), settings) as engine:
        for epoch in range(epochs):
            for step in sampler.steps(epoch):
                engine.step(step.batches(task.train, engine.share(len(step.parts))))
        return state_dict(engine)


def starting_at(values: np.ndarray) -> Callable[..., np.ndarray]:
    """Initialiser of a parameter that starts at these values."""
    return lambda random, shape: values.reshape(shape)
