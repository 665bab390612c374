/* Operators' kernels for C-contiguous arrays of float32 on the host, one pass over memory each: table of the module. */
#include "operators.h"

#include "kernel_module.h"

KERNEL_MODULE(_operators, OPERATORS)
