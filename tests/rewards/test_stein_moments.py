"""Stein moments: closed forms on Gaussians, float64 sums, and chains with minibatch gradients."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from gaussian_model import gaussian_mean
from scipy.linalg import sqrtm

from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, Chain, ChainProgram, advance
from mamba_cli.errors import ConfigError
from mamba_cli.rewards.stein_moments import (
    SteinMoments,
    diagonal_features,
    moment_distance,
    outer_features,
    stein_moments,
)
from mamba_cli.samplers.sghmc import sghmc
from mamba_cli.samplers.sgld import sgld
from mamba_cli.types import AccumulatedReward, BlockSums, Hyperparameters, Scored
from mamba_cli.whitening import Whitening

RNG = np.random.default_rng(5)
ROOT = RNG.standard_normal((3, 3)) + 2 * np.eye(3)
PRECISION, CENTRE = ROOT @ ROOT.T, np.array([1.0, -2.0, 0.5])
WHITENING = Whitening.of_precision(CENTRE, PRECISION)


def sums_of(draws, scores, features, block_length, origin) -> BlockSums:
    """The sums a chain would have made of these draws, in float64."""
    starts = range(0, len(draws), block_length)
    rows = [features(x - origin, g) for x, g in zip(draws, scores, strict=True)]
    added = {
        name: np.array([sum(r[name] for r in rows[t : t + block_length]) for t in starts])
        for name in rows[0]
    }
    counts = np.array([min(block_length, len(draws) - t) for t in starts])
    return BlockSums(added, counts, origin)


def gaussian_sums(draws, features=outer_features, block_length=7, origin=CENTRE + 0.3):
    return sums_of(draws, -(draws - CENTRE) @ PRECISION, features, block_length, origin)


def test_moments_are_those_of_the_whitened_draws() -> None:
    """Against w and s themselves, with an origin that is not the centre and a short last block."""
    draws, scores = RNG.standard_normal((2, 30, 3))
    sums = sums_of(draws, scores, outer_features, 7, CENTRE + 0.3)
    first, second = stein_moments(sums, WHITENING)
    w = (draws - CENTRE) @ np.linalg.cholesky(PRECISION)
    s = np.linalg.solve(np.linalg.cholesky(PRECISION), scores.T).T
    for block, rows in enumerate(np.split(np.arange(30), [7, 14, 21, 28])):
        cross = s[rows].T @ w[rows] / len(rows)
        np.testing.assert_allclose(first[block], s[rows].mean(axis=0), atol=1e-12)
        np.testing.assert_allclose(second[block], (cross + cross.T) / 2 + np.eye(3), atol=1e-12)


def test_the_diagonal_is_that_of_the_whole() -> None:
    whitening = Whitening.of_precision(CENTRE, np.diag(PRECISION))
    draws, scores = RNG.standard_normal((2, 12, 3))
    dense = Whitening.of_precision(CENTRE, np.diag(np.diag(PRECISION)))
    first, second = stein_moments(sums_of(draws, scores, diagonal_features, 4, CENTRE), whitening)
    whole = stein_moments(sums_of(draws, scores, outer_features, 4, CENTRE), dense)
    np.testing.assert_allclose(first, whole[0], atol=1e-12)
    np.testing.assert_allclose(second, np.diagonal(whole[1], axis1=1, axis2=2), atol=1e-12)


def test_wasserstein_is_that_of_two_gaussians() -> None:
    """z_1 = -m, Z_2 = I - C - m m^T: Olkin and Pukelsheim's distance of N(m, C) and N(0, I)."""
    draws = CENTRE + RNG.standard_normal((50, 3)) @ np.linalg.inv(ROOT) * 1.7 + 0.1
    w = (draws - CENTRE) @ np.linalg.cholesky(PRECISION)
    mean, covariance = w.mean(axis=0), np.cov(w.T, bias=True)
    expected = mean @ mean + np.trace(covariance + np.eye(3) - 2 * sqrtm(covariance).real)
    value = SteinMoments()(gaussian_sums(draws), WHITENING).value
    assert value == pytest.approx(math.sqrt(expected), rel=1e-10)
    published = mean @ mean + np.sum((np.eye(3) - covariance - np.outer(mean, mean)) ** 2)
    value = SteinMoments(distance="norm")(gaussian_sums(draws), WHITENING).value
    assert value == pytest.approx(math.sqrt(published), rel=1e-10)


