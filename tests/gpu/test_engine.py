"""Every layout, and every compressor of gradients, trains on a GPU as it does on the host, by the same code."""

import pytest
from support.device_training import COMPRESSORS, TOLERANCES, compresses_as_on_the_host, trains_as_on_the_host

from parallel.engine.data_parallel.layouts import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_as_on_the_host(comm, cupy, layout, precision):
    trains_as_on_the_host(comm, layout, precision)


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_compressed_gradients(comm, cupy, compress):
    compresses_as_on_the_host(comm, compress)
