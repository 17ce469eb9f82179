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
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from mamba_cli import artifacts, plots, report
from mamba_cli.config import settings_from
from mamba_cli.errors import ConfigError, DataError, NothingUsableError
from mamba_cli.run import run
from mamba_cli.tuners.halving import schedule
from mamba_cli.types import ArmRecord

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


def kill_when(
    results: Path,
    overrides: list[str],
    ready: Callable[[], bool],
    with_signal: signal.Signals = signal.SIGKILL,
) -> int:
    """Start the command and kill it as soon as ``ready()``; its return code."""
    process = subprocess.Popen(
        command(results, overrides), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not ready():
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, with_signal)
        return process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


FIXED = [
    "tuner=fixed",
    "tuner.step_size=1e-4",
    "tuner.batch_percent=10",
    *(override for override in SMALL if not override.startswith("tuner.")),
    "evaluation.budget_s=0.1",
]
SHORT_TRUTH = [
    "ground_truth.num_draws=400",
    "ground_truth.num_warmup=100",
    "ground_truth.min_ess=50",
    "ground_truth.max_r_hat=1.1",
]


def provenance_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "provenance.json").read_text())


def results_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".csv", ".json")}


@pytest.mark.rendered
def test_a_run_writes_every_file_and_a_second_one_changes_none(
    composed: Callable[..., DictConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*SMALL, *SHORT_TRUTH, "evaluation.num_repeats=2"]
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
    assert best["budget"] == "quick"
    assert [row["repeat"] for row in rows] == [0, 1]
    assert (folder / "metrics.csv").read_text().splitlines()[0].endswith(",budget")
    for row in rows:
        assert row["status"] == "ok"
        assert row["num_samples"] > 10
        assert math.isfinite(row["ksd"])
        assert row["budget"] == "quick"
        assert row["relative_std_error"] > 0
        assert 0.5 < row["accuracy"] <= 1
        assert row["log10_step_size"] == pytest.approx(math.log10(best["step_size"]))
    assert rows[0]["ksd"] != rows[1]["ksd"]  # each repeat has its own key
    provenance = provenance_of(folder)
    assert provenance["paper_size"] is False
    assert provenance["end"] is not None
    assert provenance["config"]["tuner"]["longest_arm_s"] == 0.1
    seconds = provenance["seconds"]
    assert seconds["total"] >= seconds["compile"] + seconds["sampling"] + seconds["reward"]
    assert sum(rung.num_arms * rung.seconds for rung in rungs) < seconds["sampling"]
    assert "NOT the paper's size" in capsys.readouterr().out

    assert provenance["map"]["method"] == "newton"
    assert 0 <= provenance["map"]["relative_gradient_norm"] < 1e-3

    before = results_of(folder)
    run(composed(*overrides))
    assert results_of(folder) == before

    with pytest.raises(ConfigError, match=r"tuner\.longest_arm_s"):
        run(composed(*overrides, "tuner.longest_arm_s=0.2"))
    assert results_of(folder) == before


@pytest.mark.parametrize(
    ("overrides", "status", "reason", "message"),
    [
        (
            ["tuner.grid.step_size=[1e6,1e7]"],
            "diverged",
            "not finite at step",
            "2 diverged.*try smaller step sizes",
        ),
        (
            ["tuner.longest_arm_s=1e-7"],
            "no_draws",
            "2 are needed",
            r"9 made too few draws.*try a larger tuner\.longest_arm_s",
        ),
        (
            ["tuner.grid.step_size=[1e-30,1e-29]"],
            "frozen",
            "too small to move",
            "2 did not move.*try larger step sizes",
        ),
    ],
)
def test_without_a_usable_arm_there_is_a_table_of_reasons_and_no_winner(
    composed: Callable[..., DictConfig],
    tmp_path: Path,
    overrides: list[str],
    status: str,
    reason: str,
    message: str,
) -> None:
    with pytest.raises(NothingUsableError, match=message) as raised:
        run(composed(*NO_TRUTH, *overrides))
    assert "tuning.csv" in str(raised.value)
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


def without_set(records: list[ArmRecord]) -> list[ArmRecord]:
    """Records without what is only known at the end: the set of arms that has the best."""
    return [record._replace(in_best_set=False) for record in records]


def test_killed_while_tuning_the_finished_rungs_are_kept(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*NO_TRUTH, "tuner.longest_arm_s=1.5"]
    folder = folder_of(tmp_path)
    kill_when(tmp_path, overrides, (folder / "checkpoint" / "tuning.npz").exists)
    killed = artifacts.read_tuning(folder / "tuning.csv")
    assert {record.rung for record in killed} == {0}
    assert not (folder / "best.json").exists()
    map_quality = provenance_of(folder)["map"]
    run(composed(*overrides))
    assert provenance_of(folder)["map"] == map_quality
    assert map_quality["num_iterations"] > 0
    records = artifacts.read_tuning(folder / "tuning.csv")
    assert without_set(records[:9]) == without_set(killed)  # timings and all: not done again
    assert [record.rung for record in records[9:]] == [1, 1, 1]
    steps = {record.arm: record.num_steps for record in killed}
    # A chain goes on from where it was, so its steps and seconds are those of both rungs.
    assert all(record.num_steps > steps[record.arm] for record in records[9:])
    assert all(record.elapsed_s > 1.4 for record in records[9:])


def test_killed_while_evaluating_the_finished_repeats_are_kept(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*FIXED, "ground_truth=none"]
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
    overrides = [*FIXED, "model.num_train=20000"]
    overrides += ["ground_truth.num_draws=4000", "ground_truth.min_ess=50"]
    truth = tmp_path / "ground_truth"

    def num_blocks() -> int:
        saved = [artifacts.read_arrays(path) for path in truth.rglob("state.npz")]
        return max((found[1]["counters"]["num_blocks"] for found in saved if found), default=0)

    kill_when(tmp_path, overrides, lambda: num_blocks() >= 2)
    assert not list(truth.glob("*.npz"))
    at_the_kill = num_blocks()
    run(composed(*overrides))
    assert len(list(truth.glob("*.npz"))) == 1
    log = (folder_of(tmp_path, "fixed") / "run.log").read_text()
    assert f"resuming after {at_the_kill} blocks of NUTS" in log
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


def test_the_recommended_tuner_says_how_sure_it_is(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    # Calibrated: too busy a machine would leave an arm too few draws for an error of its reward.
    run(composed("tuner=mamba", *NO_TRUTH, "tuner.check_s=0.2", "budget.clock=calibrated"))
    folder = folder_of(tmp_path, "mamba")
    records = artifacts.read_tuning(folder / "tuning.csv")
    best = json.loads((folder / "best.json").read_text())
    winner = next(r for r in records if r.rung == 1 and r.promoted)
    assert (best["arm"], best["reward_std_error"]) == (winner.arm, winner.reward_std_error)
    inside = [record.arm for record in records if record.in_best_set]
    assert sorted(member["arm"] for member in best["best_set"]) == sorted(inside)
    assert winner.arm in inside
    assert best["theorem_1"]["sigma"] > 0
    assert 0 < best["theorem_1"]["error_bound"] <= 1
    steps = json.loads((folder / "steps.json").read_text())
    (cost_s,) = steps["costs_s"].values()
    assert sum(steps["dispatches"][f"check, arm {winner.arm}"]) == round(0.2 / cost_s)
    assert provenance_of(folder)["seconds"]["check"] > 0


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
    drawn = {path.name for path in folder.glob("*.png")}
    assert drawn == {"evaluation.png"} | ({"tuning.png"} if tuner == "grid" else set())


def test_a_ground_truth_that_comes_later_is_compared_with_the_chains_that_ran(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*FIXED, *SHORT_TRUTH, "evaluation.num_repeats=2"]
    folder = folder_of(tmp_path, "fixed")
    run(composed(*overrides, "stages=[tune,evaluate]"))
    before = artifacts.read_metrics(folder / "metrics.csv")
    assert not any("relative_std_error" in row for row in before)

    run(composed(*overrides, "stages=[ground_truth]"))
    rows = artifacts.read_metrics(folder / "metrics.csv")
    (path,) = (tmp_path / "ground_truth").glob("*.npz")
    truth, meta = artifacts.read_arrays(path) or ({}, {})
    std = (artifacts.read_arrays(folder / "moments.npz") or ({}, {}))[0]["std"]
    for row, row_before, own in zip(rows, before, std, strict=True):
        error = np.linalg.norm(own - truth["std"]) / np.linalg.norm(truth["std"])
        assert row["relative_std_error"] == pytest.approx(error)
        assert {k: v for k, v in row.items() if k != "relative_std_error"} == row_before

    path.with_suffix(".json").unlink()
    run(composed(*overrides))
    assert not path.with_suffix(".json").exists()  # nothing was left to do
    run(composed(*overrides, "ground_truth.recompute=true"))
    assert path.with_suffix(".json").exists()
    # The same draws, so that only what was compared before is compared again.
    assert artifacts.read_metrics(folder / "metrics.csv") == rows
    again = artifacts.read_arrays(path)
    assert again is not None
    assert again[1]["elapsed_s"] != meta["elapsed_s"]


def test_chains_whose_moments_are_lost_run_again_for_a_ground_truth(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*FIXED, *SHORT_TRUTH]
    folder = folder_of(tmp_path, "fixed")
    run(composed(*overrides, "stages=[tune,evaluate]"))
    (folder / "moments.npz").unlink()
    run(composed(*overrides))
    (row,) = artifacts.read_metrics(folder / "metrics.csv")
    assert row["relative_std_error"] > 0


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (["tuner.reward.c=-1"], r"tuner\.reward\.c"),
        (["sampler=sghmc", "sampler.kernel.friction=2"], r"sampler\.kernel\.friction"),
    ],
)
def test_a_wrong_value_leaves_no_folder_that_refuses_the_right_one(
    composed: Callable[..., DictConfig], tmp_path: Path, bad: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        run(composed(*NO_TRUTH, *bad))
    assert not (tmp_path / "runs").exists()


def test_a_run_killed_before_its_last_word_is_finished_by_the_next(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*FIXED, "ground_truth=none"]
    folder = folder_of(tmp_path, "fixed")
    run(composed(*overrides))
    before = {name: data for name, data in results_of(folder).items() if "prov" not in name}
    provenance = provenance_of(folder)
    artifacts.write_json(folder / "provenance.json", provenance | {"end": None})
    artifacts.write_arrays(folder / "checkpoint" / "tuning.npz", {"position": np.zeros(3)}, {})
    (folder / "evaluation.png").unlink()
    run(composed(*overrides))
    after = provenance_of(folder)
    assert after["end"] is not None
    assert after["data_digests"] == provenance["data_digests"]
    assert after["map"] == provenance["map"]
    assert after["seconds"]["sampling"] == provenance["seconds"]["sampling"]
    assert (folder / "evaluation.png").exists()
    assert not (folder / "checkpoint").exists()
    assert {k: v for k, v in results_of(folder).items() if "prov" not in k} == before


def test_seconds_add_up_over_the_processes_of_a_run(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*FIXED, "evaluation.num_repeats=2"]
    overrides += ["ground_truth.num_draws=16", "ground_truth.num_warmup=1"]  # never converges
    folder = folder_of(tmp_path, "fixed")
    run(composed(*overrides, "stages=[tune,evaluate]"))
    first = provenance_of(folder)["seconds"]
    # A row of two is lost: the other is not paid for twice.
    rows = artifacts.read_metrics(folder / "metrics.csv")
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:2]))
    with pytest.raises(NothingUsableError, match="with another run_dir="):
        run(composed(*overrides))
    failed = provenance_of(folder)
    assert failed["end"] is None
    assert failed["seconds"]["ground_truth"] > 0
    assert failed["seconds"]["sampling"] == first["sampling"]
    assert failed["seconds"]["total"] > first["total"] + failed["seconds"]["ground_truth"]
    run(composed(*overrides, "stages=[evaluate]"))
    second = provenance_of(folder)["seconds"]
    new = artifacts.read_metrics(folder / "metrics.csv")[1]["elapsed_s"]
    assert first["sampling"] == pytest.approx(sum(row["elapsed_s"] for row in rows))
    assert second["sampling"] == pytest.approx(first["sampling"] + new)
    assert second["ground_truth"] == failed["seconds"]["ground_truth"]
    assert second["evaluation"] > first["evaluation"]


