"""Options of trainings: each declared once, with its checks, its argument and its layouts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

import pytest

from parallel.cli.train_arguments import add_settings
from parallel.engine.option import OptionGroup, names_in, option, options_in
from parallel.engine.settings import ALTERNATIVES, GROUPS, OPTIONS, Settings
from parallel.trainer.engine_arguments import OWN, OWNERS


@dataclass(frozen=True, kw_only=True)
class Few(OptionGroup):
    """Some options."""

    kind: str = option("a", "one of {names} (default {default})", choices=("a", "b"), names=("a", "b"))
    share: float | None = option(None, "of 1", "S", least=0.25, below=1)
    count_of: int = option(3, "things", "N", least=1, flag="number")
    on: bool = option(False, "or off")
    how: bool | str = option("none", "in words", "HOW", bare="full")
    hidden: str = option("", "no argument", flag="")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kind": "c"}, "kind: expected one of a, b; found 'c'"),
        ({"kind": None}, "kind: expected str, found None"),
        ({"share": 1}, "share: expected a number from 0.25 to below 1, found 1"),
        ({"share": float("nan")}, "share: expected a number from 0.25 on, found nan"),
        ({"count_of": 0}, "count_of: expected a number from 1 on, found 0"),
        ({"count_of": True}, "count_of: expected int, found True"),
        ({"count_of": 2.0}, "count_of: expected int, found 2.0"),
        ({"on": 1}, "on: expected bool, found 1"),
    ],
    ids=str,
)
def test_values_that_are_refused(given, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        Few(**given)


def test_arguments():
    parser = argparse.ArgumentParser()
    for one in options_in(Few):
        one.add_to(parser)
    assert vars(parser.parse_args([])) == dict.fromkeys(("kind", "share", "count_of", "on", "how"))
    words = ["--kind", "b", "--share", "0.5", "--number", "4", "--no-on", "--how"]
    found = {"kind": "b", "share": 0.5, "count_of": 4, "on": False, "how": "full"}
    assert vars(parser.parse_args(words)) == found and Few(**found).hidden == ""
    assert vars(parser.parse_args(["--no-how"]))["how"] == "none"
    assert "one of a, b (default a)" in parser.format_help()


def test_settings_are_the_groups():
    assert sorted(OPTIONS) == sorted(one.name for one in fields(Settings)) == sorted(names_in(*GROUPS))
    assert len(set(names_in(*GROUPS))) == len(names_in(*GROUPS))
    assert all(getattr(Settings(), name) == one.default for name, one in OPTIONS.items())
    assert {*OWN} | {*OWNERS} >= {*OPTIONS} and not {*OWN} & {*OWNERS}


def test_the_command_line_has_all_options():
    parser = argparse.ArgumentParser()
    add_settings(parser)
    found = vars(parser.parse_args([]))
    assert {name for name in found if name != "threads"} == {name for name, one in OPTIONS.items() if one.flag != ""}
    assert {*found.values()} == {None}


def test_alternatives_are_in_one_group(capsys):
    """Of steps and epochs, and of batch and batch_tokens, the command line takes one."""
    parser = argparse.ArgumentParser()
    add_settings(parser)
    for first, second in ALTERNATIVES[:2]:
        with pytest.raises(SystemExit):
            parser.parse_args([f"{OPTIONS[first].argument}=3", f"{OPTIONS[second].argument}=3"])
        assert f"not allowed with argument {OPTIONS[first].argument}" in capsys.readouterr().err
