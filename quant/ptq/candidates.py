"""Choice of the candidate of least loss among those that fit a number format."""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

Made = TypeVar("Made")


def least_loss(candidates: Iterable[Callable[[], Made]], loss: Callable[[Made], float]) -> Made:
    """Result of least loss among the candidates' (the first of equal ones). The loss of NaN is infinite.

    A candidate that raises ValueError, as `quantize` does for a scale that does not fit its format, is left out. If
    there is no other, the ValueError of the first is raised.

    >>> least_loss([lambda: 3, lambda: int("x"), lambda: 1, lambda: 2], float)
    1
    """
    best: list[tuple[float, Made]] = []
    refused: list[ValueError] = []
    for candidate in candidates:
        try:
            made = candidate()
        except ValueError as error:
            refused.append(error)
            continue
        found = loss(made)
        found = math.inf if math.isnan(found) else found
        if not best or found < best[0][0]:
            best = [(found, made)]
    if not best:
        raise refused[0]
    return best[0][1]
