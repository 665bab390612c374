"""verify_compositions: compositions that equal one rank, one that fails, wrong requests."""

import pytest
import verify_compositions
from conformance.composition import Composition
from support.program_runs import call


def script(*arguments):
    return call(verify_compositions.main, *arguments)


def test_compositions_that_equal_one_rank():
    done = script("--compositions", 2, "--seed", 3, "--ranks", 2)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("2 of 2 compositions equal one rank")


def test_one_that_fails_is_made_simple(monkeypatch):
    drawn = Composition(mesh="dp=2,tp=2", heads=6, clip=True, seed=5)
    monkeypatch.setattr(verify_compositions, "draw", lambda *_: drawn)
    monkeypatch.setattr(verify_compositions, "difference", lambda one, _: "it differs" if one.heads > 2 else "")
    done = script("--compositions", 1, "--seed", 5)
    assert done.returncode == 1
    first, text, least, _, end = done.stdout.splitlines()
    assert first == "seed 5 fails: heads=6 mesh=dp=2,tp=2 clip=True seed=5" and text.strip() == "it differs"
    assert least.strip() == "as simple as possible: heads=3 seed=5"
    assert end.startswith("0 of 1 compositions equal one rank")


@pytest.mark.parametrize("arguments", [("--compositions", 0), ("--seed", -1), ("--ranks", 0)])
def test_wrong_requests(arguments):
    assert script(*arguments).returncode == 2
