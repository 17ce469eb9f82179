"""The jackknife of the KSD against leaving out by hand, and against repeated chains."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from mamba_cli.rewards import ksd
from mamba_cli.rewards.ksd import ksd_with_error


def ar1(num_chains: int, num_draws: int, rho: float, scale: float, seed: int) -> np.ndarray:
    """Chains with the law N(0, scale^2) and autocorrelation ``rho``, ``[chains, draws, 2]``."""
    rng = np.random.default_rng(seed)
    draws = np.empty((num_draws, num_chains, 2))
    draws[0] = rng.standard_normal((num_chains, 2))
    for i in range(1, num_draws):
        noise = rng.standard_normal((num_chains, 2))
        draws[i] = rho * draws[i - 1] + math.sqrt(1 - rho**2) * noise
    return scale * draws.swapaxes(0, 1)


@pytest.mark.parametrize(("c", "beta"), [(1.0, -0.5), (2.0, -0.3)])
def test_it_is_the_discrepancy_without_one_block_after_another(c: float, beta: float) -> None:
    draws = ar1(1, 45, 0.5, 1.3, seed=0)[0]
    cuts = np.linspace(0, 45, 9).round().astype(int)
    without = []
    for first, last in pairwise(cuts):
        kept = np.delete(draws, np.arange(first, last), axis=0)
        without.append(ksd(kept, -kept, c=c, beta=beta))
    expected = math.sqrt(7 / 8 * np.sum((np.array(without) - np.mean(without)) ** 2))
    assert ksd_with_error(draws, -draws, c=c, beta=beta).std_error == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_it_is_the_spread_of_the_discrepancy_over_chains(rho: float) -> None:
    # 200 chains of a law too wide by 1.5: the spread of their KSD is known to 5 %, and the mean
    # square of 200 jackknives to about the same. Blocks of 20 draws leave 1 / 20 of the correlation
    # across their ends out. Draws taken for independent would give 0.4 of it at rho = 0.7.
    chains = ar1(200, 160, rho, 1.5, seed=1)
    values = np.array([ksd(draws, -draws) for draws in chains])
    errors = np.array([ksd_with_error(draws, -draws).std_error for draws in chains])
    assert math.sqrt(np.mean(errors**2)) == pytest.approx(np.std(values, ddof=1), rel=0.2)


def test_too_few_draws_or_numbers_that_are_none_have_no_error() -> None:
    draws = np.random.default_rng(0).standard_normal((16, 3))
    assert math.isnan(ksd_with_error(draws[:15], -draws[:15]).std_error)
    assert math.isfinite(ksd_with_error(draws, -draws).std_error)
    assert math.isnan(ksd_with_error(draws, np.where(draws > 0, np.nan, draws)).std_error)
