/* Messages between ranks of a node, through mailboxes in shared memory.
 *
 * A slot has a flag and 56 bytes beside it. The sender chooses by its own knowledge how a message travels: beside the
 * flag, in a bounce buffer, or by the address at which the receiver reads it. The label in the flag names the call, and
 * how the message travels. */
#include "memory.h"
#include "program.h"

enum {
    PROBE = 1 << 12,  /* bytes that are copied in each way to compare them */
    SLOW_RATIO = 2,   /* a copy through the caches is slow from this multiple of a non-temporal one */
    SLOW_FOR = 2,     /* comparisons, from one that finds it slow, for which copies are non-temporal */
    CHUNK = 1 << 16,  /* bytes of a chunk of a short offered message */
    CHUNKS = 16,      /* most chunks of a message */
    COUNTS = 2 * CHUNKS,
};

static inline Operand *operands_of(Program *program, Row *row) { return program->operands + row->first_operand; }

static inline char *left_of(Program *program, Operand *operand) {
    return address_of(program, operand->left, operand->left_offset);
}

static inline char *out_of(Program *program, Operand *operand) {
    return address_of(program, operand->out, operand->out_offset);
}

/* Copy or reduce incoming data into an operand, from its byte `start` on. */
static void apply(Program *program, Row *row, Operand *operand, const char *incoming, int64_t start, int64_t nbytes) {
    char *out = out_of(program, operand) + start;
    if (row->reduction < 0)
        copy_bytes(out, incoming, nbytes);
    else
        apply_reduction(row, incoming, left_of(program, operand) + start, out, nbytes);
}

/* ------------------------------------------------------------------------------------------ bounce buffers */

/* Copy the first PROBE bytes, then time further copies of them in both ways, and choose. The first copy brings the
 * source into this core's cache, so that only the stores are compared. */
static int64_t probe(Link *link, char *target, const char *source) {
    copy_non_temporal(target, source, PROBE);
    uint64_t start = cycles();
    copy_bytes(target + PROBE, source, PROBE);
    uint64_t middle = cycles();
    copy_non_temporal(target + 2 * PROBE, source, PROBE);
    uint64_t through = middle - start, past = cycles() - middle;
    if (through > SLOW_RATIO * past)
        link->past_caches = SLOW_FOR;
    else if (link->past_caches > 0)
        link->past_caches -= 1;
    link->until_probe = PROBE_EVERY;
    return PROBE;
}

/* Copy a part of a message into a bounce buffer, through the caches or not. Between cores that share a cache, the
 * receiver reads twice as fast what lies in it. Between others, a store to a line that the receiver has read takes it
 * from there first, which takes four times as long as a non-temporal store. */
static void copy_into_cell(Link *link, char *target, const char *source, int64_t nbytes) {
    int64_t left = link->until_probe, done = 0;
    if (left > 0) link->until_probe = left - 1;
    if (left >= 0 && nbytes < 3 * PROBE) {
        copy_non_temporal(target, source, nbytes);
        return;
    }
    if (left == 0) done = probe(link, target, source);
    if (link->past_caches)
        copy_non_temporal(target + done, source + done, nbytes - done);
    else
        copy_bytes(target + done, source + done, nbytes - done);
}

/* Address of the data of a message that does not fit beside its flag. */
static char *bounce_buffer(Link *link, int64_t nbytes, int64_t number, int64_t shorts, int64_t cells) {
    int64_t slot = number & (SLOTS - 1);
    if (nbytes <= link->short_bytes) return (char *)shorts + slot * SHORT_SPACING * link->short_bytes;
    char *start = (char *)cells + slot * link->cell_bytes;
    if (nbytes < SPREAD) return start;
    int64_t spacing = (nbytes + LINE - 1) & -(int64_t)LINE, places = link->cell_bytes / spacing;
    return start + number / SLOTS % (places > 1 ? places : 1) * spacing;
}

/* ------------------------------------------------------------------------------------------ sends */

static bool peer_has_mapped(Link *link, int64_t address, int64_t nbytes) {
    for (int64_t at = 0; at < link->own_segments; at++)
        if (link->own[at].start <= address && address + nbytes <= link->own[at].end) return true;
    return false;
}

