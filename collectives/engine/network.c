/* Messages between nodes: functions of the MPI that this process has loaded, called without its headers. */
#include "program.h"

/* Handles are pointers, or integers as wide as int; both are passed as one word. */
typedef int Isend(const void *, int, intptr_t, int, int, intptr_t, int64_t *);
typedef int Irecv(void *, int, intptr_t, int, int, intptr_t, int64_t *);
typedef int Test(int64_t *, int64_t *, int64_t *);
typedef int GetCount(const int64_t *, intptr_t, int64_t *);

static Isend *mpi_isend;
static Irecv *mpi_irecv;
static Test *mpi_test;
static GetCount *mpi_get_count;

Result start_message(NetMessage *message, bool receives, char *address, int64_t nbytes) {
    int peer = (int)message->peer, tag = (int)message->tag;
    int error = receives
        ? mpi_irecv(address, (int)nbytes, message->datatype, peer, tag, message->comm, &message->request)
        : mpi_isend(address, (int)nbytes, message->datatype, peer, tag, message->comm, &message->request);
    message->error = error;
    return error ? FAILED_IN_MPI : DONE;
}

/* Test a message for its end. The length of one that was received is compared with `nbytes`. */
Result test_message(NetMessage *message, int64_t nbytes) {
    message->count = 0;
    message->error = mpi_test(&message->request, &message->count, message->status);
    if (message->error) return FAILED_IN_MPI;
    if (!message->count) return WAITING;
    if (message->receives) {
        message->count = 0;
        mpi_get_count(message->status, message->datatype, &message->count);
        if (message->count != nbytes) return MISMATCH;
    }
    return DONE;
}

/* Set the functions MPI_Isend, MPI_Irecv, MPI_Test and MPI_Get_count. */
void set_mpi_functions(void *const *addresses) {
    mpi_isend = (Isend *)addresses[0];
    mpi_irecv = (Irecv *)addresses[1];
    mpi_test = (Test *)addresses[2];
    mpi_get_count = (GetCount *)addresses[3];
}
