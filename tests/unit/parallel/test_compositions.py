"""Random compositions of mesh, layout and settings train as one rank does; mistakes of other systems are found."""

from dataclasses import replace

import numpy as np
import pytest
from conformance.composition import SIMPLEST, Composition, simpler
from conformance.composition_run import difference, shrink
from conformance.random_composition import draw
from verify_compositions import CASES

from parallel.engine.data_parallel.expert_shards import ExpertGradients, JoinedGradients
from parallel.engine.data_parallel.logical_blocks import LogicalBlocks
from parallel.engine.data_parallel.sharded_optimizer import ShardedOptimizer
from parallel.engine.step_sync import StepSync
from parallel.nn.dropout import Dropout
from parallel.nn.flat_params import BLOCK
from parallel.nn.kernels.storage import widen
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.placement import Features
from parallel.sharding.context.messages import RingShift
from parallel.sharding.context.positions import DividedPositionEmbedding
from parallel.sharding.expert.expert_ranks import ExpertRanks
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor import grouped_shards, mixture_shards, vocabulary
from parallel.sharding.tensor.redistribute import CopyToShards
from parallel.sharding.tensor.shards import DropoutShard
from parallel.sharding.tensor.vocabulary import VocabularyCrossEntropy

RANKS, TRIALS = 4, 200


@pytest.mark.parametrize("name", CASES)
def test_published_bugs(name):
    assert not difference(CASES[name])


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(5, 95, 5))])
def test_random_compositions(first):
    for seed in range(first, first + 5):
        composition = draw(seed, RANKS)
        assert composition.ranks <= RANKS
        assert not difference(composition), str(composition)


EDGES = (
    Composition(mesh="cp=4", length=1),
    Composition(mesh="cp=3", length=2, samples=2, context="ring"),
    Composition(mesh="tp=3", heads=1, vocabulary=2),
    Composition(mesh="cp=2,tp=2", heads=1, length=3),
    Composition(mesh="cp=2", length=4, layers=0),
    Composition(mesh="cp=3,tp=2", heads=3, length=12, sequence=True, dropout=True, context="ring"),
    Composition(mesh="zero3=2,pp=2", layout="pp:dualpipe-v", layers=2, length=3, depths=0.6, microbatches=8),
    Composition(mesh="cp=2,tp=2", shards=2, heads=2, length=8, depths=0.2, sequence=True, dropout=True),
    *(
        Composition(mesh=mesh, shards=4, parts=4, heads=2, length=16, sequence=True, dropout=True, reproducible=True)
        for mesh in ("cp=2,tp=2", "dp=2,tp=4")
    ),
    Composition(mesh="cp=2,tp=3", shards=3, parts=2, heads=3, length=6, sequence=True, reproducible=True),
    Composition(
        **{"mesh": "cp=2", "next_mesh": "tp=2", "shards": 2, "parts": 4, "length": 24, "reproducible": True},
        **{"family": "gated", "heads": 2, "sequence": True, "precision": "bf16", "microbatches": 3},
    ),
    Composition(
        **{"mesh": "pp=2,tp=2", "layout": "pp:zb-v", "next_mesh": "pp=1,cp=4", "next_layout": "pp:1f1b", "layers": 2},
        **{"shards": 2, "parts": 4, "heads": 2, "length": 8, "sequence": True, "reproducible": True, "clip": True},
    ),
    Composition(
        **{"mesh": "tp=4", "next_mesh": "dp=2,tp=2", "shards": 4, "heads": 3, "head_width": 3, "length": 12},
        **{"precision": "fp32", "compress": "powersgd:1", "microbatches": 5, "layout": "dp-bucket", "samples": 3},
    ),
    Composition(mesh="pp=2", layout="pp:zb-v", cuts="0,1,2,3,4", layers=2, next_mesh="pp=2", next_layout="pp:gpipe"),
    Composition(
        mesh="pp=2,dp=2,ep=2", layout="pp:dualpipe", layers=4, experts=3, choices=2, microbatches=6, overlap=True
    ),
)
"""Fewer tokens, heads or classes than ranks; chosen tokens; slices; pairs; factors of other shards, and cuts, that the
second layout cannot have."""


