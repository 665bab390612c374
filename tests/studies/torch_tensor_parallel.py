"""PyTorch baseline of tensor parallelism: the same model, cut by `parallelize_module` (DTensor) over gloo."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch_ddp import TorchTraining

from parallel.nn.compose import Sequential
from parallel.nn.linear import Linear
from parallel.nn.operator import Operator
from parallel.nn.placement import unit_bounds


class TorchTensorParallel(TorchTraining):
    """Training of a model whose column and row linear layers, and heads, are cut over all ranks, by its table.

    Embedding and output are whole on every rank. ValueError if the ranks do not divide what is cut.
    """

    def _distributed(self, model: Operator, comm: MPI.Intracomm) -> nn.Module:
        # Only here: these modules are slow to load.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        ranks = comm.Get_size()
        mesh = init_device_mesh("cpu", (ranks,))
        styles = {"column": ColwiseParallel, "row": RowwiseParallel}
        assert isinstance(model, Sequential)
        for name, module in self.model.modules.items():
            style = next((style for pattern, style in model.cuts.items() if fnmatchcase(name, pattern)), "")
            operator: Any = self.model.operators[name]
            if style == "heads":
                if operator.heads % ranks:
                    raise ValueError(f"heads: expected a multiple of {ranks}, found {operator.heads}")
                module.heads = operator.heads // ranks
            elif style in styles:
                if style == "column":
                    self._reorder(operator, module, ranks)
                parallelize_module(module, mesh, styles[style]())
                self._replace(operator, module)
        return self.model.module

    def _reorder(self, linear: Linear, module: Any, ranks: int) -> None:
        """Order the outputs so that those of each rank are neighbours: its queries, keys and values, for example."""
        bounds = unit_bounds(linear.columns.units, ranks)
        ranges = [places for units in bounds for places in linear.columns.ranges(*units)]
        order = torch.cat([torch.arange(*places) for places in ranges])
        for parameter in (linear.weight, linear.bias):
            if parameter is not None:
                self.orders[parameter.name] = torch.argsort(order)
        with torch.no_grad():
            module.weight.copy_(module.weight[order].clone())
            if module.bias is not None:
                module.bias.copy_(module.bias[order].clone())

    def _replace(self, linear: Linear, module: Any) -> None:
        """Put the parameters that `parallelize_module` has made in the place of those before."""
        new = {linear.weight: module.weight}
        if linear.bias is not None:
            new[linear.bias] = module.bias
        self.model.pairs = [(ours, new.get(ours, theirs), flip) for ours, theirs, flip in self.model.pairs]
