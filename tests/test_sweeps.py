"""Sweeps before their first job: threads, numbers, the clock; and outcomes from other processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from mamba_cli import sweeps
from mamba_cli.errors import ConfigError
from mamba_cli.sweeps import Outcome, Sweep, is_parallel, planned, refuse_shared_clock

JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
RAY = "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
LOCAL = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def budget(clock: str, allowed: bool = False) -> DictConfig:
    return OmegaConf.create({"budget": {"clock": clock, "allow_parallel_wall_clock": allowed}})


@pytest.mark.parametrize(
    ("target", "launcher", "num_jobs", "threads"),
    [
        (JOBLIB, {"n_jobs": 2}, 10, 4),
        (JOBLIB, {"n_jobs": -1}, 10, 1),
        (JOBLIB, {"n_jobs": -1}, 2, 4),  # two jobs have all eight cores
        (JOBLIB, {"n_jobs": -5}, 10, 2),  # all but four
        (JOBLIB, {"n_jobs": 99}, 99, 1),
        (RAY, {"ray": {"remote": {"num_cpus": 3}}}, 10, 3),
        (RAY, {"ray": {"remote": {}}}, 10, 1),
        (SLURM, {"cpus_per_task": 6}, 10, 6),
        (SLURM, {"cpus_per_task": None}, 10, None),
        (LOCAL, {"cpus_per_task": None}, 4, 2),
    ],
)
def test_threads_do_not_fight_over_cores(
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    launcher: dict[str, object],
    num_jobs: int,
    threads: int | None,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert sweeps._threads_per_job(OmegaConf.create(launcher), target, num_jobs) == threads


def test_jobs_of_this_process_are_no_sweep_of_others() -> None:
    assert not is_parallel(BASIC)
    assert planned("mamba_cli.conf", False, ["seed=0"]) is None
    assert planned("mamba_cli.conf", True, ["seed=0,1"]) is None


def test_a_shared_wall_clock_is_refused_unless_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"budget.clock=wall is not allowed with RayLauncher"):
        refuse_shared_clock(RAY, budget("wall"))
    refuse_shared_clock(RAY, budget("wall", allowed=True))
    refuse_shared_clock(RAY, budget("calibrated"))


def test_the_jobs_of_a_sweep_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAMBA_DATA_DIR", "/data")
    given = ["hydra/launcher=joblib", "budget.clock=calibrated", "results_dir=out"]
    sweep = planned("mamba_cli.conf", True, [*given, "seed=0,1,2", "sampler=sgld,sghmc"])
    assert sweep is not None
    assert (sweep.launcher, sweep.num_jobs, sweep.folder) == (JOBLIB, 6, tmp_path)
    assert sweep.records.parent == tmp_path / "out" / "runs"
    assert sweep.environment["MAMBA_DATA_DIR"] == "/data"
    swept = planned("mamba_cli.conf", True, [given[0], "budget.clock=wall,calibrated"])
    assert swept is not None  # each job refuses for itself
    with pytest.raises(ConfigError, match=r"budget.clock=wall"):
        planned("mamba_cli.conf", True, [given[0], "seed=0,1"])


def test_what_a_configuration_sweeps_over_counts_too(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n"
        "      sampler: sgld,sgld_cv\n      budget.clock: calibrated\n"
    )
    own = ["hydra/launcher=joblib", f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]
    sweep = planned("mamba_cli.conf", True, [*own, "seed=range(3)"])
    assert sweep is not None
    assert sweep.num_jobs == 6
    with pytest.raises(ConfigError, match=r"budget\.clock=wall is not allowed"):
        planned("mamba_cli.conf", True, [*own, "budget.clock=wall"])


def test_outcomes_come_back_in_order_and_a_lost_job_is_named(tmp_path: Path) -> None:
    sweep = Sweep(JOBLIB, 3, tmp_path / "records", tmp_path, {})
    second, first = Outcome(2, "seed=2", 4, "all failed"), Outcome(0, "seed=0", 0, "")
    sweep.leave(second)
    sweep.leave(first)
    sweep.leave(first)  # a job that was started again
    outcomes = sweep.outcomes()
    assert [outcomes[0], outcomes[2]] == [first, second]
    assert (outcomes[1].number, outcomes[1].exit_code) == (1, 1)
    assert "killed" in outcomes[1].message
    assert not sweep.records.exists()


def test_a_job_has_the_folder_and_the_variables_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("NPROC", "7")  # the user's own
    monkeypatch.delenv("MAMBA_DATA_DIR", raising=False)
    Sweep(RAY, 1, tmp_path, tmp_path, {"NPROC": "2", "MAMBA_DATA_DIR": "/data"}).enter()
    assert Path.cwd() == tmp_path
    assert (os.environ["NPROC"], os.environ["MAMBA_DATA_DIR"]) == ("7", "/data")
    monkeypatch.delenv("MAMBA_DATA_DIR")
