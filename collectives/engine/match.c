/* The Python type CallTable: finds the program of a call by the arguments, and runs it on the call's arrays.
 *
 * Arguments other than arrays must be the same objects as in the call that was added, or lists and tuples of these;
 * arrays must have the same dtype, dimensions and bytes. Buffers of v-forms are read by counts.c instead, with the counts
 * of each call. Everything else is left to Python. */
#include "numpy.h"

#include <structmember.h>

#include "check.h"

enum { RESULT_BITS = 3 };

typedef struct {
    Program *program;
    Check *checks;
    Py_ssize_t check_count;
    int64_t channel;
    const uint64_t *classes; /* size classes of calls for which a program for any length is the right one */
} CallEntry;

typedef struct {
    int64_t started;        /* calls so far */
    int64_t channel_count;  /* a power of two */
    int64_t held[];         /* calls of each channel that hold their programs: no other starts meanwhile */
} Channels;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *owned;     /* tuple of the channels' array, an array for calls without one, and the entries' objects */
    Channels *channels;
    PyObject *no_array;
    CallEntry *entries;
    Py_ssize_t entry_count;
} CallTable;

static PyObject *find_item(PyObject *const *arguments, const Check *check) {
    PyObject *found = arguments[check->argument];
    for (int64_t level = 0; level < check->depth; level++) {
        int64_t index = check->path[level].index;
        found = check->path[level].is_list ? PyList_GET_ITEM(found, index) : PyTuple_GET_ITEM(found, index);
    }
    return found;
}

static bool is_like(PyArrayObject *array, const Check *check) {
    return (int64_t)PyArray_DESCR(array) == check->dtype && PyArray_NDIM(array) == check->dimensions &&
           (check->nbytes < 0 || PyArray_NBYTES(array) == check->nbytes);
}

/* True if an array of counts, of NumPy or with the buffer protocol, holds the expected bytes. */
static bool holds_counts(PyObject *object, const Check *check) {
    const void *content = (const void *)(intptr_t)check->content;
    if (PyArray_CheckExact(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        return is_like(array, check) && PyArray_IS_C_CONTIGUOUS(array) &&
               !memcmp(PyArray_DATA(array), content, check->nbytes);
    }
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return false;
    }
    bool holds = view.len == check->nbytes && view.format && !memcmp(view.buf, content, check->nbytes) &&
                 !strcmp(view.format, (const char *)(intptr_t)check->dtype);
    PyBuffer_Release(&view);
    return holds;
}

/* True if all checks but those of buffers' memory hold; stores the send and the receive buffer, and their checks. */
static bool agrees(PyObject *const *arguments, const CallEntry *entry, PyObject **buffers, const Check **checks) {
    for (const Check *check = entry->checks, *end = check + entry->check_count; check < end; check++) {
        PyObject *found = find_item(arguments, check);
        if (check->kind == IS_OBJECT || check->kind == IS_HANDLE) {
            if ((int64_t)found != check->value) return false;
            if (check->kind == IS_HANDLE && PyObject_IsTrue(found) != 1) { /* mpi4py's: freed */
                PyErr_Clear();
                return false;
            }
            continue;
        }
        if (check->kind != IS_BLOCKS && (int64_t)Py_TYPE(found) != check->value) return false;
        if (check->kind == IS_SEQUENCE) {
            if (Py_SIZE(found) != check->length) return false;
            continue;
        }
        if (check->kind == IS_COUNTS) {
            if (!holds_counts(found, check)) return false;
            continue;
        }
        if (check->kind == IS_BLOCKS) {
            int side = check->buffers >> 1;
            if (!(buffers[side] = read_blocks(entry->program, arguments, check))) return false;
            checks[side] = check;
            continue;
        }
        if (check->kind == IS_ARRAY && !is_like((PyArrayObject *)found, check)) return false;
        for (int number = 0; number < 2; number++)
            if (check->buffers & 1 << number) buffers[number] = found, checks[number] = check;
    }
    return true;
}

/* Memory by the buffer protocol, if it is like that of the call that was added. */
bool open_view(PyObject *object, const Check *check, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return false;
    }
    bool is_any = check->kind == IS_BLOCKS || check->nbytes < 0;
    bool is_like = view->ndim == check->dimensions && (is_any || view->len == check->nbytes) &&
                   !strcmp(view->format ? view->format : "B", (const char *)(intptr_t)check->dtype);
    if (!is_like) PyBuffer_Release(view);
    return is_like;
}

/* Memory of a buffer: an array's, or by the buffer protocol, whose `view` the caller releases. */
static bool open_memory(PyObject *object, const Check *check, Memory *memory, Py_buffer *view) {
    if (check == NULL || is_array(check)) {
        PyArrayObject *array = (PyArrayObject *)object;
        int flags = PyArray_FLAGS(array);
        *memory = (Memory){PyArray_BYTES(array), PyArray_NBYTES(array),
                           flags & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS), flags & NPY_ARRAY_WRITEABLE};
        return true;
    }
    if (!open_view(object, check, view)) return false;
    *memory = (Memory){view->buf, view->len, true, !view->readonly};
    return true;
}

