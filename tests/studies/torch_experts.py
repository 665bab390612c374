"""PyTorch baseline of a mixture of experts on several ranks: `all_to_all_single` over gloo, and a loop over experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed
from mpi4py import MPI
from torch import nn
from torch_ddp import TorchModel, init_gloo

from collectives.schedule.chunks import even
from parallel.nn.mixture import MixtureOfExperts

Array = np.ndarray

dist: Any = torch.distributed  # its types do not list its exports


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Exchange of rows, whose gradients travel back."""

    @staticmethod
    def forward(context: Any, rows: Any, sends: list[int], receives: list[int]) -> Any:
        context.counts = receives, sends
        return _exchanged(rows, sends, receives)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return _exchanged(gradient, *context.counts), None, None


def _exchanged(rows: Any, sends: list[int], receives: list[int]) -> Any:
    arriving = rows.new_empty(sum(receives), rows.shape[1])
    dist.all_to_all_single(arriving, rows.contiguous(), receives, sends)
    return arriving


class TorchExperts:
    """Mixture with softmax scores and normalised weights, each rank with its share of the experts.

    The constructor and `run` are collective. TypeError for an expert without a counterpart in PyTorch.

    Parameters
    ----------
    mixture : MixtureOfExperts
        With all experts; its values are copied. As many experts for each rank.
    comm : Intracomm
        Exchanges addresses; rows go over gloo.
    threads : int
        Threads of PyTorch in this process.
    """

    def __init__(self, mixture: MixtureOfExperts, comm: MPI.Intracomm, threads: int):
        torch.set_num_threads(threads)
        init_gloo(comm)
        settings, self._ranks = mixture.router.settings, comm.Get_size()
        simple = settings.scores == "softmax" and settings.normalize and settings.scale == 1 and mixture.shared is None
        if not simple or len(mixture.experts) % self._ranks:
            raise ValueError(
                f"experts: expected plain mixtures of a multiple of {self._ranks} experts, found {settings}"
            )
        self._choices, self._experts = settings.choices, len(mixture.experts)
        self._here = even(self._experts, self._ranks)[0]
        first = self._here * comm.Get_rank()
        self._gate = nn.Parameter(torch.from_numpy(np.array(mixture.router.weight.data)))
        self.modules = [TorchModel(one).module for one in mixture.experts.experts[first : first + self._here]]
        self._parameters = [self._gate, *(one for module in self.modules for one in module.parameters())]

    def run(self, x: Array, dy: Array) -> tuple[Array, Array, Array]:
        """Result of the tokens x (tokens, width), and from dy the gradients of x and of the router's weights."""
        for parameter in self._parameters:
            parameter.grad = None
        tokens: Any = torch.from_numpy(x).requires_grad_()
        y = self._forward(tokens)
        y.backward(torch.from_numpy(dy))
        gate: Any = self._gate.grad
        return y.detach().numpy(), tokens.grad.numpy(), gate.numpy()

    def _forward(self, x: Any) -> Any:
        weights, experts = torch.topk(nn.functional.softmax(x @ self._gate, -1), self._choices, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).reshape(-1)
        order = torch.argsort(experts.reshape(-1), stable=True)
        counts = torch.bincount(experts.reshape(-1), minlength=self._experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sends, from_ranks = counts.reshape(self._ranks, -1).sum(1).tolist(), arriving.reshape(self._ranks, -1)
        receives = from_ranks.sum(1).tolist()
        rows = _Exchange.apply(x[order // self._choices], sends, receives)
        number = torch.arange(self._here).repeat(self._ranks).repeat_interleave(from_ranks.reshape(-1))
        by_expert = torch.argsort(number, stable=True)
        segments = torch.split(rows[by_expert], from_ranks.sum(0).tolist())
        results = torch.cat([module(segment) for module, segment in zip(self.modules, segments)])
        results = _Exchange.apply(results[torch.argsort(by_expert)], receives, sends)
        return torch.zeros_like(x).index_add(0, order // self._choices, results * weights[order][:, None])

    def close(self) -> None:
        dist.destroy_process_group()
