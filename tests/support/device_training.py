"""Training steps of a small model on the host and on a GPU, by the same code."""

import numpy as np
import pytest

from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.grad_compression import parse
from parallel.engine.settings import Settings
from parallel.optim.optimizers import SGD, AdamW
from support import tiny_models

TOLERANCES = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 1e-1, "fp64": 1e-10}


COMPRESSORS = ("int8", "int4", "qsgd:6", "terngrad", "sign", "topk:0.05", "powersgd:2")
"""Compressors of gradients, each once."""


def trained(comm, layout, device, optimizer=None, **settings):
    """Reports of three steps, and the weights after them by (name, start)."""
    settings = {"layout": layout, "device": device, "first_bytes": 1, "bucket_bytes": 5000, "clip": 1.0, **settings}
    with DataParallelEngine(
        tiny_models.model(), tiny_models.Squares(), comm, optimizer or AdamW(rate=0.01), Settings(**settings)
    ) as made:
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


def compresses_as_on_the_host(comm, compress):
    """Weights after three steps within what other codes of some elements make of them, and what remains to be sent."""
    settings = {"compress": compress, "optimizer": SGD(rate=0.01)}
    reports, values = trained(comm, "dp", "cuda", **settings)
    expected_reports, expected = trained(comm, "dp", "cpu", **settings)
    assert [report.loss for report in reports] == pytest.approx([other.loss for other in expected_reports], rel=1e-2)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        if not name[0].startswith("feedback/"):
            np.testing.assert_allclose(values[name], value, rtol=0, atol=5e-3, err_msg=str(name))
    kept = [name for name in expected if name[0].startswith("feedback/")]
    assert bool(kept) == parse(compress).feedback
    here, there = (np.concatenate([np.zeros(1), *(of[name].ravel() for name in kept)]) for of in (expected, values))
    assert np.linalg.norm(there - here) <= 0.1 * np.linalg.norm(here)
