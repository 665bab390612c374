"""What every wire must do, as small programs that all ranks run: `CONTRACT` holds them all.

Each takes (rank, size, wire), has each rank make its own bound messages, and asserts on what arrives. A message of
none to oneself does not exist, so on one rank most of them do nothing.
"""

import threading
import time

import numpy as np

from collectives.engine.assembly import Place, Point, calling, waiting
from collectives.engine.instructions import ABSOLUTE
from collectives.runtime.execution.program import Program
from collectives.transport.wire import Piece
from support.loopback import LoopbackHub


def spmd(size, program, patience=20.0):
    """Run ``program(rank, size, wire)`` on as many threads as ranks; raise what any of them raised."""
    hub, errors = LoopbackHub(size, patience), []

    def run(rank):
        try:
            program(rank, size, hub.wire(rank))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def piece(array):
    return Piece(array.nbytes, Place(ABSOLUTE, array.ctypes.data), array.ctypes.data)


def ring(rank, size):
    return (rank - 1) % size, (rank + 1) % size


def filled(rank, count, turn=0):
    return (np.arange(count) * 7 + rank * 13 + turn) % 251


class Bound:
    """A message as a program of its own, which notes when it has started."""

    def __init__(self, wire, message):
        self.key, self.started = message.key, False
        starts = [*message.starts, calling(self.note)]
        ends = [waiting(Point(starts, len(starts))), *message.ends, *([message.read] if message.read else [])]
        self.program = Program([[starts, ends]], wire)

    def note(self):
        self.started = True

    def begin(self):
        self.started = False
        self.program.start()


def bound(wire, messages):
    """The messages as programs, which are bound once."""
    known = vars(wire).setdefault("bound", {})
    return [known.setdefault(id(message), (Bound(wire, message), message))[0] for message in messages]


def begin(wire, messages):
    """Start the messages: each after the one before it in its stream."""
    streams = vars(wire).setdefault("streams", {})
    getattr(wire, "prepare", lambda _: None)(messages)
    for message in bound(wire, messages):
        if message.key is None:
            message.begin()
        else:
            message.started = False
            streams.setdefault(message.key, []).append(message)
    attempt(streams)


def attempt(streams):
    """Start the messages of all streams as far as possible."""
    for stream in streams.values():
        while stream:
            if stream[0].program.ended and not stream[0].started:
                stream[0].begin()
            else:
                stream[0].program.advance()
            if not stream[0].started:
                break
            stream.pop(0)


def end(wire, messages):
    """Wait for the messages."""
    for one in bound(wire, messages):
        if one.key is None:
            one.program.finish()
    poll(asking(wire, messages))


def asking(wire, messages):
    """What says whether all the messages have ended."""

    def ended():
        attempt(vars(wire).setdefault("streams", {}))
        return all([one.program.advance() and one.started for one in bound(wire, messages)])

    return ended


def swap(wire, messages):
    """Start the messages and wait for them."""
    begin(wire, messages)
    end(wire, messages)


def what_leaves_arrives(rank, size, wire):
    left, right = ring(rank, size)
    if size == 1:
        return
    for count in (1, 5, 1000, 5000, 100_000):
        mine, theirs = filled(rank, count), np.zeros(count, int)
        swap(wire, [wire.receive(left, [piece(theirs)]), wire.send(right, [piece(mine)])])
        assert (theirs == filled(left, count)).all()
        assert (mine == filled(rank, count)).all()


def bound_messages_start_again_and_again(rank, size, wire):
    left, right = ring(rank, size)
    if size == 1:
        return
    mine, theirs = np.zeros(50, int), np.zeros(50, int)
    messages = [wire.receive(left, [piece(theirs)]), wire.send(right, [piece(mine)])]
    for turn in range(20):
        mine[:] = filled(rank, 50, turn)
        swap(wire, messages)
        assert (theirs == filled(left, 50, turn)).all()


def pieces_are_one_message_wherever_they_lie(rank, size, wire):
    """Cut in one way where it leaves and in another where it comes, and out of order at both ends."""
    left, right = ring(rank, size)
    if size == 1:
        return
    mine, theirs = filled(rank, 10), np.full(12, -1)
    out = [piece(mine[6:]), piece(mine[:1]), piece(mine[1:6])]
    into = [piece(theirs[9:12]), piece(theirs[0:5]), piece(theirs[6:8])]
    swap(wire, [wire.receive(left, into), wire.send(right, out)])
    arrived = np.concatenate([theirs[9:12], theirs[0:5], theirs[6:8]])
    expected = filled(left, 10)
    assert (arrived == np.concatenate([expected[6:], expected[:6]])).all()
    assert theirs[5] == theirs[8] == -1, "memory between the pieces was written to"


