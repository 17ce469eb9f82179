"""Sweeps under the launchers that run jobs side by side, for real where they are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_run import NO_TRUTH

from mamba_cli import artifacts

SWEEP = [*NO_TRUTH, "budget.clock=calibrated", "tuner.grid.step_size=[1e-4,1e-5,1e-6]"]


def command(results: Path, launcher: str, *overrides: str) -> list[str]:
    code = "from mamba_cli.cli import main; main()"
    given = [f"hydra/launcher={launcher}", f"results_dir={results}", *SWEEP, *overrides]
    return [sys.executable, "-c", code, "-m", *given]


def needs(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)


def folders(results: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in results.rglob("metrics.csv")}


def check_whole(folder: Path) -> dict[str, Any]:
    """A finished run, by one process at a time; its provenance."""
    assert len(artifacts.read_metrics(folder / "metrics.csv")) == 1
    assert artifacts.read_json(folder / "best.json") is not None
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["end"] is not None
    return provenance


def test_joblib_runs_every_job_lists_those_that_fail_and_goes_on(tmp_path: Path) -> None:
    needs("hydra_plugins.hydra_joblib_launcher")
    two = ["hydra.launcher.n_jobs=2"]
    # Every arm of a step size of 1e30 diverges.
    failing = [*two, "seed=0", "tuner.grid.step_size=[1e30],[1e-5]", "run_dir=${results_dir}/"]
    failing[-1] += "${seed}-${tuner.grid.step_size.0}"
    done = subprocess.run(
        command(tmp_path, "joblib", *failing), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 4, done.stderr
    listed = done.stderr.partition("1 of 2 jobs failed:\n")[2].splitlines()
    assert [line.split(":")[0] for line in listed] == ["  job 0 (exit 4)"]
    assert set(folders(tmp_path)) == {"0-1e-05"}
    cores = len(os.sched_getaffinity(0))
    for folder in folders(tmp_path).values():
        provenance = check_whole(folder)
        assert provenance["num_concurrent_jobs"] == 2
        assert provenance["num_threads"] == max(1, cores // 2)
    log = (tmp_path / "0-1e+30" / "run.log").read_text()
    assert "ERROR" in log
    assert "no arm was usable" in log
    assert not list(tmp_path.rglob(".sweep-*"))
    before = {f: (f / "metrics.csv").stat().st_mtime_ns for f in folders(tmp_path).values()}
    more = [*two, "seed=0,1", "tuner.grid.step_size=[1e-5]", failing[-1]]
    again = subprocess.run(
        command(tmp_path, "joblib", *more), capture_output=True, text=True, timeout=600
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("nothing left to do") == 1
    assert set(folders(tmp_path)) == {"0-1e-05", "1-1e-05"}
    for folder, modified in before.items():
        assert (folder / "metrics.csv").stat().st_mtime_ns == modified


def test_a_job_that_is_killed_is_named_and_the_same_command_does_it(tmp_path: Path) -> None:
    needs("hydra_plugins.hydra_joblib_launcher")
    overrides = ["hydra.launcher.n_jobs=2", "seed=0,1", "tuner.longest_arm_s=2"]
    process = subprocess.Popen(
        command(tmp_path, "joblib", *overrides), stderr=subprocess.PIPE, text=True
    )
    lock = tmp_path / "runs" / "logreg" / "sgld" / "mamba_ksd" / "seed-1" / ".lock"
    deadline = time.monotonic() + 300
    while not lock.exists() or not lock.read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 4
    assert "JoblibLauncher ended early" in said
    assert "the same command does the rest" in said
    done = subprocess.run(command(tmp_path, "joblib", *overrides), timeout=600)
    assert done.returncode == 0
    assert set(folders(tmp_path)) == {"seed-0", "seed-1"}


@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_that_loses_one_of_two_workers_ends_with_every_result(
    tmp_path: Path,
) -> None:
    needs("ray", "hydra_plugins.hydra_ray_launcher")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        seeds = range(3)
        process = subprocess.Popen(
            command(
                tmp_path,
                "ray_cluster",
                f"hydra.launcher.ray.init.address='{cluster.address}'",
                f"seed={','.join(map(str, seeds))}",
                "tuner.longest_arm_s=1",
            ),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 300
        # Two jobs are in their tuning, one on each worker.
        while len(list(tmp_path.rglob("steps.json"))) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        cluster.remove_node(nodes[1], allow_graceful=False)
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
    finally:
        cluster.shutdown()
    assert set(folders(tmp_path)) == {f"seed-{seed}" for seed in seeds}
    for folder in folders(tmp_path).values():
        assert check_whole(folder)["num_threads"] == 1


def test_side_by_side_jobs_may_not_share_the_wall_clock(tmp_path: Path) -> None:
    needs("hydra_plugins.hydra_joblib_launcher")
    wall = [*command(tmp_path, "joblib", "seed=0,1"), "budget.clock=wall"]
    done = subprocess.run(wall, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "budget.clock=wall is not allowed with JoblibLauncher" in done.stderr
    assert "budget.allow_parallel_wall_clock=true" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_launcher_that_is_not_there_is_named(tmp_path: Path) -> None:
    with contextlib.suppress(ModuleNotFoundError):  # of any launcher there is none
        if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher"):
            pytest.skip("submitit is installed")
    done = subprocess.run(
        command(tmp_path, "submitit_slurm", "seed=0,1"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "submitit_slurm" in done.stderr
    assert "pip install 'mamba-cli[submitit]'" in done.stderr
