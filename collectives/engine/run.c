/* The run loop: advances the streams of a program, round by round. */
#include <unistd.h>

#include "memory.h"
#include "program.h"

static void compute(Program *program, Row *row) {
    Operand *operand = program->operands + row->first_operand;
    for (Operand *end = operand + row->operands; operand < end; operand++) {
        char *left = address_of(program, operand->left, operand->left_offset);
        char *out = address_of(program, operand->out, operand->out_offset);
        if (row->reduction >= 0) {
            char *right = address_of(program, operand->right, operand->right_offset);
            find_reduction(row->reduction)(left, right, out, operand->nbytes);
        } else if (left != out) {
            copy_bytes(out, left, operand->nbytes);
        }
    }
}

static Result start_network(Program *program, Row *row) {
    Operand *operand = program->operands + row->first_operand;
    bool receives = row->kind == NET_RECV;
    char *address = NULL;
    if (row->nbytes)
        address = receives ? address_of(program, operand->out, operand->out_offset)
                           : address_of(program, operand->left, operand->left_offset);
    return start_message(program->messages + row->link, receives, address, row->nbytes);
}

/* Call the function of a row. */
static Result call_function(Program *program, Row *row) {
    PyThreadState *thread = program->thread;
    if (thread) PyEval_RestoreThread(thread);
    PyObject *found = PyObject_CallNoArgs(PyTuple_GET_ITEM(program->calls, row->link));
    Result result = found == NULL ? RAISED : found == Py_False ? WAITING : DONE;
    Py_XDECREF(found);
    if (thread) PyEval_SaveThread();
    return result;
}

/* Run a row as far as possible. */
static Result attempt(Program *program, Row *row) {
    if (row->label == NO_MESSAGE) return DONE;
    switch ((Kind)row->kind) {
    case SEND:
        return send_message(program, row) ? DONE : WAITING;
    case RECV:
        return receive_message(program, row);
    case LOCAL:
        compute(program, row);
        return DONE;
    case WAIT_STREAM: {
        Stream *stream = program->streams + row->after;
        return stream->position - stream->first >= row->count ? DONE : WAITING;
    }
    case WAIT_READ:
        return await_read(program, row);
    case EXPECT_NONE:
        return expect_none(program->links[row->link]);
    case NET_WAIT:
        return test_message(program->messages + row->link, row->nbytes);
    case CALL:
        return call_function(program, row);
    case NET_SEND:
    case NET_RECV:
        break;
    }
    return start_network(program, row);
}

/* Run the streams from `stream` to `stop` once as far as possible. Sets `moved` if a row is done. */
static Result run_streams(Program *program, Stream *stream, Stream *stop, bool *moved) {
    Result result = DONE;
    *moved = false;
    for (; stream < stop; stream++) {
        while (stream->position < stream->stop) {
            Row *row = program->rows + stream->position;
            int64_t done = row->done;
            Result one = attempt(program, row);
            if (row->done != done) *moved = true;
            if (one > WAITING) {
                program->failed = stream->position;
                return one;
            }
            if (one == WAITING) {
                result = WAITING;
                break;
            }
            stream->position++;
            *moved = true;
        }
    }
    return result;
}

/* Run a program from where it is, until it has ended, has failed, or `polls` polls in a row were without progress. */
Result advance(Program *program, long polls) {
    for (; program->round < program->round_count; program->round++) {
        Stream *first = program->streams + program->rounds[program->round];
        Stream *stop = program->streams + program->rounds[program->round + 1];
        bool moved;
        Result result;
        for (long left = polls; (result = run_streams(program, first, stop, &moved)) != DONE;) {
            if (result != WAITING) {
                note_end(program, HAS_FAILED);
                return result;
            }
            if (moved) {
                program->moves++;
                left = polls;
                continue;
            }
            if (--left < 0) return WAITING;
            if (program->shares_cores)
                sched_yield();
            else
                relax();
        }
        for (Stream *stream = first; stream < stop; stream++) stream->position = stream->first;
    }
    program->round = 0;
    program->is_running = 0;
    note_end(program, HAS_ENDED);
    return DONE;
}
