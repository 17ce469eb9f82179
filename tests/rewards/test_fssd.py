"""FSSD and its test locations against closed forms, autodiff, and float64 NumPy."""

import math
from dataclasses import fields
from importlib import import_module
from importlib.resources import files
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from mamba_cli.errors import ConfigError
from mamba_cli.rewards import (
    FiniteSetSteinDiscrepancy,
    KernelSteinDiscrepancy,
    fssd,
    optimise_test_locations,
)
from mamba_cli.types import Reward, ScoredDraws

fssd_module = import_module("mamba_cli.rewards.fssd")


def autodiff_features(positions, scores, locations, kernel):
    """xi(x_i, v_j) = s_i k + grad_x k, ``[num_draws, num_locations, dim]``, in float64."""

    def xi(x, s, v):
        return s * kernel(x, v) + jax.grad(kernel)(x, v)

    both = jax.jit(jax.vmap(jax.vmap(xi, (None, None, 0)), (0, 0, None)))
    with jax.enable_x64(True):
        arrays = (jnp.asarray(a, jnp.float64) for a in (positions, scores, locations))
        return np.asarray(both(*arrays))


def biased_and_unbiased(features):
    """Eq. 4 squared, and the same with i = j left out, pair by pair."""
    n, num_locations, dim = features.shape
    biased = (features.mean(0) ** 2).sum() / (dim * num_locations)
    pairs = sum((features[i] * features[j]).sum() for i in range(n) for j in range(n) if i != j)
    return biased, pairs / (n * (n - 1) * dim * num_locations)


def quantile_draws(num_draws):
    """Draws that represent N(0, 1) without noise, ``[num_draws, 1]``."""
    normal = NormalDist()
    return np.array([[normal.inv_cdf((i + 0.5) / num_draws)] for i in range(num_draws)])


def scored(positions, scores, seed=0):
    return ScoredDraws(positions, scores, jax.random.key(seed))


def test_two_draws_of_a_standard_normal():
    x = np.array([[1.0], [2.0]])
    assert fssd(x, -x, [[0.0]]) ** 2 == pytest.approx(1.1384600, abs=5e-8)
    assert fssd(x, -x, [[0.0]], statistic="u") == pytest.approx(1.1384200, abs=5e-8)


@pytest.mark.parametrize("kernel", ["imq", "gaussian"])
def test_matches_autodiff_of_the_kernel(kernel):
    c, beta, length_scale = 0.7, -0.3, 1.3

    def kernel_fn(x, v):
        square = jnp.sum((x - v) ** 2)
        if kernel == "imq":
            return (c**2 + square) ** beta
        return jnp.exp(-square / (2 * length_scale**2))

    rng = np.random.default_rng(0)
    positions, scores = rng.normal(size=(2, 15, 3))
    locations = rng.normal(size=(4, 3))
    biased, unbiased = biased_and_unbiased(
        autodiff_features(positions, scores, locations, kernel_fn)
    )
    parameters = {"kernel": kernel, "c": c, "beta": beta, "length_scale": length_scale}
    value = fssd(positions, scores, locations, **parameters)
    assert value == pytest.approx(math.sqrt(biased), rel=1e-12)
    value = fssd(positions, scores, locations, statistic="u", **parameters)
    assert value == pytest.approx(unbiased, rel=1e-11)


def test_equals_float64_for_tight_draws_far_from_the_origin_and_long_positions():
    rng = np.random.default_rng(1)
    # More coordinates than one pass takes.
    dim = fssd_module.COORDINATES_PER_PASS + 1000
    positions = (100 + 0.01 * rng.normal(size=(12, dim))).astype(np.float32)
    scores = (1e4 * rng.normal(size=(12, dim))).astype(np.float32)
    locations = 100 + 0.01 * rng.normal(size=(2, dim))
    x, s = positions.astype(np.float64)[:, None], scores.astype(np.float64)[:, None]
    q = 1 + ((x - locations) ** 2).sum(-1, keepdims=True)
    features = s * q**-0.5 - (x - locations) * q**-1.5
    biased, unbiased = biased_and_unbiased(features)
    assert fssd(positions, scores, locations) == pytest.approx(math.sqrt(biased), rel=1e-9)
    value = fssd(positions, scores, locations, statistic="u")
    assert value == pytest.approx(unbiased, rel=1e-9, abs=1e-9 * biased)


