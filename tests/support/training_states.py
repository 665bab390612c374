"""The state of a training, whoever holds which part of it."""

import math

import numpy as np


def whole(comm, made):
    """All tensors of the state, put together from the slices of all ranks; every element comes from one."""
    tensors = {}
    for slices in comm.allgather([(s.name, s.shape, s.start, s.array.copy()) for s in made.tensor_slices() if s.mine]):
        for name, shape, start, values in slices:
            tensor, times = tensors.setdefault(name, (np.zeros(math.prod(shape)), np.zeros(math.prod(shape), int)))
            tensor[start : start + len(values)] = values
            times[start : start + len(values)] += 1
    assert all((times == 1).all() for _, times in tensors.values())
    return {name: tensor for name, (tensor, _) in tensors.items()}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not np.array_equal(one[name], other[name])]


def same(a, b):
    """Whether two states have the same bits."""
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
