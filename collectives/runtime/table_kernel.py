"""Compiled interpreter of program tables: one function that runs any program."""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

from collectives.runtime import cell_copy, joint_copy, kernel_memory, network_kernel
from collectives.runtime import program_table as table
from collectives.runtime.cell_copy import copy_into_cell
from collectives.runtime.joint_copy import is_offered, offer, read_offered, write_offered
from collectives.runtime.kernel_memory import (
    copy_bytes,
    load_acquire,
    load_word,
    read_process,
    reduce_bytes,
    relax,
    set_word_at,
    store_release,
    store_word,
    word_at,
    yield_core,
)
from collectives.runtime.network_kernel import start_message, test_message
from collectives.transport import mailbox, shared_heap
from quant.kernels.jit import compiler

_compile = compiler(table, mailbox, shared_heap, kernel_memory, cell_copy, joint_copy, network_kernel)

# ------------------------------------------------------------------------------------------ operations


@_compile
def _address(t, piece, operand):
    """Address of an operand of a piece."""
    return word_at(t, table.BASES + load_word(piece + 8 * operand)) + load_word(piece + 8 * operand + 8)


@_compile
def _apply(t, operation, piece, incoming, start, nbytes):
    """Copy or reduce `nbytes` of incoming data at an address into a piece, from its byte `start` on."""
    out, kernel = _address(t, piece, table.OUT) + start, word_at(operation, table.KERNEL)
    if kernel == 0:
        copy_bytes(out, incoming, nbytes)
        return
    mine = _address(t, piece, table.LEFT) + start
    if word_at(operation, table.MINE_FIRST):
        reduce_bytes(kernel, mine, incoming, out, nbytes)
    else:
        reduce_bytes(kernel, incoming, mine, out, nbytes)


@_compile
def _is_shared(numbers, address, nbytes):
    """True if the peer has mapped this memory of ours."""
    for index in range(word_at(numbers, mailbox.OUR_SEGMENTS)):
        segment = mailbox.OUR_SEGMENTS + 1 + 2 * index
        if word_at(numbers, segment) <= address and address + nbytes <= word_at(numbers, segment + 1):
            return True
    return False


@_compile
def _mapped(numbers, address, nbytes):
    """Address here of memory of the peer that this rank has mapped; 0 if it has not."""
    for index in range(word_at(numbers, mailbox.PEER_SEGMENTS)):
        segment = mailbox.PEER_SEGMENTS + 1 + 3 * index
        base = word_at(numbers, segment)
        if base <= address and address + nbytes <= word_at(numbers, segment + 1):
            return word_at(numbers, segment + 2) + address - base
    return 0


@_compile
def _goes_by_address(t, operation, numbers):
    """True if a message is to be read where it is: too long to be copied, or in memory that the peer has mapped."""
    if word_at(operation, table.BY_ADDRESS_LABEL) == 0:
        return False
    nbytes = word_at(operation, table.BYTES)
    if nbytes > word_at(numbers, mailbox.COPIED_BYTES):
        return True
    for index in range(word_at(operation, table.PIECE_COUNT)):
        piece = word_at(operation, table.PIECES) + 8 * table.PIECE_WORDS * index
        if not _is_shared(numbers, _address(t, piece, table.LEFT), load_word(piece)):
            return False
    return True


@_compile
def _eager_buffer(numbers, nbytes, number, shorts, cells):
    """Address of the data of an eager message that does not fit beside its flag; see `mailbox.SlotMemory`."""
    short, slot = word_at(numbers, mailbox.SHORT_BYTES), number & mailbox.MASK
    if nbytes <= short:
        return word_at(numbers, shorts) + slot * mailbox.SHORT_SPACING * short
    cell = word_at(numbers, mailbox.CELL_BYTES)
    start = word_at(numbers, cells) + slot * cell
    if nbytes < mailbox.SPREAD:
        return start
    spacing = (nbytes + shared_heap.LINE - 1) & -shared_heap.LINE
    return start + number // mailbox.SLOTS % max(1, cell // spacing) * spacing


