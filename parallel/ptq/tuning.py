"""Training after quantisation: of rounded weights, or of the levels of k-means weights with the codes fixed.

Weights that are rounded to codes in every pass (quantisation-aware fine-tuning) learn with the error of their
rounding. (B. Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only
inference", CVPR 2018. From trained weights: R. Krishnamoorthi, "Quantizing deep convolutional networks for efficient
inference", 2018, section 3.2.) The gradient of a level is the sum of the gradients of the weights that have its code
(S. Han, H. Mao, W. Dally, "Deep compression", ICLR 2016, section 3).
"""

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Sampler
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import DEFAULTS, Settings
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from parallel.nn.transforms.quantizable_layers import from_matrix, kind_of, layers_of, to_matrix
from parallel.nn.transforms.weight_transform import ComputedWeight, TransformedWeight, WeightFunction, rounding_to
from parallel.nn.transforms.wrapper import WrappedOperator, rebuilt
from parallel.optim.lr_schedules import LRSchedule
from parallel.optim.optimizers import Adam
from parallel.ptq.packed_weights import FewBitWeight, PackedWeight, packed, weights_of
from parallel.ptq.quantize_model import rounded
from parallel.trainer.engine_checkpoint import state_dict
from parallel.trainer.task_setup import loss_of
from quant import QuantSpec
from quant.types import Array

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


def tune_weights(
    model: Operator, specs: Sequence[QuantSpec], task: LearningTask, comm: Communicator, tuning: FineTuning
) -> Operator:
    """Quantised copy of a model, after training with the weights of layer i rounded to nearest by ``specs[i]``.

    Layers come from `layers_of`. All parameters are trained. Weights that are 0 at the start (in a pruned model) stay
    0. Collective. Raises StepFailed like training.
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


class CodebookWeight(WrappedOperator):
    """Operator whose weight is looked up: element i is ``levels[index[i]]``. Trains the levels.

    `inner.weight` is a `PackedWeight`. `index` has its shape. Operators with a tied weight share `levels`.
    """

    def __init__(self, inner: Any, levels: Parameter, index: np.ndarray):
        super().__init__(inner)
        self.levels, self._index = levels, index

    def members(self) -> Any:
        yield "levels", self.levels
        yield from super().members()

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return self._decoded().forward(x, run)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        def sink(parameter: Any, compute: Callable[[Array], object]) -> None:
            if not isinstance(parameter, ComputedWeight):
                return grads(parameter, compute)

            def summed(out: Array) -> None:
                gradient = np.empty(parameter.shape, out.dtype)
                compute(gradient)
                out[...] = np.bincount(self._index.reshape(-1), gradient.reshape(-1), out.size)

            grads(self.levels, summed)

        return self._decoded().backward(dy, saved, sink)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of the inner operator. The decoded weight, its gradient and their sums are temporaries."""
        inner = self._with(None).outline(x)
        return inner._replace(work=inner.work + 16 * self._index.size)

    def _decoded(self) -> Operator:
        return self._with(self.levels.data[self._index])

    def _with(self, values: Array) -> Operator:
        operator: Any = copy(self.inner)
        operator.weight = ComputedWeight(operator.weight, values)
        operator.weight.dtype = self.levels.dtype
        return operator  # type: ignore[no-any-return]


def with_levels(model: Operator) -> Operator:
    """Copy of a quantised model that trains the levels of its k-means weights. Its other parameters are frozen.

    Shares nothing with `model`. ValueError if a weight has other codes, or divisors.
    """
    made, levels = deepcopy(model), dict[str, Parameter]()
    for name, weight in weights_of(made).items():
        if weight.quantized.codes.spec.code != "kmeans" or weight.quantized.divisor is not None:
            raise ValueError(f"spec: levels are trained of kmeans; {name} has codes {weight.quantized.codes.spec}")
        table = weight.quantized.codes.levels().reshape(-1)
        levels[name] = Parameter(table.shape, starting_at(table), decay=False)
    for parameter in made.parameters():
        parameter.init, parameter.requires_grad = starting_at(parameter.data), False

    def change(operator: Operator) -> Operator:
        weight = getattr(operator, "weight", None)
        if not isinstance(weight, PackedWeight):
            return operator
        index = from_matrix(weight.quantized.codes.level_index(), weight.shape, weight.transposed)
        return CodebookWeight(operator, levels[weight.name], index)

    return rebuilt(made, change)


def tune_levels(
    model: Operator, quantised: Operator, task: LearningTask, comm: Communicator, tuning: FineTuning
) -> Operator:
    """Copy of `model` with the codes of the `quantised` model and levels trained by `tuning`. Collective.

    ValueError if a weight is not coded by k-means. Raises StepFailed like training.
    """
    trainable, weights = with_levels(quantised), weights_of(quantised)
    state = fine_tune(trainable, task, comm, tuning)
    paths = {operator.inner.weight.name: operator.levels.name for operator in _codebooks(trainable)}
    tuned = {
        name: FewBitWeight(weight.quantized.codes.with_levels(state[paths[name]])) for name, weight in weights.items()
    }
    return packed(model, tuned)


def _codebooks(model: Operator) -> list[Any]:
    return [operator for _, operator in model.walk() if isinstance(operator, CodebookWeight)]
