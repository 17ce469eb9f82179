"""The whole pipeline on a small logistic regression: files, resume after a kill, faults."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from mamba_cli import artifacts
from mamba_cli.errors import ConfigError, NothingUsableError
from mamba_cli.run import run
from mamba_cli.tuners.halving import schedule

SMALL = [
    "budget=quick",
    "model.num_train=400",
    "model.num_test=100",
    "model.dim=3",
    "tuner.grid.step_size=[1e-2,3e-3,1e-3,3e-4,1e-4,3e-5,1e-5,3e-6,1e-6]",
    "tuner.grid.batch_percent=[10]",
    "tuner.longest_arm_s=0.1",
    "tuner.max_draws=20",
    "evaluation.budget_s=0.1",
    "evaluation.max_draws=50",
]
NO_TRUTH = [*SMALL, "ground_truth=none"]


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Callable[..., DictConfig]]:
    with initialize_config_module("mamba_cli.conf", version_base="1.3"):
        yield lambda *overrides: compose(
            "config", overrides=[f"results_dir={tmp_path}", *overrides]
        )


def folder_of(results: Path, tuner: str = "mamba_ksd") -> Path:
    return results / "runs" / "logreg" / "sgld" / tuner / "seed-0"


def command(results: Path, overrides: list[str]) -> list[str]:
    code = "from mamba_cli.cli import main; main()"
    return [sys.executable, "-c", code, f"results_dir={results}", *overrides]


def kill_when(results: Path, overrides: list[str], ready: Callable[[], bool]) -> None:
    """Start the command and SIGKILL it as soon as ``ready()``."""
    process = subprocess.Popen(
        command(results, overrides), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not ready():
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_a_run_writes_every_file_and_a_second_one_changes_none(
    composed: Callable[..., DictConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*SMALL, "ground_truth.num_draws=400", "ground_truth.min_ess=50"]
    overrides += ["ground_truth.num_warmup=100", "ground_truth.max_r_hat=1.1"]
    overrides += ["evaluation.num_repeats=2"]
    run(composed(*overrides))
    folder = folder_of(tmp_path)
    assert {path.name for path in folder.iterdir()} >= {
        ".hydra",
        "tuning.csv",
        "tuning.png",
        "best.json",
        "metrics.csv",
        "evaluation.png",
        "provenance.json",
        "run.log",
    }
    assert not (folder / "checkpoint").exists()
    records = artifacts.read_tuning(folder / "tuning.csv")
    rungs = schedule(9, 3, 0.1)
    assert [sum(r.rung == i for r in records) for i in range(len(rungs))] == [9, 3]
    assert [sum(r.promoted for r in records if r.rung == i) for i in range(2)] == [3, 1]
    best = json.loads((folder / "best.json").read_text())
    winner = next(r for r in records if r.rung == 1 and r.promoted)
    assert (best["arm"], best["step_size"], best["batch_size"]) == (
        winner.arm,
        winner.step_size,
        40,
    )
    assert best["reward"] == min(r.reward for r in records if r.rung == 1 and r.status == "ok")
    rows = artifacts.read_metrics(folder / "metrics.csv")
    assert [row["repeat"] for row in rows] == [0, 1]
    for row in rows:
        assert row["status"] == "ok"
        assert row["num_samples"] > 10
        assert math.isfinite(row["ksd"])
        assert row["relative_std_error"] > 0
        assert 0.5 < row["accuracy"] <= 1
        assert row["log10_step_size"] == pytest.approx(math.log10(best["step_size"]))
    assert rows[0]["ksd"] != rows[1]["ksd"]  # each repeat has its own key
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["paper_size"] is False
    assert provenance["end"] is not None
    assert provenance["config"]["tuner"]["longest_arm_s"] == 0.1
    seconds = provenance["seconds"]
    assert seconds["total"] >= seconds["compile"] + seconds["sampling"] + seconds["reward"]
    assert sum(rung.num_arms * rung.seconds for rung in rungs) < seconds["sampling"]
    assert "NOT the paper's size" in capsys.readouterr().out

    def contents() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".csv", ".json")}

    before = contents()
    run(composed(*overrides))
    assert contents() == before

    with pytest.raises(ConfigError, match=r"tuner\.longest_arm_s"):
        run(composed(*overrides, "tuner.longest_arm_s=0.2"))
    assert contents() == before


@pytest.mark.parametrize(
    ("overrides", "status", "reason"),
    [
        (["tuner.grid.step_size=[1e6,1e7]"], "diverged", "not finite at step"),
        (["tuner.longest_arm_s=1e-7"], "no_draws", "2 are needed"),
        (["tuner.grid.step_size=[1e-30,1e-29]"], "frozen", "too small to move"),
    ],
)
def test_without_a_usable_arm_there_is_a_table_of_reasons_and_no_winner(
    composed: Callable[..., DictConfig],
    tmp_path: Path,
    overrides: list[str],
    status: str,
    reason: str,
) -> None:
    with pytest.raises(NothingUsableError, match=f"{status}.*tuning.csv"):
        run(composed(*NO_TRUTH, *overrides))
    folder = folder_of(tmp_path)
    records = artifacts.read_tuning(folder / "tuning.csv")
    assert {record.status for record in records} == {status}
    assert all(reason in record.reason for record in records)
    assert not any(record.promoted for record in records)
    assert not (folder / "best.json").exists()
    assert (folder / "tuning.png").exists()


def test_a_diverging_and_a_frozen_arm_never_win(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    run(composed(*NO_TRUTH, "tuner.grid.step_size=[1e6,1e-30,1e-4]"))
    best = json.loads((folder_of(tmp_path) / "best.json").read_text())
    assert best["step_size"] == 1e-4
    records = artifacts.read_tuning(folder_of(tmp_path) / "tuning.csv")
    assert [record.status for record in records] == ["diverged", "frozen", "ok"]


def test_killed_while_tuning_the_finished_rungs_are_kept(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*NO_TRUTH, "tuner.longest_arm_s=1.5"]
    folder = folder_of(tmp_path)
    kill_when(tmp_path, overrides, (folder / "checkpoint" / "tuning.npz").exists)
    killed = artifacts.read_tuning(folder / "tuning.csv")
    assert {record.rung for record in killed} == {0}
    assert not (folder / "best.json").exists()
    run(composed(*overrides))
    records = artifacts.read_tuning(folder / "tuning.csv")
    assert records[:9] == killed  # timings and all: rung 0 was not done again
    assert [record.rung for record in records[9:]] == [1, 1, 1]
    steps = {record.arm: record.num_steps for record in killed}
    # A chain goes on from where it was, so its steps and seconds are those of both rungs.
    assert all(record.num_steps > steps[record.arm] for record in records[9:])
    assert all(record.elapsed_s > 1.4 for record in records[9:])


def test_killed_while_evaluating_the_finished_repeats_are_kept(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = ["tuner=fixed", "tuner.step_size=1e-4", "tuner.batch_percent=10"]
    overrides += [o for o in NO_TRUTH if not o.startswith("tuner.")]
    overrides += ["evaluation.num_repeats=3", "evaluation.budget_s=0.7"]
    folder = folder_of(tmp_path, "fixed")
    kill_when(tmp_path, overrides, (folder / "metrics.csv").exists)
    killed = artifacts.read_metrics(folder / "metrics.csv")
    assert 1 <= len(killed) < 3
    run(composed(*overrides))
    rows = artifacts.read_metrics(folder / "metrics.csv")
    assert rows[: len(killed)] == killed
    assert [row["repeat"] for row in rows] == [0, 1, 2]


def test_killed_while_sampling_the_ground_truth_the_finished_blocks_are_kept(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = ["tuner=fixed", "tuner.step_size=1e-4", "tuner.batch_percent=10"]
    overrides += [o for o in SMALL if not o.startswith("tuner.")]
    overrides += ["model.num_train=20000", "ground_truth.num_draws=4000", "ground_truth.min_ess=50"]
    truth = tmp_path / "ground_truth"

    def blocks() -> set[str]:
        return {str(p.relative_to(truth)) for p in truth.rglob("*") if p.is_file()}

    kill_when(tmp_path, overrides, lambda: len(blocks()) >= 3)
    saved = {name: (truth / name).stat().st_mtime_ns for name in blocks()}
    assert not list(truth.glob("*.npz"))
    run(composed(*overrides))
    assert len(list(truth.glob("*.npz"))) == 1
    log = (folder_of(tmp_path, "fixed") / "run.log").read_text()
    assert "resum" in log
    assert saved
    rows = artifacts.read_metrics(folder_of(tmp_path, "fixed") / "metrics.csv")
    assert rows[0]["relative_std_error"] > 0


def test_evaluating_without_a_winner_says_what_to_do(
    composed: Callable[..., DictConfig],
) -> None:
    with pytest.raises(ConfigError, match="add tune to stages"):
        run(composed(*NO_TRUTH, "stages=[evaluate]"))


def test_a_batch_above_the_rows_is_refused(composed: Callable[..., DictConfig]) -> None:
    overrides = [o for o in NO_TRUTH if not o.startswith("tuner.")]
    with pytest.raises(ConfigError, match=r"tuner\.batch_size=401"):
        run(composed("tuner=fixed", "tuner.step_size=1e-4", "tuner.batch_size=401", *overrides))


@pytest.mark.parametrize("tuner", ["grid", "heuristic"])
def test_the_other_tuners_run_to_the_end(
    composed: Callable[..., DictConfig], tmp_path: Path, tuner: str
) -> None:
    overrides = [o for o in NO_TRUTH if not o.startswith("tuner.")]
    if tuner == "grid":
        overrides += ["tuner.num_iterations=30", "tuner.grid.step_size=[1e-3,1e-4]"]
    run(composed(f"tuner={tuner}", *overrides))
    folder = folder_of(tmp_path, tuner)
    best = json.loads((folder / "best.json").read_text())
    assert best["batch_size"] == 40
    if tuner == "heuristic":
        assert best["step_size"] == pytest.approx(1 / 400)
    assert artifacts.read_metrics(folder / "metrics.csv")[0]["status"] == "ok"


def test_a_predictive_reward_sees_training_rows_held_out(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    run(composed(*NO_TRUTH, "reward@tuner.reward=log_loss", "tuner.reward.hold_out_fraction=0.25"))
    folder = folder_of(tmp_path, "mamba_log_loss")
    records = artifacts.read_tuning(folder / "tuning.csv")
    assert {record.batch_size for record in records} == {30}  # 10 % of 300 rows
    best = json.loads((folder / "best.json").read_text())
    assert (best["batch_size"], best["batch_percent"]) == (40, 10.0)  # of all 400
    assert best["reward"] == min(r.reward for r in records if r.rung == 1 and r.status == "ok")
    assert artifacts.read_metrics(folder / "metrics.csv")[0]["batch_size"] == 40
    assert len(list((tmp_path / "map").glob("*.npz"))) == 2  # with and without the rows


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward@tuner.reward=rmse"], r"tuner\.reward\.name=rmse: model logreg .* accuracy"),
        (["reward@tuner.reward=ood"], "does not read images"),
        (["tuner=grid", "tuner.metric=rmse"], r"tuner\.metric=rmse: model logreg"),
    ],
)
def test_a_metric_the_model_lacks_is_refused_before_anything_runs(
    composed: Callable[..., DictConfig], tmp_path: Path, overrides: list[str], message: str
) -> None:
    small = [o for o in NO_TRUTH if not o.startswith("tuner.")]
    with pytest.raises(ConfigError, match=message):
        run(composed(*small, *overrides))
    assert not (tmp_path / "map").exists()
