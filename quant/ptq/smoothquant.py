"""SmoothQuant: scaling that moves outliers from activations to weights, per input.

G. Xiao, J. Lin, M. Seznec, H. Wu, J. Demouth, S. Han, "SmoothQuant" (ICML 2023).
"""

import numpy as np

from quant.formats import as_float32


def smoothing(largest: np.ndarray, w: np.ndarray, alpha: float = 0.5) -> np.ndarray:
    """Factor s of each input: activations are to be divided by s, and the columns of w multiplied by s.

    s = max|x|^alpha / max|w|^(1 - alpha): alpha = 1 equalises activations, 0 equalises weights.

    `largest` is the largest |x| of each input (from an observer per channel), `w` has shape (outputs, inputs). The
    result is float32, and 1 for inputs whose activations or weights are all 0.

    >>> smoothing(np.array([100.0, 1.0]), np.array([[1.0, 1.0]]))
    array([10.,  1.], dtype=float32)
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected 0 to 1, found {alpha}")
    largest, w = (as_float32(name, np.asarray(x)) for name, x in (("largest", largest), ("w", w)))
    if w.ndim != 2 or largest.shape != w.shape[1:]:
        raise ValueError(f"largest of shape {largest.shape} for weights of shape {w.shape}")
    if not (np.isfinite(largest).all() and np.isfinite(w).all()):
        raise ValueError("largest and w: expected finite numbers")
    weights = abs(w).max(axis=0, initial=0).astype(np.float64)
    usable = (largest > 0) & (weights > 0)
    s = np.where(usable, largest.astype(np.float64), 1.0) ** alpha / np.where(usable, weights, 1.0) ** (1 - alpha)
    return s.astype(np.float32)
