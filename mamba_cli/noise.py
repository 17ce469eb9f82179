"""Generators of the noise that samplers add: what the key of a step is turned into.

In 50,000 dimensions and more, normal variates are a third to a half of a step, and most of that
is the generator of their bits. Keys of chains, steps and minibatches are JAX's threefry
whatever is chosen here; a kernel gets the step's key, and draws from it with ``jax.random``.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.threefry import generator
from mamba_cli.types import Array


def threefry(rng_key: Array) -> Array:
    """The key itself: JAX's own generator (Salmon et al., 2011, with 20 rounds)."""
    return rng_key


def counter_hash(rng_key: Array) -> Array:
    """A key of the same 64 bits for :func:`hashed_bits`, some four times as fast on a CPU.

    The key of every step is a threefry output, so that steps are as independent as with
    :func:`threefry`; within a step the bits are a keyed hash of 0, 1, ..., which is no
    cryptographic function. For noise only: no key is to be split off it.
    """
    return jax.random.wrap_key_data(
        jax.random.key_data(rng_key), impl=generator("counter_hash", "ch", _words)
    )


def hashed_bits(key_data: Array, size: int) -> Array:
    """``size`` words of 32 bits: counters 0, 1, ... mixed with a key ``[2]`` uint32.

    Three rounds of multiply and xor-shift with the constants of ``triple32`` (C. Wellons, hash
    function prospector: an avalanche bias of 0.02 bits), one key word added before
    the first and one before the second. For one key it is a bijection of the counters.
    """
    x = jnp.arange(size, dtype=jnp.uint32) * np.uint32(0x9E3779B1) + key_data[0]
    x = (x ^ (x >> 17)) * np.uint32(0xED5AD4BB)
    x = (x ^ (x >> 11)) + key_data[1]
    x = x * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> 15)) * np.uint32(0x31848BAB)
    return x ^ (x >> 14)


def _words(key_data: Array, shape: tuple[int, ...]) -> Array:
    return hashed_bits(key_data, math.prod(shape)).reshape(shape)
