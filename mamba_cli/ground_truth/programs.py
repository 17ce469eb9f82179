"""NUTS compiled: the start of all chains, and a block of steps of each group of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro.infer.hmc import hmc

from mamba_cli.ground_truth.groups import chain_groups, in_threads, state_of_group
from mamba_cli.ground_truth.potential import Target, potential_fn
from mamba_cli.ground_truth.settings import NutsSettings
from mamba_cli.types import Array, Model, PyTree

WARMUP_TREE_DEPTH = 7
"""Bounds the trajectories of a warm-up whose coordinates have not found their scale yet."""


class Block(NamedTuple):
    """What a block of steps did; counts and sums are over all chains."""

    z: Array  # [block_draws, num_chains, dim], float32
    potentials: Array  # [block_draws, num_chains]
    squared_gradients: Array  # [dim], of the potential in z
    num_leapfrogs: Array  # [], int32
    sum_accept: Array  # []
    num_divergences: Array  # [], int32


class Programs(NamedTuple):
    # keys, starts and step sizes of all chains
    init: Callable[[Array, Array, Array, Target], PyTree]
    advance: Callable[[PyTree, Target, Array], tuple[PyTree, Block]]
    state_like: PyTree  # shapes and types of the state of all chains


def compile_programs(
    model: Model, keys: Array, starts: Array, target: Target, settings: NutsSettings
) -> Programs:
    """Compile both programs ahead, so that sampling time has no compilation in it."""
    init_kernel, sample_kernel = hmc(
        potential_fn_gen=lambda target: potential_fn(model, target), algo="NUTS"
    )
    depth = settings.max_tree_depth
    scaled = target.scale is not None

    @jax.jit
    def init(keys: Array, starts: Array, step_sizes: Array, target: Target) -> PyTree:
        def of_chain(key: Array, start: Array, step_size: Array) -> PyTree:
            return init_kernel(
                start,
                settings.num_warmup,
                step_size,
                adapt_mass_matrix=not scaled,
                target_accept_prob=settings.target_accept,
                max_tree_depth=(min(depth, WARMUP_TREE_DEPTH) if scaled else depth, depth),
                model_args=(target,),
                rng_key=key,
            )

        return jax.tree.map(_strongly_typed, jax.vmap(of_chain)(keys, starts, step_sizes))

    # Also tells NumPyro's kernel how long the warm-up is, which it keeps outside the state.
    state_like = jax.eval_shape(init, keys, starts, jnp.ones(len(keys)), target)

    @jax.jit
    def advance(state: PyTree, target: Target, num_steps: Array) -> tuple[PyTree, Block]:
        def of_chain(state: PyTree) -> PyTree:
            return sample_kernel(state, model_args=(target,))

        step_chains = of_chain if state.potential_energy.ndim == 0 else jax.vmap(of_chain)

        def step(index: Array, carry: tuple[PyTree, Block]) -> tuple[PyTree, Block]:
            state, block = carry
            state = step_chains(state)
            squares = jnp.sum(jnp.atleast_2d(state.z_grad) ** 2, axis=0)
            return state, Block(
                block.z.at[index].set(state.z),
                block.potentials.at[index].set(state.potential_energy),
                block.squared_gradients + squares,
                block.num_leapfrogs + jnp.sum(state.num_steps),
                block.sum_accept + jnp.sum(state.accept_prob),
                block.num_divergences + jnp.sum(state.diverging.astype(jnp.int32)),
            )

        zero, none = jnp.zeros((), jnp.int32), jnp.zeros(())
        z = jnp.zeros((settings.block_draws, *state.z.shape), jnp.float32)
        potentials = jnp.zeros((settings.block_draws, *state.potential_energy.shape))
        squares = jnp.zeros(state.z.shape[-1])
        block = Block(z, potentials, squares, zero, none, zero)
        return lax.fori_loop(0, num_steps, step, (state, block))

    limit = jnp.zeros((), jnp.int32)
    groups = chain_groups(model, settings.num_chains)
    compiled = {}
    for group in groups:
        like = jax.eval_shape(partial(state_of_group, group=group), state_like)
        if len(group) not in compiled:
            compiled[len(group)] = advance.lower(like, target, limit).compile()
    return Programs(init, partial(_in_groups, compiled, groups), state_like)


def _in_groups(
    advance: Mapping[int, Callable[[PyTree, Target, Array], tuple[PyTree, Block]]],
    groups: Sequence[range],
    state: PyTree,
    target: Target,
    num_steps: Array,
) -> tuple[PyTree, Block]:
    """Advance all chains; ``advance`` has the program of each size of a group."""

    def of_group(group: range) -> tuple[PyTree, Block]:
        own = state_of_group(state, group)
        return jax.block_until_ready(advance[len(group)](own, target, num_steps))

    states, blocks = zip(*in_threads(of_group, groups), strict=True)

    def together(leaves: Sequence[Array], axis: int) -> Array:
        apart = [
            jnp.expand_dims(leaf, axis) if len(group) == 1 else leaf
            for leaf, group in zip(leaves, groups, strict=True)
        ]
        return jnp.concatenate(apart, axis)

    z = together([block.z for block in blocks], 1)
    potentials = together([block.potentials for block in blocks], 1)
    sums = [sum(leaves) for leaves in zip(*(block[2:] for block in blocks), strict=True)]
    joined = jax.tree.map(lambda *leaves: together(leaves, 0), *states)
    return joined, Block(z, potentials, *sums)


def _strongly_typed(leaf: Array) -> Array:
    """Without JAX's weak types, which a state read from disk cannot have."""
    return leaf if is_key(leaf) else jnp.asarray(leaf, leaf.dtype)


def is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
