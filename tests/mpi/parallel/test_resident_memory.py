"""Memory that the operating system counts for a rank of a mesh, beside that of the ledger."""

import gc
import re
from pathlib import Path

import numpy as np
import pytest

from collectives import Communicator
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.optim.optimizers import AdamW
from parallel.trainer.strategies import strategy_of

TOKENS, CONTEXT, COUNT, MIB = 512, 128, 4, 1 << 20
PEAK = Path("/proc/self/clear_refs")

MESHES = {
    1: ({"layout": "dp"},),
    2: ({"mesh": "tp=2"}, {"layout": "pp:1f1b", "mesh": "pp=2"}),
    4: ({"layout": "pp:1f1b", "mesh": "pp=2,tp=2"}, {"layout": "zero1", "mesh": "dp=2,tp=2"}),
    8: ({"layout": "pp:1f1b", "mesh": "pp=2,dp=2,tp=2"}, {"layout": "pp:zb-h1", "mesh": "pp=2,zero1=2,tp=2"}),
}
"""Settings by number of ranks."""


def status(name):
    """Bytes of an entry of Linux's /proc/self/status."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def batches(numbers, length):
    for number in numbers:
        x, y = np.random.default_rng(number).integers(0, TOKENS, (2, 2, length))
        yield number, x, y, np.arange(2) + 2 * number


def grown(comm, settings, layers, width):
    """Growth of resident memory by an engine and two of its steps at its peak, and the ledger's bytes."""
    model = transformer(TOKENS, CONTEXT, layers, 8, width)
    gc.collect()
    before = status("VmRSS")
    PEAK.write_text("5")  # the peak starts again
    kind = strategy_of(settings).engine_class(settings)
    with kind(model, SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings) as made:
        for _ in range(2):
            made.step(list(batches(made.share(COUNT), CONTEXT)))
        return status("VmHWM") - before, sum(made.ledger.needed.values())


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(not PEAK.exists(), reason="no peak of resident memory without Linux's /proc")
def test_resident_memory_is_that_of_the_ledger(comm):
    """Every rank grows by the ledger's bytes, to 10 %; without shared arrays, which count on ranks that only read."""
    world = comm.Dup()
    for options in MESHES.get(comm.Get_size(), ()):
        settings = Settings(check_every=0, **options)
        with Communicator(world, shared=False) as apart:
            grown(apart, settings, 4, 64)  # loads code, makes buffers of messages
            found, expected = grown(apart, settings, 4, 512)
        every = comm.allgather((found, expected))
        if comm.Get_rank() == 0:
            print(f"\n{options}: MiB by rank, measured and in the ledger:")
            print("  " + ", ".join(f"{a / MIB:.1f} ({b / MIB:.1f})" for a, b in every))
        assert all(abs(a - b) <= 0.1 * b for a, b in every), [round(a / b, 3) for a, b in every]
    world.Free()
