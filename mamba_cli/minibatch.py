"""How minibatches are drawn.

Without replacement means: n distinct rows, at every step afresh. Permuting all N indices
costs O(N) a step; here the first n values of a keyed random bijection of {0, ..., N-1} are
evaluated instead, which costs O(n). Every pair of rows is equally likely to within 1e-6;
triples and more are not held to a bound, but tested at small N.

The bijection is a mixed-radix Feistel network. An index is written as
x = left * b + right with left < a, right < b, a * b >= N, and half-rounds alternate

    left  <- left  + F_k(right)  mod a
    right <- right + F_k(left)   mod b

with independent keyed hashes F_k; values >= N are sent through again (cycle walking).
Each half-round is invertible, so the indices are distinct by construction. How near a
*pair* of indices is to uniform after r half-rounds of random F is known exactly (see
:func:`pair_distance`); r is chosen so that the distance is below 1e-6 whatever the
pair. Pairs are what mean and covariance of the gradient noise depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli.data.arrays import require_memory
from mamba_cli.types import (
    AllRows,
    Arrangement,
    Array,
    Blocks,
    BlockSelection,
    Columns,
    Minibatcher,
    PyTree,
    Selection,
)

PAIR_TOLERANCE = 1e-6

WHOLE_BLOCK_ROWS = 1000
"""Rows per block of a pass over all columns: 40 KB of ten, which the nearest cache holds."""

MAX_NUM_DATA = 2**30
"""Up to here both factors are below 2^16, as the hash needs, and indices fit an int32."""


def gather(rows: PyTree, indices: Array) -> PyTree:
    """Rows ``indices`` of every leaf; the caller guarantees 0 <= index < num_data."""
    return jax.tree.map(lambda leaf: leaf.at[indices].get(mode="promise_in_bounds"), rows)


def without_replacement(num_data: int, batch_size: int) -> Minibatcher:
    """``batch_size`` distinct rows, drawn afresh at every step; every pair equally likely.

    At ``batch_size == num_data`` the minibatch is the data themselves, in the layout that the
    model reads fastest: nothing is drawn, and nothing is copied at a step.
    """
    assert 1 <= batch_size <= num_data, (batch_size, num_data)
    if batch_size == num_data:
        return Minibatcher(
            _no_state, _all_rows, _all_rows, Arrangement(None, WHOLE_BLOCK_ROWS, whole=True)
        )
    return _by_index(lambda rng_key: random_indices(rng_key, num_data, batch_size))


def with_replacement(num_data: int, batch_size: int) -> Minibatcher:
    """``batch_size`` independent uniform rows, as the paper's published code drew them."""

    def draw_indices(rng_key: Array) -> Array:
        return jax.random.randint(rng_key, (batch_size,), 0, num_data, jnp.int32)

    return _by_index(draw_indices)


def _by_index(draw_indices: Callable[[Array], Array]) -> Minibatcher:
    """The scheme of independent sets of indices."""

    def select(rng_key: Array, state: Any, rows: PyTree) -> tuple[Selection, Any]:
        # The barrier keeps XLA from recomputing the indices for every gathered element.
        return Selection(rows, lax.optimization_barrier(draw_indices(rng_key))), state

    def draw(rng_key: Array, state: Any, rows: PyTree) -> tuple[PyTree, Any]:
        selection, state = select(rng_key, state, rows)
        return gather(*selection), state

    return Minibatcher(init=_no_state, draw=draw, select=select)


def _no_state(rng_key: Array) -> tuple[()]:
    return ()


def _all_rows(rng_key: Array, state: Any, rows: PyTree) -> tuple[PyTree, Any]:
    if not isinstance(rows, Blocks):
        return rows, state
    every = jnp.arange(-(-rows.num_data // rows.block_rows), dtype=jnp.int32)
    return BlockSelection(rows, every, rows.num_data, whole=True), state


def arrange(
    arrangement: Arrangement | None, rows: PyTree, *, columns: bool, full_data: PyTree = None
) -> PyTree:
    """Rows as a scheme with this arrangement reads them, a copy made once; on the host.

    Parameters
    ----------
    arrangement
        ``Minibatcher.arrangement``. None leaves the rows as they are.
    rows
        Arrays with a common leading axis.
    columns
        Whether the model reads :class:`~mamba_cli.types.Columns`.
    full_data
        What stands for all rows in a model with a likelihood of all rows in one piece.

    Raises
    ------
    DataError
        There is no memory for a copy.
    """
    if arrangement is None:
        return rows
    order_seed, block_rows, whole = arrangement
    if whole and full_data is not None:
        return AllRows(full_data)
    in_blocks = columns and block_rows > 0
    if order_seed is None and not in_blocks:
        return rows
    leaves = jax.tree.leaves(rows)
    num_data = int(leaves[0].shape[0])
    require_memory(
        sum(leaf.nbytes for leaf in leaves),
        f"the {num_data:,} rows in the order of minibatch=reshuffle",
        "minibatch=without_replacement copies none.",
    )
    order: np.ndarray = np.arange(num_data)
    if order_seed is not None:
        order = np.random.default_rng(order_seed).permutation(num_data)
    if not in_blocks:
        return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[order]), rows)
    order = np.resize(order, num_data + -num_data % block_rows)

    def blocks_of(leaf: Array) -> Array:
        taken = np.asarray(leaf)[order].reshape(-1, block_rows, *leaf.shape[1:])
        return jnp.asarray(np.ascontiguousarray(np.moveaxis(taken, 1, -1)))

    return Blocks(jax.tree.map(blocks_of, rows), num_data, block_rows)


