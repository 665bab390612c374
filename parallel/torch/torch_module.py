"""Modules of PyTorch as operators: forward under autograd, backward by `torch.autograd.grad`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from collectives.torch.tensors import VIEWS, array_of, is_dense
from parallel.nn.operator import ArraySpec, OperatorOutline, Parameter, PassMode, StateBuffer, parts_of
from parallel.nn.taped import TapedOperator
from quant.types import Array

BFLOAT16 = VIEWS[torch.bfloat16][1]

_made: Any = WeakTensorKeyDictionary()
"""Parameters that were made of tensors: blocks with a common tensor have a common parameter."""


class _Place(NamedTuple):
    """Entry of a module's dictionary of buffers."""

    holder: torch.nn.Module
    key: str
    name: str  # of the buffer in the whole module


class TorchModule(TapedOperator):
    """Operator of a copy of a module of PyTorch, as `parallel.nn.from_torch`.

    Attributes
    ----------
    module : torch.nn.Module
        Copy without values: its tensors are set to the weights, without a copy, in each pass.
    aliases : dict of str to str
        Names of tensors in the module's state dictionary that are others of its tensors.
    first : bool
    """

    def __init__(self, module: torch.nn.Module, first: bool = False):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, found {type(module).__name__}")
        kind = type(module).__name__
        weights = {name: _parameter(f"{kind}.{name}", one) for name, one in module.named_parameters()}
        kept = {name: one for name, one in module.named_buffers() if name in module.state_dict()}
        super().__init__(kind, weights, {name: _buffer(f"{kind}.{name}", one) for name, one in kept.items()})
        self.first, self.aliases, self.structure = first, _aliases(module), repr(module)
        memo: dict[int, Any] = {id(one): torch.nn.Parameter(torch.empty(0)) for one in module.parameters()}
        memo |= {id(one): torch.empty(0) for one in kept.values()}
        self.module = copy.deepcopy(module, memo)
        self._tensors: list[Any] = [*self.module.parameters()]  # in the order of `weights`
        self._release()
        names = {id(one): name for name, one in self.module.named_buffers() if name in kept}
        self._places = [
            _Place(holder, key, names[id(one)])
            for holder in self.module.modules()
            for key, one in holder._buffers.items()
            if id(one) in names
        ]
        self._modes = [one for one in self.module.modules() if one.training]  # others stay in evaluation mode

    def __getstate__(self) -> dict[str, Any]:
        """Attributes, without memory of an engine."""
        self._release()
        return super().__getstate__()

    def _release(self) -> None:
        """Leave the module without values."""
        for tensor in self._tensors:
            tensor.data, tensor.bound = torch.empty(0), None

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline by a forward pass on zeros. What PyTorch keeps for the backward pass is unknown, and left out."""
        with FlopCounterMode(display=False) as counter:
            found = super().outline(x)
        return found._replace(flops=counter.get_total_flops())

    def _recorded(self, x: Array, weights: Mapping[str, np.ndarray], run: PassMode) -> tuple[Array, Any]:
        inputs = [tensor_of_array(one) for one in parts_of(x)]
        self._bind()
        dtype = next((one.dtype for one in (*inputs, *self._tensors) if one.is_floating_point()), torch.float32)
        with torch.set_grad_enabled(run.training), self._mode(run, dtype) as use:
            for one in inputs:
                one.requires_grad = run.training and one.is_floating_point() and not self.first
            outputs = self.module(*inputs)
        if any(one._version for one in inputs):  # on the memory of x, which other operators may have saved
            raise ValueError(f"{self.subject}: expected a module that leaves its input unchanged, found one in place")
        results = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        if not results or not all(isinstance(one, torch.Tensor) for one in results):
            found = ", ".join(type(one).__name__ for one in results) or "nothing"
            raise TypeError(f"{self.subject}: expected a tensor or a tuple of tensors as its result, found {found}")
        if use is not None:
            self._note_buffers(use, run)
        y = tuple(map(array_of_tensor, results))
        return y if isinstance(outputs, tuple | list) else y[0], (inputs, results, type(x) is tuple)

    def _gradients(self, record: Any, dy: Array) -> tuple[Array, Mapping[str, np.ndarray | None]]:
        inputs, results, is_tuple = record
        self._bind()  # passes of other micro-batches, or an outline, have been between
        trained = {name: one for name, one in zip(self.weights, self._tensors) if one.requires_grad}
        wanted = [one for one in (*inputs, *trained.values()) if one.requires_grad]
        given = [(y, tensor_of_array(d)) for y, d in zip(results, parts_of(dy)) if y.requires_grad and d is not None]
        found: list[Any] = [None] * len(wanted)
        if given and wanted:
            outputs, upper = zip(*given)
            found = list(torch.autograd.grad(outputs, wanted, upper, allow_unused=True))
        gradients = iter(None if one is None else array_of_tensor(one) for one in found)
        dx = tuple(_filled(next(gradients), one) if one.requires_grad else None for one in inputs)
        of_input = None if all(one is None for one in dx) else dx
        return of_input if is_tuple or of_input is None else of_input[0], dict(zip(trained, gradients))

    def _bind(self) -> None:
        """Set the module's tensors to the weights, without a copy."""
        for tensor, parameter in zip(self._tensors, self.weights.values()):
            if getattr(tensor, "bound", None) is not (values := parameter.data):
                tensor.data, tensor.bound = tensor_of_array(values), values
            if tensor.requires_grad != parameter.requires_grad:
                tensor.requires_grad = parameter.requires_grad

    @contextmanager
    def _mode(self, run: PassMode, dtype: torch.dtype) -> Iterator[str | None]:
        """Context of a pass: training or evaluation mode, and in training a seed for this use of the module.

        Yields the name of the use. The module's buffers are replaced by copies meanwhile."""
        for one in self._modes:
            if one.training != run.training:
                one.training = run.training
        for holder, key, name in self._places:
            copied = tensor_of_array(self.buffers[name].values.copy())
            holder._buffers[key] = copied.to(dtype) if copied.dtype.is_floating_point else copied
        if not run.training:
            yield None
            return
        use, before = run.use(self.name), torch.get_rng_state()
        facts = f"{run.seed} {run.step} {use} ".encode() + np.ascontiguousarray(run.samples).tobytes()
        torch.default_generator.manual_seed(int.from_bytes(blake2b(facts, digest_size=7).digest()))
        try:
            yield use
        finally:
            torch.set_rng_state(before)

    def _note_buffers(self, use: str, run: PassMode) -> None:
        """Hand over the buffers that a pass has changed."""
        for holder, key, name in self._places:
            tensor, buffer = holder._buffers[key], self.buffers[name]
            values = array_of_tensor(tensor).astype(buffer.values.dtype, copy=False)
            if tensor._version or not np.array_equal(values, buffer.values, equal_nan=True):
                run.buffers[use, buffer.name] = values


