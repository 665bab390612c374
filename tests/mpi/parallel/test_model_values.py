"""A parameter belongs to one open engine, and its values to the model between engines."""

import copy

import numpy as np
import pytest

from parallel import AdamW, Engine, RankMismatch, nn
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.runtime.consistency_check import RankLeft

X = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
Y = np.arange(12) % 4
LOSS = nn.SoftmaxCrossEntropy()

WHOLE = ["dp", "dp-naive", "zero1", "zero2", "local", "sgp", "hogwild"]
OTHERS = ["zero3", "tp", "pp", "ps"]


@pytest.fixture
def options(comm, request):
    name = request.param
    if name == "ps" and comm.size == 1:
        pytest.skip("no workers")
    if name in ("tp", "pp") and comm.size != 2:
        pytest.skip("two ranks")
    return {"tp": {"layout": "dp", "mesh": "tp=2"}, "pp": {"layout": "pp:1f1b"}}.get(name, {"layout": name})


def engine(comm, model, **options):
    return Engine(model, LOSS, comm, AdamW(lr=0.05), **options)


def mlp():
    return nn.mlp([8, 16, 4])


@pytest.mark.parametrize("options", WHOLE + OTHERS, indirect=True)
def test_second_open_engine(comm, options):
    """Also on a model that shares an operator, or a parameter."""
    model, encoder = mlp(), nn.Sequential(nn.Linear(8, 4))
    encoder.items[0].bias = model.parameters()[-1]
    with engine(comm, model, **options) as first:
        before = first.step(X, Y).loss
        for other in (model, nn.Sequential(model.items[0], nn.Linear(16, 4)), encoder):
            with pytest.raises(ValueError, match=r"parameter [01]\..* belongs to an open engine of layout .*close the"):
                engine(comm, other, layout="dp")
        report = first.step(X, Y)
        if options["layout"] != "ps" or comm.rank == 0:  # workers report their own micro-batches, which may be none
            assert report.loss < before
        assert list(first.state_dict()) == ["0.1.weight", "0.1.bias", "1.0.weight", "1.0.bias"]
        with engine(comm, copy.deepcopy(mlp()), layout="dp") as second:
            second.step(X, Y)
    with engine(comm, encoder, layout="dp") as third:
        third.step(X, Y)


def test_engine_without_references_owns_nothing(comm):
    model = mlp()
    made = engine(comm, model)
    made.step(X, Y)
    made.inner.cycle = made.inner
    del made
    with engine(comm, model) as other:
        other.step(X, Y)


@pytest.mark.parametrize("options", WHOLE + OTHERS, indirect=True)
def test_an_engine_that_is_left_by_an_exception_owns_nothing(comm, options):
    """The model is free for the next engine, also while a variable has the first one."""
    model = mlp()
    with pytest.raises((KeyError, RankLeft)), engine(comm, model, **options) as first:  # ranks of sgp are not in step
        first.step(X, Y)
        raise KeyError
    with engine(comm, model, **options) as second:
        assert any("starts at its initial values" in remark for remark in second.remarks)
        second.step(X, Y)
    first.close()


@pytest.mark.parametrize("options", WHOLE, indirect=True)
@pytest.mark.parametrize("following", ["dp", "zero3", "local"])
def test_values_are_left_in_the_model(comm, options, following):
    model = mlp()
    with engine(comm, model, **options) as first:
        for _ in range(3):
            first.step(X, Y)
        state, loss = first.state_dict(), first.evaluate(X, Y).loss
    for parameter in model.parameters():
        np.testing.assert_allclose(parameter.data, state[parameter.name], rtol=1e-6)
    with engine(comm, model, layout=following) as second:
        assert second.evaluate(X, Y).loss == pytest.approx(loss, rel=1e-5)
        assert not any("initial values" in remark for remark in second.remarks)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp64"])
def test_values_of_other_precisions(comm, precision):
    model = mlp()
    with engine(comm, model, precision=precision) as first:
        first.step(X, Y)
        loss = first.evaluate(X, Y).loss
    with engine(comm, model, precision=precision) as second:
        assert second.evaluate(X, Y).loss == loss


