"""The collectives of a process group, in a table: the names of its methods, their options, and what each one does.

Every function gets a `Collectives`, the tensors and PyTorch's options, and leaves the results in the tensors. Lists of
tensors count as one block; results of non-contiguous tensors are received in a copy and stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch.distributed import distributed_c10d as c10d

from collectives.communicator import Communicator
from collectives.torch.reductions import reduction_of, sum_sparse
from collectives.torch.tensors import Block, array_of

Tensors = Sequence[torch.Tensor]


class Collectives(NamedTuple):
    """Communicator of one call, with the settings of its collectives."""

    comm: Communicator
    rank: int
    size: int
    algorithms: dict[str, str]
    """Algorithm by method of the communicator, where the user has chosen one."""
    timeout: float
    """Seconds."""

    def run(self, name: str, *arguments: Any) -> None:
        """Call the communicator's method `name`, such as ``Allreduce``."""
        getattr(self.comm, name)(*arguments, algorithm=self.algorithms.get(name, "auto"), timeout=self.timeout)


class Operation(NamedTuple):
    """One collective of process groups."""

    names: tuple[str, ...]
    """Names of its methods, those of all generations of PyTorch."""
    options: type
    """PyTorch's class of its options, the last argument."""
    fields: tuple[str, ...]
    """Options that may be given in place of that class, in order, in the short form of a call."""
    nesting: tuple[int, ...]
    """Depth of the lists of tensors that each argument before the options is; 0 for a single tensor, or a value."""
    run: Callable[..., None]
    """Function (collectives, tensors ..., options)."""


def _sizes(tensors: Tensors) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _are_even(tensors: Tensors) -> bool:
    return len(set(_sizes(tensors))) <= 1


def _flat(lists: Sequence[Tensors]) -> Tensors:
    return list(chain.from_iterable(lists))


def _allreduce(on: Collectives, tensors: Tensors, options: Any) -> None:
    reduction = reduction_of(options.reduceOp)
    for tensor in tensors:
        if tensor.is_sparse:
            sum_sparse(tensor, partial(_gather_any, on))
            reduction.finish(tensor, on.size)
    dense = [tensor for tensor in tensors if not tensor.is_sparse]
    if dense:
        block = Block(dense)
        reduction.operand(block.tensor, in_place=True)
        on.run("Allreduce", MPI.IN_PLACE, block.array, reduction.op)
        reduction.finish(block.tensor, on.size)
        block.store()