def _parameter(name: str, tensor: torch.Tensor) -> Parameter:
    """Parameter with the values, and first the memory, of a tensor: the one of an earlier call, until it is trained."""
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise TypeError(f"{name}: expected a tensor with a shape; a lazy module gets it by a first call")
    _expect_host(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a parameter of floating-point numbers, found {tensor.dtype}")
    known: Parameter | None = _made.get(tensor)
    if known is not None and known.has_values and not known.is_held and not known.trained_in:
        return known

    def init(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if made.has_values:
            return made.data  # type: ignore[no-any-return]
        raise ValueError(f"{name}: an engine has trained the values of the module, and left none; wrap a module again")

    made = Parameter(tuple(tensor.shape), init, decay=tensor.ndim > 1, requires_grad=tensor.requires_grad)
    made.data = array_of_tensor(tensor)
    _made[tensor] = made
    return made


def _buffer(name: str, tensor: torch.Tensor) -> StateBuffer:
    _expect_host(name, tensor)
    if tensor.is_complex():
        raise TypeError(f"{name}: expected a buffer of real numbers, found {tensor.dtype}; or persistent=False")
    return StateBuffer(
        array_of_tensor(tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor)
    )


def _expect_host(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor on the CPU, found {tensor.layout} on {tensor.device}")


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """Further names in a module's state dictionary of tensors that have several, and the first name of each."""
    first: dict[int, str] = {}
    every = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    names = {name: first.setdefault(id(one), name) for some in every for name, one in some}
    return {name: known for name, known in names.items() if known != name and name in module.state_dict()}


def tensor_of_array(values: Array) -> torch.Tensor:
    """Tensor on the memory of an array, or on a copy's if that is read-only or not dense; TypeError for a device."""
    if not isinstance(values, np.ndarray | np.generic):
        raise TypeError(f"expected NumPy arrays, as of device='cpu', found one of {type(values).__module__}")
    if not (values.flags.c_contiguous and values.flags.writeable):
        values = np.require(values, requirements=["C", "W"])
    if values.dtype == BFLOAT16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def array_of_tensor(tensor: torch.Tensor) -> np.ndarray:
    """Array on the memory of a tensor, or on a copy's if that is not dense."""
    tensor = tensor.detach()
    if not is_dense(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    array = array_of(tensor)
    return array if array.ndim == tensor.ndim else array.reshape(tuple(tensor.shape))


def _filled(gradient: np.ndarray | None, like: torch.Tensor) -> np.ndarray:
    return np.zeros_like(array_of_tensor(like)) if gradient is None else gradient
