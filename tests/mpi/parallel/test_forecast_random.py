"""The forecast of random configurations of all strategies is the ledger after all steps, to the byte."""

import pytest
from support.tiers import default

pytest.importorskip("safetensors")

from verify_forecasts import draw_settings, forecast_difference

from parallel.engine.settings import LAYOUT_NAMES

pytestmark = pytest.mark.ranks(3)

SEEDS = 200


@pytest.mark.parametrize("seed", default(range(SEEDS), *range(0, 12, 2)))
def test_to_the_byte(comm, seed):
    settings = draw_settings(seed, comm.size)
    assert forecast_difference(settings, comm) == "", settings


def test_strategies_in_turn():
    layouts = [draw_settings(seed, 4).layout.partition(":")[0] for seed in range(len(LAYOUT_NAMES))]
    assert layouts == list(LAYOUT_NAMES)
