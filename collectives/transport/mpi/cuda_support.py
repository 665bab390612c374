"""Detection of CUDA-aware MPI libraries.

MPI has no standard query. Open MPI, MPICH and their derivatives have ``MPIX_Query_cuda_support``, MPICH also
``MPIX_GPU_query_support``. The wheels of mpi4py export neither, so the loaded MPI library is called through ctypes.
"""

import ctypes
import os
import re
from functools import cache
from pathlib import Path

_LIBRARY = re.compile(r"libmpi(ch|_abi|_ilp64)?\.so[.\d]*")
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


@cache
def cuda_aware() -> bool:
    """True if messages may be sent from and received in CUDA device memory.

    False if unknown: no Linux, no such library, or contradicting libraries.
    """
    answers = [answer for path in loaded(Path("/proc/self/maps")) for answer in query_support(path)]
    return bool(answers) and all(answers)


def loaded(maps: Path) -> list[str]:
    """Paths of the MPI libraries that this process has mapped, read from `maps` (/proc/self/maps)."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6}
    return sorted(path for path in paths if _LIBRARY.fullmatch(os.path.basename(path)))


def query_support(path: str) -> list[bool]:
    """CUDA support as reported by the query functions of a loaded MPI library. Empty if it has none."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # mapped but not loaded as a library, or a system without RTLD_NOLOAD
        return []
    answers = []
    if hasattr(library, "MPIX_Query_cuda_support"):
        answers.append(library.MPIX_Query_cuda_support() == 1)
    if hasattr(library, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(supported))
        answers.append(not failed and supported.value == 1)
    return answers
