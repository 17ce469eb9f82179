"""Minibatches by reshuffling: the data in random order, walked through and shuffled again.

Within an epoch no row is used twice. Each minibatch by itself is a uniform draw without
replacement; successive ones are not independent, which for SGLD makes the bias smaller
(Shaw & Whalley, 2025, arXiv 2501.16055).

To permute all rows at the end of every epoch costs as much as to gather every minibatch: per
row one random access to memory, several times the arithmetic of a logistic regression. The
shuffling is therefore done in two parts:

* Once, rows are copied into a random order.
* At every epoch the copy, thought of as a ring, is cut into windows of neighbours, and the
  windows are put into a random order. A minibatch is the next few windows; no row is moved.
  Where the length of a window divides those of the ring and of a minibatch the cuts stay,
  otherwise they are at random places.

Over the random order every minibatch is exactly uniform. Given the order, it is a cluster
sample of random clusters: the gradient noise has the covariance of a draw without replacement
up to a relative error of sqrt(2 / number of windows) in any one direction, 2 % for the
``MIN_NUM_WINDOWS`` there are at least. Which rows are neighbours stays for a chain's length.

For models that read columns, long windows lie in memory as blocks of columns; short ones are
gathered row by row, at the cost of a draw without replacement.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_cli.errors import ConfigError
from mamba_cli.minibatch import gather, random_indices, without_replacement
from mamba_cli.threefry import unrolled
from mamba_cli.types import (
    Arrangement,
    Array,
    Blocks,
    BlockSelection,
    Minibatcher,
    PyTree,
    Selection,
)

WINDOW_ROWS = 250
"""Most rows of a window. Smaller ones are nearer to a draw of single rows, and slower to read."""

MIN_NUM_WINDOWS = 4_000
"""Windows that the data are cut into at least, as long as a window has more than one row."""

MIN_BLOCK_ROWS = 100
"""A window of so many rows is read faster as a block than gathered row by row."""


class ReshuffleState(NamedTuple):
    """Where the walk is: a function of the chain's key and the number of minibatches drawn.

    What an epoch draws is kept for its length: deriving it again at every step would take as
    long as a minibatch of 1,000 short rows.
    """

    key_data: Array  # [2] uint32
    epoch: Array  # [] int32, of the next minibatch
    number: Array  # [] int32, of the next minibatch within its epoch
    first: Array  # [] int32, row at which the ring of this epoch is cut
    order: Array  # [num_windows] int32, of the windows in this epoch


class Cut(NamedTuple):
    """How ``num_data`` rows are cut into minibatches."""

    windows_per_batch: int
    width: int  # rows of a window; of the last of a minibatch some may be left out
    batches_per_epoch: int
    num_windows: int  # of an epoch; those that make no whole minibatch are left out
    even: bool  # whether the windows make up the ring, and minibatches are whole windows


def cut(num_data: int, batch_size: int) -> Cut:
    """As few windows of equal width as ``WINDOW_ROWS`` and ``MIN_NUM_WINDOWS`` allow.

    Less than one row per window is left out of a minibatch, and of an epoch what does not make
    another minibatch: other rows in every epoch.
    """
    widest = min(WINDOW_ROWS, max(1, num_data // MIN_NUM_WINDOWS))
    windows = -(-batch_size // widest)
    width = -(-batch_size // windows)
    if windows * width > num_data:
        windows, width = batch_size, 1
    # Cuts may stay where every row is as likely as any other: not where the end of a window is
    # left out of every minibatch.
    even = num_data % width == 0 and windows * width == batch_size
    batches = num_data // (windows * width)
    return Cut(windows, width, batches, num_data // width if even else windows * batches, even)


def reshuffle(num_data: int, batch_size: int, *, order_seed: int = 0) -> Minibatcher:
    """Minibatches of one epoch share no row; at its end the data are shuffled anew.

    Parameters
    ----------
    num_data, batch_size
        N and n. At n = N the minibatch is the data themselves.
    order_seed
        Of the random order that rows are kept in; the same for all chains.

    Raises
    ------
    ConfigError
        ``order_seed`` is not an integer of at least 0.
    """
    if isinstance(order_seed, bool) or not isinstance(order_seed, int) or order_seed < 0:
        raise ConfigError(f"minibatch.order_seed={order_seed!r}: expected an integer of at least 0")
    assert 1 <= batch_size <= num_data, (batch_size, num_data)
    if batch_size == num_data:
        return without_replacement(num_data, batch_size)
    windows, width, batches, num_windows, even = cut(num_data, batch_size)

    def epoch_of(key_data: Array, epoch: Array) -> ReshuffleState:
        key = jax.random.fold_in(unrolled(key_data), epoch)
        key_cut, key_order = jax.random.split(key)
        first = jnp.int32(0) if even else jax.random.randint(key_cut, (), 0, num_data, jnp.int32)
        order = random_indices(key_order, num_windows, num_windows)
        return ReshuffleState(key_data, epoch, jnp.int32(0), first, order)

    def init(rng_key: Array) -> ReshuffleState:
        return epoch_of(jax.random.key_data(rng_key), jnp.int32(0))

    def select(
        rng_key: Array, state: ReshuffleState, rows: PyTree
    ) -> tuple[Selection | BlockSelection, ReshuffleState]:
        del rng_key  # the walk is random by the key of its epoch
        # A loop of no or one turn: a conditional would copy the order at every step.
        state = jax.lax.while_loop(
            lambda state: state.number == batches,
            lambda state: epoch_of(state.key_data, state.epoch + 1),
            state,
        )
        chosen = jax.lax.dynamic_slice_in_dim(state.order, state.number * windows, windows)
        after = state._replace(number=state.number + 1)
        if isinstance(rows, Blocks):
            return BlockSelection(rows, chosen, batch_size, whole=False), after
        starts = state.first + chosen * width
        indices = (starts[:, None] + jnp.arange(width)).ravel()[:batch_size] % num_data
        # The barrier keeps XLA from recomputing the indices for every gathered element.
        return Selection(rows, jax.lax.optimization_barrier(indices)), after

    def draw(rng_key: Array, state: ReshuffleState, rows: PyTree) -> tuple[PyTree, ReshuffleState]:
        selection, state = select(rng_key, state, rows)
        assert isinstance(selection, Selection), "rows in blocks are not gathered"
        return gather(*selection), state

    block_rows = width if even and width >= MIN_BLOCK_ROWS else 0
    return Minibatcher(init, draw, select, Arrangement(order_seed, block_rows, whole=False))
