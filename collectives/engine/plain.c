/* Objects of Python's own types as bytes: None, numbers, strings, and lists, tuples and dictionaries of these. That takes a
 * third of the time of `pickle`. Others, as subclasses and integers of more than 64 bits, are left to it.
 *
 * A value is a tag and its data, see `Tag`. What others refer to may appear twice: it is numbered, which a bit of the tag
 * says, and later a number takes its place. So what was one object is one object again. */
#include "plain.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
    IS_NUMBERED = 0x80,   /* bit of a tag */
    MOST_LEVELS = 100,    /* of containers in each other */
    LONGEST = 1 << 20,    /* characters of a string */
    MOST_BYTES = 1 << 30, /* of an object */
};

typedef enum {
    NONE = 'N',
    TRUE_ = 'T',
    FALSE_ = 'F',
    INTEGER = 'i', /* int64_t */
    REAL = 'd',    /* double */
    ASCII = 'a',   /* uint32_t length, characters */
    LATIN = '1',   /* the same, characters of 1, 2 and 4 bytes */
    UCS2 = '2',
    UCS4 = '4',
    BYTES = 'b',
    TUPLE = 't', /* uint32_t length, items */
    LIST = 'l',
    DICT = 'm', /* uint32_t length, keys and values in turn */
    SAME = 'r', /* uint32_t number of the object */
} Tag;

typedef struct {
    PyObject *object; /* NULL: free */
    uint32_t number;
    bool is_open; /* its items are being written */
} Known;

typedef struct {
    PyObject *bytes;
    char *at, *end;
    Known *known; /* hash table of numbered objects */
    uint32_t count, slots;
} Writer;

static Known *slot_of(Known *known, uint32_t slots, PyObject *object) {
    uint32_t at = (uint32_t)(((uintptr_t)object >> 4) * 2654435761u) & (slots - 1);
    while (known[at].object && known[at].object != object) at = (at + 1) & (slots - 1);
    return known + at;
}

static bool enlarge(Writer *writer) {
    uint32_t slots = writer->slots ? 2 * writer->slots : 64;
    Known *known = PyMem_Calloc(slots, sizeof(Known));
    if (!known) return false;
    for (uint32_t at = 0; at < writer->slots; at++)
        if (writer->known[at].object) *slot_of(known, slots, writer->known[at].object) = writer->known[at];
    PyMem_Free(writer->known);
    writer->known = known, writer->slots = slots;
    return true;
}

/* Make room for so many bytes. */
static bool reserve(Writer *writer, Py_ssize_t nbytes) {
    if (writer->end - writer->at >= nbytes) return true;
    Py_ssize_t used = writer->at - PyBytes_AS_STRING(writer->bytes), size = 2 * (used + nbytes);
    if (size > MOST_BYTES || _PyBytes_Resize(&writer->bytes, size) < 0) return false;
    writer->at = PyBytes_AS_STRING(writer->bytes) + used;
    writer->end = PyBytes_AS_STRING(writer->bytes) + size;
    return true;
}

static void put_length(Writer *writer, int tag, Py_ssize_t length) {
    uint32_t value = (uint32_t)length;
    *writer->at = (char)tag;
    memcpy(writer->at + 1, &value, 4);
    writer->at += 5;
}

static bool put_data(Writer *writer, int tag, const void *data, Py_ssize_t length, int width) {
    if (length > LONGEST || !reserve(writer, 5 + length * width)) return false;
    put_length(writer, tag, length);
    memcpy(writer->at, data, length * width);
    writer->at += length * width;
    return true;
}

static bool put_number(Writer *writer, int tag, const void *value) {
    if (!reserve(writer, 9)) return false;
    *writer->at = (char)tag;
    memcpy(writer->at + 1, value, 8);
    writer->at += 9;
    return true;
}

static bool put_constant(Writer *writer, int tag) {
    if (!reserve(writer, 1)) return false;
    *writer->at++ = (char)tag;
    return true;
}

static bool put(Writer *writer, PyObject *value, int levels);

