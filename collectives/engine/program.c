/* The Python type RowProgram: a bound program that the engine runs, and the requests that it manages. */
#include "numpy.h"

#include <structmember.h>
#include <unistd.h>

#include "program.h"

/* Of the process: the list of active requests, and how they progress. Requests are changed in steps that hold the GIL,
 * so that each is one step for other threads. */
static PyObject *active_requests;
static int64_t *progress_words; /* 1 if the progress thread is awake; how often the program has made progress itself */

PyObject *set_progress(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyList_CheckExact(args[0]) || !PyArray_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "set_progress: expected a list and an array");
        return NULL;
    }
    Py_INCREF(args[0]);
    Py_INCREF(args[1]); /* kept for the life of the process */
    active_requests = args[0];
    progress_words = PyArray_DATA((PyArrayObject *)args[1]);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------ runs */

/* `advance`, with up to `naps` sleeps while the program waits. Without the GIL if it sleeps, or if messages of the MPI are
 * in the program: functions of the MPI may wait for a thread that waits for the GIL. One thread at a time advances a
 * program, and none while a frame that it has interrupted does. */
Result advance_released(Program *program, long polls, long naps) {
    if (program->is_busy) return WAITING;  /* first: it may have ended, and not returned */
    if (!program->is_running) return DONE; /* a frame that has interrupted the caller has run it to the end */
    program->is_busy = 1;
    bool releases = program->uses_mpi || naps;
    if (releases) program->thread = PyEval_SaveThread();
    Result result;
    while ((result = advance(program, polls)) == WAITING && naps-- > 0) usleep(NAP_US);
    if (releases) PyEval_RestoreThread(program->thread);
    program->thread = NULL;
    program->is_busy = 0;
    return result;
}

static bool fits(const Memory *memory, const CallArray *expected) {
    return memory->is_dense && (memory->is_writable || !expected->written);
}

/* Set the length of a program for any length by an array; false if it has none, or another array has another one. */
static bool set_length(const Memory *array, const CallArray *expected, const Scale *scale, int64_t *length) {
    if (!expected->per_element) return true;
    int64_t elements = scale->length; /* that of the last call: a division takes a fifth of a short message */
    if (elements * expected->per_element != array->nbytes) elements = array->nbytes / expected->per_element;
    if (elements * expected->per_element != array->nbytes || elements < scale->least || elements > scale->most)
        return false;
    if (*length >= 0 && *length != elements) return false;
    *length = elements;
    return true;
}

/* True if a program can run on two arrays: of the dtypes of the call that it was bound for, and of its lengths, or of any
 * `length` in `classes`. */
static bool accepts(Program *program, const Memory *sendbuf, const Memory *recvbuf, const uint64_t *classes,
                    int64_t *length) {
    const CallArray *send = &program->call[0], *recv = &program->call[1];
    if (!fits(sendbuf, send) || !fits(recvbuf, recv)) return false;
    *length = -1;
    Scale *scale = program->scale;
    if (scale && scale->blocks)
        return agree_on_blocks(program, sendbuf, recvbuf) && classes && is_in_classes(scale, classes, scale->length);
    if (scale && (!set_length(sendbuf, send, scale, length) || !set_length(recvbuf, recv, scale, length))) return false;
    if (classes && *length >= 0 && !is_in_classes(scale, classes, *length)) return false;
    if (!send->nbytes || !recv->nbytes) return true;
    int64_t sent = *length < 0 ? send->nbytes : *length * send->per_element;
    int64_t received = *length < 0 ? recv->nbytes : *length * recv->per_element;
    char *source = sendbuf->data + send->offset;
    char *target = recvbuf->data + recv->offset;
    return source >= target + received || target >= source + sent; /* Python reports an overlap as an error */
}

