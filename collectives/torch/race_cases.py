"""Calls of `torch.distributed` to be timed over two backends, with data that shows whether the results are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from collectives.torch.launch import init
from collectives.torch.process_group import ProcessGroup

ROOT = 0


class _Case(NamedTuple):
    """A collective: its call, the tensors it reads and writes, whose values these then are, and on which ranks."""

    call: Callable[[RaceBuffers], Any]
    read: str
    written: str
    values: str  # "root", "sum", or "each" rank's in its block
    on_root: bool = False


def _lists(buffers: RaceBuffers) -> list[torch.Tensor] | None:
    return list(buffers.whole.split(len(buffers.block))) if buffers.group.rank() == ROOT else None


CASES: dict[str, _Case] = {
    "broadcast": _Case(lambda b: dist.broadcast(b.whole, ROOT, b.group), "whole", "whole", "root"),
    "reduce": _Case(lambda b: dist.reduce(b.whole, ROOT, group=b.group), "whole", "whole", "sum", True),
    "scatter": _Case(lambda b: dist.scatter(b.block, _lists(b), ROOT, b.group), "whole", "block", "root"),
    "gather": _Case(lambda b: dist.gather(b.block, _lists(b), ROOT, b.group), "block", "whole", "each", True),
    "allgather": _Case(lambda b: b.group.all_gather_single(b.whole, b.block).wait(), "block", "whole", "each"),
    "reduce_scatter": _Case(
        lambda b: b.group.reduce_scatter_single(b.block, b.whole, dist.ReduceScatterOptions()).wait(),
        *("whole", "block", "sum"),
    ),
    "allreduce": _Case(lambda b: dist.all_reduce(b.whole, group=b.group), "whole", "whole", "sum"),
    "alltoall": _Case(lambda b: dist.all_to_all_single(b.other, b.whole, group=b.group), "whole", "other", "each"),
    "barrier": _Case(lambda b: dist.barrier(b.group), "block", "block", "own"),
}


class RaceBuffers:
    """float32 tensors of one contestant: `whole` of `nbytes`, rounded up to equal blocks, and one such block.

    Every rank's elements are its number plus a shift that changes before each call.
    """

    def __init__(self, group: dist.ProcessGroup, collective: str, nbytes: int) -> None:
        self.group, self.case, self._shift = group, CASES[collective], 0
        block = 0 if collective == "barrier" else -(-nbytes // (4 * group.size()))
        self.whole, self.block = torch.zeros(block * group.size()), torch.zeros(block)
        self.other = torch.zeros_like(self.whole) if collective == "alltoall" else self.whole
        self.nbytes = self.whole.nbytes
        self.call = partial(self.case.call, self)

    def advance(self) -> None:
        """Change the input."""
        self._shift = (self._shift + 1) % 3
        getattr(self, self.case.read).fill_(self.group.rank() + self._shift)

    def poison(self) -> None:
        """Overwrite results, unless the input is in the same place."""
        if self.case.written != self.case.read:
            getattr(self, self.case.written).fill_(-1)

    def wrong(self) -> int:
        """Number of wrong elements."""
        if self.case.on_root and self.group.rank() != ROOT:
            return 0
        ranks = torch.arange(self.group.size(), dtype=torch.float32) + self._shift
        values = {"root": ranks[ROOT], "sum": ranks.sum(), "own": ranks[self.group.rank()], "each": ranks[:, None]}
        found = getattr(self, self.case.written)
        shaped = found.view(self.group.size(), -1) if self.case.values == "each" else found
        return torch.count_nonzero(shaped != values[self.case.values]).tolist()


def groups() -> tuple[ProcessGroup, dist.ProcessGroup]:
    """Groups of all ranks over our backend and over gloo."""
    init()
    return dist.group.WORLD, dist.new_group(backend="gloo")
