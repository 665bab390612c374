"""HQQ: zero points that minimise an outlier-robust norm, without data.

H. Badri, A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (Mobius Labs, 2023).
"""

import numpy as np

from quant.array import QuantizedArray
from quant.formats import as_float32
from quant.quantize import quantize
from quant.scaling.scales import spread
from quant.spec.granularity import to_rows
from quant.spec.quant_spec import QuantSpec


def hqq(
    w: np.ndarray, spec: QuantSpec, norm: float = 0.7, beta: float = 10.0, growth: float = 1.01, steps: int = 20
) -> QuantizedArray:
    """Quantise weights with the usual scales, and zero points that minimise an outlier-robust error.

    Minimises sum |w - S (q - Z)|^norm over Z, 0 < norm < 1: smaller norms weigh outliers less. The loss is split into
    a sparse error e and a quadratic term weighted with beta. Both are solved for in turn while beta grows, in at most
    `steps` steps, until the loss stops falling. ValueError unless the spec is linear with floating-point zero points.
    """
    if not spec.linear or spec.symmetric or spec.zero == "integer":
        raise ValueError(f"spec: expected linear codes with floating-point zeros, found {spec}")
    w = as_float32("w", np.asarray(w))
    best = quantize(w, spec, seed=0)
    if not best.size:
        return best
    # In float64: far from 0, a zero point has few digits of float32 left after the point.
    rows = to_rows(w, spec.granularity).astype(np.float64)
    blocks = best.layout.blocks
    starts = np.arange(0, blocks.length, blocks.size)
    counts = np.diff(np.append(starts, blocks.length))
    scales = np.where(best.scales() == 0, np.float32(1), best.scales())
    spread_scales = spread(scales, blocks)
    least = _loss(w, best, norm)
    current = best
    for _ in range(steps):
        off = rows - to_rows(current.dequantize(), spec.granularity)
        # Proximal step of the norm: small differences shrink to 0, large ones stay almost unchanged.
        size = np.maximum(abs(off), 1e-30)
        error = np.sign(off) * np.maximum(size - size ** (norm - 1) / beta, 0)
        q = to_rows(current.integers(), spec.granularity)
        zeros = np.add.reduceat(q - (rows - error) / spread_scales, starts, axis=1) / counts
        current = quantize(w, spec, seed=0, scales=scales, zeros=zeros)
        loss = _loss(w, current, norm)
        if loss >= least:
            break
        best, least = current, loss
        beta *= growth
    return best


def _loss(w: np.ndarray, q: QuantizedArray, norm: float) -> float:
    return float((abs(q.dequantize().astype(np.float64) - w) ** norm).sum())
