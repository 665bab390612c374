"""Start and end of the backend of torch.distributed, and its options."""

import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'chorus-mpi[torch]'")
import torch.distributed as dist  # noqa: E402

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


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*existing checkpoint")
def test_page(world, folder, monkeypatch):
    """The programs of the guide, as one."""
    monkeypatch.chdir(folder)
    source = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(compile(source, PAGE, "exec"), {"__name__": "page"})
