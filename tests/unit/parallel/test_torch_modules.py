"""Modules of PyTorch as operators on one rank, and state dictionaries in both directions."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'chorus-mpi[torch]'")
from mpi4py import MPI  # noqa: E402
from support.torch_models import NETWORKS, Joined, Recurrent, batch, blocks, encoder_layer, through  # noqa: E402

from parallel import SGD, Engine, nn  # noqa: E402
from parallel.nn.gradcheck import check  # noqa: E402
from parallel.nn.operator import ArraySpec, name_all  # noqa: E402
from parallel.nn.pass_mode import PassMode  # noqa: E402
from parallel.nn.rewrite import operators_in  # noqa: E402
from parallel.torch import from_torch_state, to_torch  # noqa: E402

functional = torch.nn.functional
SELF = MPI.COMM_SELF


def model_of(some):
    return nn.Sequential([nn.from_torch(one) for one in some])


def x_of(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize(
    "module, shape",
    [(torch.nn.Linear(3, 4), (2, 3)), (torch.nn.LayerNorm(3), (2, 3)), (torch.nn.Conv2d(2, 3, 3), (2, 2, 4, 4))],
)
def test_gradients(module, shape):
    """Against differences; saved bytes foretold, nothing written into."""
    check(nn.from_torch(module.double()), x_of(*shape))


def test_weights_and_inputs_are_not_copied():
    """The tensors of a pass are on the memory of the parameters and of the input."""
    module = torch.nn.Linear(3, 4)
    operator, seen = nn.from_torch(module), []
    operator.module.register_forward_hook(lambda one, args, y: seen.append((one.weight.data_ptr(), args[0].data_ptr())))
    x, weight = x_of(2, 3).astype(np.float32), operator.weights["weight"]
    assert weight.data.ctypes.data == module.weight.data_ptr()
    weight.data = np.ones((4, 3), np.float32)
    y, _ = operator.forward(x, PassMode())
    assert seen == [(weight.data.ctypes.data, x.ctypes.data)]
    np.testing.assert_allclose(y, x.sum(1, keepdims=True) + module.bias.detach().numpy(), rtol=1e-6)


def test_weights_that_have_moved_between_passes():
    """As under zero3: the place of the forward pass has other values in the backward pass."""
    operator = nn.from_torch(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)))
    name_all(operator)
    x, found = x_of(5, 3).astype(np.float32), []
    for moves in (False, True):
        y, saved = operator.forward(x, PassMode(samples=np.arange(5)))
        if moves:
            for parameter in operator.parameters():
                before, parameter.data = parameter.data, parameter.data.copy()
                before[...] = np.nan
        gradients = {}

        def keep(parameter, compute, gradients=gradients):
            compute(gradients.setdefault(parameter.name, np.empty(parameter.shape, np.float32)))

        dx = operator.backward(np.ones_like(y), saved, keep)
        found.append([y, dx, *gradients.values()])
    for one, other in zip(*found):
        assert (one == other).all() and np.isfinite(one).all()


def test_parts_that_are_frozen_or_in_evaluation():
    """Frozen parameters get no gradient; a norm in evaluation mode keeps its statistics."""
    block = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5))
    block[0].requires_grad_(False)
    block[1].eval()
    x, y = x_of(6, 3).astype(np.float32), np.arange(6) % 5
    with Engine(model_of([block]), nn.SoftmaxCrossEntropy(), SELF, SGD(lr=0.1)) as engine:
        before = engine.state_dict()
        engine.step(x, y)
        after = engine.state_dict()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"0.1.weight", "0.1.bias", "0.2.weight", "0.2.bias"}


def test_masks_belong_to_a_use_and_leave_the_generator():
    """A module that is used twice has two masks; random numbers of the program go on as without it."""
    drop = nn.from_torch(torch.nn.Dropout(0.5))
    model = nn.Sequential([drop, drop])
    name_all(model)
    state = torch.get_rng_state()
    run, x = PassMode(samples=np.arange(4)), np.ones((4, 50), np.float32)
    y, once = model.forward(x, run)[0], drop.forward(x, PassMode(samples=np.arange(4)))[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert 0.1 < (y > 0).mean() < 0.4 and (once > 0).mean() > 0.4
    assert (drop.forward(x, PassMode(training=False))[0] == x).all()


def test_outline_has_flops():
    outline = nn.from_torch(torch.nn.Linear(3, 4)).outline(ArraySpec((2, 3), np.dtype(np.float32)))
    assert outline.y == ArraySpec((2, 4), np.dtype(np.float32)) and outline.flops == 2 * 2 * 3 * 4


def test_copies_have_values_of_their_own():
    model = model_of([torch.nn.Linear(3, 4)])
    x = x_of(2, 3).astype(np.float32)
    expected = model.forward(x, PassMode())[0]
    other = copy.deepcopy(model)
    other.parameters()[0].data[...] = 0
    assert (model.forward(x, PassMode())[0] == expected).all()
    assert not (other.forward(x, PassMode())[0] == expected).all()


class InPlace(torch.nn.Module):
    def forward(self, x):
        return x.add_(1)


class Nothing(torch.nn.Module):
    def forward(self, x):
        return [x, None]


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: nn.from_torch(len), TypeError, "expected a torch.nn.Module, found builtin"),
        (lambda: nn.from_torch(torch.nn.LazyLinear(3)), TypeError, "LazyLinear.weight: expected a tensor with a shape"),
        (lambda: nn.from_torch(torch.nn.Linear(2, 2, device="meta")), ValueError, "Linear.weight: .* on the CPU"),
        (lambda: nn.from_torch(InPlace(), first=True), ValueError, "InPlace: expected a module that leaves its input"),
        (lambda: nn.from_torch(Nothing()), TypeError, "Nothing: .* found Tensor, NoneType"),
    ],
)
def test_refused_modules(make, error, match):
    with pytest.raises(error, match=match):
        make().forward(np.ones((2, 2), np.float32), PassMode())


# ---------------------------------------------------------------------------------------------- state dictionaries


@pytest.mark.parametrize("name", NETWORKS)
def test_state_of_blocks(name, tmp_path):
    """Trained values, from an engine or its checkpoint, load into the blocks and give the same evaluation."""
    x, y = batch(name)
    model = model_of(blocks(NETWORKS[name]))
    with Engine(model, nn.SoftmaxCrossEntropy(), SELF, SGD(lr=0.1)) as engine:
        engine.step(x, y)
        expected, trained = engine.evaluate(x, y).loss, engine.state_dict()
        engine.save(tmp_path)
    some = torch.nn.Sequential(*blocks(NETWORKS[name])).eval()
    for state in (trained, tmp_path, None):
        some.load_state_dict(to_torch(model, state))
        with torch.no_grad():
            loss = functional.cross_entropy(through(some, torch.from_numpy(x)), torch.from_numpy(y)).item()
        assert loss == pytest.approx(expected, rel=1e-6)
    back = from_torch_state(model, some.state_dict())
    assert back.keys() == trained.keys() and all((back[one] == trained[one]).all() for one in trained)


def test_names_of_shared_tensors():
    layer = encoder_layer()
    blocks = [torch.nn.Sequential(layer, layer), Recurrent(8, 8), Joined(64, 3)]
    state = torch.nn.Sequential(*blocks).state_dict()
    model = model_of(blocks)
    assert {name: one.tolist() for name, one in to_torch(model).items()} == {n: t.tolist() for n, t in state.items()}
    with pytest.raises(ValueError, match=r"expected 0\.1\.norm1\.bias equal to 0\.0\.norm1\.bias"):
        from_torch_state(model, state | {"0.1.norm1.bias": torch.ones(8)})


MODELS = {
    "mlp": (lambda: nn.mlp([6, 5, 4]), (6,)),
    "convnet": (lambda: nn.convnet((1, 8, 8), 5, (2, 3)), (1, 8, 8)),
}


def peer(operator):
    """Module of PyTorch like one of our operators."""
    if isinstance(operator, nn.Sequential):
        return torch.nn.Sequential(*map(peer, operator.items))
    if isinstance(operator, nn.Linear):
        return torch.nn.Linear(operator.inputs, operator.outputs)
    if isinstance(operator, nn.Conv2d):
        outputs, inputs, *window = operator.weight.shape
        return torch.nn.Conv2d(inputs, outputs, window, padding=1)
    return torch.nn.MaxPool2d(2) if isinstance(operator, nn.MaxPool2d) else getattr(torch.nn, type(operator).__name__)()


@pytest.mark.parametrize("name", MODELS)
def test_our_models_in_names_of_pytorch(name):
    make, shape = MODELS[name]
    ours = make()
    module, x = peer(ours), x_of(3, *shape).astype(np.float32)
    set_values(ours, from_torch_state(ours, module.state_dict()))
    y = ours.forward(x, PassMode(training=False))[0]
    np.testing.assert_allclose(y, module(torch.from_numpy(x)).detach(), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(one, to_torch(ours)[key]) for key, one in module.state_dict().items())


def set_values(model, values):
    for parameter in model.parameters():
        parameter.data = np.ascontiguousarray(values[parameter.name])


VOCABULARY, CONTEXT, LAYERS, WIDTH = 50, 16, 2, 24


def gpt2_state():
    """Random tensors by the names and shapes of Hugging Face's GPT2LMHeadModel."""
    state = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (CONTEXT, WIDTH)}
    for at in range(LAYERS):
        for name in ("ln_1", "ln_2"):
            state |= {f"h.{at}.{name}.{kind}": (WIDTH,) for kind in ("weight", "bias")}
        sizes = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
        sizes |= {"mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}
        for name, size in sizes.items():
            state |= {f"h.{at}.{name}.weight": size, f"h.{at}.{name}.bias": size[1:]}
    state |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    made = {f"transformer.{name}": torch.randn(size) * 0.2 for name, size in state.items()}
    return made | {"lm_head.weight": made["transformer.wte.weight"]}


def heads_of(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def gpt2_logits(state, tokens, heads):
    """Forward pass of GPT-2 (Radford et al., 2019), with the names of Hugging Face."""

    def part(name):
        return state[f"transformer.{name}.weight"], state[f"transformer.{name}.bias"]

    def linear(x, name):
        weight, bias = part(name)
        return x @ weight + bias

    def norm(x, name):
        return functional.layer_norm(x, (WIDTH,), *part(name))

    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][: tokens.shape[1]]
    for at in range(LAYERS):
        here = f"h.{at}"
        packed = linear(norm(x, f"{here}.ln_1"), f"{here}.attn.c_attn").split(WIDTH, -1)
        y = functional.scaled_dot_product_attention(*(heads_of(one, heads) for one in packed), is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{here}.attn.c_proj")
        hidden = functional.gelu(linear(norm(x, f"{here}.ln_2"), f"{here}.mlp.c_fc"), approximate="tanh")
        x = x + linear(hidden, f"{here}.mlp.c_proj")
    return norm(x, "ln_f") @ state["lm_head.weight"].T


def llama_state(heads, groups, hidden):
    """Random tensors by the names and shapes of Hugging Face's LlamaForCausalLM."""
    each = WIDTH // heads
    state = {"embed_tokens": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for at in range(LAYERS):
        sizes = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
        sizes |= {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH)}
        sizes |= {f"self_attn.{one}_proj": (groups * each, WIDTH) for one in "kv"}
        sizes |= {f"mlp.{one}_proj": (hidden, WIDTH) for one in ("gate", "up")}
        sizes |= {"mlp.down_proj": (WIDTH, hidden)}
        state |= {f"layers.{at}.{name}": size for name, size in sizes.items()}
    made = {f"model.{name}.weight": torch.randn(size) * 0.2 for name, size in state.items()}
    return made | {"lm_head.weight": torch.randn(VOCABULARY, WIDTH) * 0.2}


def rotated(x, base):
    """Queries or keys (batch, heads, length, d) with Llama's rotary positions, as in Hugging Face's code."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[2])[:, None] * torch.cat([rates, rates])
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


def llama_logits(state, tokens, heads, groups, base=None, eps=1e-5):
    """Forward pass of Llama (Touvron et al., 2023). Without a base, positions are learned."""

    def linear(x, name):
        return x @ state[f"model.{name}.weight"].T

    def norm(x, name):
        return functional.rms_norm(x, (WIDTH,), state[f"model.{name}.weight"], eps)

    x = state["model.embed_tokens.weight"][tokens]
    if base is None:
        x = x + state["model.embed_positions.weight"][: tokens.shape[1]]
    for at in range(LAYERS):
        here = f"layers.{at}"
        y = norm(x, f"{here}.input_layernorm")
        q = heads_of(linear(y, f"{here}.self_attn.q_proj"), heads)
        k, v = (heads_of(linear(y, f"{here}.self_attn.{one}_proj"), groups) for one in "kv")
        if base is not None:
            q, k = rotated(q, base), rotated(k, base)
        k, v = (one.repeat_interleave(heads // groups, 1) for one in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{here}.self_attn.o_proj")
        y = norm(x, f"{here}.post_attention_layernorm")
        gated = functional.silu(linear(y, f"{here}.mlp.gate_proj")) * linear(y, f"{here}.mlp.up_proj")
        x = x + linear(gated, f"{here}.mlp.down_proj")
    return norm(x, "norm") @ state["lm_head.weight"].T


def expect_logits(model, state, names, logits):
    """Equal logits with the values of a state dictionary, and the same dictionary back."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 12))
    set_values(model, from_torch_state(model, state, names=names))
    found = model.forward(tokens, PassMode(training=False))[0]
    np.testing.assert_allclose(found, logits(torch.from_numpy(tokens)), atol=1e-5)
    assert np.abs(found).max() > 0.3
    back = to_torch(model, names=names)
    assert back.keys() == state.keys() and all(torch.equal(one, back[name]) for name, one in state.items())


def test_gpt2_of_hugging_face():
    torch.manual_seed(0)
    model, state = nn.transformer(VOCABULARY, CONTEXT, LAYERS, 3, WIDTH, dropout=0.1, recompute=True), gpt2_state()
    for one in operators_in(model):
        if isinstance(one, nn.GELU):
            one.tanh = True
    expect_logits(model, state, "gpt2", lambda tokens: gpt2_logits(state, tokens, 3))
    assert "0.0.weight" in from_torch_state(model, {**state, "transformer.h.0.attn.bias": torch.ones(1)}, names="gpt2")


@pytest.mark.parametrize("tied", [True, False])
def test_llama_of_hugging_face(tied):
    torch.manual_seed(0)
    options, state = nn.LlamaOptions(base=500.0, hidden=40, tied=tied, eps=1e-3), llama_state(6, 2, 40)
    model = nn.gated_transformer(VOCABULARY, CONTEXT, LAYERS, 6, WIDTH, kv_heads=2, llama=options)
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    expect_logits(model, state, "llama", lambda tokens: llama_logits(state, tokens, 6, 2, 500.0, 1e-3))
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # in older files
    assert from_torch_state(model, state | inverse, names="llama").keys() == {one.name for one in model.parameters()}


def test_llama_with_learned_positions():
    torch.manual_seed(0)
    model, state = nn.gated_transformer(VOCABULARY, CONTEXT, LAYERS, 6, WIDTH, kv_heads=2), llama_state(6, 2, 64)
    state["model.embed_positions.weight"] = torch.randn(CONTEXT, WIDTH) * 0.2
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    expect_logits(model, state, "llama", lambda tokens: llama_logits(state, tokens, 6, 2))


def test_refused_states():
    model, state = nn.transformer(VOCABULARY, CONTEXT, LAYERS, 3, WIDTH), gpt2_state()
    with pytest.raises(ValueError, match=r"state: expected transformer\.wpe\.weight, for 0\.1\.weight; found none"):
        from_torch_state(model, {k: v for k, v in state.items() if "wpe" not in k}, names="gpt2")
    with pytest.raises(ValueError, match="state: extra is not of this model"):
        from_torch_state(model, state | {"extra": torch.ones(1)}, names="gpt2")
    with pytest.raises(ValueError, match=r"expected values of shape \(16, 24\) for 0\.1\.weight, found \(3, 24\)"):
        from_torch_state(model, state | {"transformer.wpe.weight": torch.ones(3, WIDTH)}, names="gpt2")
    with pytest.raises(ValueError, match=r"expected lm_head\.weight equal to transformer\.wte\.weight"):
        from_torch_state(model, state | {"lm_head.weight": torch.ones(VOCABULARY, WIDTH)}, names="gpt2")
    with pytest.raises(ValueError, match="names: llama is for another model"):
        to_torch(model, names="llama")
    with pytest.raises(ValueError, match="names: expected None or one of gpt2, llama; found 'bert'"):
        to_torch(model, names="bert")
