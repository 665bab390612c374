"""Scalar float32 functions for numba (exp, logistic, normal distribution) without branches, so that loops vectorise.

Products and sums may be fused. NaN stays NaN. Needs numba.
"""

# mypy: ignore-errors
# numba infers other types than Python annotations could express.

import math

import numpy as np

from quant.kernels.jit import njit

F = np.float32
ZERO, HALF, ONE = F(0), F(0.5), F(1)

inlined = njit(fastmath={"contract"}, error_model="numpy", forceinline=True)

_LOWEST = F(-87.0)  # exp of less is 0: almost the smallest normal number, 1.2e-38
_LOG2_E = F(1.44269504088896341)
_SHIFT = F(1.5 * 2**23)  # once added, the last digit of a float32 is that of an integer
_LN2_HIGH, _LN2_LOW = F(0.693359375), F(-2.12194440e-4)
_E0, _E1, _E2, _E3, _E4, _E5 = map(
    F, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
_BIAS, _MANTISSA = np.int32(127), np.int32(23)


@inlined
def exp_down(x):
    """Exponential exp(x) for x below 88, accurate to 2 units in the last place; 0 for x below -87.

    exp(n ln 2 + r) = 2^n exp(r): method and coefficients of expf in the Cephes library (S. Moshier, netlib.org/cephes).
    """
    bounded = _LOWEST if x < _LOWEST else x
    shifted = bounded * _LOG2_E + _SHIFT
    n = shifted - _SHIFT
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _E0 * r + _E1
    p = p * r + _E2
    p = p * r + _E3
    p = p * r + _E4
    p = p * r + _E5
    p = p * (r * r) + r + ONE
    power = np.int32((np.float32(shifted).view(np.int32) + _BIAS) << _MANTISSA)
    return ZERO if x < _LOWEST else p * power.view(np.float32)


@inlined
def logistic(x):
    """Logistic function 1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow."""
    e = exp_down(-abs(x))
    return (e if x < ZERO else ONE) / (ONE + e)


_T = F(0.42)
_C = (0.2368222028, 0.2396162599, 0.1945401877, 0.2693445683, -0.1316446215, 0.4418688715, -0.3209409416, 0.07039331645)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = map(F, _C)
_ROOT_HALF, _DENSITY_AT_0 = F(math.sqrt(0.5)), F(1 / math.sqrt(2 * math.pi))


@inlined
def normal(x):
    """Normal distribution and its density at x, (Phi(x), phi(x)), both from one exponential.

    erfc(z) = exp(-z^2) t P(t) with t = 1 / (1 + 0.42 z) and z = |x| / sqrt 2: the form of formula 7.1.26 of Abramowitz
    and Stegun, "Handbook of Mathematical Functions" (1964), with eight coefficients, a minimax fit for z up to 9.4
    (beyond, erfc is 0 in float32): relative error 1.7e-7.
    """
    z = abs(x) * _ROOT_HALF
    e = exp_down(-(z * z))
    t = ONE / (ONE + _T * z)
    p = _C7 * t + _C6
    p = p * t + _C5
    p = p * t + _C4
    p = p * t + _C3
    p = p * t + _C2
    p = p * t + _C1
    p = p * t + _C0
    tail = HALF * e * (p * t)
    return (tail if x < ZERO else ONE - tail), e * _DENSITY_AT_0
