"""The state of a training, whoever holds which part of it."""

import math

import numpy as np


def whole(comm, made):
    """All tensors of the state, put together from the slices of all ranks; every element comes from one."""
    tensors, cuts = {}, {}
    for slices in comm.allgather([s._replace(array=s.array.copy()) for s in made.tensor_slices() if s.mine]):
        for name, shape, start, values, _, cut, _ in slices:
            if cut is not None:
                cuts.setdefault(name, set()).add(cut)
            tensor, times = tensors.setdefault(name, (np.zeros(math.prod(shape)), np.zeros(math.prod(shape), int)))
            tensor[start : start + len(values)] = values
            times[start : start + len(values)] += 1
    assert all((times == 1).all() for _, times in tensors.values())
    found = {name: tensor for name, (tensor, _) in tensors.items()}
    return {name: ordered(tensor, cuts.get(name, ())) for name, tensor in found.items()}


def ordered(tensor, cuts):
    """A flattened tensor in its own order, from its parts one after another."""
    whole = None
    for cut in cuts:
        whole = np.empty(cut.shape) if whole is None else whole
        size = math.prod(cut.local_shape)
        cut.put(tensor[cut.offset : cut.offset + size].reshape(cut.local_shape), whole)
    return tensor if whole is None else whole.reshape(-1)


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not np.array_equal(one[name], other[name])]


def same(a, b):
    """Whether two states have the same bits."""
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
