"""The collectives of a process group as a table: names of the methods, options, and what each of them does.

The functions get a `Collectives`, the tensors and PyTorch's options. A list of tensors counts as one block of data;
tensors that are not contiguous are copied, and results stored in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from collectives.communicator import Communicator
from collectives.torch.tensors import Block, array_of

REDUCTIONS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PREMUL_SUM: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}


class Reduction(NamedTuple):
    """Reduction over ranks: `op`, on operands times a factor, which is a number or a tensor, and perhaps a mean."""

    op: MPI.Op
    factor: Any = None
    is_mean: bool = False

    def operand(self, block: Block, in_place: bool) -> Block:
        """The block times the factor, if there is one. TypeError for complex32, which NumPy does not have."""
        tensor = block.tensor
        if tensor.dtype is torch.complex32:
            raise TypeError("complex32: expected torch.view_as_real of it, as torch.distributed makes of sums")
        if self.factor is None:
            return block
        if not in_place:
            return Block([tensor.mul(self.factor).to(tensor.dtype)])
        tensor.mul_(self.factor)
        return block

    def finish(self, tensor: torch.Tensor, size: int) -> None:
        """Make a sum over `size` ranks the mean, if it is to be that. Integers are rounded towards zero."""
        if self.is_mean:
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            tensor.div_(size, rounding_mode="trunc" if whole else None)


PLAIN = {op: Reduction(mpi_op, None, op == ReduceOp.AVG) for op, mpi_op in REDUCTIONS.items()}
del PLAIN[ReduceOp.PREMUL_SUM]  # each has a factor of its own


def reduction_of(op: Any) -> Reduction:
    """Reduction for a ReduceOp. TypeError if there is none."""
    kind = op.op
    if (plain := PLAIN.get(kind)) is not None:
        return plain
    if kind != ReduceOp.PREMUL_SUM:
        raise TypeError(f"op: expected one of {[each.name for each in REDUCTIONS]}, found {kind}")
    return Reduction(MPI.SUM, op.__getstate__()[1])  # before 2.13 it has no attribute `factor`


def sum_sparse(tensor: torch.Tensor, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    """Replace a sparse COO tensor by the sum over ranks. `gather` collects a dense tensor of any length from each."""
    own = tensor.coalesce()
    lengths = torch.cat(gather(torch.tensor([own._nnz()]))).tolist()
    indices, values = gather(own.indices().t().contiguous().view(-1)), gather(own.values().reshape(-1))
    dense_shape = own.values().shape[1:]
    total = torch.sparse_coo_tensor(
        torch.cat([each.view(length, -1).t() for each, length in zip(indices, lengths)], 1),
        torch.cat([each.view(length, *dense_shape) for each, length in zip(values, lengths)]),
        tensor.shape,
        check_invariants=False,
    ).coalesce()
    tensor.copy_(total)


Tensors = Sequence[torch.Tensor]


class Collectives(NamedTuple):
    """Communicator of one call, with its settings: algorithms by method, where one is chosen, and seconds."""

    comm: Communicator
    rank: int
    size: int
    algorithms: dict[str, str]
    timeout: float

    def run(self, name: str, *arguments: Any) -> None:
        """Call the communicator's method `name`, such as ``Allreduce``."""
        getattr(self.comm, name)(*arguments, algorithm=self.algorithms.get(name, "auto"), timeout=self.timeout)


def _sizes(tensors: Tensors) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _allreduce(on: Collectives, tensors: Tensors, options: Any) -> None:
    reduction, dense = reduction_of(options.reduceOp), []
    for tensor in tensors:
        if tensor.is_sparse:
            sum_sparse(tensor, partial(_gather_any, on))
            reduction.finish(tensor, on.size)
        else:
            dense.append(tensor)
    if dense:
        block = reduction.operand(Block(dense), in_place=True)
        on.run("Allreduce", MPI.IN_PLACE, block.array, reduction.op)
        reduction.finish(block.tensor, on.size)
        block.store()


