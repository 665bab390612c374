"""Memory by closed formulas: the published tables, to all digits; slips of lecture notes are named."""

from dataclasses import replace
from fractions import Fraction

import pytest

from parallel.optim.precision import PRECISIONS
from parallel.planning.analytic.activations import head_bytes, layer_bytes, recomputed_bytes, saved_arrays
from parallel.planning.analytic.layout import ClusterLayout, accumulation, layer_ranges, misfits
from parallel.planning.analytic.memory import over_time, stage_memory
from parallel.planning.analytic.presets import load
from parallel.planning.analytic.states import RECIPES, STATE_KINDS, layer_weights, part_weights, state_bytes
from parallel.planning.analytic.transformer import Transformer

MODELS = load().models
GIB = 2**30


KORTHIKANTI = {  # width, heads, layers, tp, pp, virtual, micro-batch; GiB of tp, of sp + selective, of 18-byte states
    "22b": ((6144, 64, 48, 8, 1, 1, 4), 59.25, 9.5625, 45.5625),
    "175b": ((12288, 96, 96, 8, 8, 3, 1), 66.84375, 12.3515625, 45.5625),
    "530b": ((20480, 128, 105, 8, 35, 3, 1), 114.0234375, 23.076171875, 31.640625),
    "1t": ((25600, 160, 128, 8, 64, 1, 1), 131.25, 26.5625, 32.958984375),
}
PERCENT = {  # of tp alone: sequence, selective, both, full recomputation; their figure 7
    "22b": (66.84, 49.42, 16.18, 7.64),
    "175b": (62.04, 56.53, 18.49, 8.71),
    "530b": (58.31, 62.04, 20.27, 9.42),
    "1t": (58.31, 62.04, 20.27, 9.42),
}


def published(name, **options):
    """Layers of a model of Korthikanti et al. 2022, table 3, without embedding and head, and its layout."""
    width, heads, layers, tp, pp, virtual, micro = KORTHIKANTI[name][0]
    model = Transformer(layers, width, heads, 0, 2048, dropout=True)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    return model, ClusterLayout(tp=tp, pp=pp, virtual=virtual, schedule=schedule, micro_batch=micro, **options)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_activations_of_the_first_stage(name):
    _, plain, both, _ = KORTHIKANTI[name]
    for options, expected in (({}, plain), ({"sequence": True, "recompute": "selective"}, both)):
        model, layout = published(name, **options)
        assert stage_memory(model, layout, RECIPES["bf16"], 4 * layout.pp)[0]["activations"] == expected * GIB


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_states_of_a_stage(name):
    """Of 12 width^2 parameters a layer, without norms."""
    model, layout = published(name)
    memory = stage_memory(replace(model, norms=0), layout, RECIPES["bf16"], layout.pp)[0]
    assert sum(memory[kind] for kind in STATE_KINDS) == KORTHIKANTI[name][3] * GIB


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_shares_of_recomputation(name):
    plain = layer_bytes(*at_layer(published(name)))
    options = ({"sequence": True}, {"recompute": "selective"}, {"sequence": True, "recompute": "selective"})
    found = [layer_bytes(*at_layer(published(name, **each))) for each in (*options, {"recompute": "full"})]
    assert [100 * each / plain for each in found] == pytest.approx(PERCENT[name], abs=0.15)


def at_layer(pair):
    return pair[0], 0, pair[1]


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_formulas_of_a_layer(tp):
    """The five formulas at the top of `activations`."""
    b, s, h, a = 3, 128, 256, 8
    model = Transformer(1, h, a, 0, s, dropout=True)

    def found(**options):
        return layer_bytes(model, 0, ClusterLayout(tp=tp, micro_batch=b, **options))

    scores = Fraction(5 * a * s, h * tp)
    assert found() == s * b * h * (10 + Fraction(24, tp) + scores)
    assert found(recompute="selective") == s * b * h * (10 + Fraction(24, tp))
    assert found(sequence=True) == s * b * h * (Fraction(34, tp) + scores)
    assert found(sequence=True, recompute="selective") == s * b * h * Fraction(34, tp)
    assert found(recompute="full") == 2 * s * b * h


def test_lecture_notes_activations():
    gpt3 = MODELS["gpt-3"]
    stack = sum(layer_bytes(gpt3, layer, ClusterLayout()) for layer in range(gpt3.layers))
    assert round(stack / 1e9, 1) == 275.4
    # A checkpoint at every layer for 3.2e6 tokens. Slip: 7488 GB; and 96 are the layers, not a batch.
    batch = replace(gpt3, context=3_200_000)
    assert round(96 * layer_bytes(batch, 0, ClusterLayout(recompute="full")) / 1e9) == 7550


