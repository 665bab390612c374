"""Options of public constructors that are integers: one check, which names the option."""

import inspect
from functools import partial

import numpy as np
import pytest

import parallel
from parallel import LRSchedule, Sampler, nn
from parallel.data.sampler import prefetch
from parallel.data.sequences import TokenSampler
from parallel.nn.attention_mask import AttentionMask
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.depths import DepthLayers, MixtureOfDepths
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.operator import Operator
from parallel.nn.rotary import Rotary
from parallel.nn.router import Router, RouterSettings
from parallel.optim.precision import LossScale

CALLS = {
    "Linear": partial(nn.Linear, inputs=3, outputs=4),
    "Conv2d": partial(nn.Conv2d, inputs=3, outputs=4, window=2, stride=1, padding=0),
    "MaxPool2d": partial(nn.MaxPool2d, window=2, stride=1),
    "AvgPool2d": partial(nn.AvgPool2d, window=2, stride=1),
    "Embedding": partial(nn.Embedding, vocabulary=5, width=4),
    "PositionEmbedding": partial(nn.PositionEmbedding, context=5, width=4),
    "BatchNorm": partial(nn.BatchNorm, features=4),
    "LayerNorm": partial(nn.LayerNorm, width=4),
    "RMSNorm": partial(nn.RMSNorm, width=4),
    "CausalAttention": partial(nn.CausalAttention, heads=2),
    "BlockwiseAttention": partial(BlockwiseAttention, heads=4, kv_heads=2),
    "Rotary": partial(Rotary, context=3),
    "AttentionMask": partial(AttentionMask, window=3),
    "prefetch": partial(prefetch, [], depth=2),
    "SwiGLU": partial(nn.SwiGLU, features=3),
    "self_attention": partial(nn.self_attention, width=4, heads=2),
    "transformer": partial(nn.transformer, vocabulary=5, context=4, layers=1, heads=2, width=4),
    "gated_transformer": partial(nn.gated_transformer, vocabulary=5, context=4, layers=1, heads=2, width=4, kv_heads=1),
    "Router": partial(Router, width=4, experts=4),
    "RouterSettings": partial(RouterSettings, choices=2, groups=2, chosen_groups=1),
    "MixtureOfDepths": partial(MixtureOfDepths, block=nn.ReLU(), width=4, fraction=0.5),
    "ExpertLayers": partial(ExpertLayers, experts=4, every=1),
    "DepthLayers": partial(DepthLayers, every=2),
    "LossScale": partial(LossScale, interval=9, patience=3, good=1, skipped=2, stuck=1),
    "Sampler": partial(Sampler, count=9, global_batch=4, micro_batch=2, seed=1, window=2),
    "TokenSampler": partial(TokenSampler, np.arange(3), global_tokens=4, micro_tokens=2, seed=1, most=2, window=2),
}
CASES = [(name, option) for name, call in CALLS.items() for option, one in call.keywords.items() if type(one) is int]


def test_all_public_constructors_are_tried():
    kinds = [*(getattr(nn, name) for name in nn.__all__), Sampler]
    found = set()
    for kind in (one for one in kinds if inspect.isclass(one) and issubclass(one, (Operator, Sampler))):
        for name, option in inspect.signature(kind).parameters.items():
            if str(option.annotation) in ("int", "<class 'int'>", "int | None", "int | tuple[int, int]"):
                found.add((kind.__name__, name))
    assert found <= set(CASES)


@pytest.mark.parametrize(("name", "option"), CASES)
@pytest.mark.parametrize("value", [2.5, 2.0, True, np.bool_(True), "3", float("nan"), [2]], ids=repr)
def test_no_integer(name, option, value):
    with pytest.raises(TypeError, match=rf"\b{option.removeprefix('global_').removeprefix('micro_')}|_tokens|_batch"):
        CALLS[name](**{option: value})


@pytest.mark.parametrize(("name", "option"), CASES)
def test_integers_of_numpy_and_negative_ones(name, option):
    CALLS[name](**{option: np.int64(CALLS[name].keywords[option])})
    with pytest.raises(ValueError, match=r"expected"):
        CALLS[name](**{option: -1})


@pytest.mark.parametrize("value", ["3", None, 1j])
def test_schedules(value):
    with pytest.raises(TypeError, match=r"^steps: expected a real number"):
        LRSchedule("cosine", rate=0.1, steps=value)


@pytest.mark.parametrize("value", ["3", None, [3]])
def test_widths(value):
    with pytest.raises(TypeError, match=r"^widths: expected an integer from 0 on"):
        nn.mlp([3, value, 2])


@pytest.mark.parametrize(("keep", "error"), [(2.5, TypeError), (True, TypeError), ("3", TypeError), (0, ValueError)])
def test_checkpoints_to_keep(keep, error, tmp_path):
    from mpi4py import MPI

    with parallel.Engine(nn.mlp([3, 2]), nn.MSE(), MPI.COMM_SELF, parallel.SGD(lr=0.1)) as engine:
        with pytest.raises(error, match=r"^keep: expected an integer from 1 on, found"):
            engine.save(tmp_path, keep=keep)
        assert engine.save(tmp_path, keep=np.int64(2)).is_dir()
