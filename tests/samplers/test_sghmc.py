"""SGHMC, both integrators, against its equation, BlackJAX and its exact stationary laws."""

from __future__ import annotations

import blackjax.sgmcmc.diffusions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_chains import NoisyGaussian, assert_mean_is, gradient, run
from gaussian_laws import refreshed_position_variance, sghmc_recursion

from mamba_cli.errors import ConfigError
from mamba_cli.samplers.sghmc import SGHMCState, sghmc

INTEGRATORS = ("euler", "symplectic")
NUM_CHAINS = 8192
# Made once: a kernel is a static argument of the compiled loop.
DEFAULTS = {integrator: sghmc(gradient, integrator=integrator) for integrator in INTEGRATORS}
FRICTION, NOISE_ESTIMATE = 0.4, 0.05
DAMPED = {
    integrator: sghmc(
        gradient, friction=FRICTION, noise_estimate=NOISE_ESTIMATE, integrator=integrator
    )
    for integrator in INTEGRATORS
}


def random_state(dim: int = 5) -> SGHMCState:
    return SGHMCState(*jax.random.normal(jax.random.key(0), (3, dim)))


def standard_gaussian(dim: int = 5) -> NoisyGaussian:
    return NoisyGaussian(jnp.arange(float(dim)), jnp.float32(2.0), jnp.float32(0.25))


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("parameters", [{}, {"friction": 0.3, "noise_estimate": 0.1}])
@pytest.mark.parametrize("step_size", [1e-6, 0.3])
def test_one_step_is_the_equation(integrator, parameters, step_size):
    kernel = sghmc(gradient, integrator=integrator, **parameters)
    key, state = jax.random.key(1), random_state()

    new = kernel.step(key, state, standard_gaussian(), jnp.float32(step_size))

    friction = parameters.get("friction", 0.01)
    noise_estimate = parameters.get("noise_estimate", 0.0)
    noise = np.asarray(jax.random.normal(key, (5,)), np.float64)
    position, gradient_there, momentum = (np.asarray(x, np.float64) for x in state)
    new_momentum = (
        momentum
        + step_size * gradient_there
        - friction * momentum
        + np.sqrt(2 * (friction - noise_estimate) * step_size) * noise
    )
    new_position = position + (momentum if integrator == "euler" else new_momentum)
    np.testing.assert_allclose(new.momentum, new_momentum, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new.position, new_position, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        new.gradient, -2.0 * new_position + 0.5 * np.arange(5), rtol=1e-5, atol=1e-5
    )


def test_euler_is_the_default_and_one_step_is_blackjax(monkeypatch):
    key, state, h, friction, noise_estimate = jax.random.key(2), random_state(), 0.09, 0.3, 0.1
    time = np.sqrt(h)  # BlackJAX's step: its velocity is v / time, its friction per unit of time
    monkeypatch.setattr(
        blackjax.sgmcmc.diffusions,
        "generate_gaussian_noise",
        lambda rng_key, position: jax.random.normal(rng_key, position.shape),
    )
    integrate = blackjax.sgmcmc.diffusions.sghmc(friction / time, 2 * noise_estimate / h)
    position, velocity = integrate(key, state.position, state.momentum / time, state.gradient, time)
    kernel = sghmc(gradient, friction=friction, noise_estimate=noise_estimate)
    ours = kernel.step(key, state, standard_gaussian(), jnp.float32(h))
    np.testing.assert_allclose(ours.position, position, rtol=1e-5)
    np.testing.assert_allclose(ours.momentum, velocity * time, rtol=1e-5)


def test_refresh_redraws_the_momentum_and_nothing_else():
    state = random_state(100_000)
    new = sghmc(gradient).refresh(jax.random.key(4), state, jnp.float32(0.04))
    assert new.position is state.position
    assert new.gradient is state.gradient
    assert_mean_is(new.momentum**2, 0.04)


def test_init_draws_the_momentum():
    position = jnp.ones(100_000)
    state = sghmc(gradient).init(
        jax.random.key(5), position, standard_gaussian(100_000), jnp.float32(0.04)
    )
    assert state.position is position
    assert_mean_is(state.momentum**2, 0.04)


def test_without_gradient_and_noise_the_momentum_decays_geometrically():
    kernel = sghmc(lambda position, _: jnp.zeros_like(position), friction=0.2, noise_estimate=0.2)
    state = SGHMCState(jnp.zeros(2), jnp.zeros(2), jnp.array([1.0, -2.0]))
    for _ in range(3):
        state = kernel.step(jax.random.key(0), state, None, jnp.float32(0.5))
    np.testing.assert_allclose(state.momentum, 0.8**3 * np.array([1.0, -2.0]), rtol=1e-6)
    np.testing.assert_allclose(state.position, (1 + 0.8 + 0.64) * np.array([1, -2]), rtol=1e-6)


