"""From a trained model to one in few bits: samples are shown, and ranks round the layers in turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from parallel.data.sampler import Batch
from parallel.nn.operator import Operator
from parallel.ptq.calibration import OBSERVERS, Seen, calibrate, observed
from parallel.ptq.quantizable_layers import Layer, layers_of
from parallel.ptq.methods import METHODS, Method
from parallel.ptq.packed_weights import Few, packed, rounding
from quant import PerGroup, PerTensor, QuantizedArray, QuantSpec, wire_nbytes

Wanted = tuple[Layer, QuantSpec]
"""A layer, and how it is to be written."""


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
    """A model in few bits that goes forward as the old one did. Collective.

    Parameters
    ----------
    model : Operator
        With names and values; it stays as it is.
    spec : QuantSpec
        Of the weights of all `layers_of(model)`.
    batches : sequence of Batch
        Samples of this rank to calibrate on, which may be none; those of all ranks count together.
    comm : Communicator
    method : str
        A key of `METHODS`.
    activations : QuantSpec, optional
        Of the inputs of all layers that multiply; without, they stay as they are.
    observer : str
        A key of `OBSERVERS`: how the range of inputs is found.

    Raises
    ------
    ValueError
        On all ranks: for names that are in no table, a spec that does not suit method or model, samples that do not fit
        the model.
    """
    layers = layers_of(model)
    check(layers, spec, method, activations, observer)
    seen = {} if METHODS[method].blind else calibrate(model, layers, batches, comm)
    few = rounded([(layer, spec) for layer in layers], seen, method, comm)
    made = packed(model, {layer.name: one for layer, one in zip(layers, few)})
    return made if activations is None else with_inputs(made, activations, observer, batches, comm)


def with_inputs(model: Operator, spec: QuantSpec, observer: str, batches: Sequence[Batch], comm: Any) -> Operator:
    """A model with packed weights, whose inputs are rounded, too, as samples say. Collective; as `quantise`."""
    return rounding(model, spec, observed(model, spec, observer, batches, comm))


def check(
    layers: Sequence[Layer], spec: QuantSpec, method: str, activations: QuantSpec | None = None, observer: str = ""
) -> None:
    """Raise ValueError for what cannot be done; it names the argument."""
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
    plain = activations.linear and activations.q_range != "peak" and activations.scales.parent is None
    if not plain or activations.granularity != PerTensor() or activations.rounding == "stochastic":
        raise ValueError(f"activations: expected linear codes with one scale for all, as int8, found {activations}")


def method_for(layer: Layer, method: str) -> Method:
    """The method, or plain rounding for weights that are looked up, where there are no inputs to know of."""
    return METHODS[method if layer.multiplied or METHODS[method].blind else "rtn"]


def nbytes_of(layer: Layer, spec: QuantSpec, method: str) -> int:
    """Bytes of the layer's weights by spec and method, scales and divisors counted."""
    line = method_for(layer, method)
    return wire_nbytes(line.spec(spec), layer.shape) + 4 * layer.shape[1] * line.divides


def rounded(wanted: Iterable[Wanted], seen: dict[str, Seen], method: str, comm: Any) -> list[Few]:
    """Layers in few bits, the same on all ranks: each is rounded by one rank and told to the others. Collective.

    Parameters
    ----------
    wanted : iterable of (Layer, QuantSpec)
    seen : dict
        As `calibrate` gives it.
    method : str
    comm : Communicator

    Raises
    ------
    ValueError
        On all ranks, if one of them cannot; it names the layer.
    """
    wanted, made, problem = list(wanted), [], None
    for at, (layer, spec) in enumerate(wanted):
        line = method_for(layer, method)
        if at % comm.Get_size() == comm.Get_rank() and problem is None:
            try:
                made.append(line.rounded(layer.matrix, seen.get(layer.name) or Seen(0), spec))
                continue
            except (ValueError, np.linalg.LinAlgError, MemoryError) as error:
                problem = ValueError(f"{layer.name}: {error}")
        divisor = np.empty(layer.shape[1], np.float32) if line.divides else None
        made.append(Few(QuantizedArray(line.spec(spec), layer.shape), divisor))
    if told := [text for text in comm.allgather(problem and str(problem)) if text]:
        raise ValueError(f"a layer cannot be quantised: {told[0]}")
    for at, few in enumerate(made):
        for buffer in (few.codes.buffer, few.divisor):
            if buffer is not None:
                comm.Bcast(buffer, at % comm.Get_size())
    return made