@pytest.mark.parametrize(
    ("billions", "sixteen", "twenty"), [(1, 16, 20), (7, 112, 140), (70, 1120, 1400), (405, 6480, 8100)]
)
def test_lecture_notes_states(billions, sixteen, twenty):
    """Which of the two follows from the recipe: with or without float32 gradients beside the half ones."""
    assert [billions * sum(RECIPES[name].divided(1, 0)) for name in ("mixed", "fp16")] == [sixteen, twenty]


def test_lecture_notes_gpt3():
    """Weights 350, gradients 350, master weights 700 and Adam 1400 GB: 2800 GB for 175e9 parameters."""
    weights, gradients, optimizer = (175 * each for each in RECIPES["mixed"].divided(1, 0))
    assert (weights, gradients, optimizer) == (350, 350, 700 + 1400) and weights + gradients + optimizer == 2800


def test_zero_of_the_paper():
    """7.5e9 parameters on 64 ranks (Rajbhandari et al. 2020, figure 1)."""
    found = [float(sum(RECIPES["mixed"].divided(64, stage))) * 7.5 for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.88], rel=3e-3)


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_distributed_optimizer_of_megatron(ranks):
    """Bytes per parameter with the optimizer divided: 6 + 12/D, 4 + 16/D, 8 + 8/D."""
    for name, whole, divided in (("bf16", 6, 12), ("fp16", 4, 16), ("fp32", 8, 8)):
        assert sum(RECIPES[name].divided(ranks, 1)) == whole + Fraction(divided, ranks)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_recipes_of_the_runtime(precision):
    kinds = PRECISIONS[precision].bytes_per_parameter(states=2)
    assert RECIPES[precision] == (kinds["weights"], kinds["gradients"], kinds["master"] + kinds["optimizer"])


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("axes", [{}, {"pp": 2}, {"pp": 4}, {"tp": 4}, {"tp": 2, "pp": 3}, {"dp": 8, "ep": 8}])
def test_ranks_together_have_the_model(name, axes):
    """Weights over all stages, times the ranks that share them: the parameters, but for copies on several ranks."""
    model, layout = MODELS[name], ClusterLayout(**axes)
    layout = replace(layout, ep=layout.ep if model.experts else 1)
    held = [part_weights(model, layers, layout) for layers in layer_ranges(model, layout)]
    dense, experts = (sum(counts) for counts in zip(*held))
    whole = layout.tp * (dense + experts * layout.ep)
    copies = model.vocabulary * model.width * (model.tied and layout.pp > 1)
    if layout.tp == 1:
        assert whole == model.parameters + copies
    else:
        assert model.parameters <= whole <= 1.06 * (model.parameters + copies)


