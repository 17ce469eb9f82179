"""A small posterior with its arms, paced by steps, that the tests of the study share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.reward_study import targets
from experiments.reward_study.bandit import Costs, Stage


@pytest.fixture(scope="session")
def stage() -> Stage:
    """Two batch sizes, of which a step with 100 rows costs a unit and one with all rows three."""
    target = replace(targets.skewed(num_rows=1_000, dim=2), batch_percents=(100, 10))
    stage = Stage("skewed", target, "sgld")
    stage.pace(Costs({1_000: 3.0, 100: 1.0}), [1])
    return stage