def columns_of(blocks: Blocks, number: Array | int, size: int) -> PyTree:
    """The first ``size`` rows of a block: :class:`Columns`, or ``[size]`` of a leaf of numbers."""

    def of_leaf(leaf: Array) -> Array | Columns:
        values = lax.dynamic_index_in_dim(leaf, number, keepdims=False)[..., :size]
        return values if values.ndim == 1 else Columns(values)

    return jax.tree.map(of_leaf, blocks.columns)


def random_indices(rng_key: Array, num_data: int, num_indices: int) -> Array:
    """``num_indices`` distinct indices below ``num_data``, int32, in O(num_indices).

    Every pair is equally likely, to within the tolerance stated in the module's docstring
    for random round functions, which the keyed hash stands in for.
    """
    left_size, right_size = factorise(num_data)
    num_half_rounds = half_rounds(left_size, right_size)
    keys = jax.random.bits(rng_key, (num_half_rounds, 2), jnp.uint32)

    def permute(index: Array) -> Array:
        left = index // np.uint32(right_size)
        right = index - left * np.uint32(right_size)
        for k in range(num_half_rounds):
            if k % 2 == 0:
                left = _add_modulo(left, _hash(right, keys[k], left_size), left_size)
            else:
                right = _add_modulo(right, _hash(left, keys[k], right_size), right_size)
        return left * np.uint32(right_size) + right

    counters = jnp.arange(num_indices, dtype=jnp.uint32)
    if left_size * right_size == num_data:
        return permute(counters).astype(jnp.int32)

    def walk(state: tuple[Array, Array]) -> tuple[Array, Array]:
        indices, outside = state
        indices = jnp.where(outside, permute(indices), indices)
        return indices, indices >= np.uint32(num_data)

    everywhere = jnp.ones(num_indices, bool)
    indices, _ = lax.while_loop(lambda state: jnp.any(state[1]), walk, (counters, everywhere))
    return indices.astype(jnp.int32)


def _add_modulo(value: Array, increment: Array, modulus: int) -> Array:
    """(value + increment) mod modulus for operands below modulus < 2^31, without division."""
    total = value + increment
    # Where total < modulus the subtraction wraps to a huge number, which minimum discards.
    return jnp.minimum(total, total - np.uint32(modulus))


def _hash(value: Array, keys: Array, size: int) -> Array:
    """A hash of ``value`` to {0, ..., size-1} under two random words, for size < 2^16.

    The multiplier is random too: with a fixed one, whether two values collide would
    depend on how they differ, up to 2.7 times as often as 1 / size. The range reduction
    is the high word of hash times size (Lemire, 2019), built from 16-bit halves where
    32-bit products would overflow; its bias is below size^2 / 2^32.
    """
    bits = (value ^ keys[0]) * np.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * (keys[1] | np.uint32(1))
    bits = bits ^ (bits >> 13)
    factor = np.uint32(size)
    width = 32 - int(size).bit_length()
    if width >= 20:
        return ((bits >> (32 - width)) * factor) >> width
    low = ((bits & np.uint32(0xFFFF)) * factor) >> 16
    return ((bits >> 16) * factor + low) >> 16


@lru_cache(maxsize=64)
def factorise(num_data: int) -> tuple[int, int]:
    """(a, b) with a * b >= num_data, as little above as possible, a / b within [1/4, 1].

    Both are at least 2 from four rows on: with one of them 1 the network is a rotation,
    which is uniform on subsets of three rows but not of more.
    """
    if num_data > MAX_NUM_DATA:
        raise ValueError(f"num_data={num_data} is above {MAX_NUM_DATA}, the most rows drawn from")
    root = math.isqrt(num_data - 1) + 1
    smallest = 2 if num_data > 3 else 1
    candidates = range(root, max(root // 2, smallest) - 1, -1)
    left_size = min(candidates, key=lambda a: -(-num_data // a) * a - num_data)
    return left_size, -(-num_data // left_size)


def pair_distance(left_size: int, right_size: int, num_half_rounds: int) -> float:
    """Worst total variation distance from uniform of a pair of distinct indices.

    For random round functions, what a pair does depends on the differences of its left
    and of its right parts alone. A half-round on the left leaves a pair with equal right
    parts as it is and gives every other pair a uniform left difference; likewise on the
    right. So a difference is 0, the one the pair started with, or any of the others with
    equal probability, and the law over these three by three classes is exact. (The place
    of the pair is uniform after two half-rounds.)
    """
    a, b = left_size, right_size
    if min(a, b) == 1:  # one half is constant: a rotation, exact for single indices
        return 0.0
    left_law, right_law = np.array([1, 1, a - 2]) / a, np.array([1, 1, b - 2]) / b
    uniform = np.outer(left_law, right_law) * (a * b / (a * b - 1))
    uniform[0, 0] = 0.0
    distances = []
    for start in ((1, 0), (0, 1), (1, 1)):
        law = np.zeros((3, 3))
        law[start] = 1.0
        for k in range(num_half_rounds):
            if k % 2 == 0:
                law[:, 1:] = left_law[:, None] * law[:, 1:].sum(axis=0)
            else:
                law[1:, :] = law[1:, :].sum(axis=1, keepdims=True) * right_law
        distances.append(np.sum(np.abs(law - uniform)) / 2)
    return float(max(distances))


@lru_cache(maxsize=64)
def half_rounds(left_size: int, right_size: int) -> int:
    """Half-rounds for a pair distance below ``PAIR_TOLERANCE``; at least four.

    Four is the number from which a Feistel network of random functions is a strong
    pseudorandom permutation (Luby & Rackoff, 1988).
    """
    count = 4
    while pair_distance(left_size, right_size, count) > PAIR_TOLERANCE:
        count += 1
    return count
