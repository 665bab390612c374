"""Training of the levels of k-means weights after quantisation, with the codes fixed.

The gradient of a level is the sum of the gradients of the weights that have its code (S. Han, H. Mao, W. Dally, "Deep
compression", ICLR 2016, section 3).
"""

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.data.datasets import LearningTask
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from parallel.nn.transforms.quantizable_layers import from_matrix
from parallel.nn.transforms.weight_transform import ComputedWeight
from parallel.nn.transforms.wrapper import WrappedOperator, rebuilt
from parallel.ptq.fine_tune import FineTuning, fine_tune, starting_at
from parallel.ptq.packed_weights import FewBitWeight, PackedWeight, packed, weights_of
from quant.types import Array


class CodebookWeight(WrappedOperator):
    """Operator whose weight is looked up: element i is ``levels[index[i]]``; trains the levels.

    `inner.weight` is a `PackedWeight`; `index` has its shape. Operators with a tied weight share `levels`.
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
        """Outline of the inner operator; the decoded weight, its gradient and their sums are temporaries."""
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
    """Copy of a quantised model that trains the levels of its k-means weights; its other parameters are frozen.

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

    ValueError if a weight is not coded by k-means; StepFailed as in training.
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
