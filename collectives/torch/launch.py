"""Registration of the backend, its groups of MPI ranks, and the start of `torch.distributed` under an MPI launcher."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d as c10d

from collectives.communicator import Communicator
from collectives.torch.process_group import ProcessGroup

NAME, METHOD = "chorus", "mpi"


def register() -> None:
    """Register the backend and the rendezvous method with PyTorch.

    PyTorch 2.5 ends groups of NCCL alone in `destroy_process_group`, later releases those of every backend.
    """
    dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])
    dist.register_rendezvous_handler(METHOD, rendezvous)
    if (plain := getattr(c10d, "_shutdown_backend", None)) is not None:
        c10d._shutdown_backend = lambda group: group.shutdown() if isinstance(group, ProcessGroup) else plain(group)


def make_group(options: Any, pg_options: Mapping[str, Any] | None) -> ProcessGroup:
    """Process group of the ranks that meet in the store of `options`. Collective over these.

    PyTorch's rank and MPI's may differ: each rank puts its MPI rank in the store, so that any numbering works, and a
    rank that does not come is reported after the store's timeout.
    """
    rank, size, store = options.group_rank, options.group_size, options.store
    world = MPI.COMM_WORLD
    if world.Get_size() < size:
        raise ValueError(
            f"backend chorus: expected {size} MPI ranks or more, found {world.Get_size()}: "
            f"start the program with mpiexec -n {size}"
        )
    store.set(f"mpi/{rank}", str(world.Get_rank()))
    keys = [f"mpi/{each}" for each in range(size)]
    store.wait(keys, options.timeout)
    ranks = [json.loads(value) for value in store.multi_get(keys)]
    group = world.Get_group()
    chosen = group.Incl(ranks)
    comm = Communicator(world.Create_group(chosen))
    chosen.Free()
    group.Free()
    return ProcessGroup(store, comm, options.timeout.total_seconds(), pg_options or {})


def rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Store, rank and size of this MPI job, for ``init_method="mpi://"``. Sets the variables PyTorch reads. Collective.

    Rank 0 holds the store.
    """
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_size = node.Get_rank(), node.Get_size()
    node.Free()
    host = "localhost" if world.allreduce(local_size == size, MPI.LAND) else world.bcast(socket.gethostname())
    store: dist.Store | None = None
    if rank == 0:
        store = dist.TCPStore(host, 0, size, True, wait_for_workers=False)
    port = world.bcast(store.port if store is not None else None)
    if store is None:
        store = dist.TCPStore(host, port, size, False)
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    os.environ.update(
        {name: str(value) for name, value in (values | {"MASTER_ADDR": host, "MASTER_PORT": port}).items()}
    )
    yield store, rank, size


def init(timeout: float | None = None, **options: Any) -> None:
    """Start `torch.distributed` with this backend under mpiexec or srun. Collective over ``MPI.COMM_WORLD``.

    As ``torch.distributed.init_process_group("chorus", init_method="mpi://")``. Sets the environment variables RANK,
    WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Parameters
    ----------
    timeout : float, optional
        Seconds that a call may take; PyTorch's default is half an hour.
    **options
        ``overlap=True`` and algorithms by collective, such as ``allreduce="ring"``: see `ProcessGroup`.

    Raises
    ------
    ValueError
        If an option is unknown, or `torch.distributed` has been started before.
    """
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group(NAME, init_method=f"{METHOD}://", timeout=limit, pg_options=options)
