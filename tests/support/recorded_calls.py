"""Arguments of the calls that the stand-in for CuPy recorded, made anew for CuPy."""

import numpy as np


def decoded(cupy, value):
    """An argument of a recorded call, with zeros in its arrays."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return array(cupy, value)
    if "host" in value:
        return np.zeros(value["host"], value["dtype"])
    if "scalar" in value:
        return np.dtype(value["dtype"]).type(value["scalar"])
    if "slice" in value:
        return slice(*(decoded(cupy, part) for part in value["slice"]))
    for kind in (tuple, list):
        if kind.__name__ in value:
            return kind(decoded(cupy, part) for part in value[kind.__name__])
    if "dtype" in value:
        return np.dtype(value["dtype"])
    if "type" in value:
        return {"bool": bool, "float": float, "int": int}.get(value["type"]) or getattr(np, value["type"])
    assert value == {"ellipsis": True}, value
    return ...


def array(cupy, value):
    shape, dtype = tuple(value["array"]), np.dtype(value["dtype"])
    if value["layout"] == "F":
        return cupy.asarray(np.zeros(shape[::-1], dtype)).T
    if value["layout"] == "rows":
        return cupy.asarray(np.zeros((*shape[:-1], shape[-1] + 8), dtype))[..., : shape[-1]]
    if value["layout"] == "gaps" and shape:
        return cupy.asarray(np.zeros((*shape, 2), dtype))[..., 0]
    return cupy.asarray(np.zeros(shape, dtype))
