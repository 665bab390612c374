"""Safetensors files of quantised arrays: buffers as tensors of bytes, spec and shape in the header.

The format: https://github.com/huggingface/safetensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quant.array import QuantizedArray
from quant.spec.granularity import whole_number
from quant.spec.quant_spec import QuantSpec

KEY = "chorus.quant"
"""Header key of the specs and shapes, as JSON."""
MOST_DIMENSIONS = 64
"""Largest number of dimensions of a NumPy array."""
ABOUT = "chorus.about"
"""Header key of the caller's metadata, as JSON."""


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("files need the package safetensors: pip install 'chorus-mpi[train]'") from error
    return safetensors


def save(path: str | Path, arrays: Mapping[str, QuantizedArray | np.ndarray], about: Any = None) -> None:
    """Write quantised and plain arrays by name, replacing an old file; `about`: metadata, any value that JSON can hold.

    ImportError without the package safetensors.

    >>> import tempfile
    >>> from quant import INT8, quantize
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.safetensors")
    ...     save(path, {"w": quantize(np.ones(3, np.float32), INT8)}, {"of": "ones"})
    ...     load(path)["w"].integers(), about(path)
    (array([127, 127, 127], dtype=int8), {'of': 'ones'})
    """
    tensors, meanings = {}, {}
    for name, array in arrays.items():
        if isinstance(array, QuantizedArray):
            buffer = array.buffer
            tensors[name] = np.ascontiguousarray(buffer if isinstance(buffer, np.ndarray) else buffer.get())
            meanings[name] = {"spec": array.spec.to_dict(), "shape": list(array.shape)}
        else:
            tensors[name] = np.ascontiguousarray(array)
    _safetensors().numpy.save_file(tensors, str(path), {KEY: json.dumps(meanings), ABOUT: json.dumps(about)})


def load(path: str | Path) -> dict[str, QuantizedArray | np.ndarray]:
    """All arrays of a file, on the host. ValueError if it is damaged, or an array does not match its header entry."""
    meanings, tensors = _read(path, KEY, tensors=True)
    found: dict[str, QuantizedArray | np.ndarray] = dict(tensors)
    if not isinstance(meanings, dict | None):
        raise ValueError(f"{Path(path).name}: {KEY} is a {type(meanings).__name__}, not meanings by name")
    for name, meaning in (meanings or {}).items():
        try:
            found[name] = _array(meaning, tensors.get(name))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{Path(path).name}: {name} is no quantised array: {error}") from error
    return found


def _array(meaning: Any, buffer: np.ndarray | None) -> QuantizedArray:
    if buffer is None:
        raise ValueError("the file has no tensor of this name")
    if not isinstance(meaning, dict):
        raise ValueError("its entry in the header has no spec and shape")
    spec, shape = meaning.get("spec"), meaning.get("shape")
    if not isinstance(spec, dict):
        raise ValueError(f"{spec!r} is no spec")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{shape!r} is no shape")
    for n in shape:
        whole_number("a length", n)
        if not 0 <= n <= np.iinfo(np.intp).max:
            raise ValueError(f"no array has the shape {shape}")
    return QuantizedArray(QuantSpec.from_dict(spec), tuple(shape), buffer)


def about(path: str | Path) -> Any:
    """Metadata that `save` wrote as `about`, or None. Raises as `load`."""
    return _read(path, ABOUT)[0]


def _read(path: str | Path, key: str, tensors: bool = False) -> tuple[Any, dict[str, np.ndarray]]:
    """(header entry `key` parsed as JSON, tensors by name); the tensors are read only with `tensors`."""
    library = _safetensors()
    try:
        with library.safe_open(str(path), framework="np") as file:
            entry = json.loads((file.metadata() or {}).get(key, "null"))
            return entry, {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118
    except (library.SafetensorError, AttributeError, KeyError, RecursionError, TypeError) as error:
        # The package has other errors for types of tensors that NumPy does not have.
        raise ValueError(f"{Path(path).name} is no safetensors file: {error}") from error
