"""Predicted steps of small models by hand: order of exchanges, sums by cause, and equality with the simulator."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.selection.cost_model import BUILT_IN
from parallel.engine.model_on_mesh import plan_of
from parallel.engine.settings import BUILD_FIELDS, DEFAULTS, Settings
from parallel.nn.flat_params import BLOCK
from parallel.nn.models import build as build_model
from parallel.nn.models import mlp
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.simulator import ActionTimes, simulate
from parallel.pipeline.stage_params import Portion
from parallel.planning.measured.core_sharing import CoreSharing
from parallel.planning.measured.data_parallel_step import EXCHANGES, RankGroup, UnitWork, data_parallel_step
from parallel.planning.measured.measured_costs import UNIT_FIELDS, MeasuredCosts, _slowest
from parallel.planning.measured.measurement_record import MeasurementRecord
from parallel.planning.measured.message_costs import MessageCosts
from parallel.planning.measured.pipeline_step import PipelineWork, pipeline_step
from parallel.planning.measured.recording_comm import AxisExchange, RecordingComm
from parallel.planning.measured.step_forecast import StepForecaster, _expert_exchanges, server_step
from parallel.planning.measured.step_timeline import COMPUTE, IDLE, NETWORK, SHARED, UPDATE
from parallel.sharding.mesh import Mesh
from parallel.trainer.recipes import complete

UNITS = [UnitWork(1.0, 1.5, 0.5)] * 3
ONE_NODE, TWO_NODES = (MessageCosts(BUILT_IN, nodes, 8) for nodes in ((0, 0), (0, 1)))


def groups(messages):
    settings = Settings(bucket_bytes=1, first_bytes=1)
    return [RankGroup(plan_of(mlp([8, 8, 8, 4]), 2, 0, settings), (0, 1), messages)]


@pytest.mark.parametrize("layout", EXCHANGES)
def test_every_layout_computes_alike(layout):
    step = data_parallel_step(layout, UNITS, 2, groups(ONE_NODE), 0.25)
    assert step.parts[COMPUTE] == 2 * 3 * 3 and step.parts[UPDATE] == 0.25 and step.parts[NETWORK] == 0
    assert step.seconds == pytest.approx(step.now) and step.parts[SHARED] > 0
    ends = [0.0, *(span.end for span in step.spans)]
    assert [span.start for span in step.spans] == pytest.approx(ends[:-1])


@pytest.mark.parametrize(
    ("layout", "reduced", "gathered"),
    [("dp-naive", 1, 0), ("dp", 6, 0), ("zero1", 6, 6), ("zero2", 12, 6), ("zero3", 6, 6)],
)
def test_number_of_exchanges(layout, reduced, gathered):
    """Of two micro-batches and three units of two tensors each, in buckets of one tensor.

    ZeRO-3 has a bucket for each unit, and two slots: units that a pass used last are there when the next one begins.
    """
    labels = [span.label for span in data_parallel_step(layout, UNITS, 2, groups(ONE_NODE), 0.0).spans]
    counts = [sum(label.startswith(word) for label in labels) for word in (EXCHANGES[layout].collective, "allgatherv")]
    assert counts == [reduced, gathered]


def test_overlap_needs_a_core():
    """Between nodes the allreduce goes on beside the backward pass if a core is left; only the first unit's shows."""
    alone = data_parallel_step("dp", UNITS, 1, groups(replace(TWO_NODES, cores=2)), 0.0)
    beside = data_parallel_step("dp", UNITS, 1, groups(TWO_NODES), 0.0)
    last = [span for span in beside.spans if span.lane == "messages"][-2:]
    assert alone.parts[NETWORK] > beside.parts[NETWORK] == pytest.approx(sum(s.end - s.start for s in last))
    assert CoreSharing(2, 4).crowd == 1 and CoreSharing(6, 4).crowd == 1.5


def test_a_share_of_the_allreduce_is_hidden(monkeypatch):
    """With a half hidden, what shows is half of all buckets, and of the last unit's the other half as well."""
    monkeypatch.setattr(MessageCosts, "hidden", lambda *given: 0.5)
    half = data_parallel_step("dp", UNITS, 1, groups(TWO_NODES), 0.0)
    whole = data_parallel_step("dp-bucket", UNITS, 1, groups(TWO_NODES), 0.0).parts[NETWORK]
    last = [span for span in half.spans if span.lane == "messages"][-2:]
    assert half.parts[NETWORK] == pytest.approx(whole / 2 + last[-1].end - half.spans[-3].end)


