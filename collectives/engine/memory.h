/* Copies of memory, flags, and the memory of other processes. */
#ifndef CHORUS_MEMORY_H
#define CHORUS_MEMORY_H

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Load a flag; later loads are at least as new. */
static inline int64_t load_flag(int64_t address) {
    return atomic_load_explicit((_Atomic int64_t *)address, memory_order_acquire);
}

/* Store a flag; who reads it sees all earlier stores. */
static inline void store_flag(int64_t address, int64_t value) {
    atomic_store_explicit((_Atomic int64_t *)address, value, memory_order_release);
}

/* Hint to the processor that this is a spin loop. */
static inline void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

void copy_bytes(char *target, const char *source, int64_t nbytes);
void copy_non_temporal(char *target, const char *source, int64_t nbytes);
bool read_process(int64_t pid, char *into, int64_t origin, int64_t nbytes);
bool write_process(int64_t pid, const char *source, int64_t target, int64_t nbytes);
uint64_t cycles(void);
void find_copies(void);

#endif
