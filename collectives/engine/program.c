/* The Python type Program: a bound program that the engine runs, and the requests that it manages. */
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

/* `advance`, without the GIL if messages of the MPI are in the program: its functions may wait for a thread that waits
 * for the GIL. */
Result advance_released(Program *program, long polls) {
    if (!program->is_running) return DONE; /* a frame that has interrupted the caller has run it to the end */
    if (!program->uses_mpi) return advance(program, polls);
    PyThreadState *thread = PyEval_SaveThread();
    Result result = advance(program, polls);
    PyEval_RestoreThread(thread);
    return result;
}

static bool fits(PyObject *array, const CallArray *expected) {
    int flags = PyArray_FLAGS((PyArrayObject *)array);
    if (!(flags & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS)) || !(flags & NPY_ARRAY_ALIGNED)) return false;
    return flags & NPY_ARRAY_WRITEABLE || !expected->written;
}

/* Start a program on two arrays of the lengths and dtypes of the call that it was bound for. */
Result run_on(Program *program, PyObject *sendbuf, PyObject *recvbuf) {
    const CallArray *send = &program->call[0], *recv = &program->call[1];
    if (!fits(sendbuf, send) || !fits(recvbuf, recv)) return REFUSED;
    char *source = PyArray_BYTES((PyArrayObject *)sendbuf) + send->offset;
    char *target = PyArray_BYTES((PyArrayObject *)recvbuf) + recv->offset;
    if (send->nbytes && recv->nbytes && source < target + recv->nbytes && target < source + send->nbytes)
        return REFUSED; /* they overlap, which Python reports as an error */
    program->bases[send->memory] = source;
    program->bases[recv->memory] = target;
    program->is_running = 1;
    return program->is_deferred ? WAITING : advance_released(program, program->call_polls);
}

/* ------------------------------------------------------------------------------------------ construction */

static void *data_of(PyObject *array) { return PyArray_DATA((PyArrayObject *)array); }

static int64_t length_of(PyObject *array) { return PyArray_SIZE((PyArrayObject *)array); }

/* Program(rows, operands, streams, rounds, links, messages, spare): arrays of the dtypes in instructions.py, `links` of
 * the addresses of links; the caller keeps the links. */
static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    if (PyTuple_GET_SIZE(args) != 7) {
        PyErr_SetString(PyExc_TypeError, "Program: expected seven arrays");
        return NULL;
    }
    for (Py_ssize_t at = 0; at < 7; at++) {
        PyObject *one = PyTuple_GET_ITEM(args, at);
        if (!PyArray_CheckExact(one) || !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)one)) {
            PyErr_SetString(PyExc_TypeError, "Program: expected contiguous arrays");
            return NULL;
        }
    }
    PyObject *operand = PyTuple_GET_ITEM(args, 1);
    if (PyArray_ITEMSIZE((PyArrayObject *)PyTuple_GET_ITEM(args, 0)) != sizeof(Row) ||
        PyArray_ITEMSIZE((PyArrayObject *)operand) != sizeof(Operand)) {
        PyErr_SetString(PyExc_TypeError, "Program: rows or operands are not of the dtypes of instructions.py");
        return NULL;
    }
    Program *self = (Program *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->arrays = Py_NewRef(args);
    self->rows = data_of(PyTuple_GET_ITEM(args, 0));
    self->operands = data_of(operand);
    self->streams = data_of(PyTuple_GET_ITEM(args, 2));
    self->rounds = data_of(PyTuple_GET_ITEM(args, 3));
    self->round_count = length_of(PyTuple_GET_ITEM(args, 3)) - 1;
    self->links = data_of(PyTuple_GET_ITEM(args, 4));
    self->messages = data_of(PyTuple_GET_ITEM(args, 5));
    self->uses_mpi = length_of(PyTuple_GET_ITEM(args, 5)) > 0;
    self->spare = data_of(PyTuple_GET_ITEM(args, 6));
    self->spare_bytes = length_of(PyTuple_GET_ITEM(args, 6));
    for (int at = 0; at < 2; at++) self->call[at].memory = IGNORED;
    return (PyObject *)self;
}

