"""`ProcessGroup`: the process group of PyTorch whose collectives are those of a `Communicator`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d as c10d

from collectives.communicator import Communicator
from collectives.errors import Mismatch, Timeout
from collectives.runtime.execution.progress import mpi_is_thread_safe
from collectives.runtime.methods.collective_forms import DECLARATIONS
from collectives.selection.select import algorithms
from collectives.torch.messages import Messages
from collectives.torch.operations import OPERATIONS, Collectives, GroupOperation
from collectives.torch.work import DONE, OverlappedWork, SeveralWork, Worker, complete

RENAMED = {"Bcast": "broadcast", "Reduce_scatter_block": "reduce_scatter"}
"""Collectives by method of a communicator, unless that is the method's name in lower case, without a v."""


def algorithms_of(options: Mapping[str, str]) -> dict[str, str]:
    """Algorithm by method of a communicator, of algorithms by collective. ValueError for unknown ones."""
    chosen: dict[str, str] = {}
    collective_of = {each.name: RENAMED.get(each.name, each.name.lower().removesuffix("v")) for each in DECLARATIONS}
    for collective, algorithm in options.items():
        if collective not in collective_of.values():
            expected = sorted({"overlap", *collective_of.values()})
            raise ValueError(f"pg_options: expected some of {', '.join(expected)}, found {collective!r}")
        if algorithm not in ("auto", *(known := algorithms(collective))):
            raise ValueError(
                f"pg_options: {collective} has no algorithm {algorithm!r}; known: auto, {', '.join(known)}"
            )
        chosen |= {method: algorithm for method, name in collective_of.items() if name == collective}
    return chosen


