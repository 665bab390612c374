"""PyTorch baseline of a training in one process on one device, in eager mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch_ddp import TorchModel, adamw_of, mean_loss

from parallel.nn.operator import Operator
from parallel.optim.optimizers import AdamW

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchOnDevice:
    """Training with fused AdamW; half precision by automatic mixed precision, fp16 with a dynamic loss scale.

    `model`, on the host, is copied; `precision` is a name of `parallel.optim.precision`, not fp64; `device` is "cuda",
    or "cpu" for tests.
    """

    def __init__(self, model: Operator, optimizer: AdamW, precision: str, device: str = "cuda"):
        self._device, self._half = device, HALVES.get(precision)
        self._model = TorchModel(model, device)
        self._optimizer = adamw_of(self._model, optimizer)
        grad_scaler: Any = torch.amp.GradScaler
        self._scaler = grad_scaler(device, enabled=precision == "fp16")

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Train one step; return the mean loss over the targets `y`."""
        inputs, targets = (torch.from_numpy(array).to(self._device, non_blocking=True) for array in (x, y))
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device, dtype=self._half, enabled=self._half is not None):
            loss = mean_loss(self._model.module(inputs), targets)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return float(loss.item())
