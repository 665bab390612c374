"""State dictionaries of PyTorch and Hugging Face for our models, in both directions, by one table of entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from parallel.checkpoint.checkpoint_files import all_in, tensors_in
from parallel.checkpoint.step_folders import NAME
from parallel.checkpoint.tensor_slices import BUFFERS, within_family
from parallel.nn.batch_norm import BatchNorm
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.compose import Wrapper
from parallel.nn.linear import Linear
from parallel.nn.norm import LayerNorm
from parallel.nn.operator import Operator, Parameter, StateBuffer, set_names
from parallel.torch.torch_module import TorchModule, array_of_tensor, tensor_of_array
from quant.types import Array


class Entry(NamedTuple):
    """Tensor of our model, and those of the other that have its values.

    Attributes
    ----------
    ours, theirs : str, tuple of str
        Names. Several of theirs are joined along their first axis.
    transposed : bool
        True if theirs have the axes of a matrix in the other order.
    shares : tuple of int
        Parts of the joined axis, as ratios.
    aliases : tuple of str
        Further names of a tensor that the other model has in several places.
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    shares: tuple[int, ...] = (1,)
    aliases: tuple[str, ...] = ()

    def divided(self, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the other model's tensors by name, from ours."""
        values = values.T if self.transposed else values
        ends = np.cumsum(self.shares)[:-1] * (len(values) // sum(self.shares)) if len(self.theirs) > 1 else ()
        parts = np.split(values, ends) if len(self.theirs) > 1 else [values]
        yield from zip(self.theirs, parts)
        yield from ((alias, parts[0]) for alias in self.aliases)

    def joined(self, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Tensor of our model from those of the other. ValueError if one is missing, or an alias is another tensor."""
        if missing := [name for name in self.theirs if name not in state]:
            raise ValueError(f"state: expected {missing[0]}, for {self.ours}; found none")
        parts = [state[name] for name in self.theirs]
        for name in self.aliases:
            if name in state and not np.array_equal(state[name], parts[0]):
                raise ValueError(
                    f"state: expected {name} equal to {self.theirs[0]}, as they are one tensor in the model"
                )
        values = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return values.T if self.transposed else values


IGNORED = ("*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.inv_freq", "*.num_batches_tracked")
"""Constants in older files of Hugging Face, and counts of batches that no mean depends on."""


def to_torch(
    model_or_checkpoint: Operator | str | Path,
    state: Mapping[str, Array] | str | Path | None = None,
    *,
    names: str | None = None,
) -> dict[str, torch.Tensor]:
    """State dictionary of a model for PyTorch, as new tensors.

    Parameters
    ----------
    model_or_checkpoint : Operator or path
        Model, or a checkpoint of `chorus train`, or the folder with it, which has its own values.
    state : mapping or path, optional
        Values of the model: of `Engine.state_dict`, or a checkpoint or the folder with it, whose newest is taken. By
        default those that its parameters have.
    names : str, optional
        ``"gpt2"`` for `nn.transformer`, ``"llama"`` for `nn.gated_transformer`: names of Hugging Face. By default those
        of a `torch.nn.Sequential` like ours: linear weights are transposed, and gains are weights.

    Raises
    ------
    ValueError
        For names that do not fit the model.
    ParameterNotGathered
        Without `state`, if a parameter has no values on this rank.
    """
    if isinstance(model_or_checkpoint, str | Path):
        from mpi4py import MPI

        from parallel.ptq.load_model import from_checkpoint

        model: Operator = from_checkpoint(MPI.COMM_SELF, Path(model_or_checkpoint)).model
    else:
        model = model_or_checkpoint
    entries = entries_of(model, names)
    values = _values(state) if state is not None else {name: _data(one) for name, one in _members(model).items()}
    if missing := [one.ours for one in entries if one.ours not in values]:
        raise ValueError(f"state: expected {missing[0]}, found none")
    return {
        name: tensor_of_array(np.array(array, order="C"))
        for entry in entries
        for name, array in entry.divided(np.asarray(values[entry.ours]))
    }


def from_torch_state(
    model: Operator, state: Mapping[str, torch.Tensor], *, names: str | None = None
) -> dict[str, np.ndarray]:
    """Values of a model by our names, for `Engine.load_state_dict`, from a state dictionary as `to_torch` returns.

    Parameters
    ----------
    model : Operator
    state : mapping from names to tensors
        Of any floating-point type. Arrays share the memory of dense tensors.
    names : str, optional
        As of `to_torch`.

    Raises
    ------
    ValueError
        If a tensor is missing, unknown, has another shape, or is not the tensor that it is tied to.
    """
    members = _members(model)
    entries = entries_of(model, names)
    arrays = {name: array_of_tensor(one.float() if one.dtype == torch.bfloat16 else one) for name, one in state.items()}
    known = {name for one in entries for name in (*one.theirs, *one.aliases)}
    unknown = [name for name in arrays if name not in known and not any(fnmatchcase(name, one) for one in IGNORED)]
    if unknown:
        raise ValueError(f"state: {unknown[0]} is not of this model, which has {sorted(known)[0]} and so on")
    found = {one.ours: one.joined(arrays) for one in entries}
    for name, values in found.items():
        if values.shape != (wanted := members[name].shape):
            raise ValueError(f"state: expected values of shape {wanted} for {name}, found {values.shape}")
    return found


def entries_of(model: Operator, names: str | None) -> list[Entry]:
    """Entries of a model under names of a convention. ValueError if it has other tensors."""
    if names not in CONVENTIONS:
        raise ValueError(f"names: expected None or one of {', '.join(filter(None, CONVENTIONS))}; found {names!r}")
    members = _members(model)
    entries = list(CONVENTIONS[names](model))
    if different := {one.ours for one in entries} ^ members.keys():
        raise ValueError(f"names: {names} is for another model than this; they differ in {min(different)}")
    return entries


def _members(model: Operator) -> dict[str, Parameter | StateBuffer]:
    """Parameters and buffers of a model by name."""
    set_names(model)
    return {one.name: one for _, one in model.walk() if not isinstance(one, Operator)}


def _data(one: Parameter | StateBuffer) -> np.ndarray:
    return one.data if isinstance(one, Parameter) else one.values


def _values(state: Mapping[str, Array] | str | Path) -> Mapping[str, Array]:
    """Values by our names, of a mapping or a checkpoint."""
    if not isinstance(state, str | Path):
        return state
    path = Path(state)
    folders = [path] if NAME.fullmatch(path.name) else all_in(path)
    if not folders:
        raise ValueError(f"state: expected a checkpoint, or a folder with some, found none in {path}")
    tensors = tensors_in(folders[-1])
    return {within_family(name): one for name, one in tensors if name.startswith(("model/", f"{BUFFERS}/"))}


# ---------------------------------------------------------------------------------------------- conventions


def _plain_entries(model: Operator) -> list[Entry]:
    """Entries for a `torch.nn.Sequential` with the structure of the model."""
    found: dict[int, Entry] = {}
    for path, one in [("", model), *model.walk()]:
        operator: Any = one
        while isinstance(operator, Wrapper):
            operator = operator.inner
        held = operator.members() if isinstance(operator, Operator) else ()
        for name, value in held:
            if isinstance(value, Operator):
                continue
            theirs = "weight" if isinstance(operator, LayerNorm | BatchNorm) and name == "gain" else name
            theirs = f"{path}.{theirs}".lstrip(".")
            transposed = isinstance(operator, Linear) and name == "weight"
            known = found.setdefault(id(value), Entry(value.name, (theirs,), transposed))
            if theirs not in (*known.theirs, *known.aliases):  # PyTorch's states have a tied tensor under each name
                found[id(value)] = known._replace(aliases=(*known.aliases, theirs))
        for alias, first in operator.aliases.items() if isinstance(operator, TorchModule) else ():
            value = (operator.weights | operator.buffers)[first]
            theirs = f"{path}.{alias}".lstrip(".")
            if theirs not in found[id(value)].aliases:
                found[id(value)] = found[id(value)]._replace(aliases=(*found[id(value)].aliases, theirs))
    return [*found.values()]


def _blocks(model: Any) -> int:
    """Number of blocks between the first unit and the head of a transformer."""
    return len(getattr(model, "items", ())) - 2


def _gpt2_entries(model: Any) -> Iterator[Entry]:
    """Entries of GPT2LMHeadModel, whose matrices have our order of axes."""
    yield Entry("0.0.weight", ("transformer.wte.weight",), aliases=("lm_head.weight",))
    yield Entry("0.1.weight", ("transformer.wpe.weight",))
    places = {"0.inner.0": "ln_1", "0.inner.1": "attn.c_attn", "0.inner.3": "attn.c_proj"}
    places |= {"1.inner.0": "ln_2", "1.inner.1": "mlp.c_fc", "1.inner.3": "mlp.c_proj"}
    layers = {f"{at + 1}.{ours}": f"h.{at}.{theirs}" for at in range(_blocks(model)) for ours, theirs in places.items()}
    for ours, theirs in {**layers, f"{_blocks(model) + 1}.0": "ln_f"}.items():
        is_norm = "ln_" in theirs
        yield Entry(f"{ours}.{'gain' if is_norm else 'weight'}", (f"transformer.{theirs}.weight",))
        yield Entry(f"{ours}.bias", (f"transformer.{theirs}.bias",))


def _llama_entries(model: Any) -> Iterator[Entry]:
    """Entries of LlamaForCausalLM. Learned positions, which that does not have, are ``model.embed_positions``."""
    output, known = f"{_blocks(model) + 1}.1.weight", _members(model).keys()
    yield Entry("0.0.weight", ("model.embed_tokens.weight",), aliases=() if output in known else ("lm_head.weight",))
    if output in known:
        yield Entry(output, ("lm_head.weight",))
    if "0.1.weight" in known:
        yield Entry("0.1.weight", ("model.embed_positions.weight",))
    heads = next((one.heads for _, one in model.walk() if isinstance(one, BlockwiseAttention)), None)
    shares = (1, 1, 1) if heads is None else (heads.queries, heads.groups, heads.groups)
    for at in range(_blocks(model)):
        ours, theirs = f"{at + 1}", f"model.layers.{at}"
        packed = tuple(f"{theirs}.self_attn.{one}_proj.weight" for one in "qkv")
        gates = tuple(f"{theirs}.mlp.{one}_proj.weight" for one in ("gate", "up"))
        yield Entry(f"{ours}.0.inner.0.gain", (f"{theirs}.input_layernorm.weight",))
        yield Entry(f"{ours}.0.inner.1.weight", packed, True, shares)
        yield Entry(f"{ours}.0.inner.3.weight", (f"{theirs}.self_attn.o_proj.weight",), True)
        yield Entry(f"{ours}.1.inner.0.gain", (f"{theirs}.post_attention_layernorm.weight",))
        yield Entry(f"{ours}.1.inner.1.weight", gates, True, (1, 1))
        yield Entry(f"{ours}.1.inner.3.weight", (f"{theirs}.mlp.down_proj.weight",), True)
    yield Entry(f"{_blocks(model) + 1}.0.gain", ("model.norm.weight",))


CONVENTIONS: dict[str | None, Callable[[Any], Any]] = {
    None: _plain_entries,
    "gpt2": _gpt2_entries,
    "llama": _llama_entries,
}
"""Entries of a model by the convention of names."""