static bool put_items(Writer *writer, int tag, PyObject *value, int levels) {
    Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    if (count > UINT32_MAX || !reserve(writer, 5)) return false;
    put_length(writer, tag, count);
    for (Py_ssize_t at = 0; at < count; at++)
        if (!put(writer, PySequence_Fast_ITEMS(value)[at], levels - 1)) return false;
    return true;
}

static bool put_dict(Writer *writer, int tag, PyObject *value, int levels) {
    PyObject *key, *item;
    if (PyDict_GET_SIZE(value) > UINT32_MAX || !reserve(writer, 5)) return false;
    put_length(writer, tag, PyDict_GET_SIZE(value));
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item);)
        if (!put(writer, key, levels - 1) || !put(writer, item, levels - 1)) return false;
    return true;
}

static bool put_text(Writer *writer, int bit, PyObject *value) {
    int kind = (int)PyUnicode_KIND(value);
    int tag = PyUnicode_IS_ASCII(value) ? ASCII : kind == 1 ? LATIN : kind == 2 ? UCS2 : UCS4;
    return put_data(writer, tag | bit, PyUnicode_DATA(value), PyUnicode_GET_LENGTH(value), kind);
}

/* Write a value; false, without an error, if it is left to pickle. */
static bool put(Writer *writer, PyObject *value, int levels) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyLong_Type) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow && put_number(writer, INTEGER, &number);
    }
    if (type == &PyFloat_Type) {
        double number = PyFloat_AS_DOUBLE(value);
        return put_number(writer, REAL, &number);
    }
    if (value == Py_None) return put_constant(writer, NONE);
    if (value == Py_True) return put_constant(writer, TRUE_);
    if (value == Py_False) return put_constant(writer, FALSE_);
    if (type != &PyUnicode_Type && type != &PyBytes_Type && type != &PyTuple_Type && type != &PyList_Type &&
        type != &PyDict_Type)
        return false;
    if (!levels) return false;
    int bit = 0;
    if (Py_REFCNT(value) > 1) {
        if (2 * writer->count >= writer->slots && !enlarge(writer)) return false;
        Known *known = slot_of(writer->known, writer->slots, value);
        if (known->object) { /* a tuple that contains itself cannot be made before its items are */
            if (known->is_open || !reserve(writer, 5)) return false;
            put_length(writer, SAME, known->number);
            return true;
        }
        bit = IS_NUMBERED;
        *known = (Known){value, writer->count++, type == &PyTuple_Type};
    }
    if (type == &PyUnicode_Type) return put_text(writer, bit, value);
    if (type == &PyBytes_Type)
        return put_data(writer, BYTES | bit, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), 1);
    if (type == &PyDict_Type) return put_dict(writer, DICT | bit, value, levels);
    if (type == &PyList_Type) return put_items(writer, LIST | bit, value, levels);
    if (!put_items(writer, TUPLE | bit, value, levels)) return false;
    if (bit) slot_of(writer->known, writer->slots, value)->is_open = false;
    return true;
}

/* Bytes of an object; NULL, without an error, if it is left to pickle. */
PyObject *plain_bytes(PyObject *value) {
    Writer writer = {.bytes = PyBytes_FromStringAndSize(NULL, 512)};
    bool is_plain = false;
    if (writer.bytes) {
        writer.at = PyBytes_AS_STRING(writer.bytes);
        writer.end = writer.at + PyBytes_GET_SIZE(writer.bytes);
        is_plain = put(&writer, value, MOST_LEVELS);
    }
    PyMem_Free(writer.known);
    if (is_plain) _PyBytes_Resize(&writer.bytes, writer.at - PyBytes_AS_STRING(writer.bytes));
    else Py_CLEAR(writer.bytes);
    if (PyErr_Occurred()) PyErr_Clear(); /* of memory: pickle reports it */
    return writer.bytes;
}

/* ------------------------------------------------------------------------------------------ reading */

typedef struct {
    const char *at, *end;
    PyObject **known; /* numbered objects, of which the values under construction have references */
    uint32_t count, room;
} Reader;

static void *wrong(void) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "expected an object of Python's own types");
    return NULL;
}