def test_weights_are_gathered_beside_the_unit_before(monkeypatch):
    """All hidden: of six gathers of a micro-batch only the first one shows, and those that take longer than a pass."""
    monkeypatch.setattr(MessageCosts, "hidden", lambda *given: 1.0)
    step = data_parallel_step("zero3", UNITS, 1, groups(TWO_NODES), 0.0)
    spans = {name: [each for each in step.spans if each.label.startswith(name)] for name in ("allgatherv", "wait")}
    scatters = [each for each in step.spans if each.label.startswith("reduce_scatter")]
    assert [each.lane for each in spans["allgatherv"]] == ["rank", *["messages"] * 3] and not spans["wait"]
    shown = [*scatters, spans["allgatherv"][0]]
    assert step.parts[NETWORK] == pytest.approx(sum(each.end - each.start for each in shown))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_pipeline_is_the_simulators(schedule):
    mesh, plan = Mesh({"pp": 2, "dp": 1}), build(schedule, 2, 4)
    model = mlp([8, 8, 8, 4])
    portions = [Portion.make(plan_of(model, 2, rank, Settings()), mesh, plan, (0, 1, 3)) for rank in (0, 1)]
    work = PipelineWork(UNITS, [64, 64, 32], portions, (0, 1))
    step = pipeline_step(work, ONE_NODE, CoreSharing(2, 2), lambda elements: 1e-3 * elements)
    message = ONE_NODE.message(0, 1, 64)
    line = simulate(portions[0].plan, ActionTimes([1, 2], [1.5, 3], [0.5, 1], [message, 0]))
    assert step.parts[COMPUTE] + step.parts[IDLE] == pytest.approx(float(line.makespan))
    held = [sum(part.flat.length for _, part in each.held) for each in portions]
    assert step.parts[UPDATE] == pytest.approx(1e-3 * max(held))
    crowded = pipeline_step(work, ONE_NODE, CoreSharing(2, 1), lambda elements: 0.0)
    whole = crowded.parts[COMPUTE] + crowded.parts[IDLE]
    assert whole == pytest.approx(float(sum(line.busy)), abs=10 * message), "one core is never idle, but for messages"
    assert max(span.end for span in crowded.spans if span.lane.startswith("stage")) <= crowded.now
    four = pipeline_step(work, ONE_NODE, CoreSharing(4, 2), lambda elements: 0.0)  # two such pipelines
    assert four.parts[COMPUTE] + four.parts[IDLE] == pytest.approx(whole)


def test_servers_send_one_message_after_another():
    messages = MessageCosts(BUILT_IN, (0, 0, 0), 8)
    step = server_step(UNITS, 4, (1 << 20, 1 << 20), 1, messages, (0.125, 0.25))
    assert step.parts[COMPUTE] == 2 * 9 and step.parts[IDLE] == 4 * 0.125 + 0.25
    whole, empty = messages.message(0, 1, 1 << 20), messages.message(0, 1, 0)
    assert step.parts[SHARED] == pytest.approx(2 * whole + 2 * (2 * whole + 2 * empty))


def test_messages_cost_what_the_selection_says():
    nbytes = 1 << 20
    assert ONE_NODE.collective("allreduce", (0, 1), nbytes) < TWO_NODES.collective("allreduce", (0, 1), nbytes)
    assert ONE_NODE.collective("allreduce", (0,), nbytes) == ONE_NODE.collective("allreduce", (0, 1), 0) == 0
    two_each = MessageCosts(BUILT_IN, (0, 0, 1, 1), 8)  # whose ranks share a card
    alone = TWO_NODES.collective("allreduce", (0, 1), nbytes)
    shared = two_each.collective("allreduce", (0, 2), nbytes)
    assert 1.8 * alone < shared < 2 * alone
    assert TWO_NODES.over_network((0, 1)) and not TWO_NODES.over_network((1,))


def test_recorded_exchanges_have_finite_results():
    comm, whole, part = RecordingComm(), np.full(4, np.nan, np.float32), np.full(2, np.nan, np.float32)
    comm.Allreduce(np.ones(4, np.float32), whole)
    assert whole.tolist() == [1] * 4
    comm.Allgatherv(np.ones(2, np.float32), [whole, [2, 2]])
    comm.Reduce_scatter(np.ones(4, np.float32), part, [2, 2])
    assert np.isfinite(whole).all() and part.tolist() == [1, 1]
    assert comm.take() == [AxisExchange(name, 16) for name in ("allreduce", "allgatherv", "reduce_scatter")]
    assert comm.take() == []
    assert comm.Isend(part, 1).Test() and comm.Irecv(part, 1).Test() and not part.any()
    assert comm.take() == [AxisExchange("message", 8)]


def test_recorded_messages_have_a_cost():
    assert TWO_NODES.among("message", (0, 1), 1 << 20) == TWO_NODES.message(0, 1, 1 << 20) > 0


