/* Checks of the arguments of a call. */
#ifndef CHORUS_CHECK_H
#define CHORUS_CHECK_H

#include "program.h"

enum { MAX_DEPTH = 3 };

typedef enum { IS_OBJECT, IS_SEQUENCE, IS_ARRAY, IS_BUFFER, IS_HANDLE, IS_COUNTS, IS_BLOCKS } CheckKind;

/* Check of an argument, or of an item in its lists and tuples; a row of the dtype CHECK of instructions.py. */
typedef struct {
    int64_t kind;       /* a CheckKind */
    int64_t value;      /* address of the object, or of the type, that is expected */
    int64_t length;     /* of a list or tuple */
    int64_t buffers;    /* an array is the send buffer (bit 0), the receive buffer (bit 1) */
    int64_t dtype;      /* address of the dtype object of an array, or of the format of another buffer */
    int64_t dimensions; /* number of them; 0 for an array of NumPy of IS_BLOCKS */
    int64_t nbytes;     /* of the array; -1: any; of an element of IS_BLOCKS */
    int64_t content;    /* address of the bytes that an array of counts must hold */
    int64_t argument;   /* number of the argument */
    int64_t depth;      /* levels of lists and tuples above the item */
    struct {
        int64_t index;
        int64_t is_list;
    } path[MAX_DEPTH];
} Check;

/* match.c */
bool open_view(PyObject *object, const Check *check, Py_buffer *view);

/* counts.c */
PyObject *read_blocks(Program *program, PyObject *const *arguments, const Check *check);

/* True for the memory of an array of NumPy, false for one by the buffer protocol. */
static inline bool is_array(const Check *check) {
    return check->kind == IS_ARRAY || (check->kind == IS_BLOCKS && !check->dimensions);
}

static inline bool has_blocks(const Program *program) { return program->scale && program->scale->blocks; }

#endif
