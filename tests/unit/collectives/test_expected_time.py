"""Expected times of calls at measured speeds, against closed forms."""

import math

import pytest

from collectives.algorithms import catalog
from collectives.selection.cost_model import BUILT_IN, CALL, NETWORK_OVERHEAD
from collectives.selection.expected_time import (
    CROSSING,
    MOST_RANKS,
    MeasuredSpeed,
    TimedCall,
    between_nodes,
    expected_seconds,
    kept_bytes,
    within_node,
)
from collectives.selection.shared_cores import CACHED_BYTES, NETWORK_COPY, NETWORK_WORK, UNCACHED
from collectives.transport.memory.copy_speed import MessageSpeed
from collectives.transport.mpi.network_speed import NBYTES, NetworkSpeed, _burst

NODE = MessageSpeed(1e-6, 1e-10, 0.8e-10, 1.5e-10, late=2e-6)
FLIGHT = CALL + 0.5e-6
WIRE = NetworkSpeed(message=3e-5, byte=4e-9, burst_byte=1e-9, burst=200_000, barrier=9e-5)


def on_node(collective, algorithm, nbytes, size=2, speed=NODE):
    return within_node(TimedCall(collective, algorithm, 1, size, nbytes), speed)


def on_network(collective, algorithm, nbytes, cores=None, segments=1, size=4):
    return between_nodes(TimedCall(collective, algorithm, segments, size, nbytes), WIRE, cores)


def test_a_message_one_way_is_copied_twice_if_short_and_by_both_ranks_if_long():
    assert on_node("broadcast", "linear", 0) == pytest.approx(FLIGHT)
    assert on_node("broadcast", "linear", 1 << 14) == pytest.approx(FLIGHT + (1 << 14) * (NODE.write + NODE.read))
    n = 1 << 20
    assert on_node("broadcast", "linear", n) == pytest.approx(FLIGHT + n / 2 * NODE.by_address)
    assert on_node("broadcast", "linear", 16 * n) == pytest.approx(FLIGHT + 8 * n * NODE.by_address * UNCACHED)
    assert 16 * n > CACHED_BYTES


def test_ranks_that_exchange_copy_what_they_receive_and_what_they_keep():
    n = 1 << 20
    crossing = FLIGHT + CROSSING + NODE.late  # rank 0 waits for a rank that starts later
    exchanged = crossing + n / 2 * NODE.by_address
    assert on_node("allgather", "ring", n) == pytest.approx(exchanged + n / 2 * NODE.write)
    assert on_node("reduce_scatter", "ring", n) == pytest.approx(exchanged + n / 2 * NODE.read)
    assert on_node("allreduce", "recursive_doubling", 1 << 14) == pytest.approx(
        crossing + (1 << 14) * NODE.by_address
    )  # combined out of the cell
    root = FLIGHT + n / 4 * NODE.by_address + n / 4 * NODE.write  # the peer copies meanwhile
    assert on_node("scatter", "linear", n) == pytest.approx(root)
    assert on_node("gather", "linear", n) == pytest.approx(root + NODE.late)


def test_a_longer_message_is_not_expected_to_take_less_time():
    by_address = NODE._replace(by_address=0.2e-10)
    times = [on_node("broadcast", "linear", 1 << power, speed=by_address) for power in range(10, 24)]
    assert times == sorted(times)


def test_in_place_nothing_is_copied_that_a_rank_keeps():
    call = TimedCall("allgather", "ring", 1, 4, 4096, in_place=True)
    assert kept_bytes(call, catalog.build_all("allgather", "ring", 4)) == [0] * 4
    assert within_node(call, NODE) == pytest.approx(on_node("allgather", "ring", 4096, 4) - 1024 * NODE.write)


@pytest.mark.parametrize("speed", [MessageSpeed(), NODE._replace(round_trip=math.inf)])
def test_without_a_measured_speed_nothing_is_expected(speed):
    assert on_node("broadcast", "linear", 8, speed=speed) is None
    assert between_nodes(TimedCall("broadcast", "linear", 1, 4, 8), NetworkSpeed(), None) is None


