"""A chain of checkpoints over meshes of every kind: the next step of each has the bits of one rank."""

import numpy as np
import pytest
from mpi4py import MPI
from support.training_states import differing, whole

from collectives import Communicator
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.optim.optimizers import AdamW
from parallel.trainer.engine import Engine

TOKENS, CONTEXT, HEADS = 23, 8, 8


def hops(ranks):
    """Layout, mesh and parts of sequences of every hop, on so many ranks."""
    yield "dp", f"dp={ranks}", 1
    yield "dp", f"tp={ranks}", 1
    if ranks % 2 == 0:
        yield "pp:1f1b", f"pp=2,tp={ranks // 2}", 1
        yield "dp", f"cp=2,dp={ranks // 2}", 2
    yield "zero3", f"dp={ranks}", 1


def engine(comm, layout="dp", mesh=None, parts=1, shards=1):
    settings = {"layout": layout, "mesh": mesh, "reproducible": True, "micro_batch": 1, "clip": 0.5}
    settings |= {"tensor_shards": shards, "bucket_bytes": 4000, "first_bytes": 1, "check_every": 1}
    settings |= {"sequence_parts": parts} if parts > 1 else {}
    model = transformer(TOKENS, CONTEXT, 2, HEADS, 16, dropout=0.1)
    return Engine(model, SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), **settings)


def step(made, number):
    x, y = np.random.default_rng(number).integers(0, TOKENS, (2, 4, CONTEXT))
    report = made.step(x, y)
    return report.loss, report.norm


def state(made):
    return made.inner.save(lambda comm, _: whole(comm, made.inner))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_next_step_has_the_bits_of_one_rank(comm, folder):
    """From dp to tp, pipelines with tp, cp with dp, and ZeRO; one rank has as many logical shards and parts."""
    ranks = comm.Get_size()
    for number, (layout, mesh, parts) in enumerate(hops(ranks)):
        with engine(comm, layout, mesh, parts, ranks) as made, Communicator(MPI.COMM_SELF) as self_comm:
            with engine(self_comm, "dp", "dp=1", parts, ranks) as alone:
                if number:
                    made.load(folder / "checkpoints")
                    alone.load(folder / "checkpoints")
                assert step(made, number) == step(alone, number), mesh
                found, expected = state(made), state(alone)
                assert differing(found, expected) == [], mesh
            made.save(folder / "checkpoints")
