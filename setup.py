"""Build of the compiled engine; pyproject.toml holds all other metadata.

The engine is optional: without a C compiler the package installs all the same, and Python code runs in its place.
"""

from glob import glob

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """The engine, unless NumPy's headers are missing."""
    try:
        import numpy
    except ImportError:
        return []
    flags = ["-std=c11", "-O3", "-D_GNU_SOURCE", "-ffp-contract=off", "-fvisibility=hidden"]
    return [
        Extension(
            "collectives.engine._engine",
            sorted(glob("collectives/engine/*.c")),
            include_dirs=[numpy.get_include()],
            depends=sorted(glob("collectives/engine/*.h")),
            extra_compile_args=flags,
            optional=True,
        )
    ]


setup(ext_modules=extensions())