static void program_dealloc(Program *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->arrays);
    type->tp_free(self);
    Py_DECREF(type);
}

/* place(memory, address): set the address of a memory. */
static PyObject *program_place(Program *self, PyObject *args) {
    int memory;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "iK", &memory, &address)) return NULL;
    if (memory < 0 || memory >= ABSOLUTE) {
        PyErr_SetString(PyExc_ValueError, "place: expected the number of a memory");
        return NULL;
    }
    self->bases[memory] = (char *)(uintptr_t)address;
    Py_RETURN_NONE;
}

/* expect(number, written, memory, offset, nbytes): describe the array with a number in `run`. */
static PyObject *program_expect(Program *self, PyObject *args) {
    int number, written, memory;
    long long offset, nbytes;
    if (!PyArg_ParseTuple(args, "ipiLL", &number, &written, &memory, &offset, &nbytes)) return NULL;
    if (number < 0 || number > 1 || memory < 0 || memory >= MEMORIES || memory == ABSOLUTE) {
        PyErr_SetString(PyExc_ValueError, "expect: expected the numbers of an array and of a memory");
        return NULL;
    }
    self->call[number] = (CallArray){written, memory, offset, nbytes};
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------ methods */

static bool has_arguments(Py_ssize_t count, Py_ssize_t least, Py_ssize_t most) {
    if (least <= count && count <= most) return true;
    PyErr_Format(PyExc_TypeError, "expected %zd to %zd arguments, found %zd", least, most, count);
    return false;
}

static PyObject *program_run(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 2, 2)) return NULL;
    if (!PyArray_CheckExact(args[0]) || !PyArray_CheckExact(args[1])) return PyLong_FromLong(REFUSED);
    return PyLong_FromLong(run_on(self, args[0], args[1]));
}

static PyObject *program_advance(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 1, 1)) return NULL;
    long polls = PyLong_AsLong(args[0]);
    if (polls == -1 && PyErr_Occurred()) return NULL;
    return PyLong_FromLong(advance_released(self, polls));
}

/* advance_patiently(polls, naps): without the GIL, with up to `naps` sleeps while the program waits. */
static PyObject *program_advance_patiently(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 2, 2)) return NULL;
    long polls = PyLong_AsLong(args[0]), naps = PyLong_AsLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    Result result = DONE;
    if (self->is_running) {
        PyThreadState *thread = PyEval_SaveThread();
        while ((result = advance(self, polls)) == WAITING && naps-- > 0) usleep(NAP_US);
        PyEval_RestoreThread(thread);
    }
    return PyLong_FromLong(result);
}

/* Make a request active; WAITING if no progress thread is awake. */
static Result activate(Program *self, PyObject *request) {
    progress_words[1]++;
    if (PyList_Append(active_requests, request) < 0) return -1;
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

static PyObject *result_or_error(Result result) { return (int)result < 0 ? NULL : PyLong_FromLong(result); }

/* start(request): start the program for its persistent request. REFUSED if that is left to Python; WAITING if the
 * request is active, and the progress thread must be woken. */
static PyObject *program_start(Program *self, PyObject *request) {
    if (!is_idle(self)) return PyLong_FromLong(REFUSED);
    self->is_running = 1;
    Result result = advance_released(self, 0);
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
    Result result = advance_released(self, patient && PyList_GET_SIZE(active_requests) == 1 ? self->polls : 0);
    if (result == DONE && !deactivate(self)) return NULL;
    return PyLong_FromLong(result);
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
    {"place", (PyCFunction)program_place, METH_VARARGS, NULL},
    {"expect", (PyCFunction)program_expect, METH_VARARGS, NULL},
    {"run", (PyCFunction)(void (*)(void))program_run, METH_FASTCALL, NULL},
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
    {"shares_cores", T_BOOL, offsetof(Program, shares_cores), 0, "the core is yielded between polls"},
    {"is_deferred", T_BOOL, offsetof(Program, is_deferred), 0, "a start only stores addresses"},
    {"is_running", T_BOOL, offsetof(Program, is_running), 0, "from a start of the program to its end"},
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

PyType_Spec program_spec = {"collectives.engine._engine.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT, slots};
