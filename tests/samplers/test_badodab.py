"""BADODAB against its equations, its exact stationary laws and its order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_chains import NoisyGaussian, assert_mean_is, gradient, run
from gaussian_laws import badodab_law, sgnht_law

from mamba_cli.errors import ConfigError
from mamba_cli.samplers.badodab import badodab, exprel
from mamba_cli.samplers.sgnht import ThermostatState, sgnht

# Made once: a kernel is a static argument of the compiled loop.
LOW_DIFFUSION, HIGH_DIFFUSION = 0.1, 0.15
LOW, HIGH = (badodab(gradient, diffusion=a) for a in (LOW_DIFFUSION, HIGH_DIFFUSION))


def random_state(thermostat: float, dim: int = 5) -> ThermostatState:
    vectors = jax.random.normal(jax.random.key(0), (3, dim))
    return ThermostatState(*vectors, jnp.float32(thermostat))


def noisy_gaussian(dim: int = 5) -> NoisyGaussian:
    return NoisyGaussian(jnp.arange(float(dim)), jnp.float32(2.0), jnp.float32(0.25))


def leimkuhler_shang_step(q, p, xi, force, time, mass, sigma, noise, new_force):
    """One BADODAB step in the authors' units: unit mass and temperature, float64."""
    p = p + time / 2 * force
    q = q + time / 2 * p
    xi = xi + time / 2 / mass * (p @ p - p.size)
    if xi == 0:
        p = p + sigma * np.sqrt(time) * noise
    else:
        decay = np.exp(-xi * time)
        p = decay * p + sigma * np.sqrt((1 - decay**2) / (2 * xi)) * noise
    xi = xi + time / 2 / mass * (p @ p - p.size)
    q = q + time / 2 * p
    return q, p + time / 2 * new_force(q), xi