@pytest.mark.parametrize("distance", ["wasserstein", "norm"])
@pytest.mark.parametrize("features", [outer_features, diagonal_features])
def test_a_frozen_chain_is_the_root_of_the_dimension_away(distance, features) -> None:
    whitening = WHITENING if features is outer_features else Whitening(CENTRE, np.ones(3))
    scored = SteinMoments(distance=distance)(
        gaussian_sums(np.tile(CENTRE, (9, 1)), features), whitening
    )
    assert scored.value == pytest.approx(math.sqrt(3), rel=1e-10)


def test_diagonal_distances_are_those_of_diagonal_matrices() -> None:
    first, second = np.array([0.1, -0.2]), np.array([0.5, -3.0])
    for distance in ("wasserstein", "norm"):
        value = moment_distance(first, second, distance)
        expected = 0.01 + 0.04 + (0.25 + 9.0)
        if distance == "wasserstein":
            expected = 0.05 + (math.sqrt(1 - 0.5 - 0.01) - 1) ** 2
            expected += (math.sqrt(1 + 3.0 - 0.04) - 1) ** 2
        assert value == pytest.approx(math.sqrt(expected), rel=1e-12)
    # Less than no variance is none.
    assert moment_distance(np.zeros(1), np.array([5.0])) == 1.0
    assert moment_distance(np.zeros(1), np.array([[5.0]])) == 1.0


def test_it_does_not_depend_on_the_root_of_the_precision() -> None:
    values, vectors = np.linalg.eigh(PRECISION)
    symmetric = Whitening(CENTRE, vectors @ np.diag(np.sqrt(values)) @ vectors.T)
    draws = RNG.standard_normal((28, 3))
    for distance in ("wasserstein", "norm"):
        reward = SteinMoments(distance=distance)
        one, other = (reward(gaussian_sums(draws), root) for root in (WHITENING, symmetric))
        assert one.value == pytest.approx(other.value, rel=1e-10)
        assert one.std_error == pytest.approx(other.std_error, rel=1e-10)


# --- standard errors ----------------------------------------------------------------------------


def test_too_few_blocks_have_no_error() -> None:
    assert math.isnan(SteinMoments()(gaussian_sums(np.ones((20, 3)) + CENTRE), WHITENING).std_error)


def test_the_error_is_the_spread_between_chains() -> None:
    """AR(1) draws of the wrong width: 200 chains; the sd of an sd of 200 is 5 %."""
    num_chains, num_draws, correlation = 200, 1600, 0.8
    noise = RNG.standard_normal((num_draws, num_chains, 3)) * math.sqrt(1 - correlation**2)
    chains = np.zeros((num_draws, num_chains, 3))
    chains[0] = RNG.standard_normal((num_chains, 3))
    for t in range(1, num_draws):
        chains[t] = correlation * chains[t - 1] + noise[t]
    chains *= 1.5
    unit = Whitening(np.zeros(3), np.ones(3))
    blocks = chains.reshape(16, 100, num_chains, 3)
    scored = [
        SteinMoments()(
            BlockSums(
                {"gradient": -x.sum(axis=1), "product": -(x**2).sum(axis=1)},
                np.full(16, 100),
                np.zeros(3),
            ),
            unit,
        )
        for x in np.moveaxis(blocks, 2, 0)
    ]
    spread = np.std([s.value for s in scored])
    typical = math.sqrt(np.mean([s.std_error**2 for s in scored]))
    # The larger of two estimates errs upwards, by about 10 % here; without autocorrelation it
    # would be a third.
    assert 0.9 < typical / spread < 1.4


# --- through a chain ----------------------------------------------------------------------------

MODEL = gaussian_mean(num_data=400, dim=2, offset=0.5)
POSTERIOR = Whitening.of_precision(MODEL.posterior_mean, np.full(2, MODEL.precision))


def chain_of(sampler, batch_size, step_size, num_draws, length=1, *, seed=0, estimator=None):
    program = ChainProgram(
        estimator or gradients.standard(MODEL),
        sampler,
        minibatch.without_replacement,
        batch_size,
        capacity=512,
        block_features=diagonal_features,
    )
    start = np.asarray(MODEL.posterior_mean, np.float32)
    chain = program.start(
        jax.random.key(seed), start, Hyperparameters(step_size, batch_size, length)
    )
    return advance(program, chain, Budget(steps=num_draws * length))