def test_kv_heads_below_tp_are_copied():
    model = MODELS["llama-3-8b"]
    here, more = (layer_weights(model, False, tp, 1).dense for tp in (8, 16))
    keys = 4096 * 2 * 8 * 128
    norms = 2 * 4096
    assert (here - keys // 8 - norms) == 2 * (more - keys // 8 - norms)


def test_experts_are_divided_by_their_own_replicas():
    model = MODELS["mixtral-8x7b"]
    for dp, ep in ((8, 1), (8, 4), (8, 8)):
        layout = ClusterLayout(dp=dp, ep=ep, zero=1)
        count = part_weights(model, range(model.layers), layout)
        assert count.experts * ep == 32 * 8 * 3 * 4096 * 14336
        found = state_bytes(count, RECIPES["bf16"], layout)["optimizer"]
        assert found == 12 * (Fraction(count.dense, dp) + Fraction(count.experts, dp // ep))


def test_context_parallelism_divides_tokens_and_saves_no_scores():
    model = MODELS["llama-3-8b"]
    whole, half = (layer_bytes(model, 0, ClusterLayout(cp=cp, recompute="selective")) for cp in (1, 2))
    assert layer_bytes(model, 0, ClusterLayout(cp=2)) == half == whole // 2


def test_the_head_is_on_the_last_stage_only():
    model, layout = MODELS["llama-3-8b"], ClusterLayout(pp=4, recompute="full")
    memory = stage_memory(model, layout, RECIPES["bf16"], 8)
    per_stage = 8 * 2 * 8192 * 4096  # eight layers' inputs
    assert [each["activations"] for each in memory] == [
        alive * per_stage + (alive == 1) * head_bytes(model, layout) for alive in (4, 3, 2, 1)
    ]
    assert head_bytes(model, layout) == 8192 * (4 * 128256 + 2 * 2 * 4096)


def test_stage_3_gathers_two_layers():
    model, layout = MODELS["llama-3-8b"], ClusterLayout(dp=8, zero=3, recompute="full")
    (memory,) = stage_memory(model, layout, RECIPES["bf16"], 1)
    layer = model.layer_parameters(0)
    assert memory["gathered"] >= 2 * 2 * layer and memory["weights"] == -(-2 * model.parameters // 8)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
)
def test_peak_over_time_is_the_peak(schedule, virtual):
    model, layout = replace(MODELS["gpt2"], dropout=False), ClusterLayout(pp=3, schedule=schedule, virtual=virtual)
    for recompute in ("none", "full"):
        layout = replace(layout, recompute=recompute)
        memory = stage_memory(model, layout, RECIPES["bf16"], 6)
        for stage in range(3):
            changes = over_time(model, layout, 6, stage)
            assert max(change.saved for change in changes) == memory[stage]["activations"]
            assert max(change.recomputed for change in changes) == memory[stage]["recomputed"]
            assert changes[-1][1:] == (0, 0) and changes == sorted(changes, key=lambda change: change.time)


def test_memory_rises_and_falls_by_layers():
    model, layout = replace(MODELS["gpt2"], layers=3, vocabulary=0, dropout=False), ClusterLayout(recompute="full")
    saved, again = layer_bytes(model, 0, layout), recomputed_bytes(model, 0, layout)
    rising = [(0, 0, 0), *((time, (time + 1) * saved, 0) for time in range(3))]
    falling = [
        ((3 + 2 * layer, (3 - layer) * saved, again), (5 + 2 * layer, (2 - layer) * saved, 0)) for layer in range(3)
    ]
    assert over_time(model, layout, 1, 0) == [*rising, *(change for pair in falling for change in pair)]


def test_more_micro_batches_take_no_more_memory():
    model, layout = MODELS["gpt2"], ClusterLayout(pp=4)
    few, many = (stage_memory(model, layout, RECIPES["bf16"], count) for count in (4, 4000))
    assert few == many
    assert stage_memory(model, replace(layout, schedule="gpipe"), RECIPES["bf16"], 40)[3]["activations"] > 30 * (
        layer_bytes(model, 0, layout)
    )


@pytest.mark.parametrize(
    ("layout", "sequences", "reason"),
    [
        ({"tp": 64}, 1, "tp=64 does not divide 32 heads"),
        ({"tp": 16}, 1, None),
        ({"cp": 5}, 1, "cp=5: 8192 positions are no multiple of 10"),
        ({"pp": 33}, 1, "33 pipeline parts of 32 layers"),
        ({"ep": 2, "dp": 2}, 2, "ep=2 does not divide 0 experts"),
        ({"dp": 3}, 4, "dp x micro-batch = 3 does not divide 4 sequences"),
        ({"sequence": True}, 1, "sequence parallelism needs tp > 1 that divides 8192 positions"),
        ({"virtual": 2, "pp": 2}, 1, "1f1b has no choice of virtual stages"),
        ({"pp": 2, "layers": (17, 15)}, 1, None),
        ({"pp": 2, "layers": (17, 14)}, 1, "layers 17+14: not 32 in 2 parts"),
        ({"pp": 2, "layers": (16, 8, 8)}, 1, "layers 16+2x8: not 32 in 2 parts"),
        ({"dp": 64, "tp": 8, "micro_batch": 2}, 512, None),
    ],
)
def test_layouts_that_do_not_fit(layout, sequences, reason):
    assert list(misfits(MODELS["llama-3-8b"], ClusterLayout(**layout), sequences)) == ([reason] if reason else [])


def test_global_batch_of_the_notes():
    """4M tokens in sequences of 4,096 are 1,024; on 512 ranks with a micro-batch of 1, two accumulation steps."""
    assert (4 << 20) // 4096 == 1024 and accumulation(ClusterLayout(dp=512), 1024) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp": 0},
        {"tp": -1},
        {"zero": 4},
        {"recompute": "some"},
        {"schedule": "1f2b"},
        {"micro_batch": 0},
        {"layers": (0, 3)},
    ],
)
def test_wrong_layouts(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected "):
        ClusterLayout(**wrong)


def test_gated_layers_save_three_hidden_arrays():
    """Gate, value and their product; fewer keys and values than queries; no masks without dropout."""
    sizes = {each.name: each.nbytes for each in saved_arrays(MODELS["llama-3-8b"], 0)}
    assert (sizes["ffn in"], sizes["ffn out"]) == (2 * 2 * 14336, 2 * 14336)
    assert (sizes["queries"], sizes["keys"], sizes["scores"]) == (2 * 4096, 2 * 1024, 2 * 32 * 8192)
    assert "dropout mask" not in sizes
