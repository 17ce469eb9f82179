"""The sliced KSD against its kernel by autodiff, pair by pair."""

from __future__ import annotations

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whitened_draws import gaussian_draws, narrow_posterior, scored

from mamba_cli.errors import ConfigError
from mamba_cli.rewards import SlicedKernelSteinDiscrepancy, sliced_ksd
from mamba_cli.rewards.sliced_ksd import SLICE_SEED


def by_autodiff(positions, scores, slices, length_scale: float) -> float:
    """Theorem's h, its derivatives of the one-dimensional kernel by autodiff, all pairs."""
    with jax.enable_x64(True):
        x, s = jnp.asarray(positions), jnp.asarray(scores)
        dim = x.shape[1]

        def kernel(u, v):
            return jnp.exp(-((u - v) ** 2) / (2 * length_scale**2))

        def mean_of(axis: int, g) -> float:
            def h(x_i, s_i, x_j, s_j):
                u, v, overlap = g @ x_i, g @ x_j, g[axis]
                along_u, along_v = jax.grad(kernel, (0, 1))(u, v)
                mixed = jax.grad(jax.grad(kernel), 1)(u, v)
                value = s_i[axis] * s_j[axis] * kernel(u, v)
                value += overlap * (s_j[axis] * along_u + s_i[axis] * along_v)
                return value + overlap**2 * mixed

            over_j = jax.vmap(h, (None, None, 0, 0))
            return float(jnp.mean(jax.vmap(over_j, (0, 0, None, None))(x, s, x, s)))

        total = 0.0
        for axis in range(dim):
            candidates = [jnp.eye(dim)[axis], *jnp.asarray(slices)]
            total += max(mean_of(axis, g) for g in candidates)
        return math.sqrt(total)


def random_slices(num_slices: int, dim: int):
    slices = np.random.default_rng(SLICE_SEED).standard_normal((num_slices, dim))
    return slices / np.linalg.norm(slices, axis=1, keepdims=True)


@pytest.mark.parametrize("num_slices", [0, 3])
@pytest.mark.parametrize(
    ("num_draws", "stretch"),
    # Axes by features; slices by pairs, by features, by pairs; the third axis by pairs at last.
    [(8, 1.0), (200, 1.0), (120, 20.0)],
)
def test_it_is_the_sum_over_axes_of_the_best_slice(num_slices, num_draws, stretch) -> None:
    rng = np.random.default_rng(10)
    # Correlated draws, scored as if they were not: a slice across the axes sees it best.
    mix = np.array([[1, 0.9, 0], [0, 0.5, 0], [0, 0, 2 * stretch]])
    positions = 7 + rng.standard_normal((num_draws, 3)) @ mix
    scores = 7 - positions
    value = sliced_ksd(positions, scores, num_slices=num_slices, length_scale=0.8)
    expected = by_autodiff(positions, scores, random_slices(num_slices, 3), 0.8)
    assert value == pytest.approx(expected, rel=1e-10)
    if num_slices and stretch == 1:
        alone = sliced_ksd(positions, scores, num_slices=0, length_scale=0.8)
        assert value > alone * (1 + 1e-6)


def test_one_draw() -> None:
    """h(x, x) = s_r^2 + (r.g)^2 / l^2, largest for g = r."""
    value = sliced_ksd([[3.0, 4.0]], [[1.0, -2.0]], length_scale=2.0)
    assert value == pytest.approx(math.sqrt(5 + 2 / 4), rel=1e-12)


@pytest.mark.parametrize("far", [20.0, 36.9, 37.1, 39.0, 60.0])
def test_two_clusters_far_apart(far: float) -> None:
    """k is 1 within a cluster and 0 between them, s = -x: S^2 = (far^2 + 1) / 2."""
    draws = np.repeat([[-far], [far]], 1000, axis=0)
    expected = math.sqrt((far**2 + 1) / 2)
    assert sliced_ksd(draws, -draws) == pytest.approx(expected, rel=1e-10)


def test_draws_too_far_out_are_not_a_number() -> None:
    assert math.isnan(sliced_ksd([[1e160], [0.0]], [[1.0], [2.0]]))


def test_coordinates_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, scores = gaussian_draws(12, 100, 7, width=1.5)
    whole = sliced_ksd(draws, scores)
    monkeypatch.setattr(sys.modules[sliced_ksd.__module__], "ELEMENTS_PER_PASS", 2 * 100)
    monkeypatch.setattr(sys.modules[sliced_ksd.__module__], "FEATURES_PER_PASS", 5)
    assert sliced_ksd(draws, scores) == pytest.approx(whole, rel=1e-12)


def test_wrong_widths_are_told_from_the_right_one() -> None:
    draws, scores = gaussian_draws(13, 200, 5)
    exact = sliced_ksd(draws, scores)
    assert all(sliced_ksd(w * draws, w * scores) > 1.5 * exact for w in (0.5, 1.6))
    assert sliced_ksd(np.zeros((9, 5)), np.zeros((9, 5))) == pytest.approx(math.sqrt(5), rel=1e-12)


def test_reward_is_that_of_whitened_draws() -> None:
    whitening, posterior = narrow_posterior()
    w, _ = gaussian_draws(14, 40, 3, width=0.6)
    value = SlicedKernelSteinDiscrepancy(num_slices=2)(scored(*posterior(w), whitening))
    assert value == pytest.approx(sliced_ksd(w, -w, num_slices=2), rel=2e-3)
    assert math.isnan(sliced_ksd(w, np.full_like(w, np.nan)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("whitening", "pca"), ("gradients", "half"), ("num_slices", -1), ("num_slices", 1.5),
        ("num_slices", True), ("length_scale", 0), ("length_scale", "median"),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(key, value) -> None:
    with pytest.raises(ConfigError, match=rf"tuner\.reward\.{key}={value}: must be "):
        SlicedKernelSteinDiscrepancy(**{key: value})