def _gather_any(on: Collectives, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of all ranks, of any length."""
    counts = torch.empty(on.size, dtype=torch.int64)
    on.run("Allgather", array_of(torch.tensor([tensor.numel()])), array_of(counts))
    found = tensor.new_empty([counts.sum()])
    on.run("Allgatherv", array_of(tensor), [array_of(found), counts.tolist()])
    return list(found.split(counts.tolist()))


def _broadcast(on: Collectives, tensors: Tensors, options: Any) -> None:
    block = Block(tensors)
    on.run("Bcast", block.array, options.rootRank)
    block.store()


def _reduce(on: Collectives, tensors: Tensors, options: Any) -> None:
    block, reduction, is_root = Block(tensors), reduction_of(options.reduceOp), on.rank == options.rootRank
    operand = array_of(reduction.operand(block.tensor, in_place=is_root))
    buffers = (MPI.IN_PLACE, operand) if is_root else (operand, None)
    on.run("Reduce", *buffers, reduction.op, options.rootRank)
    if is_root:
        reduction.finish(block.tensor, on.size)
        block.store()


def _allgather(on: Collectives, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> None:
    _gather_lists(on, outputs[0], inputs)


def _allgather_coalesced(on: Collectives, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> None:
    """Gather all of a rank's inputs at once: `outputs` has a list for each rank."""
    _gather_lists(on, _flat(outputs), inputs)


def _gather_lists(on: Collectives, outputs: Tensors, inputs: Tensors) -> None:
    sent, received = Block(inputs), Block(outputs, load=False)
    if len(inputs) > 1 or _are_even(outputs):
        on.run("Allgather", sent.array, received.array)
    else:
        on.run("Allgatherv", sent.array, [received.array, _sizes(outputs)])
    received.store()


def _all_gather_single(on: Collectives, output: torch.Tensor, inputs: torch.Tensor, options: Any) -> None:
    sent, received = Block([inputs]), Block([output], load=False)
    on.run("Allgather", sent.array, received.array)
    received.store()


def _gather(on: Collectives, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> None:
    sent = Block(inputs)
    if on.rank != options.rootRank:
        on.run("Gatherv", sent.array, None, options.rootRank)
        return
    received = Block(outputs[0], load=False)
    on.run("Gatherv", sent.array, [received.array, _sizes(outputs[0])], options.rootRank)
    received.store()


def _scatter(on: Collectives, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> None:
    received, sent = Block(outputs, load=False), None
    if on.rank == options.rootRank:
        sent = [Block(inputs[0]).array, _sizes(inputs[0])]
    on.run("Scatterv", sent, received.array, options.rootRank)
    received.store()


def _reduce_scatter(on: Collectives, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> None:
    _reduce_blocks(on, outputs, inputs[0], options, None if _are_even(inputs[0]) else _sizes(inputs[0]))


def _reduce_scatter_single(on: Collectives, output: torch.Tensor, inputs: torch.Tensor, options: Any) -> None:
    _reduce_blocks(on, [output], [inputs], options, None)


def _reduce_blocks(
    on: Collectives, outputs: Tensors, inputs: Tensors, options: Any, counts: Sequence[int] | None
) -> None:
    """Reduce-scatter with blocks of `counts` elements, or equal ones."""
    received, reduction = Block(outputs, load=False), reduction_of(options.reduceOp)
    operand = array_of(reduction.operand(Block(inputs).tensor, in_place=False))
    if counts is None:
        on.run("Reduce_scatter_block", operand, received.array, reduction.op)
    else:
        on.run("Reduce_scatter", operand, received.array, counts, reduction.op)
    reduction.finish(received.tensor, on.size)
    received.store()


def _all_to_all(on: Collectives, outputs: Tensors, inputs: Tensors, options: Any) -> None:
    sent, received = Block(inputs), Block(outputs, load=False)
    on.run("Alltoallv", [sent.array, _sizes(inputs)], [received.array, _sizes(outputs)])
    received.store()


def _all_to_all_single(
    on: Collectives,
    output: torch.Tensor,
    inputs: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    options: Any,
) -> None:
    """Exchange blocks of rows, of which there are as many as the lists of numbers have for each rank, or equal ones."""
    sent, received = Block([inputs]), Block([output], load=False)
    if not len(output_rows) and not len(input_rows):
        on.run("Alltoall", sent.array, received.array)
    else:
        sides = ((sent, inputs, input_rows), (received, output, output_rows))
        on.run("Alltoallv", *([block.array, _elements(tensor, rows, on.size)] for block, tensor, rows in sides))
    received.store()


def _elements(tensor: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Elements of each rank's block of a tensor."""
    length = tensor.shape[0]
    rows = rows or [length // size] * size
    if sum(rows) != length or len(rows) != size:
        raise ValueError(f"expected {size} split sizes of {length} rows in all, found {list(rows)}")
    return [count * (tensor.numel() // max(1, length)) for count in rows]


def _barrier(on: Collectives, options: Any) -> None:
    on.run("Barrier")


def _each(run: Callable[..., None], on: Collectives, outputs: Tensors, inputs: Tensors, options: Any) -> None:
    """Run a collective on one pair of tensors after the other."""
    for output, given in zip(outputs, inputs, strict=True):
        run(on, output, given, options)


OPERATIONS = (
    Operation(
        ("allreduce", "allreduce_coalesced"), c10d.AllreduceOptions, ("reduceOp", "timeout"), (1,), _allreduce
    ),
    Operation(("broadcast",), c10d.BroadcastOptions, ("rootRank", "timeout"), (1,), _broadcast),
    Operation(("reduce",), c10d.ReduceOptions, ("rootRank", "reduceOp", "timeout"), (1,), _reduce),
    Operation(("allgather",), c10d.AllgatherOptions, ("timeout",), (2, 1), _allgather),
    Operation(("allgather_coalesced",), c10d.AllgatherOptions, ("timeout",), (2, 1), _allgather_coalesced),
    Operation(
        ("all_gather_single", "_allgather_base"), c10d.AllgatherOptions, ("timeout",), (0, 0), _all_gather_single
    ),
    Operation(
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        c10d.AllgatherOptions,
        ("timeout",),
        (1, 1),
        partial(_each, _all_gather_single),
    ),
    Operation(("gather",), c10d.GatherOptions, ("rootRank", "timeout"), (2, 1), _gather),
    Operation(("scatter",), c10d.ScatterOptions, ("rootRank", "timeout"), (1, 2), _scatter),
    Operation(("reduce_scatter",), c10d.ReduceScatterOptions, ("reduceOp", "timeout"), (1, 2), _reduce_scatter),
    Operation(
        ("reduce_scatter_single", "_reduce_scatter_base"),
        c10d.ReduceScatterOptions,
        ("reduceOp", "timeout"),
        (0, 0),
        _reduce_scatter_single,
    ),
    Operation(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        c10d.ReduceScatterOptions,
        ("reduceOp", "timeout"),
        (1, 1),
        partial(_each, _reduce_scatter_single),
    ),
    Operation(("alltoall",), c10d.AllToAllOptions, ("timeout",), (1, 1), _all_to_all),
    Operation(("all_to_all_single", "alltoall_base"), c10d.AllToAllOptions, ("timeout",), (0, 0, 0, 0), _all_to_all_single),
    Operation(("barrier",), c10d.BarrierOptions, ("timeout",), (), _barrier),
)