/* True if the receiver is to read a message where it is: too long to be copied, or in memory that it has mapped. */
static bool goes_by_address(Program *program, Row *row, Link *link) {
    if (!row->address_label) return false;
    if ((row->part ? row->part : row->nbytes) > link->copied_bytes) return true;
    Operand *operand = operands_of(program, row);
    for (int at = 0; at < row->operands; at++)
        if (!peer_has_mapped(link, (int64_t)left_of(program, operand + at), operand[at].nbytes)) return false;
    return true;
}

static bool has_room(Link *link) {
    if (link->sent + 1 - link->acknowledged <= SLOTS) return true;
    link->acknowledged = load_flag(link->their_ack);
    return link->sent + 1 - link->acknowledged <= SLOTS;
}

/* Label of a message, or of a part of one, beside its flag or in a bounce buffer. */
static int64_t label_of(const Row *row, int64_t nbytes) {
    if (!row->part) return row->label;
    return row->label / LABELS * LABELS + (nbytes <= INLINE ? nbytes : INLINE + 1);
}

/* Bytes of the next part of a message. */
static int64_t next_part(const Row *row) {
    int64_t left = row->nbytes - row->done;
    return row->part && row->part < left ? row->part : left;
}

/* Bytes of a message that lie together in one operand. */
typedef struct {
    Operand *operand;
    int64_t start, nbytes;
} Run;

/* The run of a message from byte `start` on, of at most `nbytes`. */
static Run first_run(Program *program, Row *row, int64_t start, int64_t nbytes) {
    Operand *operand = operands_of(program, row);
    if (start)
        for (; start >= operand->nbytes; operand++) start -= operand->nbytes;
    int64_t left = operand->nbytes - start;
    return (Run){operand, start, left < nbytes ? left : nbytes};
}

/* Go on to the run after this one, of at most `nbytes`; no-op if that is 0. */
static void next_run(Run *run, int64_t nbytes) {
    if (!nbytes) return;
    run->operand++, run->start = 0;
    run->nbytes = run->operand->nbytes < nbytes ? run->operand->nbytes : nbytes;
}

/* Send a part of a message, from byte `start` on, beside the flag or in a bounce buffer. */
static void send_part(Program *program, Row *row, Link *link, int64_t start, int64_t nbytes) {
    int64_t number = ++link->sent, flag = link->outbox + (number & (SLOTS - 1)) * LINE;
    char *data = (char *)flag + 8;
    if (nbytes > INLINE) {
        data = bounce_buffer(link, nbytes, number, link->short_out, link->cells_out);
        *(int64_t *)(flag + 8) = nbytes;
    }
    bool is_short = nbytes <= link->short_bytes;
    Run run = first_run(program, row, start, nbytes);
    for (int64_t left = nbytes; left; next_run(&run, left)) {
        const char *source = left_of(program, run.operand) + run.start;
        if (is_short)
            copy_bytes(data, source, run.nbytes);
        else
            copy_into_cell(link, data, source, run.nbytes);
        data += run.nbytes, left -= run.nbytes;
    }
    store_flag(flag, number * KIND + label_of(row, nbytes));
}

static void send_addresses(Program *program, Row *row, Link *link) {
    int64_t number = row->number = ++link->sent, flag = link->outbox + (number & (SLOTS - 1)) * LINE;
    int64_t *words = (int64_t *)flag + 1;
    Operand *operand = operands_of(program, row);
    for (int at = 0; at < row->operands; at++) {
        *words++ = (int64_t)left_of(program, operand + at);
        *words++ = operand[at].nbytes;
    }
    store_flag(flag, number * KIND + row->address_label + row->operands);
}

/* Send a message; false if no slot is free for all of it. */
bool send_message(Program *program, Row *row) {
    Link *link = program->links[row->link];
    if (!has_room(link)) return false;
    if (!row->done && goes_by_address(program, row, link)) {
        send_addresses(program, row, link);
        return true;
    }
    row->number = 0;
    do {
        int64_t nbytes = next_part(row);
        send_part(program, row, link, row->done, nbytes);
        row->done += nbytes;
    } while (row->done < row->nbytes && has_room(link));
    if (row->done < row->nbytes) return false;
    row->done = 0;
    return true;
}

