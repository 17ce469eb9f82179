"""The study's arithmetic: moments, ranks, regret, and the truth of its posteriors."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats

from experiments.reward_study import study, targets
from mamba_cli.types import BlockSums


def test_moments_of_all_draws_from_block_sums() -> None:
    draws = np.random.default_rng(0).normal([1.0, 2.0, 3.0], 1.0, (30, 3))
    origin = np.array([0.5, 2.0, 2.0])
    blocks = [(draws[:16] - origin), (draws[16:] - origin)]
    sums = BlockSums(
        {
            "moments": {
                "first": np.stack([b.sum(axis=0) for b in blocks]),
                "second": np.stack([b.T @ b for b in blocks]),
            }
        },
        np.array([16, 14]),
        origin,
    )
    mean, covariance = study.moments_of(sums)
    np.testing.assert_allclose(mean, draws.mean(axis=0))
    np.testing.assert_allclose(covariance, np.cov(draws.T, bias=True))


def test_ranks_are_spearmans() -> None:
    rng = np.random.default_rng(1)
    first = np.append(rng.standard_normal(20), [np.inf, np.inf])
    second = np.append(rng.standard_normal(20).round(1), [3.0, 4.0])
    expected = scipy.stats.spearmanr(first, second).statistic
    assert study.spearman(first, second) == pytest.approx(expected)
    assert math.isnan(study.spearman(np.ones(5), second[:5]))


def test_rho_and_regret_by_hand() -> None:
    piece = pd.DataFrame(
        {
            "target": "t",
            "sampler": "s",
            "budget_s": 1.0,
            "seed": 0,
            "arm": [0, 1, 2, 3, 4],
            "status": ["ok", "ok", "ok", "frozen", "diverged"],
            "error": [1.0, 2.0, 4.0, 3.0, np.inf],
            "r": [0.5, 0.2, 0.9, 0.1, np.nan],
        }
    )
    table = study.problems(piece, ["r", "absent"]).set_index("guards")
    assert list(table.choice) == [3, 1]
    assert list(table.regret) == [3.0, 2.0]
    assert list(table.choice_refused) == [True, False]
    assert list(table.arms) == [4, 3]
    # Ranks of the losses 3 2 4 1 and of the errors 1 2 4 3; without the last 2 1 3 and 1 2 3.
    assert table.rho[False] == pytest.approx(1 - 6 * (4 + 0 + 0 + 4) / (4 * 15))
    assert table.rho[True] == pytest.approx(0.5)


def test_the_truth_of_the_skewed_posterior() -> None:
    # exp(theta) is Gamma(1 + number of events, rate 2): the log of 400,000 draws of it.
    target = targets.skewed()
    rng = np.random.default_rng(2)
    draws = np.log(rng.gamma(1.0 + np.arange(2, 7), 0.5, (400_000, 5)))
    assert target.mean is not None
    assert target.covariance is not None
    noise = draws.std(axis=0) / math.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - target.mean) < 5 * noise)
    np.testing.assert_allclose(draws.var(axis=0), np.diag(target.covariance), rtol=0.02)
    # And its density is that of the model: log p(theta + e) - log p(theta) in closed form.
    model, theta = target.model, jnp.asarray(target.mean, jnp.float32)

    def log_density(at: jax.Array) -> float:
        return float(model.log_prior(at) + model.log_likelihood(at, model.data))

    shape = 1.0 + np.arange(2, 7)
    closed = np.sum(shape * 0.1 - 2 * np.exp(target.mean) * (np.exp(0.1) - 1))
    assert log_density(theta + 0.1) - log_density(theta) == pytest.approx(closed, rel=1e-4)


def test_the_truth_of_the_gaussian_and_of_the_two_modes() -> None:
    target = targets.gaussian(num_rows=200)
    model = target.model
    gradient = jax.grad(lambda at: model.log_likelihood(at, model.data))
    assert target.mean is not None
    assert target.covariance is not None
    at_mean = gradient(jnp.asarray(target.mean, jnp.float32))
    assert float(jnp.linalg.norm(at_mean)) < 0.05  # against sqrt(tr precision) = 170
    hessian = -np.asarray(jax.hessian(lambda at: model.log_likelihood(at, model.data))(at_mean))
    np.testing.assert_allclose(np.linalg.inv(target.covariance), hessian, rtol=1e-3, atol=0.2)
    assert np.linalg.cond(target.covariance) == pytest.approx(1e4, rel=1e-6)
    modes = targets.two_modes()
    assert modes.covariance is not None
    # Modes near (0, 1) and (1, -1): t_2 is spread over both, and falls as t_1 rises.
    assert modes.covariance[1, 1] > 0.4
    assert modes.covariance[0, 1] < -0.1
