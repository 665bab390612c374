"""What must be equal on all ranks is compared: a difference is an error on all, before anything is updated."""

from contextlib import nullcontext

import numpy as np
import pytest

from parallel import AdamW, Engine, RankMismatch, nn

X = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
Y = np.arange(12) % 4


def layouts(size):
    """Options by name, for layouts that the ranks can have."""
    found = {name: {"layout": name} for name in ("dp", "zero1", "zero2", "zero3", "local", "sgp", "hogwild")}
    if size > 1:
        found |= {"ps": {"layout": "ps"}}
    if size == 2:
        found |= {"tp": {"mesh": "tp=2"}, "pp": {"layout": "pp:1f1b"}, "pipedream": {"layout": "pp:pipedream"}}
    if size == 4:
        found |= {"dp,tp": {"mesh": "dp=2,tp=2"}, "pp,tp": {"layout": "pp:1f1b", "mesh": "pp=2,tp=2"}}
    return found


NAMES = sorted({name for size in (2, 4) for name in layouts(size)})
ASYNCHRONOUS = ("ps", "local", "sgp", "hogwild")


@pytest.fixture
def options(comm, request):
    if comm.size == 1:
        pytest.skip("one rank has no other to differ from")
    if request.param not in layouts(comm.size):
        pytest.skip(f"not with {comm.size} ranks")
    return layouts(comm.size)[request.param]


every = pytest.mark.parametrize("options", NAMES, indirect=True)


def parts(dropout=0.5, smoothing=0.0, **optimizer):
    model = nn.mlp([8, 16, 4], dropout=dropout)
    return model, nn.SoftmaxCrossEntropy(smoothing), AdamW(**({"lr": 0.01} | optimizer))


def dropout_of(model):
    return next(one for _, one in model.walk() if isinstance(one, nn.Dropout))


def unseeded(shape):
    return np.random.default_rng().normal(0.0, 1.0, shape)


def with_initial_values():
    model, *others = parts()
    model.parameters()[-1].init = lambda random, shape: unseeded(shape)
    return model, *others


def with_values():
    model, *others = parts()
    for parameter in model.parameters():
        parameter.data = unseeded(parameter.shape)
    return model, *others


def with_more_units():
    model, *others = parts()
    model.items.append(nn.ReLU())
    return model, *others


CREATED = {
    "unseeded": (with_initial_values, with_initial_values, r"initial values of 1\.0\.bias|init of 1\.0\.bias"),
    "values": (with_values, with_values, r"values of 0\.1\.weight"),
    "values of one": (parts, with_values, r"init of 0\.1\.weight: .*; .* init of 0\.1\.weight: absent"),
    "dropout": (parts, lambda: parts(dropout=0.25), r"Dropout 0\.3\.rate: 0\.5; .* 0\.25"),
    "units": (parts, with_more_units, r"2: absent; .* 2: ReLU|number of units"),
    "loss": (parts, lambda: parts(smoothing=0.1), r"loss\.smoothing: 0\.0; .* loss\.smoothing: 0\.1"),
    "schedule": (
        lambda: parts(lr=lambda step: 0.1),
        lambda: parts(lr=lambda step: 0.2),
        "optimizer's rate: .* with code",
    ),
    "groups": (parts, lambda: parts(groups=[{"params": "1.*", "lr": 0.1}]), r"optimizer's groups: \(\); "),
    "no such group": (parts, lambda: parts(groups=[{"params": "zz"}]), "'zz'. is no parameter of the model"),
    "options": (parts, lambda: (*parts(), {"clip": 1.0}), r"clip: 0\.0; .* clip: 1\.0"),
    "no such option": (parts, lambda: (*parts(), {"clop": 1.0}), "clop: expected an option of engines"),
}


@every
@pytest.mark.parametrize("what", CREATED)
def test_creation(comm, options, what):
    usual, other, told = CREATED[what]
    model, loss, optimizer, *more = (other if comm.rank == comm.size - 1 else usual)()
    for some in more:
        options = options | some
    with pytest.raises(ValueError, match=told):
        Engine(model, loss, comm, optimizer, **options)
    model, loss, optimizer = parts()
    with Engine(model, loss, comm, optimizer, layout="dp") as engine:  # the ranks are still in step
        engine.step(X, Y)


def set_rate(model, loss, optimizer):
    optimizer.lr = 0.02


def set_schedule(model, loss, optimizer):
    optimizer.lr = lambda step: 0.01


def set_beta(model, loss, optimizer):
    optimizer.beta1 = 0.5


def freeze(model, loss, optimizer):
    model.items[1].requires_grad_(False)


def end_decay(model, loss, optimizer):
    model.parameters()[2].decay = False


def set_dropout(model, loss, optimizer):
    dropout_of(model).rate = 0.25


def set_activation(model, loss, optimizer):
    first = model.items[0].items
    first[first.index(next(one for one in first if isinstance(one, nn.ReLU)))] = nn.GELU()


def set_smoothing(model, loss, optimizer):
    loss.smoothing = 0.1