/* ------------------------------------------------------------------------------------------ offers
 *
 * The sender of a long message by address waits until it was read. Meanwhile it can copy too: the receiver offers its
 * memory in chunks, before the message arrives if it waits for it. A word in shared memory counts the chunks down, and
 * the rank that decrements it copies the chunk: the receiver reads it out of the sender's process, the sender writes it
 * into the receiver's. The word has the number of the message too, so that no chunk of a later message is taken, whose
 * address and length the sender may have read. */

static bool is_offered(Row *row, Link *link) {
    return row->nbytes >= 2 * CHUNK && !row->part && link->writes && row->reduction < 0 && row->operands == 1;
}

static int64_t chunk_bytes(int64_t nbytes) { return (nbytes + CHUNKS * CHUNK - 1) / (CHUNKS * CHUNK) * CHUNK; }

static int64_t chunk_count(int64_t nbytes) {
    int64_t size = chunk_bytes(nbytes);
    return (nbytes + size - 1) / size;
}

static void offer(Row *row, Link *link, int64_t number, char *target) {
    if (link->offered == number) return;
    Offer *mine = (Offer *)link->my_offer;
    mine->target = (int64_t)target;
    mine->nbytes = row->nbytes;
    mine->label = row->address_label + 1;
    link->offered = number;
    link->taken = 0;
    store_flag((int64_t)&mine->left, number * COUNTS + chunk_count(row->nbytes));
}

/* Number of a chunk of a message that this rank is to copy, counted down to 1; 0 if none is left. */
static int64_t take_chunk(Offer *offer, int64_t number) {
    _Atomic int64_t *left = (_Atomic int64_t *)&offer->left;
    int64_t found = atomic_load_explicit(left, memory_order_acquire);
    while (found > number * COUNTS && found < (number + 1) * COUNTS)
        if (atomic_compare_exchange_weak_explicit(left, &found, found - 1, memory_order_acq_rel, memory_order_acquire))
            return found - number * COUNTS;
    return 0;
}

/* Copy chunks from the sender's address `origin`, or `mapped` here, until none is left; wait for those that the sender
 * writes. */
static Result read_offered(Row *row, Link *link, int64_t number, int64_t origin, char *mapped) {
    Offer *mine = (Offer *)link->my_offer;
    char *target = (char *)mine->target;
    int64_t size = chunk_bytes(row->nbytes), chunk;
    while ((chunk = take_chunk(mine, number))) {
        int64_t start = (chunk - 1) * size, length = row->nbytes - start < size ? row->nbytes - start : size;
        if (mapped)
            copy_bytes(target + start, mapped + start, length);
        else if (!read_process(link->pid, target + start, origin + start, length))
            return UNREADABLE;
        link->taken += 1;
    }
    int64_t written = chunk_count(row->nbytes) - link->taken;
    bool waits = written && load_flag((int64_t)&((Offer *)link->their_offer)->written) != number * COUNTS + written;
    return waits ? WAITING : DONE;
}

/* Write a chunk of a message into the memory that its receiver offers, if any. */
static Result write_offered(Row *sent, Link *link, const char *source) {
    Offer *theirs = (Offer *)link->their_offer;
    int64_t number = sent->number, nbytes = sent->nbytes;
    if (load_flag((int64_t)&theirs->left) / COUNTS != number) return WAITING;
    if (theirs->nbytes != nbytes || theirs->label != sent->address_label + 1)
        return WAITING; /* the receiver expects another message, and will report that */
    int64_t chunk = take_chunk(theirs, number);
    if (!chunk) return WAITING;
    int64_t size = chunk_bytes(nbytes), start = (chunk - 1) * size;
    int64_t length = nbytes - start < size ? nbytes - start : size;
    if (!write_process(link->pid, source + start, theirs->target + start, length)) return UNREADABLE;
    Offer *mine = (Offer *)link->my_offer;
    int64_t before = mine->written > number * COUNTS ? mine->written : number * COUNTS;
    store_flag((int64_t)&mine->written, before + 1);
    return WAITING;
}

/* Wait until a message sent by address was read; meanwhile write what the receiver offers. */
Result await_read(Program *program, Row *row) {
    Row *sent = program->rows + row->after;
    Link *link = program->links[sent->link];
    if (link->acknowledged < sent->number) link->acknowledged = load_flag(link->their_ack);
    if (link->acknowledged >= sent->number) return DONE;
    return sent->operands > 1 ? WAITING : write_offered(sent, link, left_of(program, operands_of(program, sent)));
}

