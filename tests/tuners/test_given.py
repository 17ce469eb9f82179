"""Hyperparameters that need no search."""

from __future__ import annotations

import math

from mamba_cli.tuners import given
from mamba_cli.types import Hyperparameters


def test_the_given_hyperparameters_are_the_winner() -> None:
    tuning = given.tune(Hyperparameters(1e-5, 1000, 10))
    assert tuning.hyperparameters == Hyperparameters(1e-5, 1000, 10)
    assert tuning.records == [tuning.winner]
    assert tuning.winner is not None
    assert (tuning.winner.status, tuning.winner.promoted) == ("ok", True)
    assert math.isnan(tuning.winner.reward)
    assert tuning.winner.num_steps == tuning.winner.num_draws == 0
