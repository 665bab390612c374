"""Build of the compiled modules; pyproject.toml holds all other metadata.

They are optional: without a C compiler the package installs all the same, and Python code runs in their place. With
CHORUS_PURE=1 none is built, for a wheel that any machine can install.
"""

import os
import platform
from glob import glob
from pathlib import Path

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
    found = []
    for name, own in EXTENSIONS.items():
        folder = name.rpartition(".")[0].replace(".", "/")
        if sources := sorted(glob(f"{folder}/*.c")):
            headers = sorted({*glob(f"{folder}/*.h"), *glob("quant/kernels/*.h")})
            extension = Extension(name, sources, depends=headers, optional=True)
            extension.include_dirs = [numpy.get_include(), "quant/kernels"]
            extension.extra_compile_args = FLAGS + own
            extension.define_macros = digest([*sources, *headers], folder)
            found.append(extension)
    return found


def digest(files: list[str], folder: str) -> list[tuple[str, str]]:
    """Macros of ``sources.h``: names of files relative to a folder, and the FNV-1a digest of their bytes."""
    found = 0xCBF29CE484222325
    for file in files:
        for byte in Path(file).read_bytes():
            found = (found ^ byte) * 0x100000001B3 % (1 << 64)
    names = "".join(f"{os.path.relpath(file, folder)}\\n" for file in files)
    return [("SOURCES", f'"{names}"'), ("DIGEST", f"{found:#x}u")]


setup(ext_modules=extensions(), options={"build_ext": {"parallel": os.cpu_count()}})
