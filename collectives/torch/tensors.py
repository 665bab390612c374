"""Tensors as flat NumPy arrays on the same memory. A copy, stored back afterwards, where their memory is not dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

VIEWS: dict[torch.dtype, tuple[torch.dtype, np.dtype[Any]]] = {
    getattr(torch, name): (
        torch.uint8 if name.startswith("float8") else torch.int16,
        np.dtype(getattr(ml_dtypes, name)),
    )
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name) and hasattr(ml_dtypes, name)
}
"""Types of tensors that PyTorch does not share with NumPy: the type to share them as, and NumPy's type for them."""

VIEWS[torch.complex32] = torch.int32, np.dtype(np.int32)  # moved only


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements of a tensor are contiguous in its memory, and are its values."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Array of any shape on the memory of a dense CPU tensor without gradient. TypeError for other devices.

    >>> tensor = torch.zeros(2, dtype=torch.bfloat16)
    >>> array_of(tensor)[0] = 1
    >>> tensor.tolist()
    [1.0, 0.0]
    """
    if (known := VIEWS.get(tensor.dtype)) is None:
        return tensor.numpy()  # type: ignore[no-any-return]
    shared, dtype = known
    return tensor.view(-1).view(shared).numpy().view(dtype)  # type: ignore[no-any-return]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Dense tensor on the memory of several that follow one another as parts of one. None for others."""
    first = tensors[0]
    start = end = first.data_ptr()
    for tensor in tensors:
        if not is_dense(tensor) or tensor.data_ptr() != end or tensor.dtype != first.dtype:
            return None
        end += tensor.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return first.as_strided(((end - start) // first.itemsize,), (1,))


class Block:
    """Tensors of one type, in order, as one array, on their own memory if they are `joined`, else on that of a copy.

    Attributes
    ----------
    tensor, array : the same elements as a dense tensor and as an array, of any shape
    """

    __slots__ = ("_tensors", "array", "tensor")

    def __init__(self, tensors: Sequence[torch.Tensor], load: bool = True) -> None:
        """Without `load` the elements of a copy are undefined until they are received."""
        self._tensors: Sequence[torch.Tensor] = ()
        if len(tensors) == 1:
            tensor = tensors[0]
            if tensor.requires_grad or type(tensor) is not torch.Tensor:
                tensor = tensor.detach()
            whole = tensor if is_dense(tensor) else None
        else:
            tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
            whole = joined(tensors)
        if whole is None:
            whole = self._copy(tensors, load)
        self.tensor, self.array = whole, array_of(whole)

    def _copy(self, tensors: Sequence[torch.Tensor], load: bool) -> torch.Tensor:
        self._tensors = [tensor.detach() for tensor in tensors]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise TypeError(f"expected tensors of one dtype, found {[tensor.dtype for tensor in tensors]}")
        (dtype,) = dtypes
        if not load:
            return torch.empty(sum(map(torch.numel, tensors)), dtype=dtype)
        # An array does not see PyTorch's lazy conjugation and negation. Some types are moved, not joined.
        parts = [tensor.reshape(-1).resolve_conj().resolve_neg() for tensor in self._tensors]
        return torch.cat([part.view(VIEWS.get(dtype, (dtype,))[0]) for part in parts]).view(dtype)

    def beside(self, received: Block) -> np.ndarray[Any, Any]:
        """The array to send, a copy if `received` has some of its memory, which a collective would overwrite."""
        mine, other = self.tensor.data_ptr(), received.tensor.data_ptr()
        overlaps = mine < other + received.array.nbytes and other < mine + self.array.nbytes
        return self.array.copy() if overlaps else self.array

    def store(self) -> None:
        """Write the elements of a copy back to the tensors."""
        if self._tensors:
            parts = self.tensor.split([tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts):
                tensor.copy_(part.view(tensor.shape))
