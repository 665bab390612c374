"""SSP server: workers of unequal speed train one vector of weights, the fastest at most s steps ahead of the slowest.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013, section 3.

Rank 0 is the server and has the weights w. The others are workers with samples of their own. A worker's clock counts
its finished steps. In a step it computes a gradient, sends it to the server and receives new weights:

    worker      gradient at w --------------> server      w -= rate * gradient,  clock[worker] += 1
    worker      waits         <-- new w ----- server      if clock[worker] - min(clock) <= s; otherwise later

With s = 0 every worker waits for all others (BSP): the sum of the gradients of a step is the gradient of the batch.
With s > 0 a fast worker goes on with weights in which up to s steps of slower workers are missing. Gradients are then a
little old, but nobody waits for a worker that is slow only now and then. Without a limit (s = inf, asynchronous) they
may be of any age, and training may diverge.
"""

import time

import numpy as np
from mpi4py import MPI

SERVER = 0


def serve(comm, w, steps, staleness, rate):
    """Update w until every worker has done its steps; returns how far workers were ahead when they received weights."""
    clock = dict.fromkeys(range(1, comm.size), 0)
    waiting, leads, gradient, status = [], [], np.empty_like(w), MPI.Status()
    while min(clock.values()) < steps:
        comm.Recv(gradient, MPI.ANY_SOURCE, status=status)
        worker = status.Get_source()
        w -= rate * gradient
        clock[worker] += 1
        waiting.append(worker)
        for worker in waiting.copy():
            lead = clock[worker] - min(clock.values())
            if lead <= staleness:
                comm.Send(w, worker)
                waiting.remove(worker)
                leads.append(lead)
    return leads


def work(comm, w, steps, gradient, delay=0.0):
    """Do the steps of one worker; `delay` in seconds makes it slow."""
    for _ in range(steps):
        time.sleep(delay)
        comm.Send(gradient(w), SERVER)
        comm.Recv(w, SERVER)


def train(comm, w, x, target, steps, staleness, rate=0.1, delay=0.0):
    """Least squares |x w - target|^2 / n, with samples dealt to the workers; returns the server's w and its leads."""
    if comm.size < 2:
        raise ValueError("expected at least 2 ranks: a server and a worker")
    leads = None
    if comm.rank == SERVER:
        leads = serve(comm, w, steps, staleness, rate)
    else:
        own = slice(comm.rank - 1, None, comm.size - 1)
        work(comm, w, steps, lambda w: 2 * x[own].T @ (x[own] @ w - target[own]) / len(x), delay)
    return comm.bcast(w, root=SERVER), comm.bcast(leads, root=SERVER)


def main(comm):
    random = np.random.default_rng(0)  # the same numbers on all ranks
    x = random.normal(size=(60, 5))
    solution = random.normal(size=5)
    target = x @ solution

    w, leads = train(comm, np.zeros(5), x, target, steps=20, staleness=0)
    plain = np.zeros(5)
    for _ in range(20):
        plain -= 0.1 * 2 * x.T @ (x @ plain - target) / len(x)
    np.testing.assert_allclose(w, plain)
    assert set(leads) == {0}

    slow = 0.002 if comm.rank == comm.size - 1 else 0.0
    w, leads = train(comm, np.zeros(5), x, target, steps=100, staleness=3, delay=slow)
    np.testing.assert_allclose(w, solution, atol=1e-3)
    assert max(leads) <= 3
    if comm.rank == SERVER:
        print(f"staleness 0: as on one rank. Staleness 3: the fastest worker was {max(leads)} steps ahead at most")


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
