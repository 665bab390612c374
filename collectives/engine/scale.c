/* Programs for any length: operands are ranges of chunks, from which those of a length follow.
 *
 * Each memory holds chunks one after the other. The elements of a call are cut into `pieces`, as evenly as possible and
 * in multiples of `grain` where they are enough; chunk c has the length of piece c modulo `pieces`.
 *
 * In programs for any counts each call gives the places and bytes of its chunks, the blocks of a v-form. Their bounds are
 * all places, then all sizes. No message is sent for blocks without data. */
#include "program.h"

enum { RENDEZVOUS = 1 << 13 }; /* bytes from which a message may go by its address */

static int64_t even_length(int64_t elements, int64_t pieces, int64_t piece) {
    return elements / pieces + (piece < elements % pieces);
}

static int64_t piece_length(const Scale *scale, int64_t elements, int64_t piece) {
    int64_t pieces = scale->pieces, grain = scale->grain;
    if (grain <= 1 || elements < pieces * grain) return even_length(elements, pieces, piece);
    return even_length(elements / grain, pieces, piece) * grain + (piece == pieces - 1 ? elements % grain : 0);
}

/* Mark of a call of this length, which ranks compute alike: see transport/node/mailbox.py. */
static int64_t mark_of(const Scale *scale) {
    uint32_t nbytes = (uint32_t)(scale->mark_bytes * scale->length);
    return (scale->mark + (nbytes * 2654435761u >> 20)) % (KIND / LABELS);
}

static void place(const Scale *scale, const int64_t *bounds, int memory, int64_t chunk, int64_t chunks, int64_t *offset,
                  int64_t *nbytes) {
    if (memory > LANDING) return;
    if (scale->blocks) {
        int64_t block = scale->starts[memory] + (memory >= SCRATCH ? chunk : chunk / BLOCK_SPACING);
        *offset = bounds[block], *nbytes = 0;
        for (int64_t at = block; at < block + chunks; at++) *nbytes += bounds[scale->blocks + at];
        return;
    }
    const int64_t *own = bounds + scale->starts[memory] + memory;
    *offset = own[chunk] * scale->itemsize;
    *nbytes = (own[chunk + chunks] - own[chunk]) * scale->itemsize;
}

/* True if the size class of a call of so many elements is in a set: there are four classes to an octave of bytes, whose
 * numbers are those of any_length.py. */
bool is_in_classes(const Scale *scale, const uint64_t *classes, int64_t elements) {
    uint64_t nbytes = (uint64_t)(scale->call_bytes * elements), number = nbytes;
    if (nbytes >= 8) {
        int shift = 61 - __builtin_clzll(nbytes);
        number = 4 * shift + (nbytes >> shift);
    }
    return number < 64 * CLASS_WORDS && classes[number / 64] >> number % 64 & 1;
}

/* Set operands and labels by the bounds of chunks. */
static void set_rows(Program *program) {
    const Scale *scale = program->scale;
    const int64_t *bounds = program->bounds;
    int64_t mark = mark_of(scale) * LABELS;
    for (int64_t number = 0; number < program->row_count; number++) {
        Row *row = program->rows + number;
        row->nbytes = 0;
        for (int64_t at = row->first_operand; at < row->first_operand + row->operands; at++) {
            const Operand *unit = program->units + at;
            Operand *operand = program->operands + at;
            place(scale, bounds, unit->left, unit->left_offset, unit->nbytes, &operand->left_offset, &operand->nbytes);
            place(scale, bounds, unit->right, unit->right_offset, unit->nbytes, &operand->right_offset, &operand->nbytes);
            place(scale, bounds, unit->out, unit->out_offset, unit->nbytes, &operand->out_offset, &operand->nbytes);
            row->nbytes += operand->nbytes;
        }
        if (row->kind >= NET_SEND && row->kind <= NET_WAIT) row->label = scale->blocks && !row->nbytes ? NO_MESSAGE : 0;
        if (row->kind != SEND && row->kind != RECV) continue;
        row->label = mark + (row->nbytes <= INLINE ? row->nbytes : INLINE + 1);
        bool by_address = row->kind == RECV || (program->may_choose[number] && row->nbytes >= RENDEZVOUS);
        bool in_parts = row->nbytes > scale->part && row->nbytes <= scale->streamed;
        row->part = in_parts ? scale->part : 0;
        by_address |= row->nbytes > scale->cell_bytes && !in_parts;
        row->address_label = by_address ? mark + INLINE + 1 : 0;
        row->number = 0;
        if (scale->blocks && !row->nbytes) row->label = NO_MESSAGE;
    }
}

/* Set operands and labels for calls of so many elements. */
void resize(Program *program, int64_t elements) {
    Scale *scale = program->scale;
    if (scale->length == elements) return;
    scale->length = elements;
    int64_t *bounds = program->bounds;
    for (int memory = SOURCE; memory <= LANDING; memory++) {
        int64_t at = 0, *own = bounds + memory;
        for (int64_t index = scale->starts[memory]; index < scale->starts[memory + 1]; index++) {
            own[index] = at;
            at += piece_length(scale, elements, program->order[index] % scale->pieces);
        }
        own[scale->starts[memory + 1]] = at;
    }
    set_rows(program);
}

/* Set operands and labels for the blocks of source and target in the bounds; false if they are too long. */
bool resize_blocks(Program *program) {
    Scale *scale = program->scale;
    int64_t *bounds = program->bounds, *sizes = bounds + scale->blocks, totals[2] = {0, 0};
    bool has_all = true;
    for (int memory = SOURCE; memory <= TARGET; memory++)
        for (int64_t block = scale->starts[memory]; block < scale->starts[memory + 1]; block++) {
            if (sizes[block] > scale->most) return false;
            totals[memory] += sizes[block];
            has_all &= sizes[block] > 0;
        }
    for (int memory = SCRATCH; memory <= LANDING; memory++) {
        int64_t at = 0;
        for (int64_t block = scale->starts[memory]; block < scale->starts[memory + 1]; block++) {
            bounds[block] = at;
            at += sizes[block] = sizes[program->order[block]];
        }
        if (at > scale->room) return false;
    }
    scale->length = totals[SOURCE] > totals[TARGET] ? totals[SOURCE] : totals[TARGET];
    set_rows(program);
    for (int64_t number = 0; number < program->row_count; number++) /* a rank without data may be in its next call */
        if (program->rows[number].kind == EXPECT_NONE) program->rows[number].label = has_all ? 0 : NO_MESSAGE;
    return true;
}
