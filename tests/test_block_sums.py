"""Sums over blocks of a chain's draws: which draws, how many blocks, and across pieces."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_time import counting, counting_without_refresh
from gaussian_model import gaussian_mean

from mamba_cli import chain as chain_module
from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, Chain, ChainProgram, advance
from mamba_cli.types import Array, Hyperparameters, PyTree, Sampler

MODEL = gaussian_mean(num_data=64, dim=3)
START = np.array([5, 100, 0], np.float32)
KEY = jax.random.key(5)


def draw_and_gradient(delta: Array, gradient: Array) -> PyTree:
    return {"delta": delta, "outer": jnp.outer(delta, gradient)}


@cache
def program_of(sampler: Sampler) -> ChainProgram:
    return ChainProgram(
        gradients.standard(MODEL),
        sampler,
        minibatch.without_replacement,
        5,
        capacity=6,
        block_features=draw_and_gradient,
    )


def run(*pieces: int, sampler: Sampler = counting_without_refresh, length: int = 1) -> Chain:
    program = program_of(sampler)
    chain = program.start(KEY, START, Hyperparameters(1.0, 5, length))
    for steps in pieces:
        chain = advance(program, chain, Budget(steps=steps)).compact()
    return chain


def assert_sums_of(chain: Chain, draws: np.ndarray, block_length: int) -> None:
    """``draws`` of a counting sampler, whose gradient is minus the position."""
    sums = chain.block_sums()
    starts = np.arange(0, len(draws), block_length)
    delta = draws - START
    outer = delta[:, :, None] * -draws[:, None, :]
    np.testing.assert_array_equal(sums.num_draws, np.diff([*starts, len(draws)]))
    np.testing.assert_array_equal(sums.features["delta"], np.add.reduceat(delta, starts))
    np.testing.assert_array_equal(sums.features["outer"], np.add.reduceat(outer, starts))
    np.testing.assert_array_equal(sums.origin, START)
    assert sums.features["outer"].dtype == np.float64


def counted(num_draws: int, length: int = 1) -> np.ndarray:
    steps = length * np.arange(1, num_draws + 1)
    return START + np.stack([steps, np.zeros(num_draws), steps], axis=1)


@pytest.mark.parametrize(
    ("num_draws", "block_length"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 4), (203, 8)]
)
def test_every_draw_is_in_its_block(num_draws: int, block_length: int) -> None:
    assert_sums_of(run(num_draws), counted(num_draws), block_length)


def test_pieces_make_no_difference() -> None:
    chain = run(1, 31, 1, 40, 30)
    assert_sums_of(chain, counted(103), 4)
    for one, other in zip(
        jax.tree.leaves(chain.carry.blocks), jax.tree.leaves(run(103).carry.blocks), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_several_steps_a_draw() -> None:
    """Draw j of the counting sampler is (j L, j, L) from the start; a draw is not torn."""
    chain = run(100, 11, sampler=counting, length=3)
    draws = np.array([[5 + 3 * j, 100 + j, 3] for j in range(1, 38)], np.float64)
    assert_sums_of(chain, draws, 2)


def test_a_draw_that_is_not_finite_is_in_no_block() -> None:
    program = program_of(counting_without_refresh)
    chain = program.start(KEY, np.zeros(3, np.float32), Hyperparameters(-4.0, 5))
    sums = advance(program, chain, Budget(steps=50)).block_sums()
    np.testing.assert_array_equal(sums.features["delta"][:, 2], [1, 2, 3])
    np.testing.assert_array_equal(sums.num_draws, [1, 1, 1])


def test_burn_in_is_forgotten() -> None:
    program = program_of(counting_without_refresh)
    chain = run(70).without_draws()
    assert chain.block_sums().num_draws.tolist() == []
    sums = advance(program, chain, Budget(steps=3)).block_sums()
    np.testing.assert_array_equal(sums.features["delta"][:, 0], [1, 2, 3])
    np.testing.assert_array_equal(sums.origin, [75, 100, 70])


def test_a_chain_of_arrays_goes_on_where_it_was() -> None:
    program, hyperparameters = program_of(counting_without_refresh), Hyperparameters(1.0, 5)
    chain = run(50)
    again = program.from_arrays(program.to_arrays(chain), hyperparameters, START)
    assert_sums_of(advance(program, again, Budget(steps=30)), counted(80), 4)


def test_large_features_are_kept_in_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks_of(num_bytes: int) -> int:
        monkeypatch.setattr(chain_module, "BLOCK_SUMS_BYTES", num_bytes)
        blocks = chain_module._empty_blocks(draw_and_gradient, jnp.zeros(3))
        assert blocks["outer"].shape[1:] == (3, 3)
        return len(blocks["delta"])

    assert [blocks_of(4 * 12 * most) for most in (1000, 32, 31, 15, 0)] == [32, 32, 16, 8, 8]


def test_nothing_is_kept_where_nothing_is_asked_for() -> None:
    program = ChainProgram(
        gradients.standard(MODEL),
        counting_without_refresh,
        minibatch.without_replacement,
        5,
        capacity=6,
    )
    chain = advance(
        program, program.start(KEY, START, Hyperparameters(1.0, 5)), Budget(steps=70)
    ).compact()
    assert int(chain.carry.block_length) == 1
    assert chain.block_sums().features == ()
