"""SGNHT against its equation, BlackJAX and its exact stationary laws."""

from __future__ import annotations

import blackjax.sgmcmc.diffusions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_chains import NoisyGaussian, assert_mean_is, gradient, run
from gaussian_laws import sghmc_recursion, sgnht_law

from mamba_cli.errors import ConfigError
from mamba_cli.samplers.sgnht import ThermostatState, sgnht

# Made once: a kernel is a static argument of the compiled loop.
LOW_DIFFUSION, HIGH_DIFFUSION = 0.1, 0.15
LOW, HIGH = (sgnht(gradient, diffusion=a) for a in (LOW_DIFFUSION, HIGH_DIFFUSION))


def random_state(thermostat: float, dim: int = 5) -> ThermostatState:
    vectors = jax.random.normal(jax.random.key(0), (3, dim))
    return ThermostatState(*vectors, jnp.float32(thermostat))


def noisy_gaussian(dim: int = 5) -> NoisyGaussian:
    return NoisyGaussian(jnp.arange(float(dim)), jnp.float32(2.0), jnp.float32(0.25))


@pytest.mark.parametrize("diffusion", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("thermostat", [-0.2, 0.0, 0.5])
@pytest.mark.parametrize("step_size", [1e-6, 0.3])
def test_one_step_is_the_equation(diffusion, thermostat, step_size):
    key, state = jax.random.key(1), random_state(thermostat)

    new = sgnht(gradient, diffusion=diffusion).step(
        key, state, noisy_gaussian(), jnp.float32(step_size)
    )

    noise = np.asarray(jax.random.normal(key, (5,)), np.float64)
    position, gradient_there, momentum = (np.asarray(x, np.float64) for x in state[:3])
    new_momentum = (
        momentum
        + step_size * gradient_there
        - thermostat * momentum
        + np.sqrt(2 * diffusion * step_size) * noise
    )
    new_position = position + new_momentum
    new_thermostat = thermostat + new_momentum @ new_momentum / 5 - step_size
    np.testing.assert_allclose(new.momentum, new_momentum, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new.position, new_position, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new.thermostat, new_thermostat, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        new.gradient, -2.0 * new_position + 0.5 * np.arange(5), rtol=1e-5, atol=1e-5
    )


def test_momentum_and_thermostat_are_blackjax_and_the_position_follows(monkeypatch):
    # BlackJAX moves the position with the old momentum, Ding et al. with the new one.
    key, state, h, diffusion = jax.random.key(2), random_state(0.2), 0.09, 0.05
    time = np.sqrt(h)  # BlackJAX's step: its velocity is v / time, its friction per unit of time
    monkeypatch.setattr(
        blackjax.sgmcmc.diffusions,
        "generate_gaussian_noise",
        lambda rng_key, position: jax.random.normal(rng_key, position.shape),
    )
    _, velocity, friction = blackjax.sgmcmc.diffusions.sgnht(diffusion / time)(
        key,
        state.position,
        state.momentum / time,
        state.thermostat / time,
        state.gradient,
        time,
    )
    ours = sgnht(gradient, diffusion=diffusion).step(key, state, noisy_gaussian(), jnp.float32(h))
    np.testing.assert_allclose(ours.momentum, velocity * time, rtol=1e-5)
    np.testing.assert_allclose(ours.thermostat, friction * time, rtol=1e-5)
    np.testing.assert_allclose(ours.position, state.position + velocity * time, rtol=1e-5)


@pytest.mark.parametrize("diffusion", [0.0, 0.01, 0.5])
def test_init_draws_the_momentum_and_sets_the_thermostat(diffusion):
    position = jnp.ones(100_000)
    state = sgnht(gradient, diffusion=diffusion).init(
        jax.random.key(5), position, noisy_gaussian(100_000), jnp.float32(0.04)
    )
    assert state.position is position
    assert_mean_is(state.momentum**2, 0.04)
    assert state.thermostat == np.float32(diffusion)


def test_without_diffusion_or_gradient_only_the_thermostat_acts():
    kernel = sgnht(lambda position, _: jnp.zeros_like(position), diffusion=0.0)
    h, momentum, thermostat = 0.1, np.array([0.3, -0.4]), 0.0
    state = ThermostatState(jnp.zeros(2), jnp.zeros(2), jnp.asarray(momentum), jnp.float32(0))
    for _ in range(10):
        state = kernel.step(jax.random.key(0), state, None, jnp.float32(h))
        momentum = (1 - thermostat) * momentum
        thermostat = thermostat + momentum @ momentum / 2 - h
    np.testing.assert_allclose(state.momentum, momentum, rtol=1e-5)
    np.testing.assert_allclose(state.thermostat, thermostat, rtol=1e-5)


@pytest.mark.parametrize("noise_variance", [0.0, 2.0])
@pytest.mark.parametrize("dim", [1, 4])
def test_the_momentum_has_variance_h_whatever_the_gradient_noise(dim, noise_variance):
    h = 0.02
    moments = run(
        LOW,
        shape=(8192 // dim, dim),
        step_size=h,
        curvature=np.array([2.0, 1.0, 3.0, 0.5])[:dim],
        noise_variance=noise_variance,
        num_draws=600,
        num_burn_in=300,
    )
    assert_mean_is(moments.momentum.mean(axis=1), h)
    # Of the diffusion it discretises: the thermostat is N(a + hV/2, h/D). First order
    # in sqrt(h), as the integrator is.
    absorbed = h * noise_variance / 2
    assert_mean_is(moments.thermostat, LOW_DIFFUSION + absorbed, tolerance=0.08)
    spread = moments.thermostat_square - moments.thermostat.mean() ** 2
    assert_mean_is(spread + h, h / dim + h, tolerance=0.08 / (1 + dim))


@pytest.mark.parametrize(("step_size", "noise_variance"), [(0.3, 0.0), (0.3, 0.6), (0.05, 3.0)])
def test_in_many_dimensions_the_law_is_exact(step_size, noise_variance):
    h, curvature = step_size, 2.0
    moments = run(
        HIGH,
        shape=(16, 8192),
        step_size=h,
        curvature=curvature,
        noise_variance=noise_variance,
        num_draws=100,
        num_burn_in=100,
    )
    law = sgnht_law(h, curvature, noise_variance, HIGH_DIFFUSION)
    assert law.momentum_variance == pytest.approx(h, rel=1e-9)
    # What remains of a finite dimension is the thermostat's relative variance.
    finite_dim = h / 8192 / law.thermostat**2
    assert_mean_is(moments.position.mean(axis=1), law.position_variance, tolerance=finite_dim)
    assert_mean_is(moments.momentum.mean(axis=1), h, tolerance=finite_dim)
    assert_mean_is(moments.thermostat, law.thermostat, tolerance=finite_dim)


@pytest.mark.parametrize("step_size", [0.3, 0.01])
@pytest.mark.parametrize("noise_variance", [0.0, 0.6])
def test_the_bias_of_the_position_is_half_the_thermostat(step_size, noise_variance):
    law = sgnht_law(step_size, 2.0, noise_variance, HIGH_DIFFUSION)
    recursion = sghmc_recursion(
        "symplectic", step_size, 2.0, noise_variance, HIGH_DIFFUSION, law.thermostat
    )
    covariance = recursion.stationary_covariance()
    assert covariance[1, 1] == pytest.approx(step_size, rel=1e-9)
    assert covariance[0, 0] == pytest.approx((1 - law.thermostat / 2) / 2.0, rel=1e-9)


def test_it_runs_away_where_no_thermostat_balances_the_noise():
    h, curvature, noise_variance = 0.5, 2.0, 1.0
    assert 2 * HIGH_DIFFUSION + h * noise_variance > (1 - h * curvature / 4) ** 2
    moments = run(
        HIGH,
        shape=(16, 8192),
        step_size=h,
        curvature=curvature,
        noise_variance=noise_variance,
        num_draws=100,
        num_burn_in=100,
    )
    assert not np.isfinite(moments.position).any()


@pytest.mark.parametrize("diffusion", [-0.01, float("nan"), float("inf"), "some", None])
def test_a_diffusion_out_of_range_is_named(diffusion):
    with pytest.raises(ConfigError, match=f"sampler.kernel.diffusion={diffusion!r}: must be"):
        sgnht(gradient, diffusion=diffusion)
