"""Faults of one rank in a program: where its model and data raise, and in what it differs from the others."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from parallel import nn
from parallel.nn.loss import SoftmaxCrossEntropy
from support.differential.tasks import Task

HERE = threading.local()
"""`place` of this rank's fault and the `error` that it raises; a rank is a thread or a process."""


class InjectedError(RuntimeError):
    """Raised by most faults."""


CAUSE = "injected into one rank"
"""Text of the errors of faults."""


def set_fault(place: str = "", error: type[BaseException] = InjectedError) -> None:
    """Let this rank raise an error at a place from now on, or nowhere."""
    HERE.place, HERE.error = place, error


def raise_at(place: str) -> None:
    """Raise the fault of this rank if it is at this place."""
    if getattr(HERE, "place", "") == place:
        raise HERE.error(CAUSE)


class Trap(nn.Operator):
    """Identity that raises this rank's fault in a pass."""

    mixes = ()

    def forward(self, x: Any, run: Any) -> tuple[Any, Any]:
        raise_at("forward" if run.training else "evaluation")
        return x, ()

    def backward(self, dy: Any, saved: Any, grads: Any) -> Any:
        raise_at("backward")
        return dy


class TrapLoss(SoftmaxCrossEntropy):
    """Cross-entropy that raises this rank's fault in a pass, or where targets are counted."""

    def forward(self, y: Any, targets: Any) -> tuple[Any, Any]:
        raise_at("loss")
        return super().forward(y, targets)

    def count(self, targets: Any) -> Any:
        raise_at("count")
        return super().count(targets)

    def correct(self, y: Any, targets: Any) -> Any:
        raise_at("measure")
        return super().correct(y, targets)


def trapped(task: Task, own_loss: bool) -> Task:
    """Task with a trap behind the second unit of the model, one on its first gradient, and perhaps one in the loss."""

    def model() -> Any:
        made = task.model()
        made.items[1] = nn.Sequential([*made.items[1].items, Trap()])
        made.items[1].parameters()[0].register_hook(lambda gradient: raise_at("hook"))
        return made

    return replace(task, name=f"{task.name} trapped", model=model, loss=TrapLoss if own_loss else task.loss, twin=None)


class FailingData:
    """Data set whose samples the rank with a fault cannot load."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise_at("data")
        return self.x[indices], self.y[indices]


OTHER_BATCHES: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "other inputs": lambda x, y: (x[::-1].copy(), y),
    "other targets": lambda x, y: (x, y[::-1].copy()),
    "fewer samples": lambda x, y: (x[:-1], y[:-1]),
    "another dtype": lambda x, y: (x, y.astype(np.int16)),
    "lengths": lambda x, y: (x, y[:-1]),
    "not finite": lambda x, y: (
        np.where(np.arange(len(x))[:, None] == 1, np.nan, x) if x.dtype.kind == "f" else x - 99,
        y,
    ),
}
"""Batches of one rank, by what is wrong with them."""
