"""Naive data parallelism: the reference implementation that tests compare the engines with."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.engine.data_parallel.partition_spec import units_of
from parallel.nn.flat_params import FlatParams
from parallel.nn.operator import Operator, Parameter, PassMode
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizer_span import OptimizerSpan
from quant.types import Array


class NaiveDataParallel:
    """Training with a replica on every rank and one blocking allreduce of the whole gradient per step, in float32."""

    def __init__(self, model: Operator, loss: Any, comm: MPI.Intracomm, optimizer: Optimizer, seed: int = 0):
        self.model, self.loss, self.comm, self.optimizer, self.seed = model, loss, comm, optimizer, seed
        self.flat, self.steps = FlatParams(model), 0
        self.weights, self.gradient = np.zeros((2, self.flat.length), np.float32)
        self.flat.initialise(self.weights, seed)
        self.flat.bind(self.weights)
        self._spans = {id(place.parameter): place.span.start for place in self.flat.places}
        state = optimizer.fresh(self.weights)
        self._whole = OptimizerSpan(self.flat.span, self.weights, self.gradient, state, self.flat.places)

    def step(self, batches: Iterable[tuple[Array, Array, Array]]) -> float:
        """Make one update from this rank's micro-batches (x, y, sample indices). Returns the mean loss of all ranks."""
        self.gradient[...] = 0
        sums, units = np.zeros(2), units_of(self.model)  # losses and targets
        for x, y, samples in batches:
            run, saved = PassMode(True, self.seed, self.steps, samples), []
            for number, unit in enumerate(units):
                run.enter(units, number)
                x, values = unit.forward(x, run)
                saved.append(values)
            total, saved_loss = self.loss.forward(x, y)
            sums += total, self.loss.count(y)
            dy = self.loss.backward(1.0, saved_loss)
            for unit, values in zip(reversed(units), reversed(saved)):
                dy = unit.backward(dy, values, self._add)
        self.comm.Allreduce(MPI.IN_PLACE, self.gradient)
        self.comm.Allreduce(MPI.IN_PLACE, sums)
        self.optimizer.update([self._whole], self.steps, 1 / sums[1], gather=lambda sums_of_blocks: sums_of_blocks)
        self.steps += 1
        return float(sums[0] / sums[1])

    def _add(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        gradient = np.empty(parameter.shape, np.float32)
        compute(gradient)
        start = self._spans[id(parameter)]
        self.gradient[start : start + parameter.size] += gradient.reshape(-1)
