"""Guards against chains simulated in NumPy: broken ones are named, sound ones never."""

from __future__ import annotations

import numpy as np
import pytest

from mamba_cli.tuners.guards import (
    ENERGY_LIMIT,
    FLIGHT_STEPS,
    Guards,
    principal_axes,
)
from mamba_cli.whitening import Whitening

Array = np.ndarray


def gaussian_guards(precision: Array, start: Array | None = None) -> Guards:
    """Guards of N(start, precision^-1)."""
    start = np.zeros(len(precision)) if start is None else start

    def log_densities(positions: Array) -> Array:
        delta = positions - start
        return 1e5 - 0.5 * np.sum(delta @ precision * delta, axis=1)

    whitening = Whitening.of_precision(start, precision)
    return Guards(start, principal_axes(whitening), log_densities)


def ill_conditioned(dim: int = 6, condition: float = 1e4, seed: int = 0) -> tuple[Array, Array]:
    """A rotated precision with eigenvalues from 1 to ``condition``; and the eigenvectors."""
    vectors, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    return (vectors * np.geomspace(1, condition, dim)) @ vectors.T, vectors


def sgld(precision: Array, step_size: float, num_steps: int, rng: np.random.Generator) -> Array:
    """Draws of theta <- theta - h/2 P theta + sqrt(h) xi from 0, ``[num_steps, dim]``."""
    position, draws = np.zeros(len(precision)), []
    for noise in rng.standard_normal((num_steps, len(precision))):
        position = position - step_size / 2 * precision @ position + np.sqrt(step_size) * noise
        draws.append(position)
    return np.array(draws)


def test_axes_are_the_eigenvectors_scaled_by_the_curvature() -> None:
    precision, vectors = ill_conditioned()
    axes = principal_axes(Whitening.of_precision(np.zeros(6), precision))
    np.testing.assert_allclose(axes.factor @ axes.factor.T, precision, rtol=1e-9, atol=1e-9)
    stiffest = vectors[:, -1]
    np.testing.assert_allclose(np.abs(axes.deviations(stiffest)), [100, 0, 0, 0, 0, 0], atol=1e-8)
    diagonal = Whitening.of_precision(np.zeros(2), [4.0, 9.0])
    np.testing.assert_allclose(principal_axes(diagonal).deviations([1.0, 1.0]), [2.0, 3.0])


@pytest.mark.parametrize("seed", range(5))
def test_a_frozen_chain_is_named_and_one_that_moves_is_not(seed: int) -> None:
    # After t steps the stiffest direction has spread lambda h t / 2 on average over the draws:
    # 0.0005 for the frozen chain, 0.25 for the slow one, whose soft directions stand still too.
    precision, _ = ill_conditioned()
    guards, rng = gaussian_guards(precision), np.random.default_rng(seed)
    frozen = sgld(precision, 1e-10, 1000, rng)
    verdict = guards.verdict(frozen[9::10], num_steps=1000)
    assert verdict is not None
    assert verdict.status == "frozen"
    assert "effective sample size" in verdict.reason
    slow = sgld(precision, 5e-8, 1000, rng)
    assert guards.verdict(slow[9::10], num_steps=1000) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_sound_arm_is_not_frozen_for_being_short(seed: int) -> None:
    # h lambda_max = 0.02: a good step size. Two to ten draws of it reach nothing, and are let
    # pass because the arm has 300 times as long to go; at the end of its time it would be frozen.
    precision, _ = ill_conditioned()
    guards, rng = gaussian_guards(precision), np.random.default_rng(seed)
    for num_steps in (2, 5, 10):
        draws = sgld(precision, 2e-6 / 10, num_steps, rng)
        assert guards.verdict(draws, num_steps=num_steps, lifetimes=300.0) is None
        verdict = guards.verdict(draws[:2] * 0.1, num_steps=num_steps)
        assert verdict is not None
        assert verdict.status == "frozen"


