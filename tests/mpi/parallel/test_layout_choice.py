"""Choice of a layout on the ranks here: memory is the ledger's, order that of predicted times."""

from dataclasses import replace

import pytest

pytest.importorskip("safetensors")

from parallel.planning.measured import measured_costs, measured_messages, step_forecast
from parallel.planning.measured.layout_choice import LayoutChoice, LayoutForecast, Refusal, candidates
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch):
    monkeypatch.setattr(measured_costs, "TIMES", (1, 1))
    monkeypatch.setattr(measured_messages, "TIMES", (1, 1))
    monkeypatch.setattr(step_forecast, "tiny_step_seconds", lambda *given: 1e-3)


GIVEN = complete({"data": "copy", "model": "gpt:tiny", "length": 16, "batch": 24, "steps": 2, "warm_up": 0})


def test_memory_is_the_ledgers(comm):
    """Of every fourth candidate, to the byte, after a training step."""
    choice, layouts = LayoutChoice(comm, 1e12), list(candidates(GIVEN, comm.size))
    assert len(layouts) == len(set(layouts))
    fitting = 0
    for settings in layouts[:: max(1, len(layouts) // 8)]:
        found = choice.judge(settings)
        if isinstance(found, Refusal):
            assert found.reason
            continue
        fitting += 1
        assert found.step.seconds > 0 and sum(found.step.parts.values()) == pytest.approx(found.step.seconds)
        with Training(replace(found.settings, steps=1), comm) as training:
            list(training.run())
            assert found.memory[comm.rank] == dict(training.engine.ledger.needed), found.settings
    assert fitting > 2


def test_over_memory(comm):
    found = LayoutChoice(comm, 1000).judge(GIVEN)
    assert isinstance(found, Refusal) and "iB over 1000 B; " in found.reason


def test_search_is_in_order_of_time(comm):
    given = complete({"data": "teacher_classes", "model": "mlp:tiny", "batch": 24, "steps": 2})
    fitting, refused = LayoutChoice(comm, 1e12).search(given)
    seconds = [each.step.seconds for each in fitting]
    assert seconds == sorted(seconds) and all(isinstance(each, LayoutForecast) for each in fitting)
    assert len(fitting) + len(refused) == len(list(candidates(given, comm.size)))
    assert {each.settings.layout for each in fitting} >= ({"dp", "zero3", "ps"} if comm.size > 1 else {"dp"})
