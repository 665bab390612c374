"""Training steps with CuPy, whose kernels are built and not run: every call is accepted, in every precision."""

import numpy as np
import pytest
from mpi4py import MPI
from support import cupy_without_driver
from support.device_training import COMPRESSORS

from collectives import Communicator
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import AdamW
from parallel.runtime.consistency_check import StepFailed

UNDEFINED = (
    *("ValueError: Embedding", "ValueError: SoftmaxCrossEntropy", "FloatingPointError"),
    *("is not finite", "math domain"),
)
"""Errors about values, which no kernel has written."""


@pytest.mark.timeout(200)  # builds about 60 kernels
@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16"])
def test_step(cupy, precision):
    step(precision=precision)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("compress", COMPRESSORS)
def test_step_with_compressed_gradients(cupy, compress):
    step(compress=compress)


def step(**settings):
    comm = Communicator(MPI.COMM_SELF.Dup(), gpu="staged")
    model, x = build("gpt:tiny", (16,), 256, dropout=0.1), np.zeros((4, 16), np.int64)
    settings = Settings(device="cuda", clip=1.0, **settings)
    cupy_without_driver.LAUNCHED.clear()
    with DataParallelEngine(model, SoftmaxCrossEntropy(), comm, AdamW(rate=1e-3), settings) as engine:
        try:
            engine.step([Batch(number, x, x, np.arange(4)) for number in range(2)])
        except (StepFailed, ValueError) as failed:
            assert any(text in str(failed) for text in UNDEFINED), failed
    comm.close()
    assert len(cupy_without_driver.LAUNCHED) > 200
