"""Error function of arrays in float32 and float64."""

import math

from parallel.nn.kernels.storage import FLOAT64, array_namespace
from quant.types import Array

# float32: x + x P(x^2) for small x, and 1 - exp(R(|x|)) beyond; the minimax polynomials are N. Juffa's (2014).
_NEAR = (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
_FAR = (-1.7285347e-5, 3.83197126e-4, -3.88396438e-3, 0.0242546219, -0.106777877, -0.634846687, -0.128717512, 0.0)

# float64: W. J. Cody, "Rational Chebyshev Approximations for the Error Function", Math. Comp. 23 (1969), in the
# coefficients of his CALERF: erf below _SMALL, erfc up to 4, erfc beyond.
_SMALL = 0.46875
_A = (1.85777706184603153e-1, 3.1611237438705656, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3)
_B = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_C = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e1,
    2.98635138197400131e2,
    8.81952221241769090e2,
    1.71204761263407058e3,
    2.05107837782607147e3,
    1.23033935479799725e3,
)
_D = (
    1.0,
    1.57449261107098347e1,
    1.17693950891312499e2,
    5.37181101862009858e2,
    1.62138957456669019e3,
    3.29079923573345963e3,
    4.36261909014324716e3,
    3.43936767414372164e3,
    1.23033935480374942e3,
)
_P = (
    1.63153871373020978e-2,
    3.05326634961232344e-1,
    3.60344899949804439e-1,
    1.25781726111229246e-1,
    1.60837851487422766e-2,
    6.58749161529837803e-4,
)
_Q = (
    1.0,
    2.56852019228982242e0,
    1.87295284992346725e0,
    5.27905102951428412e-1,
    6.05183413124413191e-2,
    2.33520497626869185e-3,
)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Evaluate a polynomial at x by Horner's rule. `coefficients` start with the highest power."""
    y = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        y += coefficient
        y *= x
    y += coefficients[-1]
    return y


def erf(x: Array) -> Array:
    """Error function of float32 (error below 1e-7) or float64 (a few units in the last place)."""
    return _erf64(x) if x.dtype == FLOAT64 else _erf32(x)


def _erf32(x: Array) -> Array:
    xp = array_namespace(x)
    size = xp.minimum(xp.absolute(x), 4)  # beyond 3.92, erf is 1 in float32
    near = _polynomial(_NEAR, size * size)
    near *= size
    near += size
    far = _polynomial(_FAR, size)
    far -= size
    far = 1 - xp.exp(far, out=far)
    return xp.copysign(xp.where(size <= 0.927734375, near, far), x)


def _erf64(x: Array) -> Array:
    xp = array_namespace(x)
    size = xp.absolute(x)
    near = xp.minimum(size, _SMALL)
    inner = near * _polynomial(_A, near * near) / _polynomial(_B, near * near)
    middle = xp.clip(size, _SMALL, 4)
    ratio = _polynomial(_C, middle) / _polynomial(_D, middle)
    far = xp.clip(size, 4, 6)  # beyond 5.93, erf is 1 in float64
    inverse = 1 / (far * far)
    tail = (1 / math.sqrt(math.pi) - inverse * _polynomial(_P, inverse) / _polynomial(_Q, inverse)) / far
    outer = 1 - xp.where(size <= 4, ratio, tail) * xp.exp(-(xp.minimum(size, 6) ** 2))
    y = xp.copysign(xp.where(size <= _SMALL, inner, outer), x)
    return xp.where(x != x, x, y)
