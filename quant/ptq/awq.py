"""AWQ: finer steps for large inputs, by scaling their weights up before rounding and down after.

J. Lin, J. Tang, H. Tang, S. Yang, X. Dang, S. Han, "AWQ: Activation-aware Weight Quantization" (MLSys 2024).
"""

from functools import partial

import numpy as np

from quant.array import QuantizedArray
from quant.formats import as_float32
from quant.ptq.candidates import least_loss
from quant.ptq.gptq import check_moments, product_loss
from quant.quantize import quantize
from quant.spec.quant_spec import QuantSpec


def awq(
    w: np.ndarray, moments: np.ndarray, sizes: np.ndarray, spec: QuantSpec, candidates: int = 20
) -> tuple[QuantizedArray, np.ndarray]:
    """Quantise a weight matrix w times the best scaling s of its inputs. Returns (quantised w s, s).

    w is approximately the result / s. s = (mean|x|)^alpha, normalised to a geometric mean of its largest and smallest
    value of 1, with the alpha among `candidates` values from 0 (plain rounding) to below 1 whose w x is nearest to the
    exact one. An alpha whose w s does not fit `spec` is left out. ValueError if none fits.

    `w` has shape (outputs, inputs), `moments` is X^T X of shape (inputs, inputs), `sizes` the mean |x| of each input.
    S is float32 of shape (inputs,).
    """
    w, sizes = as_float32("w", np.asarray(w)), as_float32("sizes", np.asarray(sizes)).astype(np.float64)
    check_moments(w, moments)
    if sizes.shape != w.shape[1:] or not np.isfinite(sizes).all() or (sizes < 0).any():
        raise ValueError(f"sizes: expected {w.shape[1]} finite numbers, none below 0, found shape {sizes.shape}")
    positive = np.where(sizes > 0, sizes, sizes[sizes > 0].min() if sizes.any() else 1.0)
    middle = np.sqrt(positive.max()) * np.sqrt(positive.min()) if positive.size else 1.0

    def scaled(alpha: float) -> tuple[QuantizedArray, np.ndarray]:
        s = ((positive / middle) ** alpha).astype(np.float32)
        return quantize(w * s, spec, seed=0), s

    def loss(made: tuple[QuantizedArray, np.ndarray]) -> float:
        return product_loss(made[0].dequantize() / made[1].astype(np.float64) - w, moments)

    return least_loss([partial(scaled, number / candidates) for number in range(candidates)], loss)
