"""Kernel Stein discrepancy: Eq. 3 of the paper, with the inverse multiquadric kernel.

Langevin-Stein operator and kernel: Gorham and Mackey (2017), *Measuring Sample Quality with
Kernels*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mamba_cli.rewards.draws import (
    BLOCK_SIZE,
    bucket_size,
    checked_draws,
    require_kernel_parameters,
    require_thinning,
)
from mamba_cli.rewards.jackknife import (
    FEWEST_DRAWS,
    NUM_BLOCKS,
    block_of_draws,
    error_of_sums,
)
from mamba_cli.types import Array, Scored, ScoredDraws

# Products of long vectors are taken in float32 and added up in float64 every so many coordinates:
# twice as fast as float64, and the error does not grow with the dimension.
FLOAT32_PRODUCTS_ABOVE_DIM = 1024
COORDINATES_PER_PRODUCT = 2048


def ksd(positions: ArrayLike, scores: ArrayLike, *, c: float = 1.0, beta: float = -0.5) -> float:
    """Kernel Stein discrepancy between a set of draws and the density that has these scores.

    The square root of the V-statistic::

        KSD^2 = 1/n^2 sum_{i,j} k_pi(x_i, x_j)
        k_pi(x, y) = s_x.s_y k + s_x.grad_y k + s_y.grad_x k + div_x grad_y k
        k(x, y) = (c^2 + |x - y|^2)^beta

    where ``s`` is the score. All pairs count, i = j included, so it is never negative. Pairs are
    evaluated in blocks of matrix products, each unordered pair of blocks once.

    Parameters
    ----------
    positions, scores
        Draws and the gradients of the log density there, ``[num_draws, dim]``.
    c, beta
        Scale (c > 0) and exponent (-1 < beta < 0) of the kernel.

    Returns
    -------
    float
        The discrepancy; ``nan`` when an input is not finite.

    Raises
    ------
    ValueError
        No draws, shapes that are not equal ``[num_draws, dim]``, or ``c`` or ``beta`` out of range.

    Notes
    -----
    The arithmetic is float64, except that beyond 1,024 dimensions inner products are taken in
    float32 and accumulated in float64; the draws are centred first (the kernel depends on
    differences only), so what is lost is relative to their spread and not to their distance from
    the origin.

    References
    ----------
    Coullon, South and Nemeth, Eq. 3; Gorham and Mackey (2017).
    """
    positions, scores = checked_draws(positions, scores)
    return _root(_pair_sums(positions, scores, c, beta, num_blocks=1), len(positions))


def ksd_with_error(
    positions: ArrayLike, scores: ArrayLike, *, c: float = 1.0, beta: float = -0.5
) -> Scored:
    """:func:`ksd` and its standard error over chains like this one, in one pass over the pairs.

    Parameters
    ----------
    positions, scores, c, beta
        As there, the draws in their order and evenly thinned.

    Returns
    -------
    Scored
        The error is that of :mod:`mamba_cli.rewards.jackknife`; NaN for fewer than
        ``jackknife.FEWEST_DRAWS`` draws, or where an input is not finite.

    Raises
    ------
    ValueError
        As :func:`ksd`.
    """
    positions, scores = checked_draws(positions, scores)
    num_draws = len(positions)
    sums = _pair_sums(positions, scores, c, beta, num_blocks=NUM_BLOCKS)
    error = float("nan")
    if num_draws >= FEWEST_DRAWS:
        error = error_of_sums(sums, np.bincount(block_of_draws(num_draws)))
    return Scored(_root(sums, num_draws), error)


def _root(sums: np.ndarray[Any, Any], num_draws: int) -> float:
    # The V-statistic of a positive definite kernel: below zero only by rounding.
    return float(np.sqrt(np.maximum(sums.sum() / num_draws**2, 0.0)))


def _pair_sums(
    positions: np.ndarray[Any, Any],
    scores: np.ndarray[Any, Any],
    c: float,
    beta: float,
    *,
    num_blocks: int,
) -> np.ndarray[Any, Any]:
    """Sums over the pairs of every two blocks, ``[num_blocks, num_blocks]`` of 1 or NUM_BLOCKS."""
    if not (c > 0 and -1 < beta < 0):
        raise ValueError(f"ksd needs c > 0 and -1 < beta < 0, got c={c}, beta={beta}")
    if not (np.isfinite(positions).all() and np.isfinite(scores).all()):
        return np.full((num_blocks, num_blocks), np.nan)
    num_draws, dim = positions.shape
    bucket = bucket_size(num_draws)
    block_size = min(bucket, BLOCK_SIZE)
    # The pairs are padded to the bucket too; num_pairs says how many of them are real.
    rows, columns = triangle_of_blocks(ceil(num_draws / block_size))
    num_pairs = len(rows)
    max_pairs = len(triangle_of_blocks(bucket // block_size)[0])
    rows, columns = (np.pad(index, (0, max_pairs - num_pairs)) for index in (rows, columns))
    weights = np.zeros((bucket, num_blocks))
    own = block_of_draws(num_draws) if num_blocks > 1 else np.zeros(num_draws, int)
    weights[np.arange(num_draws), own] = 1
    # float64 inside this block only: nothing outside it sees the setting.
    with np.errstate(over="ignore"), jax.enable_x64(True):
        operands = pad_draws(positions, scores, weights)
        sums = stein_pair_sums(
            operands,
            jnp.asarray(rows, jnp.int32),
            jnp.asarray(columns, jnp.int32),
            jnp.asarray(num_pairs, jnp.int32),
            jnp.asarray(c, jnp.float64),
            jnp.asarray(dim, jnp.float64),
            beta=float(beta),
            block_size=block_size,
        )
        return np.asarray(sums)


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class SteinOperands:
    """Centred draws and their scores, padded with zeros and divided by a power of two.

    ``positions`` and ``scores`` are ``[bucket, padded_dim]`` (float32 or float64), the true ones
    being ``position_scale`` and ``score_scale`` times these; ``weights`` is 1 for a draw in the
    column of its block and else 0, padding included, ``[bucket, num_blocks]`` float64.
    """

    positions: Any
    scores: Any
    weights: Any
    position_scale: Any
    score_scale: Any


def pad_draws(
    positions: np.ndarray[Any, Any], scores: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]
) -> SteinOperands:
    """Centre, scale and pad draws for :func:`stein_pair_sums`. Call it where x64 is enabled."""
    (num_draws, dim), bucket = positions.shape, len(weights)
    if dim > FLOAT32_PRODUCTS_ABOVE_DIM:
        dtype: Any = np.float32
        # Chunks of equal width waste at most a few columns of padding.
        num_chunks = ceil(dim / COORDINATES_PER_PRODUCT)
        padded_dim = num_chunks * ceil(dim / num_chunks)
    else:
        dtype, padded_dim = np.float64, dim
    # Rounded to the draws' own precision, the centre is subtracted from tight clusters exactly.
    centre = positions.mean(axis=0, dtype=np.float64).astype(positions.dtype)
    padded_positions = np.zeros((bucket, padded_dim), dtype)
    padded_scores = np.zeros((bucket, padded_dim), dtype)
    true_positions = padded_positions[:num_draws, :dim]
    true_scores = padded_scores[:num_draws, :dim]
    # Inputs of higher precision are centred in it and rounded afterwards.
    wider = np.result_type(positions.dtype, dtype)
    np.subtract(positions, centre, out=true_positions, dtype=wider, casting="same_kind")
    true_scores[...] = scores
    position_scale, score_scale = _power_of_two(true_positions), _power_of_two(true_scores)
    true_positions *= 1 / position_scale
    true_scores *= 1 / score_scale
    return SteinOperands(
        positions=jnp.asarray(padded_positions),
        scores=jnp.asarray(padded_scores),
        weights=jnp.asarray(weights, jnp.float64),
        position_scale=jnp.asarray(position_scale, jnp.float64),
        score_scale=jnp.asarray(score_scale, jnp.float64),
    )


@partial(jax.jit, static_argnames=("beta", "block_size"))
def stein_pair_sums(
    operands: SteinOperands,
    row_blocks: Array,
    column_blocks: Array,
    num_pairs: Array,
    c: Array,
    dim: Array,
    *,
    beta: float,
    block_size: int,
) -> Array:
    """Sum the Stein kernel over pairs of draws, by the columns of their weights.

    The pairs are given as pairs of blocks of rows. Pair t is rows ``row_blocks[t] * block_size``
    onwards against rows ``column_blocks[t] * block_size`` onwards; one with two different blocks
    counts twice, for (i, j) and (j, i). Only the first ``num_pairs`` are summed. A sum over new
    draws alone is the same call with the pairs that hold new blocks.

    Parameters
    ----------
    operands
        As made by :func:`pad_draws`, ``[bucket, padded_dim]`` with ``bucket`` a multiple of
        ``block_size``.
    row_blocks, column_blocks
        ``[max_pairs]`` int32.
    num_pairs, c, dim
        Scalars, traced: changing them compiles nothing.
    beta, block_size
        Static.

    Returns
    -------
    Array
        The sums, ``[num_blocks, num_blocks]`` float64 and symmetric.
    """
    x, s = operands.positions, operands.scores
    a, b = operands.position_scale, operands.score_scale
    num_chunks = 1 if x.dtype == jnp.float64 else ceil(x.shape[1] / COORDINATES_PER_PRODUCT)
    chunk = x.shape[1] // num_chunks
    stein_kernel = _stein_kernel_of_products(c, beta, dim)

    def rows(array: Array, block: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, block * block_size, block_size)

    def over_chunks(products: Callable[[Array], tuple[Array, ...]]) -> tuple[Array, ...]:
        if num_chunks == 1:
            return products(jnp.int32(0))
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(products, jnp.int32(0)))
        added = lambda t, total: jax.tree.map(jnp.add, total, products(t))  # noqa: E731
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_chunks), added, zeros)

    def own_products(t: Array) -> tuple[Array, Array, Array]:
        xt, st = (
            jax.lax.dynamic_slice_in_dim(array, t * chunk, chunk, 1).astype(jnp.float64)
            for array in (x, s)
        )
        return (xt * xt).sum(1), (st * st).sum(1), (xt * st).sum(1)

    xx, ss, xs = over_chunks(own_products)

    def cross_products(i: Array, j: Array, t: Array) -> tuple[Array, Array, Array]:
        """x_i.x_j, s_i.s_j, and (x_i + s_i).(x_j + s_j): three products and not four."""
        take = lambda array, block: jax.lax.dynamic_slice(  # noqa: E731
            array, (block * block_size, t * chunk), (block_size, chunk)
        )
        xi, xj, si, sj = take(x, i), take(x, j), take(s, i), take(s, j)
        pairs = ((xi, xj), (si, sj), (xi + si, xj + sj))
        return tuple(  # type: ignore[return-value]
            jnp.dot(u, v.T, precision=jax.lax.Precision.HIGHEST).astype(jnp.float64)
            for u, v in pairs
        )

    def add_pair(t: Array, total: Array) -> Array:
        i, j = row_blocks[t], column_blocks[t]
        gram_x, gram_s, gram_sum = over_chunks(partial(cross_products, i, j))
        squared_distance = a**2 * jnp.maximum(rows(xx, i)[:, None] + rows(xx, j) - 2 * gram_x, 0)
        cross = a * b * (rows(xs, i)[:, None] + rows(xs, j) - (gram_sum - gram_x - gram_s))
        values = stein_kernel(squared_distance, b**2 * gram_s, cross)
        # Weighted sums as matrix products: a fused reduction is not vectorised on a CPU.
        left, right = rows(operands.weights, i), rows(operands.weights, j)
        of_blocks = left.T @ values @ right
        # On the diagonal the distance is exactly zero, which rounded products do not give.
        rounded = (jnp.diagonal(squared_distance), b**2 * jnp.diagonal(gram_s), jnp.diagonal(cross))
        exact = (jnp.zeros(block_size), b**2 * rows(ss, i), jnp.zeros(block_size))
        correction = stein_kernel(*exact) - stein_kernel(*rounded)
        on_diagonal = of_blocks + left.T @ (correction[:, None] * left)
        return total + jnp.where(i == j, on_diagonal, of_blocks + of_blocks.T)

    num_blocks = operands.weights.shape[1]
    zeros = jnp.zeros((num_blocks, num_blocks), jnp.float64)
    total: Array = jax.lax.fori_loop(0, num_pairs, add_pair, zeros)
    return total


def _stein_kernel_of_products(
    c: Array, beta: float, dim: Array
) -> Callable[[Array, Array, Array], Array]:
    """The Stein kernel from r^2 = |x - y|^2, s_x.s_y and (x - y).(s_x - s_y), with q = c^2 + r^2::

    k_pi = q^beta [s_x.s_y - 2 beta/q ((x - y).(s_x - s_y) + d + 2 (beta - 1) r^2/q)]
    """

    def stein_kernel(squared_distance: Array, score_product: Array, cross: Array) -> Array:
        inverse = 1 / (c**2 + squared_distance)
        # The default exponent costs one root; exp and log in float64 cost more than all the rest.
        kernel = jnp.sqrt(inverse) if beta == -0.5 else jnp.exp(-beta * jnp.log(inverse))
        curvature = 2 * (beta - 1) * squared_distance * inverse
        return kernel * (score_product - 2 * beta * inverse * (cross + dim + curvature))

    return stein_kernel


def triangle_of_blocks(num_blocks: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Each unordered pair of blocks once, as two index vectors (row <= column)."""
    return np.triu_indices(num_blocks)


def _power_of_two(values: np.ndarray[Any, Any]) -> float:
    """A power of two near the largest absolute value: dividing by it is exact."""
    largest = float(np.maximum(values.max(), -values.min()))
    return float(2.0 ** np.ceil(np.log2(largest))) if largest > 0 else 1.0


@dataclass(frozen=True)
class KernelSteinDiscrepancy:
    """The KSD of an arm's draws, as a reward: lower is better.

    Parameters
    ----------
    c, beta
        The kernel (c^2 + r^2)^beta.
    gradients
        Whose scores are used: ``full``, over all rows, or ``stochastic``, the sampler's own.
    thin
        k: of the draws that a tuner hands over, every k-th is scored, from the k-th on. The tuner
        leaves the others out before it computes gradients.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    c: float = 1.0
    beta: float = -0.5
    gradients: str = "full"
    thin: int = 1
    name: str = "ksd"
    higher_is_better: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_kernel_parameters(self.c, self.beta, self.gradients)
        require_thinning(self.thin)

    def __call__(self, draws: ScoredDraws) -> Scored:
        return ksd_with_error(draws.positions, draws.scores, c=self.c, beta=self.beta)
