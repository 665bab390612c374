"""Build of the compiled modules; pyproject.toml holds all other metadata.

They are optional: without a C compiler the package installs all the same, and Python code runs in their place. With
CHORUS_PURE=1 none is built, for a wheel that any machine can install.
"""

import os
import platform
from glob import glob

from setuptools import Extension, setup

FLAGS = ["-std=c11", "-O3", "-D_GNU_SOURCE", "-fvisibility=hidden"]
EXACT = ["-ffp-contract=off"]  # every operation is rounded by itself: the bits are those of NumPy
FUSED = ["-ffp-contract=fast"]
VECTORS = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-funroll-loops"]
VECTORS += ["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []

EXTENSIONS = {
    "collectives.engine._engine": EXACT,
    "quant.kernels._codecs": EXACT + VECTORS,
    "parallel.nn.kernels._operators": FUSED + VECTORS,
    "parallel.optim.kernels._updates": EXACT + VECTORS,
}
"""Modules, each of the C files of its folder, with the flags of the compiler that their results depend on."""


def extensions() -> list[Extension]:
    """The compiled modules, unless NumPy's headers are missing."""
    if os.environ.get("CHORUS_PURE") == "1":
        return []
    try:
        import numpy
    except ImportError:
        return []
    folders = {name: name.rpartition(".")[0].replace(".", "/") for name in EXTENSIONS}
    return [
        Extension(
            name,
            sorted(glob(f"{folders[name]}/*.c")),
            include_dirs=[numpy.get_include(), "quant/kernels"],
            depends=sorted(glob(f"{folders[name]}/*.h") + glob("quant/kernels/*.h")),
            extra_compile_args=FLAGS + own,
            optional=True,
        )
        for name, own in EXTENSIONS.items()
        if glob(f"{folders[name]}/*.c")
    ]


setup(ext_modules=extensions())
