"""Type alias `Array` of all packages: an array of NumPy or CuPy."""

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""NumPy or CuPy array. CuPy is optional and has no type stubs, so type checkers see any object."""