@_compile
def _send(t, operation):
    numbers, nbytes = word_at(operation, table.EDGE), word_at(operation, table.BYTES)
    by_address = _goes_by_address(t, operation, numbers)
    number = word_at(numbers, mailbox.SENT) + 1
    if number - word_at(numbers, mailbox.ACKED) > mailbox.SLOTS:
        set_word_at(numbers, mailbox.ACKED, load_acquire(word_at(numbers, mailbox.THEIR_ACK)))
        if number - word_at(numbers, mailbox.ACKED) > mailbox.SLOTS:
            return False
    set_word_at(numbers, mailbox.SENT, number)
    slot = number & mailbox.MASK
    flag = word_at(numbers, mailbox.OUTBOX) + slot * shared_heap.LINE
    pieces, count = word_at(operation, table.PIECES), word_at(operation, table.PIECE_COUNT)
    if by_address:
        for index in range(count):
            piece = pieces + 8 * table.PIECE_WORDS * index
            store_word(flag + 8 + 16 * index, _address(t, piece, table.LEFT))
            store_word(flag + 16 + 16 * index, load_word(piece))
        set_word_at(operation, table.NUMBER, number)
        store_release(flag, number * mailbox.KIND + word_at(operation, table.BY_ADDRESS_LABEL))
        return True
    data = flag + 8
    if nbytes > mailbox.INLINE:
        data = _eager_buffer(numbers, nbytes, number, mailbox.SHORT_OUT, mailbox.CELLS_OUT)
        store_word(flag + 8, nbytes)
    is_short = nbytes <= word_at(numbers, mailbox.SHORT_BYTES)
    for index in range(count):
        piece = pieces + 8 * table.PIECE_WORDS * index
        if is_short:
            copy_bytes(data, _address(t, piece, table.LEFT), load_word(piece))
        else:
            copy_into_cell(numbers, data, _address(t, piece, table.LEFT), load_word(piece))
        data += load_word(piece)
    set_word_at(operation, table.NUMBER, 0)  # nothing has to be acknowledged
    store_release(flag, number * mailbox.KIND + word_at(operation, table.LABEL))
    return True


@_compile
def _receive_eager(t, operation, data):
    pieces = word_at(operation, table.PIECES)
    for index in range(word_at(operation, table.PIECE_COUNT)):
        piece = pieces + 8 * table.PIECE_WORDS * index
        _apply(t, operation, piece, data, 0, load_word(piece))
        data += load_word(piece)


@_compile
def _receive_run(t, operation, piece, origin, start, nbytes):
    """Receive `nbytes` from the peer's address `origin` into a piece, from its byte `start` on; False if unreadable."""
    numbers = word_at(operation, table.EDGE)
    here = _mapped(numbers, origin, nbytes)
    if here:
        _apply(t, operation, piece, here, start, nbytes)
        return True
    pid, vector = word_at(numbers, mailbox.PID), t + 8 * table.VECTOR
    out = _address(t, piece, table.OUT) + start
    if word_at(operation, table.KERNEL) == 0:
        return read_process(pid, out, origin, nbytes, vector)
    spare = word_at(t, table.READ_BUFFER)
    while nbytes > 0:
        step = min(nbytes, word_at(t, table.READ_BUFFER_BYTES))
        if not read_process(pid, spare, origin, step, vector):
            return False
        _apply(t, operation, piece, spare, start, step)
        origin += step
        start += step
        nbytes -= step
    return True


@_compile
def _receive_by_address(t, operation, flag, addresses):
    """Receive a message whose slot has this many (address, bytes) pairs."""
    piece, used, run, read = word_at(operation, table.PIECES), 0, 0, 0
    left = word_at(operation, table.BYTES)
    while left > 0:
        length = min(load_word(piece) - used, load_word(flag + 16 + 16 * run) - read)
        if not _receive_run(t, operation, piece, load_word(flag + 8 + 16 * run) + read, used, length):
            return table.UNREADABLE
        used += length
        read += length
        left -= length
        if used == load_word(piece):
            piece, used = piece + 8 * table.PIECE_WORDS, 0
        if read == load_word(flag + 16 + 16 * run):
            run, read = run + 1, 0
    return table.DONE


@_compile
def _receive(t, operation):
    numbers, nbytes = word_at(operation, table.EDGE), word_at(operation, table.BYTES)
    number = word_at(numbers, mailbox.RECEIVED) + 1
    slot = number & mailbox.MASK
    flag = word_at(numbers, mailbox.INBOX) + slot * shared_heap.LINE
    found = load_acquire(flag) - number * mailbox.KIND
    offers = is_offered(operation, numbers)
    if offers:
        offer(operation, numbers, number, _address(t, word_at(operation, table.PIECES), table.OUT))
    if found < 0:
        return table.WAITING
    if found == word_at(operation, table.LABEL):
        if nbytes <= mailbox.INLINE:
            _receive_eager(t, operation, flag + 8)
        elif load_word(flag + 8) == nbytes:
            _receive_eager(t, operation, _eager_buffer(numbers, nbytes, number, mailbox.SHORT_IN, mailbox.CELLS_IN))
        else:
            return table.MISMATCH
    else:
        addresses, total = found - word_at(operation, table.BY_ADDRESS_LABEL), 0
        if addresses < 1 or addresses > mailbox.ADDRESSES:
            return table.MISMATCH
        for index in range(addresses):
            total += load_word(flag + 16 + 16 * index)
        if total != nbytes:
            return table.MISMATCH
        if offers and addresses == 1:
            origin = load_word(flag + 8)
            result = read_offered(t, operation, numbers, number, origin, _mapped(numbers, origin, nbytes))
        else:
            result = _receive_by_address(t, operation, flag, addresses)
        if result != table.DONE:
            return result
    set_word_at(numbers, mailbox.RECEIVED, number)
    store_release(word_at(numbers, mailbox.MY_ACK), number)  # the slot has been read when the peer sees it free
    return table.DONE


