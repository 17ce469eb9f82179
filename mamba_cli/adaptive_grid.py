"""A grid of hyperparameters for a model that brings none: laid around its curvature at the MAP.

SGLD with all rows moves a Gaussian coordinate of curvature lambda stably while h lambda < 4, and
so do SGHMC (symplectic), SGNHT and BADODAB: beyond 4 / lambda_max every chain diverges. Below it
the best step depends on how noisy the minibatches are, so the grid goes down from there.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli import gradients, map_estimate
from mamba_cli.errors import NothingUsableError
from mamba_cli.types import Array, Model, PyTree

NUM_STEP_SIZES = 10
"""Half decades below the largest stable step size: four and a half decades in all."""

SMALLEST_BATCH = 10
"""Rows a batch of the grid has at least, where there are as many."""

PERCENTS = (100.0, 10.0, 1.0, 0.1)

MAX_ITERATIONS = 100
"""Of the power method; each is one product with the Hessian, about two gradients over all rows."""

CLOSE_ENOUGH = 1e-2
"""Relative change of the eigenvalue at which the power method ends."""


def largest_curvature(model: Model, position: Array, rng_key: Array) -> float:
    """lambda_max of the Hessian of the negative log posterior at ``position``, over all rows.

    The power method (Golub and Van Loan, 2013, section 7.3.1) with products
    H v = -d/de grad log p(theta + e v) at e = 0, from a random start.

    Raises
    ------
    NothingUsableError
        The curvature is not a finite number above 0: the log density is flat, or has no maximum.
    """

    @jax.jit
    def search(at: Array, start: Array, data: PyTree) -> Array:
        def going(carry: tuple[Array, Array, Array, Array]) -> Array:
            count, _, value, before = carry
            return (count < MAX_ITERATIONS) & (jnp.abs(value - before) > CLOSE_ENOUGH * value)

        def iterate(
            carry: tuple[Array, Array, Array, Array],
        ) -> tuple[Array, Array, Array, Array]:
            count, vector, value, _ = carry
            image = -map_estimate.hessian_product(model, at, vector, data)
            norm = jnp.linalg.norm(image)
            return count + 1, image / jnp.maximum(norm, 1e-30), norm, value

        first = start / jnp.linalg.norm(start)
        carry = (jnp.int32(0), first, jnp.float32(1.0), jnp.float32(0.0))
        return lax.while_loop(going, iterate, carry)[2]

    start = jax.random.normal(rng_key, (model.dim,))
    value = float(search(jnp.asarray(position), start, gradients.all_data(model)))
    if not (math.isfinite(value) and value > 0):
        raise NothingUsableError(
            f"model {model.name}: the curvature of the log posterior at the MAP is {value}, so "
            "there is no scale for a grid of step sizes; check the model, or give the grid, as "
            "'tuner.grid.step_size=[1e-3,1e-4,1e-5]'"
        )
    return value


def step_sizes(curvature: float) -> tuple[float, ...]:
    """Half decades from the largest at which full-data chains are stable, 4 / ``curvature``, down.

    Rounded down to a power of the root of ten, so that the grid does not hang on the last digits
    of the curvature.
    """
    top = math.floor(2 * math.log10(4 / curvature))
    return tuple(float(10.0 ** ((top - i) / 2)) for i in range(NUM_STEP_SIZES))


def batch_percents(num_data: int) -> tuple[float, ...]:
    """All rows and every tenth part of them that has ``SMALLEST_BATCH`` rows, to a thousandth."""
    return tuple(p for p in PERCENTS if p == 100.0 or p * num_data / 100 >= SMALLEST_BATCH)


def describe(curvature: float, sizes: tuple[float, ...], percents: tuple[float, ...]) -> str:
    """The grid in one line, for a reader."""
    exponents = np.log10(sizes)
    listed = ", ".join(f"{percent:g}" for percent in percents)
    return (
        f"largest curvature at the MAP {curvature:.3g}; step sizes 10^{exponents[0]:g} to "
        f"10^{exponents[-1]:g} ({len(sizes)}), batches of {listed} % of the rows"
    )
