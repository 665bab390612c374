"""Quantisation of a trained model: calibration, and rounding of layers distributed over ranks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel.data.sampler import Batch
from parallel.nn.operator import Operator
from parallel.nn.transforms.quantizable_layers import QuantizableLayer, layers_of
from parallel.ptq.calibration import InputMoments, calibrate, observed
from parallel.ptq.packed_weights import FewBitWeight, packed, rounding
from quant import PerGroup, PerTensor, QuantizedArray, QuantSpec, quantize
from quant.observers import OBSERVERS
from quant.ptq import awq, gptq, hqq, smoothing


def _floating_zeros(spec: QuantSpec) -> QuantSpec:
    if not spec.linear:
        raise ValueError(f"hqq moves zero points, and codes {spec.code} have none")
    plain = spec.scales.format if spec.scales.format in ("fp32", "fp16", "bf16") else "fp16"
    return spec.replace(symmetric=False, zero=plain, q_range="restricted")


class RoundingMethod(NamedTuple):
    """Rounding method: function (w, inputs, spec) -> quantised weight, for a float32 matrix w, shape (outputs, inputs).

    `divides`: the result has divisors. `blind`: it needs no input statistics, and so suits weights that are only looked
    up. `spec`: spec of the resulting codes, from the requested spec.
    """

    rounded: Callable[[np.ndarray, InputMoments, QuantSpec], FewBitWeight]
    divides: bool = False
    blind: bool = False
    spec: Callable[[QuantSpec], QuantSpec] = lambda spec: spec


def _smoothquant(w: np.ndarray, inputs: InputMoments, spec: QuantSpec) -> FewBitWeight:
    s = smoothing(inputs.largest, w)
    return FewBitWeight(quantize(w * s, spec, seed=0), s)


METHODS = {
    "rtn": RoundingMethod(lambda w, inputs, spec: FewBitWeight(quantize(w, spec, seed=0)), blind=True),
    "gptq": RoundingMethod(
        lambda w, inputs, spec: FewBitWeight(gptq(w, inputs.moments, spec)),
        spec=lambda spec: spec.replace(rounding="nearest_even"),
    ),
    "awq": RoundingMethod(
        lambda w, inputs, spec: FewBitWeight(*awq(w, inputs.moments, inputs.sizes, spec)), divides=True
    ),
    "smoothquant": RoundingMethod(_smoothquant, divides=True),
    "hqq": RoundingMethod(
        lambda w, inputs, spec: FewBitWeight(hqq(w, _floating_zeros(spec))), blind=True, spec=_floating_zeros
    ),
}
"""Rounding methods by name: nearest, and the methods of `quant.ptq`."""


def quantise(
    model: Operator,
    spec: QuantSpec,
    batches: Sequence[Batch],
    comm: Any,
    *,
    method: str = "rtn",
    activations: QuantSpec | None = None,
    observer: str = "minmax",
) -> Operator:
    """Quantised copy of a model. Collective. ValueError on all ranks, if spec, method, model and samples do not match.

    Parameters
    ----------
    model : Operator
        Model with names and values. Not modified.
    spec : QuantSpec
        Spec of the weights of all `layers_of(model)`.
    batches : sequence of Batch
        This rank's samples to calibrate on (may be empty). The samples of all ranks count.
    comm : Communicator
    method : str
        A key of `METHODS`.
    activations : QuantSpec, optional
        Spec of the inputs of all multiplying layers. By default they are not quantised.
    observer : str
        A key of `OBSERVERS`: method that finds the range of inputs.
    """
    layers = layers_of(model)
    check(layers, spec, method, activations, observer)
    moments = {} if METHODS[method].blind else calibrate(model, layers, batches, comm)
    weights = rounded([(layer, spec) for layer in layers], moments, method, comm)
    quantized = packed(model, {layer.name: weight for layer, weight in zip(layers, weights)})
    return quantized if activations is None else with_inputs(quantized, activations, observer, batches, comm)


def with_inputs(model: Operator, spec: QuantSpec, observer: str, batches: Sequence[Batch], comm: Any) -> Operator:
    """Copy of a model with quantised weights that also quantises their inputs, calibrated on `batches`. Collective."""
    return rounding(model, spec, observed(model, spec, observer, batches, comm))


def check(
    layers: Sequence[QuantizableLayer],
    spec: QuantSpec,
    method: str,
    activations: QuantSpec | None = None,
    observer: str = "",
) -> None:
    """Raise ValueError that names the argument if a quantisation is impossible."""
    if not layers:
        raise ValueError("model: it has no weights that could be quantised")
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
    longest = max(layer.shape[1] for layer in layers)
    if isinstance(spec.granularity, PerGroup) and spec.granularity.size > longest:
        size = spec.granularity.size
        raise ValueError(f"spec: groups of {size} fit nowhere: the longest rows of weights have {longest} elements")
    METHODS[method].spec(spec)
    if activations is None:
        return
    if observer not in OBSERVERS:
        raise ValueError(f"observer: expected one of {', '.join(OBSERVERS)}, found {observer!r}")
    # calibration gives one range per input array, and inference must be deterministic
    plain = activations.linear and activations.q_range != "peak" and activations.scales.parent is None
    if not plain or activations.granularity != PerTensor() or activations.rounding == "stochastic":
        raise ValueError(f"activations: expected linear codes with one scale for all, as int8, found {activations}")


def method_for(layer: QuantizableLayer, method: str) -> RoundingMethod:
    """Rounding method for a layer: `method`, or round-to-nearest if it needs inputs and the weight is looked up."""
    return METHODS[method if layer.multiplied or METHODS[method].blind else "rtn"]


def rounded(
    jobs: Iterable[tuple[QuantizableLayer, QuantSpec]], moments: dict[str, InputMoments], method: str, comm: Any
) -> list[FewBitWeight]:
    """Quantise each job's layer by its spec: one rank rounds it and broadcasts. Returns all weights. Collective.

    `moments` is the result of `calibrate`. ValueError on all ranks, if one of them fails. It names the layer.
    """
    weights, problems = attempted(jobs, moments, method, comm)
    if problems:
        raise ValueError(f"a layer cannot be quantised: {problems[min(problems)]}")
    return weights


def attempted(
    jobs: Iterable[tuple[QuantizableLayer, QuantSpec]], moments: dict[str, InputMoments], method: str, comm: Any
) -> tuple[list[FewBitWeight], dict[int, str]]:
    """(weights, error messages by job): `rounded`, but weights that do not fit their spec have undefined values.

    The same on all ranks. Collective. ValueError on all ranks if the memory of one does not suffice.
    """
    weights, own, memory = [], {}, None
    for at, (layer, spec) in enumerate(jobs):
        entry = method_for(layer, method)
        if at % comm.Get_size() == comm.Get_rank() and memory is None:
            try:
                weights.append(entry.rounded(layer.matrix, moments.get(layer.name) or InputMoments(0), spec))
                continue
            except ValueError as error:
                own[at] = f"{layer.name}: {error}"
            except MemoryError as error:
                memory = f"{layer.name}: {error}"
        # ranks that receive the weight need buffers of its size
        divisor = np.empty(layer.shape[1], np.float32) if entry.divides else None
        weights.append(FewBitWeight(QuantizedArray(entry.spec(spec), layer.shape), divisor))
    everyones = comm.allgather((own, memory))
    if lacking := [text for _, text in everyones if text]:
        raise ValueError(f"a layer cannot be quantised: {lacking[0]}")
    problems = {at: text for one, _ in everyones for at, text in one.items()}
    for at, weight in enumerate(weights):
        for buffer in (weight.codes.buffer, weight.divisor) if at not in problems else ():
            if buffer is not None:
                comm.Bcast(buffer, at % comm.Get_size())
    return weights, problems
