/* Largest elements of a group, by their bits. */
#include "codecs.h"

/* Map the bits of a float32 to integers in the order of the floats; applied again, it maps back. */
INLINE int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & MAGNITUDE); }

INLINE int32_t largest(const int32_t *bits, int64_t count) {
    int32_t most = 0;
    DO_PRAGMA(omp simd reduction(max : most))
    for (int64_t i = 0; i < count; i++) {
        const int32_t one = bits[i] & MAGNITUDE;
        most = one > most ? one : most;
    }
    return most;
}

INLINE void bounds(const int32_t *bits, int64_t count, int32_t *low, int32_t *high) {
    int32_t least_one = ordered(bits[0]), largest_one = least_one;
    DO_PRAGMA(omp simd reduction(min : least_one) reduction(max : largest_one))
    for (int64_t i = 0; i < count; i++) {
        const int32_t one = ordered(bits[i]);
        least_one = one < least_one ? one : least_one;
        largest_one = one > largest_one ? one : largest_one;
    }
    *low = ordered(least_one);
    *high = ordered(largest_one);
}

/* Bits of the element of largest magnitude, with its sign; the first of equal ones. */
INLINE int32_t farthest(const int32_t *bits, int64_t count) {
    int32_t low, high;
    bounds(bits, count, &low, &high);
    const int32_t below = low & MAGNITUDE, above = high & MAGNITUDE;
    if (below != above)
        return above > below ? high : low;
    int64_t i = 0;
    while ((bits[i] & MAGNITUDE) != above)
        i++;
    return bits[i];
}
