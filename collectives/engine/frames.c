/* Frames: the first messages of Python objects, written and read for collectives of objects. */
#include "numpy.h"

#include <marshal.h>
#include <stdbool.h>
#include <string.h>

#include "layout.h"

enum { ROOM = FRAME - sizeof(Frame), MARSHAL_VERSION = 2 };

static bool is_number(PyObject *value) {
    return value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value);
}

static bool has_only_numbers(PyObject *value) {
    if (!PyTuple_CheckExact(value)) return is_number(value);
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(value); at++)
        if (!is_number(PyTuple_GET_ITEM(value, at))) return false;
    return PyTuple_GET_SIZE(value) < ROOM;
}

static bool are_frames(PyObject *array) {
    return PyArray_CheckExact(array) && PyArray_IS_C_CONTIGUOUS((PyArrayObject *)array) &&
           PyArray_NBYTES((PyArrayObject *)array) % FRAME == 0;
}

/* Write a value into a frame: 1 if done, 0 if it is not only numbers or too long, -1 for an error. */
static int write_value(Frame *frame, PyObject *value) {
    if (!has_only_numbers(value)) return 0;
    PyObject *data = PyMarshal_WriteObjectToString(value, MARSHAL_VERSION);
    if (data == NULL) return -1;
    Py_ssize_t length = PyBytes_GET_SIZE(data);
    if (length <= ROOM) {
        *frame = (Frame){.length = length, .buffers = 0, .content = NUMBERS};
        memcpy(frame->data, PyBytes_AS_STRING(data), length);
    }
    Py_DECREF(data);
    return length <= ROOM;
}

static PyObject *bool_or_error(int found) { return found < 0 ? NULL : PyBool_FromLong(found); }

/* write_numbers(frame, value): write None, a number or a tuple of these; False for other values and longer ones. */
PyObject *write_numbers(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !are_frames(args[0])) {
        PyErr_SetString(PyExc_TypeError, "write_numbers: expected a frame and a value");
        return NULL;
    }
    return bool_or_error(write_value(PyArray_DATA((PyArrayObject *)args[0]), args[1]));
}

/* write_all(frames, values): `write_numbers` of a list with a value for each frame; False for all else. */
PyObject *write_all(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !are_frames(args[0])) {
        PyErr_SetString(PyExc_TypeError, "write_all: expected frames and values");
        return NULL;
    }
    Py_ssize_t frames = PyArray_NBYTES((PyArrayObject *)args[0]) / FRAME;
    char *start = PyArray_DATA((PyArrayObject *)args[0]);
    int found = PyList_CheckExact(args[1]) && PyList_GET_SIZE(args[1]) == frames;
    for (Py_ssize_t at = 0; found > 0 && at < frames; at++)
        found = write_value((Frame *)(start + at * FRAME), PyList_GET_ITEM(args[1], at));
    return bool_or_error(found);
}

/* The numbers in a frame, or the bytes of a pickled object. */
static PyObject *content_of(const Frame *frame) {
    if (frame->content == NUMBERS) return PyMarshal_ReadObjectFromString(frame->data, frame->length);
    return PyBytes_FromStringAndSize(frame->data, frame->length);
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
    for (Py_ssize_t at = 0; found && at < frames; at++) {
        PyObject *one = content_of((const Frame *)(start + at * FRAME));
        if (one == NULL) Py_CLEAR(found);
        else PyList_SET_ITEM(found, at, one);
    }
    for (Py_ssize_t at = 0; found && at < frames; at++) { /* last: `loads` may call, and so overwrite the frames */
        if (!PyBytes_CheckExact(PyList_GET_ITEM(found, at))) continue; /* numbers */
        PyObject *one = PyObject_CallOneArg(args[1], PyList_GET_ITEM(found, at));
        if (one == NULL) Py_CLEAR(found);
        else PyList_SetItem(found, at, one);
    }
    return found;
}
