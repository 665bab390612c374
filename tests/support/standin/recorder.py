"""Forms of the calls that the project makes of the stand-in for CuPy, one example of each.

A form is the name of a function or method, and the kinds of its arguments: dtype, number of dimensions and layout of
arrays, types of numbers, names of keywords. `calls.json` holds all forms that the device tests use; a test with a new
one fails until the list is written anew:

    RECORD_CUPY=1 python -m pytest tests/unit -m "full or not full" -k "device or cupy or gpu"

`tests/real_cupy` repeats every example with CuPy itself.
"""

import functools
import json
import os
import sys
import threading
import types
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("calls.json")
CALLERS = tuple(str(ROOT / folder) + os.sep for folder in ("collectives", "parallel", "quant", "tests/gpu"))
"""Folders whose calls count; those of the stand-in itself and of other tests do not."""

NOT_RECORDED = {"hash", "array", "buffer", "dlpack", "dlpack_device", "init", "array_ufunc", "array_function"}
"""Special methods that are called by others than the project, or end in functions that are recorded."""


class Recorder:
    """Wrapper of the stand-in's functions and of its arrays' methods, which notes the forms of their calls."""

    def __init__(self, module):
        self.forms = {}
        self._seen = set()  # keys of noted calls
        self._array = module.ndarray
        self._lock = threading.Lock()
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and not name.startswith("_"):
                setattr(module, name, self._recorded(name, value))
        for name, value in list(vars(module.ndarray).items()):
            is_method = not name.startswith("_") or (name.startswith("__") and name.strip("_") not in NOT_RECORDED)
            if isinstance(value, types.FunctionType) and is_method:
                setattr(module.ndarray, name, self._recorded(f"ndarray.{name}", value))
        self._kernel = module.ElementwiseKernel
        self._kernel.__call__ = self._recorded("ElementwiseKernel", self._kernel.__call__)
        self._record_functions_of_numpy(module)
        given = module.__getattr__
        module.__getattr__ = lambda name: self._function(name, given(name))

    def _function(self, name, value):
        return self._recorded(name, value) if isinstance(value, functools.partial) else value

    def _record_functions_of_numpy(self, module):
        """Record NumPy's functions of the device's arrays, which end in the functions of the same names."""
        inner = module._function
        module._function = lambda name: self._recorded(name, getattr(inner(name), "__wrapped__", inner(name)), 2)

    def _recorded(self, name, function, depth=1):
        """Function that calls `function`, and notes calls of the project, whose frame is `depth` above."""

        @functools.wraps(function)
        def call(*arguments, **options):
            if not sys._getframe(depth).f_code.co_filename.startswith(CALLERS):
                return function(*arguments, **options)
            key = name, self.key(arguments), self.key(tuple(options.items()))
            if key in self._seen:
                return function(*arguments, **options)
            before = [self.encoded(value) for value in arguments]
            result = function(*arguments, **options)
            self._note(name, before, {key: self.encoded(value) for key, value in options.items()}, result)
            self._seen.add(key)
            return result

        return call

    def _note(self, name, arguments, options, result):
        given = {"call": name, "arguments": arguments, "options": options}
        key = form(given)
        if key not in self.forms:
            with self._lock:
                self.forms[key] = {**given, "result": self.encoded(result)}

    def key(self, value):
        """Key of a value: values with equal keys have the same form."""
        if isinstance(value, tuple | list):
            return type(value), *map(self.key, value)
        if isinstance(value, self._array):
            return self._array, value.dtype, value.shape, value.strides
        if isinstance(value, np.ndarray | np.generic):
            return type(value), value.dtype, value.shape
        if isinstance(value, self._kernel):
            return value.texts
        if isinstance(value, type):
            return "type", value
        return value if isinstance(value, str | np.dtype) else type(value)

    def encoded(self, value):
        """A value as JSON: arrays by shape, dtype and layout, all else by itself."""
        if isinstance(value, self._array):
            return {"array": list(value.shape), "dtype": value.dtype.name, "layout": layout(value)}
        if isinstance(value, self._kernel):
            return {"kernel": list(value.texts)}
        if isinstance(value, np.ndarray):
            return {"host": list(value.shape), "dtype": value.dtype.name}
        if isinstance(value, np.generic):
            return {"scalar": value.item(), "dtype": value.dtype.name}
        if isinstance(value, np.dtype):
            return {"dtype": value.name}
        if isinstance(value, type):
            return {"type": value.__name__}
        if isinstance(value, slice):
            return {"slice": [self.encoded(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, tuple | list):
            return {type(value).__name__: [self.encoded(part) for part in value]}
        if value is ...:
            return {"ellipsis": True}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return {"object": type(value).__name__}


def layout(array):
    """Order of an array's elements in memory: "C", "F", "rows" with gaps between them, or "gaps"."""
    flags, strides = array._seen().flags, array.strides
    if flags.c_contiguous or flags.f_contiguous:
        return "C" if flags.c_contiguous else "F"
    return "rows" if strides[-1] == array.itemsize else "gaps"


def form(entry):
    """Text of a call's form, equal for calls that differ in lengths and values only."""
    parts = [kind(value) for value in entry["arguments"]]
    parts += [f"{name}={kind(value)}" for name, value in sorted(entry["options"].items())]
    return f"{entry['call']}({', '.join(parts)})"


def kind(value):
    """Kind of an encoded argument."""
    if isinstance(value, str):
        return repr(value)
    if not isinstance(value, dict):
        return type(value).__name__
    if "array" in value or "host" in value:
        shape = value.get("array", value.get("host"))
        place = "" if "array" in value else "host "
        empty = " empty" if 0 in shape else ""
        return f"{place}{value['dtype']}[{len(shape)}]{value.get('layout', '')}{empty}"
    if "scalar" in value:
        return f"scalar {value['dtype']}"
    if "slice" in value:
        return "slice"
    for sequence in ("tuple", "list"):
        if sequence in value:
            kinds = [kind(part) for part in value[sequence]]
            return f"{sequence}({', '.join(kinds if len(set(kinds)) > 1 else kinds[:1])})"
    return "...".join(f"{name} {content}" for name, content in value.items())


@functools.cache
def stored():
    """Stored examples by form."""
    return {form(entry): entry for entry in json.loads(LIST.read_text())} if LIST.exists() else {}


def store(forms):
    """Write the list, sorted, one example a line."""
    lines = [json.dumps(entry, sort_keys=True) for _, entry in sorted(forms.items())]
    LIST.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    stored.cache_clear()


@functools.cache
def start(module):
    """Recorder of the stand-in `module`, which records from the first call on."""
    return Recorder(module)


def check_forms(module):
    """Raise AssertionError if a call had a form that is not in the list; with RECORD_CUPY=1 add it."""
    known, recorder = stored(), start(module)
    new = {key: entry for key, entry in recorder.forms.items() if key not in known}
    if new and os.environ.get("RECORD_CUPY"):
        store({**known, **new})
    else:
        assert not new, f"calls of CuPy that {LIST.name} lacks, see {Path(__file__).name}: {sorted(new)}"