def test_a_picture_that_cannot_be_drawn_costs_no_result_and_is_drawn_later(
    composed: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*arguments: Any, **named: Any) -> None:
        raise ValueError("no font")

    folder = folder_of(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(plots, "halving_picture", broken)
        patched.setattr(plots, "posterior_picture", broken)
        run(composed(*NO_TRUTH))
    assert "tuning.png could not be drawn (ValueError: no font)" in caplog.text
    assert not list(folder.glob("*.png"))
    before = results_of(folder)
    written = {"tuning.csv", "best.json", "metrics.csv", "provenance.json", "steps.json"}
    assert before.keys() == written
    run(composed(*NO_TRUTH))
    assert {path.name for path in folder.glob("*.png")} == {"tuning.png", "evaluation.png"}
    assert results_of(folder) == before


def test_ctrl_c_while_tuning_is_130_and_the_same_command_goes_on(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*NO_TRUTH, "tuner.longest_arm_s=1.5"]
    folder = folder_of(tmp_path)
    ready = (folder / "checkpoint" / "tuning.npz").exists
    assert kill_when(tmp_path, overrides, ready, signal.SIGINT) == 130
    interrupted = provenance_of(folder)
    killed = artifacts.read_tuning(folder / "tuning.csv")
    assert {record.rung for record in killed} == {0}
    assert interrupted["end"] is None
    assert interrupted["seconds"]["tuning"] > sum(record.elapsed_s for record in killed)
    run(composed(*overrides))
    assert without_set(artifacts.read_tuning(folder / "tuning.csv")[:9]) == without_set(killed)
    seconds = provenance_of(folder)["seconds"]
    assert seconds["tuning"] > interrupted["seconds"]["tuning"] + 2.25  # three arms x 0.75 s


TINY = [
    *(override for override in NO_TRUTH if not override.startswith("tuner.")),
    "evaluation.budget_s=0.1",
]
TINY_MAMBA = ["tuner.grid.step_size=[1e-4,3e-5,1e-5]", "tuner.grid.batch_percent=[10]"]
TINY_MAMBA += ["tuner.longest_arm_s=0.1", "tuner.max_draws=20"]


@pytest.mark.parametrize(
    ("sampler", "tuner"),
    [
        ("sgld", "mamba_fssd"),
        ("sgld_cv", "grid"),
        ("sghmc", "mamba_ksd"),
        ("sghmc_cv", "heuristic"),
        ("sgnht", "grid"),
        ("sgnht_cv", "mamba_ksd"),
        ("badodab", "heuristic"),
        ("badodab_cv", "mamba_fssd"),
    ],
)
def test_every_sampler_runs_to_the_end_with_a_tuner(
    composed: Callable[..., DictConfig], tmp_path: Path, sampler: str, tuner: str
) -> None:
    overrides = [f"sampler={sampler}", f"tuner={tuner}", *TINY]
    if tuner.startswith("mamba"):
        overrides += TINY_MAMBA
    elif tuner == "grid":
        overrides += ["tuner.num_iterations=30", "tuner.grid.step_size=[1e-4,3e-5,1e-5]"]
    else:
        overrides += ["tuner.step_size=1e-5"]
    run(composed(*overrides))
    folder = tmp_path / "runs" / "logreg" / sampler / tuner / "seed-0"
    (row,) = artifacts.read_metrics(folder / "metrics.csv")
    assert (row["sampler"], row["tuner"], row["status"]) == (sampler, tuner, "ok")
    assert row["ksd"] > 0
    assert row["accuracy"] > 0.5
    num_arms = len({record.arm for record in artifacts.read_tuning(folder / "tuning.csv")})
    lengths = 2 if sampler.startswith("sghmc") else 1  # L is 5 or 10
    assert num_arms == (1 if tuner == "heuristic" else 3 * lengths)


def test_stochastic_scores_of_the_last_rung_only_with_replacement(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    run(
        composed(
            "tuner=mamba_fssd",
            *TINY,
            *TINY_MAMBA,
            "tuner.reward.gradients=stochastic",
            "tuner.score_on=rung",
            "minibatch=with_replacement",
        )
    )
    folder = folder_of(tmp_path, "mamba_fssd")
    assert artifacts.read_metrics(folder / "metrics.csv")[0]["status"] == "ok"
    assert provenance_of(folder)["config"]["tuner"]["score_on"] == "rung"


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
    ],
)
def test_a_metric_the_model_lacks_is_refused_before_anything_runs(
    composed: Callable[..., DictConfig], tmp_path: Path, overrides: list[str], message: str
) -> None:
    small = [o for o in NO_TRUTH if not o.startswith("tuner.") or "batch_percent" in o]
    with pytest.raises(ConfigError, match=message):
        run(composed(*small, *overrides))
    assert not (tmp_path / "map").exists()


