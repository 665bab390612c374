/* Kernels that encode, decode and pack numbers in host arrays: table of the module. */
#include "codecs.h"

#include "kernel_module.h"

#define ROW(NAME, SIGNATURE) {#NAME, SIGNATURE, run_##NAME, NULL},

static const Kernel kernels[] = {CODECS(ROW) {NULL, NULL, NULL, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_codecs", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codecs(void) { return kernel_module(&definition, kernels); }
