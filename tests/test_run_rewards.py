"""A whole run by the recommended reward, on a small logistic regression."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from mamba_cli import artifacts
from mamba_cli.run import run

SMALL = (
    "tuner=mamba",
    "budget=quick",
    "model.num_train=400",
    "model.num_test=100",
    "model.dim=3",
    "tuner.grid.step_size=[10.0,1e-3,1e-9]",
    "tuner.grid.batch_percent=[25]",
    "tuner.longest_arm_s=0.1",
    "evaluation.budget_s=0.1",
    "ground_truth=none",
    "tuner.guards=false",  # what the reward alone says of a still chain
)


@pytest.mark.parametrize(
    ("reward", "scheme", "is_told"),
    [
        ("stein_moments", "reshuffle", True),
        ("stein_moments", "without_replacement", False),
        ("psd", "reshuffle", False),
    ],
)
def test_a_reward_blind_to_reshuffling_says_so(
    reward: str, scheme: str, is_told: bool, tmp_path: Path
) -> None:
    overrides = [f"results_dir={tmp_path}", *SMALL, "stages=[tune]", f"minibatch={scheme}"]
    with initialize_config_module("mamba_cli.conf", version_base="1.3"):
        run(compose("config", overrides=[*overrides, f"reward@tuner.reward={reward}"]))
    log = (tmp_path / "runs/logreg/sgld/mamba/seed-0/run.log").read_text()
    assert ("what reshuffling gains" in log) == is_told


def test_the_steps_of_the_check_run_are_kept(tmp_path: Path) -> None:
    overrides = [f"results_dir={tmp_path}", *SMALL[:-1], "tuner.guards=true", "stages=[tune]"]
    with initialize_config_module("mamba_cli.conf", version_base="1.3"):
        run(compose("config", overrides=overrides))
    folder = tmp_path / "runs" / "logreg" / "sgld" / "mamba" / "seed-0"
    best = json.loads((folder / "best.json").read_text())
    steps = json.loads((folder / "steps.json").read_text())
    assert sum(steps["dispatches"][f"check, arm {best['arm']}"]) > 0


@pytest.mark.parametrize("score_on", ["chain", "rung"])
def test_a_run_by_stein_moments(score_on: str, tmp_path: Path) -> None:
    overrides = [f"results_dir={tmp_path}", *SMALL, f"tuner.score_on={score_on}"]
    with initialize_config_module("mamba_cli.conf", version_base="1.3"):
        run(compose("config", overrides=overrides))
    folder = tmp_path / "runs" / "logreg" / "sgld" / "mamba" / "seed-0"
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["reward"] == {"name": "stein_moments", "higher_is_better": False}
    assert provenance["seconds"]["whitening"] > 0
    records = artifacts.read_tuning(folder / "tuning.csv")
    assert [record.status for record in records] == ["ok"] * len(records)
    # Every draw counts, and an arm that hardly moves is sqrt(dim) away.
    assert all(record.num_scored == record.num_draws for record in records)
    still = next(record for record in records if record.step_size == 1e-9)
    assert still.reward == pytest.approx(math.sqrt(3), rel=0.2)
    assert json.loads((folder / "best.json").read_text())["step_size"] == 1e-3
    assert artifacts.read_metrics(folder / "metrics.csv")[0]["status"] == "ok"
