"""CUDA kernels of short messages: `put_message` writes one to another GPU, `take_message` reads it on the receiver.

A message goes into a slot of the receiver's memory: a word that is its flag, and from `HEAD` its bytes. The sender's
threads write the bytes, each thread makes its own visible to the system by a fence, and when all have done so the last
thread writes the flag. The receiver's first thread waits for the flag for a limited number of clock cycles, because a
waiting kernel may block other kernels on which the sender depends. It reports the flag that it has read to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from collectives.transport.gpu.gpu_kernels import OPTIONS, THREADS, KernelLaunch
from collectives.transport.wire import Iovec

HEAD = 64
"""Bytes of a slot before the message's own."""

MOST_PIECES = 64
"""Pieces of a message that one launch copies."""

CYCLES = 100_000
"""Clock cycles that a receiver waits for a flag on the GPU: some 60 us. After them the host waits."""

LENGTH_BITS = 16
"""Bits of a flag that are the length of the message. Those above are its number."""

SOURCE = (
    f"#define PIECES {MOST_PIECES}\n#define HEAD {HEAD}\n#define LENGTH_BITS {LENGTH_BITS}\n#define THREADS {THREADS}\n"
    + """typedef unsigned long long Word;
struct Message { Word slot, seen, piece[PIECES]; long long nbytes[PIECES]; };

extern "C" __global__ void __launch_bounds__(THREADS) put_message(const __grid_constant__ Message m, Word flag) {
    char *to = (char *)m.slot + HEAD;
    for (int piece = 0; piece < PIECES && m.nbytes[piece]; to += m.nbytes[piece++])
        for (long long i = threadIdx.x; i < m.nbytes[piece]; i += THREADS) to[i] = ((const char *)m.piece[piece])[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == THREADS - 1) *(volatile Word *)m.slot = flag;
}

extern "C" __global__ void __launch_bounds__(THREADS)
take_message(const __grid_constant__ Message m, Word flag, long long cycles) {
    __shared__ Word seen;
    if (threadIdx.x == 0) {
        const long long begin = clock64();
        do seen = *(const volatile Word *)m.slot;
        while (seen >> LENGTH_BITS != flag >> LENGTH_BITS && clock64() - begin < cycles);
        __threadfence_system();
    }
    __syncthreads();
    const volatile char *from = (const volatile char *)m.slot + HEAD;
    if (seen == flag)
        for (int piece = 0; piece < PIECES && m.nbytes[piece]; from += m.nbytes[piece++])
            for (long long i = threadIdx.x; i < m.nbytes[piece]; i += THREADS) ((char *)m.piece[piece])[i] = from[i];
    if (threadIdx.x == THREADS - 1) *(volatile Word *)m.seen = seen;
}
"""
)

MESSAGE = np.dtype([("slot", "u8"), ("seen", "u8"), ("piece", "u8", MOST_PIECES), ("nbytes", "i8", MOST_PIECES)])
"""The kernels' table, `Message`: addresses of the slot, of the host's word, and of the pieces."""


def flag_of(number: int, nbytes: int) -> int:
    """Flag of a message.

    >>> flag_of(3, 5) == 3 * 65536 + 5
    True
    """
    return number << LENGTH_BITS | nbytes


class PeerKernels:
    """Launches of the kernels on a device. Each kernel is built at its first launch."""

    def __init__(self, cupy: ModuleType, device: int) -> None:
        self._cupy, self._device = cupy, cupy.cuda.Device(device)
        self._put, self._take = (
            cupy.RawKernel(SOURCE, name, options=OPTIONS) for name in ("put_message", "take_message")
        )

    def put(self, pieces: Sequence[Iovec], slot: int, flag: int) -> KernelLaunch:
        """Copy at most `MOST_PIECES` pieces into a slot, and set its flag."""
        return KernelLaunch(self._cupy, self._device, self._put, (1, 1), (_table(pieces, slot, 0), np.uint64(flag)))

    def take(self, pieces: Sequence[Iovec], slot: int, flag: int, seen: int) -> KernelLaunch:
        """Wait for a flag, copy the message to the pieces, and write the flag to the word at address `seen`."""
        arguments = _table(pieces, slot, seen), np.uint64(flag), np.int64(CYCLES)
        return KernelLaunch(self._cupy, self._device, self._take, (1, 1), arguments)


def _table(pieces: Sequence[Iovec], slot: int, seen: int) -> np.ndarray:
    table = np.zeros((), MESSAGE)
    table["slot"], table["seen"] = slot, seen
    for index, (address, nbytes) in enumerate(piece for piece in pieces if piece.nbytes):
        table["piece"][index], table["nbytes"][index] = address, nbytes
    return table
