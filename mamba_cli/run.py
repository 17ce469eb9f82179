"""One run: model, MAP, tune, ground truth, evaluate, write.

Every stage leaves its result in the run's folder before the next begins, and a run that
finds a result there does not make it again: the same command resumes after a kill, and
does nothing but report when all is done.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mamba_cli import artifacts, gradients, plots
from mamba_cli.artifacts import RunFolder
from mamba_cli.config import (
    FixedSettings,
    GridSettings,
    MambaSettings,
    MapSearchSettings,
    RunSettings,
    build,
    settings_from,
)
from mamba_cli.console import Console, duration, size_note
from mamba_cli.errors import ConfigError, NothingUsableError
from mamba_cli.evaluation import best_of, evaluate, repeat_key
from mamba_cli.ground_truth import GroundTruth, NutsSettings, nuts_ground_truth
from mamba_cli.map_cache import cached_map
from mamba_cli.map_estimate import AdamPhase, MapEstimate, MapSettings
from mamba_cli.metrics import HIGHER_IS_BETTER
from mamba_cli.rewards.predictive import require_metric
from mamba_cli.tuners import given, grid, mamba
from mamba_cli.tuners.result import Tuning
from mamba_cli.types import AnyReward, HasHoldOut, Hyperparameters, Model, PredictiveReward
from mamba_cli.workbench import Seconds, Workbench

COMMITTED_GROUND_TRUTH = Path("results") / "ground_truth"
"""Where a checkout of the project has the default models' results, seen from its top."""


def run(cfg: DictConfig) -> None:
    """Run one composed configuration to its end.

    Raises
    ------
    ConfigError
        A value is out of range, or the run's folder holds another configuration.
    DataError
        The model's data are missing or corrupt.
    NothingUsableError
        Every arm failed, the ground truth did not converge, or no repeat was usable.
    StorageError
        A result could not be written.
    """
    settings = settings_from(cfg)
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    folder = RunFolder.open(settings.run_dir, config, **_hydra())
    with folder, folder.log(), Console() as console:
        console.banner(settings.budget)
        Run(cfg, config, settings, folder, console).go()


