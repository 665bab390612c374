"""Construction of data, model, loss, optimizer and sampler from settings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from parallel.data import datasets
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Sampler
from parallel.engine.settings import BUILD_FIELDS, DEFAULTS, OPTIONS, Settings
from parallel.nn.compose import Sequential
from parallel.nn.loss import LOSSES
from parallel.nn.models import MODELS, build
from parallel.nn.operator import ArraySpec
from parallel.optim.lr_schedules import LRSchedule
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizers import OPTIMIZERS
from parallel.optim.plateau import ReduceLROnPlateau
from parallel.optim.precision import PRECISIONS
from parallel.trainer.model_transforms import transformed
from parallel.trainer.samplers import sized
from parallel.trainer.strategies import strategy_of

FINAL_RATE = 0.1
"""Final learning rate relative to the highest one."""


def prepare(settings: Settings, ranks: int) -> tuple[LearningTask, Sequential, Optimizer]:
    """Load data, build model and optimizer. ValueError names a setting that is invalid or does not fit the others."""
    strategy = strategy_of(settings)
    strategy.check(settings, ranks)
    if settings.batch_tokens is None:
        strategy.check_batch(settings, ranks)
    task = datasets.load(settings.data, seed=settings.seed, length=settings.length, tokenizer=settings.tokenizer)
    if settings.batch_tokens is not None:  # the batch depends on the data
        strategy.check_batch(sized(settings, task.train), ranks)
    family = expect_fit(settings.model, task)
    loss_of(task, settings)
    if ranks > len(task.train):
        raise ValueError(f"more ranks ({ranks}) than samples ({len(task.train)}) in {task.name}")
    if not task.is_text:
        task = _map_inputs(task, lambda x: x.astype(np.float32, copy=False))
    if family == "convnet" and len(task.inputs) == 2:
        task = replace(_map_inputs(task, lambda x: x[:, None]), inputs=(1, *task.inputs))
    steps = steps_of(settings, task)
    return task, build_model(settings, task.inputs, task.outputs, steps), _optimizer(settings, steps)


def build_model(settings: Settings, inputs: Sequence[int], outputs: int, steps: int) -> Sequential:
    """Model that settings name, with their transforms, for samples of shape `inputs` and a training of `steps`."""
    options: dict[str, Any] = {name: getattr(settings, name) for name in BUILD_FIELDS}
    return transformed(build(settings.model, tuple(inputs), outputs, **options), settings, steps)


def expect_fit(model: str, task: LearningTask) -> str:
    """Family of a model's name. ValueError if it takes text and the data are none, or conversely."""
    family = model.partition(":")[0]
    if family in MODELS and task.is_text != MODELS[family].is_text:
        fits = ", ".join(name for name, other in MODELS.items() if other.is_text == task.is_text)
        raise ValueError(f"model: expected one of {fits} for {task.name}, found {model}")
    return family


def _map_inputs(task: LearningTask, change: Callable[[np.ndarray], np.ndarray]) -> LearningTask:
    train, test = (part.map_inputs(change) for part in (task.train, task.test))  # type: ignore[attr-defined]
    return replace(task, train=train, test=test)


def _optimizer(settings: Settings, steps: int) -> Optimizer:
    rate, warm_up = settings.rate, min(settings.warm_up, steps)
    schedule: Any = LRSchedule("warm_up_cosine", rate=rate, warm_up=warm_up, steps=steps, floor=FINAL_RATE * rate)
    if settings.plateau is not None:
        schedule = ReduceLROnPlateau(schedule, settings.plateau, settings.plateau_factor)
    kind = OPTIMIZERS[settings.optimizer]
    options = {one.name: getattr(settings, one.name) for one in fields(kind) if one.name in OPTIONS}
    return kind(**options | {"rate": schedule})


def loss_of(task: LearningTask, settings: Settings = DEFAULTS) -> Any:
    """Loss that settings name, by default the usual one of the task's targets. ValueError if it does not fit them."""
    names = {"values": ("mse", "l1", "huber", "bce")}.get(task.kind, ("cross_entropy",))
    name, _, number = (settings.loss or names[0]).partition(":")
    if name not in names:
        raise ValueError(f"loss: expected one of {', '.join(names)} for {task.name}, found {settings.loss}")
    options: dict[str, Any] = {}
    if number:
        if name not in LOSS_NUMBERS or task.is_text:
            raise ValueError(f"loss: expected {name} without a number for {task.name}, found {settings.loss}")
        options[LOSS_NUMBERS[name]] = _number("loss", number)
    if settings.class_weights:
        weights = [_number("class_weights", text) for text in settings.class_weights.split(",")]
        if name not in LOSS_WEIGHTS or task.is_text or len(weights) != task.outputs:
            fits = f"{task.outputs} weights of classes, for cross_entropy or bce and no text"
            raise ValueError(f"class_weights: expected {fits}; found {len(weights)} for {name} of {task.name}")
        options[LOSS_WEIGHTS[name]] = weights
    return LOSSES[name](**options)


LOSS_NUMBERS = {"cross_entropy": "smoothing", "huber": "delta"}
LOSS_WEIGHTS = {"cross_entropy": "class_weights", "bce": "pos_weights"}
"""Arguments of losses that settings have."""


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected numbers, found {text!r}") from None


def measure_of(task: LearningTask, settings: Settings = DEFAULTS) -> Any:
    """Metric for `evaluate`: function that counts correct predictions, or None for regression."""
    return getattr(loss_of(task, settings), "correct", None)


def steps_of(settings: Settings, task: LearningTask) -> int:
    if settings.steps is not None:
        return settings.steps
    steps = settings.epochs * _sampler(settings, task, workers=1).steps_per_epoch  # of any number of workers
    if not math.isfinite(steps):
        raise ValueError(f"epochs: expected a number of steps, found {settings.epochs:g} epochs")
    return math.ceil(steps)


def sampler_of(settings: Settings, task: LearningTask, ranks: int) -> Sampler:
    return _sampler(settings, task, strategy_of(settings).workers(settings, ranks))


def _sampler(settings: Settings, task: LearningTask, workers: int) -> Sampler:
    return strategy_of(settings).sampler(settings, task.train, workers, window=task.window)


def specs(task: LearningTask, precision: str, samples: int) -> tuple[ArraySpec, ArraySpec]:
    """Shapes and dtypes of the inputs and the targets of a batch of `samples`, as the engine stores them."""
    kinds = PRECISIONS[precision].storage, PRECISIONS[precision].wide
    x, y = (
        ArraySpec((samples, *array.shape[1:]), array.dtype if array.dtype.kind in "iub" else kind)
        for array, kind in zip(task.train.take(np.zeros(1, np.int64)), kinds)
    )
    return x, y


def flops(model: Sequential, task: LearningTask, precision: str) -> tuple[float, float]:
    """FLOPs of matrix products to train on one sample: a backward pass counts as two forward passes.

    Without and with those that are computed again in the backward pass (`Recompute`).
    """
    outline = model.outline(specs(task, precision, 1)[0])
    return float(outline.training_flops), float(outline.training_flops + outline.recomputed)
