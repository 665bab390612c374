"""Quantisation-aware fine-tuning: training of a trained model whose weights are rounded to codes in every pass.

The weights learn with the error of their rounding, which rounding after the training leaves in them. (B. Jacob et al.,
"Quantization and training of neural networks for efficient integer-arithmetic-only inference", CVPR 2018; from trained
weights: R. Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference", 2018, section 3.2.)
"""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np

from collectives import Communicator
from parallel.data.datasets import LearningTask
from parallel.nn.operator import Operator
from parallel.nn.transforms.quantizable_layers import kind_of, layers_of, to_matrix
from parallel.nn.transforms.weight_transform import TransformedWeight, WeightFunction, rounding_to
from parallel.nn.transforms.wrapper import rebuilt
from parallel.ptq.fine_tune import FineTuning, fine_tune, starting_at
from parallel.ptq.packed_weights import packed
from parallel.ptq.quantize_model import rounded
from quant import QuantSpec
from quant.types import Array


def tune_weights(
    model: Operator, specs: Sequence[QuantSpec], task: LearningTask, comm: Communicator, tuning: FineTuning
) -> Operator:
    """Quantised copy of a model, after training with the weights of layer i rounded to nearest by ``specs[i]``.

    Layers are those of `layers_of`. All parameters are trained; weights that are 0 at the start, as in a pruned model,
    stay 0. Collective; StepFailed as in training.
    """
    made = deepcopy(model)
    for parameter in made.parameters():
        parameter.init = starting_at(parameter.data)
    layers = layers_of(made)
    masks = {layer.name: layer.parameter.data != 0 for layer in layers}
    functions = {
        layer.name: (masked_by(to_matrix(masks[layer.name], layer.transposed)), rounding_to(spec, layer.name))
        for layer, spec in zip(layers, specs, strict=True)
    }

    def change(operator: Operator) -> Operator:
        kind = kind_of(operator)
        if kind is None:
            return operator
        return TransformedWeight(operator, functions[operator.weight.name], kind.transposed)  # type: ignore[attr-defined]

    state = fine_tune(rebuilt(made, change), task, comm, tuning)
    for parameter in made.parameters():
        parameter.data = state[parameter.name] * masks.get(parameter.name, np.float32(1))
    weights = rounded(list(zip(layers, specs)), {}, "rtn", comm)
    return packed(made, {layer.name: weight for layer, weight in zip(layers, weights)})


def masked_by(mask: np.ndarray) -> WeightFunction:
    """Weight function that sets the elements to 0 where the mask is False."""

    def values(matrix: Array, step: int) -> Array:
        return matrix * mask

    return values
