"""SmoothQuant: what is hard to quantise is moved from activations to weights, input by input.

G. Xiao, J. Lin, M. Seznec, H. Wu, J. Demouth, S. Han, "SmoothQuant" (ICML 2023).
"""

from __future__ import annotations

import numpy as np


def smoothing(largest: np.ndarray, w: np.ndarray, alpha: float = 0.5) -> np.ndarray:
    """s for every input: activations are divided by it, and the weights' columns multiplied with it.

    s = max|x|^alpha / max|w|^(1 - alpha): with alpha = 1 activations all become equally large, with 0 the weights do.

    Parameters
    ----------
    largest : array of floats, shape (inputs,)
        The largest |x| of each input, as an observer per channel saw it.
    w : array of floats, shape (outputs, inputs)
    alpha : float
        From 0 to 1.

    Returns
    -------
    array of float32, shape (inputs,)
        1 for inputs whose activations or weights are all 0.

    Examples
    --------
    >>> smoothing(np.array([100.0, 1.0]), np.array([[1.0, 1.0]]))
    array([10.,  1.], dtype=float32)
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is from 0 to 1, not {alpha}")
    weights = abs(w).max(axis=0, initial=0).astype(np.float64)
    usable = (largest > 0) & (weights > 0)
    s = np.where(usable, largest, 1.0) ** alpha / np.where(usable, weights, 1.0) ** (1 - alpha)
    return s.astype(np.float32)
