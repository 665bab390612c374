/* Complete handles of the MPI, kept for later requests: making and freeing one takes longer than a short collective. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <string.h>

enum { MOST_HANDLES = 64, HANDLE_BYTES = 8 };

static Py_ssize_t handle_offset; /* of the handle in a request object */
static size_t handle_bytes;
static char null_handle[HANDLE_BYTES];
static char kept[MOST_HANDLES][HANDLE_BYTES];
static int kept_count;

/* set_handles(offset, null): offset of the handle in request objects, and the bytes of a null handle. */
PyObject *set_handles(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer null;
    if (!PyArg_ParseTuple(args, "ny*", &handle_offset, &null)) return NULL;
    bool fits = null.len <= HANDLE_BYTES;
    if (fits) memcpy(null_handle, null.buf, handle_bytes = null.len);
    PyBuffer_Release(&null);
    if (fits) Py_RETURN_NONE;
    PyErr_Format(PyExc_ValueError, "null: expected at most %d bytes", HANDLE_BYTES);
    return NULL;
}

/* take_handle(request): give a request a kept handle; False if there is none. */
PyObject *take_handle(PyObject *module, PyObject *request) {
    (void)module;
    if (!kept_count) Py_RETURN_FALSE;
    memcpy((char *)request + handle_offset, kept[--kept_count], handle_bytes);
    Py_RETURN_TRUE;
}

/* keep_handle(request): keep the complete handle of a request, which becomes null; False if that is null already, or
 * too many are kept. */
PyObject *keep_handle(PyObject *module, PyObject *request) {
    (void)module;
    char *handle = (char *)request + handle_offset;
    if (!handle_bytes || kept_count == MOST_HANDLES || !memcmp(handle, null_handle, handle_bytes)) Py_RETURN_FALSE;
    memcpy(kept[kept_count++], handle, handle_bytes);
    memcpy(handle, null_handle, handle_bytes);
    Py_RETURN_TRUE;
}
