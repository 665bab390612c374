"""Which engine a layout stands for, and what is said in vain."""

import pytest

from parallel import ways
from parallel.layouts import LAYOUTS
from parallel.decentralized.styles import STYLES
from parallel.settings import Settings
from parallel.ways import WAYS, Way, way_of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_engine_is_a_way(layout):
    assert way_of(Settings(layout=layout)) is WAYS[layout]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_replicas_is_a_way(style):
    way = way_of(Settings(layout=style))
    way.check(Settings(layout=style), 4)
    for name in way.settings:
        way_of(Settings(layout=style, **{name: 2}))
    with pytest.raises(ValueError, match=f"check_every: with {style} ranks have different weights"):
        way.check(Settings(layout=style, check_every=1), 4)


@pytest.mark.parametrize("layout", ["", "zero", "zero3:", "dp:x", ":dp", "sgp:1"])
def test_others_are_refused(layout):
    with pytest.raises(ValueError, match=r"layout: expected one of dp-naive, .*found"):
        way_of(Settings(layout=layout))


def test_what_stands_after_the_colon_is_the_ways_own_matter(monkeypatch):
    monkeypatch.setitem(ways.WAYS, "other", Way(WAYS["dp"].engine, kinds=True))
    assert way_of(Settings(layout="other:1:2")) is WAYS["other"]


def test_a_setting_of_another_way_is_refused(monkeypatch):
    monkeypatch.setitem(ways.WAYS, "other", Way(WAYS["dp"].engine, settings=("check_every",)))
    way_of(Settings(layout="other", check_every=3))
    way_of(Settings(layout="dp"))
    with pytest.raises(ValueError, match="check_every: it belongs to other, and the layout is zero1"):
        way_of(Settings(layout="zero1", check_every=3))


def test_gradients_are_compressed_only_where_ranks_have_all_of_a_sum():
    WAYS["dp"].check(Settings(compress="int8"), 4)
    WAYS["zero1"].check(Settings(layout="zero1", compress="none"), 4)
    with pytest.raises(ValueError, match=r"compress: expected none, since only where .* layout is zero1; found int8"):
        WAYS["zero1"].check(Settings(layout="zero1", compress="int8"), 4)
    with pytest.raises(ValueError, match=r"compress: expected one of int8, .*, auto, none; found ''"):
        WAYS["dp"].check(Settings(compress=""), 4)