@pytest.mark.parametrize("composition", EDGES, ids=str)
def test_edges(composition):
    assert not difference(composition)


def local_count(patch):
    """The mean loss of a step divides by the targets of this rank's micro-batches."""
    begin = StepSync.begin

    def wrong(self, given, *others, **named):
        assignment, total, stop = begin(self, given, *others, **named)
        return assignment, max(1, sum(given.counts)) if total else 0, stop

    patch.setattr(StepSync, "begin", wrong)


def count_of_all_copies(patch):
    """Targets are counted by every rank that shares their sequences or the operators."""
    begin = StepSync.begin

    def wrong(self, *given, **named):
        assignment, count, stop = begin(self, *given, **named)
        return assignment, count * len(self._teams[0]) if self._teams else count, stop

    patch.setattr(StepSync, "begin", wrong)


def one_block(patch):
    """Queries, keys and values of a shard are taken as neighbouring columns."""
    patch.setattr(Features, "ranges", lambda self, start, stop: ((start * sum(self.widths), stop * sum(self.widths)),))


def unsummed_copies(patch):
    """Gradients of a norm before operators that are cut are those of one rank's shards."""
    patch.setattr(CopyToShards, "start_backward", lambda self, dy: lambda: None if dy is None else self._rounded(dy))


def copies_in_the_norm(patch):
    """Parameters that all ranks have count once for each of them."""

    def wrong(self, sums):
        parts = self._axis.comm.allgather(sums) if self._axis.size > 1 else [sums]
        whole = np.zeros(self._size)
        for numbers, part in zip(self._numbers, parts, strict=True):
            np.add.at(whole, numbers, part)
        return whole

    patch.setattr(LogicalBlocks, "gather", wrong)


def first_keys_again(patch):
    """Ring attention goes on with the keys and values that it has sent."""
    start, wait = RingShift.start, RingShift.wait

    def remember(self, x, target):
        self.sent = x
        start(self, x, target)

    def wrong(self):
        arrived = wait(self)
        return self.sent if self.sent.shape == arrived.shape and self._tag == 1 else arrived

    patch.setattr(RingShift, "start", remember)
    patch.setattr(RingShift, "wait", wrong)


def local_maximum(patch):
    """The loss subtracts the largest score of the rank's own part of the vocabulary."""
    allreduce = vocabulary.allreduce
    patch.setattr(vocabulary, "allreduce", lambda axis, x, *how, **op: widen(x) if op else allreduce(axis, x, *how))


def classes_of_one_rank(patch):
    """Labels are smoothed over the rank's own part of the vocabulary."""
    expected_score = VocabularyCrossEntropy._expected_score

    def wrong(self, scores, targets):
        every, self.units = self.units, scores.shape[-1:]
        try:
            return expected_score(self, scores, targets)
        finally:
            self.units = every

    patch.setattr(VocabularyCrossEntropy, "_expected_score", wrong)


def norm_of_all_ranks(patch):
    """The norm is too large by the square root of the number of ranks that share the operators."""
    gather = LogicalBlocks.gather
    patch.setattr(LogicalBlocks, "gather", lambda self, sums: gather(self, sums) * self._axis.size)


def masks_of_shards(patch):
    """Dropout draws a mask for the shard instead of a part of the whole mask."""
    patch.setattr(DropoutShard, "_mask", Dropout._mask)


def positions_of_parts(patch):
    """Positions are counted from the beginning of the rank's part."""
    patch.setattr(
        DividedPositionEmbedding,
        "_indices",
        lambda self, x: np.arange(len(self.positions)),
    )


def experts_by_their_ranks(patch):
    """Gradients of experts are divided by the number of ranks that share them."""
    accumulate = ExpertGradients.__call__

    def wrong(self, parameter, compute):
        def divided(out):
            compute(out)
            out /= 2

        accumulate(self, parameter, divided)

    patch.setattr(ExpertGradients, "__call__", wrong)


def routers_of_first_ranks(patch):
    """Gradients of routers are summed over the first ranks of the teams that share experts."""
    accumulate = JoinedGradients.__call__

    def wrong(self, parameter, compute):
        if ".router." not in parameter.name or self._groups.plan.rank % self._groups.teams.size == 0:
            accumulate(self, parameter, compute)

    patch.setattr(JoinedGradients, "__call__", wrong)


