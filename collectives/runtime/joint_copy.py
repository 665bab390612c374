"""Long messages by address that the receiver and the sender copy together, each a part.

The sender waits until its message was read. Meanwhile it can write: two cores copy in half the time of one. The
receiver offers its memory in chunks, before the message arrives if it waits for it, so that the sender writes while the
receiver is busy. A word in shared memory counts the chunks down; the rank that decrements it copies the chunk. The
receiver reads it out of the sender's process, or the sender writes it into the receiver's.

The word has the number of the message too, so that a sender cannot take a chunk of a later message. The other words of
an offer change only while no chunk is left.
"""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

from collectives.runtime import kernel_memory
from collectives.runtime import program_table as table
from collectives.runtime.kernel_memory import (
    copy_bytes,
    load_acquire,
    load_word,
    read_process,
    replace_word,
    set_word_at,
    store_release,
    word_at,
    write_process,
)
from collectives.transport import mailbox
from quant.kernels.jit import compiler

_compile = compiler(table, mailbox, kernel_memory)

CHUNK = 1 << 16
"""Bytes of a short message's chunk: some microseconds, several times as long as a system call."""

CHUNKS = 16
"""The most chunks of a message; those of a long one are multiples of `CHUNK`."""

LEAST = 2 * CHUNK
"""Bytes of the shortest message that is offered."""

COUNTS = 2 * CHUNKS
"""The number of a message is multiplied by this in a word with a count of its chunks."""

LEFT, TARGET, BYTES, LABEL, WRITTEN = range(5)
"""Words of an offer: the number of the message and the chunks left; address and bytes of the receiver's memory; the
label that the message must have. The last one is not of the offer itself: number and written chunks of the message that
this rank sends to the same peer."""


@_compile
def is_offered(operation, numbers):
    """True for a long message that is copied into one range of memory, if ranks may write each other's memory."""
    nbytes = word_at(operation, table.BYTES)
    if nbytes < LEAST or word_at(numbers, mailbox.WRITES) == 0:
        return False
    return word_at(operation, table.KERNEL) == 0 and word_at(operation, table.PIECE_COUNT) == 1


@_compile
def offer(operation, numbers, number, target):
    """Offer the memory at `target` to the sender of message `number`; a no-op if it was offered before."""
    if word_at(numbers, mailbox.OFFERED) == number:
        return
    words, nbytes = word_at(numbers, mailbox.MY_OFFER), word_at(operation, table.BYTES)
    set_word_at(words, TARGET, target)
    set_word_at(words, BYTES, nbytes)
    set_word_at(words, LABEL, word_at(operation, table.BY_ADDRESS_LABEL) + 1)  # of one address
    set_word_at(numbers, mailbox.OFFERED, number)
    set_word_at(numbers, mailbox.TAKEN, 0)
    store_release(words + 8 * LEFT, number * COUNTS + _chunks(nbytes))


@_compile
def _chunk_bytes(nbytes):
    return (nbytes + CHUNKS * CHUNK - 1) // (CHUNKS * CHUNK) * CHUNK


@_compile
def _chunks(nbytes):
    size = _chunk_bytes(nbytes)
    return (nbytes + size - 1) // size


@_compile
def _take(words, number):
    """Take a chunk of the offer for a message; its number, counted down to 1, or 0 if none is left."""
    while True:
        left = load_acquire(words + 8 * LEFT)
        if left <= number * COUNTS or left >= (number + 1) * COUNTS:
            return 0
        if replace_word(words + 8 * LEFT, left, left - 1):
            return left - number * COUNTS


@_compile
def read_offered(t, operation, numbers, number, origin, mapped):
    """Copy chunks from the sender's memory until none is left: a result, `WAITING` while the sender writes.

    `origin` is the address there; `mapped` is its address here, 0 if this rank has not mapped it.
    """
    words, nbytes = word_at(numbers, mailbox.MY_OFFER), word_at(operation, table.BYTES)
    target, pid, size = word_at(words, TARGET), word_at(numbers, mailbox.PID), _chunk_bytes(nbytes)
    chunk = _take(words, number)
    while chunk:
        start = (chunk - 1) * size
        length = min(size, nbytes - start)
        if mapped:
            copy_bytes(target + start, mapped + start, length)
        elif not read_process(pid, target + start, origin + start, length, t + 8 * table.VECTOR):
            return table.UNREADABLE
        set_word_at(numbers, mailbox.TAKEN, word_at(numbers, mailbox.TAKEN) + 1)
        chunk = _take(words, number)
    written = _chunks(nbytes) - word_at(numbers, mailbox.TAKEN)
    if written and load_acquire(word_at(numbers, mailbox.THEIR_OFFER) + 8 * WRITTEN) != number * COUNTS + written:
        return table.WAITING
    return table.DONE


@_compile
def write_offered(t, sent, numbers, number, source):
    """Write a chunk of message `number`, of the operation `sent`, into the memory that its receiver offers, if any."""
    words, nbytes = word_at(numbers, mailbox.THEIR_OFFER), word_at(sent, table.BYTES)
    if load_acquire(words + 8 * LEFT) // COUNTS != number:
        return table.WAITING
    if word_at(words, BYTES) != nbytes or word_at(words, LABEL) != word_at(sent, table.BY_ADDRESS_LABEL):
        return table.WAITING  # the receiver expects another message, and will report that
    chunk = _take(words, number)
    if not chunk:
        return table.WAITING
    size, target = _chunk_bytes(nbytes), word_at(words, TARGET)
    start = (chunk - 1) * size
    length = min(size, nbytes - start)
    pid = word_at(numbers, mailbox.PID)
    if not write_process(pid, source + start, target + start, length, t + 8 * table.VECTOR):
        return table.UNREADABLE
    written = word_at(numbers, mailbox.MY_OFFER) + 8 * WRITTEN
    store_release(written, max(load_word(written), number * COUNTS) + 1)
    return table.WAITING
