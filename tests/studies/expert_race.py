"""Race of a mixture of experts on several ranks against PyTorch: the same weights, tokens and gradients, in turns."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import quartiles
from collectives.cli.launcher import say
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.flat_params import FlatParams
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.models import TRANSFORMERS
from parallel.nn.operator import Parameter, PassMode, normal
from parallel.runtime.resources import limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.sharding.device_mesh import MeshAxis
from parallel.sharding.expert.expert_ranks import ExpertRanks

RTOL = 1e-5
"""Largest difference of an element of results and gradients, relative to the largest element."""


Pass: TypeAlias = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Function of tokens and gradients of their results: results, gradients of tokens and of the router's weights."""


class ChorusExperts:
    """A mixture whose experts are divided over all ranks; `run` as of `TorchExperts`."""

    def __init__(self, mixture: MixtureOfExperts, comm: Communicator):
        axis = MeshAxis("ep", comm.Get_rank(), comm.Get_size(), comm)
        self._mixture = copy.copy(mixture)
        self._mixture.experts = ExpertRanks(axis, mixture.experts.experts)
        self._gradients = {id(one): np.empty(one.shape, np.float32) for one in self._mixture.parameters()}
        self._gate = self._gradients[id(mixture.router.weight)]

    def run(self, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        y, saved = self._mixture.forward(x, PassMode(samples=np.arange(len(x))))

        def sink(parameter: Parameter, compute: Callable[[np.ndarray], object]) -> None:
            compute(self._gradients[id(parameter)])

        return y, self._mixture.backward(dy, saved, sink), self._gate


def mixture_of(options: argparse.Namespace) -> MixtureOfExperts:
    """Mixture of `options.model` and `options.experts`, without loss terms; ValueError names what is malformed."""
    family, _, size = options.model.partition(":")
    if family != "gpt" or size not in TRANSFORMERS:
        raise ValueError(f"--experts: expected a model of gpt:{', gpt:'.join(TRANSFORMERS)}, found {options.model}")
    width = TRANSFORMERS[size][-1]
    return ExpertLayers.parse(f"{options.experts},balance=0").mixture(width, normal(width**-0.5), normal(width**-0.5))


def race(options: argparse.Namespace) -> int:
    """Compare results, gradients and speed of a layer; exit status 0 if all agree. Collective."""
    from torch_experts import TorchExperts  # slow to load

    keep_freed_memory()
    limit_threads(options.threads)
    comm, mixture = Communicator(MPI.COMM_WORLD), mixture_of(options)
    flat = FlatParams(mixture)
    vector = np.empty(flat.length, np.float32)
    flat.initialise(vector, 0)
    flat.bind(vector)
    random = np.random.default_rng(comm.Get_rank())
    shape = 2, options.micro_batch * options.length, mixture.router.width
    x, dy = random.standard_normal(shape, dtype=np.float32)
    baseline = TorchExperts(mixture, MPI.COMM_WORLD, options.threads)
    sides: dict[str, Pass] = {"Chorus": ChorusExperts(mixture, comm).run, "PyTorch": baseline.run}
    ours, theirs = (run(x, dy) for run in sides.values())
    relative = [float(abs(one - other).max() / abs(other).max()) for one, other in zip(ours, theirs)]
    apart = comm.allreduce(max(relative), MPI.MAX)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.steps // options.turn + 1):
        for name in sorted(sides, reverse=bool(turn % 2)):
            comm.Barrier()
            began = MPI.Wtime()
            for _ in range(options.turn):
                sides[name](x, dy)
            comm.Barrier()
            seconds[name].append((MPI.Wtime() - began) / options.turn)
    baseline.close()
    say(f"mixture of {options.model}, experts {options.experts}, {len(x)} tokens on each of {comm.Get_size()} ranks")
    verdict = "equal" if apart <= RTOL else "NOT EQUAL"
    say(f"results and gradients: largest difference {apart:.2g} of the largest element: {verdict} within {RTOL:g}")
    timed = {name: 1e3 * np.array(its[1:]) for name, its in seconds.items()}  # in the first turn both warm up
    for name, values, unit in [
        *((name, values, " ms") for name, values in timed.items()),
        ("ratio", timed["PyTorch"] / timed["Chorus"], ""),
    ]:
        of = quartiles(values)
        say(f"{name:8} {of['median']:8.2f}{unit}  (quartiles {of['q1']:.2f} to {of['q3']:.2f})")
    return int(apart > RTOL)
