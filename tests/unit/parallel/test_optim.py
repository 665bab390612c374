"""Optimisers against the papers' formulas in plain float64, against torch, and however the vector is divided."""

import importlib
import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import ml_dtypes
import numpy as np
import pytest
from conformance.thread_communicator import run_threads

from parallel import Engine, nn
from parallel.nn.flat_params import BLOCK, ParamSpan, Span
from parallel.nn.operator import Parameter, constant
from parallel.optim.grad_norm import block_squares, clip_factor
from parallel.optim.kernels import formulas
from parallel.optim.lr_schedules import LRSchedule
from parallel.optim.optimizer import PORTION
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.optimizers import LAMB, OPTIMIZERS, SGD, Adam, AdamW

SIZES = {"first": 700, "bias": 3, "second": 1025, "none": 0, "gain": 256, "last": 40}
NOT_DECAYING = ("bias", "gain")
STEPS, SCALE = 30, 0.125

OPTIONS = {
    "sgd": {"rate": 0.05},
    "sgd-decay": {"rate": 0.05, "decay": 0.1},
    "momentum": {"rate": 0.05, "momentum": 0.9, "decay": 0.01},
    "nesterov": {"rate": 0.05, "momentum": 0.9, "nesterov": True, "decay": 0.01},
    "adam": {"rate": 0.01, "decay": 0.02},
    "adamw": {"rate": LRSchedule("warm_up_cosine", rate=0.02, warm_up=5, steps=STEPS), "decay": 0.1},
    "lamb": {"rate": 0.02, "decay": 0.1},
}
KINDS = {"sgd-decay": "sgd", "momentum": "sgd", "nesterov": "sgd"}


NAMES = {**dict.fromkeys(OPTIONS), **dict.fromkeys(OPTIMIZERS)}
"""Names of `OPTIONS`, and optimizers that have none."""


def make(name):
    return OPTIMIZERS[KINDS.get(name, name)](**OPTIONS.get(name, {"rate": 0.05, "decay": 0.1}))