def _gather_any(on: Collectives, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Vectors of all ranks, of any length."""
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
    operand = reduction.operand(block, in_place=is_root).array
    on.run("Reduce", *((MPI.IN_PLACE, operand) if is_root else (operand, None)), reduction.op, options.rootRank)
    if is_root:
        reduction.finish(block.tensor, on.size)
        block.store()


def _allgather(on: Collectives, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> None:
    """Gather a tensor of any length in the only list of `outputs`, or several, in one list for each rank."""
    lists = outputs if len(outputs) > 1 else [[output] for output in outputs[0]]
    sent, received = Block(inputs), Block([*chain(*lists)], load=False)
    counts = [sum(_sizes(each)) for each in lists]
    if len(set(counts)) == 1:
        on.run("Allgather", sent.beside(received), received.array)
    else:
        on.run("Allgatherv", sent.beside(received), [received.array, counts])
    received.store()


def _all_gather_single(on: Collectives, outputs: Tensors, inputs: Tensors, options: Any) -> None:
    for output, given in zip(outputs, inputs, strict=True):
        received = Block([output], load=False)
        on.run("Allgather", Block([given]).beside(received), received.array)
        received.store()


def _gather(on: Collectives, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> None:
    sent = Block(inputs)
    if on.rank != options.rootRank:
        on.run("Gather", sent.array, None, options.rootRank)
    else:
        received = Block(outputs[0], load=False)
        on.run("Gather", sent.beside(received), received.array, options.rootRank)
        received.store()


def _scatter(on: Collectives, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> None:
    received = Block(outputs, load=False)
    sent = Block(inputs[0]).beside(received) if on.rank == options.rootRank else None
    on.run("Scatter", sent, received.array, options.rootRank)
    received.store()


def _reduce_scatter(on: Collectives, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> None:
    """Reduce blocks of any length, one for each rank."""
    counts = _sizes(inputs[0])
    _reduce_blocks(on, outputs, inputs[0], options, [counts] if len(set(counts)) > 1 else [])


def _reduce_scatter_single(on: Collectives, outputs: Tensors, inputs: Tensors, options: Any) -> None:
    for output, given in zip(outputs, inputs, strict=True):
        _reduce_blocks(on, [output], [given], options, [])


def _reduce_blocks(on: Collectives, outputs: Tensors, inputs: Tensors, options: Any, counts: list[list[int]]) -> None:
    received, reduction = Block(outputs, load=False), reduction_of(options.reduceOp)
    operand = reduction.operand(Block(inputs), in_place=False).beside(received)
    method = "Reduce_scatter" if counts else "Reduce_scatter_block"
    on.run(method, operand, received.array, *counts, reduction.op)
    reduction.finish(received.tensor, on.size)
    received.store()


def _all_to_all(on: Collectives, outputs: Tensors, inputs: Tensors, options: Any) -> None:
    sent, received = Block(inputs), Block(outputs, load=False)
    on.run("Alltoallv", [sent.beside(received), _sizes(inputs)], [received.array, _sizes(outputs)])
    received.store()


def _all_to_all_single(
    on: Collectives,
    output: torch.Tensor,
    given: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    options: Any,
) -> None:
    """Exchange blocks of rows: their numbers by rank, or without such lists equal blocks."""
    sent, received = Block([given]), Block([output], load=False)
    if len(output_rows) or len(input_rows):
        sides = (sent.beside(received), given, input_rows), (received.array, output, output_rows)
        on.run("Alltoallv", *([array, _elements(tensor, rows, on.size)] for array, tensor, rows in sides))
    else:
        on.run("Alltoall", sent.beside(received), received.array)
    received.store()


def _elements(tensor: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Elements of each rank's block of a tensor. ValueError unless the blocks are the tensor."""
    length = tensor.shape[0]
    rows = rows or [length // size] * size
    if sum(rows) != length or len(rows) != size:
        raise ValueError(f"expected {size} split sizes of {length} rows in all, found {[*rows]}")
    return [count * (tensor.numel() // max(1, length)) for count in rows]


def _barrier(on: Collectives, options: Any) -> None:
    on.run("Barrier")


class GroupOperation(NamedTuple):
    """One collective of process groups."""

    names: str
    """Names of its methods, in all generations of PyTorch."""
    options: type
    """PyTorch's class of its options, the last argument."""
    fields: str
    """Options that may be given in place of that class, in this order."""
    nesting: tuple[int, ...]
    """Depth of the lists of tensors in each argument before the options. 0 for a single tensor, or numbers."""
    run: Callable[..., None]
    """Function (collectives, argument, ..., options)."""


OPERATIONS = (
    GroupOperation("allreduce allreduce_coalesced", c10d.AllreduceOptions, "reduceOp timeout", (1,), _allreduce),
    GroupOperation("broadcast", c10d.BroadcastOptions, "rootRank timeout", (1,), _broadcast),
    GroupOperation("reduce", c10d.ReduceOptions, "rootRank reduceOp timeout", (1,), _reduce),
    GroupOperation("allgather allgather_coalesced", c10d.AllgatherOptions, "timeout", (2, 1), _allgather),
    GroupOperation(
        "all_gather_single all_gather_single_coalesced _allgather_base allgather_into_tensor_coalesced",
        *(c10d.AllgatherOptions, "timeout", (1, 1), _all_gather_single),
    ),
    GroupOperation("gather", c10d.GatherOptions, "rootRank timeout", (2, 1), _gather),
    GroupOperation("scatter", c10d.ScatterOptions, "rootRank timeout", (1, 2), _scatter),
    GroupOperation("reduce_scatter", c10d.ReduceScatterOptions, "reduceOp timeout", (1, 2), _reduce_scatter),
    GroupOperation(
        "reduce_scatter_single reduce_scatter_single_coalesced _reduce_scatter_base reduce_scatter_tensor_coalesced",
        *(c10d.ReduceScatterOptions, "reduceOp timeout", (1, 1), _reduce_scatter_single),
    ),
    GroupOperation("alltoall", c10d.AllToAllOptions, "timeout", (1, 1), _all_to_all),
    GroupOperation(
        "all_to_all_single alltoall_base", c10d.AllToAllOptions, "timeout", (0, 0, 0, 0), _all_to_all_single
    ),
    GroupOperation("barrier", c10d.BarrierOptions, "timeout", (), _barrier),
)
