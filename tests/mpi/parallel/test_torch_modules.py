"""Modules of PyTorch in every layout: losses, running statistics, checkpoints, random numbers, refusals."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'chorus-mpi[torch]'")
from support import torch_models  # noqa: E402
from support.torch_models import MICRO, NETWORKS, SAMPLES, STEPS, batch, blocks, trained  # noqa: E402

from parallel import SGD, Engine, nn  # noqa: E402
from parallel.nn.placement import PlacementError  # noqa: E402
from parallel.runtime.consistency_check import RankMismatch, StepFailed  # noqa: E402

PRECISIONS = {"float32": ("fp32", 1e-6), "float64": ("fp64", 1e-12)}
LAYOUTS = ["dp", "zero3", "pp:1f1b"]


def engine(comm, some, layout="dp", **options):
    model = nn.Sequential([one if isinstance(one, nn.Operator) else nn.from_torch(one) for one in some])
    cut = {"microbatches": SAMPLES // MICRO} if layout.startswith("pp") else {"micro_batch": MICRO}
    options = {"batch": SAMPLES, **cut, **options}
    return Engine(model, nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1, momentum=0.9), layout=layout, **options)


def losses(one, x, y, steps):
    return [one.step(x, y).loss for _ in range(steps)]


def of_steps(comm, make, layout, steps=4, **options):
    with engine(comm, blocks(make), layout, **options) as one:
        return losses(one, *batch(make.__name__), steps)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_like_pytorch(comm, name, layout, dtype):
    """Of 20 steps, and of an evaluation with the running statistics."""
    precision, tolerance = PRECISIONS[dtype]
    x, y = batch(name, dtype)
    with engine(comm, blocks(NETWORKS[name], dtype), layout, precision=precision) as one:
        found = [*losses(one, x, y, STEPS), one.evaluate(x, y).loss]
    np.testing.assert_allclose(found, trained(blocks(NETWORKS[name], dtype), x, y), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{"reproducible": True}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("layout", ["dp", "zero1", "zero2", "zero3", "pp:1f1b", "pp:zb-h1"])
def test_dropout_does_not_depend_on_layouts(comm, world, layout, options):
    """Bits of one rank if reproducible; recomputed passes have the same masks."""
    from mpi4py import MPI

    make = torch_models.dropout
    if options.pop("recompute", False):
        some = [nn.Recompute(nn.from_torch(block)) for block in blocks(make)]
        with engine(comm, some, layout) as one:
            found = losses(one, *batch("dropout"), 4)
        assert found == pytest.approx(of_steps(MPI.COMM_SELF, make, "dp"), rel=1e-5)
    else:
        expected = of_steps(MPI.COMM_SELF, make, "dp", reproducible=True)
        assert of_steps(comm, make, layout, reproducible=True) == expected
        assert of_steps(comm, make, layout, seed=5, reproducible=True)[0] != expected[0]


@pytest.mark.parametrize("layout, options", [("ps", {}), ("dp", {"compress": "int8"}), ("dp", {"precision": "bf16"})])
def test_losses_near_those_of_pytorch(comm, layout, options):
    if layout == "ps" and comm.Get_size() == 1:
        pytest.skip("servers need workers beside them")
    x, y = batch("encoder")
    expected = trained(blocks(torch_models.encoder), x, y, 6)[:6]
    with engine(comm, blocks(torch_models.encoder), layout, **options) as one:
        reports = [one.step(x, y) for _ in range(6)]
    if one.is_reporter:
        assert [report.loss for report in reports] == pytest.approx(expected, rel=1e-5 if layout == "ps" else 2e-2)


def test_checkpoint_has_running_statistics(comm, folder):
    """Two steps, a checkpoint, and a third in another layout: as three in one."""
    x, y = batch("resnet")
    with engine(comm, blocks(torch_models.resnet)) as one:
        expected = [*losses(one, x, y, 3), one.evaluate(x, y).loss]
        last = one.state_dict()
    with engine(comm, blocks(torch_models.resnet), "zero3") as one:
        losses(one, x, y, 2)
        one.save(folder)
        state = one.state_dict()
    assert state["1.norms.0.num_batches_tracked"] == 2 and state["0.1.running_mean"].any()
    with engine(comm, blocks(torch_models.resnet), "pp:1f1b") as one:
        one.load(folder)
        found = [one.step(x, y).loss, one.evaluate(x, y).loss]
        assert found == pytest.approx(expected[2:], rel=1e-5)
        one.load_state_dict(state)
        assert one.state_dict()["1.norms.0.num_batches_tracked"] == 2
        one.load_state_dict(last)
        assert one.evaluate(x, y).loss == pytest.approx(expected[-1], rel=1e-6)


def test_tied_blocks_on_several_stages(comm):
    """A tensor of two blocks is one parameter, whose gradients are added between stages."""

    def tied():
        first, last = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False)
        last.weight = first.weight
        return [first, torch.nn.Tanh(), last, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(42, 5))]

    x, y = batch("encoder")
    expected = trained(blocks(tied), x, y, 5)[:5]
    for layout in LAYOUTS:
        with engine(comm, blocks(tied), layout) as one:
            assert losses(one, x, y, 5) == pytest.approx(expected, rel=1e-6)
            assert [name for name in one.state_dict() if name != "3.1.weight"] == ["0.weight", "3.1.bias"]


@pytest.mark.parametrize("layout", ["pp:pipedream", "pp:pipedream-2bw", "pp:zb-v", "pp:auto"])
def test_schedules_like_our_operators(comm, layout):
    """Also of several versions of the weights, which backward passes find in other places than forward passes."""
    from parallel.torch import from_torch_state

    if comm.Get_size() == 1 and layout == "pp:zb-v":
        pytest.skip("two stages at least")

    def linear():
        return [torch.nn.Linear(42, 8), *(torch.nn.Linear(8, 8) for _ in range(6)), torch.nn.Linear(8, 5)]

    x, y = batch("encoder")
    x, found = x.reshape(len(x), -1), []
    some = blocks(linear)
    ours = [nn.Linear(one.in_features, one.out_features) for one in some]
    state, cuts = torch.nn.Sequential(*some).state_dict(), {}
    for operators in (ours, some):
        with engine(comm, operators, layout, example=(x[:MICRO], y[:MICRO]), **cuts) as one:
            one.load_state_dict(from_torch_state(one.model, state))
            found.append(losses(one, x, y, 4))
            if layout != "pp:auto":  # a layer's versions of weights depend on its stage: not measured again
                cuts = {"cuts": one.settings.cuts}
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_measured_stages_of_tuples(comm):
    """Blocks with tuples are timed for equal stages, and train as others."""
    x, y = batch("lstm")
    with engine(comm, blocks(torch_models.lstm), "pp:1f1b", example=(x[:MICRO], y[:MICRO])) as one:
        assert losses(one, x, y, 3) == pytest.approx(trained(blocks(torch_models.lstm), x, y, 3)[:3], rel=1e-6)


@pytest.mark.ranks(2)
def test_refusals(comm):
    if comm.Get_size() != 2:
        pytest.skip("a mesh of two ranks")
    with pytest.raises(PlacementError, match="tp: expected a model with a table `cuts`"):
        engine(comm, blocks(torch_models.encoder), mesh="tp=2")
    with pytest.raises(PlacementError, match="TorchModule 0: expected another placement along cp"):
        engine(comm, blocks(torch_models.encoder), mesh="cp=2")
    for layout in ("ps", "local"):
        with pytest.raises(ValueError, match=rf"layout {layout}: .* without buffers, .*0\.1\.running_mean"):
            engine(comm, blocks(torch_models.resnet), layout)
    with pytest.raises(ValueError, match="fake_quant: expected a model with layers"):
        engine(comm, blocks(torch_models.encoder), fake_quant="int8")
    torch.manual_seed(comm.Get_rank())
    with pytest.raises(RankMismatch, match=r"values of 0\.weight"):
        engine(comm, torch_models.encoder())


def test_errors_name_the_module(comm):
    """On all ranks, and the next step trains."""
    x, y = batch("encoder")
    with engine(comm, blocks(torch_models.encoder)) as one:
        with pytest.raises(StepFailed, match=r"shapes cannot be multiplied.*in Linear, which TorchModule 0 computes"):
            one.step(x[..., :5], y)
        assert one.step(x, y).loss > 0
