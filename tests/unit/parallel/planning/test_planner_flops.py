"""FLOPs by operator and convention, against published figures; slips of lecture notes are named."""

from fractions import Fraction

import pytest

from parallel.nn.models import transformer
from parallel.nn.operator import ArraySpec
from parallel.planning.analytic.flops import (
    CONVENTIONS,
    forward_flops,
    operators,
    recomputed_flops,
    training_cost,
)
from parallel.planning.analytic.presets import load
from parallel.planning.analytic.transformer import Transformer

PRESETS = load()
MODELS = PRESETS.models
A100 = PRESETS.devices["a100"].peak_of("bf16")


@pytest.mark.parametrize("name", ["megatron-22b", "megatron-175b", "megatron-530b", "megatron-1t"])
def test_formula_of_megatron(name):
    """Per token: 72 L h^2 (1 + s/6h + V/12hL), recomputation 24 L h^2 (1 + s/6h) (Korthikanti et al. 2022)."""
    model, s = MODELS[name], 2048
    h, L, V = model.width, model.layers, model.vocabulary
    exact = CONVENTIONS["exact"](model, s)
    assert exact == 72 * L * h**2 * (1 + Fraction(s, 6 * h) + Fraction(V, 12 * h * L))
    whole = exact + recomputed_flops(model, "full")
    assert whole == 96 * L * h**2 * (1 + Fraction(s, 6 * h) + Fraction(V, 16 * L * h))
    assert recomputed_flops(model, "selective") == 72 * L * h**2 * Fraction(s, 18 * h)
    assert recomputed_flops(model, "none") == 0


PUBLISHED = {  # devices, sequences of a step, seconds of a step with sequence parallelism + selective, MFU in percent
    "megatron-22b": (8, 4, 1.10, 41.5),
    "megatron-175b": (64, 64, 13.75, 51.4),
    "megatron-530b": (280, 280, 37.83, 56.0),
    "megatron-1t": (512, 512, 71.49, 56.3),
}
"""Korthikanti et al. 2022, table 5, on A100."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_utilisation(name):
    devices, sequences, seconds, percent = PUBLISHED[name]
    flops = CONVENTIONS["exact"](MODELS[name], 2048) * sequences * 2048
    assert 100 * flops / (seconds * devices * A100) == pytest.approx(percent, abs=0.2)


def test_conventions():
    model = MODELS["palm-540b"]
    exact, causal, plain, palm = (CONVENTIONS[name](model, 2048) for name in ("exact", "causal", "6n", "palm"))
    assert plain == 6 * 540_356_474_880 and palm - plain == 12 * 118 * 48 * 256 * 2048
    assert exact - causal == (palm - plain) // 2
    # PaLM's table is used twice, as embedding and head, and counts once: the two conventions differ by the norms only.
    assert 0 <= palm - exact == 6 * model.norm_parameters * (118 + 1)
    # 238.3e3 tokens per second on 6144 TPU v4 are 46.2 % (Chowdhery et al. 2022, table 3).
    peak = 6144 * PRESETS.devices["tpu-v4"].peak_of("bf16")
    assert 238.3e3 * palm / peak == pytest.approx(0.462, abs=5e-4)


def test_full_recomputation_is_a_third_more():
    """FLOPs with full recomputation are 8/6 of those without, for layers alone."""
    model = Transformer(4, 256, 4, 0, 64, norms=0)
    assert 6 * recomputed_flops(model, "full") == 2 * CONVENTIONS["exact"](model, 64)


@pytest.mark.parametrize("name", ["opt-760m", "opt-13b", "opt-175b"])
def test_shares_of_opt(name):
    """Per token and layer 8 h^2 for projections, 4 s h for scores, 16 h^2 for the FFN (slip of the notes: 2 h^2)."""
    model = MODELS[name]
    h, s, L = model.width, model.context, model.layers
    assert forward_flops(model) == {
        "projections": 8 * h**2 * L,
        "scores": 4 * s * h * L,
        "ffn": 16 * h**2 * L,
        "vocabulary": 2 * h * model.vocabulary,
    }


def test_experts_count_by_token():
    model = MODELS["mixtral-8x7b"]
    found = forward_flops(model)
    assert found["experts"] == 2 * 2 * 3 * 4096 * 14336 * 32 and found["router"] == 2 * 4096 * 8 * 32
    assert CONVENTIONS["6n"](model, 1) == 6 * model.active_parameters


@pytest.mark.parametrize("name", MODELS)
def test_operators_add_up(name):
    """Products for three sequences have the FLOPs per token times the tokens."""
    model = MODELS[name]
    parts: dict[str, int] = {}
    for each in operators(model, 4):
        parts[each.part] = parts.get(each.part, 0) + each.flops
    assert parts == {part: 4 * model.context * flops for part, flops in forward_flops(model).items()}


@pytest.mark.parametrize(
    ("layers", "heads", "width", "vocabulary", "length"), [(2, 2, 64, 256, 64), (1, 5, 40, 97, 32)]
)
def test_our_own_model_in_one_block_of_queries(layers, heads, width, vocabulary, length):
    """The operators' outlines count the same products, as long as attention has one block of queries."""
    own = transformer(vocabulary, length, layers, heads, width).outline(ArraySpec((3, length), "int64")).flops
    model = Transformer(layers, width, heads, vocabulary, length, positions=length, bias=True, tied=True)
    assert own == 3 * length * forward_flops(model).total()


def test_roofline():
    """A product of m x k x n is limited by memory if it does less than peak / bandwidth FLOPs per byte."""
    h100 = PRESETS.devices["h100"]
    one, many = ({each.name: each for each in operators(MODELS["llama-3-8b"], 1, length)}["in"] for length in (1, 8192))
    assert one.intensity() == pytest.approx(1, rel=1e-3) and many.intensity() > h100.peak["bf16"] / h100.bandwidth
    assert one.seconds(h100, "bf16") == one.nbytes() / h100.bandwidth
    assert many.seconds(h100, "bf16") == many.flops / h100.peak["bf16"]
    assert many.nbytes() == 2 * 32 * (8192 * 4096 + 4096 * 28672 + 8192 * 28672)


def test_training_time_and_cost():
    found = training_cost(6 * 175e9 * 300e9, A100, devices=1024, share=0.5, price=2.0)
    assert found.seconds == pytest.approx(6 * 175e9 * 300e9 / (1024 * 156e12))
    assert found.price == 2 * found.device_hours == pytest.approx(2 * 1024 * found.seconds / 3600)
    # GPT-4, at an estimated 2e25 FLOPs, on one B200 at its peak.
    assert round(training_cost(2e25, PRESETS.devices["b200"].peak["bf16"], 1, 1.0).years) == 282
    with pytest.raises(ValueError, match="expected a peak and devices above 0 and a share up to 1, found"):
        training_cost(1e20, A100, devices=0, share=0.5)


def test_unknown_precision():
    with pytest.raises(ValueError, match=r"precision: expected one of fp16, fp32; found 'bf16' \(perhaps fp16\)"):
        PRESETS.devices["v100"].peak_of("bf16")
