"""What servers and workers stand on: clocks, keys, work, order, and updates; all without messages."""

import math
from io import StringIO

import numpy as np
import pytest
from support import tiny_models

from parallel.asynchronous.server.consistency import rule_of
from parallel.asynchronous.server.event_order import EventEntry, EventOrder, ReplayMismatch, create, read
from parallel.asynchronous.server.key_assignment import EmbeddingTable, buckets_of, keys_of, tables
from parallel.asynchronous.server.messages import Envelope, MessageFormat, MessageHandle, MessageKind, ServerMessage
from parallel.asynchronous.server.server_loop import ServerLoop
from parallel.asynchronous.server.shard_store import AsyncStore, ShardState, SyncStore
from parallel.asynchronous.server.work_assignment import PartResult, WorkAssignment, WorkPart, joined
from parallel.data.datasets import ArrayDataset
from parallel.data.sampler import OnDemandSampler, Sampler
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.embedding import Embedding, Unembedding
from parallel.nn.flat_params import FlatParams, Span
from parallel.nn.linear import Linear
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.optimizers import SGD, Adam
from parallel.optim.precision import PRECISIONS
from parallel.trainer.recipes import complete
from parallel.trainer.strategies import strategy_of

# ---------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("text, staleness", [("bsp", 0), ("ssp:0", 0), ("ssp:3", 3), ("async", math.inf)])
def test_a_rule_lets_read_up_to_its_staleness(text, staleness):
    rule = rule_of(text)
    assert rule.staleness == staleness
    assert rule.synchronous == (staleness == 0)
    for gap in range(6):
        assert rule.allows(10 + gap, 10) == (gap <= staleness)


@pytest.mark.parametrize("text", ["", "ssp", "bsp:0", "async:1", "ssp:-1", "ssp:1.5", "ssp:", "other"])
def test_other_rules_are_refused(text):
    with pytest.raises(ValueError, match="consistency: expected"):
        rule_of(text)


class Post:
    """A bus that takes all messages and has none."""

    def send(self, peer, message, *vectors):
        return MessageHandle()

    def poll(self):
        return None


@pytest.mark.parametrize("rule", ["bsp", "ssp:1", "async"])
def test_ticks_that_are_late_or_come_twice_change_nothing(rule):
    kind = SyncStore if rule == "bsp" else AsyncStore
    workers, servers, order = [1, 2], [0], EventOrder()
    server = ServerLoop(Post(), kind([], SGD(rate=1.0), None, True), rule_of(rule), workers, servers, 0, order)
    for worker, clock in ((1, 2), (1, 1), (2, 1), (2, 1)):
        order.put(Envelope(worker, ServerMessage(MessageKind.TICK, clock=clock, parts=0)))
    server.catch_up()
    assert server.clocks == [2, 1]
    assert server.until_made(1) is False


@pytest.mark.parametrize("rule", ["ssp:1", "async"])
def test_workers_at_rest_wait_for_the_rank_of_their_server(rule):
    """It may await a step that all workers have missed."""
    order = EventOrder()
    server = ServerLoop(Post(), AsyncStore([], SGD(rate=1.0), None, True), rule_of(rule), [1, 2], [0], 0, order)
    server.waits_for_rank = True
    for number in (1, 2):
        for kind in (MessageKind.TICK, MessageKind.REST):
            for worker in (1, 2):
                order.put(Envelope(worker, ServerMessage(kind, clock=number, number=number, ticket=number)))
        server.catch_up()
        assert server.rests == number - 1
        server.until_quiescent()
        assert server.rests == number


def test_a_message_survives_the_wire():
    wire = MessageFormat(3)
    message = ServerMessage(MessageKind.PULL, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 10, 11, 12, 13, 0.1, -2.5, (7, 8, 9))
    assert wire.unpack(bytearray(wire.pack(message))) == message
    assert len(wire.pack(message)) == wire.nbytes
    assert wire.unpack(wire.pack(ServerMessage(MessageKind.REST))) == ServerMessage(MessageKind.REST, clocks=(0, 0, 0))


# ---------------------------------------------------------------------------------------------- keys


def plan_of(model, ranks=4, bucket_bytes=5000):
    units = tuple(model.items)
    return PartitionSpec(units, FlatParams(model), ranks, 0, PRECISIONS["fp32"], False, bucket_bytes, 1)


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 40])
def test_keys_make_up_the_vector_in_equal_shards(servers):
    plan = plan_of(tiny_models.model())
    keys = keys_of(plan, buckets_of(plan), servers)
    spans = sorted(key.span for key in keys)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == plan.flat.length
    loads = [sum(key.span.size for key in keys if key.server == server) for server in range(servers)]
    assert max(loads) - min(loads) <= 256
    assert [key.number for key in keys] == list(range(len(keys)))