def exact_moments(chain: Chain, num_draws: int):
    """z_1 and the diagonal of Z_2 with full gradients, of a Gaussian: from the draws' moments."""
    mean = MODEL.precision**0.5 * (chain.mean - MODEL.posterior_mean)
    variance = MODEL.precision * chain.std**2
    return -mean, 1 - variance - mean**2


def mean_moments(chain: Chain):
    sums = chain.block_sums()
    first, second = stein_moments(sums, POSTERIOR)
    return (np.average(block, axis=0, weights=sums.num_draws) for block in (first, second))


def test_full_batches_give_the_moments_of_the_draws() -> None:
    chain = chain_of(sgld, 400, 1e-3, 500)
    for got, expected in zip(mean_moments(chain), exact_moments(chain, 500), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-3)


@pytest.mark.parametrize(
    ("sampler", "length"), [(sgld, 1), (sghmc, 3)], ids=["sgld", "sghmc-euler-L3"]
)
def test_minibatch_gradients_are_unbiased_at_the_draws(sampler, length) -> None:
    """The difference to full gradients is noise of variance (N - n)/(n T) in z_1 and w^2 of it."""
    num_draws, batch_size = 40_000, 40
    chain = chain_of(sampler, batch_size, 4e-4, num_draws, length)
    first, second = mean_moments(chain)
    exact_first, exact_second = exact_moments(chain, num_draws)
    scale = MODEL.precision / 400  # of the noise: the data have unit variance, to within 10 %
    noise = 400 / batch_size * (1 - batch_size / 400) / scale
    error = math.sqrt(1.2 * noise / num_draws)
    width = math.sqrt(MODEL.precision) * chain.std
    assert np.all(np.abs(first - exact_first) < 4 * error)
    assert np.all(np.abs(second - exact_second) < 4 * error * width)
    # The gradient that made the step of SGLD would be off by h/2 times its variance, 0.7.
    assert 4 * error * width.max() < 0.15


def test_control_variates_take_the_noise_away() -> None:
    centre = jax.numpy.asarray(MODEL.posterior_mean, jax.numpy.float32)
    estimator = gradients.control_variates(MODEL, centre)
    chain = chain_of(sgld, 4, 1e-3, 500, estimator=estimator)
    for got, expected in zip(mean_moments(chain), exact_moments(chain, 500), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-3)


def test_the_reward_of_a_chain_orders_step_sizes() -> None:
    """SGLD on a Gaussian has the variance (2 + hV/2)/(2 - h lambda/2) in whitened coordinates."""
    reward: AccumulatedReward = SteinMoments(whitening="fisher")
    assert isinstance(reward, AccumulatedReward)
    assert reward.features(2) is diagonal_features
    values = {}
    # At 1e-8 a chain stays where it was: sqrt(2) from the posterior in two dimensions.
    for h in (1e-8, 1e-3, 7e-3):
        chain = chain_of(sgld, 400, h, 4000)
        scored = reward(chain.block_sums(), POSTERIOR)
        assert isinstance(scored, Scored)
        assert scored.std_error > 0
        values[h] = scored.value
    law = math.sqrt(2) * (math.sqrt(2 / (2 - 7e-3 * MODEL.precision / 2)) - 1)
    assert values[7e-3] == pytest.approx(law, rel=0.2)
    assert values[1e-3] < values[7e-3] < values[1e-8]
    assert values[1e-8] == pytest.approx(math.sqrt(2), rel=0.1)


# --- configuration ------------------------------------------------------------------------------


def test_features_follow_from_the_dimension() -> None:
    assert SteinMoments().features(128) is outer_features
    assert SteinMoments().features(129) is diagonal_features


def test_draws_that_are_not_finite_have_no_value() -> None:
    sums = gaussian_sums(RNG.standard_normal((4, 3)))
    sums.features["product"][0, 1, 1] = np.inf
    scored = SteinMoments()(sums, WHITENING)
    assert math.isnan(scored.value)
    assert math.isnan(scored.std_error)


@pytest.mark.parametrize(("key", "value"), [("whitening", "pca"), ("distance", "ksd")])
def test_bad_parameters_are_named(key, value) -> None:
    with pytest.raises(ConfigError, match=rf"tuner\.reward\.{key}={value}: must be "):
        SteinMoments(**{key: value})