def test_only_uniform_placements_of_some_ranks_have_an_expected_time():
    speed, call = MeasuredSpeed(NODE, WIRE), TimedCall("broadcast", "linear", 1, 4, 8)
    assert expected_seconds(call, None, None, speed) == within_node(call, NODE)
    assert expected_seconds(call, (0, 1, 2, 3), 2, speed) == between_nodes(call, WIRE, 2)
    assert expected_seconds(call, None, 2, speed) is None
    assert expected_seconds(call, (0, 0, 1, 1), None, speed) is None
    assert expected_seconds(call._replace(size=MOST_RANKS + 1), None, None, speed) is None


def test_calls_up_to_the_burst_of_a_network_are_sent_at_its_rate():
    latency = CALL + WIRE.message * (1 + 2 * NETWORK_OVERHEAD)  # one of three messages is waited for
    short, long = 1 << 16, 1 << 20
    assert on_network("scatter", "linear", short) == pytest.approx(latency + short * 3 / 4 * WIRE.burst_byte)
    assert on_network("scatter", "linear", long) == pytest.approx(latency + long * 3 / 4 * WIRE.byte)
    halves = CALL + 4 * WIRE.message + long * 1.5 * WIRE.byte + long * 0.75 * BUILT_IN.network.gamma
    assert on_network("allreduce", "rabenseifner", long) == pytest.approx(halves)


def test_emulated_nodes_take_as_long_as_their_cores_or_their_network():
    n, waited = 1 << 16, (1 - NETWORK_WORK) * WIRE.message
    worked = 3 * NETWORK_WORK * WIRE.message
    assert on_network("scatter", "linear", 0, 2) == pytest.approx(CALL + waited + worked / 2)
    one_core = CALL + waited + worked + n * max(0.75 * WIRE.burst_byte, 0.75 * NETWORK_COPY)
    assert on_network("scatter", "linear", n, 1) == pytest.approx(one_core)
    assert on_network("gather", "linear", 0, 2) == pytest.approx(CALL + WIRE.barrier)  # all have had a turn
    chain = CALL + (3 + 7) * waited + 8 * worked / 2 + 8e5 * (1 + 2 / 8) * WIRE.byte  # eight segments
    assert on_network("broadcast", "chain", 800_000, 2, 8) == pytest.approx(chain)


@pytest.mark.parametrize(
    ("collective", "algorithm", "kept"),
    [
        ("broadcast", "mst", [0, 0, 0, 0]),
        ("scatter", "linear", [1024, 0, 0, 0]),
        ("gather", "mst", [1024, 0, 0, 0]),
        ("allgather", "linear", [1024, 0, 0, 0]),  # the others receive their block with all others
        ("allgather", "ring", [1024] * 4),
        ("alltoall", "direct", [1024] * 4),
        ("reduce_scatter", "ring", [0, 0, 0, 0]),
        ("allreduce", "ring", [0, 0, 0, 0]),
        ("scan", "linear", [4096, 0, 0, 0]),
        ("exscan", "linear", [0, 0, 0, 0]),
    ],
)
def test_kept_bytes_are_those_that_no_message_changes(collective, algorithm, kept):
    assert kept_bytes(TimedCall(collective, algorithm, 1, 4, 4096), catalog.build_all(collective, algorithm, 4)) == kept


def test_the_burst_is_what_the_first_messages_saved():
    long = NBYTES * 4e-9
    assert _burst([long - 3e-4, long, long], 4e-9, 1e-9) == pytest.approx(100_000)
    assert _burst([long / 4] * 3, 4e-9, 1e-9) == 3 * NBYTES
    assert _burst([long - 3e-4, long, long], 4e-9, 2.5e-9) == 0.0  # bytes take about equally long
    assert _burst([0.0], 0.0, 0.0) == 0.0
    assert _burst([long - 3e-4, long, long], 4e-9, 0.0) == 0.0  # medium messages took no longer than short ones
