"""Call every compiled kernel of the project once; print what numba compiled, as JSON. Run as a program."""

import gc
import json
import sys

import numpy as np
from numba.core import event
from numba.core.dispatcher import Dispatcher

from parallel.nn import kernels as nn
from parallel.optim.kernels import compiled_updates as updates
from quant import NF4, PRESETS, PerGroup, QuantSpec, RowFormat, quantize

F = np.float32
RNG = np.random.default_rng(0)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(F)


def call_quant():
    x = numbers(2, 64)
    specs = [
        *PRESETS.values(),
        *(QuantSpec(8, symmetric=False, granularity=PerGroup(16), rounding=way) for way in ("stochastic", "half_up")),
        QuantSpec(4, symmetric=False, granularity=PerGroup(32)),
        QuantSpec(3, granularity=PerGroup(32), q_range="peak", divisor="inverse", scale="bf16"),
        QuantSpec(8, signed=False, granularity=PerGroup(5)),
        QuantSpec(8, granularity=PerGroup(32), q_range="peak", rounding="stochastic"),
        QuantSpec(8, code="e4m3", granularity=PerGroup(16), rounding="stochastic"),
        QuantSpec(2, code="kmeans", granularity=PerGroup(32)),
        NF4.replace(granularity=PerGroup(5), divisor="inverse"),
    ]
    for spec in specs:
        q = quantize(abs(x) if not spec.signed else x, spec, seed=1)
        q.dequantize()
        q.add_to(x.copy())
    for code in ("linear", "e4m3"):
        rows = RowFormat(QuantSpec(8, code=code, granularity=PerGroup(32)), 64)
        rows.encode(x, wire := np.empty((2, rows.nbytes), np.uint8))
        for weights in (None, numbers(2, 1)):
            rows.add(wire, x.copy(), np.arange(2), weights)
        rows.products(wire, x, np.arange(2))


def call_operators():
    x, row = numbers(4, 16), numbers(16)
    for name in ("gelu", "gelu_tanh", "silu"):
        getattr(nn, name)(x)
        getattr(nn, f"{name}_backward")(x, x)
        getattr(nn, f"biased_{name}")(x.copy(), row)
    nn.relu_backward(x, x)
    nn.biased_relu(x.copy(), row)
    nn.masked(x, x > 0, 2.0)
    nn.keep(np.arange(4), 16, 0.5, (1, 2))
    nn.sum_rows(x)
    _, mean, rstd = nn.layer_norm(x, row, row, 1e-5)
    nn.layer_norm_backward(x, x, row, mean, rstd)
    _, _, rstd = nn.layer_norm(x, row, None, 1e-5)
    nn.layer_norm_backward(x, x, row, None, rstd)
    p = nn.causal_softmax(numbers(2, 4, 4), 0.5, 0)
    nn.softmax_backward(numbers(2, 4, 4), p, 0.5)
    ends = np.zeros(4, np.int64), np.arange(1, 5)
    log_sum = nn.visible_softmax(numbers(2, 4, 4), 0.5, *ends)
    nn.visible_probabilities(numbers(2, 4, 4), 0.5, *ends, log_sum)
    nn.attention_gradient(numbers(2, 4, 4), p, 0.5, log_sum)
    nn.merge_attention(numbers(2, 4, 4), log_sum, p, log_sum.copy())
    targets = np.arange(4)
    _, log_sum = nn.softmax_cross_entropy(x, targets)
    nn.softmax_cross_entropy_backward(0.5, x, targets, log_sum)
    nn.embedding_gradient(x, targets, numbers(8, 16))
    nn.add_rows(numbers(8, 16), targets, x)
    nn.add_rows(numbers(8, 16), targets, x, numbers(4, 1))
    nn.weighted_rows(numbers(8, 16), targets, numbers(4, 1), x, numbers(4, 16))
    nn.row_products(numbers(8, 16), targets, x)
    nn.softmax(x)
    nn.top_k(x, 2)


def call_updates():
    for dtype in (np.float32, np.float64):
        w, g, m, v = (abs(RNG.standard_normal(64)).astype(dtype) for _ in range(4))
        spare = np.zeros((2, 64), dtype)
        scalars = (1.0, 0.1, 0.0, 0.9, 0.99, 1e-8, 0.1, 0.1)
        updates.sgd(w, g, spare, scalars[:3])
        updates.momentum(w, g, m, spare, scalars[:4], False)
        for step in (updates.adam, updates.adamw):
            step(w, g, m, v, spare, scalars)
        updates.lamb_moments(g, m, v, spare, scalars)
        updates.lamb(w, m, v, spare, scalars)
        updates.average(w, g, spare, 0.9, 0.1)
        updates.squares(w, 16, np.zeros(8), np.zeros(4))


def kept():
    """Every function of the project that numba compiles and that is kept on disk."""
    return [
        made for made in gc.get_objects() if isinstance(made, Dispatcher) and type(made._cache).__name__ != "NullCache"
    ]


def named(function):
    return f"{function.py_func.__module__}.{function.py_func.__qualname__}"


def private_kilobytes():
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    recorded = event.RecordingListener()
    with event.install_listener("numba:compile", recorded):
        for call in (call_quant, call_operators, call_updates):
            call()
    ours = [function for function in kept() if function.py_func.__module__.split(".")[0] != "numba"]
    report = {
        "compiled": [str(each.data["dispatcher"]) for _, each in recorded.buffer if each.is_start],
        "caches": sorted({type(function._cache).__name__ for function in ours}),
        "called": sorted(named(function) for function in ours if function.signatures),
        "never": sorted(named(function) for function in ours if not function.signatures),
        "kilobytes": private_kilobytes(),
    }
    json.dump(report, sys.stdout)