@pytest.mark.parametrize("diffusion", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("thermostat", [-0.4, 0.0, 0.5])
@pytest.mark.parametrize("step_size", [1e-4, 0.3])
def test_one_step_is_the_authors_in_their_units(diffusion, thermostat, step_size):
    key, state = jax.random.key(1), random_state(thermostat)

    new = badodab(gradient, diffusion=diffusion).step(
        key, state, noisy_gaussian(), jnp.float32(step_size)
    )

    time = np.sqrt(step_size)
    position, gradient_there, momentum = (np.asarray(x, np.float64) for x in state[:3])
    q, p, xi = leimkuhler_shang_step(
        position,
        momentum / time,
        thermostat / time,
        gradient_there,
        time,
        mass=5,
        sigma=np.sqrt(2 * diffusion / time),
        noise=np.asarray(jax.random.normal(key, (5,)), np.float64),
        new_force=lambda q: -2.0 * q + 0.5 * np.arange(5),
    )
    np.testing.assert_allclose(new.position, q, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new.momentum, p * time, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(new.thermostat, xi * time, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new.gradient, -2.0 * q + 0.5 * np.arange(5), rtol=1e-5, atol=1e-5)


def test_to_first_order_the_step_is_that_of_sgnht():
    key, h, small = jax.random.key(3), 1e-4, 1e-4
    state = random_state(small)._replace(
        momentum=np.sqrt(h) * jax.random.normal(jax.random.key(4), (5,))
    )
    steps = [
        sampler(gradient, diffusion=small).step(key, state, noisy_gaussian(), jnp.float32(h))
        for sampler in (sgnht, badodab)
    ]
    changes = [
        np.concatenate([s.position - state.position, s.momentum - state.momentum]) for s in steps
    ]
    # The largest terms are of the size of v = 0.01; they agree to order h = 1e-4.
    np.testing.assert_allclose(*changes, atol=5 * h)
    np.testing.assert_allclose(
        steps[0].thermostat - small, steps[1].thermostat - small, rtol=0.2, atol=1e-6
    )


@pytest.mark.parametrize("thermostat", [0.0, 1e-30, -1e-30, 1e-8, -1e-8, 1e-3, -1e-3])
def test_a_thermostat_near_zero_gives_no_nan_and_the_full_noise(thermostat):
    # The momentum carries exactly h, so that D leaves the thermostat where it is.
    h, diffusion, dim = 0.25, 0.3, 4
    momentum = jnp.full(dim, 0.5)
    state = ThermostatState(jnp.zeros(dim), jnp.zeros(dim), momentum, jnp.float32(thermostat))
    key = jax.random.key(6)
    new = badodab(lambda position, _: jnp.zeros(dim), diffusion=diffusion).step(
        key, state, None, jnp.float32(h)
    )
    noise = np.asarray(jax.random.normal(key, (dim,)), np.float64)
    expected = (1 - thermostat) * 0.5 + np.sqrt(2 * diffusion * h * (1 - thermostat)) * noise
    np.testing.assert_allclose(new.momentum, expected, rtol=2e-6, atol=1e-6)


def test_exprel_is_accurate_and_positive_everywhere():
    magnitudes = np.logspace(-12, 1.9, 200)
    x = np.concatenate([-magnitudes[::-1], [0.0], magnitudes]).astype(np.float32)
    exact = np.ones(x.size)
    nonzero = x != 0
    exact[nonzero] = np.expm1(x[nonzero].astype(np.float64)) / x[nonzero]
    np.testing.assert_allclose(exprel(jnp.asarray(x)), exact, rtol=1e-6)
    assert exprel(jnp.float32(-np.inf)) == 0


def test_without_diffusion_or_gradient_the_momentum_only_shrinks_or_grows():
    kernel = badodab(lambda position, _: jnp.zeros_like(position), diffusion=0.0)
    state = ThermostatState(jnp.zeros(2), jnp.zeros(2), jnp.array([0.3, -0.4]), jnp.float32(0.0))
    for _ in range(10):
        state = kernel.step(jax.random.key(0), state, None, jnp.float32(0.1))
    assert np.isfinite(state.position).all()
    np.testing.assert_allclose(state.momentum[1] / state.momentum[0], -4 / 3, rtol=1e-5)


@pytest.mark.parametrize("noise_variance", [0.0, 2.0])
@pytest.mark.parametrize("dim", [1, 4])
def test_the_momentum_read_by_the_thermostat_has_variance_h(dim, noise_variance):
    h = 0.02
    curvature = np.array([2.0, 1.0, 3.0, 0.5])[:dim]
    moments = run(
        LOW,
        shape=(8192 // dim, dim),
        step_size=h,
        curvature=curvature,
        noise_variance=noise_variance,
        num_draws=600,
        num_burn_in=300,
    )
    # A half kick on either side of a position lie the two readings: v +- h g / 2.
    read = moments.momentum + h**2 / 4 * moments.gradient
    assert_mean_is(read.mean(axis=1), h)
    # The diffusion's own law, to second order in sqrt(h): positions N(0, 1/lambda) and
    # the thermostat N(a + hV/2, h/D).
    assert_mean_is((curvature * moments.position).mean(axis=1), 1.0, tolerance=0.002)
    assert_mean_is(moments.thermostat, LOW_DIFFUSION + h * noise_variance / 2, tolerance=h)
    spread = moments.thermostat_square - moments.thermostat.mean() ** 2
    assert_mean_is(spread + h, h / dim + h, tolerance=h / (1 + dim))


@pytest.mark.parametrize(("step_size", "noise_variance"), [(0.3, 0.0), (0.5, 1.0), (0.05, 3.0)])
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
    law = badodab_law(h, curvature, noise_variance, HIGH_DIFFUSION)
    # What remains of a finite dimension is the thermostat's relative variance.
    finite_dim = h / 8192 / law.thermostat**2
    assert_mean_is(moments.position.mean(axis=1), law.position_variance, tolerance=finite_dim)
    assert_mean_is(moments.momentum.mean(axis=1), law.momentum_variance, tolerance=finite_dim)
    assert_mean_is(moments.thermostat, law.thermostat, tolerance=finite_dim)


@pytest.mark.parametrize("kappa", [0.01, 1.0, 3.9])
def test_with_exact_gradients_the_positions_have_the_variance_of_the_target(kappa):
    law = badodab_law(kappa / 2.0, 2.0, 0.0, HIGH_DIFFUSION)
    assert law.thermostat == pytest.approx(HIGH_DIFFUSION, rel=1e-6)
    assert law.position_variance == pytest.approx(1 / 2.0, rel=1e-9)
    assert law.momentum_variance == pytest.approx(kappa / 2.0 * (1 - kappa / 4), rel=1e-9)


def test_with_noisy_gradients_it_is_of_second_order_and_sgnht_of_first():
    # The same diffusion at time steps halved: h falls by 4, friction per step by 2, and
    # the noise of one gradient doubles so that its sum over a unit of time stays.
    def biases(law):
        return np.array(
            [law(0.2 * t**2, 2.0, 1 / t, 0.1 * t).position_variance - 0.5 for t in (0.25, 0.125)]
        )

    coarse, fine = biases(badodab_law)
    assert coarse / fine == pytest.approx(4, rel=0.05)
    assert abs(fine) < 1e-4
    coarse, fine = biases(sgnht_law)
    assert coarse / fine == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("diffusion", [-0.01, float("nan"), float("inf"), "some", None])
def test_a_diffusion_out_of_range_is_named(diffusion):
    with pytest.raises(ConfigError, match=f"sampler.kernel.diffusion={diffusion!r}: must be"):
        badodab(gradient, diffusion=diffusion)
