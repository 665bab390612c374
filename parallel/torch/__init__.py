"""Models of PyTorch in engines, and state dictionaries in its names. Needs PyTorch."""

from parallel.torch.state_dicts import from_torch_state, to_torch
from parallel.torch.torch_module import TorchModule

__all__ = ["TorchModule", "from_torch_state", "to_torch"]
