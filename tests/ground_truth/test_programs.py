"""Blocks of steps of groups of chains, put together."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.ground_truth.programs import Block, _in_groups


def test_groups_of_any_size_come_back_in_their_places() -> None:
    """Steps that add 1 to each chain's place: of one chain without an axis for chains."""

    class State(NamedTuple):
        z: jax.Array

    def advance(state: State, target: Any, num_steps: Any) -> tuple[State, Block]:
        steps = jnp.arange(num_steps, dtype=jnp.float32)
        z = steps.reshape(-1, *[1] * state.z.ndim) + state.z
        one = jnp.ones((), jnp.int32) * (1 if state.z.ndim == 1 else len(state.z))
        block = Block(z, 10 * z[..., 0], jnp.ones(2), one, 1.0 * one, 2 * one)
        return State(z[-1] + 1), block

    places = jnp.asarray([[100.0, 101], [200, 201], [300, 301], [400, 401]])
    groups = (range(1), range(1, 3), range(3, 4))
    state, block = _in_groups({1: advance, 2: advance}, groups, State(places), None, jnp.int32(3))
    np.testing.assert_array_equal(state.z, places + 3)
    np.testing.assert_array_equal(block.z, np.stack([places, places + 1, places + 2]))
    np.testing.assert_array_equal(block.potentials, 10 * block.z[..., 0])
    np.testing.assert_array_equal(block.squared_gradients, [3, 3])
    assert (int(block.num_leapfrogs), float(block.sum_accept)) == (4, 4.0)
    assert int(block.num_divergences) == 8
