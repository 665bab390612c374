"""Quantised arrays in a safetensors file: of each its buffer as bytes, and what it means in the file's header.

The format: https://github.com/huggingface/safetensors. Whatever reads such files sees a tensor of bytes for every name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

from quant.array import QuantizedArray
from quant.spec import QuantSpec

KEY = "chorus.quant"
"""Under this name the header has, as JSON, spec and shape of every quantised array."""


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("files need the package safetensors: pip install 'chorus-mpi[train]'") from error
    return safetensors


def save(path: str | Path, arrays: Mapping[str, QuantizedArray | np.ndarray]) -> None:
    """Write arrays by name, quantised ones and others, to a new file or over an old one.

    Raises
    ------
    ImportError
        Without the package safetensors.

    Examples
    --------
    >>> import tempfile
    >>> from quant import INT8, quantize
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.safetensors")
    ...     save(path, {"w": quantize(np.ones(3, np.float32), INT8)})
    ...     load(path)["w"].integers()
    array([127, 127, 127], dtype=int8)
    """
    tensors, meanings = {}, {}
    for name, array in arrays.items():
        if isinstance(array, QuantizedArray):
            buffer = array.buffer
            tensors[name] = np.ascontiguousarray(buffer if isinstance(buffer, np.ndarray) else buffer.get())
            meanings[name] = {"spec": array.spec.to_dict(), "shape": list(array.shape)}
        else:
            tensors[name] = np.ascontiguousarray(array)
    _safetensors().numpy.save_file(tensors, str(path), {KEY: json.dumps(meanings)})


def load(path: str | Path) -> dict[str, QuantizedArray | np.ndarray]:
    """All arrays of a file, as they were saved, on the host.

    Raises
    ------
    ImportError
        Without the package safetensors.
    ValueError
        If it is no such file, or what it says of an array does not fit its bytes.
    """
    library = _safetensors()
    try:
        with library.safe_open(str(path), framework="np") as file:
            meanings = json.loads((file.metadata() or {}).get(KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except library.SafetensorError as error:
        raise ValueError(f"{Path(path).name} is no safetensors file: {error}") from error
    found: dict[str, QuantizedArray | np.ndarray] = dict(tensors)
    for name, meaning in meanings.items():
        found[name] = QuantizedArray(QuantSpec.from_dict(meaning["spec"]), tuple(meaning["shape"]), tensors[name])
    return found
