"""PyTorch baseline of a comparison: the same model, trained by DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

from parallel.nn.activation import GELU, ReLU
from parallel.nn.attention import CausalAttention
from parallel.nn.compose import Residual, Sequential
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.linear import Flatten, Linear
from parallel.nn.norm import LayerNorm
from parallel.nn.operator import Operator, Parameter
from parallel.optim.lr_schedules import rate_at
from parallel.optim.optimizers import AdamW

Array = np.ndarray

dist: Any = torch.distributed  # its types do not list its exports


class _Apply(nn.Module):
    """Module that applies a function to its input and one parameter or module."""

    def __init__(self, function: Callable[..., Any], operand: nn.Module | nn.Parameter):
        super().__init__()
        self.function, self.operand = function, operand

    def forward(self, x: Any) -> Any:
        return self.function(x, self.operand)


class _Attention(nn.Module):
    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape[0], x.shape[1], x.shape[2] // 3
        q, k, v = x.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, width)


class TorchModel:
    """PyTorch copy of a `parallel.nn` model, with the same weights; TypeError for an operator without a counterpart.

    `device` is PyTorch's name of the parameters' device.

    Attributes
    ----------
    module : torch.nn.Module
    pairs : list of (Parameter, torch.nn.Parameter, bool)
        True if the second is the transpose of the first (PyTorch's linear maps).
    operators, modules : dict of str to Operator, and to torch.nn.Module
        By the operator's name.
    """

    def __init__(self, model: Operator, device: str = "cpu"):
        self._device = device
        self.pairs: list[tuple[Parameter, nn.Parameter, bool]] = []
        self._converted: dict[int, nn.Parameter] = {}
        self.operators: dict[str, Operator] = {}
        self.modules: dict[str, nn.Module] = {}
        self.module = self.build(model)

    def build(self, operator: Operator) -> nn.Module:
        if type(operator) not in COUNTERPARTS:
            raise TypeError(f"{type(operator).__name__} {operator.name}: this operator has no counterpart in PyTorch")
        self.operators[operator.name] = operator
        module = self.modules[operator.name] = COUNTERPARTS[type(operator)](self, operator)
        return module

    def parameter(self, parameter: Parameter, transposed: bool = False) -> nn.Parameter:
        """PyTorch parameter with the values of a `parallel.nn` parameter; the same object for every use of it."""
        if id(parameter) not in self._converted:
            values = np.array(parameter.data.T if transposed else parameter.data, order="C")
            self._converted[id(parameter)] = nn.Parameter(torch.from_numpy(values).to(self._device))
            self.pairs.append((parameter, self._converted[id(parameter)], transposed))
        return self._converted[id(parameter)]


def _linear(torch_model: TorchModel, operator: Linear) -> nn.Module:
    module = nn.Linear(operator.inputs, operator.outputs, bias=operator.bias is not None)
    module.weight = torch_model.parameter(operator.weight, transposed=True)
    if operator.bias is not None:
        module.bias = torch_model.parameter(operator.bias)
    return module


def _layer_norm(torch_model: TorchModel, operator: LayerNorm) -> nn.Module:
    module = nn.LayerNorm(operator.gain.shape, eps=operator.eps)
    module.weight = torch_model.parameter(operator.gain)
    if operator.bias is not None:
        module.bias = torch_model.parameter(operator.bias)
    return module


COUNTERPARTS: dict[type, Callable[[TorchModel, Any], nn.Module]] = {
    Sequential: lambda model, operator: nn.Sequential(*map(model.build, operator.items)),
    Residual: lambda model, operator: _Apply(lambda x, inner: x + inner(x), model.build(operator.inner)),
    Linear: _linear,
    LayerNorm: _layer_norm,
    Embedding: lambda model, operator: _Apply(F.embedding, model.parameter(operator.weight)),
    PositionEmbedding: lambda model, operator: _Apply(
        lambda x, weight: x + weight[: x.shape[1]], model.parameter(operator.weight)
    ),
    Unembedding: lambda model, operator: _Apply(F.linear, model.parameter(operator.weight)),
    CausalAttention: lambda model, operator: _Attention(operator.heads),
    GELU: lambda model, operator: nn.GELU(approximate="tanh" if operator.tanh else "none"),
    ReLU: lambda model, operator: nn.ReLU(),
    Flatten: lambda model, operator: nn.Flatten(),
}


def adamw_of(model: TorchModel, optimizer: AdamW) -> torch.optim.AdamW:
    """PyTorch's fused AdamW with the settings of an optimizer; the rate is that of its first step."""
    kinds: dict[tuple[bool, type], list[nn.Parameter]] = {}  # fused updates take tensors of one type
    for ours, theirs, _ in model.pairs:
        kinds.setdefault((ours.decay, type(theirs.data)), []).append(theirs)
    groups = [
        {"params": some, "weight_decay": optimizer.decay if decays else 0.0} for (decays, _), some in kinds.items()
    ]
    rate, betas = rate_at(optimizer.rate, 0), (optimizer.beta1, optimizer.beta2)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=optimizer.eps, fused=True)


