"""The whitened KSD: the raw one of whitened draws, its U-statistic, and what it is for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from whitened_draws import gaussian_draws, narrow_posterior, scored

from mamba_cli.errors import ConfigError
from mamba_cli.rewards import WhitenedKernelSteinDiscrepancy, ksd
from mamba_cli.rewards.ksd import ksd_with_error
from mamba_cli.rewards.whitened_ksd import unbiased_squared_ksd
from mamba_cli.types import AsksForWhitening, Reward


def test_u_statistic_of_two_draws() -> None:
    """N(0, 1) and the draws 1 and -1, the kernel by hand: -0.930204."""
    assert unbiased_squared_ksd([[1.0], [-1.0]], [[-1.0], [1.0]]) == pytest.approx(
        -0.930204, abs=1e-6
    )


def test_u_statistic_is_the_mean_of_pairs_of_draws() -> None:
    """Twice the V-statistic of two draws is their pair and the mean of their own k_pi(x, x)."""
    draws, scores = gaussian_draws(1, 7, 2, width=1.3)
    c, beta = 0.7, -0.3

    def own(i: int) -> float:
        return float(c ** (2 * beta) * (scores[i] @ scores[i] - 2 * beta * 2 / c**2))

    pairs = []
    for i in range(7):
        for j in range(i):
            both = 4 * ksd(draws[[i, j]], scores[[i, j]], c=c, beta=beta) ** 2
            pairs.append((both - own(i) - own(j)) / 2)
    value = unbiased_squared_ksd(draws, scores, c=c, beta=beta)
    assert value == pytest.approx(np.mean(pairs), rel=1e-9)
    assert math.isnan(unbiased_squared_ksd(draws[:1], scores[:1]))


@pytest.mark.parametrize("statistic", ["v", "u"])
def test_reward_is_that_of_whitened_draws(statistic: str) -> None:
    whitening, posterior = narrow_posterior()
    w, _ = gaussian_draws(2, 40, 3, width=0.6)
    reward: Reward = WhitenedKernelSteinDiscrepancy(statistic=statistic)
    assert isinstance(reward, AsksForWhitening)
    expected = ksd(w, -w) if statistic == "v" else unbiased_squared_ksd(w, -w)
    value, error = reward(scored(*posterior(w), whitening))
    assert value == pytest.approx(expected, rel=2e-3)
    scale = 1 if statistic == "v" else 2 * ksd(w, -w)
    assert error == pytest.approx(scale * ksd_with_error(w, -w).std_error, rel=1e-2)


def test_the_order_that_raw_coordinates_get_wrong() -> None:
    """Draws of a posterior of sd 0.01: exact below too wide below half width below frozen.

    The raw KSD of the frozen chain is the lowest of all.
    """
    whitening, posterior = narrow_posterior(dim=10)
    w, _ = gaussian_draws(3, 1000, 10)
    reward = WhitenedKernelSteinDiscrepancy()
    of_widths = [posterior(width * w) for width in (1.0, 1.68**0.5, 0.5, 0.0)]
    whitened = [reward(scored(*draws, whitening)).value for draws in of_widths]
    assert whitened == sorted(whitened)
    assert whitened[-1] == pytest.approx(math.sqrt(10), rel=1e-3)
    raw = [ksd(*draws) for draws in of_widths]
    assert min(raw) == raw[-1]


@pytest.mark.parametrize(
    ("key", "value"),
    [("statistic", "w"), ("whitening", "pca"), ("gradients", "half"), ("c", 0), ("beta", -1)],
)
def test_bad_parameters_are_named(key, value) -> None:
    with pytest.raises(ConfigError, match=rf"tuner\.reward\.{key}={value}: must be "):
        WhitenedKernelSteinDiscrepancy(**{key: value})
