/* Frames: the first messages of Python objects, written and read for collectives of objects. */
#include "numpy.h"

#include <stdbool.h>
#include <string.h>

#include "layout.h"
#include "plain.h"

enum {
    ROOM = FRAME - sizeof(Frame),
    MOST_LEVELS = 50,     /* of containers in each other in an object that is copied */
    MOST_ITEMS = 1 << 20, /* of such an object */
};

static PyObject *pickler, *default_dumps; /* mpi4py's MPI.pickle, and its function unless the program replaces it */

/* set_pickler(pickler, dumps) */
PyObject *set_pickler(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "set_pickler: expected a pickler and its function");
        return NULL;
    }
    pickler = Py_NewRef(args[0]), default_dumps = Py_NewRef(args[1]); /* kept for the life of the process */
    Py_RETURN_NONE;
}

static int is_searched(PyObject *found, void *searched) { return found == searched; }

/* True unless the program has replaced the functions of the pickler, which then see all objects but numbers. */
static bool has_default_pickler(void) {
    traverseproc traverse = pickler ? Py_TYPE(pickler)->tp_traverse : NULL;
    return traverse && traverse(pickler, is_searched, default_dumps);
}

static bool is_number(PyObject *value) {
    return value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value);
}

static bool has_only_numbers(PyObject *value) {
    if (!PyTuple_CheckExact(value)) return is_number(value);
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(value); at++)
        if (!is_number(PyTuple_GET_ITEM(value, at))) return false;
    return PyTuple_GET_SIZE(value) < ROOM;
}

/* True for a number or a string. `items` are those that an object may still have. */
static bool is_leaf(PyObject *value, int64_t *items) {
    return --*items >= 0 && (is_number(value) || PyUnicode_CheckExact(value) || PyBytes_CheckExact(value));
}

/* Copy of a plain object with the same numbers and strings; NULL, without an error, if it is not plain or may contain a
 * list or dictionary twice: one has more than `references`. */
static PyObject *copy_plain(PyObject *value, int levels, int64_t *items, Py_ssize_t references) {
    if (is_leaf(value, items)) return Py_NewRef(value);
    if (!levels) return NULL;
    if (PyTuple_CheckExact(value)) {
        Py_ssize_t count = PyTuple_GET_SIZE(value);
        PyObject *copy = PyTuple_New(count);
        bool is_same = true;
        for (Py_ssize_t at = 0; copy && at < count; at++) {
            PyObject *one = copy_plain(PyTuple_GET_ITEM(value, at), levels - 1, items, 1);
            is_same &= one == PyTuple_GET_ITEM(value, at);
            if (one == NULL) Py_CLEAR(copy);
            else PyTuple_SET_ITEM(copy, at, one);
        }
        if (copy && (is_same || Py_REFCNT(value) > references)) {
            Py_DECREF(copy);
            return is_same ? Py_NewRef(value) : NULL;
        }
        return copy;
    }
    if (Py_REFCNT(value) > references) return NULL;
    if (PyList_CheckExact(value)) {
        PyObject *copy = PyList_GetSlice(value, 0, PY_SSIZE_T_MAX);
        for (Py_ssize_t at = 0; copy && at < PyList_GET_SIZE(copy); at++) {
            PyObject *one = copy_plain(PyList_GET_ITEM(copy, at), levels - 1, items, 2);
            if (one == NULL) Py_CLEAR(copy);
            else PyList_SetItem(copy, at, one);
        }
        return copy;
    }
    if (!PyDict_CheckExact(value)) return NULL;
    PyObject *copy = PyDict_Copy(value), *key, *item;
    for (Py_ssize_t at = 0; copy && PyDict_Next(copy, &at, &key, &item);) {
        PyObject *same = copy_plain(key, levels - 1, items, PY_SSIZE_T_MAX); /* of immutable objects itself */
        Py_XDECREF(same);
        PyObject *one = same ? copy_plain(item, levels - 1, items, 2) : NULL;
        if (one == NULL || (one != item && PyDict_SetItem(copy, key, one) < 0)) Py_CLEAR(copy);
        Py_XDECREF(one);
    }
    return copy;
}

/* copy_object(value): a copy of a plain object, as pickle would make one; NotImplemented for others. */
PyObject *copy_object(PyObject *module, PyObject *value) {
    (void)module;
    int64_t items = MOST_ITEMS;
    if (has_only_numbers(value)) return Py_NewRef(value);
    PyObject *copy = has_default_pickler() ? copy_plain(value, MOST_LEVELS, &items, PY_SSIZE_T_MAX) : NULL;
    if (copy || PyErr_Occurred()) return copy;
    Py_RETURN_NOTIMPLEMENTED;
}