class ProcessGroup(dist.ProcessGroup):
    """Process group of backend ``"chorus"``. PyTorch makes it in `init_process_group` and `new_group`. Collective.

    Collectives run inline: a call with ``async_op=True`` is complete when it returns, so that C++ code may wait for it.
    With `overlap` such calls run in a thread, on a second communicator, in the order in which they were made.
    Messages between two ranks are MPI's and progress while their rank waits.

    Tensors are CPU tensors of any dtype that NumPy or ml_dtypes has, of any layout; dense ones are used in place,
    others are copied. `allreduce` also takes sparse COO tensors. Integer averages are rounded towards zero; of bools
    a sum is "or". Calls with tensors on another device go to a group over the backend that the program has named for
    it, as in "cpu:chorus,cuda:nccl".

    Parameters
    ----------
    store : torch.distributed.Store
    comm : Communicator
        Of the group's ranks, in order. The group frees it.
    timeout : float
        Seconds that a call may take that has no timeout of its own.
    options : dict
        ``overlap``: bool, default False. All other keys are collectives, with the algorithm to use, as in
        ``{"allreduce": "ring"}``; the same on all ranks.

    Raises
    ------
    ValueError
        If an option is unknown, or the MPI is not for several threads, which `overlap` needs.
    torch.distributed.DistBackendError
        From every method, if a call fails or its time is up; the message names rank, group and call.
    """

    def __init__(self, store: dist.Store, comm: Communicator, timeout: float, options: Mapping[str, Any]) -> None:
        self._comm, self._rank, self._size = comm, comm.Get_rank(), comm.Get_size()
        overlap = options.get("overlap", False)
        if overlap and not mpi_is_thread_safe():
            raise ValueError("pg_options: overlap needs an MPI with MPI.THREAD_MULTIPLE")
        super().__init__(self._rank, self._size)
        algorithms = algorithms_of({key: value for key, value in options.items() if key != "overlap"})
        self._inline = Collectives(comm, self._rank, self._size, algorithms, timeout)
        self._store = store
        self._messages = Messages(comm)
        self._worker = Worker(comm.Dup()) if overlap else None
        self._turn, self._has_failed = 0, False
        self._coalesced: list[dist.Work] | None = None
        self._others: dict[str, dist.ProcessGroup] = {}
        self._name = ""

    def other(self, device: torch.device) -> dist.ProcessGroup:
        """Group of the same ranks for tensors on another device than the CPU. Collective in the first call.

        TypeError if the program has named no backend for such a device.
        """
        if device.type not in self._others:
            backends = c10d.BackendConfig(c10d.Backend(c10d._world.pg_backend_config[self])).get_device_backend_map()
            if backends.get(device.type, "chorus") == "chorus":
                expected = f"CPU tensors, or a backend for others as in 'cpu:chorus,{device.type}:nccl'"
                raise TypeError(f"expected {expected}; found a tensor on {device}")
            options = {"backend": backends[device.type], "timeout": timedelta(seconds=self._inline.timeout)}
            ranks = dist.get_process_group_ranks(self)
            self._others[device.type] = dist.new_group(ranks, use_local_synchronization=True, **options)
        return self._others[device.type]

    def _call(self, operation: GroupOperation, name: str, arguments: Sequence[Any], keywords: Any) -> dist.Work:
        """Run a collective by one of its names, or submit it to the thread."""
        given, options = _normalized(operation, arguments, keywords)
        if (first := _first(given)) is not None and not first.is_cpu:
            return getattr(self.other(first.device), name)(*arguments, **keywords)
        seconds = options.timeout.total_seconds()  # negative if not set
        is_async, label = getattr(options, "asyncOp", True), (operation.names, self._next_turn())
        on = self._inline if seconds <= 0 else self._inline._replace(timeout=seconds)
        if is_async and self._worker is not None:
            if threading.current_thread() is self._worker:
                raise RuntimeError("overlap: a callback of a call makes another one, in no order that ranks share")
            on = on._replace(comm=self._worker.comm)
            later = partial(self._guard, label, operation.run, on, *given, options)
            return self._noted(self._worker.submit(OverlappedWork(_results(given), later)))
        self._guard(label, operation.run, on, *given, options)
        return self._noted(complete(_results(given))) if is_async else DONE

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _guard(self, label: tuple[str, int], run: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function. Its errors of communication become PyTorch's, with the name and number of the call."""
        try:
            return run(*arguments)
        except MPI.Exception as error:
            self._has_failed = True
            name, turn = label
            where = f"{name.split()[0]} #{turn} on rank {self._rank} of {self._size} in group {self.group_name}"
            raise dist.DistBackendError(f"{where}:{' timeout in' * isinstance(error, Timeout)} {error}") from error

    def _noted(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _message(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        if not tensors[0].is_cpu:
            other = self.other(tensors[0].device)
            return (
                other.recv_anysource(tensors, tag)
                if peer == MPI.ANY_SOURCE
                else getattr(other, name)(tensors, peer, tag)
            )
        guard = partial(self._guard, (name, self._next_turn()))
        return self._noted(guard(self._messages.start, tensors, peer, tag, name == "send", self._inline.timeout, guard))

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        """Start to send a tensor to a rank of the group."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        """Start to receive a tensor from a rank of the group."""
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        """Start to receive a tensor from any rank of the group, the result's ``source_rank()``."""
        return self._message("recv", tensors, MPI.ANY_SOURCE, tag)

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin a group of calls."""
        if device is not None and device.type != "cpu":
            self.other(device)._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        """End a group of calls. Return one handle for all."""
        if device is not None and device.type != "cpu":
            return self.other(device)._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return SeveralWork(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Barrier in which rank 0 raises after `timeout`, and names the first missing rank, or all of them."""
        seconds = self._inline.timeout if timeout is None else timeout.total_seconds()
        label = "monitored_barrier", self._next_turn()
        self._guard(label, self._messages.monitored_barrier, seconds, wait_all_ranks)

    @property
    def communicator(self) -> Communicator:
        """Communicator of the group's ranks, for arrays."""
        return self._comm

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *map(torch.device, self._others)]

    def getBackendName(self) -> str:
        return "chorus"

    _get_backend_name = getBackendName

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    _set_group_name, group_name = setGroupName, property(getGroupName)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of calls that have none of their own."""
        self._inline = self._inline._replace(timeout=timeout.total_seconds())

    _set_default_timeout = set_timeout

    def get_group_store(self) -> dist.Store:
        return self._store

    def shutdown(self) -> None:
        """Release the communicators. Collective, unless a call has failed: then other ranks may be gone."""
        comms = [self._comm]
        if self._worker is not None and self._worker.close():  # else the thread still uses its own
            comms.append(self._worker.comm)
        for comm in comms:
            try:
                (comm.close if self._has_failed else comm.Free)()
            except Mismatch as error:
                if not self._has_failed:  # else messages of the failed call may well be unread
                    warnings.warn(f"end of process group {self.group_name}: {error}", stacklevel=2)
        self._worker = None

    abort = shutdown


def _first(given: Sequence[Any]) -> torch.Tensor | None:
    """First tensor of the arguments of a call, in lists of any depth. None if there is none, as in a barrier."""
    for value in given:
        if isinstance(value, list | tuple):
            value = _first(value)
        if isinstance(value, torch.Tensor):
            return value
    return None


def _results(given: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors, or lists of them, that receive the results of a call: its first argument."""
    first: Any = given[0] if given else []
    return [first] if isinstance(first, torch.Tensor) else first


def _normalized(operation: GroupOperation, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, Any]:
    """Tensors and options of a call in any of its forms: PyTorch's options last, or single ones in their place."""
    if len(arguments) == len(operation.nesting) + 1 and type(arguments[-1]) is operation.options:  # of most calls
        return list(map(_nested, arguments, operation.nesting)), arguments[-1]
    given = [*arguments, *(value for key, value in keywords.items() if key not in operation.fields.split())]
    if given and hasattr(given[-1], "timeout"):
        options = given.pop()
    else:
        options = operation.options()
        for name, value in [*zip(operation.fields.split(), given[len(operation.nesting) :]), *keywords.items()]:
            if name in operation.fields.split() and value is not None:
                setattr(options, name, value)
    return [_nested(*each) for each in zip(given, operation.nesting)], options


def _nested(value: Any, depth: int) -> Any:
    """Tensor, or list of tensors, inside further lists up to a depth. Empty lists are as deep as they need be."""
    if depth == 1 and type(value) is list:
        return value
    inner = value
    for missing in range(depth, 0, -1):
        if not isinstance(inner, list | tuple):
            return [value] if missing == 1 else [[value]]
        if not inner:
            break
        inner = inner[0]
    return value


def _method(operation: GroupOperation, name: str) -> Callable[..., dist.Work]:
    def call(self: ProcessGroup, *arguments: Any, **keywords: Any) -> dist.Work:
        return self._call(operation, name, arguments, keywords)

    call.__name__, call.__qualname__ = name, f"ProcessGroup.{name}"
    call.__doc__ = f"Collective `{operation.names.split()[0]}`, with PyTorch's options, or with {operation.fields}."
    return call


for _operation in OPERATIONS:
    for _name in _operation.names.split():
        setattr(ProcessGroup, _name, _method(_operation, _name))