def norm_without_experts(patch):
    """Norms leave out parameters that not all replicas have."""
    squares = ShardedOptimizer._squares

    def wrong(self):
        sizes = [(part, sum(span.size for span in part.mine) // BLOCK) for part in self._parts]
        counted = [np.full(size, not isinstance(part.gradients, ExpertGradients)) for part, size in sizes]
        return squares(self) * np.concatenate(counted)

    patch.setattr(ShardedOptimizer, "_squares", wrong)


def stale_permutation(patch):
    """Gradients of tokens travel by the permutation of the micro-batch before."""
    backward = MixtureOfExperts.backward

    def wrong(self, dy, saved, grads):
        stale, self.stale = getattr(self, "stale", saved), saved
        return backward(self, dy, stale if isinstance(self.experts, ExpertRanks) else saved, grads)

    patch.setattr(MixtureOfExperts, "backward", wrong)


def unsummed_heads(patch):
    """Gradients of keys and values are those of the query heads of one rank."""
    patch.setattr(grouped_shards, "allreduce_among", lambda axis, terms, holders: [widen(term) for term in terms])


def routers_of_own_experts(patch):
    """Along tp, gradients of tokens and routers are those by the rank's own experts."""
    total = mixture_shards.allreduce
    patch.setattr(mixture_shards, "allreduce", lambda axis, x, how: widen(x) if x.ndim == 1 else total(axis, x, how))


NAMED_MISTAKES = {
    routers_of_own_experts: "gradients of experts on the ranks of an axis that shares tokens",
    unsummed_heads: "key/value heads with unequal numbers of copies",
    experts_by_their_ranks: "gradients of experts divided by the ranks that share them",
    routers_of_first_ranks: "gradients of routers summed over some of their copies",
    norm_without_experts: "experts left out of the norm",
    stale_permutation: "tokens returned in the order of another micro-batch",
}


@pytest.mark.parametrize("mistake", NAMED_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_found_by_their_cases(mistake, monkeypatch):
    mistake(monkeypatch)
    assert "differs from" in difference(CASES[NAMED_MISTAKES[mistake]])


MISTAKES = [
    *(local_count, one_block, copies_in_the_norm, norm_of_all_ranks),
    *(pytest.param(one, marks=pytest.mark.full) for one in (count_of_all_copies, unsummed_copies, first_keys_again)),
    *(pytest.param(one, marks=pytest.mark.full) for one in (local_maximum, masks_of_shards, positions_of_parts)),
    pytest.param(classes_of_one_rank, marks=pytest.mark.full),
]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, monkeypatch):
    """By another result of a random composition, of at most `TRIALS`: an error may be one of the mistake's own code."""
    mistake(monkeypatch)
    assert any("differs from" in difference(draw(seed, RANKS)) for seed in range(TRIALS))


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_a_failure_is_made_simple(monkeypatch):
    masks_of_shards(monkeypatch)
    complex_one = replace(
        CASES["dropout masks that depend on the shard"], mesh="dp=2,tp=2", clip=True, optimizer="adamw", samples=3
    )
    least = shrink(complex_one, lambda one: bool(difference(one)), most=80)
    assert "differs from" in difference(least)
    assert (least.dropout, least.clip, least.optimizer, least.family) == (True, False, "sgd", "mlp")
    assert Mesh.parse(least.mesh).sizes["tp"] == 2


def test_drawing_is_repeatable_and_simpler_ones_are_simpler():
    assert draw(7, RANKS) == draw(7, RANKS)
    assert str(SIMPLEST) == "" and not list(simpler(SIMPLEST))
    composition = Composition(heads=4, clip=True, mesh="dp=2,tp=3")
    assert {str(one) for one in simpler(composition)} == {
        "heads=4 mesh=dp=2,tp=3",
        "mesh=dp=2,tp=3 clip=True",
        "heads=2 mesh=dp=2,tp=3 clip=True",
        "heads=3 mesh=dp=2,tp=3 clip=True",
        "heads=4 clip=True",
        "heads=4 mesh=tp=3 clip=True",
        "heads=4 mesh=dp=2 clip=True",
        "heads=4 mesh=dp=2,tp=2 clip=True",
    }
