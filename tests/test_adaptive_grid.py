"""The grid that is laid around a model's curvature."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_model import GaussianMean, gaussian_mean

from mamba_cli import adaptive_grid
from mamba_cli.errors import NothingUsableError
from mamba_cli.types import Array


class Stretched(GaussianMean):
    """The mean of Gaussian data whose coordinates have variances 1, 1/4, 1/100, ..."""

    def log_likelihood(self, position: Array, minibatch: Array) -> Array:
        weights = jnp.asarray([1.0, 4.0, 100.0])
        return -0.5 * jnp.sum(weights * (minibatch - position) ** 2)


def test_the_largest_curvature_is_that_of_the_stiffest_coordinate() -> None:
    base = gaussian_mean(num_data=1500)
    model = Stretched(base.data)
    # Precision of the third coordinate: 1500 x 100 + 1 / 10.
    found = adaptive_grid.largest_curvature(model, jnp.zeros(3), jax.random.key(0))
    assert found == pytest.approx(150_000.1, rel=2e-2)


def test_a_flat_log_density_has_no_scale() -> None:
    class Flat(GaussianMean):
        def log_likelihood(self, position: Array, minibatch: Array) -> Array:
            return 0.0 * jnp.sum(position)

    flat = Flat(gaussian_mean().data, prior_variance=float("inf"))
    with pytest.raises(NothingUsableError, match=r"no scale .* 'tuner\.grid\.step_size="):
        adaptive_grid.largest_curvature(flat, jnp.zeros(3), jax.random.key(0))


@pytest.mark.parametrize(("scale", "top"), [(4.0, 0.0), (4.1, -0.5), (4e4, -4.0), (1.0, 0.5)])
def test_step_sizes_go_down_in_half_decades_from_the_largest_stable_one(
    scale: float, top: float
) -> None:
    sizes = adaptive_grid.step_sizes(scale)
    np.testing.assert_allclose(np.log10(sizes), top - 0.5 * np.arange(10), atol=1e-12)
    assert sizes[0] * scale <= 4 * (1 + 1e-12) < sizes[0] * scale * 10**0.5


@pytest.mark.parametrize(
    ("num_data", "percents"),
    [
        (5, (100,)),
        (99, (100,)),
        (100, (100, 10)),
        (1_000, (100, 10, 1)),
        (10**6, (100, 10, 1, 0.1)),
    ],
)
def test_no_batch_of_the_grid_is_tiny(num_data: int, percents: tuple[float, ...]) -> None:
    assert adaptive_grid.batch_percents(num_data) == percents


def test_replacing_the_data_moves_the_grid() -> None:
    model = gaussian_mean(num_data=100)
    more = replace(model, data=jnp.tile(model.data, (100, 1)))
    key = jax.random.key(0)
    few, many = (adaptive_grid.largest_curvature(m, jnp.zeros(3), key) for m in (model, more))
    assert many / few == pytest.approx(100, rel=0.02)
