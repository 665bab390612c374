"""ZeRO-3: each of p ranks stores 1/p of weights, gradients and optimizer state; one layer at a time is made whole.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.

Plain data parallelism (DDP) stores four numbers per weight on every rank: weight, gradient, and two moments of Adam.
Here each layer's W is flattened and cut into p equal shards. Rank r stores shard r of all four. One step:

    forward,  first to last layer:  all-gather W;  y = relu(x W);              drop W
    backward, last to first layer:  all-gather W;  dz = dy where y > 0, else 0;  dx = dz W^T;  drop W
                                    dW = x^T dz;  reduce-scatter dW: rank r gets shard r of the sum;  drop dW
    update:                         Adam on the own shard, without messages

Ranks have different samples. Losses are divided by the number of outputs of the whole batch: the sum of dW is its
gradient. The three exchanges send (p-1)/p numbers per weight and rank each; the allreduce of DDP is two of them.
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator


def cut(w, ranks):
    """Flatten w and cut it into equal shards, one a row. Zeros at the end fill them."""
    shards = np.zeros((ranks, -(-w.size // ranks)))
    shards.ravel()[: w.size] = w.ravel()
    return shards


def adam(w, grad, m, v, t, rate=0.01, beta1=0.9, beta2=0.999):
    """Update w and its moments in place; t counts from 1. (Kingma and Ba, ICLR 2015.)"""
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad**2 - v)
    w -= rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + 1e-8)


class Layer:
    """y = relu(x W). The layer stores shards; W exists only inside `forward` and `backward`."""

    def __init__(self, w, comm):
        self.comm, self.shape = comm, w.shape
        self.shard = cut(w, comm.size)[comm.rank].copy()
        self.grad, self.m, self.v = np.zeros((3, self.shard.size))

    def gather(self):
        self.comm.Allgather(self.shard, shards := np.empty((self.comm.size, self.shard.size)))
        return shards.ravel()[: np.prod(self.shape)].reshape(self.shape)  # W; not kept: Python frees it after its use

    def forward(self, x):
        self.x, self.y = x, np.maximum(x @ self.gather(), 0)  # of this rank's samples, until `backward`
        return self.y

    def backward(self, dy):
        dz = dy * (self.y > 0)
        dx, dw = dz @ self.gather().T, self.x.T @ dz
        self.comm.Reduce_scatter_block(cut(dw, self.comm.size), self.grad)  # overwrites that of the last step
        return dx


def step(layers, x, target, count, t):
    """Train on this rank's samples; returns their part of the loss. `count` is the number of outputs of all ranks."""
    for layer in layers:
        x = layer.forward(x)
    loss, dy = np.sum((x - target) ** 2) / count, 2 * (x - target) / count
    for layer in reversed(layers):
        dy = layer.backward(dy)
    for layer in layers:
        adam(layer.shard, layer.grad, layer.m, layer.v, t)
    return loss


def plain_step(weights, moments, x, target, t):
    """Do the same on one process, with all samples and whole weights."""
    saved = [x]
    for w in weights:
        saved.append(np.maximum(saved[-1] @ w, 0))
    dy = 2 * (saved[-1] - target) / target.size
    for w, (m, v) in zip(weights[::-1], moments[::-1]):
        dz = dy * (saved.pop() > 0)  # that was y, and saved[-1] is x
        dy = dz @ w.T
        adam(w, saved[-1].T @ dz, m, v, t)


def main(comm):
    random = np.random.default_rng(0)  # the same numbers on all ranks
    weights = [random.normal(0, (2 / a) ** 0.5, (a, b)) for a, b in ((8, 33), (33, 33), (33, 4))]
    x, target, own = random.normal(size=(24, 8)), random.random((24, 4)), slice(comm.rank, None, comm.size)
    layers, moments = [Layer(w, comm) for w in weights], [np.zeros((2, *w.shape)) for w in weights]
    for t in range(1, 6):
        loss = comm.allreduce(step(layers, x[own], target[own], target.size, t))
        plain_step(weights, moments, x, target, t)
    for layer, w in zip(layers, weights):
        np.testing.assert_allclose(layer.gather(), w, rtol=0, atol=1e-9)
    if comm.rank == 0:
        print(f"as plain training, loss {loss:.4f}; stores {sum(layer.shard.size for layer in layers)} of the weights")


if __name__ == "__main__":
    main(Communicator(MPI.COMM_WORLD))
