"""The study's tunings by steps, and what is counted of their sets."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from experiments.reward_study import coverage
from experiments.reward_study.bandit import REDUCTION_FACTOR, Estimate, Stage
from mamba_cli.tuners.halving import schedule


def test_counts_by_hand() -> None:
    errors = [Estimate(v, 0.1) for v in (math.inf, 2.0, 1.0, 1.05)]
    sets = pd.DataFrame({"winner": [2, 3, 1, -1], "members": ["2 3", "3 1", "1", ""]})
    found = coverage.summary(sets, errors)
    assert found["best_arm"] == 2
    assert (found["best_error"], found["next_error"]) == (1.0, 1.05)
    assert found["covered"] == 0.25
    assert found["covered_std_error"] == pytest.approx(math.sqrt(0.25 * 0.75 / 4))
    assert found["within_10_percent"] == 0.5
    assert (found["mean_size"], found["median_size"]) == (1.25, 1.5)
    assert found["won"] == 0.25
    assert found["regret_median"] == pytest.approx((1.05 + 2.0) / 2)
    assert found["regret_max"] == math.inf


def test_a_tuning_takes_the_steps_that_its_units_buy(stage: Stage) -> None:
    arms = stage.problem.arms()
    first, again = (stage.tune(arms, 300.0, seed=1) for _ in range(2))
    assert [r.reward for r in first.records if r.status == "ok"] == [
        r.reward for r in again.records if r.status == "ok"
    ]
    rungs = schedule(len(arms), REDUCTION_FACTOR, 300.0)
    for record in first.records:
        units = sum(rung.seconds for rung in rungs[: record.rung + 1])
        cost = stage.costs.seconds[record.batch_size]
        if record.status == "ok":  # each rung is rounded to whole steps
            assert record.num_steps == pytest.approx(units / cost, abs=0.5 * (record.rung + 1))
    assert first.winner is not None


def test_the_set_has_the_winner_and_the_best_is_sound(stage: Stage) -> None:
    arms = stage.problem.arms()
    sets = coverage.repeat(stage, arms, 300.0, 2)
    for row in sets.itertuples():
        assert str(row.winner) in str(row.members).split()
    # Ten times the largest stable step and a step that hardly moves are worse than one between.
    few = [arms[0], arms[3], arms[13]]
    errors = [e.value for e in coverage.true_errors(stage, few, 300.0, 4)]
    assert int(np.argmin(errors)) == 1
