/* Definitions for code that a C compiler and CUDA's NVRTC both accept.
 *
 * INLINE begins a function of scalars. Products and sums are rounded one by one in both: C files that need equal bits are
 * compiled with -ffp-contract=off, CUDA sources with --fmad=false. */
#ifndef CHORUS_PORTABLE_H
#define CHORUS_PORTABLE_H

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define INLINE __device__ static inline
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#define INLINE static inline __attribute__((always_inline))
#endif

/* Unroll a loop of a constant length: loops around it vectorise. */
#if defined(__clang__) || defined(__CUDACC_RTC__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* The bits of a float32 as an integer, and the reverse. */
INLINE int32_t bits_of(float x) {
    union { float number; int32_t bits; } both;
    both.number = x;
    return both.bits;
}

INLINE float float_of(int32_t x) {
    union { float number; int32_t bits; } both;
    both.bits = x;
    return both.number;
}

#endif
