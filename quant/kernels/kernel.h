/* What a kernel in C is written with: see kernel_module.h. */
#ifndef CHORUS_KERNEL_H
#define CHORUS_KERNEL_H

#include "portable.h"

/* Compile a function for several sets of vector instructions, of which the loader takes the best. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#if __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define CLONED /* compiled for one instruction set */
#endif

typedef struct {
    void *data;       /* first element of an array */
    int64_t size;     /* elements of an array */
    int64_t stride;   /* bytes between rows, for letters with ~ */
    int64_t columns;  /* length of its last axis, 1 for an array without axes */
    int64_t integer;  /* value of a Python int */
    double number;    /* value of a Python float */
} Argument;

#endif
