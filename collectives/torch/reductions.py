"""Reduction operations of `torch.distributed` as those of MPI, with a factor before or a quotient after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

OPERATIONS = {
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


def operation(op: Any) -> MPI.Op:
    """MPI's operation for a ReduceOp; TypeError if there is none."""
    try:
        return OPERATIONS[op.op]
    except KeyError:
        raise TypeError(f"op: expected one of {[each.name for each in OPERATIONS]}, found {op.op}") from None


def scaled(tensor: torch.Tensor, op: Any, in_place: bool) -> torch.Tensor:
    """Operand of a reduction: `tensor`, for PREMUL_SUM times the factor of `op`, which is a number or a tensor."""
    if op.op != ReduceOp.PREMUL_SUM:
        return tensor
    return tensor.mul_(op.factor) if in_place else tensor.mul(op.factor).to(tensor.dtype)


def average(tensor: torch.Tensor, op: Any, size: int) -> None:
    """Divide the sum over `size` ranks in place if `op` is AVG; integers are rounded towards zero."""
    if op.op == ReduceOp.AVG and size > 1:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        tensor.div_(size, rounding_mode="trunc" if whole else None)


def sum_sparse(tensor: torch.Tensor, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    """Replace a sparse COO tensor by the sum over ranks; `gather` collects a dense tensor of any length from each."""
    own = tensor.coalesce()
    lengths = torch.cat(gather(torch.tensor([own._nnz()]))).tolist()
    indices, values = gather(own.indices().t().contiguous().view(-1)), gather(own.values().reshape(-1))
    dense_shape = own.values().shape[1:]
    total = torch.sparse_coo_tensor(
        torch.cat([each.view(length, -1).t() for each, length in zip(indices, lengths)], 1),
        torch.cat([each.view(length, *dense_shape) for each, length in zip(values, lengths)]),
        tensor.shape,
    ).coalesce()
    tensor.copy_(total)