def test_only_an_embedding_that_serves_nothing_else_is_a_table():
    embedding = Embedding(50, 6)
    alone = Sequential([embedding, Linear(6, 50)])
    plan = plan_of(alone)
    assert list(tables(plan).values()) == [EmbeddingTable(0, 6)]
    by_rows = [key for key in keys_of(plan, buckets_of(plan), 2) if key.table]
    assert sum(key.span.size for key in by_rows) == 512
    assert not tables(plan_of(Sequential([embedding, Unembedding(embedding)])))
    assert not tables(plan_of(tiny_models.model()))


@pytest.mark.parametrize("span", [Span(0, 256), Span(256, 512), Span(512, 1024), Span(1024, 1280)])
def test_rows_of_a_table_within_a_span(span):
    table, rows = EmbeddingTable(256, 100), np.array([0, 1, 3, 6])
    wanted = [256 + row * 100 + column for row in rows for column in range(100)]
    wanted = [place - span.start for place in wanted if span.start <= place < span.stop]
    here = table.within(rows, span)
    assert table.places(here, span).tolist() == wanted
    assert set(here) == {row for row in rows if any(span.start <= 256 + row * 100 + c < span.stop for c in range(100))}


# ---------------------------------------------------------------------------------------------- work


def test_every_part_goes_to_one_worker():
    work, drawn = WorkAssignment(3), []
    for turn in range(9):
        part = work.draw(turn % 3, 0, 5)
        if part is not None:
            drawn.append(part.number)
            work.done(turn % 3, part, PartResult(1.0, 2, 0.5, turn % 3))
    assert drawn == [0, 1, 2, 3, 4]
    assert joined(work.outcome(0), last=True) == (0.5, 10, 0.5, True, ({}, {}, {}))
    assert math.isnan(joined([], last=False).loss)


def test_what_a_worker_held_that_is_gone_is_done_by_another():
    work = WorkAssignment(2)
    assert work.draw(0, 0, 2) == WorkPart(0, 0)
    assert work.draw(1, 0, 2) == WorkPart(0, 1)
    work.done(1, WorkPart(0, 1), PartResult(1.0, 1, 0.0, 1))
    work.gone(0)
    work.gone(0)
    assert work.draw(1, 0, 2) == WorkPart(0, 0)
    work.done(1, WorkPart(0, 0), PartResult(1.0, 1, 0.0, 1))
    assert work.draw(1, 0, 2) is None


def test_what_comes_back_waits_for_who_has_come_as_far():
    work = WorkAssignment(2)
    assert work.draw(0, clock=1, parts=1) == WorkPart(1, 0)
    work.gone(0)
    assert work.draw(1, clock=0, parts=1) == WorkPart(0, 0)
    work.done(1, WorkPart(0, 0), PartResult(1.0, 1, 0.1, 1))
    assert work.draw(1, clock=0, parts=1) is None  # to work on step 1 it must have ended step 0
    assert work.returned
    assert work.draw(1, clock=1, parts=1) == WorkPart(1, 0)


def test_the_end_comes_where_nobody_has_been():
    work = WorkAssignment(2)
    work.draw(0, 4, 1)
    work.draw(1, 2, 1)
    work.end()
    assert work.last == 4
    work.draw(0, 5, 1)
    work.end()
    assert work.last == 4


# ---------------------------------------------------------------------------------------------- order


def letter(kind, source, key=-1):
    return Envelope(source, ServerMessage(kind, key))


def test_what_is_not_allowed_waits_and_the_rest_goes_on():
    record = StringIO()
    order = EventOrder(record=record)
    for some in (letter(MessageKind.PULL, 1, 0), letter(MessageKind.PUSH, 2, 0)):
        order.put(some)
    push = order.take(lambda some: some.message.kind is not MessageKind.PULL)
    assert push.source == 2
    order.note(push)
    assert order.take(lambda some: False) is None
    assert order.take(lambda some: True).source == 1
    assert record.getvalue() == f"{int(MessageKind.PUSH)} 2 0 -1\n"


def test_a_script_decides_but_for_what_has_no_order():
    order = EventOrder([EventEntry(MessageKind.DRAW, 2, -1, 7), EventEntry(MessageKind.PUSH, 1, 3, -1)])
    order.put(letter(MessageKind.PUSH, 1, 3))
    assert order.take(lambda some: True) is None
    order.put(letter(MessageKind.READ, 5))
    assert order.take(lambda some: True).source == 5
    order.put(letter(MessageKind.DRAW, 2))
    draw = order.take(lambda some: True)
    order.expect_drawn(7, clock=0, parts=8)
    with pytest.raises(ReplayMismatch, match="as many micro-batches in step 0 as in the record, found 6"):
        order.expect_drawn(-1, clock=0, parts=6)
    order.note(draw, 7)
    order.note(order.take(lambda some: True))
    with pytest.raises(ReplayMismatch, match="the record ends before a TICK of rank 1"):
        order.put(letter(MessageKind.TICK, 1))


