/* A Python extension module of kernels, made from a table with one row for each.
 *
 * A kernel is a C function of `Argument`s. Its signature has one letter for each argument:
 *
 *     b h w l   array of integers of 1, 2, 4, 8 bytes (also bool, float16 and bfloat16, by their size)
 *     f d       array of float32, float64
 *     x         array of float32 or float64, of one type in a call, which selects `run` or `run_double`
 *     i r       Python int, Python float
 *
 * An upper-case letter is an array that the kernel writes. `?` after a letter allows None (data is NULL then, size 0).
 * `~` after a letter is a matrix that may have gaps between its rows, at any address.
 * Other arrays are C-contiguous and aligned NumPy arrays. Any other argument raises `quant.kernels.dispatch.Unsuited`, before
 * anything is computed. Kernels do not check sizes: the Python functions around them do. */
#ifndef CHORUS_KERNEL_MODULE_H
#define CHORUS_KERNEL_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include "kernel.h"
#include "sources.h"

typedef double (*Run)(const Argument *arguments); /* the result is a Python float */

typedef struct {
    const char *name;
    const char *signature;
    Run run;        /* without arrays of letter x, or for float32 */
    Run run_double; /* for float64; NULL without arrays of letter x */
} Kernel;

enum { MOST_ARGUMENTS = 24, LONG_ARRAY = 2048 /* elements; from here on other threads of Python may run */ };

static PyObject *unsuited; /* exception class */

static bool read_array(const Kernel *kernel, char letter, bool has_gaps, PyObject *object, Argument *argument, int *real) {
    bool is_written = letter >= 'A' && letter <= 'Z';
    if (!PyArray_CheckExact(object)) {
        PyErr_Format(unsuited, "%s: expected a NumPy array, found %s", kernel->name, Py_TYPE(object)->tp_name);
        return false;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    int type = PyArray_TYPE(array);
    npy_intp itemsize = PyArray_ITEMSIZE(array);
    bool fits = false;
    switch (is_written ? letter - 'A' + 'a' : letter) {
    case 'b': fits = itemsize == 1; break;
    case 'h': fits = itemsize == 2; break;
    case 'w': fits = itemsize == 4 && type != NPY_FLOAT32; break;
    case 'l': fits = itemsize == 8 && type != NPY_FLOAT64; break;
    case 'f': fits = type == NPY_FLOAT32; break;
    case 'd': fits = type == NPY_FLOAT64; break;
    case 'x':
        fits = (type == NPY_FLOAT32 || type == NPY_FLOAT64) && (*real < 0 || *real == type);
        *real = type;
        break;
    }
    int needed = is_written ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO, axes = PyArray_NDIM(array);
    if (has_gaps) {
        needed = is_written ? NPY_ARRAY_WRITEABLE : 0;
        fits = fits && axes == 2 && (PyArray_STRIDE(array, 1) == itemsize || PyArray_DIM(array, 1) < 2);
        argument->stride = axes == 2 ? PyArray_STRIDE(array, 0) : 0;
    }
    if (!fits || !PyArray_CHKFLAGS(array, needed) || PyArray_ISBYTESWAPPED(array)) {
        const char *order = PyArray_IS_C_CONTIGUOUS(array) ? "a C-contiguous" : "another";
        PyErr_Format(unsuited, "%s: expected a C-contiguous array of kind '%c', found %s array of %R", kernel->name, letter,
                     order, PyArray_DESCR(array));
        return false;
    }
    argument->data = PyArray_DATA(array);
    argument->size = PyArray_SIZE(array);
    argument->columns = axes ? PyArray_DIM(array, axes - 1) : 1;
    return true;
}

static bool read_argument(const Kernel *kernel, char letter, char mark, PyObject *object, Argument *argument, int *real) {
    *argument = (Argument){0};
    if (mark == '?' && object == Py_None)
        return true;
    if (letter == 'i') {
        argument->integer = PyLong_AsLongLong(object);
        return argument->integer != -1 || !PyErr_Occurred();
    }
    if (letter == 'r') {
        argument->number = PyFloat_AsDouble(object);
        return argument->number != -1.0 || !PyErr_Occurred();
    }
    return read_array(kernel, letter, mark == '~', object, argument, real);
}

static PyObject *call_kernel(PyObject *self, PyObject *const *objects, Py_ssize_t count) {
    const Kernel *kernel = PyCapsule_GetPointer(self, NULL);
    Argument arguments[MOST_ARGUMENTS];
    int64_t longest = 0;
    int real = -1;
    Py_ssize_t at = 0;
    for (const char *letter = kernel->signature; *letter; letter++, at++) {
        if (at == count || at == MOST_ARGUMENTS)
            break;
        char mark = letter[1] == '?' || letter[1] == '~' ? letter[1] : 0;
        if (!read_argument(kernel, *letter, mark, objects[at], &arguments[at], &real))
            return NULL;
        if (arguments[at].size > longest)
            longest = arguments[at].size;
        letter += mark != 0;
        if (!letter[1] && at + 1 == count) {
            Run run = real == NPY_FLOAT64 ? kernel->run_double : kernel->run;
            double result;
            if (longest < LONG_ARRAY) {
                result = run(arguments);
            } else {
                Py_BEGIN_ALLOW_THREADS
                result = run(arguments);
                Py_END_ALLOW_THREADS
            }
            return PyFloat_FromDouble(result);
        }
    }
    return PyErr_Format(PyExc_TypeError, "%s: expected arguments '%s', found %zd", kernel->name, kernel->signature, count);
}

static PyMethodDef kernel_method = {"kernel", (PyCFunction)(void (*)(void))call_kernel, METH_FASTCALL, NULL};

/* Add each kernel of a table, which ends with a row without a name, to a new module. */
static PyObject *kernel_module(PyModuleDef *definition, const Kernel *kernels) {
    import_array();
    if (check_sources(definition->m_name) < 0) return NULL;
    PyObject *module = PyModule_Create(definition), *dispatch = PyImport_ImportModule("quant.kernels.dispatch");
    if (!module || !dispatch || !(unsuited = PyObject_GetAttrString(dispatch, "Unsuited")))
        goto failed;
    for (const Kernel *kernel = kernels; kernel->name; kernel++) {
        PyObject *self = PyCapsule_New((void *)kernel, NULL, NULL);
        PyObject *function = self ? PyCFunction_New(&kernel_method, self) : NULL;
        Py_XDECREF(self);
        if (!function || PyModule_AddObject(module, kernel->name, function) < 0) {
            Py_XDECREF(function);
            goto failed;
        }
    }
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    Py_DECREF(dispatch);
    return module;
failed:
    Py_XDECREF(dispatch);
    Py_XDECREF(module);
    return NULL;
}

/* Define the module NAME of the kernels of a TABLE, a macro that calls another with the name and signature of each. */
#define KERNEL_ROW(NAME, SIGNATURE) {#NAME, SIGNATURE, run_##NAME, NULL},
#define KERNEL_MODULE(NAME, TABLE)                                                                          \
    static const Kernel kernels[] = {TABLE(KERNEL_ROW) {NULL, NULL, NULL, NULL}};                           \
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, #NAME, NULL, -1, NULL, NULL, NULL, NULL, NULL}; \
    PyMODINIT_FUNC PyInit_##NAME(void) { return kernel_module(&definition, kernels); }

#endif