static bool take(Reader *reader, void *into, Py_ssize_t nbytes) {
    if (reader->end - reader->at < nbytes) return wrong() != NULL;
    memcpy(into, reader->at, nbytes);
    reader->at += nbytes;
    return true;
}

/* Number an object that was begun. */
static bool note(Reader *reader, PyObject *object) {
    if (reader->count == reader->room) {
        uint32_t room = reader->room ? 2 * reader->room : 64;
        PyObject **known = PyMem_Realloc(reader->known, room * sizeof(PyObject *));
        if (!known) return PyErr_NoMemory() != NULL;
        reader->known = known, reader->room = room;
    }
    reader->known[reader->count++] = object;
    return true;
}

static PyObject *get(Reader *reader);

static PyObject *text_of(int tag, const char *data, uint32_t length) {
    if (tag == BYTES) return PyBytes_FromStringAndSize(data, length);
    if (tag != ASCII || length < 2) {
        int kind = tag == UCS2 ? PyUnicode_2BYTE_KIND : tag == UCS4 ? PyUnicode_4BYTE_KIND : PyUnicode_1BYTE_KIND;
        return PyUnicode_FromKindAndData(kind, data, length);
    }
    PyObject *text = PyUnicode_New(length, 127);
    if (text) memcpy(PyUnicode_DATA(text), data, length);
    return text;
}

static PyObject *get_text(Reader *reader, int tag, uint32_t length) {
    int64_t nbytes = (int64_t)length * (tag == UCS2 ? 2 : tag == UCS4 ? 4 : 1);
    if (reader->end - reader->at < nbytes) return wrong();
    PyObject *text = text_of(tag, reader->at, length);
    reader->at += nbytes;
    return text;
}

static PyObject *get_dict(Reader *reader, PyObject *dict, uint32_t length) {
    for (; dict && length; length--) {
        PyObject *key = get(reader), *value = key ? get(reader) : NULL;
        if (!value || PyDict_SetItem(dict, key, value) < 0) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

/* Read a value; NULL for an error. */
static PyObject *get(Reader *reader) {
    if (reader->at == reader->end) return wrong();
    int tag = (unsigned char)*reader->at++;
    bool is_numbered = tag & IS_NUMBERED;
    uint32_t length, number = reader->count;
    int64_t integer;
    double real;
    tag &= ~IS_NUMBERED;
    if (tag == INTEGER) return take(reader, &integer, 8) ? PyLong_FromLongLong(integer) : NULL;
    if (tag == REAL) return take(reader, &real, 8) ? PyFloat_FromDouble(real) : NULL;
    if (tag == NONE) return Py_NewRef(Py_None);
    if (tag == TRUE_) return Py_NewRef(Py_True);
    if (tag == FALSE_) return Py_NewRef(Py_False);
    if (!take(reader, &length, 4)) return NULL;
    if (tag == SAME) return length < reader->count && reader->known[length] ? Py_NewRef(reader->known[length]) : wrong();
    bool is_text = tag != TUPLE && tag != LIST && tag != DICT;
    if (!is_text && length > reader->end - reader->at) return wrong();
    PyObject *found = is_text       ? get_text(reader, tag, length)
                      : tag == DICT ? PyDict_New()
                      : tag == LIST ? PyList_New(length)
                                    : PyTuple_New(length);
    if (found && is_numbered && !note(reader, tag == TUPLE ? NULL : found)) Py_CLEAR(found);
    if (is_text || !found) return found;
    if (tag == DICT) return get_dict(reader, found, length);
    for (uint32_t at = 0; found && at < length; at++) {
        PyObject *one = get(reader);
        if (!one) Py_CLEAR(found);
        else if (tag == LIST) PyList_SET_ITEM(found, at, one);
        else PyTuple_SET_ITEM(found, at, one);
    }
    if (found && is_numbered && tag == TUPLE) reader->known[number] = found;
    return found;
}

/* The object of `plain_bytes`; NULL for an error. */
PyObject *plain_object(const char *data, Py_ssize_t length) {
    Reader reader = {.at = data, .end = data + length};
    PyObject *found = get(&reader);
    PyMem_Free(reader.known);
    return found;
}
