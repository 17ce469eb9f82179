"""What a minibatch becomes: an estimate of the gradient of the log posterior.

With the minibatch scaled by N/n and the prior counted once,

    standard          g~(theta) = grad log p(theta) + (N/n) sum_i grad log f(y_i | theta)
    control variates  g^(theta) = g(theta*) + (g~(theta) - g~(theta*))

where theta* is the centring position (the MAP) and both g~ use the same minibatch
(Baker et al., 2019; the paper's eq. in appendix D.3, in terms of U = -log posterior).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli.compilation import cpu_threads
from mamba_cli.minibatch import columns_of, gather
from mamba_cli.types import (
    AllRows,
    Array,
    BlockSelection,
    HasControlVariates,
    HasFullLikelihood,
    HasLogLikelihoods,
    Model,
    PyTree,
    ReadsColumns,
    Selection,
)

BLOCK_ROWS = 1024
"""Rows per block of a pass over all data: a block and its logits stay in the cache."""

MINIBATCH_BLOCK_BYTES = 96 * 1024
MIN_MINIBATCH_BLOCK_ROWS = 2048
"""A minibatch larger than both is gathered in blocks."""

WHOLE_ROWS = 1 << 18
"""All rows as a minibatch, where there are more, are taken in blocks: what a model computes of each
row need not be in memory for all of them."""

STATISTICS_ROWS = 4096
"""Rows whose statistics at the centre of control variates are made at a time."""

CHUNKS = (16, 32)
"""Positions whose full-data gradients share one pass over the rows."""

LONG_CHUNKS = (1, 4)
"""The same of long positions, where the model evaluates several at once: more gain nothing."""

MAX_SHORT_DIM = 1_000
"""Largest dimension of a short position."""


class EstimateFn(Protocol):
    def __call__(self, constants: PyTree, position: Array, minibatch: PyTree) -> Array: ...


class GradientEstimator(NamedTuple):
    """A stochastic gradient, with its arrays apart so that programs take them as arguments.

    ``rows`` is what minibatches are drawn from (leading axis N), ``constants`` whatever
    else ``estimate(constants, position, minibatch) -> [dim]`` needs. ``columns`` says that
    ``estimate`` takes :class:`~mamba_cli.types.Columns`, and ``full_data``, if there is any, is
    what it takes as :class:`~mamba_cli.types.AllRows`.
    """

    rows: PyTree
    constants: PyTree
    estimate: EstimateFn
    columns: bool = False
    full_data: PyTree = None


def num_rows(rows: PyTree) -> int:
    """The leading axis that the leaves of ``rows`` share."""
    return int(jax.tree.leaves(rows)[0].shape[0])


def standard(model: Model) -> GradientEstimator:
    """The plain stochastic gradient g~."""

    def estimate(constants: PyTree, position: Array, minibatch: PyTree) -> Array:
        return scaled_gradient(model, position, minibatch)

    return GradientEstimator(model.data, (), estimate, **_layouts(model))


def control_variates(model: Model, centre: Array) -> GradientEstimator:
    """The gradient with control variates g^ around ``centre`` ``[dim]``.

    At ``position == centre`` every minibatch gives the full gradient: exactly, or to the
    rounding of float32 where the model keeps statistics of the centre
    (:class:`~mamba_cli.types.HasControlVariates`). A minibatch of all rows is the full gradient.
    """
    at_centre = full_gradients(model)(np.asarray(centre)[None])[0]
    constants = {"centre": centre, "gradient_at_centre": jnp.asarray(at_centre)}
    rows, difference_of, data_of = _differences(model, centre)

    def estimate(constants: PyTree, position: Array, minibatch: PyTree) -> Array:
        if is_whole(minibatch):
            return scaled_gradient(model, position, minibatch, data_of)

        def difference(rows: PyTree) -> Array:
            return difference_of(position, constants["centre"], rows)

        prior_gradient = jax.grad(model.log_prior)
        prior = prior_gradient(position) - prior_gradient(constants["centre"])
        scale = model.num_data / size_of(minibatch, model.num_data)
        likelihood = scale * sum_over_minibatch(difference, minibatch)
        return constants["gradient_at_centre"] + (prior + likelihood)

    return GradientEstimator(rows, constants, estimate, **_layouts(model))


def _layouts(model: Model) -> dict[str, Any]:
    return {
        "columns": isinstance(model, ReadsColumns) and model.reads_columns,
        "full_data": model.full_data if isinstance(model, HasFullLikelihood) else None,
    }


def _differences(
    model: Model, centre: Array
) -> tuple[PyTree, Callable[[Array, Array, PyTree], Array], Callable[[PyTree], PyTree]]:
    """What minibatches are drawn from, the difference of two gradients there, and their data.

    The statistics of the centre, where the model has any, are drawn along with the data.
    """

    def two_gradients(position: Array, centre: Array, rows: PyTree) -> Array:
        likelihood_gradient = jax.grad(model.log_likelihood)
        return likelihood_gradient(position, rows) - likelihood_gradient(centre, rows)

    if not isinstance(model, HasControlVariates):
        return model.data, two_gradients, lambda rows: rows
    own = model
    statistics = statistics_of_blocks(own, centre, model.data)
    if not jax.tree.leaves(statistics):

        def without(position: Array, centre: Array, rows: PyTree) -> Array:
            return own.gradient_difference(position, centre, rows, statistics)

        return model.data, without, lambda rows: rows

    def with_statistics(position: Array, centre: Array, rows: PyTree) -> Array:
        return own.gradient_difference(position, centre, *rows)

    return (model.data, statistics), with_statistics, lambda rows: rows[0]


def statistics_of_blocks(model: HasControlVariates, centre: Array, data: PyTree) -> PyTree:
    """``centre_statistics`` of all rows, made a block at a time."""
    of_block = jax.jit(model.centre_statistics)
    parts = []
    for start in range(0, num_rows(data), STATISTICS_ROWS):
        stop = start + STATISTICS_ROWS
        block = jax.tree.map(lambda leaf: leaf[start:stop], data)  # noqa: B023
        parts.append(of_block(centre, block))
        if not jax.tree.leaves(parts[0]):
            return parts[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def scaled_gradient(
    model: Model,
    position: Array,
    minibatch: PyTree,
    data_of: Callable[[PyTree], PyTree] = lambda rows: rows,
) -> Array:
    """grad log prior + (N/n) grad log likelihood of the minibatch, ``[dim]``.

    ``data_of`` picks the model's data from rows that have more.
    """
    prior = jax.grad(model.log_prior)(position)
    if isinstance(minibatch, AllRows):
        assert isinstance(model, HasFullLikelihood)
        return prior + jax.grad(model.full_log_likelihood)(position, minibatch.full_data)
    scale = model.num_data / size_of(minibatch, model.num_data)
    likelihood_gradient = jax.grad(model.log_likelihood)
    likelihood = sum_over_minibatch(
        lambda rows: likelihood_gradient(position, data_of(rows)), minibatch
    )
    return prior + scale * likelihood


def is_whole(minibatch: PyTree) -> bool:
    """Whether a minibatch is known to be all rows of the data."""
    blocks = isinstance(minibatch, BlockSelection) and minibatch.whole
    return blocks or isinstance(minibatch, AllRows)


def size_of(minibatch: PyTree, num_data: int) -> int:
    """Rows of a minibatch, gathered or not."""
    if isinstance(minibatch, AllRows):
        return num_data
    if isinstance(minibatch, BlockSelection):
        return minibatch.size
    return num_rows(minibatch.indices if isinstance(minibatch, Selection) else minibatch)


def sum_over_minibatch(function: Callable[[PyTree], PyTree], minibatch: PyTree) -> PyTree:
    """``function``, a sum over rows, of the rows of a minibatch, taken in blocks.

    A block is gathered and used while it is in the cache of the core that gathered it:
    for 10,000 rows of 40 bytes this takes two thirds of the time of one gather. Blocks of
    columns are read one by one, where they lie. Rows themselves are taken together up to
    ``WHOLE_ROWS``.
    """
    if isinstance(minibatch, BlockSelection):
        return _sum_over_selection(function, minibatch)
    if not isinstance(minibatch, Selection):
        if num_rows(minibatch) <= WHOLE_ROWS:
            return function(minibatch)
        return sum_over_blocks(function, minibatch, _block_rows(minibatch))
    rows, indices = minibatch
    block_rows = _block_rows(rows)
    if len(indices) <= block_rows:
        return function(gather(rows, indices))

    def of_block(indices: Array) -> PyTree:
        return function(lax.optimization_barrier(gather(rows, indices)))

    return sum_over_blocks(of_block, indices, block_rows)


def _block_rows(rows: PyTree) -> int:
    row_bytes = max(1, sum(leaf.nbytes // num_rows(rows) for leaf in jax.tree.leaves(rows)))
    block_rows = max(MINIBATCH_BLOCK_BYTES // row_bytes, MIN_MINIBATCH_BLOCK_ROWS)
    # Whole cache lines and vectors: a block of an odd size takes twice as long.
    return block_rows - block_rows % 128


def _sum_over_selection(function: Callable[[PyTree], PyTree], minibatch: BlockSelection) -> PyTree:
    blocks, chosen = minibatch.blocks, minibatch.chosen
    num_full = minibatch.size // blocks.block_rows

    def of_block(index: Array | int, size: int = blocks.block_rows) -> PyTree:
        return function(columns_of(blocks, chosen[index], size))

    shapes = jax.eval_shape(of_block, 0)
    total = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    if num_full == 1:
        total = of_block(0)
    elif num_full > 1:
        total = lax.fori_loop(
            0, num_full, lambda i, sums: jax.tree.map(jnp.add, sums, of_block(i)), total
        )
    rest = minibatch.size - num_full * blocks.block_rows
    return jax.tree.map(jnp.add, total, of_block(num_full, rest)) if rest else total


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


def chunk_sizes(model: Model) -> tuple[int, ...]:
    """Numbers of positions that one pass over the rows takes together, smallest first.

    Those of short positions share the reading of the rows. Long ones share little else than the
    conversion of bytes, and need a model that can evaluate several at once.
    """
    if isinstance(model, HasFullLikelihood):
        return (1,)
    if model.dim <= MAX_SHORT_DIM:
        return CHUNKS
    return LONG_CHUNKS if isinstance(model, HasLogLikelihoods) else (1,)


def full_gradients(model: Model) -> Callable[[Array | np.ndarray], np.ndarray]:
    """A function from positions ``[m, dim]`` to the full-data gradients there, ``[m, dim]``."""
    if isinstance(model, HasFullLikelihood):
        return _one_by_one(partial(full_gradient, model), all_data(model))
    together = _log_likelihoods(model)
    likelihoods = jax.grad(lambda positions, rows: jnp.sum(together(positions, rows)))
    return _chunk_by_chunk(model, likelihoods, jax.vmap(jax.grad(model.log_prior)))


def full_log_densities(model: Model) -> Callable[[Array | np.ndarray], np.ndarray]:
    """A function from positions ``[m, dim]`` to the log posterior densities there, ``[m]``.

    Of all rows, and up to a constant.
    """
    if isinstance(model, HasFullLikelihood):
        return _one_by_one(partial(full_log_density, model), all_data(model))
    return _chunk_by_chunk(model, _log_likelihoods(model), jax.vmap(model.log_prior))


def _chunk_by_chunk(
    model: Model,
    of_likelihoods: Callable[[Array, PyTree], Array],
    of_priors: Callable[[Array], Array],
) -> Callable[[Array | np.ndarray], np.ndarray]:
    """The sum over all rows of ``of_likelihoods(positions, rows)``, and ``of_priors(positions)``.

    The data are read once per chunk of positions, in blocks of rows, so that m positions cost
    far less than m passes over memory. A program for each of the ``chunk_sizes`` serves every m:
    the last chunk is padded. Blocks are too small for XLA to share them well among cores, so each
    core is given a range of blocks in a thread of its own.
    """
    sizes = chunk_sizes(model)
    num_blocks = model.num_data // BLOCK_ROWS
    num_threads = max(1, min(available_cores(), num_blocks))
    cuts = [num_blocks * thread // num_threads for thread in range(num_threads + 1)]

    @jax.jit
    def of_range(positions: Array, rows: PyTree, first: int, last: int) -> Array:
        return sum_over_range(partial(of_likelihoods, positions), rows, first, last)

    @jax.jit
    def of_the_rest(positions: Array, rows: PyTree) -> Array:
        return of_priors(positions) + sum_over_rest(partial(of_likelihoods, positions), rows)

    def of_chunk(positions: Array) -> np.ndarray:
        def of_thread(first: int, last: int) -> np.ndarray:
            return np.asarray(of_range(positions, model.data, first, last))

        if num_threads == 1:
            parts = [of_thread(0, num_blocks)]
        else:
            with ThreadPoolExecutor(num_threads) as pool:
                parts = list(pool.map(of_thread, cuts[:-1], cuts[1:]))
        # What overflows far out is infinite or NaN without a warning, as inside a program.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(of_the_rest(positions, model.data)) + sum(parts)

    def of_positions(positions: Array | np.ndarray) -> np.ndarray:
        # In NumPy: a slice of a JAX array would be compiled for every new shape.
        on_host, results = np.asarray(positions, np.float32), []
        for start in range(0, len(on_host), sizes[-1]):
            part = on_host[start : start + sizes[-1]]
            chunk = next(size for size in sizes if size >= len(part))
            padding = np.repeat(part[-1:], chunk - len(part), axis=0)
            padded = jnp.asarray(np.concatenate([part, padding]))
            results.append(of_chunk(padded)[: len(part)])
        return np.concatenate(results)

    return of_positions


def _log_likelihoods(model: Model) -> Callable[[Array, PyTree], Array]:
    """Log likelihoods of rows at positions ``[m, dim]``, m one of ``chunk_sizes``; ``[m]``."""
    if isinstance(model, HasLogLikelihoods):
        return model.log_likelihoods
    if chunk_sizes(model) == (1,):
        return lambda positions, rows: model.log_likelihood(positions[0], rows)[None]
    return jax.vmap(model.log_likelihood, in_axes=(0, None))


def _one_by_one(
    function: Callable[[Array, PyTree], Array], data: PyTree
) -> Callable[[Array | np.ndarray], np.ndarray]:
    of_position = jax.jit(function)

    def of_positions(positions: Array | np.ndarray) -> np.ndarray:
        on_host = np.asarray(positions, np.float32)
        return np.stack([np.asarray(of_position(position, data)) for position in on_host])

    return of_positions


def full_gradient(model: Model, position: Array, data: PyTree) -> Array:
    """Gradient of the log posterior over all rows, ``[dim]``; ``data`` is ``all_data(model)``."""

    def at_position(function: Callable[[Array], Array]) -> Array:
        return jax.grad(function)(position)

    likelihood: Array = over_all_rows(model, at_position, data)
    return at_position(model.log_prior) + likelihood


def full_log_density(model: Model, position: Array, data: PyTree) -> Array:
    """Log posterior density over all rows, up to a constant; ``data`` is ``all_data(model)``."""

    def at_position(function: Callable[[Array], Array]) -> Array:
        return function(position)

    likelihood: Array = over_all_rows(model, at_position, data)
    return likelihood + model.log_prior(position)


def available_cores() -> int:
    """Cores this process may use; 1 where the arithmetic is done by an accelerator."""
    return cpu_threads() if jax.default_backend() == "cpu" else 1


def sum_over_blocks(
    function: Callable[[PyTree], PyTree], rows: PyTree, block_rows: int = BLOCK_ROWS
) -> PyTree:
    """Sum of ``function(block)`` over consecutive blocks of ``rows``; the last may be shorter."""
    whole = sum_over_range(function, rows, 0, num_rows(rows) // block_rows, block_rows)
    return jax.tree.map(jnp.add, sum_over_rest(function, rows, block_rows), whole)


def sum_over_range(
    function: Callable[[PyTree], PyTree],
    rows: PyTree,
    first: Array | int,
    last: Array | int,
    block_rows: int = BLOCK_ROWS,
) -> PyTree:
    """Sum of ``function(block)`` over the whole blocks ``first``, ..., ``last - 1`` of ``rows``."""
    zeros = _zeros_like_value(function, rows)
    if num_rows(rows) < block_rows:
        return zeros

    def add_block(index: Array, accumulated: PyTree) -> PyTree:
        block = jax.tree.map(
            lambda leaf: lax.dynamic_slice_in_dim(leaf, index * block_rows, block_rows), rows
        )
        return jax.tree.map(jnp.add, accumulated, function(block))

    return lax.fori_loop(first, last, add_block, zeros)


def sum_over_rest(
    function: Callable[[PyTree], PyTree], rows: PyTree, block_rows: int = BLOCK_ROWS
) -> PyTree:
    """``function`` of the rows after the last whole block, zero where there are none."""
    remainder = num_rows(rows) % block_rows
    if remainder == 0:
        return _zeros_like_value(function, rows)
    return function(jax.tree.map(lambda leaf: leaf[-remainder:], rows))


def _zeros_like_value(function: Callable[[PyTree], PyTree], rows: PyTree) -> PyTree:
    shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[:1], rows))
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
