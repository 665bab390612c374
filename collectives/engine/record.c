/* The record of a rank: a ring of its last calls, in memory that other processes read. */
#include "numpy.h"

#include <time.h>

#include "program.h"

static int64_t *last;  /* number of the last call */
static CallRecord *entries; /* CALLS_KEPT of them; that of a call by its number */

/* set_record(words, entries): use this memory, which is kept for the life of the process. */
PyObject *set_record(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *words, *ring;
    if (!PyArg_ParseTuple(args, "O!O!", &PyArray_Type, &words, &PyArray_Type, &ring)) return NULL;
    if (PyArray_NBYTES((PyArrayObject *)ring) != CALLS_KEPT * sizeof(CallRecord)) {
        PyErr_SetString(PyExc_ValueError, "set_record: expected an array of entries");
        return NULL;
    }
    Py_INCREF(words);
    Py_INCREF(ring);
    last = PyArray_DATA((PyArrayObject *)words);
    entries = PyArray_DATA((PyArrayObject *)ring);
    Py_RETURN_NONE;
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void note_start(Program *program) {
    CallRecord *entry = entries + (++*last & (CALLS_KEPT - 1));
    atomic_store_explicit(&entry->number, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    memcpy((char *)entry + sizeof(int64_t), (const char *)program->entry + sizeof(int64_t), sizeof(CallRecord) - sizeof(int64_t));
    if (program->scale) entry->nbytes = program->scale->length * program->scale->call_bytes;
    entry->turn = ++*program->turns;
    entry->started = now();
    program->number = *last;
    atomic_store_explicit(&entry->number, *last, memory_order_release);
}

/* Note the end of the program's call. */
void note_end(Program *program, CallState state) {
    if (!program->number) return;
    CallRecord *entry = entries + (program->number & (CALLS_KEPT - 1));
    if (atomic_load_explicit(&entry->number, memory_order_relaxed) == program->number) {
        entry->ended = now();
        entry->state = (uint8_t)state;
    }
    program->number = 0;
}

/* Begin a call. */
void begin(Program *program) {
    if (entries && program->entry) {
        note_end(program, WAS_LEFT);
        note_start(program);
    }
    program->is_running = 1;
}
