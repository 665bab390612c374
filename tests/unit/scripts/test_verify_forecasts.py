"""verify_forecasts: forecasts that are the ledger, one that is not, wrong requests."""

import pytest
import verify_forecasts
from support.program_runs import call

pytest.importorskip("safetensors")


def test_forecasts_that_are_the_ledger():
    done = call(verify_forecasts.main, "--forecasts", 2, "--seed", 1)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("2 of 2 forecasts are the ledger")


def test_one_that_is_not(monkeypatch):
    monkeypatch.setattr(verify_forecasts, "forecast_difference", lambda settings, comm: "needed bytes: expected 1")
    done = call(verify_forecasts.main, "--forecasts", 1, "--seed", 2)
    first, second, end = done.stdout.splitlines()
    assert done.returncode == 1 and end.startswith("0 of 1 forecasts")
    assert first.startswith("seed 2 fails: ") and second == "  rank 0: needed bytes: expected 1"
    assert {"data=copy", "model=gpt:tiny", "precision=fp16"} <= set(first.split())


@pytest.mark.parametrize("arguments", [(), ("--forecasts", 0), ("--forecasts", 1, "--seed", -1)])
def test_wrong_requests(arguments):
    assert call(verify_forecasts.main, *arguments).returncode == 2
