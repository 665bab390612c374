/* Random numbers of elements, for a C compiler and CUDA's NVRTC. */
#ifndef CHORUS_RANDOM_H
#define CHORUS_RANDOM_H

#define MIX_FIRST 0x85EBCA6Bu /* factors of MurmurHash3 (A. Appleby) */
#define MIX_SECOND 0xC2B2AE35u
#define MIX_HIGH 0x9E3779B9u            /* 2^32 divided by the golden ratio */
#define UNIT_24 5.9604644775390625e-8f /* 2^-24 */

INLINE uint32_t mixed(uint32_t word) {
    word = (word ^ (word >> 16)) * MIX_FIRST;
    word = (word ^ (word >> 13)) * MIX_SECOND;
    return word ^ (word >> 16);
}

/* Random number in [0, 1) of an element, a function of its number and the key. */
INLINE float uniform(uint64_t number, uint32_t key0, uint32_t key1) {
    const uint32_t low = (uint32_t)number, high = (uint32_t)(number >> 32);
    const uint32_t word = mixed(mixed(low ^ key0) + (high * MIX_HIGH + key1));
    return (float)(int32_t)(word >> 8) * UNIT_24;
}

#endif