def test_order_and_translation_do_not_matter():
    rng = np.random.default_rng(2)
    positions, scores = rng.normal(size=(2, 50, 3))
    locations = rng.normal(size=(4, 3))
    shift = 10 * rng.normal(size=3)
    order = rng.permutation(50)
    for kernel in ("imq", "gaussian"):
        value = fssd(positions, scores, locations, kernel=kernel)
        assert fssd(
            positions[order] + shift, scores[order], locations[::-1] + shift, kernel=kernel
        ) == pytest.approx(value, rel=1e-11)


def test_unbiased_statistic_of_exact_draws_is_zero_on_average():
    # 400 independent repeats give the standard error; draws shifted by 0.7 are far outside.
    rng = np.random.default_rng(3)
    locations = rng.normal(size=(3, 2))
    draws = rng.normal(size=(400, 30, 2))
    for shift, exact in ((0.0, True), (0.7, False)):
        u = np.array([fssd(x + shift, -x - shift, locations, statistic="u") for x in draws])
        standard_error = u.std(ddof=1) / math.sqrt(len(u))
        assert bool(abs(u.mean()) < 4 * standard_error) is exact


def test_length_scale_defaults_to_the_median_distance():
    # Distances 1, 2 and 3.
    x = np.array([[0.0], [1.0], [3.0]])
    assert fssd_module.median_distance(x) == pytest.approx(2)
    v = [[0.5]]
    assert fssd(x, -x, v, kernel="gaussian") == fssd(x, -x, v, kernel="gaussian", length_scale=2.0)


def test_median_distance_exists_for_chains_that_rarely_move():
    assert fssd_module.median_distance(np.full((5, 2), 1e3)) == 1
    mostly_still = np.concatenate([np.full((19, 1), 5.0), [[8.0]]])
    assert fssd_module.median_distance(mostly_still) == pytest.approx(3)
    # Many draws: the median distance of N(0, 1) draws is sqrt(2) times 0.6745.
    median = fssd_module.median_distance(quantile_draws(5000))
    assert median == pytest.approx(0.6745 * math.sqrt(2), rel=0.01)


def test_locations_come_from_a_gaussian_with_the_covariance_of_the_draws():
    rng = np.random.default_rng(4)
    positions = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 3)) + 5
    locations = fssd_module.gaussian_fit_locations(jax.random.key(0), positions, 20_000)
    covariance = np.cov(positions.T)
    # Standard error of a mean and of a covariance estimated from 20,000 Gaussian draws.
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_array_less(
        np.abs(locations.mean(0) - positions.mean(0)), 4 * sd / math.sqrt(20_000)
    )
    standard_error = np.sqrt((np.outer(sd, sd) ** 2 + covariance**2) / 20_000)
    np.testing.assert_array_less(np.abs(np.cov(locations.T) - covariance), 4 * standard_error)


def test_locations_are_distinct():
    locations = fssd_module.gaussian_fit_locations(jax.random.key(0), np.eye(4), 10)
    assert len(np.unique(locations, axis=0)) == 10


def test_fewer_draws_than_dimensions_give_a_diagonal_covariance():
    rng = np.random.default_rng(5)
    base = rng.normal(size=(3, 1))
    # Four equal coordinates: with a full covariance every location would have equal coordinates.
    positions = np.repeat(base, 4, axis=1)
    locations = fssd_module.gaussian_fit_locations(jax.random.key(0), positions, 20_000)
    correlation = np.corrcoef(locations.T)
    off_diagonal = correlation[~np.eye(4, dtype=bool)]
    assert np.abs(off_diagonal).max() < 4 / math.sqrt(20_000)
    # The standard error of an estimated standard deviation is sd / sqrt(2 n).
    np.testing.assert_allclose(locations.std(0) / base.std(), 1, atol=4 / math.sqrt(40_000))


@pytest.mark.parametrize("kernel", ["imq", "gaussian"])
def test_optimising_the_locations_increases_the_statistic(kernel):
    rng = np.random.default_rng(6)
    positions = 1.5 * rng.normal(size=(60, 3)) + 0.3
    start = rng.normal(size=(4, 3))
    parameters = {"kernel": kernel, "length_scale": 1.0}
    values = [
        fssd(
            positions,
            -positions,
            optimise_test_locations(
                positions, -positions, start, num_adam_steps=num_adam_steps, **parameters
            ),
            **parameters,
        )
        for num_adam_steps in (0, 10, 200)
    ]
    assert values[0] == pytest.approx(fssd(positions, -positions, start, **parameters), rel=1e-6)
    assert values[0] < values[1] < values[2]


