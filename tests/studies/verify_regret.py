"""Compare the regret of stale synchronous (SSP) training with its theoretical bound.

mpiexec -n 5 python tests/studies/verify_regret.py
mpiexec -n 5 python tests/studies/verify_regret.py --plot out/regret.png

Multinomial logistic regression on the digits, a convex problem. Each of P workers reads weights that lack at most the
last s clocks of others; x_t are the weights that gradient t was computed from, f_t is the mean loss of its samples. For
gradient descent with the rate sigma / sqrt(t), sigma = F / (L sqrt(2 (s+1) P)),

    1/T sum_t f_t(x_t) - f_t(x*)  <=  4 F L sqrt(2 (s+1) P / T)

(Ho et al., NIPS 2013, theorem 1). L = sqrt(2) max |(x, 1)| bounds the norm of a gradient. All weights must stay within
a ball of radius R around zero, so that half the square of a distance is at most F^2 = 2 R^2; x* is the best point of
the ball. Rates change between steps, not within one, and lag behind sigma / sqrt(t) by less than a step's parts. The
first rank is the server. Exit status 1 if a regret is above its bound, or weights left the ball.
"""

import math
from pathlib import Path

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.arguments import numbers
from collectives.cli.launcher import at_least, say
from parallel.asynchronous.server.server_engine import ParameterServer
from parallel.data import datasets
from parallel.data.datasets import ArrayDataset
from parallel.data.sampler import OnDemandSampler, Sampler
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.linear import Linear
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.operator import constant
from parallel.optim.optimizers import SGD

BATCH = 8  # samples of a gradient
RADIUS, DELAY = 12.0, 0.001  # radius of the ball, and additional seconds of a gradient
DESCENTS = 1000  # steps of the search for the best point


def losses(weights: np.ndarray, data: ArrayDataset) -> np.ndarray:
    """Cross-entropy loss of each sample for a linear classifier; the last row of `weights` is the bias."""
    scores = data.x @ weights[:-1] + weights[-1]
    scores -= scores.max(1, keepdims=True)
    by_sample: np.ndarray = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(data)), data.y]
    return by_sample


def best(data: ArrayDataset, steepest: float) -> np.ndarray:
    """Weights of the smallest mean loss in the ball of radius `RADIUS`; `steepest` bounds the gradient's norm."""
    x = np.hstack([data.x, np.ones((len(data), 1))]).astype(np.float64)
    here = before = np.zeros((x.shape[1], int(data.y.max()) + 1))
    rate = 2 / steepest**2
    for step in range(DESCENTS):
        ahead = here + step / (step + 3) * (here - before)
        shares = np.exp(x @ ahead - (x @ ahead).max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        shares[np.arange(len(x)), data.y] -= 1
        before, here = here, ahead - rate * (x.T @ shares) / len(x)
        here = here * min(1.0, RADIUS / np.linalg.norm(here))
    return here


def train(comm: Communicator, data: ArrayDataset, staleness: int, sigma: float, steps: int) -> tuple[np.ndarray, float]:
    """Train with a staleness bound; returns (loss of every gradient, largest norm of the weights) on rank 0.

    Losses are those at the weights that a gradient was computed from. Other ranks get an empty array and 0. Collective.
    """
    workers = comm.Get_size() - 1

    def rate(step: int) -> float:
        return workers * sigma / math.sqrt(step * workers + 1)

    model = Sequential([Linear(data.x.shape[1], int(data.y.max()) + 1, init=constant(0.0), first=True)])
    sampler, farthest, means = Sampler(len(data), BATCH * workers, BATCH), 0.0, list[float]()
    settings = Settings(layout="ps", consistency=f"ssp:{staleness}", delay=DELAY, slow=f"{workers}:4")
    with ParameterServer(model, SoftmaxCrossEntropy(), comm, SGD(rate=rate), settings) as engine:
        for number, step in zip(range(steps), sampler.ahead()):
            engine.step(OnDemandSampler(step, data))
            if engine.server is not None:
                weights = [piece.array for piece in engine.tensor_slices()]
                farthest = max(farthest, float(np.linalg.norm(np.concatenate(weights))))
                means += [outcome.loss / outcome.targets for outcome in engine.server.work.outcome(number)]
        engine.quiesce()
    return np.array(means), farthest


def main() -> int:
    """Train with each staleness bound, print regrets; exit status 1 if a regret or the weights exceed their bound."""
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--staleness", type=numbers, default=[0, 1, 3, 8], metavar="S,...", help="default 0,1,3,8")
    add("--steps", type=at_least(1, int), default=300, metavar="N", help="default 300")
    add("--plot", type=Path, metavar="FILE", help="regret and bound as a picture")
    args = parser.parse_args()
    comm = Communicator(MPI.COMM_WORLD)
    workers = comm.Get_size() - 1
    if not workers:
        parser.error("expected 2 ranks or more, a server and a worker, found 1")
    data = datasets.load("digits").train.flat()  # type: ignore[attr-defined]
    steepest = math.sqrt(2 * float((data.x.astype(np.float64) ** 2).sum(1).max() + 1))
    distance = math.sqrt(2) * RADIUS
    optimum = best(data, steepest) if comm.Get_rank() == 0 else np.zeros(0)
    say(f"P = {workers}, L = {steepest:.2f}, F = {distance:.2f}, {BATCH} samples a gradient")
    say(f"{'s':>3}{'T':>7}{'regret/T':>11}{'bound':>9}{'farthest':>10}")
    good, curves = True, {}
    for staleness in args.staleness:
        sigma = distance / (steepest * math.sqrt(2 * (staleness + 1) * workers))
        found, farthest = train(comm, data, staleness, sigma, args.steps)
        if comm.Get_rank():
            continue
        sampler, of_best = Sampler(len(data), BATCH * workers, BATCH), losses(optimum, data)
        parts = [part for _, step in zip(range(args.steps), sampler.ahead()) for part in step.parts]
        at = np.arange(1, len(parts) + 1)
        regret = np.cumsum(found - np.array([of_best[part].mean() for part in parts])) / at
        bound = 4 * distance * steepest * np.sqrt(2 * (staleness + 1) * workers / at)
        curves[staleness] = regret, bound
        good &= bool((regret <= bound).all()) and farthest <= RADIUS
        say(f"{staleness:3}{len(at):7}{regret[-1]:11.4f}{bound[-1]:9.3f}{farthest:10.2f}")
    if args.plot and comm.Get_rank() == 0:
        from study_plots import plot_regret

        plot_regret(args.plot, curves, f"logistic regression on digits, {workers} workers")
    return int(not comm.bcast(good))


if __name__ == "__main__":
    launcher.run(main)
