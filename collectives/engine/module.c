/* The module collectives.engine._engine. */
#define IMPORTS_NUMPY
#include "numpy.h"

#include "memory.h"
#include "program.h"
#include "sources.h"

extern PyType_Spec program_spec, call_table_spec;

PyObject *set_progress(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *set_record(PyObject *, PyObject *);
PyObject *write_object(PyObject *, PyObject *const *, Py_ssize_t), *write_all(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *set_pickler(PyObject *, PyObject *const *, Py_ssize_t), *copy_object(PyObject *, PyObject *);
PyObject *read_plain(PyObject *, PyObject *);
PyObject *read_frames(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *set_handles(PyObject *, PyObject *), *take_handle(PyObject *, PyObject *), *keep_handle(PyObject *, PyObject *);

/* copy(target, source, nbytes): copy memory at addresses. */
static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "copy: expected two addresses and a number of bytes");
        return NULL;
    }
    size_t target = PyLong_AsSize_t(args[0]), source = PyLong_AsSize_t(args[1]), nbytes = PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred()) return NULL;
    copy_bytes((char *)target, (const char *)source, (int64_t)nbytes);
    Py_RETURN_NONE;
}

/* reduction(operation, kind, itemsize): number of a reduction, by the name of NumPy's function; -1 if there is none. */
static PyObject *reduction(PyObject *module, PyObject *args) {
    (void)module;
    const char *operation;
    int kind, itemsize;
    if (!PyArg_ParseTuple(args, "sCi", &operation, &kind, &itemsize)) return NULL;
    return PyLong_FromLong(reduction_number(operation, (char)kind, itemsize));
}

/* reduce(number, left, right, out, nbytes): reduce memory at addresses. */
static PyObject *reduce(PyObject *module, PyObject *args) {
    (void)module;
    int number;
    unsigned long long left, right, out;
    long long nbytes;
    if (!PyArg_ParseTuple(args, "iKKKL", &number, &left, &right, &out, &nbytes)) return NULL;
    if (!has_reduction(number)) {
        PyErr_SetString(PyExc_ValueError, "reduce: expected a number that `reduction` returns");
        return NULL;
    }
    find_reduction(number)((const char *)(uintptr_t)left, (const char *)(uintptr_t)right, (char *)(uintptr_t)out, nbytes);
    Py_RETURN_NONE;
}

/* set_mpi(isend, irecv, test, get_count): addresses of functions of the MPI. */
static PyObject *set_mpi(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long found[4];
    if (!PyArg_ParseTuple(args, "KKKK", &found[0], &found[1], &found[2], &found[3])) return NULL;
    void *addresses[4];
    for (int at = 0; at < 4; at++) addresses[at] = (void *)(uintptr_t)found[at];
    set_mpi_functions(addresses);
    Py_RETURN_NONE;
}

#define FIELD(TYPE, NAME) {#TYPE "." #NAME, offsetof(TYPE, NAME)}

/* Offsets of fields, and sizes, to compare with the dtypes of instructions.py. */
static const struct {
    const char *name;
    size_t value;
} LAYOUT[] = {
    {"Row", sizeof(Row)}, FIELD(Row, label), FIELD(Row, nbytes), FIELD(Row, first_operand), FIELD(Row, link),
    FIELD(Row, after), FIELD(Row, count), FIELD(Row, reduction), FIELD(Row, kind), FIELD(Row, mine_first),
    {"Operand", sizeof(Operand)}, FIELD(Operand, nbytes), FIELD(Operand, left_offset), FIELD(Operand, left),
    {"Stream", sizeof(Stream)}, {"Scale", sizeof(Scale)}, FIELD(Scale, starts), FIELD(Scale, room), {"Link", sizeof(Link)}, FIELD(Link, sent), FIELD(Link, own_segments), FIELD(Link, own),
    FIELD(Link, theirs), {"Check", sizeof(int64_t) * 16}, {"NetMessage", sizeof(NetMessage)}, FIELD(NetMessage, status),
    {"CallRecord", sizeof(CallRecord)}, FIELD(CallRecord, turn), FIELD(CallRecord, channel), FIELD(CallRecord, state), FIELD(CallRecord, op),
    {"Frame", sizeof(Frame)}, FIELD(Frame, buffers), FIELD(Frame, content),
};

static PyObject *layout(PyObject *module, PyObject *args) {
    (void)module, (void)args;
    PyObject *found = PyDict_New();
    for (size_t at = 0; found && at < sizeof(LAYOUT) / sizeof(LAYOUT[0]); at++) {
        PyObject *value = PyLong_FromSize_t(LAYOUT[at].value);
        if (value == NULL || PyDict_SetItemString(found, LAYOUT[at].name, value) < 0) Py_CLEAR(found);
        Py_XDECREF(value);
    }
    return found;
}

static PyMethodDef functions[] = {
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, NULL},
    {"copy_object", copy_object, METH_O, NULL},
    {"keep_handle", keep_handle, METH_O, NULL},
    {"layout", layout, METH_NOARGS, NULL},
    {"read_frames", (PyCFunction)(void (*)(void))read_frames, METH_FASTCALL, NULL},
    {"read_plain", read_plain, METH_O, NULL},
    {"reduce", reduce, METH_VARARGS, NULL},
    {"reduction", reduction, METH_VARARGS, NULL},
    {"set_handles", set_handles, METH_VARARGS, NULL},
    {"set_mpi", set_mpi, METH_VARARGS, NULL},
    {"set_pickler", (PyCFunction)(void (*)(void))set_pickler, METH_FASTCALL, NULL},
    {"set_record", set_record, METH_VARARGS, NULL},
    {"set_progress", (PyCFunction)(void (*)(void))set_progress, METH_FASTCALL, NULL},
    {"take_handle", take_handle, METH_O, NULL},
    {"write_all", (PyCFunction)(void (*)(void))write_all, METH_FASTCALL, NULL},
    {"write_object", (PyCFunction)(void (*)(void))write_object, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    if (check_sources("collectives.engine._engine") < 0) return -1;
    find_copies();
    PyObject *program = PyType_FromModuleAndSpec(module, &program_spec, NULL);
    PyObject *table = PyType_FromModuleAndSpec(module, &call_table_spec, NULL);
    if (program == NULL || table == NULL) return -1;
    if (PyModule_AddType(module, (PyTypeObject *)program) < 0 || PyModule_AddType(module, (PyTypeObject *)table) < 0)
        return -1;
    Py_DECREF(program);
    Py_DECREF(table);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_engine", "The compiled engine: runs programs, and finds those of calls.", 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__engine(void) {
    import_array();
    return PyModuleDef_Init(&definition);
}
