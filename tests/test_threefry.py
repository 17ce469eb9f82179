"""Threefry written out: the words of JAX's own implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_cli.threefry import threefry2x32, unrolled
from mamba_cli.types import Array

KEY = jax.random.key(7)
UNROLLED = unrolled(jax.random.key_data(KEY))


def words_of(key: Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))


def test_known_answers() -> None:
    """Those of threefry2x32 with 20 rounds in the authors' Random123 (kat_vectors)."""
    ones = 0xFFFFFFFF
    pi = [0x13198A2E, 0x03707344], [0x243F6A88, 0x85A308D3]
    for key, counter, expected in [
        ([0, 0], [0, 0], [0x6B200159, 0x99BA4EFE]),
        ([ones, ones], [ones, ones], [0x1CB996FC, 0xBB002BE7]),
        (*pi, [0xC4923A9C, 0x483DF7A0]),
    ]:
        high, low = (jnp.uint32(word) for word in counter)
        found = threefry2x32(jnp.asarray(key, jnp.uint32), high, low)
        assert [int(word) for word in found] == expected


@pytest.mark.parametrize("shape", [(), (3,), (5, 2), (70_001,)])
def test_draws_are_those_of_jax(shape: tuple[int, ...]) -> None:
    with jax.threefry_partitionable(True):
        bits, normals = jax.random.bits(KEY, shape), jax.random.normal(KEY, shape)
    np.testing.assert_array_equal(jax.random.bits(UNROLLED, shape), bits)
    np.testing.assert_array_equal(jax.random.normal(UNROLLED, shape), normals)


def test_keys_are_those_of_jax() -> None:
    with jax.threefry_partitionable(True):
        np.testing.assert_array_equal(
            words_of(jax.random.split(UNROLLED, (3, 2))), words_of(jax.random.split(KEY, (3, 2)))
        )
        for value in (0, 5, 2**32 - 1, jnp.int32(77)):
            np.testing.assert_array_equal(
                words_of(jax.random.fold_in(UNROLLED, value)),
                words_of(jax.random.fold_in(KEY, value)),
            )


def test_steps_may_be_mapped() -> None:
    def draws(key: Array) -> Array:
        return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), (4,)))(
            jnp.arange(3)
        )

    with jax.threefry_partitionable(True):
        np.testing.assert_array_equal(draws(UNROLLED), draws(KEY))


def test_words_of_another_width_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="not of 16"):
        jax.random.bits(UNROLLED, (3,), jnp.uint16)
