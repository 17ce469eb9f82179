"""Reshuffling: every row once an epoch, every minibatch uniform, less noise in the long run."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_model import gaussian_mean
from scipy import stats

from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, ChainProgram, MinibatchScheme, advance
from mamba_cli.errors import ConfigError
from mamba_cli.models.logreg import LogisticRegression, logistic_regression
from mamba_cli.reshuffle import MIN_BLOCK_ROWS, WINDOW_ROWS, cut, reshuffle
from mamba_cli.samplers.sgld import sgld
from mamba_cli.types import Array, Blocks, BlockSelection, Hyperparameters


@cache
def drawn(num_data: int, batch_size: int, num_batches: int, seed: int = 0) -> np.ndarray:
    """Row numbers of successive minibatches, ``[num_batches, batch_size]``."""
    batcher = reshuffle(num_data, batch_size)

    @jax.jit
    def walk(rows: Array, key: Array) -> Array:
        def step(state: object, _: None) -> tuple[object, Array]:
            batch, state = batcher.draw(key, state, rows)
            return state, batch

        return jax.lax.scan(step, batcher.init(key), None, num_batches)[1]

    rows = minibatch.arrange(batcher.arrangement, jnp.arange(num_data), columns=False)
    return np.asarray(walk(rows, jax.random.key(seed)))


@pytest.mark.parametrize(
    ("num_data", "batch_size"), [(12, 3), (1000, 100), (40_000, 400), (40_000, 40)]
)
def test_every_row_once_an_epoch(num_data: int, batch_size: int) -> None:
    per_epoch = num_data // batch_size
    batches = drawn(num_data, batch_size, 3 * per_epoch)
    epochs = batches.reshape(3, -1)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(num_data), (3, 1)))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


@pytest.mark.parametrize(
    ("num_data", "batch_size"), [(13, 3), (1009, 100), (9001, 1), (99_991, 1000), (10, 9)]
)
def test_no_row_twice_an_epoch_where_batches_do_not_divide_the_data(
    num_data: int, batch_size: int
) -> None:
    per_epoch = cut(num_data, batch_size).batches_per_epoch
    assert per_epoch == pytest.approx(num_data / batch_size, abs=1, rel=0.01)
    epochs = drawn(num_data, batch_size, 4 * per_epoch).reshape(4, -1)
    assert all(len(np.unique(epoch)) == epochs.shape[1] for epoch in epochs)
    # The rows left out are others in every epoch.
    left_out = [set(range(num_data)) - set(epoch.tolist()) for epoch in epochs]
    assert not left_out[0] or len(set.intersection(*left_out)) < len(left_out[0])


def test_a_minibatch_is_a_uniform_subset() -> None:
    # Over seeds of the chain: windows are single rows here, so that the order of rows is random.
    subsets = {subset: k for k, subset in enumerate(combinations(range(6), 3))}
    batches = np.concatenate([drawn(6, 3, 4000, seed) for seed in range(2)])
    counts = np.zeros(len(subsets))
    for batch in np.sort(batches[::2], axis=1):  # the second of an epoch is what the first left
        counts[subsets[tuple(batch.tolist())]] += 1
    assert stats.chisquare(counts)[1] > 1e-4


def test_over_the_seed_of_the_order_long_windows_are_uniform_too() -> None:
    # A window of five neighbours of 20,000 rows; how far apart two of them are is uniform.
    num_data, batch_size, differences = 20_000, 5, []
    assert cut(num_data, batch_size).width == 5
    for seed in range(400):
        batcher = reshuffle(num_data, batch_size, order_seed=seed)
        rows = minibatch.arrange(batcher.arrangement, np.arange(num_data), columns=False)
        batch = np.asarray(rows).reshape(-1, 5)[:25]
        differences.append((batch[:, 1:] - batch[:, :1]).ravel() % num_data)
    counts = np.histogram(np.concatenate(differences), bins=200, range=(0, num_data))[0]
    assert stats.chisquare(counts)[1] > 1e-4


@pytest.mark.parametrize("batch_size", [239, 240])
def test_given_the_order_every_row_is_as_likely_as_any_other(batch_size: int) -> None:
    # Two windows of 120 rows, of which the last row is no part where the minibatch has 239. With
    # cuts that stay, that would be a row of every 120th place: never used in every other window.
    num_data, num_epochs = 480_000, 8
    batcher = reshuffle(num_data, batch_size)
    wide = cut(num_data, batch_size)
    assert (wide.windows_per_batch, wide.width) == (2, 120)
    assert wide.even == (batch_size == 240)
    batches = drawn(num_data, batch_size, num_epochs * wide.batches_per_epoch)
    order = minibatch.arrange(batcher.arrangement, np.arange(num_data), columns=False)
    place = np.empty(num_data, int)
    place[np.asarray(order)] = np.arange(num_data)
    counts = np.bincount(place[batches.ravel()] % wide.width, minlength=wide.width)
    np.testing.assert_allclose(counts / counts.mean(), 1.0, atol=0.15)


def test_the_noise_of_a_minibatch_is_that_of_a_draw_without_replacement() -> None:
    # 16,000 windows of the 10^6 rows: a relative standard error of sqrt(2 / 4000) of the
    # variance between windows, and no more from 4,000 minibatches.
    num_data, batch_size = 1_000_000, 1000
    values = np.random.default_rng(1).normal(size=num_data)
    means = values[drawn(num_data, batch_size, 4000)].mean(axis=1)
    expected = (1 - batch_size / num_data) / batch_size
    # Minibatches of an epoch sum to a constant, which takes one degree of freedom of 1,000.
    ratio = means.var() / expected
    assert abs(ratio - 1) < 4.5 * np.sqrt(4 / 4000)
    np.testing.assert_allclose(means.reshape(4, -1).mean(1), values.mean(), atol=1e-12)


def test_the_walk_is_a_function_of_the_key() -> None:
    np.testing.assert_array_equal(drawn(1000, 100, 30), drawn.__wrapped__(1000, 100, 30))
    assert not np.array_equal(drawn(1000, 100, 30), drawn(1000, 100, 30, seed=1))


# In blocks of columns

NUM_DATA = 480_000


@cache
def logreg_model() -> LogisticRegression:
    return logistic_regression(num_train=NUM_DATA, num_test=1, dim=3, data_seed=1)


def logreg_gradient(model: LogisticRegression, position: np.ndarray, rows: np.ndarray) -> Array:
    """In float64: -theta / v + (N/n) sum of sigma(-u) x over the signed rows."""
    rows = rows.astype(np.float64)
    weights = 1 / (1 + np.exp(rows @ position))
    return -position / model.prior_variance + model.num_data / len(rows) * weights @ rows


@pytest.mark.parametrize("batch_size", [120, 240])
@pytest.mark.parametrize("kind", ["standard", "control_variates"])
def test_blocks_of_columns_hold_the_same_minibatches(batch_size: int, kind: str) -> None:
    model = logreg_model()
    position, centre = np.array([0.5, -1.0, 2.0]), np.array([0.4, -1.1, 1.9])
    estimator = gradients.standard(model)
    if kind == "control_variates":
        estimator = gradients.control_variates(model, jnp.asarray(centre, jnp.float32))
    batcher = reshuffle(NUM_DATA, batch_size)
    in_blocks = minibatch.arrange(batcher.arrangement, estimator.rows, columns=True)
    width = cut(NUM_DATA, batch_size).width
    assert MIN_BLOCK_ROWS <= width <= WINDOW_ROWS
    assert isinstance(in_blocks, Blocks)
    by_row = minibatch.arrange(batcher.arrangement, np.asarray(model.data), columns=False)
    state = batcher.init(jax.random.key(3))
    key = jax.random.key(0)

    @jax.jit
    def estimate(constants: object, rows: object, state: object) -> Array:
        selection, _ = batcher.select(key, state, rows)
        at = jnp.asarray(position, jnp.float32)
        return estimator.estimate(constants, at, selection)

    for _ in range(3):
        found = estimate(estimator.constants, in_blocks, state)
        rows, state = batcher.draw(key, state, by_row)
        assert len(rows) == batch_size
        expected = logreg_gradient(model, position, np.asarray(rows))
        scale = np.abs(expected).max()
        if kind == "control_variates":
            at_centre = logreg_gradient(model, centre, np.asarray(rows))
            scale += np.abs(at_centre).max()
            expected += logreg_gradient(model, centre, np.asarray(model.data)) - at_centre
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("num_rows", [1, 999, 1000, 1001, 2500])
def test_all_rows_as_blocks_of_columns(num_rows: int) -> None:
    model = logistic_regression(num_train=num_rows, num_test=1, dim=3, data_seed=2)
    position = np.array([0.5, -1.0, 2.0])
    batcher = minibatch.without_replacement(num_rows, num_rows)
    rows = minibatch.arrange(batcher.arrangement, model.data, columns=True)
    selection, _ = batcher.select(jax.random.key(0), (), rows)
    assert isinstance(selection, BlockSelection)
    assert selection.whole
    for estimator in (
        gradients.standard(model),
        gradients.control_variates(model, jnp.asarray([0.4, -1.1, 1.9])),
    ):
        at = jnp.asarray(position, jnp.float32)
        found = jax.jit(estimator.estimate)(estimator.constants, at, selection)
        expected = logreg_gradient(model, position, np.asarray(model.data))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# Chains


def chain_of(scheme: MinibatchScheme, num_steps: int, *pieces: int) -> tuple[np.ndarray, ...]:
    model = gaussian_mean(num_data=1000, dim=40)
    program = ChainProgram(gradients.standard(model), sgld, scheme, 100, capacity=10)
    start = model.posterior_mean.astype(np.float32)
    chain = program.start(jax.random.key(1), start, Hyperparameters(5e-5, 100))
    for piece in pieces or (num_steps,):
        chain = advance(program, chain, Budget(steps=piece))
    return chain.mean, chain.std, chain.position


def test_a_chain_cut_anywhere_is_the_same_chain() -> None:
    np.testing.assert_array_equal(
        chain_of(reshuffle, 37)[2], chain_of(reshuffle, 37, 3, 7, 1, 26)[2]
    )


def test_both_schemes_have_the_posterior_mean_and_reshuffling_the_smaller_bias() -> None:
    # Curvature 1000, step 5e-5: without replacement the stationary variance is
    # (2 + hV/2) / (lambda (2 - h lambda/2)), V the variance of the gradient noise; with exact
    # gradients V = 0. An epoch, 10 steps, is a quarter of the relaxation time, 40 steps.
    model, num_steps = gaussian_mean(num_data=1000, dim=40), 60_000
    step_size, curvature = 5e-5, model.precision
    spread = np.asarray(model.data, np.float64).var(axis=0, ddof=1)
    noise = 1000**2 * spread / 100 * (1 - 100 / 1000)
    without_noise = 2 / (curvature * (2 - step_size * curvature / 2))
    expected = np.mean(without_noise * (1 + step_size * noise / 4))
    # Effective draws of a variance: num_steps over (1 + rho^2) / (1 - rho^2), 40 coordinates.
    rho = 1 - step_size * curvature / 2
    error = np.sqrt(2 / (40 * num_steps * (1 - rho**2) / (1 + rho**2)))
    results = {}
    for name, scheme in (("without", minibatch.without_replacement), ("reshuffle", reshuffle)):
        mean, std, _ = chain_of(scheme, num_steps)
        mean_error = np.sqrt(expected * (1 + rho) / (1 - rho) / num_steps)
        assert np.all(np.abs(mean - model.posterior_mean) < 4.5 * mean_error)
        results[name] = np.mean(std**2)
    assert abs(results["without"] / expected - 1) < 4 * error
    # Between exact gradients and independent draws, and much nearer to the former.
    assert results["reshuffle"] > without_noise * (1 - 4 * error)
    assert results["reshuffle"] < without_noise + 0.5 * (expected - without_noise)
    assert 0.5 * (expected / without_noise - 1) > 8 * error


@pytest.mark.parametrize("order_seed", [-1, 1.5, True, "x"])
def test_a_seed_that_is_none_is_refused(order_seed: object) -> None:
    with pytest.raises(ConfigError, match=r"minibatch\.order_seed"):
        reshuffle(10, 5, order_seed=order_seed)  # type: ignore[arg-type]


def test_all_rows_are_the_data_themselves() -> None:
    rows = jnp.arange(5.0)
    batcher = reshuffle(5, 5)
    assert batcher.draw(jax.random.key(0), batcher.init(jax.random.key(0)), rows)[0] is rows
