"""Which engine a layout stands for, and what is said in vain."""

from dataclasses import replace

import pytest

from parallel.asynchronous.decentralized.styles import STYLES
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.settings import LAYOUT_NAMES, OPTIONS, Settings
from parallel.trainer import strategies
from parallel.trainer.strategies import STRATEGIES, strategy_of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_engine_is_a_way(layout):
    assert strategy_of(Settings(layout=layout)) is STRATEGIES[layout]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_replicas_is_a_way(style):
    way = strategy_of(Settings(layout=style))
    way.check(Settings(layout=style), 4)
    for option in OPTIONS.values():
        if style in option.layouts:
            strategy_of(Settings(layout=style, **{option.name: True if option.kind == "bool" else 2}))
    with pytest.raises(ValueError, match=f"check_every: with {style} ranks have different weights"):
        way.check(Settings(layout=style, check_every=1), 4)


@pytest.mark.parametrize("layout", ["", "zero", "zero3:", "dp:x", ":dp", "sgp:1"])
def test_others_are_refused(layout):
    with pytest.raises(ValueError, match=r"layout: expected one of dp-naive, .*found"):
        strategy_of(Settings(layout=layout))


def test_what_stands_after_the_colon_is_the_ways_own_matter(monkeypatch):
    monkeypatch.setitem(strategies.STRATEGIES, "other", STRATEGIES["dp"]._replace(has_variants=True))
    assert strategy_of(Settings(layout="other:1:2")) is STRATEGIES["other"]


def test_an_option_of_other_layouts_is_refused(monkeypatch):
    own = replace(OPTIONS["check_every"], layouts=("dp", "pp"))
    monkeypatch.setitem(OPTIONS, "check_every", own)
    strategy_of(Settings(layout="pp:1f1b", check_every=3))
    strategy_of(Settings(layout="zero1"))
    with pytest.raises(ValueError, match="check_every: it belongs to dp, pp, and the layout is zero1"):
        strategy_of(Settings(layout="zero1", check_every=3))


def test_options_name_all_layouts():
    assert tuple(STRATEGIES) == LAYOUT_NAMES
    assert all(set(option.layouts) <= set(LAYOUT_NAMES) for option in OPTIONS.values())


def test_gradients_are_compressed_only_where_ranks_have_all_of_a_sum():
    STRATEGIES["dp"].check(Settings(compress="int8"), 4)
    STRATEGIES["zero1"].check(Settings(layout="zero1", compress="none"), 4)
    with pytest.raises(
        ValueError, match=r"compress: expected none, since .* only where .* layout is zero1; found int8"
    ):
        STRATEGIES["zero1"].check(Settings(layout="zero1", compress="int8"), 4)
    with pytest.raises(ValueError, match=r"compress: expected one of int8, .*, auto, none; found ''"):
        STRATEGIES["dp"].check(Settings(compress=""), 4)
