"""SGLD against its equation, BlackJAX and its exact stationary law."""

from __future__ import annotations

import blackjax.sgmcmc.diffusions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_chains import NoisyGaussian, assert_mean_is, gradient, run
from gaussian_laws import sgld_recursion

from mamba_cli.samplers.sgld import SGLDState, sgld

KERNEL = sgld(gradient)
CURVATURE = np.array([0.5, 1.0, 2.0, 4.0])


@pytest.mark.parametrize("step_size", [1e-6, 0.3])
def test_one_step_is_the_equation(step_size):
    key = jax.random.key(1)
    position, gradient_there = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    minibatch = NoisyGaussian(jnp.arange(5.0), jnp.float32(2.0), jnp.float32(0.25))
    state = SGLDState(jnp.asarray(position), jnp.asarray(gradient_there))

    new = KERNEL.step(key, state, minibatch, jnp.float32(step_size))

    noise = np.asarray(jax.random.normal(key, (5,)), np.float64)
    expected = position + step_size / 2 * gradient_there + np.sqrt(step_size) * noise
    np.testing.assert_allclose(new.position, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        new.gradient, -2.0 * expected + 0.5 * np.arange(5), rtol=1e-5, atol=1e-6
    )


def test_one_step_is_blackjax_with_half_the_step_size(monkeypatch):
    key = jax.random.key(2)
    position, gradient_there = jax.random.normal(jax.random.key(3), (2, 5))
    monkeypatch.setattr(
        blackjax.sgmcmc.diffusions,
        "generate_gaussian_noise",
        lambda rng_key, position: jax.random.normal(rng_key, position.shape),
    )
    theirs = blackjax.sgmcmc.diffusions.overdamped_langevin()(
        key, position, gradient_there, 0.3 / 2
    )
    minibatch = NoisyGaussian(jnp.zeros(5), jnp.float32(1.0), jnp.float32(0.0))
    ours = KERNEL.step(key, SGLDState(position, gradient_there), minibatch, jnp.float32(0.3))
    np.testing.assert_allclose(ours.position, theirs, rtol=1e-6)


@pytest.mark.parametrize("step_size", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("curvature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("noise_variance", [0.0, 3.0])
def test_the_printed_variance_solves_the_lyapunov_equation(step_size, curvature, noise_variance):
    h, law = step_size, sgld_recursion(step_size, curvature, noise_variance)
    printed = (2 + h * noise_variance / 2) / (curvature * (2 - h * curvature / 2))
    assert law.stationary_covariance()[0, 0] == pytest.approx(printed, rel=1e-12)


@pytest.mark.parametrize("noise_variance", [0.0, 8.0])
def test_the_stationary_variance_is_the_exact_law(noise_variance):
    moments = run(
        KERNEL,
        shape=(CURVATURE.size * 8192,),
        step_size=0.3,
        curvature=np.repeat(CURVATURE, 8192),
        noise_variance=noise_variance,
        num_draws=100,
        num_burn_in=100,
    )
    for curvature, samples in zip(CURVATURE, moments.position.reshape(4, -1), strict=True):
        law = sgld_recursion(0.3, curvature, noise_variance)
        assert_mean_is(samples, law.stationary_covariance()[0, 0])