class Run:
    """The stages of one run, in the order of :meth:`go`."""

    def __init__(
        self,
        cfg: DictConfig,
        config: dict[str, Any],
        settings: RunSettings,
        folder: RunFolder,
        console: Console,
    ) -> None:
        self.cfg, self.config, self.settings = cfg, config, settings
        self.folder, self.console = folder, console
        self.began = time.perf_counter()
        self.start = datetime.datetime.now(datetime.UTC)
        earlier = folder.read_provenance() or {}
        self.earlier_start = earlier.get("start")
        self.earlier_seconds: Mapping[str, float] = earlier.get("seconds") or {}
        self.seconds = Seconds()
        self.stage_seconds: dict[str, float] = {}
        self.reward: AnyReward | None = None
        self.stage_number = 0
        self.map_estimate: MapEstimate | None = None
        self.key_tune, self.key_evaluate = jax.random.split(jax.random.key(settings.seed))

    def go(self) -> None:
        """All stages that were asked for and are not finished yet, then the closing table."""
        if "reward" in self.cfg.tuner:
            self.reward = build(self.cfg.tuner.reward, "tuner.reward")
        best, rows = self.folder.read_best(), self.folder.read_metrics()
        needs_tuning = "tune" in self.settings.stages and best is None
        needs_evaluation = self._evaluates() and len(rows) < self.settings.evaluation.num_repeats
        needs_truth = "ground_truth" in self._stages() and (needs_evaluation or not rows)
        if self._evaluates() and best is None and not needs_tuning:
            raise ConfigError(
                f"stages={list(self.settings.stages)}: evaluate needs a winner, and "
                f"{self.folder.best_path} is not there; add tune to stages"
            )
        if needs_tuning or needs_evaluation or needs_truth:
            bench = self.prepare()
            if needs_tuning:
                best = self.tune(bench)
            truth = self.ground_truth(bench) if needs_truth else None
            if needs_evaluation:
                assert best is not None
                rows = self.evaluate(bench, best, rows, truth)
            self.write_provenance(bench, finished=True)
            self.folder.drop_checkpoint(mamba.CHECKPOINT)
        else:
            self.console.message("everything asked for is done already")
        self.close(best, rows)

    def prepare(self) -> Workbench:
        """The model, its MAP, and what chains are made of."""
        self._stage("model", self.settings.model)
        model: Model = build(self.cfg.model.posterior, "model.posterior")
        self.console.message(f"{model.num_data:,} training rows, dimension {model.dim:,}")
        self.settings.tuner.points(model.num_data)  # a batch above the rows is refused here
        if isinstance(self.reward, PredictiveReward):
            self.reward.check(model)
        elif isinstance(self.settings.tuner, GridSettings):
            require_metric(model, self.settings.tuner.metric, "tuner.metric")
        self.map_estimate = self.find_map(model)
        bench = self.bench_of(model, self.map_estimate)
        self.write_provenance(bench, finished=False)
        return bench

    def bench_of(self, model: Model, estimate: MapEstimate) -> Workbench:
        """What chains of a model that start at its MAP are made of."""
        position = np.asarray(estimate.position)
        keeps_gradients = (
            self.reward is not None
            and not isinstance(self.reward, PredictiveReward)
            and self.reward.gradients == "stochastic"
        )
        sampler = self.settings.sampler
        if sampler.control_variates:
            estimator = gradients.control_variates(model, jax.numpy.asarray(position))
        else:
            estimator = gradients.standard(model)
        tuner = self.settings.tuner
        scored = 0 if isinstance(tuner, FixedSettings) else tuner.max_draws
        return Workbench(
            model=model,
            start=position,
            estimator=estimator,
            sampler=build(self.cfg.sampler.kernel, "sampler.kernel"),
            scheme=build(self.cfg.minibatch, "minibatch"),
            capacity=2 * max(scored, self.settings.evaluation.max_draws),
            keep_gradients=keeps_gradients,
            seconds=self.seconds,
        )

    def tuning_bench(self, bench: Workbench) -> Workbench:
        """The bench that arms run on: for rewards on predictions, without the rows held out.

        Their MAP is without these rows too.
        """
        if not isinstance(self.reward, PredictiveReward):
            return bench
        assert isinstance(bench.model, HasHoldOut), f"{bench.model.name} cannot hold rows out"
        reward = self.reward
        part = bench.model.hold_out(reward.hold_out_fraction, reward.hold_out_seed)
        num_held_out = bench.model.num_data - part.num_data
        self.console.message(
            f"{part.num_data:,} training rows for the arms, {num_held_out:,} for the reward"
        )
        return self.bench_of(part, self.find_map(part))

    def find_map(self, model: Model) -> MapEstimate:
        """Where the model's chains start; kept for the runs to come."""
        began = time.perf_counter()
        estimate = cached_map(
            model,
            _map_settings(self.settings.map_search),
            seed=self.settings.map_search.seed,
            cache_dir=self.settings.results_dir / "map",
            reporter=self.console,
        )
        earlier_s = self.stage_seconds.get("map", 0.0)
        self.stage_seconds["map"] = earlier_s + time.perf_counter() - began
        return estimate

    def tune(self, bench: Workbench) -> dict[str, Any]:
        """Choose the hyperparameters; write ``tuning.csv``, ``best.json`` and the picture."""
        tuner = self.settings.tuner
        self._stage("tune", f"{self.settings.sampler.name} by {tuner.name}")
        began = time.perf_counter()
        arms_bench = self.tuning_bench(bench)
        tuning = self._search(arms_bench)
        self.stage_seconds["tuning"] = time.perf_counter() - began
        self.folder.write_tuning(tuning.records)
        self._draw_tuning(tuning)
        if tuning.winner is None:
            self.write_provenance(bench, finished=True)
            raise NothingUsableError(_all_failed(tuning, self.folder.tuning_path))
        num_data, num_arm_data = bench.model.num_data, arms_bench.model.num_data
        # The same share of the rows, where the arms had fewer.
        batch_size = max(1, round(tuning.winner.batch_size * num_data / num_arm_data))
        best = best_of(tuning.winner._replace(batch_size=batch_size), num_data)
        self.folder.write_best(best)
        return best

    def _search(self, bench: Workbench) -> Tuning:
        tuner = self.settings.tuner
        arms = [Hyperparameters(*point) for point in tuner.points(bench.model.num_data)]
        if isinstance(tuner, FixedSettings):
            return given.tune(arms[0])
        common: dict[str, Any] = {
            "max_draws": tuner.max_draws,
            "rng_key": self.key_tune,
            "store": self.folder,
            "reporter": self.console,
        }
        if isinstance(tuner, GridSettings):
            return grid.tune(
                bench,
                arms,
                num_iterations=tuner.num_iterations,
                noise_scale=tuner.noise_scale,
                metric=tuner.metric,
                **common,
            )
        assert self.reward is not None
        return mamba.tune(
            bench,
            self.reward,
            arms,
            reduction_factor=tuner.reduction_factor,
            longest_arm_s=tuner.longest_arm_s,
            score_on=tuner.score_on,
            **common,
        )

    def ground_truth(self, bench: Workbench) -> GroundTruth:
        """NUTS, or its cached result."""
        settings = self.settings.ground_truth
        assert settings is not None
        self._stage("ground truth", f"NUTS, {settings.num_draws:,} draws on all rows")
        began = time.perf_counter()
        truth = nuts_ground_truth(
            bench.model,
            jax.numpy.asarray(bench.start),
            NutsSettings(
                num_draws=settings.num_draws,
                num_warmup=settings.num_warmup,
                num_chains=settings.num_chains,
                whiten=settings.whiten,
                max_r_hat=settings.max_r_hat,
                min_ess=settings.min_ess,
            ),
            cache_dir=self.settings.results_dir / "ground_truth",
            search_dirs=(COMMITTED_GROUND_TRUTH,),
            recompute=settings.recompute,
            reporter=self.console,
        )
        self.stage_seconds["ground_truth"] = time.perf_counter() - began
        return truth

    def evaluate(
        self,
        bench: Workbench,
        best: Mapping[str, Any],
        rows: list[dict[str, Any]],
        truth: GroundTruth | None,
    ) -> list[dict[str, Any]]:
        """The repeats that are missing in ``metrics.csv``."""
        settings = self.settings.evaluation
        self._stage("evaluate", f"{settings.num_repeats} x {settings.budget_s:g} s")
        began = time.perf_counter()
        hyperparameters = Hyperparameters(
            float(best["step_size"]), int(best["batch_size"]), int(best["num_integration_steps"])
        )
        names = {
            "model": self.settings.model,
            "sampler": self.settings.sampler.name,
            "tuner": self.settings.tuner.name,
            "seed": self.settings.seed,
        }
        for repeat in range(len(rows), settings.num_repeats):
            result = evaluate(
                bench,
                hyperparameters,
                budget_s=settings.budget_s,
                max_draws=settings.max_draws,
                rng_key=repeat_key(self.key_evaluate, repeat),
                burn_in_fraction=settings.burn_in_fraction,
                reference_std=None if truth is None else truth.std,
                reporter=self.console,
            )
            rows = [*rows, {**names, "repeat": repeat, **result.row}]
            self.folder.write_metrics(rows)
            if truth is not None and result.row["status"] == "ok":
                plots.evaluation_picture(
                    truth.std,
                    result.std,
                    None,
                    self.folder.path / "evaluation.png",
                    title=f"{self._title()}: posterior standard deviations",
                    note=size_note(self.settings.budget),
                )
        self.stage_seconds["evaluation"] = time.perf_counter() - began
        return rows

    def close(self, best: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> None:
        """The closing table; an evaluation without a usable repeat is an error."""
        lines: list[tuple[str, str]] = []
        if best is not None:
            lines += _winner_lines(best, self.reward)
        lines += _metric_lines(rows)
        lines += [("time", duration(time.perf_counter() - self.began))]
        lines += [("written to", str(self.folder.path))]
        note = size_note(self.settings.budget)
        self.console.summary(lines, self._title() + (f" ({note})" if note else ""))
        failed = [row for row in rows if row.get("status") != "ok"]
        if rows and len(failed) == len(rows):
            raise NothingUsableError(
                f"no repeat of the evaluation was usable: {failed[0]['status']}, "
                f"{failed[0]['reason']}; see {self.folder.metrics_path}"
            )

    def write_provenance(self, bench: Workbench, *, finished: bool) -> None:
        """How the numbers came about so far."""
        spent = {
            "compile": self.seconds.compile,
            "sampling": self.seconds.sampling,
            "gradients": self.seconds.gradients,
            "reward": self.seconds.reward,
            **self.stage_seconds,
            "total": time.perf_counter() - self.began,
        }
        total = {
            name: spent.get(name, 0.0) + (self.earlier_seconds.get(name) or 0.0)
            for name in {**self.earlier_seconds, **spent}
        }
        values = artifacts.provenance(
            self.config,
            start=self.earlier_start or self.start,
            end=datetime.datetime.now(datetime.UTC) if finished else None,
            seconds=total,
            data_digests={self.settings.model: bench.model.digest},
            num_concurrent_jobs=_concurrent_jobs(),
            budget=self.settings.budget,
            reward=_reward_entry(self.settings, self.reward),
        )
        self.folder.write_provenance({**values, "map": _map_entry(self.map_estimate)})

    def _stages(self) -> tuple[str, ...]:
        stages = self.settings.stages
        if self.settings.ground_truth is None:
            return tuple(stage for stage in stages if stage != "ground_truth")
        return stages

    def _evaluates(self) -> bool:
        return "evaluate" in self.settings.stages

    def _stage(self, name: str, detail: str) -> None:
        self.stage_number += 1
        self.console.stage(self.stage_number, 1 + len(self._stages()), name, detail)

    def _title(self) -> str:
        model, sampler, tuner = self.settings.model, self.settings.sampler, self.settings.tuner
        return f"{model}, {sampler.name}, {tuner.name}, seed {self.settings.seed}"

    def _draw_tuning(self, tuning: Tuning) -> None:
        tuner = self.settings.tuner
        common: dict[str, Any] = {
            "title": self._title(),
            "path_or_buffer": self.folder.path / "tuning.png",
            "note": size_note(self.settings.budget),
            "winner": None if tuning.winner is None else tuning.winner.arm,
        }
        if isinstance(tuner, MambaSettings) and self.reward is not None:
            plots.halving_picture(
                tuning.records,
                reward_name=self.reward.name,
                higher_is_better=self.reward.higher_is_better,
                **common,
            )
        elif isinstance(tuner, GridSettings):
            plots.search_picture(
                tuning.records,
                reward_name=tuner.metric,
                higher_is_better=tuner.metric in HIGHER_IS_BETTER,
                **common,
            )


def _map_settings(search: MapSearchSettings) -> MapSettings:
    chosen: dict[str, Any] = {}
    if search.phases is not None:
        chosen["phases"] = tuple(AdamPhase(**vars(phase)) for phase in search.phases)
    if search.max_lbfgs_iterations is not None:
        chosen["max_lbfgs_iterations"] = search.max_lbfgs_iterations
    return MapSettings(**chosen)


def _map_entry(estimate: MapEstimate | None) -> dict[str, Any] | None:
    """How near the start of the chains is to a mode, for ``provenance.json``."""
    if estimate is None:
        return None
    return {name: value for name, value in estimate._asdict().items() if name != "position"}


def _hydra() -> dict[str, Any]:
    """What was typed, for ``.hydra/``; nothing when a configuration was composed by hand."""
    if not HydraConfig.initialized():
        return {}
    node = HydraConfig.get()
    return {
        "overrides": list(node.overrides.task),
        "hydra_config": OmegaConf.to_container(node, resolve=False),
    }


def _concurrent_jobs() -> int:
    """How many jobs Hydra's launcher runs side by side; 1 for the basic launcher."""
    if not HydraConfig.initialized():
        return 1
    return abs(int(HydraConfig.get().launcher.get("n_jobs", 1) or 1))


def _reward_entry(settings: RunSettings, reward: AnyReward | None) -> dict[str, Any] | None:
    if reward is not None:
        return {"name": reward.name, "higher_is_better": reward.higher_is_better}
    if isinstance(settings.tuner, GridSettings):
        metric = settings.tuner.metric
        return {"name": metric, "higher_is_better": metric in HIGHER_IS_BETTER}
    return None


def _all_failed(tuning: Tuning, path: Path) -> str:
    last = {record.arm: record for record in tuning.records}
    counts: dict[str, int] = {}
    for record in last.values():
        counts[record.status] = counts.get(record.status, 0) + 1
    listed = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    example = next(record for record in last.values() if record.status != "ok")
    return (
        f"no arm was usable ({listed} of {len(last)}), so there is no winner; for example "
        f"h={example.step_size:g}, n={example.batch_size}: {example.reason}. Every arm and its "
        f"reason stand in {path}; try smaller step sizes, or a larger budget"
    )


def _winner_lines(best: Mapping[str, Any], reward: AnyReward | None) -> list[tuple[str, str]]:
    length = int(best["num_integration_steps"])
    lines = [
        ("step size h", f"{best['step_size']:.4g} (10^{np.log10(best['step_size']):.2f})"),
        ("batch size n", f"{best['batch_size']:,} ({best['batch_percent']:g} %)"),
    ]
    if length > 1:
        lines.append(("integration steps L", str(length)))
    if best["reward"] is not None:
        lines.append((f"reward ({reward.name if reward else 'metric'})", f"{best['reward']:.4g}"))
    return lines


_SHOWN = {
    "ksd": ("KSD", "{:.4g}", 1.0),
    "relative_std_error": ("relative sd error", "{:.2f} %", 100.0),
    "accuracy": ("test accuracy", "{:.2f} %", 100.0),
    "rmse": ("test RMSE", "{:.4f}", 1.0),
    "mse_of_draws": ("mean squared error of draws", "{:.4f}", 1.0),
    "ece": ("ECE", "{:.2f} %", 100.0),
    "mce": ("MCE", "{:.2f} %", 100.0),
    "num_samples": ("samples", "{:,.0f}", 1.0),
}


def _metric_lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Each metric's mean over the usable repeats, with its standard deviation if several."""
    usable = [row for row in rows if row.get("status") == "ok"]
    lines = []
    for column, (name, form, factor) in _SHOWN.items():
        values = [factor * float(row[column]) for row in usable if row.get(column) is not None]
        if values:
            text = form.format(np.mean(values))
            if len(values) > 1:
                text += " +- " + form.format(np.std(values, ddof=1))
            lines.append((name, text))
    if len(usable) < len(rows):
        lines.append(("failed repeats", f"{len(rows) - len(usable)} of {len(rows)}"))
    return lines
