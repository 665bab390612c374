"""Quantised arrays on a GPU have the bits that they have on the host."""

import numpy as np
import pytest

from quant import PRESETS, PerTensor, QuantSpec, grouped, kernels, quantize

F = np.float32
SPECS = PRESETS | {
    "three bits": grouped(3, 20),
    "zeros": grouped(5, 32, symmetric=False),
    "tensor": QuantSpec(8, granularity=PerTensor()),
    "stochastic": grouped(8, 16, rounding="stochastic"),
}


@pytest.fixture(autouse=True)
def one_rank(world):
    if world.size > 1:
        pytest.skip("the same on one rank")


@pytest.mark.parametrize("shape", [(0, 5), (7, 96), (3, 101), (64, 1024)])
@pytest.mark.parametrize("name", SPECS)
def test_same_bits_as_on_the_host(cupy, name, shape):
    spec, x = SPECS[name], np.random.default_rng(1).standard_normal(shape).astype(F)
    with kernels.forms("reference"):
        here = quantize(x, spec, seed=7)
        back, onto = here.dequantize(), here.add_to(np.full(shape, 0.1, F))
    there = quantize(cupy.asarray(x), spec, seed=7)
    np.testing.assert_array_equal(there.buffer.get(), here.buffer)
    np.testing.assert_array_equal(there.dequantize().get(), back)
    target = cupy.asarray(np.full(shape, 0.1, F))
    there.add_to(target)
    np.testing.assert_array_equal(target.get(), onto)
