"""Availability of the compiler of kernels."""

import os
from functools import cache
from importlib.util import find_spec


@cache
def has_compiler() -> bool:
    """True if numba is installed, and its variable ``NUMBA_DISABLE_JIT`` does not turn the compiler off.

    Does not load numba, which takes a while.
    """
    text = os.environ.get("NUMBA_DISABLE_JIT", "")
    is_off = text.strip().lstrip("+-").isdecimal() and int(text) != 0
    return find_spec("numba") is not None and not is_off
