"""Measured messages and collectives: equal on all ranks, made once, and predicted again from their record."""

import json

import pytest

pytest.importorskip("safetensors")

from collectives import Communicator
from collectives.selection.cost_model import BUILT_IN
from parallel.planning.measured import measured_costs, measured_messages, step_forecast
from parallel.planning.measured.measured_messages import MeasuredMessages, groups_like
from parallel.planning.measured.measurement_record import MeasurementRecord
from parallel.planning.measured.step_forecast import StepForecaster
from parallel.trainer.recipes import complete

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch):
    monkeypatch.setattr(measured_costs, "TIMES", (1, 2))
    monkeypatch.setattr(measured_messages, "TIMES", (1, 2))
    monkeypatch.setattr(step_forecast, "STEPS", 2)


def messages_of(record):
    return MeasuredMessages(BUILT_IN, record.nodes, record.sharing.cores, record=record)


def test_collectives_are_measured_once(comm):
    record, ranks = MeasurementRecord.on(comm), range(comm.size)
    messages = messages_of(record)
    found = [messages.collective(name, ranks, 1000, True) for name in ("allreduce", "allgatherv", "reduce_scatter")]
    assert comm.allgather(found) == [found] * comm.size
    assert all(seconds > 0 for seconds in found) if comm.size > 1 else found == [0.0] * 3
    count = len(record.values)
    assert count == (6 if comm.size > 1 else 0)
    assert messages.collective("allreduce", ranks, 1000, True) == found[0] and len(record.values) == count
    again = messages_of(MeasurementRecord.from_dict(json.loads(json.dumps(record.as_dict()))))
    assert again.collective("allreduce", ranks, 1000, True) == found[0]


def test_groups_measure_together(comm):
    if comm.size < 2:
        pytest.skip("needs two ranks")
    record = MeasurementRecord.on(comm)
    assert messages_of(record).collective("allreduce", (0, 1), 64) > 0
    (values,) = record.values.values()
    assert len(values) == 2 * len(groups_like((0, 1), comm.size))
    assert messages_of(record).message(0, 1, 0) > 0


def test_the_hidden_share_is_a_share(comm):
    record = MeasurementRecord.on(comm)
    for number, name in enumerate(("allreduce", "allgatherv"), 1):
        share = messages_of(record).hidden(range(comm.size), name)
        assert 0 <= share <= 1 and (comm.size > 1 or share == 0) and len(record.values) == number * (comm.size > 1)


def test_compressed_sums_and_exchanges_of_tokens(comm):
    messages = messages_of(MeasurementRecord.on(comm))
    for name in ("allreduce:int8", "allreduce:topk:0.1", "alltoallv"):
        assert (messages.collective(name, range(comm.size), 1 << 12, True) > 0) == (comm.size > 1)
    if comm.size > 1:
        with pytest.raises(ValueError, match="expected one of allreduce, "):
            messages.collective("scan", range(comm.size), 64)


def test_messages_between_nodes(comm):
    """The pair that measures has a link of the same kind."""
    if comm.size < 3:
        pytest.skip("needs three ranks")
    with Communicator(comm, nodes=[0, 0, *[1] * (comm.size - 2)]) as other:
        record = MeasurementRecord.on(other)
        messages = messages_of(record)
        assert messages.message(1, 2, 64) > 0 and messages.message(0, 1, 64) > 0
        assert [key.startswith(("('message', (0, 2)", "('message', (0, 1)")) for key in record.values] == [True] * 2


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b", "ps"])
def test_a_step_is_predicted_again_from_the_record(comm, layout):
    if (layout == "pp:1f1b" and comm.size != 2) or (layout == "ps" and comm.size < 2):
        pytest.skip("needs two ranks")
    given = complete({"data": "teacher_classes", "model": "mlp:tiny", "layout": layout, "batch": 24, "steps": 2})
    record = MeasurementRecord.on(comm)
    forecaster = StepForecaster(record)
    found = forecaster.step(*forecaster.prepare(given))
    again = StepForecaster(MeasurementRecord.from_dict(json.loads(json.dumps(record.as_dict()))))
    assert dict(again.step(*again.prepare(given)).parts) == pytest.approx(dict(found.parts))
