"""Training step of the same modules of PyTorch: our engine with `nn.from_torch` against DDP over gloo, in turns.

    mpiexec -n 2 python tests/studies/torch_modules_race.py

Each rank has one micro-batch in a step. Shown is the shortest step of each of three rounds, in ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from mpi4py import MPI
from torch_ddp import init_gloo

from parallel import SGD, Engine, Settings, nn

ROUNDS, STEPS, CLASSES = 3, 10, 10
RATE, MOMENTUM = 0.01, 0.9


def mlp() -> list[torch.nn.Module]:
    widths = [784, 1024, 1024, 1024, CLASSES]
    layers = [torch.nn.Linear(one, other) for one, other in pairwise(widths)]
    return [*(torch.nn.Sequential(one, torch.nn.ReLU()) for one in layers[:-1]), layers[-1]]


def convnet() -> list[torch.nn.Module]:
    def block(before: int, after: int) -> torch.nn.Module:
        conv = torch.nn.Conv2d(before, after, 3, padding=1, bias=False)
        return torch.nn.Sequential(conv, torch.nn.BatchNorm2d(after), torch.nn.ReLU(), torch.nn.MaxPool2d(2))

    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 9, CLASSES))
    return [block(1, 16), block(16, 32), block(32, 64), head]


MODELS: dict[str, tuple[Callable[[], list[torch.nn.Module]], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "convnet": (convnet, (1, 28, 28)),
}


def race(name: str, comm: MPI.Intracomm, samples: int = 32) -> dict[str, list[float]]:
    """Milliseconds of the shortest step of every round, by contestant. Collective."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    blocks, size, rank = make(), comm.size, comm.rank
    x = np.random.default_rng(0).standard_normal((samples * size, *shape)).astype(np.float32)
    y = np.arange(len(x)) % CLASSES
    here = slice(samples * rank, samples * (rank + 1))
    model = nn.Sequential([nn.from_torch(one, first=at == 0) for at, one in enumerate(blocks)])
    theirs = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*blocks), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=RATE, momentum=MOMENTUM)

    def ddp() -> None:
        optimizer.zero_grad(set_to_none=True)
        scores = theirs(torch.from_numpy(x[here]))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(y[here])).backward()
        optimizer.step()

    found: dict[str, list[float]] = {"chorus": [], "ddp": []}
    settings = Settings(batch=len(x), micro_batch=samples)
    with Engine(model, nn.SoftmaxCrossEntropy(), comm, SGD(lr=RATE, momentum=MOMENTUM), settings) as engine:
        steps: dict[str, Callable[[], object]] = {"chorus": lambda: engine.step(x, y), "ddp": ddp}
        for _ in range(ROUNDS):
            for contestant, step in steps.items():
                step()
                found[contestant].append(min(timed(step, comm) for _ in range(STEPS)))
    return found


def timed(step: Callable[[], object], comm: MPI.Intracomm) -> float:
    """Milliseconds of a step that all ranks begin together."""
    comm.Barrier()
    began = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    init_gloo(comm)
    for name in MODELS:
        for contestant, times in race(name, comm).items():
            if comm.rank == 0:
                print(f"{name:8} {contestant:7}", *(f"{one:8.2f}" for one in times), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
