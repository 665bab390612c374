"""Communication hooks of DistributedDataParallel: gradients averaged in fewer bytes, with error feedback.

    model = DistributedDataParallel(module)
    model.register_comm_hook(Int8State(model), int8_hook)

What compression loses is added to the next gradients (Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.compressed import QuantCodec, TwoShotAllreduce, run
from collectives.torch.process_group import ProcessGroup
from collectives.torch.tensors import array_of
from quant import QuantSpec
from quant.spec.presets import grouped

Future = torch.futures.Future[torch.Tensor]


class ErrorFeedback:
    """State of a hook: the errors of this rank so far, by number of the parameter.

    Parameters
    ----------
    model : DistributedDataParallel
        The model, in a group of backend "chorus"; TypeError for others.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        group = getattr(model, "process_group", None)
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"model: expected DistributedDataParallel over backend chorus, found group {group!r}")
        self.group: ProcessGroup = group
        self.lost: dict[int, torch.Tensor] = {}
        self._numbers = {parameter: number for number, parameter in enumerate(model.parameters())}

    def split(self, bucket: GradBucket, vector: torch.Tensor) -> dict[int, torch.Tensor]:
        """Parts of a vector that belong to the parameters of a bucket, by their numbers."""
        parts = vector.split([gradient.numel() for gradient in bucket.gradients()])
        return dict(zip([self._numbers[parameter] for parameter in bucket.parameters()], parts, strict=True))

    def terms(self, bucket: GradBucket) -> torch.Tensor:
        """This rank's terms of the averages, of at least float32, with the errors so far."""
        buffer = bucket.buffer()
        terms = buffer.to(torch.promote_types(buffer.dtype, torch.float32), copy=True).div_(self.group.size())
        for number, part in self.split(bucket, terms).items():
            if number in self.lost:
                part += self.lost[number]
        return terms

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's errors, for its checkpoint."""
        return {"lost": {number: lost.clone() for number, lost in self.lost.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict` on this rank."""
        self.lost = {number: lost.clone() for number, lost in state["lost"].items()}


def _averaged(bucket: GradBucket, averages: torch.Tensor) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(bucket.buffer().copy_(averages))
    return future


class Int8State(ErrorFeedback):
    """State of `int8_hook`.

    Parameters
    ----------
    model : DistributedDataParallel
    spec : QuantSpec, optional
        Format of the messages, without random numbers; by default 8 bits, and a scale for every 128 elements.
    """

    def __init__(self, model: DistributedDataParallel, spec: QuantSpec | None = None) -> None:
        super().__init__(model)
        self._codec = QuantCodec(spec or grouped(8, 128))
        self._bound: dict[int, TwoShotAllreduce] = {}

    def collective(self, count: int) -> TwoShotAllreduce:
        """Collective for vectors of `count` elements, kept for later steps."""
        if count not in self._bound:
            self._bound[count] = TwoShotAllreduce(self.group.communicator, count, self._codec)
        return self._bound[count]


def int8_hook(state: Int8State, bucket: GradBucket) -> Future:
    """Average gradients of any float type in a quarter of float32's bytes."""
    averages = state.terms(bucket).float()
    lost = torch.empty_like(averages)
    run(state.collective(lost.numel()).allreduce(array_of(averages), array_of(averages), array_of(lost)))
    state.lost |= state.split(bucket, lost)
    return _averaged(bucket, averages)


class PowerSGDState(ErrorFeedback):
    """State of `powersgd_hook`.

    Parameters
    ----------
    model : DistributedDataParallel
    rank : int
        Rank of the approximation of gradients of two or more dimensions.
    start : int
        Steps without compression at the beginning.
    """

    def __init__(self, model: DistributedDataParallel, rank: int = 2, start: int = 10) -> None:
        super().__init__(model)
        if rank < 1:
            raise ValueError(f"rank: expected at least 1, found {rank}")
        self.rank, self.start, self.step = rank, start, 0
        self.factors: dict[int, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        factors = {number: factor.clone() for number, factor in self.factors.items()}
        return super().state_dict() | {"factors": factors, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.factors = {number: factor.clone() for number, factor in state["factors"].items()}
        self.step = state["step"]

    def factor(self, number: int, matrix: torch.Tensor) -> torch.Tensor:
        """Factor of the step before, of (columns, rank) elements; at first random, equal on all ranks."""
        if number not in self.factors:
            seeded = torch.Generator().manual_seed(number)
            self.factors[number] = torch.randn(matrix.shape[1], self.rank, generator=seeded, dtype=matrix.dtype)
        return self.factors[number]

    def total(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors over all ranks, in place."""
        if tensors:
            self.group.allreduce_coalesced([*tensors]).wait()


def powersgd_hook(state: PowerSGDState, bucket: GradBucket) -> Future:
    """Average gradients by low-rank factors (Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 2).

    Gradients that are no matrices, or too small to gain, are averaged as they are.
    """
    averages = state.terms(bucket)
    parts = state.split(bucket, averages)
    rows = [gradient.shape[0] if gradient.dim() > 1 else 1 for gradient in bucket.gradients()]
    matrices = {number: part.view(count, -1) for count, (number, part) in zip(rows, parts.items())}
    matrices = {
        number: matrix
        for number, matrix in matrices.items()
        if state.step >= state.start and state.rank * sum(matrix.shape) < matrix.numel()
    }
    left = [matrix @ state.factor(number, matrix) for number, matrix in matrices.items()]
    state.total([*left, *(part for number, part in parts.items() if number not in matrices)])
    left = [torch.linalg.qr(each).Q for each in left]
    right = [matrix.t() @ each for matrix, each in zip(matrices.values(), left)]
    state.total(right)
    for (number, matrix), a, b in zip(matrices.items(), left, right):
        average = a @ b.t()
        state.factors[number], state.lost[number] = b, (matrix - average / state.group.size()).view(-1)
        matrix.copy_(average)
    state.step += bucket.is_last()
    return _averaged(bucket, averages)