/* Start a program on two arrays that it accepts. */
Result run_on(Program *program, const Memory *sendbuf, const Memory *recvbuf, const uint64_t *classes) {
    int64_t length;
    if (!accepts(program, sendbuf, recvbuf, classes, &length)) return REFUSED;
    if (length >= 0) resize(program, length);
    const CallArray *send = &program->call[0], *recv = &program->call[1];
    program->bases[send->memory] = sendbuf->data + send->offset;
    program->bases[recv->memory] = recvbuf->data + recv->offset;
    begin(program);
    return program->is_deferred ? WAITING : advance_released(program, program->call_polls, 0);
}

/* QUEUED if a program accepts two arrays, for a call that waits for its channel. */
Result queue_on(Program *program, const Memory *sendbuf, const Memory *recvbuf, const uint64_t *classes) {
    int64_t length;
    return accepts(program, sendbuf, recvbuf, classes, &length) ? QUEUED : REFUSED;
}

/* ------------------------------------------------------------------------------------------ construction */

static void *data_of(PyObject *array) { return PyArray_DATA((PyArrayObject *)array); }

static int64_t length_of(PyObject *array) { return PyArray_SIZE((PyArrayObject *)array); }

/* Links of the records in a tuple of arrays; NULL if there is an error. */
static Link **links_of(PyObject *records) {
    Py_ssize_t count = PyTuple_GET_SIZE(records);
    Link **links = PyMem_New(Link *, count ? count : 1);
    if (links == NULL) return (Link **)PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *one = PyTuple_GET_ITEM(records, at);
        if (!PyArray_CheckExact(one) || PyArray_ITEMSIZE((PyArrayObject *)one) != sizeof(Link)) {
            PyErr_SetString(PyExc_TypeError, "RowProgram: expected records of links");
            PyMem_Free(links);
            return NULL;
        }
        links[at] = data_of(one);
    }
    return links;
}

/* RowProgram(rows, operands, streams, rounds, bases, links, messages, spare, calls): arrays of the dtypes in
 * instructions.py, `links` a tuple of records, `calls` a tuple of functions. */
static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    PyObject *rows, *operands, *streams, *rounds, *bases, *links, *messages, *spare, *calls;
    PyTypeObject *array = &PyArray_Type, *tuple = &PyTuple_Type;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O!O!", array, &rows, array, &operands, array, &streams, array, &rounds,
                          array, &bases, tuple, &links, array, &messages, array, &spare, tuple, &calls))
        return NULL;
    const struct {
        PyObject *array;
        size_t itemsize;
    } typed[] = {{rows, sizeof(Row)},        {operands, sizeof(Operand)},    {streams, sizeof(Stream)},
                 {rounds, sizeof(int64_t)},  {messages, sizeof(NetMessage)}, {bases, sizeof(int64_t)}};
    for (size_t at = 0; at < sizeof(typed) / sizeof(typed[0]); at++) {
        PyArrayObject *one = (PyArrayObject *)typed[at].array;
        if (!PyArray_IS_C_CONTIGUOUS(one) || PyArray_ITEMSIZE(one) != (Py_ssize_t)typed[at].itemsize) {
            PyErr_SetString(PyExc_TypeError, "RowProgram: expected contiguous arrays of the dtypes of instructions.py");
            return NULL;
        }
    }
    if (length_of(bases) != MEMORIES || length_of(rounds) < 1) {
        PyErr_SetString(PyExc_ValueError, "RowProgram: expected an address of each memory, and bounds of rounds");
        return NULL;
    }
    Program *self = (Program *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->arrays = Py_NewRef(args);
    if (!(self->links = links_of(links))) {
        Py_DECREF(self);
        return NULL;
    }
    self->rows = data_of(rows);
    self->operands = data_of(operands);
    self->row_count = length_of(rows);
    self->streams = data_of(streams);
    self->rounds = data_of(rounds);
    self->round_count = length_of(rounds) - 1;
    self->bases = data_of(bases);
    self->messages = data_of(messages);
    self->uses_mpi = length_of(messages) > 0;
    self->spare = data_of(spare);
    self->spare_bytes = length_of(spare);
    self->calls = calls;
    for (int at = 0; at < 2; at++) self->call[at] = (CallArray){.memory = IGNORED};
    return (PyObject *)self;
}

