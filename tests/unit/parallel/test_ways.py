"""Which engine a layout stands for, and what is said in vain."""

import pytest

from parallel import ways
from parallel.layouts import LAYOUTS
from parallel.settings import Settings
from parallel.ways import WAYS, Way, way_of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_engine_is_a_way(layout):
    assert way_of(Settings(layout=layout)) is WAYS[layout]


@pytest.mark.parametrize("layout", ["", "zero", "zero3:", "dp:x", ":dp"])
def test_others_are_refused(layout):
    with pytest.raises(ValueError, match="layout: expected one of dp-naive, .*found"):
        way_of(Settings(layout=layout))


def test_what_stands_after_the_colon_is_the_ways_own_matter(monkeypatch):
    monkeypatch.setitem(ways.WAYS, "other", Way(WAYS["dp"].engine))
    assert way_of(Settings(layout="other:1:2")) is WAYS["other"]


def test_a_setting_of_another_way_is_refused(monkeypatch):
    monkeypatch.setitem(ways.WAYS, "other", Way(WAYS["dp"].engine, settings=("check_every",)))
    way_of(Settings(layout="other", check_every=3))
    way_of(Settings(layout="dp"))
    with pytest.raises(ValueError, match="check_every: it belongs to other, and the layout is zero1"):
        way_of(Settings(layout="zero1", check_every=3))