def test_locations_find_where_the_witness_is_largest():
    # Draws of q = N(0, 1) scored by p: g(v) = E_q[(s_p - s_q)(x) k(x, v)].
    x = quantile_draws(500)
    start = np.array([[0.4], [1.6]])
    parameters = {"kernel": "gaussian", "length_scale": 1.0, "num_adam_steps": 300}
    # p = N(1, 1): the scores differ by 1, and E_q k(x, v) is largest at v = 0.
    found = optimise_test_locations(x, 1 - x, start, **parameters)
    np.testing.assert_allclose(found, 0, atol=0.02)
    # p = N(0, 1/2): they differ by -x, and |E_q x k(x, v)| = v exp(-v^2/4) / 2^1.5 is largest at
    # v = sqrt(2).
    found = optimise_test_locations(x, -2 * x, start, **parameters)
    np.testing.assert_allclose(found, math.sqrt(2), atol=0.02)


def test_optimisation_follows_the_scale_of_the_draws():
    # The same problem in units 1/100 as large and far from the origin.
    rng = np.random.default_rng(7)
    positions = rng.normal(size=(50, 3))
    scores = -0.5 * positions + 0.3
    start = rng.normal(size=(4, 3))
    found = optimise_test_locations(positions, scores, start)
    assert np.abs(found - start).max() > 0.1
    small = optimise_test_locations(7 + 0.01 * positions, 100 * scores, 7 + 0.01 * start, c=0.01)
    np.testing.assert_allclose((small - 7) * 100, found, atol=1e-2)


def test_optimisation_does_not_see_the_padding():
    # Every draw twice is the same empirical distribution; 64 need no padding, 128 a lot.
    rng = np.random.default_rng(8)
    positions = rng.normal(size=(64, 3)) + 1
    scores = 1 - positions
    start = rng.normal(size=(4, 3))
    once = optimise_test_locations(positions, scores, start)
    twice = optimise_test_locations(np.tile(positions, (2, 1)), np.tile(scores, (2, 1)), start)
    np.testing.assert_allclose(twice, once, atol=1e-3)


def test_a_coordinate_that_does_not_move_is_left_alone():
    rng = np.random.default_rng(9)
    positions = np.column_stack([rng.normal(size=(30, 2)), np.full(30, 2.0)])
    start = np.column_stack([rng.normal(size=(4, 2)), np.full(4, 2.0)])
    found = optimise_test_locations(positions, -positions, start)
    np.testing.assert_array_equal(found[:, 2], 2.0)
    assert not np.allclose(found[:, :2], start[:, :2])


def test_nothing_is_compiled_again_within_a_bucket():
    compiled = []
    listening = True

    def listener(event, duration, **_):
        if listening and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        rng = np.random.default_rng(10)
        draws = rng.normal(size=(500, 7))
        # Half of the draws find the locations: 65 to 256 of them are one bucket.
        first = FiniteSetSteinDiscrepancy(learning_rate=0.05)
        first(scored(draws[:130], -draws[:130]))
        assert compiled, "the listener hears of compilations"
        compiled.clear()
        for num_draws, reward in ((131, first), (402, first), (500, first)):
            reward(scored(draws[:num_draws], -draws[:num_draws], seed=num_draws))
        FiniteSetSteinDiscrepancy(learning_rate=0.1, c=0.5, beta=-0.2)(scored(draws, -draws))
        assert not compiled
    finally:
        listening = False


def test_reward_optimises_on_one_half_and_evaluates_the_other():
    rng = np.random.default_rng(11)
    positions = rng.normal(size=(41, 3))
    reward: Reward = FiniteSetSteinDiscrepancy(num_locations=4, num_adam_steps=20)
    assert (reward.name, reward.gradients, reward.higher_is_better) == ("fssd", "full", False)
    key = jax.random.key(3)
    x, rest = positions[::2], positions[1::2]
    start = fssd_module.gaussian_fit_locations(key, x, 4)
    locations = optimise_test_locations(x, -x, start, num_adam_steps=20)
    value = reward(ScoredDraws(positions, -positions, key))
    assert value == fssd(rest, -rest, locations)
    assert value != reward(ScoredDraws(positions, -positions, jax.random.key(4)))