static void program_dealloc(Program *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->links);
    Py_XDECREF(self->arrays);
    Py_XDECREF(self->scale_arrays);
    Py_XDECREF(self->described);
    type->tp_free(self);
    Py_DECREF(type);
}

/* scale(record, units, order, bounds, may_choose): let the program run for any length. */
static PyObject *program_scale(Program *self, PyObject *args) {
    PyObject *record, *units, *order, *bounds, *may_choose;
    PyTypeObject *array = &PyArray_Type;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!", array, &record, array, &units, array, &order, array, &bounds, array,
                          &may_choose))
        return NULL;
    bool fits = PyArray_ITEMSIZE((PyArrayObject *)record) == sizeof(Scale) && length_of(record) == 1 &&
                PyArray_ITEMSIZE((PyArrayObject *)units) == sizeof(Operand) && length_of(may_choose) == self->row_count &&
                length_of(units) == length_of(PyTuple_GET_ITEM(self->arrays, 1)) &&
                length_of(bounds) >= length_of(order) + LANDING + 1;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "scale: expected arrays for the rows of the program");
        return NULL;
    }
    Py_XSETREF(self->scale_arrays, Py_NewRef(args));
    self->scale = data_of(record);
    self->units = data_of(units);
    self->order = data_of(order);
    self->bounds = data_of(bounds);
    self->may_choose = data_of(may_choose);
    Py_RETURN_NONE;
}

/* describe(entry, turns): note calls in the record, as copies of the entry. */
static PyObject *program_describe(Program *self, PyObject *args) {
    PyObject *entry, *turns;
    if (!PyArg_ParseTuple(args, "O!O!", &PyArray_Type, &entry, &PyArray_Type, &turns)) return NULL;
    if (PyArray_NBYTES((PyArrayObject *)entry) != sizeof(CallRecord)) {
        PyErr_SetString(PyExc_ValueError, "describe: expected an entry of the record");
        return NULL;
    }
    Py_XSETREF(self->described, Py_NewRef(args));
    self->entry = data_of(entry);
    self->turns = data_of(turns);
    Py_RETURN_NONE;
}

static PyObject *program_begin(Program *self, PyObject *unused) {
    (void)unused;
    begin(self);
    Py_RETURN_NONE;
}

/* note_end(state): note in the record that the call has ended by itself (1), or that this rank has left it. */
static PyObject *program_note_end(Program *self, PyObject *state) {
    long found = PyLong_AsLong(state);
    if (found == -1 && PyErr_Occurred()) return NULL;
    note_end(self, (CallState)found);
    if (found == HAS_ENDED) self->is_running = 0;
    Py_RETURN_NONE;
}

/* resize(elements): set operands and labels for calls of a length, or for an array with the places of all blocks and
 * then their sizes. */
static PyObject *program_resize(Program *self, PyObject *length) {
    if (PyArray_CheckExact(length)) {
        if (!self->scale || PyArray_NBYTES((PyArrayObject *)length) != 2 * self->scale->starts[SCRATCH] * 8) {
            PyErr_SetString(PyExc_ValueError, "resize: expected the places and sizes of all blocks");
            return NULL;
        }
        int64_t *given = data_of(length), count = self->scale->starts[SCRATCH];
        memcpy(self->bounds, given, count * 8);
        memcpy(self->bounds + self->scale->blocks, given + count, count * 8);
        return PyBool_FromLong(resize_blocks(self));
    }
    long long elements = PyLong_AsLongLong(length);
    if (elements == -1 && PyErr_Occurred()) return NULL;
    if (self->scale) resize(self, elements);
    Py_RETURN_NONE;
}

