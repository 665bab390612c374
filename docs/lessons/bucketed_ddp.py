"""DDP with buckets: gradients are summed over the ranks in groups of layers, while the backward pass goes on.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.

Every rank has all weights, and its own samples of the batch. The sum of the ranks' gradients is the gradient of the
batch. An allreduce per layer costs a latency for each, and one for the whole gradient must wait for the backward pass
to end. So layers are grouped to *buckets* of about equal size, in the order in which the backward pass comes to them:

    backward    dW4      dW3      dW2      dW1      dW0
    network              [ bucket 0: W4 W3 ][ bucket 1: W2 W1 ][ bucket 2: W0 ]    wait for all, then update

A bucket's allreduce starts when its last gradient is computed. One flat vector has all gradients, in that order, so
that a bucket is a slice of it and nothing is copied.
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator


class BucketedGradients:
    """Gradients of weight matrices in one flat vector, the last layer first, and its division into buckets."""

    def __init__(self, weights, comm, bucket_size):
        self.comm, self.requests = comm, []
        self.flat = np.zeros(sum(w.size for w in weights))
        self.views = {}  # gradients by layer
        self.buckets = {}  # buckets by the layer whose gradient, the last of the bucket, completes it
        start = stop = 0  # of the bucket, in flat
        for layer in reversed(range(len(weights))):
            w = weights[layer]
            self.views[layer] = self.flat[stop : stop + w.size].reshape(w.shape)
            stop += w.size
            if stop - start >= bucket_size or layer == 0:
                self.buckets[layer] = self.flat[start:stop]
                start = stop

    def ready(self, layer):
        """Note that a layer's gradient is computed; the last one of a bucket starts the bucket's allreduce."""
        if layer in self.buckets:
            self.requests.append(self.comm.Iallreduce(MPI.IN_PLACE, self.buckets[layer]))

    def wait(self):
        MPI.Request.Waitall(self.requests)
        self.requests.clear()


def backward(weights, saved, dy, gradients):
    """Write the gradient of each layer y = relu(x W) into its view; `saved` has the input and all outputs."""
    for layer in reversed(range(len(weights))):
        x, y = saved[layer], saved[layer + 1]
        dz = dy * (y > 0)
        np.matmul(x.T, dz, out=gradients.views[layer])
        gradients.ready(layer)
        dy = dz @ weights[layer].T  # while buckets are on the network


def step(weights, x, target, count, gradients, rate=0.1):
    """Train on this rank's samples; returns their part of the loss, the mean over `count` numbers of all ranks."""
    saved = [x]
    for w in weights:
        saved.append(np.maximum(saved[-1] @ w, 0))
    loss = np.sum((saved[-1] - target) ** 2) / count
    backward(weights, saved, 2 * (saved[-1] - target) / count, gradients)
    gradients.wait()
    for layer, w in enumerate(weights):
        w -= rate * gradients.views[layer]
    return loss


def main(comm):
    random = np.random.default_rng(0)  # the same numbers on all ranks
    weights = [random.normal(0, 0.4, shape) for shape in ((8, 16), (16, 16), (16, 16), (16, 16), (16, 4))]
    alone = [w.copy() for w in weights]
    x, target, own = random.normal(size=(24, 8)), random.random((24, 4)), slice(comm.rank, None, comm.size)
    gradients = BucketedGradients(weights, comm, bucket_size=300)
    plain = BucketedGradients(alone, Communicator(MPI.COMM_SELF), bucket_size=10**9)
    for _ in range(5):
        loss = comm.allreduce(step(weights, x[own], target[own], target.size, gradients))
        expected = step(alone, x, target, target.size, plain)  # the whole batch on this rank
        np.testing.assert_allclose(loss, expected)
    for w, one in zip(weights, alone):
        np.testing.assert_allclose(w, one, atol=1e-12)
    if comm.rank == 0:
        sizes = ", ".join(str(bucket.size) for bucket in gradients.buckets.values())
        print(f"weights as from the whole batch on one rank, loss {loss:.4f}; buckets of {sizes} numbers")


if __name__ == "__main__":
    main(Communicator(MPI.COMM_WORLD))
