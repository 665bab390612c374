"""Expert dispatch: tokens travel to the ranks of their experts, results travel back, each by one all-to-all.

Lepikhin et al., "GShard", ICLR 2021; with one expert per token: Fedus et al., "Switch Transformers", JMLR 23 (2022).

A router gives each token x a probability for every expert, and the token goes to the expert e with the highest one:

    y = prob_e relu(x W_e)

Every rank has tokens of its own and a block of the experts. It sorts its tokens by expert, so that the rows for each
rank are neighbours. With experts 0 and 1 on rank 0, 2 and 3 on rank 1:

    rank 0: tokens a b c choose 2 0 3    sorted: b | a c      rank 0 receives b from itself, d f e from rank 1
    rank 1: tokens d e f choose 0 1 0    sorted: d f e |      rank 1 receives a c from rank 0

An all-to-all exchanges the counts, a second one the rows, a third one the results, with the counts of sent and received
rows swapped. In the backward pass gradients of results travel as tokens did, and gradients of tokens as results did.
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator


def exchange(comm, rows, sends, receives):
    """Send the next sends[r] rows to each rank r; returns the receives[r] rows from each, in the order of ranks."""
    width = rows.shape[1]
    arrived = np.empty((receives.sum(), width))
    comm.Alltoallv([rows, sends * width], [arrived, receives * width])
    return arrived


class Mixture:
    """The experts of this rank, and the router, which is the same on all ranks."""

    def __init__(self, comm, router, experts):
        if len(experts) % comm.size:
            raise ValueError(f"experts: expected a multiple of {comm.size} ranks, found {len(experts)}")
        self.comm, self.router, self.own = comm, router, np.split(experts, comm.size)[comm.rank]

    def forward(self, x):
        e = np.exp(x @ self.router)
        prob = e / e.sum(axis=1, keepdims=True)
        gate, expert = prob.max(axis=1, keepdims=True), prob.argmax(axis=1)
        order = np.argsort(expert, kind="stable")  # tokens by expert, and so by rank
        counts = np.bincount(expert, minlength=prob.shape[1]).reshape(self.comm.size, -1)  # [rank, expert there]
        arriving = np.empty_like(counts)  # [source, own expert]
        self.comm.Alltoall(counts, arriving)
        sends, receives = counts.sum(axis=1), arriving.sum(axis=1)
        rows = exchange(self.comm, x[order], sends, receives)
        expert_of_row = np.repeat(np.tile(np.arange(len(self.own)), self.comm.size), arriving.ravel())
        mine = [expert_of_row == number for number in range(len(self.own))]  # rows of each own expert
        outputs = np.empty_like(rows)
        for w, here in zip(self.own, mine):
            outputs[here] = np.maximum(rows[here] @ w, 0)
        results = np.empty_like(x)
        results[order] = exchange(self.comm, outputs, receives, sends)
        return gate * results, (x, prob, gate, expert, order, sends, receives, rows, mine, outputs, results)

    def backward(self, dy, saved):
        """Gradients with respect to x, the own experts, and this rank's term of the router's gradient."""
        x, prob, gate, expert, order, sends, receives, rows, mine, outputs, results = saved
        dh = exchange(self.comm, (gate * dy)[order], sends, receives) * (outputs > 0)
        drows, dw = np.empty_like(rows), np.empty_like(self.own)
        for number, here in enumerate(mine):
            dw[number] = rows[here].T @ dh[here]
            drows[here] = dh[here] @ self.own[number].T
        dx = np.empty_like(x)
        dx[order] = exchange(self.comm, drows, receives, sends)
        dlogits = np.sum(dy * results * gate, axis=1, keepdims=True) * (np.eye(prob.shape[1])[expert] - prob)
        return dx + dlogits @ self.router.T, dw, x.T @ dlogits


def plain(router, experts, x):
    """All tokens and experts on one rank."""
    e = np.exp(x @ router)
    prob = e / e.sum(axis=1, keepdims=True)
    return prob.max(axis=1, keepdims=True) * np.maximum(np.einsum("ti,tij->tj", x, experts[prob.argmax(axis=1)]), 0)


def main(comm):
    random = np.random.default_rng(0)  # the same numbers on all ranks
    *whole, dy = (random.normal(size=shape) for shape in ((4, 12), (12, 4, 4), (24, 4), (24, 4)))
    router, experts, x = whole
    own, mixture = slice(comm.rank, None, comm.size), Mixture(comm, router, experts)
    y, saved = mixture.forward(x[own])
    dx, dw, drouter = mixture.backward(dy[own], saved)
    np.testing.assert_allclose(y, plain(*whole)[own])
    d = [random.normal(size=one.shape) for one in whole]  # a direction: the slope of sum(dy y) along it, in two ways
    slope = np.sum(drouter * d[0]) + np.sum(dw * np.split(d[1], comm.size)[comm.rank]) + np.sum(dx * d[2][own])
    up, down = (plain(*(one + h * way for one, way in zip(whole, d))) for h in (1e-6, -1e-6))
    np.testing.assert_allclose(comm.allreduce(slope), np.sum(dy * (up - down)) / 2e-6, rtol=1e-6)
    if comm.rank == 0:
        print(f"as with all experts on one rank; tokens for each rank: {saved[5].tolist()}")


if __name__ == "__main__":
    main(Communicator(MPI.COMM_WORLD))
