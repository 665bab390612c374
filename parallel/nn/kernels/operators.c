/* Operators' kernels for C-contiguous arrays of float32 on the host, one pass over memory each: table of the module. */
#include "operators.h"

#include "kernel_module.h"

#define ROW(NAME, SIGNATURE) {#NAME, SIGNATURE, run_##NAME, NULL},

static const Kernel kernels[] = {OPERATORS(ROW) {NULL, NULL, NULL, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_operators", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__operators(void) { return kernel_module(&definition, kernels); }
