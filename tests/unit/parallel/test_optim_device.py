"""Optimizers on a GPU: kernels of CuPy, run by the stand-in, give the bits of the host."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from support.fakes import cupy

from parallel.nn.flat_params import BLOCK, ParamSpan, Span
from parallel.nn.operator import Parameter, constant
from parallel.optim import optimizer as optimizers
from parallel.optim.grad_norm import block_squares, reference_squares
from parallel.optim.kernels import device_updates, formulas
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.optimizers import LAMB, OPTIMIZERS, SGD, Adam, AdamW

pytestmark = pytest.mark.usefixtures("gpu")

SPAN = Span(0, 8 * BLOCK)
PLACES = [
    ParamSpan(Parameter((3 * BLOCK,), constant(0.0)), Span(0, 3 * BLOCK)),
    ParamSpan(Parameter((2 * BLOCK,), constant(0.0)), Span(3 * BLOCK, 5 * BLOCK)),
    ParamSpan(Parameter((3 * BLOCK,), constant(0.0), decay=False), Span(5 * BLOCK, 8 * BLOCK)),
]
CASES = [
    SGD(rate=0.1),
    SGD(rate=0.1, decay=0.1, ema=0.9),
    SGD(rate=0.1, momentum=0.5),
    SGD(rate=0.1, momentum=0.5, nesterov=True, decay=0.1),
    Adam(rate=0.1, decay=0.1),
    AdamW(rate=0.1),
    AdamW(rate=0.1, ema=0.99),
    LAMB(rate=0.1),
    *(kind(rate=0.1, decay=0.1, ema=0.9) for kind in OPTIMIZERS.values()),
]


def trained(optimizer, dtype, half, wrap, places=PLACES):
    """Bits of weights, half-precision copies and state after three steps, and sums of squares."""
    optimizer = replace(optimizer)  # without the scratch memory of another test's GPU
    random = np.random.default_rng(0)
    first = random.normal(size=SPAN.size) * 10.0 ** random.integers(-30, 3, SPAN.size)
    weights, gradient = wrap(first.astype(dtype)), wrap(first[::-1].astype(dtype))
    stored = None if half is None else wrap(np.zeros(SPAN.size, half))
    piece = OptimizerSpan(SPAN, weights, gradient, optimizer.fresh(weights), places, stored)
    none = OptimizerSpan(Span(0, 0), weights[:0], gradient[:0], optimizer.fresh(weights[:0]), places)
    for step in range(3):
        optimizer.update([piece, none], step, 0.3, lambda sums: sums)
    vectors = [piece.weights, *piece.state.values(), *([] if half is None else [stored])]
    return [cupy.asnumpy(vector).tobytes() for vector in vectors] + [block_squares(weights).tobytes()]


@pytest.mark.parametrize("dtype, half", [("f4", None), ("f4", "f2"), ("f4", ml_dtypes.bfloat16), ("f8", None)])
@pytest.mark.parametrize("optimizer", CASES, ids=lambda one: f"{type(one).__name__}-{one.decay}-{one.ema}")
def test_the_same_bits_as_on_the_host(optimizer, dtype, half):
    expected = trained(optimizer, dtype, half, np.asarray)
    assert trained(optimizer, dtype, half, cupy.asarray) == expected


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("optimizer", CASES[1:8:2], ids=lambda one: f"{type(one).__name__}-{one.ema}")
def test_formulas_that_are_not_compiled(monkeypatch, optimizer, dtype):
    """They run in CuPy, one run of elements after the other."""
    monkeypatch.setattr(PLACES[0].parameter, "requires_grad", False)
    expected = trained(optimizer, dtype, None, np.asarray)
    monkeypatch.setattr(formulas, "COMPILED", set())
    assert trained(optimizer, dtype, None, cupy.asarray) == expected


@pytest.mark.parametrize("optimizer", CASES[3:8:4], ids=lambda one: type(one).__name__)
def test_frozen_parameters_and_tensors_in_any_order(monkeypatch, optimizer):
    monkeypatch.setattr(PLACES[1].parameter, "requires_grad", False)
    expected = trained(optimizer, "f4", None, np.asarray)
    assert trained(optimizer, "f4", None, cupy.asarray) == expected
    for wrap in (np.asarray, cupy.asarray):
        assert trained(optimizer, "f4", None, wrap, PLACES[::-1]) == expected


def test_one_kernel_and_one_copy_for_all_tensors(gpu):
    """The half-precision copy is the other one."""
    optimizer = AdamW(rate=0.1)
    weights, gradient = cupy.zeros(SPAN.size, "f4"), cupy.zeros(SPAN.size, "f4")
    stored = cupy.zeros(SPAN.size, "f2")
    piece = OptimizerSpan(SPAN, weights, gradient, optimizer.fresh(weights), PLACES, stored)
    optimizer.reserve([piece])
    del gpu.log[:]
    optimizer.update([piece], 0, 1.0)
    assert [kind for kind, *_ in gpu.log] == ["kernel"] * 2
    assert not any(spare.nbytes for spare in optimizer._spare.values())


def test_the_same_bits_in_portions(monkeypatch):
    whole = trained(LAMB(rate=0.1), "f4", None, cupy.asarray)
    monkeypatch.setitem(optimizers.PORTION, "device", BLOCK)
    assert trained(LAMB(rate=0.1), "f4", None, cupy.asarray) == whole


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("block", [1 << power for power in range(1, 12)])
def test_squares_as_the_reference(block, dtype):
    x = np.random.default_rng(3).normal(size=5 * block).astype(dtype)
    x[block // 2] = np.inf
    expected, found = np.empty(5), cupy.empty(5, "f8")
    with np.errstate(over="ignore"):
        reference_squares(x, block, np.empty(len(x)), expected)
    spare = cupy.empty(-(-len(x) // device_updates.SPARE_TERMS), "f8")
    device_updates.squares(cupy.asarray(x), block, spare, found)
    assert found.get().tobytes() == expected.tobytes()
