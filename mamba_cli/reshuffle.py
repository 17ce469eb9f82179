"""Minibatches by reshuffling: the data in random order, walked through and shuffled again.

Within an epoch no row is used twice. Each minibatch by itself is a uniform draw without
replacement; successive ones are not independent, which for SGLD makes the bias smaller
(Shaw & Whalley, 2025, arXiv 2501.16055).

A permutation of all rows at the end of every epoch would cost as much as gathering every
minibatch does (per row, random access to memory; measured, several times the arithmetic of a
logistic regression). The shuffling is therefore done in two parts:

* Once, rows are copied into a random order (and into columns, where the model reads these).
* At every epoch the copy, thought of as a ring, is cut into windows of about ``WINDOW_ROWS``
  neighbours, and the windows are put into a random order. A minibatch is the next few windows.
  No row is moved: windows are contiguous in memory and read where they are. Where the length of
  a window divides that of the ring the cuts stay, otherwise they are at random places.

Over the random order every minibatch is exactly uniform. Given the order, it is a cluster
sample of random clusters: the gradient noise has the covariance of a draw without replacement
up to a relative error of sqrt(2 / number of windows) in any one direction, 2 % for 1,000,000
rows. Which rows are neighbours stays for the length of a chain.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_cli.errors import ConfigError
from mamba_cli.minibatch import random_indices, rows_of, without_replacement
from mamba_cli.types import Arranged, Arrangement, Array, Minibatcher, PyTree, Windows

WINDOW_ROWS = 250
"""Most rows of a window. Smaller ones are nearer to a draw of single rows, and slower to read."""


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
    even: bool  # whether the windows make up the ring


def cut(num_data: int, batch_size: int) -> Cut:
    """As few windows of equal width as ``WINDOW_ROWS`` allows.

    Less than one row per window is left out of a minibatch, and of an epoch what does not make
    another minibatch: other rows in every epoch.
    """
    windows = -(-batch_size // WINDOW_ROWS)
    width = -(-batch_size // windows)
    if windows * width > num_data:
        windows, width = 1, batch_size
    even = num_data % width == 0
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
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), epoch)
        key_cut, key_order = jax.random.split(key)
        first = jnp.int32(0) if even else jax.random.randint(key_cut, (), 0, num_data)
        order = random_indices(key_order, num_windows, num_windows)
        return ReshuffleState(key_data, epoch, jnp.int32(0), first, order)

    def init(rng_key: Array) -> ReshuffleState:
        return epoch_of(jax.random.key_data(rng_key), jnp.int32(0))

    def select(
        rng_key: Array, state: ReshuffleState, rows: Arranged
    ) -> tuple[Windows, ReshuffleState]:
        del rng_key  # the walk is random by the key of its epoch
        in_blocks = rows.columns and rows.block_rows > 0
        # A loop of no or one turn: a conditional would copy the order at every step.
        state = jax.lax.while_loop(
            lambda state: state.number == batches,
            lambda state: epoch_of(state.key_data, state.epoch + 1),
            state,
        )
        order = jax.lax.dynamic_slice_in_dim(state.order, state.number * windows, windows)
        starts = order if in_blocks else (state.first + order * width) % num_data
        # The barrier keeps XLA from computing them again for every window.
        starts = jax.lax.optimization_barrier(starts)
        minibatch = Windows(rows, starts, width, batch_size, whole=False)
        return minibatch, state._replace(number=state.number + 1)

    def draw(
        rng_key: Array, state: ReshuffleState, rows: Arranged
    ) -> tuple[PyTree, ReshuffleState]:
        minibatch, state = select(rng_key, state, rows)
        return rows_of(minibatch), state

    # Programs of other batch sizes can share a ring that is padded for the widest window.
    padding = max(width, min(WINDOW_ROWS, num_data))
    arrangement = Arrangement(order_seed, width if even else 0, padding, whole=False)
    return Minibatcher(init, draw, select, arrangement)
