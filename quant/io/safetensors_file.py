"""Quantised arrays in a safetensors file: of each its buffer as bytes, and what it means in the file's header.

The format: https://github.com/huggingface/safetensors. Whatever reads such files sees a tensor of bytes for every name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quant.array import QuantizedArray
from quant.spec.quant_spec import QuantSpec

KEY = "chorus.quant"
"""Under this name the header has, as JSON, spec and shape of every quantised array."""
ABOUT = "chorus.about"
"""And under this one, what whoever saved them has to say."""


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("files need the package safetensors: pip install 'chorus-mpi[train]'") from error
    return safetensors


def save(path: str | Path, arrays: Mapping[str, QuantizedArray | np.ndarray], about: Any = None) -> None:
    """Write arrays by name, quantised ones and others, to a new file or over an old one.

    Parameters
    ----------
    path : str or Path
    arrays : mapping of name -> array
    about : values for JSON, optional
        What else there is to say; `about` reads it.

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
    _safetensors().numpy.save_file(tensors, str(path), {KEY: json.dumps(meanings), ABOUT: json.dumps(about)})


def load(path: str | Path) -> dict[str, QuantizedArray | np.ndarray]:
    """All arrays of a file, as they were saved, on the host.

    Raises
    ------
    ImportError
        Without the package safetensors.
    ValueError
        If it is no such file, or what it says of an array does not fit its bytes.
    """
    meanings, tensors = _read(path, KEY, tensors=True)
    found: dict[str, QuantizedArray | np.ndarray] = dict(tensors)
    for name, meaning in (meanings or {}).items():
        found[name] = QuantizedArray(QuantSpec.from_dict(meaning["spec"]), tuple(meaning["shape"]), tensors[name])
    return found


def about(path: str | Path) -> Any:
    """What `save` was told about the arrays; None if nothing. Raises as `load`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Path(folder, "a.safetensors"), {}, {"of": "nothing"})
    ...     about(Path(folder, "a.safetensors"))
    {'of': 'nothing'}
    """
    return _read(path, ABOUT)[0]


def _read(path: str | Path, key: str, tensors: bool = False) -> tuple[Any, dict[str, np.ndarray]]:
    """What a file's header says under a key, and all of its tensors."""
    library = _safetensors()
    try:
        with library.safe_open(str(path), framework="np") as file:
            said = json.loads((file.metadata() or {}).get(key, "null"))
            return said, {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118
    except library.SafetensorError as error:
        raise ValueError(f"{Path(path).name} is no safetensors file: {error}") from error
