"""Communication hooks of DistributedDataParallel: gradients averaged in fewer bytes, with error feedback.

    model = DistributedDataParallel(module)
    model.register_comm_hook(PowerSGDState(model, rank=4), powersgd_hook)  # or Int8State(model), int8_hook

What compression loses is added to the next gradients (Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019).
PyTorch's own hooks, such as `powerSGD_hook`, run over this backend as they are, but not with ``overlap``.
"""

from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.compressed import QuantCodec, TwoShotAllreduce, run
from collectives.torch.process_group import ProcessGroup
from collectives.torch.tensors import array_of
from quant import QuantSpec
from quant.spec.presets import grouped


class FeedbackState:
    """Errors of this rank so far, by number of the parameter: the base of the states of hooks.

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

    def operand(self, bucket: GradBucket) -> torch.Tensor:
        """float32 copy of a bucket, divided by the number of ranks, plus the errors so far."""
        operand = bucket.buffer().to(torch.float32, copy=True).div_(self.group.size())
        for number, part in self.split(bucket, operand).items():
            if number in self.lost:
                part += self.lost[number]
        return operand

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's errors, for its checkpoint."""
        return {"lost": {number: lost.clone() for number, lost in self.lost.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict` on this rank."""
        self.lost = {number: lost.clone() for number, lost in state["lost"].items()}


class Int8State(FeedbackState):
    """State of `int8_hook`.

    Parameters
    ----------
    model : DistributedDataParallel
        The model, in a group of backend "chorus"; TypeError for others.
    spec : QuantSpec, optional
        Format of the messages, without random numbers; by default 8 bits, and a scale for every 128 elements.
    """

    def __init__(self, model: DistributedDataParallel, spec: QuantSpec | None = None) -> None:
        super().__init__(model)
        self._codec, self._bound = QuantCodec(spec or grouped(8, 128)), dict[int, TwoShotAllreduce]()

    def collective(self, count: int) -> TwoShotAllreduce:
        """Collective for vectors of `count` elements, kept for later steps."""
        if count not in self._bound:
            self._bound[count] = TwoShotAllreduce(self.group.communicator, count, self._codec)
        return self._bound[count]


def int8_hook(state: Int8State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients of any float type. Messages have 8 bits for each element."""
    averages = state.operand(bucket)
    lost = torch.empty_like(averages)
    run(state.collective(lost.numel()).allreduce(array_of(averages), array_of(averages), array_of(lost)))
    state.lost |= state.split(bucket, lost)
    return _averaged(bucket, averages)


class PowerSGDState(FeedbackState):
    """State of `powersgd_hook`: errors of this rank, and the right factors of all ranks.

    Parameters
    ----------
    model : DistributedDataParallel
        The model, in a group of backend "chorus"; TypeError for others.
    rank : int
        Columns of a factor; ValueError unless it is above 0.
    seed : int
        Of the first right factors, the same on all ranks.
    """

    def __init__(self, model: DistributedDataParallel, rank: int = 1, seed: int = 0) -> None:
        super().__init__(model)
        if rank < 1:
            raise ValueError(f"rank: expected a number above 0, found {rank}")
        self.rank, self.seed = rank, seed
        self.right: dict[int, torch.Tensor] = {}

    def matrices(self, bucket: GradBucket, vector: torch.Tensor) -> dict[int, torch.Tensor]:
        """Views of the parameters in a vector as matrices of their first axis by the others.

        By number of the parameter, and only of those with smaller factors.
        """
        found = {}
        for (number, part), gradient in zip(self.split(bucket, vector).items(), bucket.gradients(), strict=True):
            rows = gradient.shape[0] if gradient.dim() > 1 else 1
            if self.rank * (rows + part.numel() // max(rows, 1)) < part.numel():
                found[number] = part.view(rows, -1)
        return found

    def factor(self, number: int, columns: int) -> torch.Tensor:
        """Right factor of a matrix with so many columns, from the last step or random."""
        if number not in self.right:
            random = torch.Generator().manual_seed(self.seed + number)
            self.right[number] = torch.randn(columns, self.rank, generator=random)
        return self.right[number]

    def sum(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sums over ranks of tensors, in one allreduce."""
        if not parts:
            return []
        whole = torch.cat([part.reshape(-1) for part in parts])
        self.group.communicator.Allreduce(MPI.IN_PLACE, array_of(whole))
        sums = whole.split([part.numel() for part in parts])
        return [total.view(part.shape) for total, part in zip(sums, parts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's errors and of the right factors, for its checkpoint."""
        return super().state_dict() | {"right": {number: right.clone() for number, right in self.right.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict` on this rank."""
        super().load_state_dict(state)
        self.right = {number: right.clone() for number, right in state["right"].items()}


def powersgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients by two low-rank factors of each matrix; other tensors are summed whole.

    One power iteration in a step (Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2).
    """
    averages = state.operand(bucket)
    matrices, lost = state.matrices(bucket, averages), averages.clone()
    whole = [part for number, part in state.split(bucket, averages).items() if number not in matrices]
    products = [matrix @ state.factor(number, matrix.shape[1]) for number, matrix in matrices.items()]
    sums = state.sum(products + whole)
    lefts = [torch.linalg.qr(product).Q for product in sums[: len(products)]]
    rights = state.sum([matrix.t() @ left for matrix, left in zip(matrices.values(), lefts, strict=True)])
    for (number, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
        torch.matmul(left, right.t(), out=matrix)
        state.right[number] = right
    for part, total in zip(whole, sums[len(products) :], strict=True):
        part.copy_(total)
    for number, part in state.split(bucket, lost).items():
        if number in matrices:
            state.lost[number] = part - matrices[number].reshape(-1) / state.group.size()
    return _averaged(bucket, averages)


def _averaged(bucket: GradBucket, averages: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Completed future of the bucket with these averages."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().copy_(averages))
    return future
