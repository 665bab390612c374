"""Whom replicas meet, proved for up to 64 ranks: no mass is lost, news reach all, and groups mix fully."""

from math import ceil, inf, log, prod

import numpy as np
import pytest

from parallel.asynchronous.decentralized import gossip, group_averaging
from parallel.asynchronous.decentralized.push_sum import PushSumMass

SIZES = range(1, 65)
sizes = pytest.mark.parametrize("size", SIZES)


def pushes(size, step):
    """What of the mass of rank j (column) is at rank i (row) after a step of gossip."""
    matrix = np.zeros((size, size))
    for rank in range(size):
        to, _ = gossip.peers(rank, size, step)
        matrix[to, rank] += 0.5
        matrix[rank, rank] += 0.5
    return matrix


def shifts(size, most, step):
    """The same of a step of groups."""
    matrix = np.zeros((size, size))
    for rank in range(size):
        matrix[rank, list(group_averaging.group(rank, size, most, step))] = group_averaging.share(
            rank, size, most, step
        )
    return matrix


# ------------------------------------------------------------------------------------------ gossip


@sizes
def test_who_sends_is_who_is_heard(size):
    for step in range(2 * gossip.turns(size) + 1):
        for rank in range(size):
            to, source = gossip.peers(rank, size, step)
            assert gossip.peers(to, size, step)[1] == rank and gossip.peers(source, size, step)[0] == rank
            assert (to == rank) == (size == 1)


@sizes
def test_a_push_loses_no_mass(size):
    for step in range(gossip.turns(size) or 1):
        assert (pushes(size, step).sum(0) == 1).all()


@sizes
def test_in_a_period_everyone_hears_of_everyone(size):
    for start in range(gossip.turns(size) or 1):
        product = np.eye(size)
        for step in range(start, start + gossip.turns(size)):
            product = pushes(size, step) @ product
        assert (product > 0).all()  # strongly connected, in no more steps than there are turns
        if size & (size - 1) == 0:
            assert (product == 1 / size).all()


@sizes
def test_distances_fall_geometrically(size):
    """By at least as much in every period: the largest factor is that of the period's matrix, off the mean."""
    product = np.eye(size)
    for step in range(gossip.turns(size)):
        product = pushes(size, step) @ product
    factor = np.linalg.norm(product - 1 / size, 2)
    assert factor < 0.51 if size > 1 else factor == 0


@sizes
@pytest.mark.parametrize("tau", [0, 1, 3])
def test_news_are_everywhere_in_time(size, tau):
    """However late messages are, up to tau steps; whoever has something to say, in whatever step."""
    random = np.random.default_rng([size, tau])
    for start in range(gossip.turns(size) or 1):
        for late in (lambda: tau, lambda: int(random.integers(0, tau + 1))):
            heard = np.full(size, inf)
            heard[start % size], told = 1.0, []
            for step in range(start, start + gossip.reach(size, tau) + 1):
                if size > 1:
                    told += [(step + late(), gossip.peers(rank, size, step)[0], heard[rank]) for rank in range(size)]
                for due, rank, news in told:
                    if due <= step:
                        heard[rank] = min(heard[rank], news)
                told = [message for message in told if message[0] > step]
            assert (heard == 1).all()


@sizes
def test_a_mean_of_masses_whatever_the_shares(size):
    """Shares of all kinds and messages of several steps ago: the sums stay, and the estimates come to their mean."""
    random = np.random.default_rng(size)
    masses = [PushSumMass(random.normal(size=3), np.zeros(3)) for _ in range(size)]
    mean, under_way = np.mean([mass.z for mass in masses], axis=0), []
    for step in range(120):
        for rank, mass in enumerate(masses):
            mass.absorb_update()
            share = random.uniform(0.2, 0.8) if size > 1 else 0.0
            to, _ = gossip.peers(rank, size, step)
            under_way.append((step + random.integers(0, 3), to, mass.x * share, mass.w * share))
            mass.keep(1 - share)
        for due, to, x, w in under_way:
            if due <= step:
                masses[to].add(x, w)
        under_way = [message for message in under_way if message[0] > step]
        for mass in masses:
            mass.update_estimate()
        total = sum(mass.w for mass in masses) + sum(message[3] for message in under_way)
        assert total == pytest.approx(size, rel=1e-12)
    np.testing.assert_allclose([mass.z for mass in masses], np.tile(mean, (size, 1)), rtol=1e-5, atol=1e-7)


def test_an_optimiser_moves_the_mass_as_far_as_the_estimate():
    mass = PushSumMass(np.array([2.0, -4.0]), np.zeros(2))
    mass.keep(0.5)
    mass.add(np.array([1.0, 1.0]), 0.25)
    mass.update_estimate()
    before = mass.x.copy()
    mass.z += np.array([0.5, -1.0])
    mass.absorb_update()
    np.testing.assert_allclose(mass.x - before, [0.5, -1.0], rtol=1e-15)


# ------------------------------------------------------------------------------------------ groups

SOME = (2, 3, 4, 8)


@sizes
@pytest.mark.parametrize("most", SOME)
def test_groups_are_the_same_for_all_their_members(size, most):
    axes = group_averaging.grid(size, most)
    assert size / 2 < prod(axes) <= size and all(2 <= axis <= most for axis in axes)
    assert len(axes) <= max(1, ceil(log(size, most) - 1e-9))
    for step in range(len(axes) or 1):
        for rank in range(size):
            mine = group_averaging.group(rank, size, most, step)
            assert rank in mine and list(mine) == sorted(set(mine)) and len(mine) <= 2 * most
            assert all(group_averaging.group(other, size, most, step) == mine for other in mine)


@sizes
@pytest.mark.parametrize("most", SOME)
def test_groups_lose_no_mass_and_mix_fully(size, most):
    """Whichever axis comes first, k steps leave everyone with its share of all there was: one and the same mean."""
    turns = len(group_averaging.grid(size, most))
    matrices = [shifts(size, most, step) for step in range(turns)]
    for matrix in matrices:
        np.testing.assert_allclose(matrix.sum(0), 1, rtol=1e-15)
    for start in range(turns):
        product = np.eye(size)
        for step in range(start, start + turns):
            product = matrices[step % turns] @ product
        np.testing.assert_allclose(product, np.tile(product[:, :1], size), rtol=1e-14)
        np.testing.assert_allclose(product.sum(0), 1, rtol=1e-14)
    if size in (most, most**2, most**3):
        assert all((matrix[matrix > 0] == 1 / most).all() for matrix in matrices)  # plain means


@pytest.mark.parametrize(
    ("size", "most", "steps"), [(8, 2, 3), (16, 4, 2), (64, 4, 3), (27, 3, 3), (12, 4, 2), (7, 2, 2)]
)
def test_as_many_steps_as_the_logarithm(size, most, steps):
    assert len(group_averaging.grid(size, most)) == steps
