"""The same model trained by `Engine` and by PyTorch's DistributedDataParallel over the backend: the same bits."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'chorus-mpi[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import collectives.torch  # noqa: E402
from parallel import SGD, Engine, nn  # noqa: E402

SHARE, OUTPUTS, STEPS, RATE = 4, 4, 5, 0.25  # powers of two: scaling by them is exact
PRECISIONS = {"float32": "fp32", "float64": "fp64"}

pytestmark = pytest.mark.ranks(2, 3)


def network(dtype):
    torch.manual_seed(1)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, OUTPUTS)
    return torch.nn.Sequential(*layers).to(getattr(torch, dtype))


def samples(ranks, dtype):
    random = np.random.default_rng(0)
    return [random.standard_normal((SHARE * ranks, columns)).astype(dtype) for columns in (6, OUTPUTS)]


def trained_by_engine(comm, dtype):
    model, ranks = nn.Sequential(nn.from_torch(network(dtype))), comm.Get_size()
    options = {"batch": SHARE * ranks, "micro_batch": SHARE, "precision": PRECISIONS[dtype], "reproducible": True}
    with Engine(model, nn.MSE(), comm, SGD(lr=RATE), **options) as engine:
        for _ in range(STEPS):
            engine.step(*samples(ranks, dtype))
        return np.concatenate([*map(np.ravel, engine.state_dict().values())])


def summed_first(group, bucket):
    """Hook that sums gradients and then divides the sum, as `Engine` does: by a product with the reciprocal."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].mul_(1 / group.size()))


def trained_by_ddp(comm, dtype, bucket_mb, hook):
    rank, ranks = comm.Get_rank(), comm.Get_size()
    x, y = (torch.from_numpy(each[rank * SHARE :][:SHARE]) for each in samples(ranks, dtype))
    model = DistributedDataParallel(network(dtype), bucket_cap_mb=bucket_mb)
    if hook is not None:
        model.register_comm_hook(dist.group.WORLD, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_bits_of_the_engine(comm, dtype, overlap):
    """With the order `tree`. DDP divides gradients before their sum: exact for 2^k ranks, else unlike `Engine`."""
    collectives.torch.init(timeout=60, overlap=overlap, allreduce="tree")
    try:
        expected = trained_by_engine(comm, dtype)
        for bucket_mb in (25, 1e-4):
            assert np.array_equal(trained_by_ddp(comm, dtype, bucket_mb, summed_first), expected)
            plain, ranks = trained_by_ddp(comm, dtype, bucket_mb, None), comm.Get_size()
            assert np.array_equal(plain, expected) or ranks & (ranks - 1)
            one_rounding = np.finfo(dtype).eps * np.abs(expected).max()
            assert np.abs(plain - expected).max() <= STEPS * one_rounding
    finally:
        dist.destroy_process_group()