def test_units_of_another_model_are_measured_again(monkeypatch):
    """Any field that the costs depend on makes another entry; the options of `models.build` are among them."""
    others = {"data": "copy", "length": 7, "model": "convnet", "dropout": 0.5, "recompute": True, "experts": "2"}
    others |= {"depths": "0.5", "products": "fp8", "fake_quant": "int4", "fake_quant_inputs": "int8", "prune": 0.5}
    others |= {"prune_pattern": "rows", "precision": "fp64", "sequence_parallel": True, "tensor_shards": 2}
    others |= {"reproducible": True, "sequence_parts": 4, "context": "ring", "tokenizer": "words.json"}
    others |= {"loss": "mse", "class_weights": "1,2"}
    assert others.keys() == set(UNIT_FIELDS)
    options = [one for one in inspect.signature(build_model).parameters.values() if one.kind is one.KEYWORD_ONLY]
    assert tuple(one.name for one in options) == BUILD_FIELDS
    numbers = iter(range(100))
    monkeypatch.setattr(
        "parallel.planning.measured.measured_costs._unit_costs", lambda *given: trial([[next(numbers), 1, 1]])
    )
    with Communicator(MPI.COMM_SELF) as comm:
        costs = MeasuredCosts(MeasurementRecord.on(comm))
        changed = [DEFAULTS, replace(DEFAULTS, rate=0.5), *(replace(DEFAULTS, **{one: others[one]}) for one in others)]
        found = [costs.units(None, settings, 8, Mesh({"dp": 1})) for settings in changed]
    assert [round(unit.forward) for (unit,) in found] == [0, *range(len(others) + 1)]


def test_units_of_experts_cut_in_another_way_are_measured_again(monkeypatch):
    """Along tp a rank has all experts, some of them, or parts of all; more replicas of them have equal costs."""
    numbers = iter(range(100))
    monkeypatch.setattr(
        "parallel.planning.measured.measured_costs._unit_costs", lambda *given: trial([[next(numbers), 1, 1]])
    )
    cases = ["dp=2,tp=2", "dp=2,tp=2,ep=2", "dp=2,tp=2,ep=2,etp=2", "dp=2,tp=2", "dp=2,tp=2,ep=4"]
    settings = [*(replace(DEFAULTS, mesh=mesh) for mesh in cases)]
    settings += [replace(DEFAULTS, mesh="tp=2,ep=2", tensor_shards=4, expert_shards=shards) for shards in (1, 2)]
    with Communicator(MPI.COMM_SELF) as comm:
        costs = MeasuredCosts(MeasurementRecord.on(comm))
        found = [costs.units(None, each, 8, Mesh.parse(each.mesh)) for each in settings]
    assert [round(unit.forward) for (unit,) in found] == [0, 1, 2, 0, 1, 3, 4]


def trial(*passes):
    """Record of a rank of passes that take so many seconds by unit and part."""
    return {"passes": passes, "exchanges": [[] for _ in passes[0]], "parameters": [0 for _ in passes[0]]}


def test_units_take_what_the_slowest_rank_takes():
    """Of two passes on two ranks: 6 and 9 s on the slower one; of ranks that wait in each unit 8 and 9 s."""
    ranks = trial([[1, 2, 1], [0, 1, 1]], [[1, 1, 1], [1, 1, 1]]), trial([[1, 1, 1], [0, 0, 2]], [[3, 3, 1], [0, 1, 1]])
    apart, together = (_slowest(ranks, wait) for wait in (False, True))
    assert sum(sum(unit[:3]) for unit in apart) == pytest.approx(7.5)
    assert sum(sum(unit[:3]) for unit in together) == pytest.approx(8.5)
    assert apart[0].forward / apart[0].weights == pytest.approx(together[0].forward / together[0].weights)


class BurstMessages(MessageCosts):
    """Collectives of 10 s, of which every second of a pause saves one, up to 4."""

    def collective(self, name, ranks, nbytes, shared=False, idle=float("inf")):
        return max(6.0, 10.0 - idle)


@pytest.mark.parametrize(("layout", "seconds"), [("dp-naive", 6), ("dp-bucket", 6 + 10 + 8 + 10 + 8 + 10)])
def test_messages_after_a_pause(layout, seconds):
    """Of the two tensors of a unit one is exchanged after the unit's backward pass, of 2 s, and the other at once."""
    step = data_parallel_step(layout, UNITS, 1, groups(BurstMessages(BUILT_IN, (0, 0), 8)), 0.0)
    assert step.parts[SHARED] == seconds


def forecaster(ranks, comm):
    """Forecaster of a step on so many ranks of one node, whose messages have the built-in costs."""
    found = StepForecaster(MeasurementRecord((0,) * ranks, CoreSharing(ranks, ranks), comm=comm, measures=True))
    found.messages = MessageCosts(BUILT_IN, (0,) * ranks, ranks)
    return found


