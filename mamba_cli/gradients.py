"""What a minibatch becomes: an estimate of the gradient of the log posterior.

With the minibatch scaled by N/n and the prior counted once,

    standard          g~(theta) = grad log p(theta) + (N/n) sum_i grad log f(y_i | theta)
    control variates  g^(theta) = g(theta*) + (g~(theta) - g~(theta*))

where theta* is the centring position (the MAP) and both g~ use the same minibatch
(Baker et al., 2019; the paper's eq. in appendix D.3, in terms of U = -log posterior).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli.types import Array, HasFullLikelihood, Model, PyTree

BLOCK_ROWS = 1024
"""Rows per block of a pass over all data: a block and its logits stay in the cache."""

CHUNKS = (16, 32)
"""Positions whose full-data gradients share one pass over the rows."""

MAX_SHARED_DIM = 1_000
"""Largest dimension in which they do."""


class EstimateFn(Protocol):
    def __call__(self, constants: PyTree, position: Array, minibatch: PyTree) -> Array: ...


class GradientEstimator(NamedTuple):
    """A stochastic gradient, with its arrays apart so that programs take them as arguments.

    ``rows`` is what minibatches are drawn from (leading axis N), ``constants`` whatever
    else ``estimate(constants, position, minibatch) -> [dim]`` needs.
    """

    rows: PyTree
    constants: PyTree
    estimate: EstimateFn


def num_rows(rows: PyTree) -> int:
    """The leading axis that the leaves of ``rows`` share."""
    return int(jax.tree.leaves(rows)[0].shape[0])


def standard(model: Model) -> GradientEstimator:
    """The plain stochastic gradient g~."""

    def estimate(constants: PyTree, position: Array, minibatch: PyTree) -> Array:
        return scaled_gradient(model, position, minibatch)

    return GradientEstimator(model.data, (), estimate)


def control_variates(model: Model, centre: Array) -> GradientEstimator:
    """The gradient with control variates g^ around ``centre`` ``[dim]``.

    At ``position == centre`` every minibatch gives the full gradient exactly.
    """
    constants = {"centre": centre, "gradient_at_centre": full_gradients(model)(centre[None])[0]}

    def estimate(constants: PyTree, position: Array, minibatch: PyTree) -> Array:
        here = scaled_gradient(model, position, minibatch)
        at_centre = scaled_gradient(model, constants["centre"], minibatch)
        return constants["gradient_at_centre"] + (here - at_centre)

    return GradientEstimator(model.data, constants, estimate)


def scaled_gradient(model: Model, position: Array, minibatch: PyTree) -> Array:
    """grad log prior + (N/n) grad log likelihood of the minibatch, ``[dim]``."""
    scale = model.num_data / num_rows(minibatch)
    likelihood = jax.grad(model.log_likelihood)(position, minibatch)
    return jax.grad(model.log_prior)(position) + scale * likelihood


def all_data(model: Model) -> PyTree:
    """What functions of all rows take as their data: ``full_data`` where a model has it."""
    return model.full_data if isinstance(model, HasFullLikelihood) else model.data


def over_all_rows(
    model: Model, of_log_likelihood: Callable[[Callable[[Array], Array]], PyTree], data: PyTree
) -> PyTree:
    """``of_log_likelihood(l)`` with l(theta) the log likelihood of all rows.

    ``of_log_likelihood`` must be linear in l: a value, a gradient, a product with the Hessian.
    It is then summed over blocks of rows, unless the model has a likelihood of all rows in one
    piece. ``data`` is ``all_data(model)``, an argument so that no program captures it.
    """
    if isinstance(model, HasFullLikelihood):
        return of_log_likelihood(lambda position: model.full_log_likelihood(position, data))

    def of_block(block: PyTree) -> PyTree:
        return of_log_likelihood(lambda position: model.log_likelihood(position, block))

    return sum_over_blocks(of_block, data)


def full_gradients(model: Model) -> Callable[[Array], Array]:
    """A function from positions ``[m, dim]`` to the full-data gradients there, ``[m, dim]``.

    In low dimension the data are read once per chunk of positions, in blocks of rows, so that
    m gradients cost far less than m passes over memory; two programs, for chunks of ``CHUNKS``
    positions, serve every m: the last chunk is padded. Above ``MAX_SHARED_DIM`` the arithmetic
    of one gradient outweighs the reading: positions are taken one by one, by one program
    without padding, in the memory of one block of rows.
    """
    data = all_data(model)
    if model.dim > MAX_SHARED_DIM or isinstance(model, HasFullLikelihood):
        of_position = jax.jit(partial(full_gradient, model))

        def one_by_one(positions: Array) -> Array:
            rows = [np.asarray(of_position(jnp.asarray(p, jnp.float32), data)) for p in positions]
            return jnp.asarray(np.stack(rows))

        return one_by_one
    of_chunk = jax.jit(jax.vmap(partial(full_gradient, model), in_axes=(0, None)))

    def chunk_by_chunk(positions: Array) -> Array:
        results = []
        for start in range(0, len(positions), CHUNKS[-1]):
            part = np.asarray(positions[start : start + CHUNKS[-1]], np.float32)
            chunk = next(size for size in CHUNKS if size >= len(part))
            padding = np.repeat(part[-1:], chunk - len(part), axis=0)
            padded = jnp.asarray(np.concatenate([part, padding]))
            results.append(np.asarray(of_chunk(padded, data))[: len(part)])
        return jnp.asarray(np.concatenate(results))

    return chunk_by_chunk


def full_gradient(model: Model, position: Array, data: PyTree) -> Array:
    """Gradient of the log posterior over all rows, ``[dim]``; ``data`` is ``all_data(model)``."""

    def at_position(function: Callable[[Array], Array]) -> Array:
        return jax.grad(function)(position)

    likelihood: Array = over_all_rows(model, at_position, data)
    return at_position(model.log_prior) + likelihood


def sum_over_blocks(
    function: Callable[[PyTree], PyTree], rows: PyTree, block_rows: int = BLOCK_ROWS
) -> PyTree:
    """Sum of ``function(block)`` over consecutive blocks of ``rows``; the last may be shorter."""
    total = num_rows(rows)
    num_blocks, remainder = divmod(total, block_rows)

    def add_block(index: Array, accumulated: PyTree) -> PyTree:
        block = jax.tree.map(
            lambda leaf: lax.dynamic_slice_in_dim(leaf, index * block_rows, block_rows), rows
        )
        return jax.tree.map(jnp.add, accumulated, function(block))

    if num_blocks == 0:
        return function(rows)
    tail = jax.tree.map(lambda leaf: leaf[num_blocks * block_rows :], rows)
    if remainder:
        initial = function(tail)
    else:
        shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[:block_rows], rows))
        initial = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.fori_loop(0, num_blocks, add_block, initial)
