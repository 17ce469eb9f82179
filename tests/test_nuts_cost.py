"""What NUTS is expected to cost."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from gaussian_model import GaussianMean, gaussian_mean

from mamba_cli.ground_truth import MAX_DENSE_DIM, NutsSettings
from mamba_cli.nuts_cost import estimate, settings_for
from mamba_cli.types import Array

SETTINGS = NutsSettings(num_draws=400, num_warmup=50, num_chains=4)


def test_the_cost_is_the_time_of_a_leapfrog_step_times_their_number() -> None:
    ticks = iter([0.0, 0.5, 1.0, 1.25, 2.0, 2.75])
    cost = estimate(gaussian_mean(), jnp.zeros(3), SETTINGS, clock=lambda: next(ticks))
    # The fastest of 0.5, 0.25 and 0.75 s; 10 a draw, 100 draws a chain, 2 x 50 for the warm-up.
    assert cost.leapfrog_s == 0.25
    assert cost.num_leapfrogs == 10 * (100 + 100)
    assert cost.seconds == 0.25 * 2000
    assert "2,000 leapfrog steps of 250 ms" in cost.describe()
    assert settings_for(cost, SETTINGS).whiten


def test_without_a_laplace_approximation_chains_are_not_whitened_and_cost_more() -> None:
    class Saddle(GaussianMean):
        def log_likelihood(self, position: Array, minibatch: Array) -> Array:
            signs = jnp.asarray([1.0, 1.0, -1.0])
            return -0.5 * jnp.sum(signs * (minibatch - position) ** 2)

    cost = estimate(Saddle(gaussian_mean().data), jnp.zeros(3), SETTINGS)
    assert not cost.whiten
    assert cost.num_leapfrogs == 63 * 200
    assert not settings_for(cost, SETTINGS).whiten
    assert settings_for(cost, SETTINGS).num_draws == pytest.approx(400)


def test_many_dimensions_are_scaled_though_they_have_no_hessian() -> None:
    dim = MAX_DENSE_DIM + 1
    cost = estimate(gaussian_mean(num_data=4, dim=dim), jnp.zeros(dim), SETTINGS)
    assert cost.num_leapfrogs == 63 * 200
    assert settings_for(cost, SETTINGS).whiten
