"""Copies of models in which some operators are replaced."""

import copy
from collections.abc import Callable

from parallel.nn.operator import Operator


def replaced(
    operator: Operator, replacement: Callable[[Operator], Operator | None], done: dict[int, Operator] | None = None
) -> Operator:
    """Copy of an operator in which, at any depth, those with a `replacement` (None: keep) are replaced.

    Parameters are shared with the original, which is not changed. An operator that occurs twice is replaced once;
    `done` has the results by id.
    """
    done = {} if done is None else done
    if id(operator) not in done:
        ours = replacement(operator)
        if ours is None:
            ours = copy.copy(operator)
            for name, value in vars(operator).items():
                if isinstance(value, Operator):
                    setattr(ours, name, replaced(value, replacement, done))
                elif isinstance(value, list | tuple):
                    items = [replaced(one, replacement, done) if isinstance(one, Operator) else one for one in value]
                    setattr(ours, name, type(value)(items))
        done[id(operator)] = ours
    return done[id(operator)]
