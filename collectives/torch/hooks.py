"""Communication hook of DistributedDataParallel: gradients averaged in a quarter of the bytes, with error feedback.

    model = DistributedDataParallel(module)
    model.register_comm_hook(Int8State(model), int8_hook)

What compression loses is added to the next gradients (Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019).
PyTorch's own hooks, such as `powerSGD_hook`, run over this backend as they are.
"""

from typing import Any

import torch
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.compressed import QuantCodec, TwoShotAllreduce, run
from collectives.torch.process_group import ProcessGroup
from collectives.torch.tensors import array_of
from quant import QuantSpec
from quant.spec.presets import grouped


class Int8State:
    """State of `int8_hook`: the errors of this rank so far, by number of the parameter.

    Parameters
    ----------
    model : DistributedDataParallel
        The model, in a group of backend "chorus"; TypeError for others.
    spec : QuantSpec, optional
        Format of the messages, without random numbers; by default 8 bits, and a scale for every 128 elements.
    """

    def __init__(self, model: DistributedDataParallel, spec: QuantSpec | None = None) -> None:
        group = getattr(model, "process_group", None)
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"model: expected DistributedDataParallel over backend chorus, found group {group!r}")
        self.group: ProcessGroup = group
        self.lost: dict[int, torch.Tensor] = {}
        self._numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        self._codec, self._bound = QuantCodec(spec or grouped(8, 128)), dict[int, TwoShotAllreduce]()

    def split(self, bucket: GradBucket, vector: torch.Tensor) -> dict[int, torch.Tensor]:
        """Parts of a vector that belong to the parameters of a bucket, by their numbers."""
        parts = vector.split([gradient.numel() for gradient in bucket.gradients()])
        return dict(zip([self._numbers[parameter] for parameter in bucket.parameters()], parts, strict=True))

    def collective(self, count: int) -> TwoShotAllreduce:
        """Collective for vectors of `count` elements, kept for later steps."""
        if count not in self._bound:
            self._bound[count] = TwoShotAllreduce(self.group.communicator, count, self._codec)
        return self._bound[count]

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's errors, for its checkpoint."""
        return {"lost": {number: lost.clone() for number, lost in self.lost.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict` on this rank."""
        self.lost = {number: lost.clone() for number, lost in state["lost"].items()}


def int8_hook(state: Int8State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients of any float type. Messages have 8 bits for each element."""
    averages = bucket.buffer().to(torch.float32, copy=True).div_(state.group.size())
    for number, part in state.split(bucket, averages).items():
        if number in state.lost:
            part += state.lost[number]
    lost = torch.empty_like(averages)
    run(state.collective(lost.numel()).allreduce(array_of(averages), array_of(averages), array_of(lost)))
    state.lost |= state.split(bucket, lost)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().copy_(averages))
    return future
