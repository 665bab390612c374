"""Memory that a rank of a mesh allocates, beside that of the ledger."""

import gc
import tracemalloc

import numpy as np
import pytest

from collectives import Communicator
from collectives.transport.memory import shared_heap
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.optim.optimizers import AdamW
from parallel.trainer.strategies import strategy_of

TOKENS, CONTEXT, COUNT, MIB = 512, 128, 4, 1 << 20

MESHES = {
    1: ({"layout": "dp"},),
    2: ({"mesh": "tp=2"}, {"layout": "pp:1f1b", "mesh": "pp=2"}),
    4: ({"layout": "pp:1f1b", "mesh": "pp=2,tp=2"}, {"layout": "zero1", "mesh": "dp=2,tp=2"}),
    8: ({"layout": "pp:1f1b", "mesh": "pp=2,dp=2,tp=2"}, {"layout": "pp:zb-h1", "mesh": "pp=2,zero1=2,tp=2"}),
}
"""Settings by number of ranks."""


def batches(numbers, length):
    for number in numbers:
        x, y = np.random.default_rng(number).integers(0, TOKENS, (2, 2, length))
        yield number, x, y, np.arange(2) + 2 * number


def allocated(world, settings, monkeypatch):
    """Peak of the bytes that an engine and two of its steps allocate, and the ledger's bytes.

    Those of `Communicator.empty` are mapped, which tracemalloc does not see.
    """
    mapped, make = [], shared_heap._make

    def counted(nbytes):
        mapped.append(nbytes)
        return make(nbytes)

    monkeypatch.setattr(shared_heap, "_make", counted)
    gc.collect()
    kind, model = strategy_of(settings).engine_class(settings), transformer(TOKENS, CONTEXT, 4, 8, 512)
    tracemalloc.start()
    try:
        with (
            Communicator(world, shared=False) as comm,
            kind(model, SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings) as made,
        ):
            for _ in range(2):
                made.step(list(batches(made.share(COUNT), CONTEXT)))
            return tracemalloc.get_traced_memory()[1] + sum(mapped), sum(made.ledger.needed.values())
    finally:
        tracemalloc.stop()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_allocated_memory_is_that_of_the_ledger(comm, monkeypatch):
    """On every rank, to 10 %; without buffers for messages through shared memory."""
    world = comm.Dup()
    for options in MESHES.get(comm.Get_size(), ()):
        settings = Settings(check_every=0, **options)
        allocated(world, settings, monkeypatch)  # loads code
        found, expected = allocated(world, settings, monkeypatch)
        every = comm.allgather((found, expected))
        if comm.Get_rank() == 0:
            print(f"\n{options}: MiB by rank, measured and in the ledger:")
            print("  " + ", ".join(f"{a / MIB:.1f} ({b / MIB:.1f})" for a, b in every))
        assert all(abs(a - b) <= 0.1 * b for a, b in every), [round(a / b, 3) for a, b in every]
    world.Free()
