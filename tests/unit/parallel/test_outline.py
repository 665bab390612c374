"""The temporaries that an outline foretells are those of the reference kernels, and enough for the compiled ones.

As the allocator counts them.
"""

import tracemalloc
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from parallel.nn import kernels
from parallel.nn.activation import GELU, ReLU, SiLU
from parallel.nn.attention import CausalAttention
from parallel.nn.batch_norm import BatchNorm
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.compose import Recompute, Residual, Sequential
from parallel.nn.conv import AvgPool2d, Conv2d, MaxPool2d
from parallel.nn.dropout import Dropout
from parallel.nn.flat_params import FlatParams
from parallel.nn.linear import Linear
from parallel.nn.models import convnet, mlp, transformer
from parallel.nn.norm import LayerNorm, RMSNorm
from parallel.nn.operator import ArraySpec, PassMode, nbytes_of
from parallel.nn.rotary import Rotary
from parallel.nn.transforms.fake_quantized_input import FakeQuantizedInput
from parallel.nn.transforms.few_bit_product import PRODUCTS, FewBitProduct
from parallel.nn.transforms.pruning import Pruning
from parallel.nn.transforms.weight_transform import TransformedWeight, rounding_to
from quant import INT8, parse

LARGE = {
    "linear": (partial(Linear, 128, 256), (1000, 128)),
    "gelu": (GELU, (500, 300)),
    "relu": (ReLU, (500, 300)),
    "silu": (SiLU, (500, 300)),
    "layer norm": (partial(LayerNorm, 300), (500, 300)),
    "batch norm": (partial(BatchNorm, 300), (500, 300)),
    "batch norm of images": (partial(BatchNorm, 30), (50, 30, 10, 10)),
    "rms norm": (partial(RMSNorm, 300), (500, 300)),
    "dropout": (partial(Dropout, 0.1), (500, 300)),
    "attention": (partial(CausalAttention, 4), (4, 192, 192)),
    "blockwise attention": (partial(BlockwiseAttention, 4), (4, 320, 192)),
    "blockwise attention, grouped": (partial(BlockwiseAttention, 4, 1), (4, 320, 192)),
    "blockwise attention, rotated": (partial(BlockwiseAttention, 4, 1, rotary=Rotary(320)), (4, 320, 192)),
    "convolution": (partial(Conv2d, 4, 8, 3, padding=1), (16, 4, 24, 24)),
    "max pool": (partial(MaxPool2d, 2), (16, 8, 40, 40)),
    "average pool": (partial(AvgPool2d, 2), (16, 8, 40, 40)),
    "residual": (lambda: Residual(Linear(300, 300)), (500, 300)),
    "few-bit product": (lambda: FewBitProduct(Linear(300, 200), PRODUCTS["fp8"]), (500, 300)),
    "few-bit convolution": (lambda: FewBitProduct(Conv2d(4, 8, 3, padding=1), PRODUCTS["mxfp8"]), (16, 4, 24, 24)),
    "rounded weight": (
        lambda: TransformedWeight(Linear(300, 300), [rounding_to(parse("int4_g32"), "weight")], True),
        (100, 300),
    ),
    "pruned weight": (lambda: TransformedWeight(Linear(300, 300), [Pruning(0.8).values], True), (100, 300)),
    "rounded input": (lambda: FakeQuantizedInput(Linear(300, 300), INT8), (500, 300)),
    "recompute": (lambda: Recompute(Sequential([Linear(300, 300), GELU()])), (500, 300)),
}


COUNTED = {
    "mlp": lambda: (mlp([30, 20, 10, 5]), (8, 6, 5)),
    "mlp, one layer": lambda: (mlp([30, 5]), (8, 30)),
    "mlp, recompute": lambda: (mlp([30, 20, 10, 5], recompute=True), (8, 30)),
    "convnet": lambda: (convnet((1, 8, 8), 5, (3, 4)), (4, 1, 8, 8)),
    "gpt": lambda: (transformer(50, 80, 2, 2, 8), (3, 70)),
    "gpt, recompute": lambda: (transformer(50, 80, 2, 2, 8, recompute=True), (3, 70)),
    "blockwise attention": lambda: (BlockwiseAttention(2), (2, 70, 24)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_those_of_all_products(monkeypatch, name):
    """Of a forward and a backward pass with reference kernels; a first layer has no gradient of its input."""
    model, shape = COUNTED[name]()
    product, counted = kernels.reference_kernels.matmul, []

    def counting(a, b, out=None):
        counted.append(2 * a.size * b.shape[-1])
        return product(a, b, out)

    for module in (kernels, kernels.reference_kernels):
        monkeypatch.setattr(module, "matmul", counting)
    random = np.random.default_rng(0)
    x = random.integers(0, 50, shape) if name.startswith("gpt") else random.standard_normal(shape).astype(np.float32)
    flat = FlatParams(model)
    vector = np.zeros(flat.length, np.float32)
    flat.bind(vector)
    y, saved = model.forward(x, PassMode(samples=np.arange(len(x))))
    forward = sum(counted)
    model.backward(np.ones_like(y), saved, lambda parameter, compute: compute(np.empty(parameter.shape, np.float32)))
    outline = model.outline(ArraySpec(x.shape, x.dtype))
    assert outline.flops == forward
    assert outline.training_flops + outline.recomputed == sum(counted)
    assert (outline.recomputed > 0) == (name.endswith("recompute") or name.startswith("blockwise"))


def peak(motion):
    """Bytes at the worst moment of a motion, beyond those before it."""
    tracemalloc.start()
    try:
        result = motion()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def temporaries(name, dtype):
    """The most that a forward or a backward takes, and what is foretold. Compiling comes first and does not count."""
    make, shape = LARGE[name]
    operator, x = make(), np.random.default_rng(0).standard_normal(shape).astype(dtype)
    flat = FlatParams(operator)
    vector = np.zeros(flat.length, dtype)
    flat.initialise(vector, 0)
    flat.bind(vector)
    run = PassMode(samples=np.arange(len(x)))
    gradients = {parameter: np.empty(parameter.shape, np.float32) for parameter in operator.parameters()}

    def sink(parameter, compute):
        compute(gradients[parameter])

    y, saved = operator.forward(x, run)
    dy = np.ones_like(y)
    operator.backward(dy, saved, sink)
    del y, saved
    forward, (y, saved) = peak(lambda: operator.forward(x, run))
    forward -= nbytes_of((x, y, saved)) - x.nbytes
    backward, _ = peak(lambda: operator.backward(dy, saved, sink))
    return max(forward, backward - x.nbytes), operator.outline(ArraySpec(x.shape, x.dtype)).work


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_work_is_enough(name, dtype):
    found, foretold = temporaries(name, dtype)
    assert found <= foretold + 2**17, f"{found} bytes of temporaries, {foretold} foretold"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_work_is_that_of_the_reference(name, dtype, monkeypatch):
    monkeypatch.setattr(kernels.TABLE, "form", lambda form: {})
    found, foretold = temporaries(name, dtype)
    assert found <= foretold + 2**17, f"{found} bytes of temporaries, {foretold} foretold"
    assert foretold <= 4 * found + 2**18, f"{foretold} bytes foretold, {found} found"