CHANGES = {
    set_rate: r"optimizer's rate: 0\.01; .* 0\.02",
    set_schedule: r"optimizer's rate: 0\.01; .* set_schedule",
    set_beta: r"optimizer's beta1: 0\.9; .* 0\.5",
    freeze: r"requires_grad of 1\.0\.weight: True; .* False",
    end_decay: r"decay of 1\.0\.weight: True; .* False",
    set_dropout: r"Dropout 0\.3\.rate: 0\.5; .* 0\.25",
    set_activation: r"0\.2: ReLU; .* 0\.2: GELU",
    set_smoothing: r"loss\.smoothing: 0\.0; .* 0\.1",
}


@every
@pytest.mark.parametrize("change", CHANGES)
def test_change(comm, options, change, request):
    model, loss, optimizer = parts()
    with Engine(model, loss, comm, optimizer, **options) as engine:
        engine.step(X, Y)
        engine.evaluate(X, Y)
        if comm.rank == comm.size - 1:
            change(model, loss, optimizer)
        is_asynchronous = options.get("layout") in ASYNCHRONOUS
        with pytest.raises(RankMismatch, match=CHANGES[change]):
            engine.evaluate(X, Y) if is_asynchronous else engine.step(X, Y)
        assert is_asynchronous or engine.steps == 1
        if comm.rank < comm.size - 1:
            change(model, loss, optimizer)
        engine.step(X, Y)


@every
def test_schedule_that_depends_on_the_rank(comm, options):
    if options.get("layout") in ASYNCHRONOUS:
        pytest.skip("ranks may be in different steps")
    rates = {0: 0.01, 1: 0.01 + 0.01 * comm.rank}
    model, loss, _ = parts()

    def rate(step):
        return held._rates.get(step, 0.01)

    class Held:
        _rates = rates

    held = Held()
    with Engine(model, loss, comm, AdamW(lr=rate), **options) as engine:
        engine.step(X, Y)
        with pytest.raises(RankMismatch, match=r"learning rates: \(0\.01,\); .*learning rates: \(0\.0"):
            engine.step(X, Y)
        held._rates = {}
        engine.step(X, Y)


@every
@pytest.mark.parametrize("what", ["x", "y", "samples", "length"])
def test_later_batches(comm, options, what):
    """Ranks along tp and pp have the same micro-batches, in every step."""
    if not {"tp", "pp"} & set(",".join(map(str, options.values())).replace(":", ",").replace("=", ",").split(",")):
        pytest.skip("every rank has micro-batches of its own")
    model, loss, optimizer = parts()
    x, y, samples = X.copy(), Y.copy(), np.arange(len(X))
    if comm.rank == comm.size - 1:
        if what == "length":
            x, y, samples = x[:-1], y[:-1], samples[:-1]
        else:
            {"x": x, "y": y, "samples": samples}[what][-1] += 1
    with Engine(model, loss, comm, optimizer, **options) as engine:
        engine.step(X, Y)
        with pytest.raises(RankMismatch, match=r"must have the same differ: rank.* of micro-batch"):
            engine.step(x, y % 4, samples=samples)
        assert engine.steps == 1
        engine.step(X, Y)


@every
def test_state_dictionaries(comm, options):
    model, loss, optimizer = parts()
    with Engine(model, loss, comm, optimizer, **options) as engine:
        state = engine.state_dict()
        other = {name: values + (comm.rank == 0 and name == "1.0.bias") for name, values in state.items()}
        with pytest.raises(RankMismatch, match=r"state of 1\.0\.bias: float32 of shape \(4,\), hash"):
            engine.load_state_dict(other)
        for name, values in engine.state_dict().items():
            np.testing.assert_array_equal(values, state[name])


@every
def test_facts_and_paths(comm, options, folder, tmp_path):
    model, loss, optimizer = parts()
    with Engine(model, loss, comm, optimizer, **options) as engine:
        with pytest.raises(RankMismatch, match=r"epoch: 0; .*epoch: 1"):
            engine.save(folder, epoch=int(comm.rank > 0))
        path = engine.save(folder)
        with pytest.raises(RankMismatch, match="path: "):
            engine.load(path if comm.rank else folder)
        engine.load(path)


@every
def test_what_one_rank_may_have_alone(comm, options):
    model, loss, optimizer = parts()
    options = options | {"trace": comm.rank == 0}
    if comm.rank == 0:
        model._note = "of this rank"
    cut = "tp" in options.get("mesh", "")
    if comm.rank == 0 or cut:  # for hooks, ranks along tp exchange gradients
        model.parameters()[0].register_hook(lambda gradient: None)
    with Engine(model, loss, comm, optimizer, **options) as engine:
        engine.step(X, Y)
        if comm.rank == 0:
            loss._calls = 3
            forward = model.items[1].forward
            with pytest.raises(ValueError, match="forward cannot be assigned") if cut else nullcontext():
                model.items[1].forward = lambda x, run: forward(x, run)
        engine.step(X, Y)
        engine.evaluate(X, Y)


@pytest.mark.parametrize("wrong", [{"precision": "fp7"}, {"accumulate": 0}, {"layout": "dq"}], ids=str)
def test_an_invalid_option_of_one_rank(comm, wrong):
    model, loss, optimizer = parts()
    with pytest.raises((ValueError, RankMismatch), match=next(iter(wrong))):
        Engine(model, loss, comm, optimizer, **({} if comm.rank else wrong))
