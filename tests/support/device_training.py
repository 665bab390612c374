"""Training steps of a small model on the host and on a GPU, by the same code."""

import numpy as np
import pytest

from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.optim.optimizers import AdamW
from support import tiny_models

TOLERANCES = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 1e-1, "fp64": 1e-10}


def trained(comm, layout, device, **settings):
    """Reports of three steps, and the weights after them by (name, start)."""
    optimizer = AdamW(rate=0.01)
    settings = {"layout": layout, "device": device, "first_bytes": 1, "bucket_bytes": 5000, "clip": 1.0, **settings}
    with DataParallelEngine(tiny_models.model(), tiny_models.Squares(), comm, optimizer, Settings(**settings)) as made:
        reports = [made.step(tiny_models.batches(made.share(5), step)) for step in range(3)]
        assert made.ledger.allocated == made.ledger.predicted
        values = {}
        for piece in made.tensor_slices():
            values[piece.name, piece.start] = np.asarray(piece.array.get() if device == "cuda" else piece.array)
        return reports, values


def trains_as_on_the_host(comm, layout, precision):
    settings = {"precision": precision, "reproducible": True}
    reports, values = trained(comm, layout, "cuda", **settings)
    expected_reports, expected = trained(comm, layout, "cpu", **settings)
    tolerance = TOLERANCES[precision]
    for report, other in zip(reports, expected_reports):
        assert report.loss == pytest.approx(other.loss, rel=tolerance) and report.skipped == other.skipped
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=tolerance, atol=tolerance, err_msg=str(name))