def test_a_lost_winner_is_found_again_in_the_tuning_without_tuning(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    run(composed(*NO_TRUTH))
    folder = folder_of(tmp_path)
    before = {name: data for name, data in results_of(folder).items() if "prov" not in name}
    (folder / "best.json").unlink()
    run(composed(*NO_TRUTH))
    after = {name: data for name, data in results_of(folder).items() if "prov" not in name}
    assert after == before

    # Without the rung that promoted it there is no winner on record: all is tuned again.
    lines = (folder / "tuning.csv").read_text().splitlines(keepends=True)
    (folder / "tuning.csv").write_text("".join(lines[:10]))
    (folder / "best.json").unlink()
    run(composed(*NO_TRUTH))
    assert len(artifacts.read_tuning(folder / "tuning.csv")) == 12


@pytest.mark.parametrize("field", ["step_size", "batch_size"])
def test_repeats_of_another_winner_are_dropped_and_made_again(
    composed: Callable[..., DictConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    field: str,
) -> None:
    overrides = [*FIXED, "ground_truth=none", "evaluation.num_repeats=2"]
    run(composed(*overrides))
    folder = folder_of(tmp_path, "fixed")
    best = json.loads((folder / "best.json").read_text())
    value = {"step_size": 2e-4, "batch_size": 20}[field]
    artifacts.write_json(folder / "best.json", best | {field: value})
    run(composed(*overrides))
    assert "2 of 2 repeats were not made with the hyperparameters of best.json" in caplog.text
    rows = artifacts.read_metrics(folder / "metrics.csv")
    assert [row[field] for row in rows] == [value, value]
    assert [row["repeat"] for row in rows] == [0, 1]
    std = (artifacts.read_arrays(folder / "moments.npz") or ({}, {}))[0]["std"]
    assert std.shape == (2, 3)

    artifacts.write_json(folder / "best.json", best)
    run(composed(*overrides, "stages=[tune]"))  # nothing makes them again
    assert not artifacts.read_metrics(folder / "metrics.csv")
    assert not (folder / "evaluation.png").exists()


def test_a_batch_above_the_rows_in_the_winner_is_refused(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    overrides = [*FIXED, "ground_truth=none"]
    run(composed(*overrides, "stages=[tune]"))
    path = folder_of(tmp_path, "fixed") / "best.json"
    artifacts.write_json(path, json.loads(path.read_text()) | {"batch_size": 401})
    with pytest.raises(DataError, match=r"best\.json.*batch_size=401.*at most 400.*delete it"):
        run(composed(*overrides))


def test_a_finished_run_says_that_nothing_is_left_and_what_is_missing(
    composed: Callable[..., DictConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*FIXED, "ground_truth=none"]
    run(composed(*overrides))
    assert "nothing left to do" not in capsys.readouterr().out
    path = folder_of(tmp_path, "fixed") / "tuning.csv"
    path.unlink()
    run(composed(*overrides))
    shown = capsys.readouterr()
    assert "nothing left to do" in shown.out
    assert f"warning: {path} is missing" in shown.err


@pytest.mark.parametrize(
    ("step_size", "notes"),
    [
        (1e-6, ["the step size is the smallest of the grid"]),
        (1e-2, ["the step size is the largest of the grid"]),
        (1e-4, []),
    ],
)
def test_the_closing_table_says_where_the_grid_ends_and_names_the_metric(
    composed: Callable[..., DictConfig], step_size: float, notes: list[str]
) -> None:
    overrides = [o for o in NO_TRUTH if not o.startswith(("tuner.longest", "tuner.max"))]
    settings = settings_from(composed("tuner=grid", *overrides))
    best = {"step_size": step_size, "batch_size": 40, "batch_percent": 10.0}
    best |= {"num_integration_steps": 1, "reward": 0.5}
    lines = report.winner_lines(best, settings, None)
    assert [value for name, value in lines if name == "note"] == notes
    assert ("reward (log_loss)", "0.5") in lines
    fixed = settings_from(composed(*FIXED))
    assert "note" not in dict(report.winner_lines(best, fixed, None))


def test_the_closing_table_says_when_the_deviations_are_far_off() -> None:
    def note(*errors: float | None) -> str | None:
        rows = [{"status": "ok", "relative_std_error": e} for e in errors if e is not None]
        return dict(report.metric_lines([*rows, {"status": "ok"}][: len(errors)])).get("note")

    assert note(0.571) == "the posterior sds are 57 % off those of NUTS"
    assert note(0.1, 0.9) == "the posterior sds are 90 % off those of NUTS in the worst repeat"
    assert note(0.5) is None
    assert note(None) is None
