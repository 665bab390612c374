"""Copies of messages into eager buffers, through the caches or past them, whichever suits the two cores.

Between cores that share a cache, the receiver reads what lies in it twice as fast as what was stored past it. Between
others, a store to a line that the receiver has read takes it from there first, which takes four times as long as one
past the caches. A virtual machine is moved between such cores, so the sender measures both now and then.
"""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

from collectives.runtime import kernel_memory
from collectives.runtime.kernel_memory import copy_bytes, cycles, set_word_at, stream_bytes, word_at
from collectives.transport import mailbox
from quant.kernels.jit import compiler

_compile = compiler(mailbox, kernel_memory)

PROBE = 1 << 12
"""Bytes that are copied in each way to compare them. Pieces shorter than three times that always go past the caches:
that takes as long as a copy through a shared cache, and a third of the time between other cores."""

SLOW_RATIO = 2
"""A copy through the caches is slow if it takes this many times as long as one past them: it takes as long between
cores that share a cache, and four times as long between others."""

SLOW_FOR = 2
"""Comparisons, from one that finds copies through the caches slow, for which copies go past them. They then take twice
as long if that was wrong; copies through the caches take five times as long if these are wrong."""


@_compile
def copy_into_cell(numbers, target, source, nbytes):
    """Copy a piece of a message into a cell; `numbers` are those of the edge."""
    left, done = word_at(numbers, mailbox.UNTIL_PROBE), 0
    if left > 0:
        set_word_at(numbers, mailbox.UNTIL_PROBE, left - 1)
    if left >= 0 and nbytes < 3 * PROBE:
        stream_bytes(target, source, nbytes)
        return
    if left == 0:
        done = _probe(numbers, target, source)
    if word_at(numbers, mailbox.PAST_CACHES):
        stream_bytes(target + done, source + done, nbytes - done)
    else:
        copy_bytes(target + done, source + done, nbytes - done)


@_compile
def _probe(numbers, target, source):
    """Copy the first `PROBE` bytes, then time further copies of them in both ways, and choose; `PROBE`.

    The first copy brings the source into this core's cache: only the stores are compared. The two others go where the
    rest of the piece is written afterwards.
    """
    stream_bytes(target, source, PROBE)
    start = cycles()
    copy_bytes(target + PROBE, source, PROBE)
    middle = cycles()
    stream_bytes(target + 2 * PROBE, source, PROBE)
    through, past = middle - start, cycles() - middle
    slow_for = SLOW_FOR if through > SLOW_RATIO * past else max(0, word_at(numbers, mailbox.PAST_CACHES) - 1)
    set_word_at(numbers, mailbox.PAST_CACHES, slow_for)
    set_word_at(numbers, mailbox.UNTIL_PROBE, mailbox.PROBE_EVERY)
    return PROBE