@pytest.mark.parametrize("options", OTHERS, indirect=True)
def test_values_that_no_rank_has(comm, options):
    """The next engine starts at the initial values, and remarks it."""
    model = mlp()
    with engine(comm, model, **options) as first:
        start = first.evaluate(X, Y).loss
        first.step(X, Y)
        state, loss = first.state_dict(), first.evaluate(X, Y).loss
    with engine(comm, model) as second:
        assert any("parameter 0.1.weight starts at its initial values" in remark for remark in second.remarks)
        assert second.evaluate(X, Y).loss == pytest.approx(start, rel=1e-5)
        second.load_state_dict(state)
        assert second.evaluate(X, Y).loss == pytest.approx(loss, rel=1e-5)
    with engine(comm, model, **options) as third:  # from values now
        assert not any("initial values" in remark for remark in third.remarks)
        assert third.evaluate(X, Y).loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("options", ["zero3", "tp"], indirect=True)
def test_copies_of_a_model_without_values(comm, options):
    """Made while the engine is open, or later: the next engine remarks where they start, as of the model itself."""
    model = mlp()
    with engine(comm, model, **options) as first:
        first.step(X, Y)
        copies = [copy.deepcopy(model)]
    for one in (*copies, copy.deepcopy(model)):
        with engine(comm, one) as second:
            assert any("parameter 0.1.weight starts at its initial values" in remark for remark in second.remarks)


def test_copies_of_a_model_with_values(comm):
    model = mlp()
    with engine(comm, model) as first:
        first.step(X, Y)
        copied, loss = copy.deepcopy(model), first.evaluate(X, Y).loss
        with engine(comm, copied) as second:
            assert second.evaluate(X, Y).loss == loss and not second.remarks
        for parameter in copied.parameters():
            parameter.data = None  # no engine has it
        with engine(comm, copied) as third:
            assert third.evaluate(X, Y).loss > loss and not third.remarks
        assert first.evaluate(X, Y).loss == loss


@pytest.mark.parametrize("layout", ["pp:1f1b", "local"])
def test_copies_of_a_model_whose_ranks_have_different_values(comm, layout):
    """The error names the copy as its cause, unless it is about something else."""
    if comm.size == 1 or (comm.size > 2 and layout == "pp:1f1b"):
        pytest.skip("ranks have the same, or stages have no units")
    model = mlp()
    with engine(comm, model, layout=layout) as first:
        first.step(X, Y)
        copied = copy.deepcopy(copy.deepcopy(model))
        with pytest.raises(RankMismatch, match=r"values of 0.1.weight: .*; the model was copied while an open engine"):
            engine(comm, copied)
        copied.items[0].items[1].weight.decay = comm.rank == 0
        with pytest.raises(RankMismatch, match=r"decay of 0.1.weight: (True|False)$"):
            engine(comm, copied)
        first.step(X, Y)


@pytest.mark.parametrize("options", WHOLE + OTHERS, indirect=True)
def test_values_of_a_user(comm, options):
    model = mlp()
    for parameter in model.parameters():
        parameter.data = np.full(parameter.shape, 0.25, np.float32)
    with engine(comm, model, **options) as made:
        assert all((values == 0.25).all() for values in made.state_dict().values())
        assert not made.remarks or "initial" not in made.remarks[0]
        made.step(X, Y)
    assert all(parameter.first(0).any() for parameter in model.parameters()[::2])  # initialisers are the model's


def test_an_engine_that_is_not_made_leaves_the_values(comm):
    model = mlp()
    for parameter in model.parameters():
        parameter.data = np.full(parameter.shape, 0.25, np.float32)
    with pytest.raises(ValueError, match=r"stages|mesh|schedule|cuts"):
        engine(comm, model, layout="pp:1f1b", cuts="0,1,2,3,4,5,6,7,8")
    assert all((parameter.data == 0.25).all() for parameter in model.parameters())
    engine(comm, model).close()


def test_engines_below_own_too(comm):
    model = mlp()
    made = DataParallelEngine(model, LOSS, comm, AdamW(lr=0.05))
    with made, pytest.raises(ValueError, match="belongs to an open engine"):
        DataParallelEngine(model, LOSS, comm, AdamW(lr=0.05))


def test_values_that_differ_after_a_failure(comm):
    """A rank whose update another has not made is found by the next engine."""
    if comm.size == 1:
        pytest.skip("one rank")
    model = mlp()
    engine(comm, model).close()
    if comm.rank == 0:
        model.parameters()[0].data[0, 0] += 1
    with pytest.raises(RankMismatch, match=r"values of 0\.1\.weight"):
        engine(comm, model)