def places():
    place, result = 0, []
    for name, size in SIZES.items():
        parameter = Parameter((size,), constant(0.0), decay=name not in NOT_DECAYING)
        parameter.name = name
        length = -(-size // BLOCK) * BLOCK
        result.append(ParamSpan(parameter, Span(place, place + length)))
        place += length
    return tuple(result)


PLACES = places()
LENGTH = PLACES[-1].span.stop
WHOLE = Span(0, LENGTH)
FILLED = np.concatenate([np.arange(place.span.size) < place.size for place in PLACES])


def values(seed, dtype=np.float64):
    return (np.random.default_rng(seed).normal(size=LENGTH) * FILLED).astype(dtype)


def divide(bounds, weights, optimizer, stored=None):
    """Pieces between block numbers, with memory of their own."""
    pieces = []
    for start, stop in zip([0, *bounds], [*bounds, LENGTH // BLOCK]):
        span = Span(start * BLOCK, stop * BLOCK)
        own = weights[span.start : span.stop].copy()
        half = None if stored is None else np.empty(span.size, stored)
        pieces.append(OptimizerSpan(span, own, np.empty_like(own), optimizer.fresh(own), PLACES, half))
    return pieces


def train(optimizer, bounds=(), dtype=np.float64, steps=STEPS, stored=None):
    """Weights and state after some steps, joined again."""
    pieces = divide(bounds, values(1, dtype), optimizer, stored)
    for step in range(steps):
        gradient = values(100 + step, dtype)
        for piece in pieces:
            piece.gradient[:] = gradient[piece.span.start : piece.span.stop]
        optimizer.update(pieces, step, SCALE, lambda sums: sums.copy())
    joined = {name: np.concatenate([piece.state[name] for piece in pieces]) for name in optimizer.states()}
    joined["weights"] = np.concatenate([piece.weights for piece in pieces])
    if stored:
        joined["stored"] = np.concatenate([piece.stored for piece in pieces])
    return joined


def plain(name):
    """The papers' formulas, tensor by tensor, in float64."""
    options, kind = OPTIONS[name], KINDS.get(name, name)
    result = np.zeros(LENGTH)
    for place in PLACES:
        here = slice(place.span.start, place.span.start + place.size)
        w = values(1)[here]
        m, v, u = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
        decay = options.get("decay", 0.0) if place.parameter.decay else 0.0
        for step in range(STEPS):
            rate = options["rate"](step) if callable(options["rate"]) else options["rate"]
            g = values(100 + step)[here] * SCALE
            if kind == "sgd":
                g, beta = g + decay * w, options.get("momentum", 0.0)
                u = beta * u + g
                w = w - rate * (g + beta * u if options.get("nesterov") else u)
                continue
            beta1, beta2, eps = 0.9, 0.999, 1e-6 if kind == "lamb" else 1e-8
            if kind == "adam":
                g = g + decay * w
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            r = (m / (1 - beta1 ** (step + 1))) / (np.sqrt(v / (1 - beta2 ** (step + 1))) + eps)
            if kind == "adam":
                w = w - rate * r
            elif kind == "adamw":
                w = w - rate * (r + decay * w)
            else:
                r = r + decay * w
                whole = np.linalg.norm(w) > 0 and np.linalg.norm(r) > 0
                w = w - rate * (np.linalg.norm(w) / np.linalg.norm(r) if whole else 1.0) * r
        result[here] = w
    return result


def use_reference(monkeypatch):
    monkeypatch.setattr(formulas, "host", None)


@pytest.fixture(params=["fastest", "reference"])
def arithmetic(request, monkeypatch):
    """Whatever this machine has for host arrays, and the reference."""
    if request.param == "reference":
        use_reference(monkeypatch)


@pytest.mark.parametrize("name", OPTIONS)
def test_formulas_of_the_papers(name, arithmetic):
    np.testing.assert_allclose(train(make(name))["weights"], plain(name), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_float32_is_as_close_as_it_can_be(name, arithmetic):
    np.testing.assert_allclose(train(make(name), dtype=np.float32)["weights"], plain(name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_filling_stays_zero(name):
    for vector in train(make(name), dtype=np.float32).values():
        assert not vector[~FILLED].any()


TORCH = {
    "sgd": ("SGD", {"lr": 0.05}, {}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, {"velocity": "momentum_buffer"}),
    "nesterov": (
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"velocity": "momentum_buffer"},
    ),
    "adam": ("Adam", {"lr": 0.01, "weight_decay": 0.02}, {"m": "exp_avg", "v": "exp_avg_sq"}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, {"m": "exp_avg", "v": "exp_avg_sq"}),
}


@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-11), (np.float32, 5e-5)])
@pytest.mark.parametrize("name", TORCH)
def test_torch_agrees_state_for_state(name, dtype, rtol):
    torch = pytest.importorskip("torch")
    kind, options, states = TORCH[name]
    tensors = [torch.tensor(values(1, dtype)[p.span.start :][: p.size], requires_grad=True) for p in PLACES]
    groups = [
        {"params": [t for t, p in zip(tensors, PLACES) if p.parameter.decay]},
        {"params": [t for t, p in zip(tensors, PLACES) if not p.parameter.decay], "weight_decay": 0.0},
    ]
    theirs = getattr(torch.optim, kind)(groups, **options)
    for step in range(STEPS):
        for tensor, place in zip(tensors, PLACES):
            tensor.grad = torch.tensor(values(100 + step, dtype)[place.span.start :][: place.size] * dtype(SCALE))
        theirs.step()
    optimizer = make(name)
    optimizer.rate = options["lr"]
    ours = train(optimizer, dtype=dtype)
    for tensor, place in zip(tensors, PLACES):
        here = slice(place.span.start, place.span.start + place.size)
        np.testing.assert_allclose(ours["weights"][here], tensor.detach().numpy(), rtol=rtol, atol=rtol / 10)
        for state, called in states.items():
            np.testing.assert_allclose(
                ours[state][here], theirs.state[tensor][called].numpy(), rtol=rtol, atol=rtol / 100
            )


def equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].tobytes() == right[name].tobytes(), name


DIVISIONS = [(1,), (4,), (7,), (0, 0, 3), (3, 3, 5, 9), tuple(range(1, LENGTH // BLOCK)), (LENGTH // BLOCK,)]


@pytest.mark.parametrize("bounds", DIVISIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_depends_on_the_division_into_pieces(name, bounds):
    halves = {"dtype": np.float32, "stored": ml_dtypes.bfloat16, "steps": 5}
    equal(train(make(name), bounds, **halves), train(make(name), **halves))


@pytest.mark.parametrize("portion", [BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_depends_on_the_portions(name, portion, monkeypatch, arithmetic):
    expected = train(make(name), dtype=np.float32, steps=5)
    monkeypatch.setitem(PORTION, "host", portion)
    equal(train(make(name), (5,), dtype=np.float32, steps=5), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_gives_the_same_bits_as_the_reference(name, dtype, monkeypatch):
    pytest.importorskip("parallel.optim.kernels._updates")
    assert formulas.host is importlib.import_module("parallel.optim.kernels._updates")
    expected = train(make(name), dtype=dtype)
    use_reference(monkeypatch)
    equal(train(make(name), dtype=dtype), expected)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["nesterov", "adamw", "lamb"])
def test_half_weights_are_the_master_rounded(name, half):
    done = train(make(name), dtype=np.float32, stored=half, steps=3)
    assert done["stored"].tobytes() == done["weights"].astype(half).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_no_pieces_and_empty_pieces(name):
    optimizer = make(name)
    optimizer.update([], 0, 1.0, lambda sums: np.zeros(LENGTH // BLOCK))
    none = np.zeros(0, np.float32)
    piece = OptimizerSpan(Span(512, 512), none, none, optimizer.fresh(none), PLACES)
    optimizer.update([piece], 0, 1.0, lambda sums: np.zeros(LENGTH // BLOCK))
    assert piece.tensors == ()


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, LAMB])
def test_a_subclass_has_the_updates_of_its_class(kind):
    class Derived(kind):
        pass

    equal(train(Derived(rate=0.1), steps=3), train(kind(rate=0.1), steps=3))


def test_decay_groups():
    """With a zero gradient, decay alone moves the weights, and only those of its group."""
    optimizer = AdamW(rate=0.5, decay=0.5)
    (piece,) = divide((), values(1), optimizer)
    piece.gradient[:] = 0
    optimizer.update([piece], 0, 1.0)
    for place in PLACES:
        here = slice(*place.span)
        assert np.array_equal(piece.weights[here], values(1)[here] * (0.75 if place.parameter.decay else 1.0))


@pytest.mark.parametrize("decay, gradient, expected", [(0.0, 1.0, -0.1), (0.5, 0.0, 0.0)])
def test_lamb_from_zero_weights(decay, gradient, expected):
    """A norm of zero leaves the rate as it is: a tensor of zeros moves like Adam, without a gradient it stays."""
    optimizer = LAMB(rate=0.1, decay=decay, eps=1e-12)
    (piece,) = divide((), np.zeros(LENGTH), optimizer)
    piece.gradient[:] = gradient
    optimizer.update([piece], 0, 1.0, lambda sums: sums)
    np.testing.assert_allclose(piece.weights, expected, rtol=1e-10)


def test_lamb_with_a_direction_of_zero():
    optimizer = LAMB(rate=0.1, decay=0.0)
    (piece,) = divide((), values(1), optimizer)
    piece.gradient[:] = 0
    optimizer.update([piece], 0, 1.0, lambda sums: sums)
    assert np.array_equal(piece.weights, values(1))


def test_lamb_of_two_ranks_is_lamb_of_one():
    """Two threads that gather from each other, a tensor divided between them, against one that has all."""
    pieces, brought, meeting = divide((5,), values(1), make("lamb")), [None, None], Barrier(2)

    def update(rank):
        def gather(sums):
            brought[rank] = sums
            meeting.wait(10)
            joined = np.concatenate(brought)
            meeting.wait(10)
            return joined

        pieces[rank].gradient[:] = values(100)[slice(*pieces[rank].span)]
        make("lamb").update([pieces[rank]], 0, SCALE, gather)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(update, range(2)))
    joined = np.concatenate([piece.weights for piece in pieces])
    assert joined.tobytes() == train(make("lamb"), steps=1)["weights"].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_block_sums(dtype, arithmetic):
    x = values(3, dtype)
    sums = block_squares(x)
    exact = [math.fsum(float(value) ** 2 for value in block) for block in x.reshape(-1, BLOCK)]
    assert sums.dtype == np.float64
    np.testing.assert_allclose(sums, exact, rtol=1e-14)
    for start in range(LENGTH // BLOCK):
        assert block_squares(x[start * BLOCK :]).tobytes() == sums[start:].tobytes()


def test_block_sums_need_whole_blocks():
    with pytest.raises(ValueError, match=r"whole blocks of 256, found shape \(255,\)"):
        block_squares(np.zeros(255))


@pytest.mark.parametrize(
    "limit, norm, factor", [(None, 10.0, 1.0), (10.0, 10.0, 1.0), (11.0, 10.0, 1.0), (2.5, 10.0, 0.25)]
)
def test_clipping(limit, norm, factor):
    gradient = np.zeros(2 * BLOCK, np.float32)
    gradient[[0, 300]] = 12.0, 16.0
    assert clip_factor(block_squares(gradient), 0.5, limit) == (norm, factor)


def test_a_zero_gradient_is_not_clipped():
    assert clip_factor(np.zeros(3), 1.0, 1.0) == (0.0, 1.0)
    assert clip_factor(np.zeros(0), 1.0, 1.0) == (0.0, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_wherever_it_is(bad, arithmetic):
    for at in (0, 255, LENGTH - 1):
        gradient = values(3, np.float32)
        gradient[at] = bad
        norm, factor = clip_factor(block_squares(gradient), 1.0, 1.0)
        assert not math.isfinite(norm) and factor == 0


@pytest.mark.parametrize("scale", [math.nan, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_refused_changes_nothing(name, scale):
    optimizer = make(name)
    (piece,) = divide((), values(1), optimizer)
    piece.gradient[:] = 1
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        optimizer.update([piece], 0, scale, lambda sums: sums)
    assert np.array_equal(piece.weights, values(1))
    assert not any(vector.any() for vector in piece.state.values())


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (SGD, {"rate": -1.0}, "rate: expected a number from 0 on, or a schedule, found -1.0"),
        (SGD, {"rate": math.nan}, "rate"),
        (SGD, {"rate": 1.0, "momentum": 1.0}, "momentum: expected 0 <= momentum < 1, found 1.0"),
        (SGD, {"rate": 1.0, "nesterov": True}, "nesterov: expected momentum"),
        (SGD, {"rate": 1.0, "decay": -0.1}, "decay: expected a number from 0 on, found -0.1"),
        (Adam, {"rate": 1.0, "beta1": 1.0}, "beta1"),
        (Adam, {"rate": 1.0, "beta2": -0.5}, "beta2"),
        (AdamW, {"rate": 1.0, "eps": 0.0}, "eps"),
    ],
)
def test_hyperparameters_out_of_range(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_a_rate_that_goes_wrong_and_a_step_that_cannot_be():
    with pytest.raises(ValueError, match=r"rate: expected a number from 0 on at step 3, found -3.0"):
        SGD(rate=lambda step: -step).update([], 3, 1.0)
    with pytest.raises(ValueError, match=r"step: .* found -1"):
        SGD(rate=1.0).update([], -1, 1.0)
    with pytest.raises(ValueError, match="gather"):
        LAMB(rate=1.0).update([], 0, 1.0)
    with pytest.raises(ValueError, match="limit: expected a positive number, or None, found 0"):
        clip_factor(np.zeros(1), 1.0, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"span": Span(0, 100)}, "span: expected whole blocks"),
        ({"weights": np.zeros(256, np.float16)}, "weights: expected float32 or float64, found float16"),
        ({"gradient": np.zeros(255)}, "gradient: expected float64 of shape"),
        ({"state": {"m": np.zeros(256, np.float32)}}, "m: expected float64 of shape .* found float32"),
        ({"stored": np.zeros(1, np.float16)}, "stored: expected shape"),
        ({"places": PLACES[1:]}, "places: expected tensors that fill 0 to 256"),
    ],
)
def test_pieces_that_do_not_fit(change, message):
    good = {"span": Span(0, 256), "weights": np.zeros(256), "gradient": np.zeros(256), "state": {}, "places": PLACES}
    OptimizerSpan(**good)
    with pytest.raises(ValueError, match=message):
        OptimizerSpan(**{**good, **change})


def test_nothing_is_allocated_from_step_to_step():
    optimizer = AdamW(rate=0.1)
    size = 64 * BLOCK * BLOCK
    place = ParamSpan(Parameter((size,), constant(0.0)), Span(0, size))
    weights = np.zeros(size, np.float32)
    piece = OptimizerSpan(Span(0, size), weights, np.ones_like(weights), optimizer.fresh(weights), [place])
    optimizer.update([piece], 0, 1.0)
    tracemalloc.start()
    optimizer.update([piece], 1, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


def test_description():
    described = make("adamw").describe()
    assert described == {
        "name": "adamw",
        "rate": {"name": "warm_up_cosine", "rate": 0.02, "warm_up": 5, "steps": STEPS},
        "decay": 0.1,
        "groups": [],
        "ema": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
    }


class Derived(LAMB):
    pass


class Whole(SGD):
    whole_tensors = True


@pytest.mark.parametrize("kind", [LAMB, Derived, Whole])
@pytest.mark.parametrize(("ranks", "settings"), [(2, {"mesh": "tp=2"}), (3, {"layout": "ps", "servers": 2})])
def test_norms_of_whole_tensors_where_these_are_divided(kind, ranks, settings):
    """Classes of users that need them are refused as LAMB is."""

    def main(comm):
        with pytest.raises(ValueError, match=r"optimizer: \w+ needs (norms of whole tensors|bsp on one server)"):
            Engine(nn.mlp([4, 4, 2]), nn.SoftmaxCrossEntropy(), comm, kind(lr=0.1), **settings)

    run_threads(ranks, main)
