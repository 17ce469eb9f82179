"""Hyperparameters that need no search: the user's (``fixed``), or h = 1/N (``heuristic``)."""

from __future__ import annotations

import math

from mamba_cli.tuners.result import Tuning
from mamba_cli.types import ArmRecord, Hyperparameters


def tune(hyperparameters: Hyperparameters) -> Tuning:
    """The given hyperparameters as the only arm and the winner; nothing is run."""
    record = ArmRecord(
        rung=0,
        arm=0,
        step_size=hyperparameters.step_size,
        batch_size=hyperparameters.batch_size,
        num_integration_steps=hyperparameters.num_integration_steps,
        budget_s=0.0,
        elapsed_s=0.0,
        compile_s=0.0,
        reward_s=0.0,
        num_steps=0,
        num_draws=0,
        num_scored=0,
        reward=math.nan,
        status="ok",
        reason="not searched",
        promoted=True,
    )
    return Tuning([record], record)
