"""Training step of DistributedDataParallel over the backend "chorus" against one over gloo, in turns.

    mpiexec -n 2 python tests/studies/torch_ddp_race.py
    mpiexec -n 2 python tests/studies/torch_ddp_race.py --models convnet --rounds 5

Both train copies of the same model on the same samples, of which each rank has its own. Shown are the shortest step of
each round in ms, the ratio of the medians of the rounds, and the largest difference of the gradients of the first step
relative to the largest gradient; above 1e-5 the status is 1.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
from torch_ddp import TorchModel, mean_loss
from torch_modules_race import CLASSES, convnet, timed

from collectives.torch.race_cases import groups
from parallel import nn
from parallel.nn.flat_params import FlatParams

LENGTH, WORDS, STEPS, TOLERANCE = 128, 512, 5, 1e-5


def mlp() -> torch.nn.Module:
    """30.0 million parameters."""
    widths = [784, 3072, 3072, 3072, 2816, CLASSES]
    layers = [torch.nn.Linear(one, other) for one, other in pairwise(widths)]
    return torch.nn.Sequential(*(torch.nn.Sequential(one, torch.nn.ReLU()) for one in layers[:-1]), layers[-1])


def gpt() -> torch.nn.Module:
    """The model ``gpt:small`` of `chorus train`, of PyTorch's operations."""
    model = nn.build("gpt:small", (LENGTH,), WORDS)
    flat = FlatParams(model)
    vector = np.zeros(flat.length, np.float32)
    flat.initialise(vector, 0)
    flat.bind(vector)
    return TorchModel(model).module


def vectors(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 784), torch.randint(CLASSES, (samples,))


def images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 1, 28, 28), torch.randint(CLASSES, (samples,))


def texts(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randint(WORDS, (2, samples // 4, LENGTH))
    return x, y


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[int], tuple[torch.Tensor, torch.Tensor]]]] = {
    "mlp": (mlp, vectors),
    "gpt": (gpt, texts),
    "convnet": (lambda: torch.nn.Sequential(*convnet()), images),
}


class Contestant:
    """Model, optimizer and samples of one backend."""

    def __init__(self, model: torch.nn.Module, group: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self._x, self._y = x, y

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        mean_loss(self.model(self._x), self._y).backward()
        self.optimizer.step()

    def gradients(self) -> torch.Tensor:
        return torch.cat([each.grad.flatten() for each in self.model.parameters() if each.grad is not None])


def race(name: str, rounds: int, samples: int, ours: Any, gloo: Any) -> float:
    """Print the row of a model; return the difference of the gradients. Collective."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1 + ours.rank())
    batch = data(samples)
    racers = {one: Contestant(copy.deepcopy(model), group, *batch) for one, group in (("chorus", ours), ("gloo", gloo))}
    found: dict[str, list[float]] = {one: [] for one in racers}
    for racer in racers.values():
        racer.step()
    first, second = (racer.gradients() for racer in racers.values())
    difference = float((first - second).abs().max() / second.abs().max())
    for _ in range(rounds):
        for one, racer in racers.items():
            racer.step()
            found[one].append(min(timed(racer.step, MPI.COMM_WORLD) for _ in range(STEPS)))
    if ours.rank() == 0:
        print(f"{name}, {sum(one.numel() for one in model.parameters()) / 1e6:.1f} M parameters")
        for one, times in found.items():
            print(f"  {one:7}", *(f"{each:8.2f}" for each in times))
        ratio = median(found["chorus"]) / median(found["gloo"])
        print(f"  ratio {ratio:.3f}, gradients differ by {difference:.1e}", flush=True)
    return difference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=32, help="of each rank; texts are a quarter as many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours, gloo = groups()
    try:
        worst = max(race(name, args.rounds, args.samples, ours, gloo) for name in args.models.split(","))
    finally:
        dist.destroy_process_group()
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
