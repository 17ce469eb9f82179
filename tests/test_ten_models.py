"""NumPyro models of ten kinds tune without an edit, and agree with NumPyro's own NUTS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.ten_models import check
from experiments.ten_models.models import MODELS

# A fifth of the table's steps to tune by and half of its arms; as many to evaluate. What is left
# is compilation for the most part.
SHORT = ("tuner.longest_arm_s=0.02", "tuner.grid.batch_percent=[10]")
EVALUATION_S = 1.0

# Twice the table's in the mean, about its own in the sd: a shorter tuning may prefer another step.
# A posterior half as wide would still fail.
MEAN_TOLERANCE, SD_TOLERANCE = 0.6, 0.45

# Counts, heavy tails, groups, labels that may switch, a sign that may: half of the ten, each of
# which takes half a minute. `make ten-models` runs all, at their own sizes.
KINDS = ("negative_binomial", "robust", "hierarchical", "mixture", "factorisation")

KNOWN = json.loads(check.REFERENCE.read_text())


def test_the_reference_converged() -> None:
    assert sorted(KNOWN) == sorted(MODELS)
    for name, reference in KNOWN.items():
        assert reference["num_rows"] == check.NUM_ROWS, name
        assert reference["r_hat"] < 1.02, name
        assert reference["ess"] > 400, name
        num_draws = reference["num_chains"] * reference["num_draws"]
        assert reference["num_divergent"] <= num_draws / 100, name


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_model_nobody_wrote_for_this_project_agrees_with_nuts(tmp_path: Path, name: str) -> None:
    folder = check.tune(name, tmp_path, SHORT, EVALUATION_S)
    worst = check.compare(folder, KNOWN[name])
    assert worst.agrees(MEAN_TOLERANCE, SD_TOLERANCE), worst
