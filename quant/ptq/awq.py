"""AWQ: finer steps for large inputs, by scaling their weights up before rounding and down after.

J. Lin, J. Tang, H. Tang, S. Yang, X. Dang, S. Han, "AWQ: Activation-aware Weight Quantization" (MLSys 2024).
"""

import numpy as np

from quant.array import QuantizedArray
from quant.quantize import quantize
from quant.spec.quant_spec import QuantSpec


def awq(
    w: np.ndarray, moments: np.ndarray, sizes: np.ndarray, spec: QuantSpec, candidates: int = 20
) -> tuple[QuantizedArray, np.ndarray]:
    """Quantise a weight matrix w times the best scaling s of its inputs; returns (quantised w s, s).

    w is about its values / s. s = (mean|x|)^alpha, normalised to a geometric mean of its largest and smallest value of
    1, with the alpha among `candidates` values from 0 (plain rounding) to below 1 whose w x is nearest to the exact
    one.

    `w` has shape (outputs, inputs), `moments` is X^T X of shape (inputs, inputs), `sizes` the mean |x| of each input;
    s is float32 of shape (inputs,).
    """
    w = np.asarray(w, np.float32)
    if moments.shape != (w.shape[1],) * 2 or sizes.shape != w.shape[1:]:
        raise ValueError(f"moments of shape {moments.shape}, sizes of {sizes.shape} for weights of {w.shape}")
    positive = np.where(sizes > 0, sizes, sizes[sizes > 0].min(initial=1.0))
    best, least = None, np.inf
    for alpha in np.arange(candidates) / candidates:
        s = positive**alpha
        s = (s / np.sqrt(s.max() * s.min())).astype(np.float32)
        q = quantize(w * s, spec, seed=0)
        off = (q.dequantize() / s - w).astype(np.float64)
        loss = float(np.einsum("oi,ij,oj->", off, moments, off, optimize=True))
        if best is None or loss < least:
            best, least = (q, s), loss
    assert best is not None
    return best
