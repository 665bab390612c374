"""The array type of all packages."""

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""NumPy or CuPy array. CuPy is optional and has no type stubs, so type checkers see any object."""
