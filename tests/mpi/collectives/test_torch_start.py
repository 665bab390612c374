"""Start and end of the backend of torch.distributed, and its options."""

import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'chorus-mpi[torch]'")
import torch.distributed as dist  # noqa: E402

from collectives.torch import init, race_cases  # noqa: E402
from collectives.torch.process_group import algorithms_of  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs/guide/torch_backend.md"
LIMIT = timedelta(seconds=30)


def test_algorithms_are_checked():
    assert algorithms_of({"allgather": "ring"}) == {"Allgather": "ring", "Allgatherv": "ring"}
    assert algorithms_of({"reduce_scatter": "ring"}).keys() == {"Reduce_scatter", "Reduce_scatter_block"}
    with pytest.raises(ValueError, match=r"known: auto, .*ring"):
        algorithms_of({"allreduce": "rings"})
    with pytest.raises(ValueError, match="all_reduce"):
        algorithms_of({"all_reduce": "ring"})


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("method", ["mpi://", None])
def test_start_by_pytorch(world, method, monkeypatch):
    """With ranks from MPI, or in reverse order from variables that a launcher has set."""
    rank = world.Get_rank()
    if method is None:
        rank = world.Get_size() - 1 - rank
        values = {"RANK": rank, "WORLD_SIZE": world.Get_size(), "MASTER_ADDR": "localhost"}
        for name, value in (values | {"MASTER_PORT": world.bcast(free_port())}).items():
            monkeypatch.setenv(name, str(value))
    dist.init_process_group("cpu:chorus", init_method=method, timeout=LIMIT)
    assert dist.get_rank() == rank
    mine = torch.tensor([rank])
    dist.broadcast(mine, 0)
    assert mine.item() == 0
    dist.destroy_process_group()


class RecordedCalls:
    """Group that keeps the names of the methods that are called."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        return lambda *arguments: self.names.append(name)


def test_a_backend_for_another_device(world):
    """CUDA tensors, here without memory, go to the backend that is named for them, here a fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg.FakeStore  # its module registers the backend
    dist.init_process_group("cpu:chorus,cuda:fake", init_method="mpi://", timeout=LIMIT)
    group, size, mine = dist.group.WORLD, world.Get_size(), torch.ones(2)
    made = group.other(torch.device("cuda"))
    assert dist.get_backend(made) == "fake" and (made.rank(), made.size()) == (world.Get_rank(), size)
    assert [each.type for each in group._device_types] == ["cpu", "cuda"]
    calls = group._others["cuda"] = RecordedCalls()
    with FakeTensorMode():
        there = torch.ones(2, device="cuda")
        group.allreduce([there]), group._allgather_base(there, there), group.alltoall_base(there, there, [], [])
        group.send([there], 0, 1), group.recv([there], 0, 1), group.recv_anysource([there], 1)
        group._start_coalescing(there.device), group.broadcast([there]), group._end_coalescing(there.device)
    collectives = ["allreduce", "_allgather_base", "alltoall_base", "send", "recv", "recv_anysource"]
    assert calls.names == [*collectives, "_start_coalescing", "broadcast", "_end_coalescing"]
    dist.all_reduce(mine)
    assert mine.tolist() == [size, size]
    with pytest.raises(TypeError, match="as in 'cpu:chorus,meta:nccl'; found a tensor on meta"):
        dist.all_reduce(torch.ones(2, device="meta"))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*existing checkpoint", "ignore:TypedStorage")
@pytest.mark.skipif(torch.__version__ < (2, 6), reason="fully_shard of PyTorch before 2.6 is for CUDA alone")
def test_page(world, folder, monkeypatch):
    """The programs of the guide, as one."""
    monkeypatch.chdir(folder)
    source = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(compile(source, PAGE, "exec"), {"__name__": "page"})


SMALL = ["--against=gloo", "--collective=all", "--sizes=0,20", "--iterations=5", "--warmup=2", "--seconds=0"]


def test_race_against_gloo(world, capsys):
    from collectives.cli import bench

    try:
        report = bench.bench_torch(bench.parse(SMALL))
    finally:
        dist.destroy_process_group()
    rows = report["rows"]
    assert {row["collective"] for row in rows} == {*race_cases.CASES} and len(rows) == 2 * len(race_cases.CASES) - 1
    assert not any(row["wrong"] or row["native_wrong"] for row in rows)
    assert all(row["native_us"] > 0 for row in rows)
    for wrong in ("--algorithm ring", "--in-place", "--dtype int32"):
        with pytest.raises(SystemExit):
            bench.parse([*SMALL, *wrong.split()])


def test_race_finds_wrong_results(world):
    init(timeout=20)
    for name in filter("barrier".__ne__, race_cases.CASES):
        buffers = race_cases.RaceBuffers(dist.group.WORLD, name, 40)
        buffers.advance()
        buffers.call()
        assert buffers.wrong() == 0
        for tensor in (buffers.whole, buffers.block, buffers.other):
            tensor += 1
        on_root = name in ("reduce", "gather")
        assert (buffers.wrong() > 0) == (not on_root or world.Get_rank() == 0)
    dist.destroy_process_group()
