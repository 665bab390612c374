"""Exchanges of streams in one process."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.engine.extension import available
from collectives.runtime.compiled_program import compile_program
from collectives.runtime.gpu_meeting import counted
from collectives.runtime.program import Program
from collectives.transport.exchange import Exchange, Stream
from collectives.types import Wait


class Patience:
    """Node whose waits fail after some turns, in place of one that waits without end."""

    spins = 0

    def yielding(self, turn):
        assert turn < 100, "the exchange does not end"


def attempts(results):
    """Operation that returns these results in turn."""
    remaining = iter(results)
    return SimpleNamespace(attempt=lambda: next(remaining))


@pytest.mark.parametrize("run", ["wait", "test"])
@pytest.mark.parametrize("results", [[True], [False, False, True]])
@pytest.mark.parametrize("depends", [False, True])
def test_lone_operations(run, results, depends):
    """Streams of one operation each, of which one may only wait for the other stream."""
    message, second = Stream(), Stream()
    ended = message.add(attempts(results * 2))
    second.add(ended if depends else attempts([True] * 2))
    exchange = Exchange(Patience(), [second, message])
    for _ in range(2):  # the second time as the first
        if run == "wait":
            exchange.wait()
        else:
            assert any(exchange.test() for _ in results)


@pytest.mark.parametrize("run", ["wait", "test"])
def test_prepended_stream(run):
    """It runs before the others, the first time too."""
    order, streams = [], [Stream(), Stream()]
    for number, stream in enumerate(streams):
        stream.add(SimpleNamespace(attempt=partial(order.append, number)))
    exchange = Exchange(Patience(), streams[1:])
    exchange.prepend(streams[0])
    for _ in range(2):
        exchange.wait() if run == "wait" else exchange.test()
    assert order == [0, 1] * 2


@pytest.mark.parametrize("exchanges", [0, 1])
def test_calls_of_a_compiled_program_are_counted(exchanges):
    """On a board of ranks that share a GPU: also those of a program without messages."""
    if not available():
        pytest.skip("this installation has no compiled engine")
    count = np.zeros(1, np.int64)
    channel = SimpleNamespace(count=partial(np.add, count, np.ones(1, np.int64), out=count))
    node = SimpleNamespace(shares_cores=False, spins=10)
    rounds = [Exchange(node, []) for _ in range(exchanges)]
    steps = [Wait(one.wait, one.test, [one]) for one in rounds]
    program = Program(steps, SimpleNamespace(node=node), 0, ())
    program.exchanges = tuple(rounds)
    compiled = compile_program(counted(program, channel), blocking=True)
    program.run()
    assert count[0] == 1
    compiled.run()
    assert count[0] == 2