@pytest.mark.parametrize("kernel", ["imq", "gaussian"])
def test_reward_prefers_exact_draws(kernel):
    rng = np.random.default_rng(12)
    exact = rng.normal(size=(4000, 5))
    reward = FiniteSetSteinDiscrepancy(kernel=kernel)
    best = reward(scored(exact, -exact))
    for positions in (1.7 * exact, 0.4 * exact, exact + 0.7, 0.1 * exact + 2):
        assert reward(scored(positions, -positions)) > 2 * best


def test_the_unbiased_statistic_may_be_negative_and_eq_4_never_is():
    rng = np.random.default_rng(13)
    draws = [scored(x, -x) for x in rng.normal(size=(40, 20, 3))]
    assert min(FiniteSetSteinDiscrepancy(num_locations=4, statistic="u")(d) for d in draws) < 0
    assert min(FiniteSetSteinDiscrepancy(num_locations=4)(d) for d in draws) > 0


def test_few_or_frozen_draws_have_a_value():
    rng = np.random.default_rng(14)
    for kernel in ("imq", "gaussian"):
        reward = FiniteSetSteinDiscrepancy(kernel=kernel, num_locations=4)
        for num_draws in (1, 2, 3):
            x = rng.normal(size=(num_draws, 3))
            assert math.isfinite(reward(scored(x, -x)))
        # All locations are at the draws, where k = 1 and grad k = 0: the root mean square score.
        frozen = np.full((20, 3), 4.0)
        assert reward(scored(frozen, np.full((20, 3), -2.0))) == pytest.approx(2.0)
        assert reward(scored(frozen, np.zeros((20, 3)))) == 0
    # One draw in the second half has no pair i != j.
    x = rng.normal(size=(2, 3))
    assert math.isnan(FiniteSetSteinDiscrepancy(statistic="u")(scored(x, -x)))


def test_what_is_not_finite_is_nan():
    for bad in (np.nan, np.inf):
        for spoiled in (0, 1):
            arrays = list(np.random.default_rng(15).normal(size=(2, 30, 3)))
            arrays[spoiled][4, 1] = bad
            assert math.isnan(fssd(*arrays, np.zeros((2, 3))))
            assert math.isnan(FiniteSetSteinDiscrepancy()(scored(*arrays)))
    assert math.isnan(fssd([[0.0]], [[0.0]], [[np.nan]]))


def test_huge_scores_stay_finite():
    x = np.random.default_rng(16).normal(size=(30, 3)).astype(np.float32)
    assert math.isfinite(FiniteSetSteinDiscrepancy()(scored(x, x * np.float32(1e30))))


def test_misuse_is_refused():
    x = np.zeros((3, 2))
    for arguments, match in (
        ((x[:0], x[:0], x), "num_draws, dim"),
        ((x, x, np.zeros((3, 4))), "test locations"),
        ((x, x, x[:0]), "test locations"),
    ):
        with pytest.raises(ValueError, match=match):
            fssd(*arguments)
    with pytest.raises(ValueError, match="kernels"):
        fssd(x, x, x, kernel="rbf")
    with pytest.raises(ValueError, match="statistics"):
        fssd(x, x, x, statistic="w")
    with pytest.raises(ValueError, match="num_draws, dim"):
        FiniteSetSteinDiscrepancy()(scored(x[:0], x[:0]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_locations", 0), ("num_locations", 2.5), ("num_locations", True),
        ("kernel", "rbf"), ("c", 0), ("beta", -1), ("length_scale", 0), ("length_scale", "long"),
        ("statistic", "w"), ("num_adam_steps", -1), ("learning_rate", 0),
        ("learning_rate", math.nan), ("gradients", "half"),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ConfigError, match=rf"tuner\.reward\.{key}={value}: must be "):
        FiniteSetSteinDiscrepancy(**{key: value})


@pytest.mark.parametrize(
    ("option", "reward_type"),
    [("ksd", KernelSteinDiscrepancy), ("fssd", FiniteSetSteinDiscrepancy)],
)
def test_the_option_file_names_every_parameter_and_its_default(option, reward_type):
    text = files("mamba_cli.conf").joinpath(f"reward/{option}.yaml").read_text()
    cfg = OmegaConf.create(text)
    assert instantiate(cfg, _convert_="all") == reward_type()
    assert set(cfg) - {"_target_"} == {f.name for f in fields(reward_type) if f.init}