@pytest.mark.parametrize(
    ("model", "mesh", "layout"),
    [("gpt", "cp=2", "dp"), ("gpt", "cp=2,tp=2", "zero1"), ("gpt-moe", "dp=2,ep=2", "zero3"), ("gpt", "tp=2", "dp")],
)
def test_layouts_with_exchanges_in_the_units(monkeypatch, model, mesh, layout):
    monkeypatch.setattr("parallel.planning.measured.measured_costs.TIMES", (1, 1))
    monkeypatch.setattr(StepForecaster, "_overhead", lambda *given: 0.0)
    given = complete({"data": "copy", "model": f"{model}:tiny", "length": 16, "batch": 8, "mesh": mesh, "steps": 1})
    with Communicator(MPI.COMM_SELF) as comm:
        found = forecaster(Mesh.parse(mesh).size, comm)
        step = found.step(*found.prepare(replace(given, layout=layout)))
    exchanges = [span for span in step.spans if span.label.endswith("exchanges")]
    assert exchanges and all(span.cause == SHARED for span in exchanges)


def made_job(mesh, **changed):
    """Settings and job of a small mixture on a mesh."""
    given = {"data": "copy", "model": "gpt-moe:tiny", "length": 16, "batch": 8, "mesh": mesh, "steps": 1, **changed}
    with Communicator(MPI.COMM_SELF) as comm:
        return forecaster(Mesh.parse(mesh).size, comm).prepare(complete(given))


EXPERT_EXCHANGES = [  # mesh, settings, exchanges there and back in each pass, rows of choices in each, bytes of a row
    ("dp=2,ep=2", {}, 1, 256, 64 * 4),
    ("dp=2,ep=2", {"precision": "bf16"}, 1, 256, 64 * 2),
    ("dp=2,ep=2", {"dispatch": "direct:int8"}, 1, 256, 64 + 4),
    ("dp=2,ep=2", {"dispatch": "hierarchical:int8"}, 1, 256, 64 * 4),
    ("cp=2,ep=2", {}, 1, 128, 64 * 4),
    ("dp=2,tp=2,ep=4", {}, 1, 128, 64 * 4),
    ("dp=2,tp=2,ep=4", {"sequence_parallel": True}, 1, 128, 64 * 4),
    ("dp=2,tp=2,ep=2,etp=2", {}, 1, 256, 64 * 4),
    ("dp=2,tp=2,ep=4", {"tensor_shards": 4}, 2, 64, 64 * 4),
]


@pytest.mark.parametrize("mesh, changed, count, rows, row", EXPERT_EXCHANGES)
def test_experts_are_exchanged_twice_in_each_pass(mesh, changed, count, rows, row):
    """Of 8 samples of 16 tokens, 2 experts for each, of 8; ranks along tp send to their experts only."""
    settings, job = made_job(mesh, **changed)
    units = _expert_exchanges(settings, job, 8, Mesh.parse(mesh))
    assert {len(unit) for unit in units} == {0, 4 * count}
    assert {one for unit in units for one in unit} == {AxisExchange("alltoallv", rows * row, "ep")}


def test_the_hierarchical_route_encodes_between_nodes():
    mesh = "dp=2,ep=2"
    settings, job = made_job(mesh, dispatch="hierarchical:fp8")
    units = _expert_exchanges(settings, job, 8, Mesh.parse(mesh), network=True)
    assert {one.nbytes for unit in units for one in unit} == {256 * (64 + 4)}


@pytest.mark.parametrize("mesh, experts", [("pp=2,dp=2", 8), ("pp=2,dp=2,ep=2", 4)])
def test_ranks_of_a_pipeline_update_their_experts(monkeypatch, mesh, experts):
    """A rank of the first stage updates embedding and block, without the other ranks' experts."""
    updated = []
    monkeypatch.setattr("parallel.planning.measured.measured_costs.TIMES", (1, 1))
    monkeypatch.setattr(StepForecaster, "_overhead", lambda *given: 0.0)
    monkeypatch.setattr(MeasuredCosts, "update", lambda *given, **work: updated.append(given[-1]) or 0.0)
    settings, job = made_job(mesh, layout="pp:1f1b", cuts="0,2,4")
    with Communicator(MPI.COMM_SELF) as comm:
        forecaster(4, comm).step(settings, job)
    first = [parameter for unit in job.model.items[:2] for parameter in unit.parameters()]
    mixture = job.model.items[1].items[1].inner.items[1]
    others = [parameter for expert in mixture.experts.experts[experts:] for parameter in expert.parameters()]
    lengths = [sum(-(-one.size // BLOCK) * BLOCK for one in some) for some in (first, others)]
    assert max(updated) == lengths[0] - lengths[1]