def test_the_spread_grows_with_time_and_in_flight_with_its_square() -> None:
    guards = gaussian_guards(np.eye(2))
    draws = np.full((4, 2), np.sqrt(0.02 / 50))  # a spread of 0.0004: 50 times too small
    assert guards.verdict(draws, num_steps=FLIGHT_STEPS + 1, lifetimes=49.0) is not None
    assert guards.verdict(draws, num_steps=FLIGHT_STEPS + 1, lifetimes=51.0) is None
    assert guards.verdict(draws, num_steps=FLIGHT_STEPS, lifetimes=7.0) is not None
    assert guards.verdict(draws, num_steps=FLIGHT_STEPS, lifetimes=7.2) is None
    assert guards.verdict(draws, num_steps=FLIGHT_STEPS, lifetimes=0.0) is not None


@pytest.mark.parametrize("dim", [1, 2, 10, 500])
def test_exact_draws_pass(dim: int) -> None:
    rng = np.random.default_rng(dim)
    guards = gaussian_guards(np.eye(dim))
    for num_draws in (2, 3, 5, 16, 100):
        for _ in range(20 if dim > 100 else 50):
            draws = rng.standard_normal((num_draws, dim))
            assert guards.verdict(draws) is None
            assert guards.drift(draws) is None


def test_a_chain_far_out_is_diverged_by_its_energy_and_not_by_its_distance() -> None:
    rng = np.random.default_rng(0)
    draws = 20 * rng.standard_normal((40, 3))  # an energy of about 400 times dim / 2
    verdict = gaussian_guards(np.eye(3)).verdict(draws)
    assert verdict is not None
    assert verdict.status == "diverged"
    # A posterior that is flat there: the same draws have an energy of about 400 / 100.
    flat = gaussian_guards(np.eye(3))

    def log_densities(positions: Array) -> Array:
        return -0.5 * np.sum(positions**2, axis=1) / 100

    assert Guards(flat.start, flat.axes, log_densities).verdict(draws) is None
    # The density itself is nowhere defined there.
    nowhere = Guards(flat.start, flat.axes, lambda positions: np.full(len(positions), np.nan))
    assert nowhere.verdict(draws) is not None
    not_finite = flat.verdict(np.array([[0.0, 0.0, 0.0], [np.nan, 1.0, 1.0]]))
    assert not_finite is not None
    assert not_finite.status == "diverged"


def test_a_wide_chain_at_rest_is_left_to_the_reward() -> None:
    rng = np.random.default_rng(1)
    draws = 5 * rng.standard_normal((400, 10))  # energy 25: between suspicion and the limit
    guards = gaussian_guards(np.eye(10))
    assert 20 < np.median(guards.energies(draws)) < ENERGY_LIMIT
    assert guards.verdict(draws) is None


def test_a_growing_energy_is_a_divergence() -> None:
    rng = np.random.default_rng(2)
    scale = np.repeat([1.0, 1.2, 3.0, 5.5], 10)[:, None]
    verdict = gaussian_guards(np.eye(10)).verdict(scale * rng.standard_normal((40, 10)))
    assert verdict is not None
    assert verdict.status == "diverged"
    assert "grows" in verdict.reason


def test_an_unstable_step_size_is_found_before_it_overflows() -> None:
    # h lambda = 4.2 in the stiffest direction: it grows by a factor of 1.1 a step.
    precision, _ = ill_conditioned()
    draws = sgld(precision, 4.2e-4, 60, np.random.default_rng(3))
    assert np.isfinite(draws).all()
    verdict = gaussian_guards(precision).verdict(draws, num_steps=60)
    assert verdict is not None
    assert verdict.status == "diverged"


def test_a_check_run_that_drifts_is_named() -> None:
    rng = np.random.default_rng(4)
    guards = gaussian_guards(np.eye(10))
    drifting = np.linspace(0.9, 3.2, 100)[:, None] * rng.standard_normal((100, 10))
    verdict = guards.drift(drifting)
    assert verdict is not None
    assert (verdict.status, "drifts" in verdict.reason) == ("diverged", True)
    # Spreading up to the posterior is no drift, nor is a slow approach from below.
    warming = np.linspace(0.05, 1.0, 100)[:, None] * rng.standard_normal((100, 10))
    assert guards.drift(warming) is None
