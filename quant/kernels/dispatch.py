"""Choice of the fastest implementation of a kernel for its arrays.

A package of kernels has a reference that defines the results. Some kernels have faster forms: `compiled` for NumPy
arrays (an extension module in C, built at installation) and `device` for CuPy arrays.

>>> import numpy as np
>>> from quant.kernels import reference_codecs
>>> with forms():
...     float(Kernels().fastest(reference_codecs.peak)(np.ones((1, 4), np.float32), 4)[0, 0])
1.0
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

FORMS = ("compiled", "device")

ON_HOST = np.ndarray | np.generic

_allowed = list(FORMS)


class Unsuited(TypeError):
    """A faster form does not take these arguments. The reference does. Raised before anything is changed."""


@contextmanager
def forms(*names: str) -> Iterator[None]:
    """Allow only these of the faster forms (`compiled`, `device`) within a `with` block. Without names, none.

    For tests and benchmarks. Holds for all threads.
    """
    before = _allowed[:]
    _allowed[:] = names
    try:
        yield
    finally:
        _allowed[:] = before


class Kernels:
    """Table of the implementations of a package's kernels, by name and form.

    Parameters
    ----------
    modules : str
        Name of the module of each form (`compiled=`, `device=`). Its mapping ``KERNELS`` has the functions by name.
        They raise `Unsuited` for arguments that only the reference takes. The module is imported at the first call.
        Without the extension, or without CuPy, the form has no kernels.
    """

    def __init__(self, **modules: str):
        self._modules = modules
        self.form = cache(self._form)

    def _form(self, form: str) -> Mapping[str, Callable[..., Any]]:
        """Kernels of a form by name. None if it cannot be imported."""
        try:
            found: Mapping[str, Callable[..., Any]] = import_module(self._modules[form]).KERNELS
        except ImportError as error:
            if form == "compiled" and not isinstance(error, ModuleNotFoundError):
                raise  # it was built from other sources
            return {}
        return found

    def fastest(self, reference: Kernel, place: int = 0) -> Kernel:
        """Function that calls the fastest form of a kernel. Argument `place` shows where the arrays are."""
        name = reference.__name__

        @wraps(reference)
        def call(*arguments: Any, **options: Any) -> Any:
            form = "compiled" if isinstance(arguments[place], ON_HOST) else "device"
            fast = self.form(form).get(name) if form in _allowed else None
            if fast is not None:
                with suppress(Unsuited):
                    return fast(*arguments, **options)
            return reference(*arguments, **options)

        return cast(Kernel, call)
