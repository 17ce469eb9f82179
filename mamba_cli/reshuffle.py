"""Minibatches by reshuffling: the data in random order, walked through and shuffled again.

Within an epoch no row is used twice. Each minibatch by itself is a uniform draw without
replacement; successive ones are not independent, which for SGLD makes the bias smaller
(Shaw & Whalley, 2025, arXiv 2501.16055).

A permutation of all rows at the end of every epoch would cost as much as gathering every
minibatch does (per row, random access to memory; measured, several times the arithmetic of a
logistic regression). The shuffling is therefore done in two parts:

* Once, rows are copied into a random order (and into columns, where the model reads these).
* At every epoch the copy, thought of as a ring, is cut at a random place into windows of about
  ``WINDOW_ROWS`` neighbours, and the windows are put into a random order. A minibatch is the
  next few windows. No row is moved: windows are contiguous in memory and read where they are.

Over the random order every minibatch is exactly uniform. Given the order, it is a cluster
sample of random clusters: the gradient noise has the covariance of a draw without replacement
up to a relative error of sqrt(2 / number of windows) in any one direction, 2 % for 1,000,000
rows. Which rows are neighbours stays for the length of a chain; where the windows are cut does
not.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_cli.errors import ConfigError
from mamba_cli.minibatch import permuted, rows_of, without_replacement
from mamba_cli.types import Arranged, Arrangement, Array, Minibatcher, PyTree, Windows

WINDOW_ROWS = 250
"""Most rows of a window. Smaller ones are nearer to a draw of single rows, and slower to read."""


class ReshuffleState(NamedTuple):
    """Where the walk is: a function of the chain's key and the number of minibatches drawn."""

    key_data: Array  # [2] uint32
    drawn: Array  # [] int32, minibatches so far


class Cut(NamedTuple):
    """How ``num_data`` rows are cut into minibatches."""

    windows_per_batch: int
    width: int  # rows of a window; of the last of a minibatch some may be left out
    batches_per_epoch: int


def cut(num_data: int, batch_size: int) -> Cut:
    """As few windows of equal width as ``WINDOW_ROWS`` allows.

    Less than one row per window is left out of a minibatch, and of an epoch what does not make
    another minibatch: other rows in every epoch.
    """
    windows = -(-batch_size // WINDOW_ROWS)
    width = -(-batch_size // windows)
    if windows * width > num_data:
        windows, width = 1, batch_size
    return Cut(windows, width, num_data // (windows * width))


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
    windows, width, batches = cut(num_data, batch_size)

    def init(rng_key: Array) -> ReshuffleState:
        return ReshuffleState(jax.random.key_data(rng_key), jnp.int32(0))

    def select(
        rng_key: Array, state: ReshuffleState, rows: Arranged
    ) -> tuple[Windows, ReshuffleState]:
        del rng_key  # the walk is random by the key of its epoch
        epoch, number = jnp.divmod(state.drawn, batches)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), epoch)
        key_cut, key_order = jax.random.split(key)
        first = jax.random.randint(key_cut, (), 0, num_data)
        counters = jnp.uint32(number * windows) + jnp.arange(windows, dtype=jnp.uint32)
        order = permuted(key_order, windows * batches, counters)
        starts = (first + order * width) % num_data
        # The barrier keeps XLA from computing them again for every window.
        starts = jax.lax.optimization_barrier(starts)
        minibatch = Windows(rows, starts, width, batch_size, whole=False)
        return minibatch, state._replace(drawn=state.drawn + 1)

    def draw(
        rng_key: Array, state: ReshuffleState, rows: Arranged
    ) -> tuple[PyTree, ReshuffleState]:
        minibatch, state = select(rng_key, state, rows)
        return rows_of(minibatch), state

    padding = max(width, min(WINDOW_ROWS, num_data))
    return Minibatcher(init, draw, select, Arrangement(order_seed, padding, whole=False))
