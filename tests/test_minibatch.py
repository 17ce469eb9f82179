"""Minibatches: distinct, every subset equally likely, variances of the textbook, O(n) a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core
from scipy import stats

from mamba_cli import minibatch
from mamba_cli.threefry import unrolled
from mamba_cli.types import Array, Minibatcher

# Every chi-square test here is seeded and rejects below this probability.
P_VALUE = 1e-4


@cache
def indices_of_keys(seed: int, num_keys: int, num_data: int, num_indices: int) -> np.ndarray:
    """``random_indices`` for many keys, ``[num_keys, num_indices]``."""
    keys = jax.random.split(jax.random.key(seed), num_keys)
    draw = partial(minibatch.random_indices, num_data=num_data, num_indices=num_indices)
    return np.asarray(jax.jit(jax.vmap(draw))(keys))


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray | None = None) -> float:
    """P-value of counts; expected counts are at least 20, where the chi-square law holds."""
    expected = counts.sum() / counts.size if probabilities is None else counts.sum() * probabilities
    assert np.min(expected) >= 20
    return float(
        stats.chisquare(counts.ravel(), np.broadcast_to(expected, counts.shape).ravel())[1]
    )


# Distinct and in range


@pytest.mark.parametrize("num_data", range(1, 13))
def test_all_of_a_few_rows_are_a_permutation(num_data: int) -> None:
    indices = indices_of_keys(0, 200_000 if num_data in (5, 7) else 1000, num_data, num_data)
    np.testing.assert_array_equal(
        np.sort(indices, axis=1), np.tile(np.arange(num_data), (len(indices), 1))
    )


@pytest.mark.parametrize(
    ("num_data", "num_indices"),
    [(97, 97), (1009, 500), (65_536, 1000), (99_991, 10_000), (1_000_003, 5000), (50_000_017, 300)],
)
def test_indices_are_distinct_and_in_range(num_data: int, num_indices: int) -> None:
    indices = np.sort(indices_of_keys(1, 8, num_data, num_indices), axis=1)
    assert indices.dtype == np.int32
    assert indices.min() >= 0
    assert indices.max() < num_data
    assert np.all(np.diff(indices, axis=1) > 0)


@pytest.mark.parametrize(
    "num_data", [1, 2, 3, 4, 5, 7, 30, 997, 80_000, 1_000_000, 999_999_937, 2**30]
)
def test_factors_hold_all_rows_with_little_to_spare(num_data: int) -> None:
    left, right = minibatch.factorise(num_data)
    assert num_data <= left * right <= num_data + max(left, right)
    assert max(left, right) < 2**16  # what the hash can reach
    if num_data > 3:
        assert min(left, right) >= 2
        assert 1 / 4 <= left / right <= 3 / 2


def test_more_rows_than_an_index_can_name_are_refused() -> None:
    with pytest.raises(ValueError, match="num_data=1073741825"):
        minibatch.factorise(2**30 + 1)


# Every subset equally likely


def test_every_pair_of_five_is_equally_likely() -> None:
    # A relative error of 3 % in one of the ten subsets would be 4 standard errors.
    indices = indices_of_keys(0, 200_000, 5, 5)
    subset = np.array([[math.comb(max(i, j), 2) + min(i, j) for j in range(5)] for i in range(5)])
    counts = np.bincount(subset[indices[:, 0], indices[:, 1]], minlength=10)
    assert len(counts) == 10
    assert chi_square_p(counts) > P_VALUE
    # What a minibatch sees is unordered; the bijection is uniform on all 120 orders too.
    orders = np.unique(indices @ 5 ** np.arange(5), return_counts=True)[1]
    assert len(orders) == 120
    assert chi_square_p(orders) > P_VALUE


def test_every_triple_of_seven_is_equally_likely() -> None:
    indices = np.sort(indices_of_keys(0, 200_000, 7, 7)[:, :3], axis=1)
    names = {subset: k for k, subset in enumerate(itertools.combinations(range(7), 3))}
    codes = [names[tuple(row)] for row in np.unique(indices, axis=0)]
    assert sorted(codes) == list(range(35))
    counts = np.unique(indices, axis=0, return_counts=True)[1]
    assert chi_square_p(counts) > P_VALUE


def pair_p_values(num_keys: int, num_data: int = 1000) -> dict[str, float]:
    """How uniform pairs of indices are, for counters alike in the left, the right or no part.

    Two chi-square tests a pair: the difference mod N, uniform on 1..N-1, and the two indices
    in 20 by 20 bins, uniform on ordered pairs without the diagonal.
    """
    left, right = minibatch.factorise(num_data)
    counters = {"alike left": 1, "alike right": right, "alike in none": 8 * right + 8}
    indices = indices_of_keys(4, num_keys, num_data, 9 * right)
    width = num_data // 20
    bins = np.full((20, 20), width**2) - width * np.eye(20)
    p_values = {}
    for name, other in counters.items():
        first, second = indices[:, 0], indices[:, other]
        differences = np.bincount((second - first) % num_data, minlength=num_data)
        assert differences[0] == 0
        p_values[f"{name}, difference"] = chi_square_p(differences[1:])
        joint = np.bincount(first // width * 20 + second // width, minlength=400)
        p_values[f"{name}, bins"] = chi_square_p(joint, bins.ravel() / bins.sum())
        blocks = np.bincount((second // right - first // right) % left, minlength=left)
        by_block = np.full(left, right**2) - right * (np.arange(left) == 0)
        p_values[f"{name}, blocks"] = chi_square_p(blocks, by_block / by_block.sum())
    return p_values


def test_pairs_of_a_thousand_are_uniform() -> None:
    p_values = pair_p_values(100_000)
    assert len(p_values) == 9
    assert min(p_values.values()) > P_VALUE, p_values


@pytest.mark.parametrize("num_half_rounds", [3, 4])
def test_fewer_half_rounds_would_be_caught(
    monkeypatch: pytest.MonkeyPatch, num_half_rounds: int
) -> None:
    monkeypatch.setattr(minibatch, "half_rounds", lambda left, right: num_half_rounds)
    indices_of_keys.cache_clear()
    p_values = pair_p_values(100_000)
    indices_of_keys.cache_clear()
    assert min(p_values.values()) < P_VALUE, p_values


@pytest.mark.parametrize("difference", [1, 4, 8, 16, 34])
def test_the_hash_of_a_pair_is_a_pair_of_random_functions(difference: int) -> None:
    # With the multiplier fixed, a difference of 8 collides 2.6 times as often as it should.
    size, num_keys = 100, 400_000
    keys = jax.random.bits(jax.random.key(5), (2, num_keys), jnp.uint32)
    value = jnp.uint32(40)
    first = minibatch._hash(value, keys, size).astype(int)
    second = minibatch._hash(value ^ jnp.uint32(difference), keys, size).astype(int)
    joint = np.bincount(np.asarray(first * size + second), minlength=size * size)
    assert chi_square_p(joint) > P_VALUE


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 4095, 4096, 6250, 60_000, 65_535])
def test_range_reduction_is_the_high_word_of_the_product(size: int) -> None:
    # To 2^-22 of the size where fewer bits are used; exactly, above 4095.
    keys = jax.random.bits(jax.random.key(6), (2, 2000), jnp.uint32)
    values = np.asarray(minibatch._hash(jnp.uint32(5), keys, size), np.int64)
    bits = ((5 ^ np.asarray(keys[0], np.uint64)) * 0x9E3779B1) % 2**32
    bits = ((bits ^ (bits >> 15)) * (np.asarray(keys[1], np.uint64) | 1)) % 2**32
    bits = bits ^ (bits >> 13)
    used = 32 if size > 4095 else 32 - size.bit_length()
    expected = ((bits >> (32 - used)) * size) >> used
    np.testing.assert_array_equal(values, expected)
    assert size * size / 2**used < size  # every value can come out


# The exact law of a pair, by enumeration of all round functions


def enumerated_pair_distance(left_size: int, right_size: int, num_half_rounds: int) -> float:
    """Worst total variation distance of a pair, from the law over all ordered pairs.

    One half-round applies, to both members of a pair, a function drawn uniformly among
    all of them: the transition matrix over pairs is their average.
    """
    cells = list(itertools.product(range(left_size), range(right_size)))
    number = {pair: k for k, pair in enumerate(itertools.permutations(cells, 2))}

    def transition(move: Callable[..., tuple[int, int]], sizes: tuple[int, int]) -> np.ndarray:
        functions = list(itertools.product(range(sizes[0]), repeat=sizes[1]))
        matrix = np.zeros((len(number), len(number)))
        for function in functions:
            for (x, y), k in number.items():
                matrix[k, number[move(x, function), move(y, function)]] += 1 / len(functions)
        return matrix

    on_left = transition(lambda x, f: ((x[0] + f[x[1]]) % left_size, x[1]), (left_size, right_size))
    on_right = transition(
        lambda x, f: (x[0], (x[1] + f[x[0]]) % right_size), (right_size, left_size)
    )
    law = np.eye(len(number))
    for k in range(num_half_rounds):
        law = law @ (on_left if k % 2 == 0 else on_right)
    return float(np.max(np.abs(law - 1 / len(number)).sum(axis=1)) / 2)


@pytest.mark.parametrize(("left_size", "right_size"), [(2, 2), (3, 2), (2, 4), (3, 3), (4, 3)])
@pytest.mark.parametrize("num_half_rounds", [2, 3, 4, 5, 8])
def test_pair_distance_is_that_of_random_round_functions(
    left_size: int, right_size: int, num_half_rounds: int
) -> None:
    expected = enumerated_pair_distance(left_size, right_size, num_half_rounds)
    distance = minibatch.pair_distance(left_size, right_size, num_half_rounds)
    assert distance == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_data", [4, 5, 12, 1000, 80_000, 1_000_000, 50_000_000])
def test_half_rounds_bring_pairs_within_the_tolerance(num_data: int) -> None:
    factors = minibatch.factorise(num_data)
    count = minibatch.half_rounds(*factors)
    assert count >= 4
    assert minibatch.pair_distance(*factors, count) <= 1e-6
    assert count == 4 or minibatch.pair_distance(*factors, count - 1) > 1e-6


# Inclusion over large N


@pytest.mark.parametrize("num_data", [10_000_000, 50_000_000])
def test_large_ranges_are_reached_evenly(num_data: int) -> None:
    indices = indices_of_keys(7, 200_000, num_data, 2)
    for index in indices.T:
        assert chi_square_p(np.bincount(index // (num_data // 500), minlength=500)) > P_VALUE
        # Fine structure: remainders, as a biased range reduction would leave gaps.
        assert chi_square_p(np.bincount(index % 500, minlength=500)) > P_VALUE
    differences = (indices[:, 1].astype(np.int64) - indices[:, 0]) % num_data
    assert chi_square_p(np.bincount(differences // (num_data // 500), minlength=500)) > P_VALUE


# The noise a minibatch makes (variance of a mean, the textbook's finite-population law)


def batch_means(batcher: Minibatcher, columns: np.ndarray, num_keys: int, seed: int) -> np.ndarray:
    """Means over minibatches of ``columns`` ``[num_data, k]``: ``[num_keys, k]``."""

    def mean_of(key: Array, rows: Array) -> Array:
        batch, _ = batcher.draw(key, batcher.init(key), rows)
        return jnp.mean(batch, axis=0)

    keys = jax.random.split(jax.random.key(seed), num_keys)
    rows = jnp.asarray(columns, jnp.float32)
    return np.asarray(jax.jit(jax.vmap(mean_of, in_axes=(0, None)))(keys, rows), np.float64)


def structured_columns(num_data: int) -> np.ndarray:
    """Data sorted, periodic and in blocks, where the structure of the bijection would show."""
    left, right = minibatch.factorise(num_data)
    i = np.arange(num_data)
    columns = [
        i / num_data,
        np.cos(2 * np.pi * i / right),
        (i % right < right // 4),
        np.cos(6 * np.pi * (i // right) / left),
        (i // right < left // 3),
        np.random.default_rng(0).standard_normal(num_data),
    ]
    columns = np.stack([np.asarray(column, np.float64) for column in columns], axis=1)
    return (columns - columns.mean(axis=0)) / columns.std(axis=0)


@pytest.mark.parametrize(("num_data", "batch_size"), [(1000, 400), (9973, 100)])
def test_variance_without_replacement(num_data: int, batch_size: int) -> None:
    num_keys = 20_000
    columns = structured_columns(num_data)
    means = batch_means(
        minibatch.without_replacement(num_data, batch_size), columns, num_keys, seed=8
    )
    expected = (num_data - batch_size) / (num_data - 1) / batch_size
    assert np.all(np.abs(means.mean(axis=0)) < 4.5 * np.sqrt(expected / num_keys))
    # Means of many rows are near normal: the variance has a relative standard error √(2/K), 1 %.
    ratios = means.var(axis=0) / expected
    assert np.all(np.abs(ratios - 1) < 4.5 * np.sqrt(2 / num_keys)), ratios


def test_variance_with_replacement() -> None:
    num_data, batch_size, num_keys = 1000, 400, 20_000
    columns = structured_columns(num_data)
    means = batch_means(minibatch.with_replacement(num_data, batch_size), columns, num_keys, seed=9)
    ratios = means.var(axis=0) * batch_size
    assert np.all(np.abs(means.mean(axis=0)) < 4.5 / np.sqrt(num_keys * batch_size))
    assert np.all(np.abs(ratios - 1) < 4.5 * np.sqrt(2 / num_keys)), ratios


@pytest.mark.parametrize("scheme", [minibatch.without_replacement, minibatch.with_replacement])
def test_successive_minibatches_are_independent(scheme: Callable[..., Minibatcher]) -> None:
    # The keys of successive steps are folded from one, as a chain folds them.
    num_steps = 40_000
    batcher = scheme(1000, 50)
    rows = jnp.asarray(structured_columns(1000), jnp.float32)

    @jax.jit
    def means(rows: Array) -> Array:
        def step(state: object, number: Array) -> tuple[object, Array]:
            key = jax.random.fold_in(jax.random.key(10), number)
            batch, state = batcher.draw(key, state, rows)
            return state, jnp.mean(batch, axis=0)

        return jax.lax.scan(step, batcher.init(jax.random.key(10)), jnp.arange(num_steps))[1]

    series = np.asarray(means(rows), np.float64)
    series = (series - series.mean(axis=0)) / series.std(axis=0)
    for lag in (1, 2):
        correlations = series[lag:].T @ series[:-lag] / len(series)
        assert np.all(np.abs(correlations) < 4.5 / np.sqrt(num_steps)), correlations


# Cost and shape


def sizes_in(jaxpr: jax_core.Jaxpr) -> Iterator[int]:
    """Sizes of all arrays that a program makes, its inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda p: isinstance(p, jax_core.ClosedJaxpr | jax_core.Jaxpr)
        ):
            if isinstance(parameter, jax_core.ClosedJaxpr):
                yield from sizes_in(parameter.jaxpr)
            elif isinstance(parameter, jax_core.Jaxpr):
                yield from sizes_in(parameter)