@pytest.mark.parametrize("friction", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("kappa", [0.005, 0.3, 1.5])
@pytest.mark.parametrize("noise_variance", [0.0, 3.0])
def test_the_printed_variances_solve_the_lyapunov_equation(friction, kappa, noise_variance):
    h, curvature = kappa / 2, 2.0
    q = 2 * friction * h + h**2 * noise_variance
    printed = q * (1 - friction / 2) / (kappa * friction * (2 - friction - kappa / 2))
    law = sghmc_recursion("symplectic", h, curvature, noise_variance, friction, friction)
    assert law.stationary_covariance()[0, 0] == pytest.approx(printed, rel=1e-9)

    law = sghmc_recursion("euler", h, curvature, noise_variance, friction, friction)
    spectral_radius = np.abs(np.linalg.eigvals(law.transition)).max()
    assert (spectral_radius < 1) == (kappa < friction)
    if kappa < friction:
        printed = (q * (1 - friction / 2 + kappa / 2)) / (
            kappa * (friction - kappa) * (2 - friction + kappa / 2)
        )
        assert law.stationary_covariance()[0, 0] == pytest.approx(printed, rel=1e-9)


def run_damped(integrator, *, step_size, curvature, noise_variance):
    return run(
        DAMPED[integrator],
        shape=(2 * NUM_CHAINS,),
        step_size=step_size,
        curvature=np.repeat(curvature, NUM_CHAINS),
        noise_variance=noise_variance,
        num_draws=200,
        num_burn_in=100,
        seed=1,
    )


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("noise_variance", [0.0, 4.0])
def test_without_refresh_the_stationary_law_is_exact(integrator, noise_variance):
    h = 0.05
    curvatures = np.array([1.0, 2.0]) if integrator == "euler" else np.array([2.0, 20.0])
    moments = run_damped(
        integrator, step_size=h, curvature=curvatures, noise_variance=noise_variance
    )
    for i, curvature in enumerate(curvatures):
        chains = slice(i * NUM_CHAINS, (i + 1) * NUM_CHAINS)
        injected = FRICTION - NOISE_ESTIMATE
        recursion = sghmc_recursion(integrator, h, curvature, noise_variance, injected, FRICTION)
        law = recursion.stationary_covariance()
        assert_mean_is(moments.position[chains], law[0, 0])
        assert_mean_is(moments.momentum[chains], law[1, 1])
        # The correlation may be zero: compared after adding one.
        scale = np.sqrt(law[0, 0] * law[1, 1])
        assert_mean_is(1 + moments.cross[chains] / scale, 1 + law[0, 1] / scale)


def test_euler_diverges_where_symplectic_is_stable():
    # h lambda = 1 lies between friction = 0.4 and 4 - 2 friction = 3.2.
    largest = {
        integrator: run_damped(
            integrator, step_size=1.0, curvature=np.ones(2), noise_variance=0.0
        ).position.max()
        for integrator in INTEGRATORS
    }
    assert largest["symplectic"] < 100
    assert not largest["euler"] < 1e6


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("noise_variance", [0.0, 4.0])
def test_with_refresh_the_stationary_variance_is_exact(integrator, noise_variance):
    h, curvatures, num_integration_steps = 0.04, np.array([1.0, 3.0]), 5
    moments = run(
        DEFAULTS[integrator],
        shape=(2 * NUM_CHAINS,),
        step_size=h,
        curvature=np.repeat(curvatures, NUM_CHAINS),
        noise_variance=noise_variance,
        num_draws=60,
        num_burn_in=60,
        num_integration_steps=num_integration_steps,
        refresh=True,
        seed=2,
    )
    for i, curvature in enumerate(curvatures):
        law = sghmc_recursion(integrator, h, curvature, noise_variance, 0.01, 0.01)
        expected = refreshed_position_variance(law, h, num_integration_steps)
        assert_mean_is(moments.position[i * NUM_CHAINS : (i + 1) * NUM_CHAINS], expected)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"friction": 0.0}, "friction=0.0"),
        ({"friction": 1.5}, "friction=1.5"),
        ({"friction": float("nan")}, "friction=nan"),
        ({"friction": "much"}, "friction='much'"),
        ({"friction": True}, "friction=True"),
        ({"noise_estimate": -0.1}, "noise_estimate=-0.1"),
        ({"noise_estimate": 0.02}, "noise_estimate=0.02"),
        ({"noise_estimate": None}, "noise_estimate=None"),
        ({"integrator": "leapfrog"}, "integrator='leapfrog'"),
    ],
)
def test_a_parameter_out_of_range_is_named(parameters, named):
    with pytest.raises(ConfigError, match=f"sampler.kernel.{named}: must be"):
        sghmc(gradient, **parameters)


@pytest.mark.parametrize("noise_estimate", [0.0, 1.0])
def test_the_ends_of_the_ranges_are_allowed(noise_estimate):
    sghmc(gradient, friction=1, noise_estimate=noise_estimate)
