"""What a multirun is, before its first job: where it runs, how many jobs, threads for each.

Hydra's launchers run the jobs of a sweep in this process one after another, or side by side in
processes of their own, on this machine (joblib, a local Ray) or others (Ray, submitit). A job that
runs elsewhere leaves its outcome in a file under the sweep's folder, which all of them share.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from mamba_cli.errors import ConfigError

INHERITED = ("MAMBA_DATA_DIR", "MAMBA_RESULTS_DIR", "JAX_COMPILATION_CACHE_DIR")
"""Variables of the environment that jobs on a cluster need as well."""

LOST_JOB_S = 120.0
"""How long a job waits for its folder. A cluster starts a job again as soon as its machine is lost,
while the process that had it may still be ending, and a file server keeps its lock for a while."""

UNKNOWN = "(unknown)"
"""The overrides of a job that left no outcome."""

THREADS = ("NPROC", "OMP_NUM_THREADS")
"""What XLA and BLAS take the number of their threads from."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its number, its overrides, its exit code and what it said."""

    number: int
    overrides: str
    exit_code: int
    message: str


@dataclass(frozen=True)
class Sweep:
    """A multirun under a parallel launcher; pickled to its jobs.

    Attributes
    ----------
    launcher
        The launcher's class.
    num_jobs
        How many there are.
    records
        Where jobs leave their outcomes, an absolute path.
    folder
        The folder that the command was given in; paths are relative to it.
    environment
        Variables that a job sets before JAX starts.
    """

    launcher: str
    num_jobs: int
    records: Path
    folder: Path
    environment: dict[str, str]

    def enter(self) -> None:
        """Make a job's process like the one that the command was given in."""
        if self.folder.is_dir():
            os.chdir(self.folder)
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)

    def leave(self, outcome: Outcome) -> None:
        """Keep a job's outcome for :meth:`outcomes`. Raises ``OSError``."""
        self.records.mkdir(parents=True, exist_ok=True)
        path = self.records / f"job-{outcome.number}.json"
        part = path.with_suffix(f".{secrets.token_hex(4)}")
        part.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        part.replace(path)

    def outcomes(self) -> list[Outcome]:
        """What the jobs left, in their order; of one that left nothing, that it did not end."""
        found = {
            outcome.number: outcome
            for path in self.records.glob("job-*.json")
            for outcome in [Outcome(**json.loads(path.read_text(encoding="utf-8")))]
        }
        lost = "its process was killed, or could not be started; the same command runs it again"
        shutil.rmtree(self.records, ignore_errors=True)
        return [
            found.get(number, Outcome(number, UNKNOWN, 1, lost)) for number in range(self.num_jobs)
        ]


def planned(config_module: str, multirun: bool, overrides: Sequence[str]) -> Sweep | None:
    """The sweep that a command line asks for; ``None`` if its jobs run in this process.

    Parameters
    ----------
    config_module
        Where the configuration is.
    multirun
        Whether ``-m`` was given.
    overrides
        What was typed, besides flags.

    Raises
    ------
    ConfigError
        The budgets are seconds of a clock that jobs would share.
    """
    if not multirun:
        return None
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    cfg = _composed(config_module, parsed)
    params = cfg.hydra.sweeper.get("params") or {}
    if params:
        # What a configuration sweeps over itself stands before what was typed, as in the sweeper.
        given = [f"{key}={value}" for key, value in params.items()]
        parsed = [*OverridesParser.create().parse_overrides(given), *parsed]
        cfg = _composed(config_module, parsed)
    launcher = cfg.hydra.launcher
    target = str(launcher.get("_target_", ""))
    if not is_parallel(target):
        return None
    if not any(o.key_or_group == "budget.clock" and o.is_sweep_override() for o in parsed):
        refuse_shared_clock(target, cfg)
    num_jobs = math.prod(_num_values(override) for override in parsed)
    sweep_dir = Path(str(cfg.hydra.sweep.dir)).expanduser().absolute()
    return Sweep(
        launcher=target,
        num_jobs=num_jobs,
        records=sweep_dir / f".sweep-{secrets.token_hex(4)}",
        folder=Path.cwd(),
        environment=_environment(launcher, target, num_jobs),
    )


def _composed(config_module: str, overrides: Sequence[Override]) -> DictConfig:
    """The configuration that the jobs of a sweep share, with Hydra's own."""
    single = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
    with hydra.initialize_config_module(config_module, version_base="1.3"):
        return hydra.compose("config", overrides=single, return_hydra_config=True)


def is_parallel(launcher: str) -> bool:
    """Whether a launcher runs jobs in other processes than this one."""
    return bool(launcher) and not launcher.endswith(".BasicLauncher")


def refuse_shared_clock(launcher: str, cfg: DictConfig) -> None:
    """Refuse budgets of wall time for jobs that run side by side, unless they are asked for.

    Raises
    ------
    ConfigError
        ``budget.clock`` is ``wall`` and ``budget.allow_parallel_wall_clock`` is not set.
    """
    budget = OmegaConf.select(cfg, "budget")
    if budget.clock != "wall" or budget.allow_parallel_wall_clock is True:
        return
    raise ConfigError(
        f"budget.clock=wall is not allowed with {launcher.rpartition('.')[2]}: jobs that run side "
        "by side take one another's seconds, so that no two budgets would be the same. Give "
        "budget.clock=calibrated (seconds become steps at a measured cost), or "
        "budget.allow_parallel_wall_clock=true to have it all the same."
    )


def _num_values(override: Override) -> int:
    return len(list(override.sweep_iterator())) if override.is_sweep_override() else 1


def _environment(launcher: DictConfig, target: str, num_jobs: int) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    threads = _threads_per_job(launcher, target, num_jobs)
    return inherited | ({} if threads is None else dict.fromkeys(THREADS, str(threads)))


def _threads_per_job(launcher: DictConfig, target: str, num_jobs: int) -> int | None:
    """Threads for each job, so that jobs do not fight over cores; ``None`` leaves them alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    if "joblib_launcher" in target:
        wanted = int(launcher.get("n_jobs") or -1)
        wanted = wanted if wanted > 0 else max(1, cores + 1 + wanted)
        return max(1, cores // min(wanted, num_jobs))
    if "ray_launcher" in target:
        remote: Any = OmegaConf.select(launcher, "ray.remote") or {}
        return max(1, int(remote.get("num_cpus") or 1))
    if "cpus_per_task" in launcher and launcher.cpus_per_task:
        return int(launcher.cpus_per_task)
    # Of submitit, the local executor starts every job at once; a cluster gives cores by itself.
    return max(1, cores // num_jobs) if target.endswith("LocalLauncher") else None
