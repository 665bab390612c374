"""Training by PyTorch over the backend: gradients of every kind of parallelism equal those of one process."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'chorus-mpi[torch]'")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import collectives.torch  # noqa: E402
from collectives.torch import Int8State, PowerSGDState, int8_hook, powersgd_hook  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs/guide/torch_backend.md"

pytestmark = pytest.mark.filterwarnings("ignore:.*barrier", "ignore:TypedStorage", "ignore:DTensor random")


@pytest.fixture(scope="module", params=[False, True], ids=["inline", "overlap"])
def overlaps(request):
    return request.param


@pytest.fixture(scope="module")
def group(overlaps):
    collectives.torch.init(timeout=60, overlap=overlaps)
    yield dist.group.WORLD
    dist.destroy_process_group()


def made():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 6))


def samples(size):
    torch.manual_seed(4)
    return torch.randn(4 * size, 12)


def whole_gradients(size):
    """Gradients of the mean over all samples, in one process."""
    model = made()
    model(samples(size)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def share(group):
    rank = group.rank()
    return samples(group.size())[4 * rank : 4 * rank + 4]


def assert_close(found, expected, tolerance=1e-6):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bucket", [25, 1e-3])
def test_ddp(group, bucket):
    model = DistributedDataParallel(made(), bucket_cap_mb=bucket)
    for _ in range(3):  # buckets are made anew after the first step
        model.zero_grad()
        model(share(group)).square().mean().backward()
        assert_close([each.grad for each in model.parameters()], whole_gradients(group.size()))


def test_ddp_with_sparse_gradients_and_unused_parameters(group):
    torch.manual_seed(5)
    model = nn.ModuleDict({"table": nn.Embedding(7, 3, sparse=True), "unused": nn.Linear(2, 2)})
    size, rank, expected = group.size(), group.rank(), torch.zeros(7, 3)

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, index):
            return self.parts["table"](index).sum()

    replica = DistributedDataParallel(Lookup(), find_unused_parameters=True)
    replica(torch.tensor([rank, 6])).backward()
    for each in range(size):
        expected[[each, 6]] += 1 / size
    torch.testing.assert_close(model["table"].weight.grad.to_dense(), expected)


def trained(group, model, steps):
    """Losses of some steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(share(group)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gradients_of(group, model, steps):
    """Gradients of the last of some steps with equal ones, their mean over the steps, and the exact ones."""
    total = 0.0
    for _ in range(steps):
        model.zero_grad()
        model(share(group)).square().mean().backward()
        once = torch.cat([each.grad.flatten() for each in model.parameters()])
        total = total + once
    return once, total / steps, torch.cat([each.flatten() for each in whole_gradients(group.size())])


def test_int8_hook_feeds_errors_back(group):
    """The means of many steps with equal gradients approach the exact mean, as no step loses anything for good."""
    model = DistributedDataParallel(made())
    model.register_comm_hook(Int8State(model), int8_hook)
    once, mean, exact = gradients_of(group, model, 16)
    assert group.size() == 1 or not once.equal(exact)
    assert (once - exact).abs().max() < 0.02 * exact.abs().max()
    assert (mean - exact).abs().max() < 2e-3 * exact.abs().max()


def test_int8_hook_trains_and_resumes(group):
    model, again = (DistributedDataParallel(made(), bucket_cap_mb=1e-3) for _ in range(2))
    state, restored = Int8State(model), Int8State(again)
    model.register_comm_hook(state, int8_hook)
    losses = trained(group, model, 25)
    assert losses[-1] < 0.3 * losses[0]
    again.load_state_dict(model.state_dict())
    again.register_comm_hook(restored, int8_hook)
    restored.load_state_dict(state.state_dict())
    assert restored.lost.keys() == state.lost.keys() and len(state.lost) > 1
    torch.testing.assert_close(trained(group, again, 2), trained(group, model, 2), rtol=1e-3, atol=1e-4)


def test_int8_hook_over_other_backends(group):
    model = DistributedDataParallel(made())
    model.process_group = None
    with pytest.raises(TypeError, match="backend chorus"):
        Int8State(model)


def sent(group, monkeypatch):
    """Lengths of the arrays that Allreduce gets."""
    lengths, allreduce = [], group.communicator.Allreduce
    monkeypatch.setattr(group.communicator, "Allreduce", lambda here, x: (lengths.append(x.size), allreduce(here, x)))
    return lengths


def test_powersgd_is_exact_at_full_rank(group, monkeypatch):
    """A factorisation of as many columns as the gradients' rank loses nothing; vectors are summed whole."""
    model = DistributedDataParallel(made())
    state, lengths = PowerSGDState(model, rank=4 * group.size()), sent(group, monkeypatch)
    model.register_comm_hook(state, powersgd_hook)
    model(share(group)).square().mean().backward()
    assert_close([each.grad for each in model.parameters()], whole_gradients(group.size()), 1e-5)
    weights = [each for each in model.parameters() if each.dim() > 1]
    cut = [each for each in weights if state.rank * sum(each.shape) < each.numel()]
    assert len(state.lost) == len(state.right) == len(cut) and (cut or group.size() > 1)
    left = sum(each.numel() for each in model.parameters()) - sum(each.numel() for each in cut)
    expected = [left + state.rank * sum(len(each) for each in cut), state.rank * sum(each.shape[1] for each in cut)]
    assert lengths == [length for length in expected if length]


def test_powersgd_feeds_errors_back_and_resumes(group):
    model, again = (DistributedDataParallel(made(), bucket_cap_mb=1e-3) for _ in range(2))
    state, restored = PowerSGDState(model, rank=2, seed=3), PowerSGDState(again, rank=2)
    model.register_comm_hook(state, powersgd_hook)
    again.register_comm_hook(restored, powersgd_hook)
    once, mean, exact = gradients_of(group, model, 40)
    assert (once - exact).abs().max() > 4 * (mean - exact).abs().max()
    losses = trained(group, model, 25)
    assert losses[-1] < 0.3 * losses[0]
    again.load_state_dict(model.state_dict())
    restored.load_state_dict(state.state_dict())
    assert restored.lost.keys() == state.lost.keys() and len(state.lost) > 1
    assert trained(group, again, 2) == trained(group, model, 2)
    with pytest.raises(ValueError, match="rank: expected a number above 0"):
        PowerSGDState(model, rank=0)


def test_powersgd_of_pytorch(group, overlaps):
    """A hook whose callbacks make further calls: with a thread their order would differ between ranks."""
    if overlaps:
        pytest.skip("a thread overlaps calls")
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(made())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = trained(group, model, 25)
    assert losses[-1] < 0.3 * losses[0] and state.error_dict


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="fully_shard of PyTorch before 2.6 is for CUDA alone")
def test_fully_shard(group):
    from torch.distributed.fsdp import fully_shard

    model = made()
    for module in (*(each for each in model if isinstance(each, nn.Linear)), model):
        fully_shard(module)
    model(share(group)).square().mean().backward()
    assert_close([each.grad.full_tensor() for each in model.parameters()], whole_gradients(group.size()))


