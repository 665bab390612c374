"""Every operator and model once, with inputs that suit it, inputs that do not, and what PyTorch has in its place.

A line here joins an operator to all tests: gradients by differences, PyTorch, odd and wrong shapes, half types,
recomputation, devices.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from parallel.nn import models
from parallel.nn.activation import GELU, ReLU, SiLU
from parallel.nn.attention import CausalAttention, self_attention
from parallel.nn.attention_mask import CAUSAL, FULL, AttentionMask
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.compose import Recompute, Residual, Sequential
from parallel.nn.conv import AvgPool2d, Conv2d, MaxPool2d
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.flat_params import FlatParams
from parallel.nn.gated import LlamaOptions, SwiGLU, gated_transformer
from parallel.nn.kernels import device_products
from parallel.nn.linear import Flatten, Linear
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.norm import LayerNorm, RMSNorm
from parallel.nn.operator import Operator, PassMode
from parallel.nn.rotary import Rotary
from parallel.nn.router import RouterSettings
from support.mixture_cases import mixture


class Case(NamedTuple):
    """An operator to try.

    Attributes
    ----------
    make : callable
        A new operator.
    shapes : tuple of shapes
        Of inputs; the first is the ordinary one.
    wrong : tuple of shapes
        Of inputs that are refused.
    peer : callable (torch, x, parameters by name) -> y, optional
        The same in PyTorch.
    tokens : int
        If above 0, inputs are integers below it.
    """

    make: Callable[[], Operator]
    shapes: tuple
    wrong: tuple = ()
    peer: Callable | None = None
    tokens: int = 0


def tied():
    """An embedding and its own table as the output."""
    embedding = Embedding(7, 4)
    return Sequential([embedding, Unembedding(embedding)])


def attend(torch, x, heads):
    """Causal attention of PyTorch on queries, keys and values side by side."""
    batch, length, width = x.shape[0], x.shape[1], x.shape[2] // 3
    q, k, v = (part.reshape(batch, length, heads, width // heads).transpose(1, 2) for part in x.split(width, dim=2))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, length, width)


def attend_grouped(torch, x, p, heads, kv_heads, mask):
    """Attention of PyTorch with fewer key and value heads, and the mask as an array."""
    batch, length, width = x.shape[0], x.shape[1], x.shape[2] // (heads + 2 * kv_heads)
    parts = x.split([heads * width, kv_heads * width, kv_heads * width], dim=2)
    q, k, v = (part.reshape(batch, length, -1, width).transpose(1, 2) for part in parts)
    k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
    seen = torch.from_numpy(seen_keys(mask, length))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return y.transpose(1, 2).reshape(batch, length, heads * width)


def attend_rotated(torch, x, p, heads, kv_heads):
    """Causal attention as `attend_grouped`, of queries and keys that are rotated as complex numbers."""
    batch, length, width = x.shape[0], x.shape[1], x.shape[2] // (heads + 2 * kv_heads)
    turned, values = x.split([(heads + kv_heads) * width, kv_heads * width], dim=2)
    turned = turned.reshape(batch, length, -1, 2, width // 2)
    places, pairs = (torch.arange(count, dtype=torch.float64) for count in (length, width // 2))
    angles = torch.outer(places, 100.0 ** (-pairs * 2 / width)).to(x.dtype)
    turned = torch.complex(turned[..., 0, :], turned[..., 1, :]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.cat([turned.real, turned.imag], -1).reshape(batch, length, -1)
    return attend_grouped(torch, torch.cat([turned, values], -1), p, heads, kv_heads, CAUSAL)


def seen_keys(mask, length):
    """The mask as a bool array (queries, keys), from its definition by pairs of positions."""
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    document = np.searchsorted(mask.documents, np.arange(length), side="right")
    seen = document[:, None] == document[None]
    if mask.causal:
        seen &= key <= query
    return seen & (abs(query - key) < mask.window) if mask.window else seen


def linear(torch, x, p, name=""):
    return torch.nn.functional.linear(x, p[f"{name}weight"].T, p.get(f"{name}bias"))


def norm(torch, x, p, name=""):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], p[f"{name}gain"], p[f"{name}bias"])


def torch_self_attention(torch, x, p, heads, names=("0.", "2.")):
    return linear(torch, attend(torch, linear(torch, x, p, names[0]), heads), p, names[1])


def torch_mlp(torch, x, p):
    return linear(torch, linear(torch, x.flatten(1), p, "0.1.").relu(), p, "1.0.")


def torch_convnet(torch, x, p):
    for unit in "01":
        x = torch.nn.functional.conv2d(x, p[f"{unit}.0.weight"], p[f"{unit}.0.bias"], padding=1)
        x = torch.nn.functional.max_pool2d(x.relu(), 2)
    return linear(torch, x.flatten(1), p, "2.1.")


def torch_transformer(torch, x, p, layers=2, heads=2):
    y = p["0.0.weight"][x] + p["0.1.weight"][: x.shape[1]]
    for layer in range(1, layers + 1):
        name = f"{layer}.0.inner."
        y = y + torch_self_attention(torch, norm(torch, y, p, name + "0."), p, heads, (name + "1.", name + "3."))
        name = f"{layer}.1.inner."
        hidden = torch.nn.functional.gelu(linear(torch, norm(torch, y, p, name + "0."), p, name + "1."))
        y = y + linear(torch, hidden, p, name + "3.")
    return norm(torch, y, p, f"{layers + 1}.0.") @ p["0.0.weight"].T


ANY = ((3, 4), (1, 1), (0, 4), (2, 3, 5))
IMAGES = ((2, 2, 7, 6), (1, 2, 3, 3), (0, 2, 5, 5))

CASES = {
    "linear": Case(partial(Linear, 5, 3), ((4, 5), (1, 5), (0, 5), (2, 3, 5)), ((4, 6), (5,)), linear),
    "linear without bias": Case(partial(Linear, 5, 3, bias=False), ((4, 5),), ((4, 6),), linear),
    "linear, first": Case(partial(Linear, 5, 3, first=True), ((4, 5),), ((4, 6),), linear),
    "linear and gelu, tanh": Case(
        lambda: Sequential([Linear(5, 3), GELU(tanh=True)]),
        ((4, 5), (0, 5), (2, 3, 5)),
        ((4, 6),),
        lambda torch, x, p: torch.nn.functional.gelu(linear(torch, x, p, "0."), approximate="tanh"),
    ),
    "linear and silu": Case(
        lambda: Sequential([Linear(5, 3), SiLU()]),
        ((4, 5), (0, 5), (2, 3, 5)),
        ((4, 6),),
        lambda torch, x, p: torch.nn.functional.silu(linear(torch, x, p, "0.")),
    ),
    "flatten": Case(Flatten, ((2, 3, 4), (0, 3, 4), (2,)), ((),), lambda torch, x, p: x.flatten(1)),
    "relu": Case(ReLU, ANY, (), lambda torch, x, p: x.relu()),
    "gelu": Case(GELU, ANY, (), lambda torch, x, p: torch.nn.functional.gelu(x)),
    "gelu, tanh": Case(
        partial(GELU, tanh=True), ANY, (), lambda torch, x, p: torch.nn.functional.gelu(x, approximate="tanh")
    ),
    "swiglu": Case(
        partial(SwiGLU, 3),
        ((2, 6), (3, 4, 6)),
        ((2, 5), (6,)),
        lambda torch, x, p: torch.nn.functional.silu(x[..., :3]) * x[..., 3:],
    ),
    "gated transformer": Case(
        partial(gated_transformer, 11, 8, 1, 4, 8, kv_heads=2, recompute=True), ((2, 7),), ((2, 9),), tokens=11
    ),
    "llama": Case(
        partial(gated_transformer, 11, 8, 1, 2, 8, kv_heads=1, llama=LlamaOptions(hidden=6)),
        ((2, 7),),
        ((2, 9),),
        tokens=11,
    ),
    "silu": Case(SiLU, ANY, (), lambda torch, x, p: torch.nn.functional.silu(x)),
    "layer norm": Case(partial(LayerNorm, 6), ((2, 3, 6), (1, 6), (0, 6)), ((2, 5), (6,)), norm),
    "rms norm": Case(
        partial(RMSNorm, 6),
        ((2, 3, 6), (1, 6), (0, 6)),
        ((2, 5), (6,)),
        lambda torch, x, p: torch.nn.functional.rms_norm(x, x.shape[-1:], p["gain"], 1e-5),
    ),
    "dropout": Case(partial(Dropout, 0.3), ((3, 7), (1, 1), (0, 3), (2, 3, 5)), ()),
    "no dropout": Case(partial(Dropout, 0.0), ((3, 7),), (), lambda torch, x, p: x),
    "embedding": Case(
        partial(Embedding, 7, 4), ((3, 5), (1, 1), (0, 5), (4,)), (), lambda torch, x, p: p["weight"][x], tokens=7
    ),
    "tied embedding": Case(
        tied, ((3, 5), (1, 1), (0, 5)), (), lambda torch, x, p: p["0.weight"][x] @ p["0.weight"].T, tokens=7
    ),
    "positions": Case(
        partial(PositionEmbedding, 6, 4),
        ((2, 5, 4), (1, 6, 4), (2, 1, 4), (0, 5, 4)),
        ((2, 7, 4), (2, 5, 3), (5, 4)),
        lambda torch, x, p: x + p["weight"][: x.shape[1]],
    ),
    "attention": Case(
        partial(CausalAttention, 2),
        ((2, 5, 12), (1, 1, 6), (1, 130, 12), (1, 64, 6), (0, 5, 12)),
        ((2, 5, 8), (5, 12)),
        lambda torch, x, p: attend(torch, x, 2),
    ),
    "blockwise attention": Case(
        partial(BlockwiseAttention, 2),
        ((2, 5, 12), (1, 1, 6), (1, 300, 12), (1, 64, 6), (0, 5, 12)),
        ((2, 5, 8), (5, 12)),
        lambda torch, x, p: attend(torch, x, 2),
    ),
    "blockwise attention, grouped": Case(
        partial(BlockwiseAttention, 4, 2, FULL),
        ((2, 5, 24), (1, 70, 16)),
        ((2, 5, 12),),
        partial(attend_grouped, heads=4, kv_heads=2, mask=FULL),
    ),
    "blockwise attention, window and documents": Case(
        partial(BlockwiseAttention, 4, 1, AttentionMask(window=9, documents=(3, 40))),
        ((2, 70, 12),),
        (),
        partial(attend_grouped, heads=4, kv_heads=1, mask=AttentionMask(window=9, documents=(3, 40))),
    ),
    "blockwise attention, rotated": Case(
        partial(BlockwiseAttention, 4, 2, rotary=Rotary(300, 100.0)),
        ((2, 5, 48), (1, 300, 16), (1, 1, 16), (2, 0, 16), (0, 5, 16)),
        ((2, 5, 24), (1, 301, 16)),
        partial(attend_rotated, heads=4, kv_heads=2),
    ),
    "self-attention": Case(
        partial(self_attention, 8, 2),
        ((2, 5, 8), (1, 70, 8)),
        ((2, 5, 6),),
        lambda torch, x, p: torch_self_attention(torch, x, p, 2),
    ),
    "convolution": Case(
        partial(Conv2d, 2, 3, 3, stride=2, padding=1),
        IMAGES,
        ((2, 3, 7, 6), (2, 7, 6)),
        lambda torch, x, p: torch.nn.functional.conv2d(x, p["weight"], p["bias"], 2, 1),
    ),
    "convolution, oblong": Case(
        partial(Conv2d, 2, 3, (1, 3), bias=False),
        IMAGES,
        ((2, 2, 4, 2),),
        lambda torch, x, p: torch.nn.functional.conv2d(x, p["weight"]),
    ),
    "max pool": Case(
        partial(MaxPool2d, 2),
        IMAGES,
        ((2, 2, 1, 5), (2, 7, 6)),
        lambda torch, x, p: torch.nn.functional.max_pool2d(x, 2),
    ),
    "max pool, overlapping": Case(
        partial(MaxPool2d, 3, 2), IMAGES, (), lambda torch, x, p: torch.nn.functional.max_pool2d(x, 3, 2)
    ),
    "max pool, large": Case(
        partial(MaxPool2d, 17, 1), ((1, 1, 18, 19),), (), lambda torch, x, p: torch.nn.functional.max_pool2d(x, 17, 1)
    ),
    "average pool": Case(
        partial(AvgPool2d, (2, 3), 2),
        IMAGES,
        ((2, 2, 5, 2),),
        lambda torch, x, p: torch.nn.functional.avg_pool2d(x, (2, 3), 2),
    ),
    "residual": Case(
        lambda: Residual(Linear(4, 4)), ((3, 4),), ((3, 5),), lambda torch, x, p: x + linear(torch, x, p, "inner.")
    ),
    "recomputed": Case(
        lambda: Recompute(Sequential([Linear(4, 3), GELU(), Dropout(0.5)])), ((3, 4), (0, 4)), ((3, 5),)
    ),
    "mixture of experts": Case(
        partial(mixture, RouterSettings(balance_loss=0.1), shared=True),
        ((3, 5, 6), (4, 6), (1, 6), (0, 5, 6), (2, 0, 6)),
        ((3, 5), (6,)),
    ),
    "mlp": Case(partial(models.mlp, [6, 8, 4]), ((3, 2, 3), (1, 6), (0, 6)), ((3, 5),), torch_mlp),
    "convnet": Case(
        partial(models.convnet, (1, 8, 8), 4, (3, 5)),
        ((3, 1, 8, 8), (1, 1, 8, 8)),
        ((3, 2, 8, 8), (3, 1, 12, 8)),
        torch_convnet,
    ),
    "transformer": Case(
        partial(models.transformer, 11, 8, 2, 2, 8),
        ((2, 7), (1, 1), (2, 8), (0, 3)),
        ((2, 9), (3,)),
        torch_transformer,
        tokens=11,
    ),
    "transformer with all": Case(
        partial(models.transformer, 11, 8, 2, 2, 8, dropout=0.1, recompute=True), ((2, 7),), ((2, 9),), tokens=11
    ),
}


def inputs(case, shape=None, seed=1):
    """Closed forms would meet kinks: normal numbers from a seed, or tokens."""
    random, shape = np.random.default_rng(seed), case.shapes[0] if shape is None else shape
    return random.integers(0, case.tokens, shape) if case.tokens else random.standard_normal(shape)


class Played(NamedTuple):
    """What came of both motions."""

    y: object
    dx: object
    gradients: dict
    saved: object


def play(operator, x, dtype=np.float64, xp=np, run=None, seed=2, through=None):
    """Both motions in arrays of `xp`; parameters and dy are random numbers, rounded to `through` and to `dtype`."""
    through = dtype if through is None else through
    random, flat = np.random.default_rng(seed), FlatParams(operator)
    vector = np.zeros(flat.length)
    flat.initialise(vector, seed)
    vector += 0.1 * random.standard_normal(flat.length)
    flat.bind(xp.asarray(vector.astype(through).astype(dtype)))
    run = run or PassMode(samples=np.arange(len(x), dtype=np.int64))
    x = np.asarray(x)
    y, saved = operator.forward(xp.asarray(x if x.dtype.kind == "i" else x.astype(dtype)), run)
    dy = xp.asarray(random.standard_normal(y.shape).astype(through).astype(dtype))
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    gradients = {}

    def sink(parameter, compute):
        part = xp.full(parameter.shape, np.nan, wide)
        compute(part)
        gradients[parameter.name] = gradients[parameter.name] + part if parameter.name in gradients else part

    dx = operator.backward(dy, saved, sink)
    return Played(y, dx, gradients, saved)


def on_device_as_on_host(xp, name, dtype):
    """Both motions on the device give what they give on the host, in arrays of the device; losses likewise."""
    case = CASES[name]
    x, tolerance = inputs(case), 64 * np.finfo(dtype).eps
    host, device = play(case.make(), x, dtype), play(case.make(), x, dtype, xp)
    pairs = [(host.y, device.y), *((host.gradients[key], device.gradients[key]) for key in host.gradients)]
    pairs += [(host.dx, device.dx)] if host.dx is not None else []
    if host.y.ndim > 1:
        targets = np.arange(host.y[..., 0].size).reshape(host.y.shape[:-1]) % host.y.shape[-1] - 1
        for loss, wanted in ((SoftmaxCrossEntropy(), targets), (MSE(), np.ones_like(host.y))):
            ours, theirs = loss.forward(host.y, wanted), loss.forward(device.y, xp.asarray(wanted))
            assert abs(ours[0] - theirs[0]) <= tolerance * max(1, abs(ours[0]))
            assert loss.count(wanted) == loss.count(xp.asarray(wanted))
            pairs.append((loss.backward(0.5, ours[1]), loss.backward(0.5, theirs[1])))
    for ours, theirs in pairs:
        assert isinstance(theirs, xp.ndarray) and theirs.dtype == ours.dtype
        scale = max(1, np.abs(ours).max(initial=0))
        np.testing.assert_allclose(theirs.get(), ours, rtol=0, atol=tolerance * scale)


PRODUCTS = {
    "matrices": lambda x: (x((5, 7)), x((7, 3))),
    "transposed": lambda x: (x((7, 5)).T, x((3, 7)).T),
    "rows of wider matrices": lambda x: (x((5, 9))[:, 1:8], x((7, 6))[:, 2:5]),
    "every other element": lambda x: (x((5, 14))[:, ::2], x((7, 3))),
    "one row": lambda x: (x((1, 7)), x((7, 1))),
    "heads": lambda x: (x((2, 5, 3, 4)).transpose(0, 2, 1, 3), x((2, 6, 3, 4)).transpose(0, 2, 3, 1)),
    "stacks": lambda x: (x((4, 5, 7)), x((4, 7, 3))),
    "nothing to add": lambda x: (x((5, 0)), x((0, 3))),
    "no rows": lambda x: (x((0, 7)), x((7, 3))),
}
"""Operands of products, from a function that makes arrays."""


COPIED = ("every other element", "heads")
"""Those of which the product makes a copy."""


def products_are_right(cupy, name, dtype, copies=True):
    """Compare products of half types on a device, rounded once, with those in float64; `copies`: of results too."""

    def made(shape):
        return np.random.default_rng(shape).integers(-8, 9, shape).astype(dtype)

    host_a, host_b = PRODUCTS[name](made)
    a, b = PRODUCTS[name](lambda shape: cupy.asarray(made(shape)))
    expected = host_a.astype(float) @ host_b.astype(float)
    wide = cupy.zeros(expected.shape, np.float32)
    gaps = cupy.zeros((*expected.shape[:-1], 2 * expected.shape[-1]), dtype)[..., ::2]
    columns = cupy.zeros((*expected.shape[:-1], 2 * expected.shape[-1]), np.float32)[..., : expected.shape[-1]]
    for out in (None, wide, columns, gaps) if copies else (None, wide):
        found = device_products.multiply(a, b, out)
        assert out is None or found is out
        np.testing.assert_array_equal(found.get(), expected.astype(found.dtype))
        assert found.dtype == (dtype if out is None or out is gaps else np.float32)
