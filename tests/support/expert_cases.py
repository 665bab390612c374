"""Experts on the ranks of an axis, and what they must compute: as all experts on one rank."""

import numpy as np

from parallel.nn.operator import PassMode, name_all
from parallel.nn.router import RouterSettings
from parallel.sharding.expert.expert_ranks import ExpertRanks
from support.mixture_cases import EXPERTS, WIDTH, mixture

CASES = {
    "two experts": RouterSettings(),
    "one expert": RouterSettings(choices=1, normalize=False),
    "all experts": RouterSettings(choices=EXPERTS),
    "capacity": RouterSettings(choices=4, capacity=0.5),
}


def tokens(rank, dtype=np.float64):
    """Another number of sequences on every rank, on rank 1 none."""
    return np.random.default_rng(rank).standard_normal(((rank + 2) % 3, 7, WIDTH)).astype(dtype)


def divided(axis, settings, by_source, dispatch="direct", nodes=None, shared=False, local=None):
    """Mixture with experts on the ranks of an axis; `nodes`: of the ranks, if they are threads."""
    operator = mixture(settings, shared)
    if nodes is not None:
        axis.comm.nodes = nodes
    operator.experts = ExpertRanks(axis, operator.experts.experts, by_source, dispatch, local)
    return operator


def played(operator, x, dtype, rank):
    for parameter in name_all(operator):
        parameter.data = parameter.first(3).astype(dtype)
    y, saved = operator.forward(x, PassMode(samples=np.arange(len(x))))
    dy = np.random.default_rng(9 + rank).standard_normal(y.shape).astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    gradients = {parameter.name: np.zeros(parameter.shape, wide) for parameter in operator.parameters()}

    def sink(parameter, compute):
        part = np.empty(parameter.shape, wide)
        compute(part)
        gradients[parameter.name] += part

    return y, operator.backward(dy, saved, sink), gradients


def expect_as_alone(found, settings, shared=False, scale=1):
    """Compare results and gradients of all ranks with those of all experts on one, within `scale` times 1e-12."""
    alone = [played(mixture(settings, shared), tokens(rank), np.float64, rank) for rank in range(len(found))]
    gradients = {}
    for (y, dx, mine), (other_y, other_dx, _) in zip(found, alone):
        np.testing.assert_allclose(y, other_y, rtol=0, atol=scale * 1e-12)
        np.testing.assert_allclose(dx, other_dx, rtol=0, atol=scale * 1e-12)
        for key in mine:
            gradients[key] = gradients.get(key, 0) + mine[key]
    assert gradients.keys() == alone[0][2].keys()
    for key, gradient in gradients.items():
        np.testing.assert_allclose(gradient, sum(one[2][key] for one in alone), rtol=0, atol=scale * 1e-11, err_msg=key)