def test_who_rests_where_it_did_not_is_told():
    for script, arrives in ((MessageKind.DRAW, MessageKind.REST), (MessageKind.REST, MessageKind.DRAW)):
        with pytest.raises(ReplayMismatch, match="tests and checkpoints must come after the same steps"):
            EventOrder([EventEntry(script, 1, -1, -1)]).put(letter(arrives, 1))


def test_a_record_is_read_as_it_was_written(tmp_path):
    entries, facts = [EventEntry(1, 2, 3, 4), EventEntry(5, 6, -1, -1)], {"ranks": 3, "spans": [(0, 256)]}
    with create(tmp_path / "a" / "order.0", facts) as file:
        order = EventOrder(record=file)
        for kind, source, key, number in entries:
            order.note(letter(MessageKind(kind), source, key), number)
    assert read(tmp_path / "a" / "order.0", facts) == entries
    with pytest.raises(ValueError, match="ranks is 4 here, and 3 there"):
        read(tmp_path / "a" / "order.0", {**facts, "ranks": 4})
    (tmp_path / "b").write_text("no json\n")
    with pytest.raises(ValueError, match="is no record of an order"):
        read(tmp_path / "b", facts)


# ---------------------------------------------------------------------------------------------- updates


def cells_of(model, optimizer, servers=1):
    flat, plan = FlatParams(model), plan_of(model)
    vector = np.empty(flat.length, np.float32)
    flat.initialise(vector, 0)
    cells = []
    for key in keys_of(plan, buckets_of(plan), servers):
        weights = vector[key.span.start : key.span.stop].copy()
        state = optimizer.fresh(weights)
        cells.append(ShardState(key, OptimizerSpan(key.span, weights, np.zeros_like(weights), state, flat.places)))
    return cells, flat


def gradients(length, count):
    return [np.random.default_rng(seed).normal(size=length).astype(np.float32) for seed in range(count)]


def pushed(store, key, number, gradient, clock=0, parts=3):
    room = store.gradient_buffer(key.number)
    room[...] = gradient[key.span.start : key.span.stop]
    message = ServerMessage(MessageKind.PUSH, key.number, clock, number=number, parts=parts, targets=5, factor=0.2)
    return store.push(message, room)


def test_together_nothing_depends_on_the_order_and_nothing_counts_twice():
    results = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 2, 0, 2)):
        optimizer = Adam(rate=0.1)
        cells, flat = cells_of(tiny_models.model(), optimizer)
        store = SyncStore(cells, optimizer, 0.5, True)
        made = gradients(flat.length, 3)
        for turn, number in enumerate(order):
            assert store.is_complete(3) == ({0, 1, 2} <= set(order[:turn]))
            new = [pushed(store, cell.key, number, made[number]) for cell in cells]
            assert len(set(new)) == 1
        assert store.is_complete(3)
        norm = store.finish(store.squares())
        assert not any(pushed(store, cell.key, 0, made[0]) for cell in cells)  # it comes late
        assert (store.applied, store.updates) == (1, 1)
        results.append((norm, np.concatenate([cell.visible for cell in cells])))
    assert all(norm == results[0][0] and (weights == results[0][1]).all() for norm, weights in results)


def test_after_asynchronous_steps_rates_are_those_of_steps():
    optimizer = SGD(rate=lambda step: 1 / (1 + step))
    after = []
    for updates in (3, 12):  # the optimizer has no state that counts updates
        cells, flat = cells_of(tiny_models.model(), optimizer)
        store = SyncStore(cells, optimizer, None, True)
        store.applied, store.updates = 3, updates
        for cell in cells:
            pushed(store, cell.key, 0, gradients(flat.length, 1)[0], clock=3)
        store.finish(store.squares())
        after.append(np.concatenate([cell.visible for cell in cells]))
    assert (after[0] == after[1]).all()


def test_apart_each_counts_once_and_a_step_goes_as_far_as_one_update():
    optimizer = SGD(rate=0.5)
    cells, flat = cells_of(tiny_models.model(), optimizer)
    before = np.concatenate([cell.visible for cell in cells])
    store, made = AsyncStore(cells, optimizer, None, False), gradients(flat.length, 3)
    taken = [[pushed(store, cell.key, number, made[number]) for cell in cells] for number in (1, 0, 1, 2)]
    assert [all(some) for some in taken] == [True, True, False, True]
    assert not any(taken[2])
    store.quiesce()
    assert store.updates == 3
    store.applied = 1
    store.quiesce()
    assert not any(pushed(store, cell.key, 1, made[1]) for cell in cells)  # asked again, long after
    spans = [cell.key.span for cell in cells]
    mean = np.concatenate([sum(made)[span.start : span.stop] for span in spans]) / 15
    used = np.concatenate([_used(flat, span) for span in spans])
    after = np.concatenate([cell.visible for cell in cells])
    assert np.allclose((before - after)[used], 0.5 * mean[used], atol=1e-5)