def test_tensor_parallel(group):
    if group.size() == 1 and torch.__version__ < (2, 6):
        pytest.skip("PyTorch before 2.6 has an IndexError on one rank")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, model = init_device_mesh("cpu", (group.size(),)), made()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model(samples(group.size())).square().mean().backward()
    found = [getattr(each.grad, "full_tensor", lambda each=each: each.grad)() for each in model.parameters()]
    assert_close(found, whole_gradients(group.size()))


@pytest.mark.parametrize("example", [torch.ones(2, 12), None], ids=["shapes given", "shapes sent"])
def test_pipeline(group, example):
    if example is None and torch.__version__ < (2, 6):
        pytest.skip("PyTorch before 2.6 needs an example of a stage's input")
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(7)
    size, rank = group.size(), group.rank()
    microbatches = max(2, size)
    layers = [nn.Linear(12, 12) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"), input_args=example)
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=lambda y, target: (y - target).square().mean())
    x, target = torch.randn(2 * microbatches, 12), torch.zeros(2 * microbatches, 12)
    arguments, last = (x,) if rank == 0 else (), {"target": target} if rank == size - 1 else {}
    schedule.step(*arguments, **last)
    found = layers[rank].weight.grad.clone()
    if torch.__version__ < (2, 6):  # leaves it to the program
        found /= microbatches
    for layer in layers:
        layer.zero_grad()
    (nn.Sequential(*layers)(x) - target).square().mean().backward()
    torch.testing.assert_close(found, layers[rank].weight.grad)


def test_distributed_checkpoint(group, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, values = init_device_mesh("cpu", (group.size(),)), torch.arange(30.0).view(10, 3)
    dcp.save({"x": distribute_tensor(values, mesh, [Shard(0)])}, checkpoint_id=folder / "saved")
    found = {"x": distribute_tensor(torch.zeros(10, 3), mesh, [Replicate()])}
    dcp.load(found, checkpoint_id=folder / "saved")
    assert found["x"].to_local().equal(values)
