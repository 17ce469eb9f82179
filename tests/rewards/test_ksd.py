"""KSD against closed forms, autodiff of the Stein kernel, and float64 NumPy."""

import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_cli.errors import ConfigError
from mamba_cli.rewards import KernelSteinDiscrepancy, ksd
from mamba_cli.rewards.draws import bucket_size
from mamba_cli.types import Reward, Scored, ScoredDraws

# The package's attribute of this name is the function; the module is found by its full name.
ksd_module = import_module("mamba_cli.rewards.ksd")


@jax.jit
def _autodiff_stein_kernels(x, s, c, beta):
    def kernel(x, y):
        return (c**2 + jnp.sum((x - y) ** 2)) ** beta

    grad_x, grad_y = jax.grad(kernel, 0), jax.grad(kernel, 1)
    second = jax.jacfwd(grad_x, 1)

    def stein_kernel(x, sx, y, sy):
        return (
            sx @ sy * kernel(x, y) + sx @ grad_y(x, y) + sy @ grad_x(x, y) + jnp.trace(second(x, y))
        )

    over_y = jax.vmap(stein_kernel, (None, None, 0, 0))
    return jax.vmap(over_y, (0, 0, None, None))(x, s, x, s)


def autodiff_stein_kernels(positions, scores, c, beta):
    """k_pi between all draws, ``[n, n]``: Eq. 3 with derivatives of the kernel by autodiff."""
    with jax.enable_x64(True):
        arrays = (jnp.asarray(a, jnp.float64) for a in (positions, scores, c, beta))
        return np.asarray(_autodiff_stein_kernels(*arrays))


def row_by_row_ksd(positions, scores, c=1.0, beta=-0.5):
    """Eq. 3 in float64, one row of pairs at a time, from differences of the given numbers."""
    x, s = np.asarray(positions, np.float64), np.asarray(scores, np.float64)
    row_sums = []
    for xi, si in zip(x, s, strict=True):
        u = xi - x
        q = c**2 + (u**2).sum(1)
        row = (s @ si) * q**beta
        row -= 2 * beta * (u * (si - s)).sum(1) * q ** (beta - 1)
        row -= 2 * beta * x.shape[1] * q ** (beta - 1)
        row -= 4 * beta * (beta - 1) * (u**2).sum(1) * q ** (beta - 2)
        row_sums.append(math.fsum(row))
    return math.sqrt(math.fsum(row_sums)) / len(x)


def gaussian_draws(seed, num_draws, dim, sd=1.0, mean=0.0):
    rng = np.random.default_rng(seed)
    centred = sd * rng.normal(size=(num_draws, dim))
    return mean + centred, -centred / sd**2


def test_stein_kernel_of_one_pair():
    x, y = [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]
    sx, sy = [0.5, 0.75, 1.5], [1.0, 1.5, 3.0]
    assert autodiff_stein_kernels([x, y], [sx, sy], 1.0, -0.5)[0, 1] == pytest.approx(3.5)
    # k_pi(x, x) = |s|^2 + d, and the pair counts in both orders.
    total = (np.dot(sx, sx) + 3) + (np.dot(sy, sy) + 3) + 2 * 3.5
    assert ksd([x, y], [sx, sy]) == pytest.approx(math.sqrt(total) / 2, rel=1e-12)


def test_one_point():
    rng = np.random.default_rng(0)
    for dim in (1, 3):
        score = rng.normal(size=(1, dim))
        expected = math.sqrt((score**2).sum() + dim)
        assert ksd(rng.normal(size=(1, dim)), score) == pytest.approx(expected, rel=1e-12)


def test_two_draws_of_a_standard_normal():
    x = np.array([[1.0], [-1.0]])
    assert ksd(x, -x) == pytest.approx(0.731367, abs=5e-7)
    assert ksd(x, -x) ** 2 == pytest.approx(0.534898, abs=5e-7)
    # The pairs i != j alone give the U-statistic.
    diagonal = 2 * (1 + 1)
    assert (4 * ksd(x, -x) ** 2 - diagonal) / 2 == pytest.approx(-0.930204, abs=1e-6)


@pytest.mark.parametrize(("c", "beta"), [(1.0, -0.5), (0.3, -0.5), (2.0, -0.2), (0.7, -0.9)])
def test_matches_autodiff_of_the_stein_kernel(c, beta):
    rng = np.random.default_rng(1)
    positions, scores = rng.normal(size=(2, 40, 4))
    expected = math.sqrt(autodiff_stein_kernels(positions, scores, c, beta).mean())
    assert ksd(positions, scores, c=c, beta=beta) == pytest.approx(expected, rel=1e-12)
    assert row_by_row_ksd(positions, scores, c, beta) == pytest.approx(expected, rel=1e-12)


def antithetic_draws():
    x, s = gaussian_draws(2, 200, 10)
    return np.concatenate([x, -x]), np.concatenate([s, -s])