def a_message_may_be_empty(rank, size, wire):
    left, right = ring(rank, size)
    if size == 1:
        return
    for nothing in ([], [piece(np.zeros(0))]):
        swap(wire, [wire.receive(left, nothing), wire.send(right, nothing)])


def messages_match_in_the_order_in_which_they_start(rank, size, wire):
    """Bound in one order and started in another, by two starts: the second is what counts."""
    left, right = ring(rank, size)
    if size == 1:
        return
    mine = [filled(rank, 3, turn) for turn in range(4)]
    theirs = [np.zeros(3, int) for _ in range(4)]
    sends = [wire.send(right, [piece(array)]) for array in mine]
    receives = [wire.receive(left, [piece(array)]) for array in theirs]
    order = [2, 0, 3, 1]
    begin(wire, [receives[i] for i in order])
    begin(wire, [sends[i] for i in order[:2]])
    begin(wire, [sends[i] for i in order[2:]])
    end(wire, [*sends, *receives])
    for turn in range(4):
        assert (theirs[turn] == filled(left, 3, turn)).all()


def everyone_talks_to_everyone_at_once(rank, size, wire):
    others = [peer for peer in range(size) if peer != rank]
    inbox = {peer: np.zeros(20, int) for peer in others}
    mine = filled(rank, 20)
    receives = [wire.receive(peer, [piece(inbox[peer])]) for peer in others]
    sends = [wire.send(peer, [piece(mine)]) for peer in others]
    if others:
        swap(wire, [*receives, *sends])
    for peer in others:
        assert (inbox[peer] == filled(peer, 20)).all()


def a_test_says_when_it_is_over(rank, size, wire):
    """The receiver asks before the sender has begun, which waits for leave to begin."""
    if size == 1 or rank > 1:
        return
    data, leave = filled(rank, 10), np.zeros(1, int)
    if rank == 1:
        go, message = wire.receive(0, [piece(leave)]), wire.send(0, [piece(data)])
        swap(wire, [go])
        begin(wire, [message])
        poll(asking(wire, [message]))
        return
    message, go = wire.receive(1, [piece(data)]), wire.send(1, [piece(leave)])
    over = asking(wire, [message])
    begin(wire, [message])
    assert not any(over() for _ in range(10))
    swap(wire, [go])
    poll(over)
    assert over(), "what is over stays over"
    assert (data == filled(1, 10)).all()


def several_are_over_when_all_of_them_are(rank, size, wire):
    if size == 1 or rank > 1:
        return
    other = 1 - rank
    first, second, leave = np.zeros(4, int), np.zeros(4, int), np.zeros(1, int)
    if rank == 1:
        one, go, two = wire.send(0, [piece(first)]), wire.receive(0, [piece(leave)]), wire.send(0, [piece(second)])
        first[:], second[:] = 1, 2
        swap(wire, [one])
        swap(wire, [go])
        swap(wire, [two])
        return
    one, two, go = wire.receive(1, [piece(first)]), wire.receive(1, [piece(second)]), wire.send(1, [piece(leave)])
    both = asking(wire, [one, two])
    begin(wire, [one, two])
    end(wire, [one])
    assert not both()
    swap(wire, [go])
    poll(both)
    assert first.tolist() == [1] * 4 and second.tolist() == [2] * 4 and other == 1


def a_wire_may_be_freed_and_its_peers_go_on(rank, size, wire):
    """Freeing gives back what was bound; the wire can bind anew."""
    what_leaves_arrives(rank, size, wire)
    wire.free()
    what_leaves_arrives(rank, size, wire)
    wire.free()
    wire.free()


def poll(over):
    deadline = time.monotonic() + 100
    while not over():
        assert time.monotonic() < deadline, "never over"
        time.sleep(0)


CONTRACT = [
    what_leaves_arrives,
    bound_messages_start_again_and_again,
    pieces_are_one_message_wherever_they_lie,
    a_message_may_be_empty,
    messages_match_in_the_order_in_which_they_start,
    everyone_talks_to_everyone_at_once,
    a_test_says_when_it_is_over,
    several_are_over_when_all_of_them_are,
    a_wire_may_be_freed_and_its_peers_go_on,
]
