"""Messages between nodes, started and tested by compiled code: functions of the MPI, called as C does.

Programs with such messages run without the interpreter's lock (GIL). A function of the MPI may wait for a thread that
waits for that lock; and threads that wait for it would get it late between polls that each release it for a moment.
"""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

import ctypes

from llvmlite import binding
from mpi4py import MPI
from numba import types

from collectives.runtime import kernel_memory
from collectives.runtime import program_table as table
from collectives.runtime.kernel_memory import set_word_at, word_at
from quant.kernels.jit import compiler

_compile = compiler(table, kernel_memory)

_library = ctypes.CDLL(MPI.__file__)  # whose functions include those of the MPI that it is linked to


def _function(name, *arguments):
    """Function of the MPI for compiled code. Handles, which are integers or pointers, are passed as words."""
    binding.add_symbol(name, ctypes.cast(getattr(_library, name), ctypes.c_void_p).value)
    return types.ExternalFunction(name, types.int32(*arguments))


_MESSAGE = (types.int64, types.int32, types.int64, types.int32, types.int32, types.int64, types.int64)
_isend, _irecv = _function("MPI_Isend", *_MESSAGE), _function("MPI_Irecv", *_MESSAGE)
_test = _function("MPI_Test", *(types.int64,) * 3)
_get_count = _function("MPI_Get_count", *(types.int64,) * 3)

release_gil = types.ExternalFunction("PyEval_SaveThread", types.int64())
acquire_gil = types.ExternalFunction("PyEval_RestoreThread", types.void(types.int64))


@_compile
def start_message(message, kind, address, nbytes):
    """Start the send or receive of a message; a result of `program_table`."""
    peer, tag = types.int32(word_at(message, table.PEER)), types.int32(word_at(message, table.TAG))
    datatype, comm = word_at(message, table.DATATYPE), word_at(message, table.COMM)
    request, count = message + 8 * table.MPI_REQUEST, types.int32(nbytes)
    if kind == table.START_SEND:
        error = _isend(address, count, datatype, peer, tag, comm, request)
    else:
        error = _irecv(address, count, datatype, peer, tag, comm, request)
    set_word_at(message, table.ERROR, error)
    return table.FAILED_IN_MPI if error else table.DONE


@_compile
def test_message(message, nbytes):
    """Test a message for its end: `DONE` or `WAITING`, or an error. `nbytes` of a receive are compared with its own."""
    count, status = message + 8 * table.COUNT, message + 8 * table.STATUS
    set_word_at(message, table.COUNT, 0)
    error = _test(message + 8 * table.MPI_REQUEST, count, status)
    set_word_at(message, table.ERROR, error)
    if error:
        return table.FAILED_IN_MPI
    if not word_at(message, table.COUNT):
        return table.WAITING
    if word_at(message, table.RECEIVES):
        set_word_at(message, table.COUNT, 0)
        _get_count(status, word_at(message, table.DATATYPE), count)
        if word_at(message, table.COUNT) != nbytes:
            return table.MISMATCH
    return table.DONE
