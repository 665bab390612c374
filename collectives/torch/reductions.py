"""Reduction operations of `torch.distributed` as those of MPI, with a factor before or a quotient after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Reduction(NamedTuple):
    """Reduction over ranks: `op`, on operands times a factor, which is a number or a tensor, and perhaps a mean."""

    op: MPI.Op
    factor: Any = None
    is_mean: bool = False

    def operand(self, tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
        """The tensor times the factor, if there is one; TypeError for complex32, which NumPy does not have."""
        if tensor.dtype == torch.complex32:
            raise TypeError("complex32: expected torch.view_as_real of it, as torch.distributed makes of sums")
        if self.factor is None:
            return tensor
        return tensor.mul_(self.factor) if in_place else tensor.mul(self.factor).to(tensor.dtype)

    def finish(self, tensor: torch.Tensor, size: int) -> None:
        """Make a sum over `size` ranks the mean, if it is to be that; integers are rounded towards zero."""
        if self.is_mean:
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            tensor.div_(size, rounding_mode="trunc" if whole else None)


PLAIN = {op: Reduction(mpi_op, None, op == ReduceOp.AVG) for op, mpi_op in OPERATIONS.items()}
del PLAIN[ReduceOp.PREMUL_SUM]  # each has a factor of its own


def reduction_of(op: Any) -> Reduction:
    """Reduction for a ReduceOp; TypeError if there is none."""
    kind = op.op
    if (plain := PLAIN.get(kind)) is not None:
        return plain
    if kind != ReduceOp.PREMUL_SUM:
        raise TypeError(f"op: expected one of {[each.name for each in OPERATIONS]}, found {kind}")
    return Reduction(MPI.SUM, op.factor)


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
        check_invariants=False,
    ).coalesce()
    tensor.copy_(total)
