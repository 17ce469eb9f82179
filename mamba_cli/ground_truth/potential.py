"""The potential of NUTS and its gradient, for a group of chains in one pass over the data.

NUTS compares energies whose differences are of order 1, while the log density of a million rows is
of order 1e5, where float32 resolves 0.01. So the potential is the difference to the MAP, taken row
by row before anything is summed:

    U(z) = -sum_i [l_i(m + A z) - l_i(m)] - [log p(m + A z) - log p(m)].

The rows come in blocks that stay in the cache while one chain after the other uses them. Where a
model has its likelihood of all rows in one piece, that is taken instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from mamba_cli import gradients, map_estimate
from mamba_cli.ground_truth.coordinates import Coordinates
from mamba_cli.map_estimate import RowBlocks
from mamba_cli.types import Array, HasFullLikelihood, Model, PyTree


class Target(NamedTuple):
    """All arrays of the potential: passed to the compiled programs, never captured."""

    centre: Array  # [dim]
    matrix: Array | None  # [dim, dim]
    blocks: RowBlocks | None  # None where there is a likelihood of all rows in one piece
    row_reference: Array | None  # [num_blocks, block_rows], log likelihood of rows at the centre
    prior_reference: Array  # [], log prior at the centre; without blocks the log posterior
    full_data: PyTree = None  # what the likelihood of all rows reads
    scale: Array | None = None  # [dim]

    def moved(self, z: Array) -> Array:
        """theta - centre at ``z`` ``[num_chains, dim]``."""
        if self.scale is not None:
            return z * self.scale
        return z if self.matrix is None else z @ self.matrix.T

    def pulled_back(self, slopes: Array) -> Array:
        """The gradient in z of one in theta, ``[num_chains, dim]``."""
        if self.scale is not None:
            return slopes * self.scale
        return slopes if self.matrix is None else slopes @ self.matrix


def make_target(model: Model, coordinates: Coordinates, blocks: RowBlocks | None) -> Target:
    """The potential's arrays for positions around ``coordinates.centre``."""
    centre = jnp.asarray(coordinates.centre)
    matrix = None if coordinates.matrix is None else jnp.asarray(coordinates.matrix)
    scale = None if coordinates.scale is None else jnp.asarray(coordinates.scale)
    if isinstance(model, HasFullLikelihood):
        data = model.full_data
        log_posterior = jax.jit(partial(gradients.full_log_density, model))(centre, data)
        return Target(centre, matrix, None, None, log_posterior, data, scale)
    assert blocks is not None, "needed where the likelihood is one of rows"

    rows = jax.jit(partial(map_estimate.log_likelihoods_of_rows, model))(centre, blocks)
    prior = jnp.asarray(model.log_prior(centre))
    return Target(centre, matrix, blocks, rows, prior, scale=scale)


def potentials_and_gradients(model: Model, target: Target, z: Array) -> tuple[Array, Array]:
    """U ``[num_chains]`` and dU/dz ``[num_chains, dim]`` at ``z`` ``[num_chains, dim]``, one pass.

    Chains are taken one after the other within a block, in code of their own: a batched product
    puts the chains on the fastest axis, where XLA's vector code is several times slower.
    """
    positions = target.centre + target.moved(z)
    if target.blocks is None:
        of_position = jax.value_and_grad(partial(gradients.full_log_density, model))
        results = [of_position(position, target.full_data) for position in positions]
        values, slopes = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
        return target.prior_reference - values, -target.pulled_back(slopes)

    def log_likelihoods(part: tuple[PyTree, Array]) -> PyTree:
        assert target.blocks is not None
        block = target.blocks.read(part[0])

        def likelihood(position: Array) -> Array:
            return map_estimate.block_log_likelihood(model, position, *block, reference=part[1])

        results = [jax.value_and_grad(likelihood)(position) for position in positions]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

    parts = (target.blocks.parts, target.row_reference)
    (likelihood, gradient), _ = map_estimate.compensated_sum(log_likelihoods, parts)
    prior, prior_gradient = jax.vmap(jax.value_and_grad(model.log_prior))(positions)
    values = likelihood + (prior - target.prior_reference)
    slopes = gradient + prior_gradient
    return -values, -target.pulled_back(slopes)


def potential_fn(model: Model, target: Target) -> Callable[[Array], Array]:
    """U(z) for one chain ``[dim]``, whose ``vmap`` reads the data once for all chains.

    Its derivative is the gradient that came with the value: nothing is stored for a backward pass.
    """

    @custom_vmap
    def value_and_gradient(z: Array, target: Target) -> tuple[Array, Array]:
        values, slopes = potentials_and_gradients(model, target, z[None])
        return values[0], slopes[0]

    @value_and_gradient.def_vmap
    def _all_chains(
        axis_size: int, in_batched: list[Any], z: Array, target: Target
    ) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        assert in_batched[0], "the data are shared, the positions are not"
        return potentials_and_gradients(model, target, z), (True, True)

    @jax.custom_vjp
    def potential(z: Array) -> Array:
        return value_and_gradient(z, target)[0]

    potential.defvjp(
        lambda z: value_and_gradient(z, target),
        lambda gradient, cotangent: (cotangent * gradient,),
    )
    return potential