@pytest.mark.parametrize("scheme", [minibatch.without_replacement, minibatch.with_replacement])
def test_no_array_grows_with_the_data(scheme: Callable[..., Minibatcher]) -> None:
    num_data, batch_size, dim = 1_000_003, 700, 3
    batcher = scheme(num_data, batch_size)
    rows = jax.ShapeDtypeStruct((num_data, dim), jnp.float32)
    traced = jax.make_jaxpr(lambda key, rows: batcher.draw(key, batcher.init(key), rows)[0])(
        jax.random.key(0), rows
    )
    sizes = list(sizes_in(traced.jaxpr))
    assert batch_size * dim in sizes
    assert max(sizes) == batch_size * dim


def test_a_full_batch_is_the_data_themselves() -> None:
    rows = {"x": jnp.arange(6.0), "y": jnp.ones((6, 2))}
    batcher = minibatch.without_replacement(6, 6)
    batch, _ = batcher.draw(jax.random.key(0), batcher.init(jax.random.key(0)), rows)
    assert all(batch[name] is rows[name] for name in rows)


@pytest.mark.parametrize("scheme", [minibatch.without_replacement, minibatch.with_replacement])
def test_leaves_of_a_minibatch_belong_together(scheme: Callable[..., Minibatcher]) -> None:
    rows = {"x": jnp.arange(50.0), "y": jnp.stack([jnp.arange(50) * 2, jnp.arange(50) * 3], 1)}
    batcher = scheme(50, 20)
    key = jax.random.key(11)
    batch, _ = batcher.draw(key, batcher.init(key), rows)
    assert batch["y"].shape == (20, 2)
    np.testing.assert_array_equal(batch["y"], np.outer(batch["x"], [2, 3]))
    if scheme is minibatch.without_replacement:
        assert len(np.unique(batch["x"])) == 20


@pytest.mark.parametrize("batch_size", [0, -1, 51])
def test_a_minibatch_larger_than_the_data_is_a_mistake_of_ours(batch_size: int) -> None:
    with pytest.raises(AssertionError):
        minibatch.without_replacement(50, batch_size)


def test_rows_are_the_same_in_double_precision() -> None:
    """A chain's keys make words of 32 bits, whatever JAX's default width is."""
    key = unrolled(jax.random.key_data(jax.random.key(0)))

    def selected() -> np.ndarray:
        scheme = minibatch.with_replacement(100, 7)
        selection, _ = scheme.select(key, scheme.init(key), jnp.arange(100, dtype=jnp.int32))
        return np.asarray(selection.indices)

    single = selected()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(selected(), single)
