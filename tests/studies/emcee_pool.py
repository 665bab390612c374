"""Sample a normal distribution with emcee on a pool of MPI ranks; the chain must be that of one process, bit by bit."""

import emcee
import numpy as np
from schwimmbad import MPIPool


def log_density(x: np.ndarray) -> float:
    return float(-0.5 * np.sum(x**2))


def chain(pool: object) -> np.ndarray:
    generator = np.random.RandomState(5)
    sampler = emcee.EnsembleSampler(16, 3, log_density, pool=pool)
    start = emcee.State(generator.normal(size=(16, 3)), random_state=generator.get_state())
    sampler.run_mcmc(start, 20)
    found: np.ndarray = sampler.get_chain()
    return found


if __name__ == "__main__":
    with MPIPool() as pool:
        expected = chain(None)
        np.testing.assert_array_equal(chain(pool), expected)
        assert np.ptp(expected, axis=0).min() > 0
