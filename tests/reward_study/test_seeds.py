"""How many seeds agree."""

from __future__ import annotations

import numpy as np
import pandas as pd

from experiments.reward_study import seeds
from experiments.reward_study.bandit import Stage


def table(winners: list[int], errors: dict[int, float]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "target": "t",
            "sampler": "s",
            "longest_arm_s": 1.0,
            "seed": range(len(winners)),
            "winner": winners,
            "error": [errors[arm] for arm in winners],
        }
    )


def test_agreement_by_hand() -> None:
    errors = {4: 1.0, 5: 1.09, 6: 0.8, 7: 1.2, -1: np.inf}
    row = seeds.summary(table([4, 4, 4, 5, 6, 7, -1], errors)).iloc[0]
    assert (row.usual_winner, row.same, row.agree) == (4, 3, 4)
    assert row.error == 1.0
    assert row.error_ratio == np.inf
    # Of two that won as often, the better.
    row = seeds.summary(table([7, 7, 6, 6], errors)).iloc[0]
    assert (row.usual_winner, row.same, row.agree) == (6, 2, 2)
    # Tunings without a winner agree with nothing, not even with one another.
    row = seeds.summary(table([-1, -1], errors)).iloc[0]
    assert row.agree == 0


def test_runs_have_a_true_error_for_every_winner(stage: Stage) -> None:
    found = seeds.runs(stage, 300.0, 2, 4)
    arms = stage.problem.arms()
    for row in found.itertuples():
        assert arms[row.winner].step_size == row.step_size
    assert np.all(found.error > 0)
    assert np.all(found.error_std_error < found.error)
    assert found.groupby("winner").error.nunique().max() == 1