/* expect(number, written, memory, offset, nbytes, per_element): describe the array with a number in `run`. */
static PyObject *program_expect(Program *self, PyObject *args) {
    int number, written, memory;
    long long offset, nbytes, per_element;
    if (!PyArg_ParseTuple(args, "ipiLLL", &number, &written, &memory, &offset, &nbytes, &per_element)) return NULL;
    if (number < 0 || number > 1 || memory < 0 || memory >= MEMORIES || memory == ABSOLUTE) {
        PyErr_SetString(PyExc_ValueError, "expect: expected the numbers of an array and of a memory");
        return NULL;
    }
    self->call[number] = (CallArray){written, memory, offset, nbytes, per_element};
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------ methods */

/* A result as an object; NULL if an error is set. */
static PyObject *result_or_error(Result result) { return result == RAISED ? NULL : PyLong_FromLong(result); }

static bool has_arguments(Py_ssize_t count, Py_ssize_t least, Py_ssize_t most) {
    if (least <= count && count <= most) return true;
    PyErr_Format(PyExc_TypeError, "expected %zd to %zd arguments, found %zd", least, most, count);
    return false;
}

/* Memory of an array. */
static Memory memory_of(PyObject *array) {
    int flags = PyArray_FLAGS((PyArrayObject *)array);
    return (Memory){PyArray_BYTES((PyArrayObject *)array), PyArray_NBYTES((PyArrayObject *)array),
                    flags & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS), flags & NPY_ARRAY_WRITEABLE};
}

static PyObject *program_run(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 2, 2)) return NULL;
    if (!PyArray_Check(args[0]) || !PyArray_Check(args[1])) return PyLong_FromLong(REFUSED);
    Memory memories[2] = {memory_of(args[0]), memory_of(args[1])};
    return result_or_error(run_on(self, &memories[0], &memories[1], NULL));
}

/* accepts(sendbuf, recvbuf): true if `run` would start the program. */
static PyObject *program_accepts(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 2, 2)) return NULL;
    if (!PyArray_Check(args[0]) || !PyArray_Check(args[1])) Py_RETURN_FALSE;
    Memory memories[2] = {memory_of(args[0]), memory_of(args[1])};
    return PyBool_FromLong(queue_on(self, &memories[0], &memories[1], NULL) == QUEUED);
}

static PyObject *program_advance(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 1, 1)) return NULL;
    long polls = PyLong_AsLong(args[0]);
    if (polls == -1 && PyErr_Occurred()) return NULL;
    return result_or_error(advance_released(self, polls, 0));
}

/* advance_patiently(polls, naps): without the GIL, with up to `naps` sleeps while the program waits. */
static PyObject *program_advance_patiently(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 2, 2)) return NULL;
    long polls = PyLong_AsLong(args[0]), naps = PyLong_AsLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    return result_or_error(advance_released(self, polls, naps));
}

/* Make a request active; WAITING if no progress thread is awake. */
static Result activate(Program *self, PyObject *request) {
    progress_words[1]++;
    if (PyList_Append(active_requests, request) < 0) return RAISED;
    self->request = request;
    return progress_words[0] ? DONE : WAITING;
}

static bool deactivate(Program *self) {
    PyObject *request = self->request;
    self->request = NULL;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(active_requests); at++)
        if (PyList_GET_ITEM(active_requests, at) == request)
            return PyList_SetSlice(active_requests, at, at + 1, NULL) == 0;
    return true;
}

static bool is_idle(Program *self) { return self->is_startable && self->request == NULL; }

/* start(request): start the program for its persistent request. REFUSED if that is left to Python; WAITING if the
 * request is active, and the progress thread must be woken. */
static PyObject *program_start(Program *self, PyObject *request) {
    if (!is_idle(self)) return PyLong_FromLong(REFUSED);
    begin(self);
    Result result = advance_released(self, 0, 0);
    return result_or_error(result == DONE ? DONE : activate(self, request));
}

/* activate(request): make the request of a running program active; else as `start`. */
static PyObject *program_activate(Program *self, PyObject *request) { return result_or_error(activate(self, request)); }

/* end(request[, patient]): advance an active request, which becomes inactive at the end of the program. An idle
 * persistent request is at its end. If `patient`, poll if no other request is active. */
