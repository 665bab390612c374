"""Safetensors files of quantised arrays: buffers as tensors of bytes, spec and shape in the header.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, the header (JSON
with the place of every tensor), and the tensors. The package of that name checks and reads files.
"""

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import ml_dtypes
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
CHECKSUM = "chorus.checksum"
"""Header key of the SHA-256 of all names, types, shapes, values and metadata, in hexadecimal."""
METADATA = "__metadata__"
"""Name in the header that is not a tensor."""
TYPES = {
    **{f"{letter}{8 * size}": np.dtype(f"<{letter.lower()}{size}") for letter in "IUF" for size in (2, 4, 8)},
    **{"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_), "C64": np.dtype("<c8")},
    **{"BF16": np.dtype(ml_dtypes.bfloat16), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu)},
    **{"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)},
}
"""Types of elements by their names in the format."""
NAMES = {dtype: name for name, dtype in TYPES.items()}


def _safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("files need the package safetensors: pip install 'chorus-mpi[train]'") from error
    return safetensors


def save(path: str | Path, arrays: Mapping[str, QuantizedArray | np.ndarray], about: Any = None) -> None:
    """Write quantised and plain arrays by name, replacing an old file. `about`: metadata that JSON can hold.

    The file has the permissions of new files and a checksum that `load` verifies. An old file is replaced once the
    new one is whole. ValueError for a name or a type of elements that the format does not have.

    >>> import tempfile
    >>> from quant import INT8, quantize
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.safetensors")
    ...     save(path, {"w": quantize(np.ones(3, np.float32), INT8)}, {"of": "ones"})
    ...     load(path)["w"].integers(), about(path)
    (array([127, 127, 127], dtype=int8), {'of': 'ones'})
    """
    path, tensors, meanings = Path(path), {}, {}
    for name, array in arrays.items():
        if not isinstance(name, str) or name == METADATA:
            raise ValueError(f"arrays: expected names of tensors, found {name!r}")
        if isinstance(array, QuantizedArray):
            meanings[name] = {"spec": array.spec.to_dict(), "shape": list(array.shape)}
        tensors[name] = _on_host(name, array.buffer if isinstance(array, QuantizedArray) else array)
    metadata = {KEY: json.dumps(meanings), ABOUT: json.dumps(about)}
    header: dict[str, Any] = {METADATA: metadata | {CHECKSUM: _checksum(metadata, tensors)}}
    ordered, place = sorted(tensors.items(), key=lambda item: -item[1].itemsize), 0  # all are aligned
    for name, tensor in ordered:
        offsets = [place, place := place + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f"{path.name}.{uuid4().hex[:16]}")
    try:
        with unfinished.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in ordered:
                file.write(_bytes(tensor))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _on_host(name: str, array: Any) -> np.ndarray:
    """`array` as a C-contiguous array of NumPy with little-endian elements. ValueError for types not in `TYPES`."""
    host = np.asarray(array.get() if hasattr(array, "get") else array, order="C")
    host = host.astype(host.dtype.newbyteorder("<"), copy=False)
    if host.dtype not in NAMES:
        raise ValueError(f"{name}: expected elements of a type among {', '.join(TYPES)}, found {host.dtype}")
    return host


def _bytes(tensor: np.ndarray) -> Any:
    return tensor.reshape(-1).view(np.uint8).data


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of metadata and tensors, in hexadecimal, for any order of names."""
    about = [[name, NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    digest = sha256(json.dumps([metadata[KEY], metadata[ABOUT], about]).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def load(path: str | Path) -> dict[str, QuantizedArray | np.ndarray]:
    """All arrays of a file, on the host.

    ValueError if it is damaged, by its checksum if it has one, or an array does not match its header entry. ImportError
    without the package safetensors.
    """
    name, metadata, tensors = Path(path).name, _metadata(path), _tensors(path)
    if CHECKSUM in metadata and metadata[CHECKSUM] != _checksum({KEY: "", ABOUT: ""} | metadata, tensors):
        raise ValueError(f"{name} is damaged: its checksum is not that of its contents")
    meanings = _parsed(path, metadata, KEY)
    found: dict[str, QuantizedArray | np.ndarray] = dict(tensors)
    if not isinstance(meanings, dict | None):
        raise ValueError(f"{name}: {KEY} is a {type(meanings).__name__}, not meanings by name")
    for key, meaning in (meanings or {}).items():
        try:
            found[key] = _array(meaning, tensors.get(key))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: {key} is no quantised array: {error}") from error
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
        # a file is not trusted: a negative or huge length must not reach NumPy
        whole_number("a length", n)
        if not 0 <= n <= np.iinfo(np.intp).max:
            raise ValueError(f"no array has the shape {shape}")
    return QuantizedArray(QuantSpec.from_dict(spec), tuple(shape), buffer)


def about(path: str | Path) -> Any:
    """Metadata that `save` wrote as `about`, or None. The checksum is not verified. Otherwise raises as `load` does."""
    return _parsed(path, _metadata(path), ABOUT)


def _metadata(path: str | Path) -> dict[str, str]:
    library = _safetensors()
    try:
        with library.safe_open(str(path), framework="np") as file:
            return file.metadata() or {}
    except library.SafetensorError as error:
        raise _no_file(path, error) from error


def _tensors(path: str | Path) -> dict[str, np.ndarray]:
    library = _safetensors()
    try:
        entries = library.deserialize(Path(path).read_bytes())
        return {
            name: np.frombuffer(bytearray(entry["data"]), TYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in entries
        }
    except (library.SafetensorError, KeyError) as error:
        raise _no_file(path, error) from error


def _parsed(path: str | Path, metadata: Mapping[str, str], key: str) -> Any:
    try:
        return json.loads(metadata.get(key, "null"))
    except (ValueError, RecursionError) as error:
        raise _no_file(path, error) from error


def _no_file(path: str | Path, error: Exception) -> ValueError:
    return ValueError(f"{Path(path).name} is no safetensors file: {error}")
