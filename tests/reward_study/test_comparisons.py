"""Halving's rivals: the formula in closed form, equal budgets, and the ratios."""

from __future__ import annotations

from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments.reward_study import comparisons, formula, targets
from experiments.reward_study.bandit import REDUCTION_FACTOR, Stage
from mamba_cli.tuners.halving import schedule, total_s
from mamba_cli.types import Hyperparameters


def test_the_stationary_covariance_is_a_fixed_point_of_the_chain() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 3)) @ rng.standard_normal((3, 3))
    at = formula.Local(np.array([20.0, 60.0, 200.0]), np.cov(rows.T), 50)
    step, noise = 0.01, at.noise(5)
    kept = np.eye(3) - step / 2 * np.diag(at.values)
    covariance = np.zeros((3, 3))
    for _ in range(2_000):
        covariance = kept @ covariance @ kept + step * np.eye(3) + step**2 / 4 * noise
    np.testing.assert_allclose(at.covariance(step, 5), covariance, rtol=1e-9)
    # Its limit solves (H C + C H) / 2 = I + h S / 4, and is that of small steps.
    limit, curvature = at.covariance(step, 5, limit=True), np.diag(at.values)
    np.testing.assert_allclose(
        (curvature @ limit + limit @ curvature) / 2, np.eye(3) + step / 4 * noise, atol=1e-12
    )
    small = [at.covariance(1e-7, 5, limit=limit) for limit in (True, False)]
    np.testing.assert_allclose(*small, rtol=1e-5, atol=1e-12)
    # With all rows there is no noise, and a variance is 1 / (lambda (1 - h lambda / 4)).
    exact = 1 / (at.values * (1 - step * at.values / 4))
    np.testing.assert_allclose(at.covariance(step, 50), np.diag(exact), atol=1e-15)


def test_the_noise_is_that_of_all_minibatches() -> None:
    target = targets.gaussian(num_rows=7, dim=2, condition=4.0)
    assert target.mean is not None
    assert target.covariance is not None
    at = formula.local(target.model, target.mean, np.linalg.inv(target.covariance))
    _, vectors = np.linalg.eigh(np.linalg.inv(target.covariance))
    precision = np.linalg.inv(target.covariance) / 7
    rows = np.asarray(target.model.data, np.float64)
    estimates = [
        7 / 3 * precision @ np.sum(rows[list(chosen)] - target.mean, axis=0)
        for chosen in combinations(range(7), 3)
    ]
    expected = vectors.T @ np.cov(np.transpose(estimates), bias=True) @ vectors
    np.testing.assert_allclose(at.noise(3), expected, rtol=1e-4, atol=1e-3)


def test_the_formula_takes_the_largest_step_within_the_tolerance() -> None:
    at = formula.Local(np.array([1.0, 100.0]), np.diag([0.01, 1.0]), 100)
    step = formula.largest_step(at, 100, limit=False, tolerance=0.1)
    # sd 1 / sqrt(1 - h lambda / 4) = 1.1 in the stiff direction.
    assert step == pytest.approx(4 / 100 * (1 - 1 / 1.1**2))
    assert formula.largest_step(at, 100, limit=True, tolerance=0.1) == pytest.approx(0.02)
    # In the limit 1 + h S / 4 is the squared ratio, here S = 100^2 (1/10 - 1/100) row variances.
    limit = formula.largest_step(at, 10, limit=True, tolerance=0.1)
    assert limit == pytest.approx(min(0.02, 4 * 0.21 / 900 / 1.0))
    # Batches of 10 allow a step smaller by 8.4 times: a fifth of the cost does not make up for it.
    assert formula.choose(at, {100: 1.0, 10: 0.2}, limit=False).batch_size == 100
    assert formula.choose(at, {100: 1.0, 10: 0.1}, limit=False).batch_size == 10


def test_all_methods_have_the_same_seconds(stage: Stage) -> None:
    longest = 60.0
    table = comparisons.compare(stage, longest, [0], 2)
    assert list(table.method) == list(comparisons.METHODS)
    arms = stage.problem.arms()
    seconds = total_s(schedule(len(arms), REDUCTION_FACTOR, longest)) + longest
    spent = dict(zip(table.method, table.spent_s, strict=True))
    # A step is up to 3 of the units: rounding adds one and a half for every piece of an arm.
    assert all(spent[name] <= seconds + 1.5 * 2 * len(arms) for name in spent)
    assert spent["grid"] > 0.6 * seconds  # arms that diverge stop
    assert spent["formula"] == spent["formula_limit"] == 0
    largest = max(arm.step_size for arm in arms)
    assert np.all(table.step_size <= largest)
    assert set(table.batch_size) <= {1_000, 100}


def test_asha_stops_arms_and_takes_the_best_of_those_that_ran_longest() -> None:
    class Purse:
        """An arm's loss is its step size, however long it runs; every one has all it asks for."""

        def __init__(self) -> None:
            self.spent_s, self.runs = 0.0, list[tuple[int, float]]()
            self.arms: dict[int, Hyperparameters] = {}

        def affords(self, seconds: float) -> bool:
            return self.spent_s + seconds <= 40.0

        def run(self, number: int, arm: Hyperparameters, seconds: float, chain: None = None) -> int:
            self.spent_s += seconds
            self.arms[number] = arm
            self.runs.append((number, seconds))
            return number

        def loss(self, number: int, chain: int, lifetimes: float = 1.0) -> float:
            return self.arms[number].step_size

    arms = [Hyperparameters(step, 10, 1) for step in (0.01, 1.0)]
    purse = Purse()
    chosen = comparisons.by_optuna(purse, arms, 9.0, 0, prune=True)  # type: ignore[arg-type]
    total = pd.DataFrame(purse.runs, columns=["arm", "s"]).groupby("arm").s.sum()
    assert set(total.round(6)) == {1.0, 3.0, 9.0}
    finished = [number for number, seconds in total.items() if seconds == pytest.approx(9.0)]
    assert chosen.arm is not None
    assert chosen.arm.step_size == min(purse.arms[number].step_size for number in finished)
    assert len(purse.arms) > 40 / 9  # more than random search could try
    assert chosen.spent_s == pytest.approx(sum(total))
    purse = Purse()
    comparisons.by_optuna(purse, arms, 9.0, 0, prune=False)  # type: ignore[arg-type]
    assert [seconds for _, seconds in purse.runs] == [9.0] * 4


def test_ratios_by_hand() -> None:
    table = pd.DataFrame(
        {
            "target": ["a", "a", "b", "b"],
            "method": ["halving", "grid"] * 2,
            "seed": 0,
            "spent_s": 1.0,
            "error": [1.0, 2.0, 4.0, 3.0],
        }
    )
    found = comparisons.summary(table).set_index("method")
    assert found.ratio_max["halving"] == pytest.approx(4 / 3)
    assert found.against_halving_median["grid"] == pytest.approx((2.0 + 0.75) / 2)
    assert list(found.loc["grid", ["better_by_10_percent", "worse_by_10_percent"]]) == [1, 1]
    assert jnp.isfinite(found.ratio_median["grid"])