static bool are_frames(PyObject *array) {
    return PyArray_CheckExact(array) && PyArray_IS_C_CONTIGUOUS((PyArrayObject *)array) &&
           PyArray_NBYTES((PyArrayObject *)array) % FRAME == 0;
}

/* Write a plain object into a frame, and return its bytes, which follow the frame if they are too long for it. NULL,
 * without an error, for other objects. */
static PyObject *write_value(Frame *frame, PyObject *value) {
    PyObject *data = has_only_numbers(value) || has_default_pickler() ? plain_bytes(value) : NULL;
    if (data == NULL) return NULL;
    Py_ssize_t length = PyBytes_GET_SIZE(data);
    *frame = (Frame){.length = length, .buffers = 0, .content = PLAIN};
    if (length <= ROOM) memcpy(frame->data, PyBytes_AS_STRING(data), length);
    return data;
}

/* write_object(frame, value): write a plain object into a frame. Returns its bytes, of which none are there if they are
 * too long; None for other objects. */
PyObject *write_object(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !are_frames(args[0])) {
        PyErr_SetString(PyExc_TypeError, "write_object: expected a frame and a value");
        return NULL;
    }
    PyObject *data = write_value(PyArray_DATA((PyArrayObject *)args[0]), args[1]);
    return data ? data : Py_NewRef(Py_None);
}

/* write_all(frames, values): write a list with a plain object for each frame; False for all else, and longer ones. */
PyObject *write_all(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !are_frames(args[0])) {
        PyErr_SetString(PyExc_TypeError, "write_all: expected frames and values");
        return NULL;
    }
    Py_ssize_t frames = PyArray_NBYTES((PyArrayObject *)args[0]) / FRAME;
    char *start = PyArray_DATA((PyArrayObject *)args[0]);
    bool fits = PyList_CheckExact(args[1]) && PyList_GET_SIZE(args[1]) == frames;
    for (Py_ssize_t at = 0; fits && at < frames; at++) {
        PyObject *data = write_value((Frame *)(start + at * FRAME), PyList_GET_ITEM(args[1], at));
        fits = data && PyBytes_GET_SIZE(data) <= ROOM;
        Py_XDECREF(data);
    }
    return PyBool_FromLong(fits);
}

/* read_frames(frames, loads): the objects of all frames, unpickled by `loads`; None if a frame does not hold all of
 * its object, or an error. */
PyObject *read_frames(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !are_frames(args[0])) {
        PyErr_SetString(PyExc_TypeError, "read_frames: expected frames and a function");
        return NULL;
    }
    Py_ssize_t frames = PyArray_NBYTES((PyArrayObject *)args[0]) / FRAME;
    const char *start = PyArray_DATA((PyArrayObject *)args[0]);
    for (Py_ssize_t at = 0; at < frames; at++) {
        const Frame *frame = (const Frame *)(start + at * FRAME);
        if (frame->content == FAILED || frame->length > ROOM || frame->buffers) Py_RETURN_NONE;
    }
    PyObject *found = PyList_New(frames);
    for (Py_ssize_t at = 0; found && at < frames; at++) { /* first: what follows may call, and so overwrite the frames */
        const Frame *frame = (const Frame *)(start + at * FRAME);
        PyObject *data = PyBytes_FromStringAndSize((const char *)frame, sizeof(Frame) + frame->length);
        if (data == NULL) Py_CLEAR(found);
        else PyList_SET_ITEM(found, at, data);
    }
    for (Py_ssize_t at = 0; found && at < frames; at++) {
        const Frame *frame = (const Frame *)PyBytes_AS_STRING(PyList_GET_ITEM(found, at));
        PyObject *data = NULL, *one = NULL;
        if (frame->content == PLAIN) one = plain_object(frame->data, frame->length);
        else if ((data = PyBytes_FromStringAndSize(frame->data, frame->length))) one = PyObject_CallOneArg(args[1], data);
        Py_XDECREF(data);
        if (one == NULL) Py_CLEAR(found);
        else PyList_SetItem(found, at, one);
    }
    return found;
}

/* read_plain(data): the object whose bytes `write_object` has returned. */
PyObject *read_plain(PyObject *module, PyObject *data) {
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *found = plain_object(view.buf, view.len);
    PyBuffer_Release(&view);
    return found;
}
