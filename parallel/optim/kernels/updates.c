/* Optimizer updates in one pass over memory, for `formulas.run`. */
#include "kernel_module.h"

#define REAL float
#define ROOT sqrtf
#define NAME(name) name##_float
#include "updates.h"

#define REAL double
#define ROOT sqrt
#define NAME(name) name##_double
#include "updates.h"

/* Formulas: name, number of arrays, letters of these, arguments for element i of arrays x0 to x3. */
#define UPDATES(UPDATE)                                                    \
    UPDATE(sgd, 2, "Xx", (x0 + i, x1[i], s))                               \
    UPDATE(momentum, 3, "XxX", (x0 + i, x1[i], x2 + i, s))                 \
    UPDATE(nesterov, 3, "XxX", (x0 + i, x1[i], x2 + i, s))                 \
    UPDATE(adam, 4, "XxXX", (x0 + i, x1[i], x2 + i, x3 + i, s))            \
    UPDATE(lamb_moments, 3, "xXX", (x0[i], x1 + i, x2 + i, s))             \
    UPDATE(lamb_direction, 4, "xxxX", (x0[i], x1[i], x2[i], x3 + i, s))    \
    UPDATE(lamb, 3, "Xxx", (x0 + i, x1[i], x2[i], s))                      \
    UPDATE(average, 2, "xX", (x0[i], x1 + i, s))

/* Loop over the elements of arrays, of which those beyond `COUNT` are NULL; scalars follow them, all of one type. */
#define LOOP(REAL, NAME, COUNT, CALL)                                                                                \
    CLONED static double run_##NAME##_##REAL(const Argument *a) {                                                    \
        REAL *restrict x0 = a[0].data, *restrict x1 = a[1].data, *restrict x2 = a[2].data, *restrict x3 = a[3].data; \
        Scalars_##REAL s;                                                                                            \
        (void)x2, (void)x3;                                                                                          \
        for (size_t k = 0; k < sizeof s / sizeof(REAL); k++)                                                         \
            ((REAL *)&s)[k] = (REAL)a[COUNT + k].number;                                                             \
        for (int64_t i = 0; i < a[0].size; i++)                                                                      \
            NAME##_##REAL CALL;                                                                                      \
        return 0;                                                                                                    \
    }

/* Sum of squares of each block, by a pairwise tree in float64. */
#define SQUARES(REAL)                                                                               \
    CLONED static double run_squares_##REAL(const Argument *a) {                                    \
        const REAL *restrict x = a[0].data;                                                         \
        double *restrict sums = a[2].data, *restrict out = a[3].data;                               \
        const int64_t block = a[1].integer;                                                         \
        for (int64_t number = 0; number < a[3].size; number++) {                                    \
            const REAL *restrict left = x + number * block, *restrict right = left + block / 2;     \
            for (int64_t i = 0; i < block / 2; i++)                                                 \
                sums[i] = (double)left[i] * (double)left[i] + (double)right[i] * (double)right[i];  \
            for (int64_t width = block / 4; width > 0; width /= 2)                                  \
                for (int64_t i = 0; i < width; i++)                                                 \
                    sums[i] += sums[width + i];                                                     \
            out[number] = block > 1 ? sums[0] : (double)left[0] * (double)left[0];                  \
        }                                                                                           \
        return 0;                                                                                   \
    }

#define BOTH(NAME, COUNT, LETTERS, CALL) LOOP(float, NAME, COUNT, CALL) LOOP(double, NAME, COUNT, CALL)
UPDATES(BOTH)
SQUARES(float)
SQUARES(double)

#define ROW(NAME, COUNT, LETTERS, CALL) {#NAME, LETTERS "rrrrrrrrrrr", run_##NAME##_float, run_##NAME##_double},
static const Kernel kernels[] = {
    UPDATES(ROW)
    {"squares", "xiDD", run_squares_float, run_squares_double},
    {NULL, NULL, NULL, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_updates", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__updates(void) { return kernel_module(&definition, kernels); }
