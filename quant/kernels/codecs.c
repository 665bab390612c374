/* Kernels that encode, decode and pack numbers in host arrays: table of the module. */
#include "codecs.h"

#include "kernel_module.h"

KERNEL_MODULE(_codecs, CODECS)
