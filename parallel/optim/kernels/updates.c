/* Optimizer updates in one pass over memory, for `compiled_updates`. */
#include "kernel_module.h"

#define REAL float
#define ROOT sqrtf
#define NAME(name) name##_float
#include "updates.h"

#define REAL double
#define ROOT sqrt
#define NAME(name) name##_double
#include "updates.h"

#define ROW(name, signature) {#name, signature, name##_float, name##_double}

static const Kernel kernels[] = {
    ROW(sgd, "Xxrrr"),
    ROW(momentum, "XxXirrrr"),
    ROW(adam, "XxXXrrrrrrrr"),
    ROW(adamw, "XxXXrrrrrrrr"),
    ROW(lamb_moments, "xXXrrrrrrrr"),
    ROW(lamb_direction, "xxxXrrrrrrrr"),
    ROW(lamb, "Xxxrrrrrrrr"),
    ROW(average, "xXrr"),
    ROW(squares, "xiDD"),
    {NULL, NULL, NULL, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_updates", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__updates(void) { return kernel_module(&definition, kernels); }
