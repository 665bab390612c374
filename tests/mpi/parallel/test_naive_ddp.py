"""Every data-parallel layout trains as the naive reference does, up to rounding."""

import numpy as np
import pytest
from support import tiny_models
from support.training_states import whole

from parallel.data.sampler import batch_of
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.naive_ddp import NaiveDataParallel
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.optim.optimizers import LAMB, SGD, AdamW

pytestmark = pytest.mark.ranks(3)

STEPS = (4, 3, 5)


def float32(batches):
    """Inputs, targets and sample numbers of micro-batches, as the engine casts them."""
    for batch in map(batch_of, batches, range(len(batches))):
        yield batch.x.astype(np.float32), batch.y.astype(np.float32), np.asarray(batch.samples, np.int64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", [SGD(rate=0.05, momentum=0.9), AdamW(rate=0.01), LAMB(rate=0.01)], ids=str)
def test_a_layout_equals_the_reference(comm, layout, optimizer):
    settings = Settings(layout=layout, first_bytes=1, bucket_bytes=5000)
    naive = NaiveDataParallel(tiny_models.model(), tiny_models.Squares(), comm, optimizer)
    with DataParallelEngine(tiny_models.model(), tiny_models.Squares(), comm, optimizer, settings) as engine:
        for step, count in enumerate(STEPS):
            batches = list(tiny_models.batches(engine.share(count), step))
            assert engine.step(batches).loss == pytest.approx(naive.step(float32(batches)), rel=1e-5)
        found = whole(comm, engine)
    for place in naive.flat.places:
        name, value = place.parameter.name, place.parameter.data
        np.testing.assert_allclose(found[f"model/{name}"].reshape(value.shape), value, rtol=2e-4, atol=2e-6)
