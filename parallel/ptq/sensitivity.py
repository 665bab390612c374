"""Sensitivity of the loss to the quantisation of single layers: measured, or estimated from gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel.data.sampler import Batch
from parallel.nn.gradient_checks import checked
from parallel.nn.operator import Operator, PassMode
from parallel.ptq.evaluation import evaluate
from parallel.ptq.packed_weights import FewBitWeight, packed
from parallel.ptq.quantizable_layers import QuantizableLayer, to_matrix
from parallel.runtime.collective_errors import collective_call

Options = Sequence[Sequence[FewBitWeight]]
"""All options of every layer."""


def by_loss(
    model: Operator,
    loss: Any,
    layers: Sequence[QuantizableLayer],
    options: Options,
    batches: Sequence[Batch],
    comm: Any,
) -> np.ndarray:
    """Increase of the mean loss with a single layer quantised: float64, shape (layers, options). Collective.

    Cost: a forward pass of all batches for every layer and option.
    """
    base = evaluate(model, loss, batches, comm).loss
    return np.array(
        [
            [evaluate(packed(model, {layer.name: weight}), loss, batches, comm).loss - base for weight in weights]
            for layer, weights in zip(layers, options)
        ]
    )


def by_fisher(
    model: Operator,
    loss: Any,
    layers: Sequence[QuantizableLayer],
    options: Options,
    batches: Sequence[Batch],
    comm: Any,
) -> np.ndarray:
    """Half the squared error of each weight times the mean of its squared gradients (second-order estimate).

    The mean is over samples: the empirical Fisher information, in place of the diagonal of the Hessian (Y. LeCun,
    J. Denker, S. Solla, "Optimal Brain Damage", 1990). Cost: a backward pass for every sample. Collective.
    """
    information = fisher(model, loss, layers, batches, comm)
    return np.array(
        [
            [
                0.5 * float((information[layer.name] * np.square(weight.matrix - layer.matrix)).sum())
                for weight in weights
            ]
            for layer, weights in zip(layers, options)
        ]
    )


def fisher(
    model: Operator, loss: Any, layers: Sequence[QuantizableLayer], batches: Sequence[Batch], comm: Any
) -> dict[str, np.ndarray]:
    """Mean squared gradient of each weight over all ranks' samples, by layer, as matrices. Collective."""
    sums = {layer.name: np.zeros(layer.shape) for layer in layers}

    def add() -> int:
        samples = 0
        for batch in batches:
            for x, y in zip(batch.x, batch.y):
                found = gradients(model, loss, x[None], y[None])
                for layer in layers:
                    sums[layer.name] += np.square(to_matrix(found[layer.name], layer.transposed), dtype=np.float64)
                samples += 1
        return samples

    samples = np.array([collective_call(comm, add, "these samples have no gradients")], np.int64)
    count = np.empty(1, np.int64)
    comm.Allreduce(samples, count)
    means = {name: np.empty_like(own) for name, own in sums.items()}
    for name, mean in means.items():
        comm.Allreduce(sums[name], mean)
        mean /= max(int(count[0]), 1)
    return means


def gradients(model: Operator, loss: Any, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of a micro-batch's mean loss, by parameter name."""
    found: dict[str, np.ndarray] = {}

    def sink(parameter: Any, compute: Any) -> None:
        one = np.empty(parameter.shape, np.float32)
        compute(one)
        found[parameter.name] = found[parameter.name] + one if parameter.name in found else one

    scores, saved = model.forward(x, PassMode(training=False))
    _, of_loss = loss.forward(scores, y)
    model.backward(loss.backward(1 / max(loss.count(y), 1), of_loss), saved, checked(model, sink))
    return found


SENSITIVITIES = {"loss": by_loss, "fisher": by_fisher}
"""Sensitivities by name: functions (model, loss, layers, options, batches, comm) -> array (layers, options)."""
