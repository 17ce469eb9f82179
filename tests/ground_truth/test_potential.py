"""The potential against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from small_posteriors import Logistic, logistic, with_start

from mamba_cli import map_estimate
from mamba_cli.ground_truth.coordinates import Coordinates, laplace_matrix
from mamba_cli.ground_truth.potential import (
    Target,
    make_target,
    potential_fn,
    potentials_and_gradients,
)


@pytest.fixture(scope="module")
def large() -> tuple[Logistic, Target, np.ndarray, Callable[[np.ndarray], Any]]:
    """200,001 rows: the model, its target, points z, and U and dU/dz there in float64."""
    model = logistic(num_data=200_001, dim=5, scale=2.0, seed=0)
    centre = np.asarray(
        map_estimate.find_map(with_start(model), rng_key=jax.random.key(0)).position
    )
    blocks = map_estimate.row_blocks(model.data, model.num_data)
    matrix = laplace_matrix(map_estimate.hessian(model, jnp.asarray(centre), blocks=blocks)).astype(
        np.float32
    )
    target = make_target(model, Coordinates(centre, matrix), blocks)
    z = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    rows = np.asarray(model.data, np.float64)
    centre64, matrix64 = centre.astype(np.float64), matrix.astype(np.float64)

    def log_density(theta: np.ndarray) -> float:
        return -np.logaddexp(0, -rows @ theta).sum() - theta @ theta / 20

    def exact(z: np.ndarray) -> tuple[float, np.ndarray]:
        theta = centre64 + matrix64 @ z.astype(np.float64)
        gradient = rows.T @ scipy.special.expit(-rows @ theta) - theta / 10
        return log_density(centre64) - log_density(theta), -gradient @ matrix64

    return model, target, z, exact


def test_energy_differences_have_float64_quality(large: Any) -> None:
    """Errors of U below 2e-4; a difference of float32 sums is off by ten times that."""
    model, target, z, exact = large
    values, gradients = jax.jit(lambda z, target: potentials_and_gradients(model, target, z))(
        z, target
    )
    expected_values, expected_gradients = zip(*map(exact, z), strict=True)
    np.testing.assert_allclose(values, expected_values, atol=2e-4)
    np.testing.assert_allclose(gradients, np.stack(expected_gradients), atol=1e-3)

    theta = np.asarray(target.centre + z @ target.matrix.T)
    plain = [
        float(model.log_likelihood(target.centre, model.data))
        - float(model.log_likelihood(position, model.data))
        + float(model.log_prior(target.centre) - model.log_prior(position))
        for position in jnp.asarray(theta)
    ]
    assert np.max(np.abs(np.asarray(plain) - expected_values)) > 2e-3


def test_energy_is_conserved_to_second_order(large: Any) -> None:
    """Halving the step quarters the energy error of a trajectory: rounding is far below it."""
    model, target, z, _ = large
    both = jax.jit(lambda z, target: potentials_and_gradients(model, target, z))
    rng = np.random.default_rng(1)
    momentum = rng.normal(size=z.shape)

    def energy_error(num_steps: int) -> np.ndarray:
        step = 1.0 / num_steps
        position, velocity = z.astype(np.float64), momentum.copy()
        value, gradient = both(jnp.asarray(position, jnp.float32), target)
        start = np.asarray(value, np.float64) + 0.5 * (velocity**2).sum(-1)
        for _ in range(num_steps):
            velocity -= 0.5 * step * np.asarray(gradient, np.float64)
            position += step * velocity
            value, gradient = both(jnp.asarray(position, jnp.float32), target)
            velocity -= 0.5 * step * np.asarray(gradient, np.float64)
        return np.asarray(value, np.float64) + 0.5 * (velocity**2).sum(-1) - start

    coarse, fine = energy_error(4), energy_error(8)
    np.testing.assert_allclose(coarse / fine, 4.0, rtol=0.15)


def test_many_chains_are_each_chain_alone(large: Any) -> None:
    model, target, z, _ = large
    potential = jax.value_and_grad(potential_fn(model, target))
    together = jax.jit(jax.vmap(potential))(z)
    alone = [jax.jit(potential)(point) for point in z]
    np.testing.assert_allclose(together[0], [value for value, _ in alone], atol=1e-4)
    np.testing.assert_allclose(together[1], [gradient for _, gradient in alone], atol=1e-4)


def test_data_are_arguments_of_the_programs(large: Any) -> None:
    model, target, z, _ = large
    program = jax.make_jaxpr(
        lambda z, target: jax.vmap(jax.value_and_grad(potential_fn(model, target)))(z)
    )(z, target)
    assert sum(np.size(constant) for constant in program.consts) < 100