def slow_chain_far_from_its_mean():
    """A chain whose neighbours are close and whose whole spread is 100 times as wide."""
    rng = np.random.default_rng(3)
    x = np.linspace(0, 200, 300)[:, None] * rng.normal(size=10) + 0.01 * rng.normal(size=(300, 10))
    return x, -x


FLOAT32_CASES = {
    "exact draws, sd 1": gaussian_draws(4, 500, 10),
    "tight, far from the origin": gaussian_draws(5, 500, 10, sd=0.01, mean=100.0),
    "very tight, scores 1e4": gaussian_draws(6, 500, 10, sd=1e-4, mean=100.0),
    "tight at the wrong place, scores 1e4": (
        gaussian_draws(7, 300, 10, sd=0.01, mean=-100.0)[0],
        1e4 + gaussian_draws(8, 300, 10)[1],
    ),
    "wide": gaussian_draws(9, 500, 10, sd=100.0),
    "antithetic": antithetic_draws(),
    "slow chain": slow_chain_far_from_its_mean(),
    "frozen": (np.full((300, 10), 3.7), np.full((300, 10), 1e-3)),
    "one outlier": (
        np.concatenate([np.zeros((299, 10)), np.full((1, 10), 1e4)]),
        np.ones((300, 10)),
    ),
    "1,500 dimensions": gaussian_draws(10, 70, 1500),
    "5,000 dimensions, tight, far from the origin": gaussian_draws(11, 65, 5000, 0.01, 100.0),
}


@pytest.mark.parametrize("case", FLOAT32_CASES)
def test_equals_a_float64_evaluation_of_the_same_float32_inputs(case):
    positions, scores = (array.astype(np.float32) for array in FLOAT32_CASES[case])
    dim = positions.shape[1]
    # Up to 1,024 dimensions the arithmetic is float64, beyond that the products are float32.
    tolerance = 1e-9 if dim <= 1024 else 1e-6
    expected = row_by_row_ksd(positions, scores)
    assert ksd(jnp.asarray(positions), jnp.asarray(scores)) == pytest.approx(
        expected, rel=tolerance
    )


def test_a_chain_that_moves_little_in_many_dimensions():
    # Neighbours a distance of 1 apart in a spread of 50: the squared distance is 1/2,500 of the
    # squared norms it is the difference of, so float32 products have lost three digits of it.
    rng = np.random.default_rng(12)
    dim = 5000
    x = np.linspace(-50, 50, 100)[:, None] * rng.normal(size=dim) / math.sqrt(dim)
    x = (x + 0.1 * rng.normal(size=x.shape) / math.sqrt(dim)).astype(np.float32)
    s = (-x + rng.normal(size=x.shape)).astype(np.float32)
    assert ksd(x, s) == pytest.approx(row_by_row_ksd(x, s), rel=5e-6)


@pytest.mark.parametrize("num_draws", [1, 2, 63, 64, 65, 255, 256, 257, 511, 513])
def test_padding_does_not_change_the_value(num_draws):
    positions, scores = gaussian_draws(13, num_draws, 3, sd=0.5, mean=2.0)
    expected = row_by_row_ksd(positions, scores)
    assert ksd(positions, scores) == pytest.approx(expected, rel=1e-10)


def test_nothing_is_compiled_again_within_a_bucket():
    compiled = []
    listening = True

    def listener(event, duration, **_):
        if listening and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        ksd(*gaussian_draws(14, 65, 6))
        on_device = [jnp.asarray(array) for array in gaussian_draws(15, 200, 6)]
        assert compiled, "the listener hears of compilations"
        compiled.clear()
        for num_draws, c in ((66, 1.0), (130, 0.5), (256, 2.0)):
            ksd(*gaussian_draws(15, num_draws, 6), c=c)
        ksd(*on_device)
        assert not compiled
    finally:
        listening = False


def test_bucket_sizes():
    sizes = {n: bucket_size(n) for n in (1, 64, 65, 256, 257, 512, 513, 1025, 8000)}
    assert sizes == {
        1: 64, 64: 64, 65: 256, 256: 256, 257: 512, 512: 512, 513: 1024, 1025: 2048, 8000: 8192,
    }  # fmt: skip


def test_new_pairs_alone_complete_the_sum():
    num_blocks, dim = 4, 3
    positions, scores = gaussian_draws(16, num_blocks * 256, dim)
    rows, columns = ksd_module.triangle_of_blocks(num_blocks)
    new = columns >= 2

    def pair_sum(chosen):
        return float(
            ksd_module.stein_pair_sums(
                ksd_module.pad_draws(positions, scores, np.ones((num_blocks * 256, 1))),
                jnp.asarray(np.append(rows[chosen], rows[~chosen]), jnp.int32),
                jnp.asarray(np.append(columns[chosen], columns[~chosen]), jnp.int32),
                jnp.asarray(chosen.sum(), jnp.int32),
                jnp.asarray(1.0, jnp.float64),
                jnp.asarray(dim, jnp.float64),
                beta=-0.5,
                block_size=256,
            )[0, 0]
        )

    with jax.enable_x64(True):
        parts = [pair_sum(~new), pair_sum(new), pair_sum(np.ones(len(new), bool))]
    assert parts[0] + parts[1] == pytest.approx(parts[2], rel=1e-12)
    assert parts[0] == pytest.approx(
        512**2 * row_by_row_ksd(positions[:512], scores[:512]) ** 2, rel=1e-10
    )


