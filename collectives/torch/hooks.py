"""Communication hooks for DistributedDataParallel: gradients averaged in fewer bytes, with error feedback.

    model = DistributedDataParallel(module)
    state = Int8State()
    model.register_comm_hook(state, int8_hook)

What compression loses of a bucket is added to its next gradients (Karimireddy et al., "Error Feedback Fixes SignSGD",
ICML 2019). A state belongs to one model; its `state_dict` goes into the checkpoint of each rank.
"""

from typing import Any

import torch
import torch.distributed as dist

from collectives.compressed import QuantCodec, TwoShotAllreduce, run
from collectives.torch.process_group import ProcessGroup
from collectives.torch.tensors import array_of
from quant import QuantSpec
from quant.spec.presets import grouped

Future = torch.futures.Future[torch.Tensor]


def _complete(result: torch.Tensor) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(result)
    return future


class ErrorFeedback:
    """State of a hook: by number of the bucket what compression has lost, and what it needs from step to step.

    Parameters
    ----------
    group : ProcessGroup, optional
        Group of the model, of backend "chorus"; by default the default group.

    Raises
    ------
    TypeError
        If the group has another backend.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        found = group or dist.group.WORLD
        if not isinstance(found, ProcessGroup):
            raise TypeError(f"group: expected one of backend chorus, found {found!r}")
        self.group: ProcessGroup = found
        self.lost: dict[int, torch.Tensor] = {}

    def corrected(self, bucket: dist.GradBucket) -> torch.Tensor:
        """Mean's share of this rank in a bucket, float32 or float64, plus what was lost of it in the step before."""
        given = bucket.buffer()
        wide = given.to(torch.promote_types(given.dtype, torch.float32), copy=True).div_(self.group.size())
        lost = self.lost.get(bucket.index())
        if lost is not None and lost.shape == wide.shape:  # else the model has made its buckets anew
            wide += lost
        return wide

    def state_dict(self) -> dict[str, Any]:
        """Values to save: of this rank alone, in copies."""
        return {"lost": {index: lost.clone() for index, lost in self.lost.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned on this rank."""
        self.lost = {index: lost.clone() for index, lost in state["lost"].items()}


class Int8State(ErrorFeedback):
    """State of `int8_hook`.

    Parameters
    ----------
    group : ProcessGroup, optional
        Group of the model; by default the default group.
    spec : QuantSpec, optional
        Format of the messages, without random numbers; by default 8 bits with a scale for every 128 elements.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, spec: QuantSpec | None = None) -> None:
        super().__init__(group)
        self._codec = QuantCodec(spec or grouped(8, 128))
        self._bound: dict[int, TwoShotAllreduce] = {}

    def collective(self, count: int) -> TwoShotAllreduce:
        """Collective for vectors of `count` elements, kept for later steps."""
        if count not in self._bound:
            self._bound[count] = TwoShotAllreduce(self.group.communicator, count, self._codec)
        return self._bound[count]


def int8_hook(state: Int8State, bucket: dist.GradBucket) -> Future:
    """Average a bucket of float16, bfloat16 or float32 gradients in a quarter of float32's bytes."""
    x = state.corrected(bucket).float()
    lost = torch.empty_like(x)
    run(state.collective(x.numel()).allreduce(array_of(x), array_of(x), array_of(lost)))
    state.lost[bucket.index()] = lost
    bucket.buffer().copy_(x)
    return _complete(bucket.buffer())


class PowerSGDState(ErrorFeedback):
    """State of `powersgd_hook`.

    Parameters
    ----------
    group : ProcessGroup, optional
        Group of the model; by default the default group.
    rank : int
        Rank of the approximation of every gradient of two or more dimensions.
    start : int
        Steps that are not compressed at the beginning.
    seed : int
        Of the first factors; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, rank: int = 2, start: int = 10, seed: int = 0) -> None:
        super().__init__(group)
        if rank < 1:
            raise ValueError(f"rank: expected at least 1, found {rank}")
        self.rank, self.start, self.step, self.seed = rank, start, 0, seed
        self.factors: dict[int, list[torch.Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        factors = {index: [each.clone() for each in several] for index, several in self.factors.items()}
        return super().state_dict() | {"factors": factors, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.factors = {index: [each.clone() for each in several] for index, several in state["factors"].items()}
        self.step = state["step"]

    def right_factors(self, index: int, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Factors of the step before, of (columns, rank) elements; random ones, equal on all ranks, at first."""
        shapes = [(matrix.shape[1], min(self.rank, *matrix.shape)) for matrix in matrices]
        kept = self.factors.get(index, [])
        if [tuple(each.shape) for each in kept] != shapes:
            random = torch.Generator().manual_seed(self.seed + index)
            kept = [torch.randn(shape, generator=random, dtype=m.dtype) for shape, m in zip(shapes, matrices)]
        return kept

    def total(self, tensors: list[torch.Tensor]) -> None:
        """Sum tensors over all ranks, in one call."""
        if tensors:
            self.group.allreduce_coalesced(tensors).wait()


def powersgd_hook(state: PowerSGDState, bucket: dist.GradBucket) -> Future:
    """Average a bucket by low-rank factors of its matrices (Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 2).

    Gradients that are no matrices, or too small to gain, are averaged as they are.
    """
    flat = state.corrected(bucket)
    if bucket.is_last():
        state.step += 1
    parts = flat.split([gradient.numel() for gradient in bucket.gradients()])
    shapes = [(gradient.shape[0], -1) if gradient.dim() > 1 else (1, -1) for gradient in bucket.gradients()]
    views = [part.view(shape) for part, shape in zip(parts, shapes)]
    if state.step <= state.start:
        matrices: list[torch.Tensor] = []
    else:
        matrices = [view for view in views if state.rank * sum(view.shape) < view.numel()]
    chosen = set(map(id, matrices))
    right = state.right_factors(bucket.index(), matrices)
    left = [matrix @ factor for matrix, factor in zip(matrices, right)]
    state.total([*left, *(view for view in views if id(view) not in chosen)])
    left = [torch.linalg.qr(each).Q for each in left]
    right = [matrix.t() @ each for matrix, each in zip(matrices, left)]
    state.total(right)
    lost = torch.zeros_like(flat)
    missing = [view for view, own in zip(lost.split([part.numel() for part in parts]), views) if id(own) in chosen]
    for matrix, a, b, gap in zip(matrices, left, right, missing):
        mean = a @ b.t()
        gap.copy_((matrix - mean).view(-1))
        matrix.copy_(mean)
    if matrices:
        state.factors[bucket.index()], state.lost[bucket.index()] = right, lost
    bucket.buffer().copy_(flat)
    return _complete(bucket.buffer())