def test_after_a_return_to_earlier_steps_gradients_count_again():
    optimizer = SGD(rate=0.5)
    cells, flat = cells_of(tiny_models.model(), optimizer)
    store, made = AsyncStore(cells, optimizer, None, False), gradients(flat.length, 1)
    server = ServerLoop(Post(), store, rule_of("async"), [1], [0], 0, EventOrder())
    store.applied = 5
    store.quiesce()
    assert not any(pushed(store, cell.key, 0, made[0], clock=2) for cell in cells)
    server.begin(2)
    assert not any(pushed(store, cell.key, 0, made[0], clock=1) for cell in cells)
    assert all(pushed(store, cell.key, 0, made[0], clock=2) for cell in cells)


def _used(flat, span):
    """Where there is a tensor, not the filling behind it."""
    used = np.zeros(flat.length, bool)
    for place in flat.places:
        used[place.span.start : place.span.start + place.size] = True
    return used[span.start : span.stop]


class Slow:
    """A reader that takes its time."""

    def __init__(self):
        self.over = False

    def done(self):
        return self.over


@pytest.mark.parametrize("read", [False, True])
def test_who_still_reads_sees_the_weights_of_then(read):
    optimizer = SGD(rate=0.5)
    cells, flat = cells_of(tiny_models.model(), optimizer)
    cell, reader = cells[0], Slow()
    lent, before = cell.visible, cell.visible.copy()
    cell.add_reader(reader)
    reader.over = read
    store = AsyncStore([cell], optimizer, None, False)
    pushed(store, cell.key, 0, gradients(flat.length, 1)[0])
    assert (cell.visible != before).any()
    assert (lent is cell.visible) == read
    assert (lent == before).all() != read


# ---------------------------------------------------------------------------------------------- settings and data


@pytest.mark.parametrize(
    "said, why",
    [
        ({"servers": 4}, "servers: 4 of 4 ranks leave no workers"),
        ({"servers": 0}, "servers: expected a number from 1 on, found 0"),
        ({"servers": 2, "replicas": 3}, "replicas: expected 1 to 2, as many as servers, found 3"),
        ({"replicas": 0}, "replicas: expected 1 to 1"),
        ({"consistency": "ssp:-2"}, "consistency: expected .* a whole number S from 0 on, found 'ssp:-2'"),
        ({"slow": "x:2"}, "slow: expected RANK:FACTOR,..., found 'x:2'"),
        ({"slow": "2"}, "slow: expected RANK:FACTOR,..., found '2'"),
        ({"slow": "0:2"}, "slow: rank 0 is no worker; these are 1 to 3"),
        ({"check_every": 5}, "check_every: expected 0, since ps has one copy"),
        ({"record": "a", "replay": "a"}, "record: a is the file to replay"),
    ],
)
def test_settings_without_a_meaning_are_refused(said, why):
    with pytest.raises(ValueError, match=why):
        settings = complete({"layout": "ps", **said})
        strategy_of(settings).check(settings, 4)


def test_settings_of_servers_belong_to_ps():
    with pytest.raises(ValueError, match="consistency: it belongs to ps"):
        strategy_of(Settings(layout="dp", consistency="async"))
    assert strategy_of(Settings(layout="ps", servers=2)).workers(Settings(layout="ps", servers=2), 5) == 3


def test_a_restart_asks_anew_what_concerns_one_run():
    before = {"layout": "ps", "servers": 2, "slow": "3:2", "record": "a", "replay": "b"}
    again = complete({}, before)
    assert (again.servers, again.slow, again.record, again.replay) == (2, "", "", "")


def test_parts_are_made_when_they_are_taken():
    asked = []

    class Asked(ArrayDataset):
        def take(self, indices):
            asked.append(indices.tolist())
            return super().take(indices)

    data = Asked(np.arange(10.0), np.arange(10))
    parts = OnDemandSampler(Sampler(10, 6, 2, shuffle=False).at(0, 0), data)
    assert len(parts) == 3
    assert not asked
    assert parts[1].samples.tolist() == [2, 3]
    assert parts[-1].number == 2
    assert [batch.number for batch in parts[:2]] == [0, 1]
    with pytest.raises(IndexError):
        parts[3]
    assert len(asked) == 4
