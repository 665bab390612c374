/* Copies of memory: by the C library, by a loop of vector stores, or by non-temporal stores. */

#include "memory.h"

enum {
    LONG_COPY = 1 << 11,    /* bytes from which a copy is long */
    STREAMED_COPY = 1 << 22 /* bytes from which a long copy is non-temporal: caches would hardly keep the data */
};

/* True on processors of AMD. There the C library may copy by `rep movsb`, which takes 12 times as long if the target
 * begins some bytes after the source modulo the size of a page, and longer out of another core's cache. Elsewhere that
 * instruction is the fastest copy, since it writes lines without reading them first. */
static bool loops_long_copies = false;

#if defined(__x86_64__)

__attribute__((target("avx"))) static void copy_blocks(char *target, const char *source, int64_t nbytes, bool streams) {
    int64_t head = -(intptr_t)target & 31;
    if (head > nbytes) head = nbytes;
    memcpy(target, source, head);
    int64_t end = head + (nbytes - head) / 32 * 32;
    if (streams)
        for (int64_t at = head; at < end; at += 32)
            _mm256_stream_si256((__m256i *)(target + at), _mm256_loadu_si256((const __m256i *)(source + at)));
    else
        for (int64_t at = head; at < end; at += 32)
            _mm256_store_si256((__m256i *)(target + at), _mm256_loadu_si256((const __m256i *)(source + at)));
    memcpy(target + end, source + end, nbytes - end);
    if (streams) _mm_sfence(); /* such stores are not ordered before the flag that follows */
}

static bool has_vectors = false;

void find_copies(void) {
    __builtin_cpu_init();
    has_vectors = __builtin_cpu_supports("avx");
    loops_long_copies = has_vectors && __builtin_cpu_is("amd");
}

void copy_non_temporal(char *target, const char *source, int64_t nbytes) {
    if (has_vectors)
        copy_blocks(target, source, nbytes, true);
    else
        memcpy(target, source, nbytes);
}

void copy_bytes(char *target, const char *source, int64_t nbytes) {
    if (loops_long_copies && nbytes >= LONG_COPY)
        copy_blocks(target, source, nbytes, nbytes >= STREAMED_COPY);
    else
        memcpy(target, source, nbytes);
}

/* Clock of the processor in cycles, after all earlier stores. */
uint64_t cycles(void) {
    _mm_mfence();
    return __builtin_ia32_rdtsc();
}

#else

void find_copies(void) {}

void copy_non_temporal(char *target, const char *source, int64_t nbytes) { memcpy(target, source, nbytes); }

void copy_bytes(char *target, const char *source, int64_t nbytes) { memcpy(target, source, nbytes); }

uint64_t cycles(void) { return 0; }

#endif

/* Copy from address `origin` of process `pid`; false if the system refuses. */
bool read_process(int64_t pid, char *into, int64_t origin, int64_t nbytes) {
    while (nbytes > 0) {
        struct iovec here = {into, nbytes}, there = {(void *)origin, nbytes};
        ssize_t done = process_vm_readv((pid_t)pid, &here, 1, &there, 1, 0);
        if (done <= 0) return false;
        into += done, origin += done, nbytes -= done;
    }
    return true;
}

/* Copy to address `target` of process `pid`; false if the system refuses. */
bool write_process(int64_t pid, const char *source, int64_t target, int64_t nbytes) {
    while (nbytes > 0) {
        struct iovec here = {(void *)source, nbytes}, there = {(void *)target, nbytes};
        ssize_t done = process_vm_writev((pid_t)pid, &here, 1, &there, 1, 0);
        if (done <= 0) return false;
        source += done, target += done, nbytes -= done;
    }
    return true;
}
