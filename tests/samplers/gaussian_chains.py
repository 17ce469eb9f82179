"""Chains on a Gaussian target whose gradient noise is handed in as the minibatch."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.types import Array, Kernel


class NoisyGaussian(NamedTuple):
    """A minibatch: everything the gradient of a Gaussian log density depends on."""

    noise: Array  # [dim] standard normal
    curvature: Array  # [dim] or scalar
    noise_variance: Array  # scalar, V


def gradient(position: Array, minibatch: NoisyGaussian) -> Array:
    return -minibatch.curvature * position + jnp.sqrt(minibatch.noise_variance) * minibatch.noise


class Moments(NamedTuple):
    """Averages over time after the burn-in: squares, with the axes of what is squared."""

    position: np.ndarray
    momentum: np.ndarray
    cross: np.ndarray  # position times momentum
    gradient: np.ndarray
    thermostat: np.ndarray  # not squared
    thermostat_square: np.ndarray


def run(
    kernel: Kernel,
    *,
    shape: tuple[int, ...],
    step_size: float,
    curvature,
    noise_variance: float,
    num_draws: int,
    num_burn_in: int,
    num_integration_steps: int = 1,
    refresh: bool = False,
    seed: int = 0,
) -> Moments:
    """Second moments after a burn-in, of chains [num_chains, dim] or of one chain [dim].

    The coordinates of one chain without a thermostat never meet, so they are
    independent chains themselves.
    """
    return Moments(
        *map(
            np.asarray,
            _run(
                kernel,
                shape,
                num_draws,
                num_burn_in,
                num_integration_steps,
                refresh,
                jax.random.key(seed),
                jnp.float32(step_size),
                jnp.asarray(curvature, jnp.float32),
                jnp.float32(noise_variance),
            ),
        )
    )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _run(
    kernel,
    shape,
    num_draws,
    num_burn_in,
    num_integration_steps,
    refresh,
    rng_key,
    step_size,
    curvature,
    noise_variance,
):
    num_chains = shape[0] if len(shape) == 2 else None
    over_chains = (lambda f: f) if num_chains is None else jax.vmap

    def keys(rng_key):
        return rng_key if num_chains is None else jax.random.split(rng_key, num_chains)

    def minibatch(rng_key):
        noise = jax.random.normal(rng_key, shape)
        rows = jnp.broadcast_to(curvature, shape)
        spread = jnp.broadcast_to(noise_variance, shape[:-1])
        return NoisyGaussian(noise, rows, spread)

    def step(state, rng_key):
        step_key, minibatch_key = jax.random.split(rng_key)
        state = over_chains(lambda k, s, m: kernel.step(k, s, m, step_size))(
            keys(step_key), state, minibatch(minibatch_key)
        )
        return state, None

    def draw(carry, rng_key):
        state, total, index = carry
        refresh_key, steps_key = jax.random.split(rng_key)
        if refresh:
            state = over_chains(lambda k, s: kernel.refresh(k, s, step_size))(
                keys(refresh_key), state
            )
        state, _ = jax.lax.scan(step, state, jax.random.split(steps_key, num_integration_steps))
        momentum = getattr(state, "momentum", jnp.zeros_like(state.position))
        thermostat = getattr(state, "thermostat", jnp.zeros(shape[:-1]))
        new = Moments(
            position=state.position**2,
            momentum=momentum**2,
            cross=state.position * momentum,
            gradient=state.gradient**2,
            thermostat=thermostat,
            thermostat_square=thermostat**2,
        )
        counted = (index >= num_burn_in).astype(jnp.float32)
        total = jax.tree.map(lambda t, n: t + counted * n / num_draws, total, new)
        return (state, total, index + 1), None

    init_key, position_key, minibatch_key, draws_key = jax.random.split(rng_key, 4)
    position = jax.random.normal(position_key, shape) / jnp.sqrt(curvature)
    state = over_chains(lambda k, p, m: kernel.init(k, p, m, step_size))(
        keys(init_key), position, minibatch(minibatch_key)
    )
    per_position, per_chain = jnp.zeros(shape), jnp.zeros(shape[:-1])
    total = Moments(*(per_position,) * 4, *(per_chain,) * 2)
    (_, total, _), _ = jax.lax.scan(
        draw, (state, total, 0), jax.random.split(draws_key, num_burn_in + num_draws)
    )
    return total


def assert_mean_is(samples: np.ndarray, expected: float, *, tolerance: float = 0.0) -> None:
    """The mean of independent samples is ``expected`` within 4 standard errors.

    ``tolerance`` is relative, for what is not sampling error (float32, an expansion).
    The standard error may not exceed 1 % of what is expected, or the check is empty.
    """
    samples = np.asarray(samples, np.float64).ravel()
    standard_error = samples.std(ddof=1) / np.sqrt(samples.size)
    assert standard_error < 0.01 * abs(expected), (standard_error, expected)
    difference = samples.mean() - expected
    allowed = 4 * standard_error + tolerance * abs(expected)
    assert abs(difference) < allowed, (
        f"{samples.mean()} is not {expected}: {difference / standard_error:.1f} standard errors"
    )
