/* Buffers of v-forms as users give them: an array with counts, displacements and datatype of its blocks. Whatever is not
 * usual is left to Python, as are errors. */
#include "numpy.h"

#include "check.h"

typedef struct {
    PyObject *array, *counts, *places, *type; /* None if it was not given */
} BufferSpec;

static bool is_list_or_tuple(PyObject *value) { return PyList_CheckExact(value) || PyTuple_CheckExact(value); }

/* Split a buffer argument, like buffers/arguments.py. `type` is the datatype of the call that was added. */
static bool split(PyObject *value, bool is_vector, PyObject *type, BufferSpec *spec) {
    *spec = (BufferSpec){value, Py_None, Py_None, Py_None};
    if (!is_list_or_tuple(value)) return true;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    if (count < 2 || count > 4) return false;
    PyObject **items = PySequence_Fast_ITEMS(value), *second = items[1];
    spec->array = items[0];
    if (count > 2) spec->type = items[count - 1];
    if (count == 4) {
        spec->counts = second, spec->places = items[2];
    } else if (count == 2 && second == type) {
        spec->type = second;
    } else if (PyTuple_CheckExact(second) || (is_vector && PyList_CheckExact(second))) {
        if (PySequence_Fast_GET_SIZE(second) != 2) return false;
        spec->counts = PySequence_Fast_ITEMS(second)[0], spec->places = PySequence_Fast_ITEMS(second)[1];
    } else {
        spec->counts = second;
    }
    return true;
}

static bool read_number(PyObject *value, int64_t *found) {
    if (PyLong_CheckExact(value)) {
        int overflow;
        *found = PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow;
    }
    if (!PyArray_IsScalar(value, Integer)) return false;
    *found = PyNumber_AsSsize_t(value, NULL);
    return true;
}

/* Read numbers from a list, a tuple or an array of integers; false for all else. */
static bool read_numbers(PyObject *value, int64_t *found, Py_ssize_t count) {
    if (is_list_or_tuple(value)) {
        if (PySequence_Fast_GET_SIZE(value) != count) return false;
        for (Py_ssize_t at = 0; at < count; at++)
            if (!read_number(PySequence_Fast_ITEMS(value)[at], found + at)) return false;
        return true;
    }
    Py_buffer view;
    if (!PyObject_CheckBuffer(value) || PyObject_GetBuffer(value, &view, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return false;
    }
    bool fits = view.ndim == 1 && view.shape[0] == count && view.format && strchr("ilq", view.format[0]) &&
                view.format[0] && !view.format[1];
    for (Py_ssize_t at = 0; fits && at < count; at++) {
        const char *item = (const char *)view.buf + at * view.strides[0];
        found[at] = view.itemsize == 4 ? *(const int32_t *)item : *(const int64_t *)item;
    }
    PyBuffer_Release(&view);
    return fits;
}

/* Places and sizes in bytes, from those in elements; false if a block is not within the array. */
static bool in_bytes(int64_t *places, int64_t *sizes, Py_ssize_t count, int64_t itemsize, int64_t nbytes) {
    int64_t elements = nbytes / itemsize;
    for (Py_ssize_t at = 0; at < count; at++) {
        if (sizes[at] < 0 || sizes[at] > elements) return false;
        if (!sizes[at]) places[at] = 0;
        if (places[at] < 0 || places[at] > elements - sizes[at]) return false;
        places[at] *= itemsize, sizes[at] *= itemsize;
    }
    return true;
}

static void add_up(int64_t *places, const int64_t *sizes, Py_ssize_t count) {
    for (int64_t at = 0, place = 0; at < count; place += sizes[at++]) places[at] = place;
}

/* Bytes of the memory of blocks; -1 if it is not like that of the call that was added. */
static int64_t bytes_of(PyObject *object, const Check *check) {
    Py_buffer view;
    if (is_array(check)) {
        PyArrayObject *array = (PyArrayObject *)object;
        bool is_like = PyArray_CheckExact(object) && (int64_t)PyArray_DESCR(array) == check->dtype;
        return is_like ? PyArray_NBYTES(array) : -1;
    }
    if (!open_view(object, check, &view)) return -1;
    PyBuffer_Release(&view);
    return view.len;
}

/* Read the places and sizes of the blocks in a buffer argument into the bounds of a program, and return its array; NULL if
 * it is not like that of the call that was added. The check has the number of blocks, 0 for a single vector. The counts
 * are in another argument if the check has its number as `content`. */
PyObject *read_blocks(Program *program, PyObject *const *arguments, const Check *check) {
    BufferSpec spec;
    Py_ssize_t count = check->length ? check->length : 1;
    int64_t *places = program->bounds + program->scale->starts[check->buffers >> 1];
    int64_t *sizes = places + program->scale->blocks;
    bool is_vector = !check->length || check->content;
    if (!split(arguments[check->argument], is_vector, (PyObject *)check->value, &spec)) return NULL;
    int64_t itemsize = check->nbytes, nbytes = bytes_of(spec.array, check);
    if (nbytes < 0 || (int64_t)spec.type != check->value) return NULL;
    if (is_vector) {
        *places = 0, *sizes = nbytes / itemsize;
        if (spec.counts == Py_None && *sizes * itemsize != nbytes) return NULL;
        if (spec.counts != Py_None && !read_number(spec.counts, sizes)) return NULL;
        if (spec.places != Py_None && !read_number(spec.places, places)) return NULL;
        if (!check->content) return in_bytes(places, sizes, 1, itemsize, nbytes) ? spec.array : NULL;
        int64_t first = *places, total = *sizes;
        if (first < 0 || total < 0 || !read_numbers(arguments[check->content], sizes, count)) return NULL;
        add_up(places, sizes, count);
        for (Py_ssize_t at = 0; at < count; total -= sizes[at++]) places[at] += first;
        return !total && in_bytes(places, sizes, count, itemsize, nbytes) ? spec.array : NULL;
    }
    if (!read_numbers(spec.counts, sizes, count)) return NULL;
    if (spec.places == Py_None)
        add_up(places, sizes, count);
    else if (!read_numbers(spec.places, places, count))
        return NULL;
    return in_bytes(places, sizes, count, itemsize, nbytes) ? spec.array : NULL;
}

static char *end_of(Program *program, int memory, char *data) {
    const Scale *scale = program->scale;
    int64_t end = 0, *places = program->bounds, *sizes = places + scale->blocks;
    for (int64_t block = scale->starts[memory]; block < scale->starts[memory + 1]; block++)
        if (sizes[block] && places[block] + sizes[block] > end) end = places[block] + sizes[block];
    return data + end;
}

/* Set a program to the blocks that were read of two buffers; false if it cannot run on them. */
bool agree_on_blocks(Program *program, const Memory *sendbuf, const Memory *recvbuf) {
    const Scale *scale = program->scale;
    const int64_t *sizes = program->bounds + scale->blocks;
    if (scale->own[0] >= 0 && sizes[scale->own[0]] != sizes[scale->own[1]]) return false;
    bool is_apart = sendbuf->data >= end_of(program, TARGET, recvbuf->data) ||
                    recvbuf->data >= end_of(program, SOURCE, sendbuf->data);
    return is_apart && resize_blocks(program); /* Python reports an overlap as an error */
}