def mean_loss(scores: Any, targets: Any) -> Any:
    """Mean cross entropy over the targets that are not negative."""
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1), ignore_index=-1)


class TorchTraining:
    """Training of a model with PyTorch DDP and AdamW. The constructor and all methods are collective.

    Parameters
    ----------
    model : Operator
        Equal on all ranks; its values are copied.
    optimizer : AdamW
        Its settings are copied; the rate is that of the first step.
    comm : Intracomm
        Exchanges addresses; gradients go over gloo.
    threads : int
        Threads of PyTorch in this process.

    Attributes
    ----------
    orders : dict of str to torch.Tensor
        By name of a parameter: places of its rows, in their own order, if they have another here.
    """

    def __init__(self, model: Operator, optimizer: AdamW, comm: MPI.Intracomm, threads: int):
        torch.set_num_threads(threads)
        init_gloo(comm)
        self.model = TorchModel(model)
        self.orders: dict[str, Any] = {}
        self.module = self._distributed(model, comm)
        self.optimizer = adamw_of(self.model, optimizer)

    def _distributed(self, model: Operator, comm: MPI.Intracomm) -> nn.Module:
        """The module, distributed over the ranks."""
        return nn.parallel.DistributedDataParallel(self.model.module, gradient_as_bucket_view=True)

    def _backward(self, x: Array, y: Array) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        scores = self.module(torch.from_numpy(x))
        loss = mean_loss(scores, torch.from_numpy(y))
        loss.backward()
        return loss

    def step(self, x: Array, y: Array) -> float:
        """Train one step, with gradients averaged over ranks; returns the mean loss over this rank's targets `y`."""
        loss = self._backward(x, y)
        self.optimizer.step()
        return float(loss.item())

    def gradients(self, x: Array, y: Array) -> dict[str, Array]:
        """Mean over ranks of the gradients of their mean losses, by Chorus parameter name; weights are unchanged."""
        self._backward(x, y)
        pairs: Any = self.model.pairs
        return {ours.name: self._whole(ours.name, theirs.grad, flip) for ours, theirs, flip in pairs}

    def _whole(self, name: str, gradient: Any, flip: bool) -> Array:
        """Gradient in the order and shape of the Chorus parameter, put together if it is cut over the ranks."""
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        whole = whole[self.orders[name]] if name in self.orders else whole
        return np.array((whole.T if flip else whole).numpy())

    def close(self) -> None:
        dist.destroy_process_group()


def init_gloo(comm: MPI.Intracomm) -> None:
    rank, size = comm.Get_rank(), comm.Get_size()
    host, *others = comm.allgather(socket.getfqdn())
    if set(others) <= {host}:  # one node
        host = "127.0.0.1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = comm.bcast(store.port if store else None)
    if store is None:
        store = dist.TCPStore(host, port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
