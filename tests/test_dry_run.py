"""dry_run=true says what a run would do, and does nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from mamba_cli.config import settings_from
from mamba_cli.dry_run import plan
from mamba_cli.errors import ConfigError
from mamba_cli.run import run

Compose = Callable[..., DictConfig]


def lines_of(compose: Compose, *overrides: str, num_train: int = 1_000_000) -> dict[str, str]:
    return dict(plan(settings_from(compose(*overrides)), lambda: num_train))


def test_the_papers_schedule(compose: Compose) -> None:
    # 56 arms, eta = 3: sets of 56, 18, 6 and R = 1 s, so T = R K / sum_i(1 / |S_i|) with K = 3.
    total = 3 / (1 / 56 + 1 / 18 + 1 / 6)
    lines = lines_of(compose)
    assert lines["arms"] == "56"
    assert lines["step sizes h"] == "14, 3.16e-08 to 0.1"
    assert lines["batch sizes n"] == "1,000, 10,000, 100,000, 1,000,000 of 1,000,000 rows"
    for number, (arms, promoted) in enumerate([(56, 18), (18, 6), (6, 1)], start=1):
        expected = f"{arms} arms x {total / 3 / arms:.3g} s = {total / 3:.3g} s"
        assert lines[f"rung {number}/3"] == f"{expected}, the best {promoted} go on"
    assert f"T = {total:.3g} s of sampling, the longest arm R = 1 s" in lines["tuning"]
    assert lines["evaluation"] == "1 x 10 s"
    assert "check run" not in lines
    assert "20,000 draws in 4 chains" in lines["ground truth"]


def test_a_grid_that_is_still_open_says_so(compose: Compose) -> None:
    lines = lines_of(compose, "model=python", "sampler=sghmc", num_train=5_000)
    assert lines["step sizes h"] == "10, laid around the curvature at the MAP"
    assert lines["batch sizes n"] == "50, 500, 5,000 of 5,000 rows"
    assert lines["integration steps L"] == "5, 10"
    assert lines["arms"] == "60"
    assert lines["check run"] == "2 s more of the winner, on top of T"
    assert lines["ground truth"].endswith("if expected to take at most 300 s")


@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        (["tuner=heuristic"], "arm", "h=1e-06, n=100,000: nothing is searched"),
        (["tuner=grid"], "iterations", "5,000 draws for each arm"),
        (["budget.clock=calibrated"], "clock", "calibrated"),
    ],
)
def test_what_else_is_said(compose: Compose, overrides: list[str], name: str, value: str) -> None:
    assert lines_of(compose, *overrides)[name] == value


def test_stages_that_are_not_asked_for_are_not_there(compose: Compose) -> None:
    assert not {"evaluation", "ground truth"} & lines_of(compose, "stages=[tune]").keys()


def test_a_folder_that_holds_something_is_told(compose: Compose, tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text("{}")
    assert lines_of(compose, f"run_dir={tmp_path}")["folder"] == f"{tmp_path} (tuned before)"


def test_nothing_is_done_and_mistakes_are_found(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(compose("dry_run=true", f"results_dir={tmp_path}"))
    assert "dry run, nothing is done" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="batch_percent"):
        run(compose("dry_run=true", "tuner.grid.batch_percent=[1e-9]", "model.num_train=100"))