@_compile
def _compute(t, operation):
    pieces = word_at(operation, table.PIECES)
    for index in range(word_at(operation, table.PIECE_COUNT)):
        piece = pieces + 8 * table.PIECE_WORDS * index
        left, out = _address(t, piece, table.LEFT), _address(t, piece, table.OUT)
        if word_at(operation, table.KERNEL):
            reduce_bytes(word_at(operation, table.KERNEL), left, _address(t, piece, table.RIGHT), out, load_word(piece))
        elif left != out:
            copy_bytes(out, left, load_word(piece))


@_compile
def _await_read(t, operation):
    """Wait until a message sent by address was read; meanwhile write what the receiver offers."""
    sent = word_at(operation, table.DEPENDENCY)
    number, numbers = word_at(sent, table.NUMBER), word_at(sent, table.EDGE)
    if word_at(numbers, mailbox.ACKED) < number:
        set_word_at(numbers, mailbox.ACKED, load_acquire(word_at(numbers, mailbox.THEIR_ACK)))
    if word_at(numbers, mailbox.ACKED) >= number:
        return table.DONE
    if word_at(sent, table.PIECE_COUNT) > 1:
        return table.WAITING
    return write_offered(t, sent, numbers, number, _address(t, word_at(sent, table.PIECES), table.LEFT))


@_compile
def _check_mailbox(numbers):
    number, flag = word_at(numbers, mailbox.RECEIVED) + 1, word_at(numbers, mailbox.INBOX)
    flag += (number & mailbox.MASK) * shared_heap.LINE
    return table.MISMATCH if load_acquire(flag) >= number * mailbox.KIND else table.DONE


@_compile
def _attempt(t, operation):
    """Run one operation as far as possible: a result of the kernel, `DONE` or `WAITING` or an error."""
    kind = word_at(operation, table.KIND)
    if kind == table.SEND_MESSAGE:
        return table.DONE if _send(t, operation) else table.WAITING
    if kind == table.RECEIVE_MESSAGE:
        return _receive(t, operation)
    if kind == table.LOCAL_WORK:
        _compute(t, operation)
        return table.DONE
    if kind == table.WAIT_STREAM:
        stream = word_at(operation, table.DEPENDENCY)
        done = word_at(stream, table.POSITION) - word_at(stream, table.FIRST) >= word_at(operation, table.NUMBER)
        return table.DONE if done else table.WAITING
    if kind == table.WAIT_READ:
        return _await_read(t, operation)
    message, nbytes = word_at(operation, table.EDGE), word_at(operation, table.BYTES)
    if kind == table.CHECK_MAILBOX:
        return _check_mailbox(message)
    if kind == table.WAIT_MESSAGE:
        return test_message(message, nbytes)
    piece, address = word_at(operation, table.PIECES), 0
    if nbytes:
        address = _address(t, piece, table.LEFT if kind == table.START_SEND else table.OUT)
    return start_message(message, kind, address, nbytes)


# ------------------------------------------------------------------------------------------ rounds


@_compile
def _pass(t, first, stop):
    """Run the streams of a round once as far as possible: DONE, WAITING after progress, -1 without, or an error."""
    moved, waiting, result = False, False, table.DONE
    operations = word_at(t, table.OPERATIONS_AT)
    stream = word_at(t, table.STREAMS_AT) + 8 * table.STREAM_WORDS * first
    for _ in range(first, stop):
        position, end = word_at(stream, table.POSITION), word_at(stream, table.STOP)
        while position < end:
            result = _attempt(t, operations + 8 * table.OPERATION_WORDS * position)
            if result != table.DONE:
                break
            position += 1
            moved = True
        set_word_at(stream, table.POSITION, position)
        if position < end:
            if result != table.WAITING:
                set_word_at(t, table.FAILED, position)
                return result
            waiting = True
        stream += 8 * table.STREAM_WORDS
    if not waiting:
        return table.DONE
    return table.WAITING if moved else -1


@_compile
def advance(t, spins):
    """Run a program from where it is; a result of `program_table`, after at most `spins` polls without progress."""
    # Without a run, a frame that has interrupted the caller has ended it.
    rounds, at = word_at(t, table.ROUNDS) * word_at(t, table.STARTED_RUN), word_at(t, table.ROUND)
    while at < rounds:
        entry = word_at(t, table.ROUNDS_AT) + 8 * at
        first, stop = load_word(entry), load_word(entry + 8)
        result, left = _pass(t, first, stop), spins
        while result != table.DONE:
            if result > table.WAITING:
                return result
            if result == -1:
                left -= 1
                if left < 0:
                    return table.WAITING
                if word_at(t, table.SHARED_CORES):
                    yield_core()
                else:
                    relax()
            result = _pass(t, first, stop)
        stream = word_at(t, table.STREAMS_AT) + 8 * table.STREAM_WORDS * first
        for _ in range(first, stop):
            set_word_at(stream, table.POSITION, word_at(stream, table.FIRST))
            stream += 8 * table.STREAM_WORDS
        at += 1
        set_word_at(t, table.ROUND, at)
    set_word_at(t, table.ROUND, 0)
    set_word_at(t, table.STARTED_RUN, 0)
    return table.DONE
