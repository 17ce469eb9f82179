"""The linear-time KSD against pairs of the quadratic one, and its law under the posterior."""

from __future__ import annotations

import math

import numpy as np
import pytest
from whitened_draws import gaussian_draws, narrow_posterior, scored

from mamba_cli.errors import ConfigError
from mamba_cli.rewards import LinearKernelSteinDiscrepancy, linear_ksd
from mamba_cli.rewards.linear_ksd import stein_kernel
from mamba_cli.rewards.whitened_ksd import unbiased_squared_ksd


def test_kernel_of_two_points() -> None:
    """The published value at x = (1, 2, 3), y = (2, 3, 4): 3.5."""
    x, y, sx, sy = (
        np.array([row]) for row in ([1.0, 2, 3], [2.0, 3, 4], [0.5, 0.75, 1.5], [1, 1.5, 3])
    )
    assert stein_kernel(x, y, sx, sy, 1.0, -0.5) == pytest.approx([3.5], rel=1e-12)


def test_it_is_the_mean_over_pairs_half_a_chain_apart() -> None:
    draws, scores = gaussian_draws(4, 9, 3, width=1.4)  # the ninth has no partner
    pairs = [
        unbiased_squared_ksd(draws[[i, i + 4]], scores[[i, i + 4]], c=0.6, beta=-0.4)
        for i in range(4)
    ]
    value, error = linear_ksd(draws, scores, c=0.6, beta=-0.4)
    assert value == pytest.approx(np.mean(pairs), rel=1e-10)
    assert error == pytest.approx(np.std(pairs, ddof=1) / 2, rel=1e-10)


def test_its_mean_is_zero_for_draws_of_the_posterior_and_its_error_the_spread() -> None:
    """400 sets of 64 draws: within 4 standard errors of 0, and an error within 10 % of the sd."""
    results = [linear_ksd(*gaussian_draws(seed, 64, 2)) for seed in range(400)]
    values = np.array([result.value for result in results])
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(400)
    typical = math.sqrt(np.mean([result.std_error**2 for result in results]))
    # The larger of two estimates errs upwards.
    assert 0.9 < typical / values.std() < 1.25
    wide = [linear_ksd(*gaussian_draws(seed, 64, 2, width=2.0)).value for seed in range(100)]
    assert np.mean(wide) > 4 * np.std(wide) / math.sqrt(100)


def test_reward_is_that_of_whitened_draws() -> None:
    whitening, posterior = narrow_posterior()
    w, _ = gaussian_draws(5, 40, 3, width=0.6)
    value = LinearKernelSteinDiscrepancy(c=0.8)(scored(*posterior(w), whitening))
    assert value == pytest.approx(linear_ksd(w, -w, c=0.8), rel=1e-2)


def test_what_cannot_be_scored_is_nan() -> None:
    assert math.isnan(linear_ksd(np.ones((1, 2)), np.ones((1, 2))).value)
    assert math.isnan(linear_ksd(np.ones((4, 2)), np.full((4, 2), np.inf)).value)


@pytest.mark.parametrize(("key", "value"), [("whitening", "pca"), ("gradients", 1), ("c", -1)])
def test_bad_parameters_are_named(key, value) -> None:
    with pytest.raises(ConfigError, match=rf"tuner\.reward\.{key}={value}: must be "):
        LinearKernelSteinDiscrepancy(**{key: value})
