/* Objects of Python's own types as bytes. */
#ifndef CHORUS_PLAIN_H
#define CHORUS_PLAIN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *plain_bytes(PyObject *value);
PyObject *plain_object(const char *data, Py_ssize_t length);

#endif
