"""Headers of kernels in C, whose text CUDA sources contain and whose constants the references in NumPy use."""

import re
from importlib.resources import files
from typing import Any

PORTABLE = ("quant.kernels", "portable.h")
FORMULAS = ("quant.kernels", "formulas.h")

_NUMBER = r"0x[0-9A-F]+|[-\d.]+(?:e[-+]?\d+)?"
_DEFINITION = re.compile(rf"#define (\w+) (?:\(\(\w+\))?({_NUMBER})[fu]?\)?(?: |$)", re.MULTILINE)


def text(*headers: tuple[str, str]) -> str:
    """Text of headers, each a package and a file's name, without the lines that include each other."""
    whole = "".join(files(package).joinpath(name).read_text(encoding="utf-8") for package, name in headers)
    return re.sub(r'#include "\w+\.h"\n', "", whole)


def constants(header: tuple[str, str]) -> dict[str, Any]:
    """Constants that a header defines, by name, such as ``#define FAR ((W)16)``."""
    found = dict(_DEFINITION.findall(text(header)))
    return {name: int(value, 16) if value.startswith("0x") else float(value) for name, value in found.items()}