/* ------------------------------------------------------------------------------------------ receives */

static char *mapped_here(Link *link, int64_t address, int64_t nbytes) {
    for (int64_t at = 0; at < link->peer_segments; at++)
        if (link->theirs[at].start <= address && address + nbytes <= link->theirs[at].end)
            return (char *)(link->theirs[at].here + address - link->theirs[at].start);
    return NULL;
}

static void receive_part(Program *program, Row *row, const char *data, int64_t start, int64_t nbytes) {
    Run run = first_run(program, row, start, nbytes);
    for (int64_t left = nbytes; left; next_run(&run, left)) {
        apply(program, row, run.operand, data, run.start, run.nbytes);
        data += run.nbytes, left -= run.nbytes;
    }
}

/* Receive bytes from the peer's address `origin` into an operand, from its byte `start` on; false if unreadable. */
static bool receive_run(Program *program, Row *row, Operand *operand, int64_t origin, int64_t start, int64_t nbytes) {
    Link *link = program->links[row->link];
    char *here = mapped_here(link, origin, nbytes);
    if (here) {
        apply(program, row, operand, here, start, nbytes);
        return true;
    }
    if (row->reduction < 0) return read_process(link->pid, out_of(program, operand) + start, origin, nbytes);
    while (nbytes > 0) {
        int64_t step = nbytes < program->spare_bytes ? nbytes : program->spare_bytes;
        if (!read_process(link->pid, program->spare, origin, step)) return false;
        apply(program, row, operand, program->spare, start, step);
        origin += step, start += step, nbytes -= step;
    }
    return true;
}

static Result receive_by_address(Program *program, Row *row, const int64_t *runs) {
    Operand *operand = operands_of(program, row);
    int64_t used = 0, read = 0, left = row->nbytes;
    while (left > 0) {
        int64_t length = operand->nbytes - used < runs[1] - read ? operand->nbytes - used : runs[1] - read;
        if (!receive_run(program, row, operand, runs[0] + read, used, length)) return UNREADABLE;
        used += length, read += length, left -= length;
        if (used == operand->nbytes) operand++, used = 0;
        if (read == runs[1]) runs += 2, read = 0;
    }
    return DONE;
}

/* Receive a message that the peer has sent by its addresses. */
static Result receive_addresses(Program *program, Row *row, Link *link, int64_t number, int64_t count, int64_t *words) {
    int64_t total = 0;
    if (count < 1 || count > ADDRESSES) return MISMATCH;
    for (int64_t at = 0; at < count; at++) total += words[2 * at + 1];
    if (total != row->nbytes) return MISMATCH;
    if (is_offered(row, link) && count == 1)
        return read_offered(row, link, number, words[0], mapped_here(link, words[0], row->nbytes));
    return receive_by_address(program, row, words);
}

/* Receive the next message of the peer, or as many parts of it as have arrived. */
Result receive_message(Program *program, Row *row) {
    Link *link = program->links[row->link];
    do {
        int64_t number = link->received + 1, flag = link->inbox + (number & (SLOTS - 1)) * LINE;
        int64_t found = load_flag(flag) - number * KIND, nbytes = next_part(row), *words = (int64_t *)flag + 1;
        if (is_offered(row, link)) offer(row, link, number, out_of(program, operands_of(program, row)));
        if (found < 0) return WAITING;
        if (found == label_of(row, nbytes) && (nbytes <= INLINE || words[0] == nbytes)) {
            char *data = (char *)words;
            if (nbytes > INLINE) data = bounce_buffer(link, nbytes, number, link->short_in, link->cells_in);
            receive_part(program, row, data, row->done, nbytes);
            row->done += nbytes;
        } else {
            Result result = MISMATCH;
            if (!row->done) result = receive_addresses(program, row, link, number, found - row->address_label, words);
            if (result != DONE) return result;
            row->done = row->nbytes;
        }
        link->received = number;
        store_flag(link->my_ack, number); /* the slot has been read when the peer sees it free */
    } while (row->done < row->nbytes);
    row->done = 0;
    return DONE;
}

/* MISMATCH if a message of the peer has arrived. */
Result expect_none(Link *link) {
    int64_t number = link->received + 1;
    return load_flag(link->inbox + (number & (SLOTS - 1)) * LINE) >= number * KIND ? MISMATCH : DONE;
}
