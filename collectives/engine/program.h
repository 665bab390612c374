/* A program: rows bound to memory, links and messages, and the position of its run. */
#ifndef CHORUS_PROGRAM_H
#define CHORUS_PROGRAM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "layout.h"

enum {
    NAP_US = 20,       /* microseconds of a sleep of the progress thread */
    BLOCK_SPACING = 2, /* distance of blocks in the operands of a program for any counts, so that none are joined */
    NO_MESSAGE = -1,   /* label of a row that does nothing in this call */
};

enum { SOURCE, TARGET, SCRATCH, LANDING, SEND_BUFFER, RECEIVE_BUFFER, ABSOLUTE, IGNORED, MEMORIES };

typedef enum {
    DONE,           /* the program has ended, or the row is done */
    WAITING,        /* it waits for a peer */
    REFUSED,        /* nothing was done: the arguments are not those expected, or Python manages the request */
    MISMATCH,       /* a message of another call or length has arrived */
    UNREADABLE,     /* the memory of a peer cannot be accessed */
    FAILED_IN_MPI,  /* a function of the MPI has failed */
    RAISED,         /* a Python function has raised an error */
    QUEUED,         /* nothing was done yet: the call waits for its channel */
} Result;

typedef struct {
    bool written;     /* the program writes it */
    int memory;       /* number of the memory that begins in it */
    int64_t offset;   /* of the memory in the array */
    int64_t nbytes;   /* that may not overlap those of the other array */
    int64_t per_element; /* bytes of the array for each element of a program for any length; 0: the length is fixed */
} CallArray;

/* Memory of an argument of a call. */
typedef struct {
    char *data;
    int64_t nbytes;
    bool is_dense, is_writable;
} Memory;

typedef struct {
    PyObject_HEAD
    PyObject *arrays;      /* tuple of the arrays below, which it keeps */
    Row *rows;
    Operand *operands;
    Stream *streams;
    int64_t *rounds;       /* first stream of each round, and the end */
    Link **links;
    NetMessage *messages;
    int64_t row_count;
    Scale *scale;          /* of a program for any length, else NULL */
    PyObject *scale_arrays; /* tuple of the arrays of the scale, which the program keeps */
    const Operand *units;  /* operands in chunks */
    const int64_t *order;  /* chunks in the order of each memory */
    int64_t *bounds;       /* ends of the chunks in each memory, in elements */
    const uint8_t *may_choose; /* of each row: a message long enough may go by its address */
    char **bases;          /* addresses of the memories; offsets in ABSOLUTE are addresses */
    PyObject *calls;       /* tuple of functions */
    CallArray call[2];     /* arrays of a call: send buffer, receive buffer */
    char *spare;           /* memory into which a peer's memory is read before it is reduced */
    int64_t spare_bytes;
    int64_t round_count, round;
    int64_t failed;        /* index of the row that failed */
    int64_t moves;         /* passes over the streams with progress so far */
    long polls;            /* without progress after which a wait returns */
    long call_polls;       /* the same of a call */
    char shares_cores;     /* the core is yielded between polls */
    char is_deferred;      /* a start only stores addresses */
    char uses_mpi;         /* some rows are messages of the MPI */
    char is_busy;          /* a thread advances it, or a frame that this one has interrupted */
    PyThreadState *thread; /* that advances it without the GIL, else NULL */
    char is_running;       /* from a start to the end */
    char is_startable;     /* the engine may start it for its persistent request */
    PyObject *request;     /* active request that the engine advances and ends, else NULL; not owned */
    PyObject *described;   /* arrays of the next two, which it keeps */
    const CallRecord *entry; /* of its calls in the record, else NULL */
    int64_t *turns;        /* calls of its channel so far */
    int64_t number;        /* of its last call in the record */
} Program;

Result advance(Program *program, long polls);
Result advance_released(Program *program, long polls, long naps);
Result run_on(Program *program, const Memory *sendbuf, const Memory *recvbuf, const uint64_t *classes);
Result queue_on(Program *program, const Memory *sendbuf, const Memory *recvbuf, const uint64_t *classes);

/* counts.c */
bool agree_on_blocks(Program *program, const Memory *sendbuf, const Memory *recvbuf);

/* record.c */
void begin(Program *program);
void note_end(Program *program, CallState state);

/* scale.c */
void resize(Program *program, int64_t elements);
bool resize_blocks(Program *program);
bool is_in_classes(const Scale *scale, const uint64_t *classes, int64_t elements);

/* mailbox.c */
bool send_message(Program *program, Row *row);
Result receive_message(Program *program, Row *row);
Result await_read(Program *program, Row *row);
Result expect_none(Link *link);

/* network.c */
Result start_message(NetMessage *message, bool receives, char *address, int64_t nbytes);
Result test_message(NetMessage *message, int64_t nbytes);
void set_mpi_functions(void *const *addresses);

/* reduce.c */
typedef void Reduction(const char *left, const char *right, char *out, int64_t nbytes);
Reduction *find_reduction(int number);
bool has_reduction(int number);
int reduction_number(const char *operation, char kind, int itemsize);

static inline char *address_of(Program *program, int memory, int64_t offset) { return program->bases[memory] + offset; }

static inline void apply_reduction(Row *row, const char *incoming, const char *mine, char *out, int64_t nbytes) {
    Reduction *reduce = find_reduction(row->reduction);
    if (row->mine_first)
        reduce(mine, incoming, out, nbytes);
    else
        reduce(incoming, mine, out, nbytes);
}

#endif