/* Start the program of an entry on the buffers of a call. */
static Result start_entry(CallEntry *entry, PyObject **buffers, const Check **checks, bool is_held) {
    Memory memories[2];
    Py_buffer views[2];
    views[0].obj = views[1].obj = NULL;
    Result result = REFUSED;
    if (open_memory(buffers[0], checks[0], &memories[0], &views[0]) &&
        open_memory(buffers[1], checks[1], &memories[1], &views[1]))
        result = (is_held ? queue_on : run_on)(entry->program, &memories[0], &memories[1], entry->classes);
    for (int number = 0; number < 2; number++)
        if (views[number].obj) PyBuffer_Release(&views[number]);
    return result;
}

/* Start the program of a call: (send buffer, receive buffer, operation, root, algorithm, segments). Returns the result,
 * and unless that is DONE or REFUSED the number of the entry in the bits above it. */
static PyObject *call_table(CallTable *self, PyObject *const *arguments, size_t flags, PyObject *keywords) {
    (void)flags, (void)keywords;
    Channels *channels = self->channels;
    int64_t channel = channels->started & (channels->channel_count - 1);
    bool is_held = channels->held[channel] > 0;
    for (Py_ssize_t index = 0; index < self->entry_count; index++) {
        CallEntry *entry = &self->entries[index];
        PyObject *buffers[2] = {self->no_array, self->no_array};
        const Check *checks[2] = {NULL, NULL};
        if (entry->channel != channel || (is_held && has_blocks(entry->program))) continue;
        if (!agrees(arguments, entry, buffers, checks)) continue;
        Result result = start_entry(entry, buffers, checks, is_held);
        if (result == REFUSED) continue;
        channels->started++;
        if (result == RAISED) return NULL;
        return PyLong_FromLong(result ? result + (index << RESULT_BITS) : DONE);
    }
    return PyLong_FromLong(REFUSED);
}

static PyObject *table_call(PyObject *self, PyObject *const *arguments, size_t flags, PyObject *keywords) {
    if (PyVectorcall_NARGS(flags) != 6 || keywords) {
        PyErr_SetString(PyExc_TypeError, "CallTable: expected six arguments");
        return NULL;
    }
    return call_table((CallTable *)self, arguments, flags, keywords);
}

/* CallTable(channels, no_array) */
static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    PyObject *channels, *no_array;
    if (!PyArg_ParseTuple(args, "O!O!", &PyArray_Type, &channels, &PyArray_Type, &no_array)) return NULL;
    CallTable *self = (CallTable *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->call = table_call;
    self->owned = PyTuple_Pack(3, channels, no_array, Py_None);
    self->channels = PyArray_DATA((PyArrayObject *)channels);
    self->no_array = no_array;
    return self->owned ? (PyObject *)self : NULL;
}

static void table_dealloc(CallTable *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->entries);
    Py_XDECREF(self->owned);
    type->tp_free(self);
    Py_DECREF(type);
}

/* store(entries): replace all entries by a tuple of (program, checks, channel, classes, kept objects). */
static PyObject *table_store(CallTable *self, PyObject *entries) {
    if (!PyTuple_CheckExact(entries)) {
        PyErr_SetString(PyExc_TypeError, "store: expected a tuple");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(entries);
    CallEntry *stored = PyMem_New(CallEntry, count ? count : 1);
    if (stored == NULL) return PyErr_NoMemory();
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *program, *checks, *classes, *kept;
        long long channel;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(entries, index), "OO!LO!O", &program, &PyArray_Type, &checks, &channel,
                              &PyArray_Type, &classes, &kept)) {
            PyMem_Free(stored);
            return NULL;
        }
        stored[index] = (CallEntry){(Program *)program, PyArray_DATA((PyArrayObject *)checks),
                                    PyArray_SIZE((PyArrayObject *)checks), channel,
                                    PyArray_DATA((PyArrayObject *)classes)};
    }
    PyObject *owned = PyTuple_Pack(3, PyTuple_GET_ITEM(self->owned, 0), self->no_array, entries);
    if (owned == NULL) {
        PyMem_Free(stored);
        return NULL;
    }
    CallEntry *before = self->entries;
    PyObject *owned_before = self->owned;
    self->entries = stored, self->entry_count = count, self->owned = owned;
    PyMem_Free(before);
    Py_DECREF(owned_before); /* last: it may run finalizers, which call */
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"store", (PyCFunction)table_store, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallTable, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, table_new},         {Py_tp_dealloc, table_dealloc}, {Py_tp_methods, methods},
    {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members},       {0, NULL},
};

PyType_Spec call_table_spec = {"collectives.engine._engine.CallTable", sizeof(CallTable), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