static PyObject *program_end(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 1, 2)) return NULL;
    if (self->request != args[0]) return PyLong_FromLong(is_idle(self) ? DONE : REFUSED);
    bool patient = count == 2;
    if (patient) progress_words[1]++;
    Result result = advance_released(self, patient && PyList_GET_SIZE(active_requests) == 1 ? self->polls : 0, 0);
    if (result == DONE && !deactivate(self)) return NULL;
    return result_or_error(result);
}

/* take_back(request): leave a request to Python. WAITING if it is active, DONE if it is persistent and idle, REFUSED if
 * Python manages it already. */
static PyObject *program_take_back(Program *self, PyObject *request) {
    bool is_active = self->request == request;
    if (!is_active && !is_idle(self)) return PyLong_FromLong(REFUSED);
    self->request = NULL;
    self->is_startable = 0;
    return PyLong_FromLong(is_active ? WAITING : DONE);
}

/* manage(request, active): start and end the program for its persistent request from now on. */
static PyObject *program_manage(Program *self, PyObject *args) {
    PyObject *request;
    int active;
    if (!PyArg_ParseTuple(args, "Op", &request, &active)) return NULL;
    self->request = active ? request : NULL;
    self->is_startable = 1;
    Py_RETURN_NONE;
}

static PyObject *program_runs_for(Program *self, PyObject *request) { return PyBool_FromLong(self->request == request); }

static PyObject *program_is_idle(Program *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(is_idle(self));
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)program_begin, METH_NOARGS, NULL},
    {"note_end", (PyCFunction)program_note_end, METH_O, NULL},
    {"describe", (PyCFunction)program_describe, METH_VARARGS, NULL},
    {"scale", (PyCFunction)program_scale, METH_VARARGS, NULL},
    {"resize", (PyCFunction)program_resize, METH_O, NULL},
    {"expect", (PyCFunction)program_expect, METH_VARARGS, NULL},
    {"run", (PyCFunction)(void (*)(void))program_run, METH_FASTCALL, NULL},
    {"accepts", (PyCFunction)(void (*)(void))program_accepts, METH_FASTCALL, NULL},
    {"advance", (PyCFunction)(void (*)(void))program_advance, METH_FASTCALL, NULL},
    {"advance_patiently", (PyCFunction)(void (*)(void))program_advance_patiently, METH_FASTCALL, NULL},
    {"start", (PyCFunction)program_start, METH_O, NULL},
    {"activate", (PyCFunction)program_activate, METH_O, NULL},
    {"end", (PyCFunction)(void (*)(void))program_end, METH_FASTCALL, NULL},
    {"take_back", (PyCFunction)program_take_back, METH_O, NULL},
    {"manage", (PyCFunction)program_manage, METH_VARARGS, NULL},
    {"runs_for", (PyCFunction)program_runs_for, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"polls", T_LONG, offsetof(Program, polls), 0, "polls without progress after which a wait returns"},
    {"call_polls", T_LONG, offsetof(Program, call_polls), 0, "the same of a call"},
    {"round", T_LONGLONG, offsetof(Program, round), READONLY, "index of the current round"},
    {"failed", T_LONGLONG, offsetof(Program, failed), READONLY, "index of the row that failed"},
    {"number", T_LONGLONG, offsetof(Program, number), READONLY, "of the active call in the record; 0: none"},
    {"moves", T_LONGLONG, offsetof(Program, moves), READONLY, "number that changes with progress"},
    {"shares_cores", T_BOOL, offsetof(Program, shares_cores), 0, "the core is yielded between polls"},
    {"is_deferred", T_BOOL, offsetof(Program, is_deferred), 0, "a start only stores addresses"},
    {"is_running", T_BOOL, offsetof(Program, is_running), READONLY, "from a start of the program to its end"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"is_idle", (getter)program_is_idle, NULL, "the engine may start it for its persistent request", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, program_new},   {Py_tp_dealloc, program_dealloc}, {Py_tp_methods, methods},
    {Py_tp_members, members},   {Py_tp_getset, properties},       {0, NULL},
};

PyType_Spec program_spec = {"collectives.engine._engine.RowProgram", sizeof(Program), 0, Py_TPFLAGS_DEFAULT, slots};
