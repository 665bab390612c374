"""Calls of `torch.distributed` to be timed over two backends, with data that shows whether the results are right."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from collectives.torch.launch import init

ROOT = 0

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Collectives that PyTorch has renamed."""


class RaceBuffers:
    """float32 tensors of one contestant: `whole` of `nbytes`, rounded up to equal blocks, and one `block`.

    All elements of a rank's input are its number plus a shift that changes before each call.
    """

    whole: torch.Tensor
    block: torch.Tensor
    other: torch.Tensor

    def __init__(self, group: Any, collective: str, nbytes: int) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._case, self._shift = CASES[collective], 0
        length = 0 if collective == "barrier" else -(-nbytes // (4 * self.size))
        self.whole, self.block = torch.zeros(length * self.size), torch.zeros(length)
        self.other = torch.zeros_like(self.whole) if collective == "alltoall" else self.whole

    def blocks(self) -> list[torch.Tensor] | None:
        """Blocks of all ranks, on the root."""
        return list(self.whole.view(self.size, -1)) if self.rank == ROOT else None

    def call(self) -> None:
        self._case.call(self)

    def advance(self) -> None:
        """Change the input."""
        self._shift = (self._shift + 1) % 3
        getattr(self, self._case.read).fill_(self.rank + self._shift)

    def poison(self) -> None:
        """Overwrite the results, unless the input is in the same place."""
        if self._case.written != self._case.read:
            getattr(self, self._case.written).fill_(-1)

    def wrong(self) -> int:
        """Number of wrong elements."""
        ranks = torch.arange(self.size, dtype=torch.float32) + self._shift
        values = {"root": ranks[ROOT], "sum": ranks.sum(), "each": ranks[:, None]}[self._case.values]
        found = getattr(self, self._case.written)
        if self._case.values == "each":
            found = found.view(self.size, -1)
        return 0 if self._case.on_root and self.rank != ROOT else len((found != values).nonzero())


class _Case(NamedTuple):
    """A collective: its call, the tensors it reads and writes, and the values these then have, perhaps on the root."""

    call: Callable[[RaceBuffers], object]
    read: str
    written: str
    values: str  # of the "root", the "sum", or of "each" rank in its block
    on_root: bool = False


CASES = {
    "broadcast": _Case(lambda b: dist.broadcast(b.whole, ROOT, b.group), "whole", "whole", "root"),
    "reduce": _Case(lambda b: dist.reduce(b.whole, ROOT, group=b.group), "whole", "whole", "sum", True),
    "scatter": _Case(lambda b: dist.scatter(b.block, b.blocks(), ROOT, b.group), "whole", "block", "root"),
    "gather": _Case(lambda b: dist.gather(b.block, b.blocks(), ROOT, b.group), "block", "whole", "each", True),
    "allgather": _Case(lambda b: all_gather_single(b.whole, b.block, b.group), "block", "whole", "each"),
    "reduce_scatter": _Case(lambda b: reduce_scatter_single(b.block, b.whole, group=b.group), "whole", "block", "sum"),
    "allreduce": _Case(lambda b: dist.all_reduce(b.whole, group=b.group), "whole", "whole", "sum"),
    "alltoall": _Case(lambda b: dist.all_to_all_single(b.other, b.whole, group=b.group), "whole", "other", "each"),
    "barrier": _Case(lambda b: dist.barrier(b.group), "block", "block", "root"),
}


def groups() -> tuple[Any, Any]:
    """Groups of all ranks over our backend and over gloo."""
    init()
    return dist.group.WORLD, dist.new_group(backend="gloo")