def test_order_translation_and_rotation_do_not_matter():
    rng = np.random.default_rng(17)
    positions, scores = rng.normal(size=(2, 120, 5))
    value = ksd(positions, scores)
    order = rng.permutation(len(positions))
    assert ksd(positions[order], scores[order]) == pytest.approx(value, rel=1e-12)
    assert ksd(positions + rng.normal(size=5) * 100, scores) == pytest.approx(value, rel=1e-9)
    rotation = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    assert ksd(positions @ rotation, scores @ rotation) == pytest.approx(value, rel=1e-12)


def test_scaling_of_units():
    # In units a times as large: positions and c times a, scores over a, k_pi times a^(2 beta - 2).
    rng = np.random.default_rng(18)
    positions, scores = rng.normal(size=(2, 60, 3))
    a, c, beta = 7.0, 0.8, -0.3
    assert ksd(a * positions, scores / a, c=a * c, beta=beta) == pytest.approx(
        a ** (beta - 1) * ksd(positions, scores, c=c, beta=beta), rel=1e-12
    )


@pytest.mark.parametrize("num_draws", [20, 200])
def test_exact_draws_have_a_v_statistic_of_2d_over_n(num_draws):
    # E k_pi(x, y) = 0 for independent exact draws, so E V = E k_pi(x, x) / n = (E|s|^2 + d) / n,
    # which is 2 d / n for N(0, I). The standard error is that of 150 independent repeats.
    dim, num_repeats = 4, 150
    rng = np.random.default_rng(19)
    draws = rng.normal(size=(num_repeats, num_draws, dim))
    v = np.array([ksd(x, -x) ** 2 for x in draws])
    standard_error = v.std(ddof=1) / math.sqrt(num_repeats)
    assert standard_error < 0.05 * 2 * dim / num_draws
    assert abs(v.mean() - 2 * dim / num_draws) < 4 * standard_error


def test_draws_of_the_wrong_width_do_not_vanish():
    # Exact draws would have 2 d / n = 0.0089, with 900 of them.
    rng = np.random.default_rng(20)
    exact = rng.normal(size=(900, 4))
    for width in (0.5, 2.0):
        assert ksd(width * exact, -width * exact) > 2 * math.sqrt(2 * 4 / 900)


def test_what_is_not_finite_is_nan():
    positions, scores = gaussian_draws(21, 10, 3)
    for bad in (np.nan, np.inf, -np.inf):
        for spoiled in (0, 1):
            arrays = [positions.copy(), scores.copy()]
            arrays[spoiled][4, 1] = bad
            assert math.isnan(ksd(*arrays))


def test_scores_of_a_chain_that_is_about_to_diverge_stay_finite():
    positions, scores = (array.astype(np.float32) for array in gaussian_draws(22, 80, 1500))
    expected = 1e25 * math.sqrt((scores.astype(np.float64) ** 2).sum())
    # Draws so far apart that only i = j counts: V = sum |s|^2 / n^2.
    huge = ksd(positions * np.float32(1e35), scores * np.float32(1e25))
    assert huge == pytest.approx(expected / 80, rel=1e-5)


def test_misuse_is_refused():
    for positions, scores in (
        (np.zeros((0, 3)), np.zeros((0, 3))),
        (np.zeros((4, 3)), np.zeros((4, 2))),
        (np.zeros(4), np.zeros(4)),
    ):
        with pytest.raises(ValueError, match="num_draws, dim"):
            ksd(positions, scores)
    for parameters in ({"c": 0.0}, {"beta": -1.0}, {"beta": 0.5}, {"c": math.nan}):
        with pytest.raises(ValueError, match="c > 0"):
            ksd([[0.0]], [[0.0]], **parameters)


def test_the_callers_precision_is_left_alone():
    ksd(jnp.ones((3, 2)), jnp.ones((3, 2)))
    assert jnp.asarray(1.0).dtype == jnp.float32


def test_reward_is_the_discrepancy():
    reward: Reward = KernelSteinDiscrepancy(c=0.5, beta=-0.3, gradients="stochastic")
    assert (reward.name, reward.gradients, reward.higher_is_better) == ("ksd", "stochastic", False)
    positions, scores = (jnp.asarray(array) for array in gaussian_draws(23, 30, 2))
    value = reward(ScoredDraws(positions, scores, jax.random.key(0)))
    assert isinstance(value, Scored)
    assert value.value == ksd(positions, scores, c=0.5, beta=-0.3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("c", 0), ("c", -1.0), ("c", math.inf), ("c", math.nan), ("c", "wide"), ("c", True),
        ("beta", 0), ("beta", -1), ("beta", 0.5), ("beta", None),
        ("gradients", "half"),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ConfigError, match=rf"tuner\.reward\.{key}={value}: must be "):
        KernelSteinDiscrepancy(**{key: value})
