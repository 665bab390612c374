"""1F1B: a pipeline of p stages, one on each rank, that in its middle does one forward and one backward pass in turn.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2.

Rank s is stage s, with layer s. The batch is cut into m micro-batches. The forward pass F of a micro-batch needs the
output of rank s-1, its backward pass B the gradient from rank s+1. Here p = 3, m = 5; B (two products) takes 2, F 1:

    rank 0   F0 F1 F2             B0--- F3 B1--- F4 B2---    B3---    B4---
    rank 1      F0 F1       B0--- F2 B1--- F3 B2--- F4 B3---    B4---
    rank 2         F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4---

Rank s does p-s-1 F (warm-up; at most m), then F and B in turn (steady state), then the remaining B (cool-down): p-s F
come before its first B. So it keeps x and y of p-s micro-batches at most; GPipe, with all F before all B, of m. In both
each rank is idle (p-1) / (m+p-1) of the time. Losses are divided by the batch's number of outputs: gradients add up.
"""

import numpy as np
from mpi4py import MPI


def schedule(stage, stages, microbatches):
    """Actions of a stage in order."""
    warm_up = min(stages - stage - 1, microbatches)
    actions = [("F", k) for k in range(warm_up)]
    for k in range(microbatches - warm_up):
        actions += [("F", warm_up + k), ("B", k)]
    return actions + [("B", k) for k in range(microbatches - warm_up, microbatches)]


class Stage:
    """y = relu(x W). Keeps x and y of each micro-batch between its F and its B."""

    def __init__(self, w):
        self.w, self.grad, self.saved = w, np.zeros_like(w), {}

    def forward(self, k, x):
        y = np.maximum(x @ self.w, 0)
        self.saved[k] = x, y
        return y

    def backward(self, k, dy):
        x, y = self.saved.pop(k)
        dz = dy * (y > 0)
        self.grad += x.T @ dz
        return dz @ self.w.T


def step(comm, stage, x, target):
    """Run all F and B of micro-batches x[k], target[k]; returns the loss and the most micro-batches saved at once."""
    before, after, last = comm.rank - 1, comm.rank + 1, comm.rank == comm.size - 1
    loss, most, sends = 0.0, 0, dict.fromkeys((before, after), MPI.REQUEST_NULL)  # no message to them yet

    def receive(source):
        comm.Recv(array := np.empty_like(x[0]), source)  # without tags: F and B take micro-batches in order
        return array

    def send(array, to):  # non-blocking: neighbours that send to each other at the same time would wait for ever
        sends[to].Wait()  # ends: until `to` takes our message before this one, it needs no later one of ours
        sends[to] = comm.Isend(array, to)  # keeps the array

    for action, k in schedule(comm.rank, comm.size, len(x)):
        if action == "F":
            y = stage.forward(k, x[k] if comm.rank == 0 else receive(before))
            most = max(most, len(stage.saved))
            if last:
                loss += np.sum((y - target[k]) ** 2) / target.size
            else:
                send(y, after)
        else:
            dy = 2 * (stage.saved[k][1] - target[k]) / target.size if last else receive(after)
            dx = stage.backward(k, dy)
            if comm.rank > 0:
                send(dx, before)
    MPI.Request.Waitall(list(sends.values()))
    return comm.bcast(loss, root=comm.size - 1), most


def main(comm):
    random = np.random.default_rng(0)  # the same numbers on all ranks
    weights = random.normal(0, 0.5, (comm.size, 8, 8))
    x, target = random.normal(size=(5, 4, 8)), random.random((5, 4, 8))  # 5 micro-batches of 4 samples
    stage = Stage(weights[comm.rank])
    loss, most = step(comm, stage, x, target)
    stages, y = [Stage(w) for w in weights], x.reshape(20, 8)  # all layers, and the batch as one micro-batch, 0
    for one in stages:
        y = one.forward(0, y)
    dy = 2 * (y - target.reshape(20, 8)) / target.size
    np.testing.assert_allclose(loss, np.mean((y - target.reshape(20, 8)) ** 2))
    for one in reversed(stages):
        dy = one.backward(0, dy)
    np.testing.assert_allclose(stage.grad, stages[comm.rank].grad, atol=1e-12)
    done = " ".join(f"{action}{k}" for action, k in schedule(comm.rank, comm.size, len(x)))
    lines = comm.gather(f"rank {comm.rank}: {done}, at most {most} saved, gradient as without a pipeline")
    if comm.rank == 0:
        print(*lines, sep="\n")


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
