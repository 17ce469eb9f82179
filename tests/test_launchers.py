"""Sweeps under the launchers that run jobs side by side, for real where they are installed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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


MEMORY = 100 * 2**20
"""Of a Ray node's object store: jobs hand over a configuration and a return value."""

QUICK_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
"""A lost node is noticed within seconds instead of half a minute."""


LONG_ENOUGH = ("tuner.longest_arm_s=1", "evaluation.budget_s=1")
"""For a job to be seen in the middle of its chains."""


@pytest.fixture
def ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of a head without cores and two nodes of one core each; nothing outlives it."""
    needs("ray", "hydra_plugins.hydra_ray_launcher")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("MAMBA_TEST_CLUSTER", str(tmp_path))  # inherited by all that it starts
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")
    monkeypatch.setenv("RAY_enable_metrics_collection", "0")
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = None
    try:
        cluster = Cluster(
            initialize_head=True, head_node_args={**head, "_system_config": QUICK_CHECKS}
        )
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=MEMORY, wait=False)
        cluster.wait_for_nodes(timeout=180)
        yield cluster
    finally:
        if cluster is not None:
            cluster.shutdown()
        for process in started_for(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def started_for(folder: Path) -> list[int]:
    """The processes whose environment names the cluster of ``folder``."""
    mark = f"MAMBA_TEST_CLUSTER={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if int(path.parent.name) != os.getpid() and mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def parent_of(process: int) -> int:
    """Its parent, which is a node's raylet for a worker of Ray; 0 where it has ended."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
        return 0 if state in "ZX" else int(parent)
    return 0


def unfinished(results: Path) -> list[str]:
    """The runs that are in the middle of their chains."""
    begun = sorted(path.parent for path in results.rglob("steps.json"))
    return [folder.name for folder in begun if not (folder / "metrics.csv").exists()]


class Owners:
    """Every process that has had the lock of a run's folder, and its parent when it was seen."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.seen: dict[str, dict[int, int]] = {}

    def look(self) -> None:
        for path in self.results.rglob("seed-*/.lock"):
            name, _, rest = path.read_text().partition(" on ")
            owners = self.seen.setdefault(path.parent.name, {})
            if rest.endswith("\n") and int(name) not in owners:
                assert not any(parent_of(earlier) for earlier in owners), "two jobs in one folder"
                owners[int(name)] = parent_of(int(name))


@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_that_loses_one_of_two_workers_ends_with_every_result(
    ray_cluster: Any, tmp_path: Path
) -> None:
    nodes = {node.all_processes["raylet"][0].process.pid: node for node in ray_cluster.worker_nodes}
    seeds = {f"seed-{seed}" for seed in range(3)}
    address = f"hydra.launcher.ray.init.address='{ray_cluster.address}'"
    given = command(tmp_path, "ray_cluster", address, "seed=0,1,2", *LONG_ENOUGH)
    said = tmp_path / "said"
    owners = Owners(tmp_path)
    lost = None
    with said.open("w") as log, subprocess.Popen(given, stderr=log, stdout=log) as process:
        try:
            while process.poll() is None:
                owners.look()
                # Each node has a job, and one of them has come through a rung of its tuning.
                if lost is None and len(owners.seen) >= 2 and (begun := unfinished(tmp_path)):
                    lost = begun[-1]
                    raylet = next(iter(owners.seen[lost].values()))
                    ray_cluster.remove_node(nodes.pop(raylet), allow_graceful=False)
                time.sleep(0.02)
        finally:
            process.kill()
    assert process.returncode == 0, said.read_text()
    assert lost is not None
    assert set(folders(tmp_path)) == set(owners.seen) == seeds
    # The lost job had two processes, one after the other, the second on the other node.
    assert {name for name, processes in owners.seen.items() if len(processes) > 1} == {lost}
    assert list(owners.seen[lost].values()) == [raylet, *nodes]
    for folder in folders(tmp_path).values():
        assert check_whole(folder)["num_threads"] == 1
        assert len(artifacts.read_tuning(folder / "tuning.csv")) == 3


def test_side_by_side_jobs_may_not_share_the_wall_clock(tmp_path: Path) -> None:
    needs("hydra_plugins.hydra_joblib_launcher")
    wall = [*command(tmp_path, "joblib", "seed=0,1"), "budget.clock=wall"]
    done = subprocess.run(wall, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "budget.clock=wall is not allowed with JoblibLauncher" in done.stderr
    assert "budget.allow_parallel_wall_clock=true" in done.stderr
    assert not list(tmp_path.iterdir())


def test_submitit_runs_every_job_in_a_process_of_its_own(tmp_path: Path) -> None:
    needs("hydra_plugins.hydra_submitit_launcher")
    given = command(tmp_path, "submitit_local", "seed=0,1", "hydra.launcher.cpus_per_task=1")
    done = subprocess.run(given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert set(folders(tmp_path)) == {"seed-0", "seed-1"}
    owners = {(f / ".lock").read_text() for f in folders(tmp_path).values()}
    assert len(owners) == 2
    for folder in folders(tmp_path).values():
        assert check_whole(folder)["num_threads"] == 1
    assert not list(tmp_path.rglob(".sweep-*"))


def test_a_launcher_that_is_not_there_is_named(tmp_path: Path) -> None:
    given = command(tmp_path, "submitit_slurm", "seed=0,1")
    given[2] = f"import hydra_plugins; hydra_plugins.__path__ = []; {given[2]}"
    done = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "submitit_slurm" in done.stderr
    assert "pip install 'mamba-cli[submitit]'" in done.stderr
