"""Hyperparameters that need no search: the user's (``fixed``), or h = 1/N (``heuristic``)."""

from __future__ import annotations

import math

from mamba_cli.tuners.result import Tuning
from mamba_cli.tuners.scoring import Score, record_of
from mamba_cli.types import Hyperparameters


def tune(hyperparameters: Hyperparameters) -> Tuning:
    """The given hyperparameters as the only arm and the winner; nothing is run."""
    score = Score(math.nan, 0, 0.0, "ok", "not searched")
    record = record_of(0, hyperparameters, score, budget_s=0.0)._replace(promoted=True)
    return Tuning([record], record)
