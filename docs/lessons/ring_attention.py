"""Ring attention: queries stay on their rank, keys and values go round the ring, so no rank has the whole sequence.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", ICLR 2024. The running
softmax: Milakov and Gimelshein 2018; the backward pass: Dao et al., "FlashAttention", NeurIPS 2022, algorithm 4.

Rank r has block r of the positions. In step i it computes with the keys and values of rank r-i, while it sends them to
rank r+1 and receives the next ones:

    step       rank 0    rank 1    rank 2
      0         kv 0      kv 1      kv 2
      1         kv 2      kv 0      kv 1
      2         kv 1      kv 2      kv 0

A softmax needs all scores of a query, which never exist together. So each query keeps three sums over the keys so far:
m, the largest score; l, the sum of exp(score - m); o, the sum of exp(score - m) v. If a block raises m to m', both
sums are multiplied by exp(m - m'). The result is o / l.
"""

import numpy as np
from mpi4py import MPI


def shift(comm, block):
    """Start to send a block to the right and to receive one from the left; returns the requests and the new block."""
    incoming = np.empty_like(block)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    return [comm.Isend(block, right), comm.Irecv(incoming, left)], incoming


def scores(q, k, q_block, k_block):
    """Scores of this rank's queries with the keys of a block; -inf for keys later than the query (causal mask)."""
    n = len(q)
    later = k_block * n + np.arange(n) > (q_block * n + np.arange(n))[:, None]
    return np.where(later, -np.inf, q @ k.T / np.sqrt(q.shape[1]))


def forward(comm, q, k, v):
    """Attention of this rank's queries to all keys: output, and log of the sum of exp(score) for each query."""
    kv, m, l, o = np.stack([k, v]), np.full((len(q), 1), -np.inf), 0.0, 0.0
    for step in range(comm.size):
        requests, incoming = shift(comm, kv)
        s = scores(q, kv[0], comm.rank, (comm.rank - step) % comm.size)
        highest = np.maximum(m, s.max(axis=1, keepdims=True))
        e, old = np.exp(s - highest), np.exp(m - highest)
        l = l * old + e.sum(axis=1, keepdims=True)
        o = o * old + e @ kv[1]
        m = highest
        MPI.Request.Waitall(requests)
        kv = incoming
    return o / l, m + np.log(l)


def backward(comm, q, k, v, o, log_sum, do):
    """Gradients of this rank's q, k, v. Those of keys and values travel with them, and are home after p steps."""
    block, dq, root = np.stack([k, v, np.zeros_like(k), np.zeros_like(v)]), np.zeros_like(q), np.sqrt(q.shape[1])
    for step in range(comm.size):
        k, v, dk, dv = block
        p = np.exp(scores(q, k, comm.rank, (comm.rank - step) % comm.size) - log_sum)  # softmax, computed again
        ds = p * (do @ v.T - np.sum(do * o, axis=1, keepdims=True))
        dq += ds @ k / root
        dk += ds.T @ q / root
        dv += p.T @ do
        requests, incoming = shift(comm, block)
        MPI.Request.Waitall(requests)
        block = incoming
    return dq, block[2], block[3]


def main(comm):
    n, d = 5, 4  # positions of each rank; width
    q, k, v, do = np.random.default_rng(0).normal(size=(4, n * comm.size, d))  # whole, the same on all ranks
    own = slice(n * comm.rank, n * (comm.rank + 1))
    o, log_sum = forward(comm, q[own], k[own], v[own])
    gradients = backward(comm, q[own], k[own], v[own], o, log_sum, do[own])

    e = np.exp(q @ k.T / np.sqrt(d)) * np.tri(len(q))  # the whole sequence
    p = e / e.sum(axis=1, keepdims=True)
    dp = do @ v.T
    ds = p * (dp - np.sum(dp * p, axis=1, keepdims=True)) / np.sqrt(d)
    np.testing.assert_allclose(o, (p @ v)[own])
    for found, expected in zip(gradients, (ds @ k, ds.T @ q, p.T @ do)):
        np.testing.assert_allclose(found, expected[own], atol=1e-12)
    if comm.rank == 0:
        print(f"output and gradients as of the whole sequence; {n} of {len(q)} positions on each rank")


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
