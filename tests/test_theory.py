"""Theorem 1: the bounds in closed form, and against halving of simulated Gaussian arms."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from mamba_cli import theory
from mamba_cli.tuners.halving import Rung, schedule, total_s
from mamba_cli.tuners.scoring import Score, record_of
from mamba_cli.types import ArmRecord, Hyperparameters


def lost_share(
    gaps: np.ndarray,
    sigma: float,
    reduction_factor: int,
    budget_s: float,
    *,
    num_repetitions: int,
    continued: bool,
    seed: int,
) -> float:
    """The share of halvings that end without arm 0, which is the best by ``gaps``.

    Independent of the package: sets by division, means of Gaussian increments, losses sorted.
    """
    num_arms = len(gaps) + 1
    num_rungs = round(math.log(num_arms, reduction_factor))
    losses = np.concatenate([[0.0], gaps])
    rng = np.random.default_rng(seed)
    alive = np.tile(np.arange(num_arms), (num_repetitions, 1))
    walks = np.zeros((num_repetitions, num_arms))
    elapsed_s = 0.0
    for rung in range(num_rungs):
        size = num_arms // reduction_factor**rung
        seconds = budget_s / (size * num_rungs)
        if not continued:
            walks[:], elapsed_s = 0.0, 0.0
        elapsed_s += seconds
        walks += rng.normal(0, sigma * math.sqrt(seconds), walks.shape)
        estimates = losses + walks / elapsed_s
        own = np.take_along_axis(estimates, alive, 1)
        kept = np.argsort(own, axis=1)[:, : size // reduction_factor]
        alive = np.take_along_axis(alive, kept, 1)
    return float(np.mean(alive[:, 0] != 0))


def tight_gaps(num_arms: int, h2: float) -> np.ndarray:
    """The smallest gaps that H_2 allows: s / alpha_s^2 = H_2 for every s."""
    return np.sqrt(np.arange(2, num_arms + 1) / h2)


def test_complexity_is_the_largest_rank_over_squared_gap() -> None:
    # 2/1, 3/4 and 4/0.25 at the ranks of the sorted gaps 0.5, 1, 2: 8, 3 and 1.
    assert theory.complexity([2.0, 0.5, 1.0]) == pytest.approx(8.0)
    assert theory.complexity([math.inf, 1.0]) == 2.0
    assert theory.complexity([0.0, 1.0]) == math.inf
    assert theory.complexity([]) == 0.0
    assert theory.complexity(tight_gaps(27, 7.0)) == pytest.approx(7.0)


def test_the_printed_bound_is_the_papers() -> None:
    # M = 9, eta = 3: 5 * 2 * exp(-3 * 40 / (4 * 0.25 * 20 * 3)) = 10 exp(-2).
    printed = theory.printed_bound(9, 3, 40.0, sigma=0.5, h2=20.0)
    assert printed == 1.0
    printed = theory.printed_bound(9, 3, 100.0, sigma=0.5, h2=20.0)
    assert printed == pytest.approx(10 * math.exp(-5))


def test_the_corrected_exponent_is_smaller_by_eta_squared_and_a_factor_of_two() -> None:
    # -log(bound / prefactor): T eta / (4 s^2 H (K + 1)) and T / (8 eta s^2 H K).
    for reduction_factor, num_rungs in ((2, 3), (3, 2), (4, 2)):
        num_arms = reduction_factor**num_rungs
        common = {"sigma": 0.7, "h2": 3.0}
        prefactor = (2 * reduction_factor - 1) * num_rungs
        printed, corrected = (
            -math.log(bound(num_arms, reduction_factor, 900.0, **common) / prefactor)
            for bound in (theory.printed_bound, theory.corrected_bound)
        )
        expected = 2 * reduction_factor**2 * num_rungs / (num_rungs + 1)
        assert printed / corrected == pytest.approx(expected)


def test_the_bound_of_the_gaps_by_hand() -> None:
    # Two rungs of 4 -> 2 -> 1 arms, one second each, sigma = 1/2: a gap g after t seconds counts
    # exp(-g^2 t). Rung 0: q = 0: (a + b + c) / 2 or q = 1: b + c; rung 1, t = 2: a^2.
    rungs = (Rung(4, 1.0, 2), Rung(2, 1.0, 1))
    a, b, c = (math.exp(-(gap**2)) for gap in (1.0, 1.5, 3.0))
    expected = min((a + b + c) / 2, b + c) + a**2
    bound = theory.error_bound(rungs, sigma=0.5, gaps=[3.0, 1.0, 1.5])
    assert bound == pytest.approx(expected, rel=1e-12)
    apart = theory.error_bound(rungs, sigma=0.5, gaps=[3.0, 1.0, 1.5], continued=False)
    assert apart == pytest.approx(expected - a**2 + a, rel=1e-12)
    assert theory.error_bound(rungs, sigma=0.5, gaps=[0.0, 1.0, 1.0]) == 1.0
    assert theory.error_bound((Rung(1, 1.0, 1),), sigma=0.5, gaps=[]) == 0.0
    with pytest.raises(ValueError, match="3 gaps"):
        theory.error_bound(rungs, sigma=0.5, gaps=[1.0])


def test_the_corrected_bound_is_never_below_the_one_of_the_gaps() -> None:
    for reduction_factor, num_rungs in ((2, 2), (2, 5), (3, 3), (4, 2), (5, 2)):
        num_arms, h2 = reduction_factor**num_rungs, 4.0
        rungs = schedule(num_arms, reduction_factor, 1.0)
        for budget_s in (1.0, 30.0, 300.0, 3000.0):
            scaled = [r._replace(seconds=r.seconds * budget_s / total_s(rungs)) for r in rungs]
            corrected = theory.corrected_bound(
                num_arms, reduction_factor, budget_s, sigma=1.0, h2=h2
            )
            sharp = theory.error_bound(
                scaled, sigma=1.0, gaps=tight_gaps(num_arms, h2), continued=False
            )
            assert sharp <= corrected * (1 + 1e-12)
    with pytest.raises(ValueError, match="power of 3"):
        theory.corrected_bound(56, 3, 1.0, sigma=1.0, h2=1.0)


@pytest.mark.parametrize("continued", [True, False])
@pytest.mark.parametrize(("reduction_factor", "num_rungs"), [(3, 2), (4, 2), (2, 4)])
def test_gaussian_arms_respect_the_corrected_bounds(
    reduction_factor: int, num_rungs: int, continued: bool
) -> None:
    num_arms, h2, sigma = reduction_factor**num_rungs, 5.0, 0.8
    gaps = tight_gaps(num_arms, h2)
    num_repetitions = 20_000
    unit_s = 8 * reduction_factor * sigma**2 * h2 * num_rungs
    for budget_s in (0.3 * unit_s, unit_s, 2 * unit_s, 4 * unit_s):
        share = lost_share(
            gaps,
            sigma,
            reduction_factor,
            budget_s,
            num_repetitions=num_repetitions,
            continued=continued,
            seed=1,
        )
        rungs = schedule(num_arms, reduction_factor, 1.0)
        scaled = [r._replace(seconds=r.seconds * budget_s / total_s(rungs)) for r in rungs]
        bound = theory.error_bound(scaled, sigma=sigma, gaps=gaps, continued=continued)
        noise = math.sqrt(share * (1 - share) / num_repetitions)
        assert share - 4 * noise <= bound
        assert bound <= 1.0
        assert share - 4 * noise <= theory.corrected_bound(
            num_arms, reduction_factor, budget_s, sigma=sigma, h2=h2
        )


@pytest.mark.parametrize("continued", [True, False])
def test_gaussian_arms_break_the_printed_bound(continued: bool) -> None:
    # 16 arms, eta = 4, H_2 = 5: the printed bound promises to lose the best arm at most once in
    # 5,000 halvings; it is lost about 200 times as often.
    num_arms, eta, h2, sigma = 16, 4, 5.0, 0.8
    budget_s = math.log(7 * 2 / 2e-4) * 4 * sigma**2 * h2 * 3 / eta
    printed = theory.printed_bound(num_arms, eta, budget_s, sigma=sigma, h2=h2)
    assert printed == pytest.approx(2e-4)
    num_repetitions = 40_000
    share = lost_share(
        tight_gaps(num_arms, h2),
        sigma,
        eta,
        budget_s,
        num_repetitions=num_repetitions,
        continued=continued,
        seed=2,
    )
    noise = math.sqrt(share * (1 - share) / num_repetitions)
    assert share - 6 * noise > 100 * printed
    assert share < theory.corrected_bound(num_arms, eta, budget_s, sigma=sigma, h2=h2)


def test_a_budget_gives_the_error_that_was_asked_for() -> None:
    gaps = [0.3, 0.5, 0.4, 1.0, 2.0, math.inf, 0.9]
    needed = [theory.budget_for(error, 8, 2, sigma=0.2, gaps=gaps) for error in (0.2, 0.05, 0.01)]
    for error, budget_s in zip((0.2, 0.05, 0.01), needed, strict=True):
        rungs = schedule(8, 2, 1.0)
        scaled = [r._replace(seconds=r.seconds * budget_s / total_s(rungs)) for r in rungs]
        assert theory.error_bound(scaled, sigma=0.2, gaps=gaps) == pytest.approx(error, rel=1e-6)
    assert all(less < more for less, more in pairwise(needed))
    assert theory.budget_for(0.05, 8, 2, sigma=0.2, gaps=[0.0, *gaps[1:]]) == math.inf


def test_a_runs_own_estimates_of_sigma_and_the_gaps() -> None:
    def row(rung: int, arm: int, reward: float, std_error: float, elapsed_s: float) -> ArmRecord:
        status = "ok" if math.isfinite(reward) else "diverged"
        score = Score(reward, 10, 0.0, status, "", std_error)
        return record_of(arm, Hyperparameters(0.1, 5), score, rung=rung, elapsed_s=elapsed_s)

    nan = math.nan
    records = [
        row(0, 0, 9.0, 8.0, 1.0),
        row(0, 1, 4.0, 0.5, 1.0),
        row(0, 2, 7.0, 0.3, 1.0),
        row(0, 3, nan, nan, 0.1),
        row(1, 0, 2.0, 0.2, 16.0),
        row(1, 1, 3.0, 0.1, 16.0),
    ]
    problem = theory.problem_of(records, records[4], 1.0)
    # 0.2 sqrt(16), 0.1 sqrt(16), 0.3 sqrt(1); gaps 3 - 2, 7 - 2 and a failed arm.
    assert problem.sigma == pytest.approx(0.8)
    assert problem.gaps == (1.0, 5.0, math.inf)
    assert problem.h2 == pytest.approx(max(2 / 1, 3 / 25))
    flipped = [r._replace(reward=-r.reward) for r in records]
    assert theory.problem_of(flipped, flipped[4], -1.0) == problem


def test_without_noise_any_budget_is_enough() -> None:
    assert theory.budget_for(0.05, 3, 3, sigma=0.0, gaps=[1.0, 2.0]) == 0.0
    assert theory.budget_for(0.05, 3, 3, sigma=1.0, gaps=[math.inf, math.inf]) == 0.0
