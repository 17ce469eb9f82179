"""One run: model, MAP, tune, ground truth, evaluate, write.

Every stage leaves its result in the run's folder before the next begins, and a run that
finds a result there does not make it again: the same command resumes after a kill, and
does nothing but report when all is done.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mamba_cli import adaptive_grid, artifacts, gradients, nuts_cost, replay, report
from mamba_cli.artifacts import RunFolder
from mamba_cli.chain import MinibatchScheme, NoiseKeyFn
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
from mamba_cli.curvature import whitening_at
from mamba_cli.data.arrays import files_of
from mamba_cli.dry_run import plan
from mamba_cli.errors import ConfigError, MambaError, NothingUsableError
from mamba_cli.evaluation import (
    Moments,
    Reference,
    best_of,
    check_best,
    evaluate,
    made_with,
    repeat_key,
)
from mamba_cli.ground_truth import NutsSettings, nuts_ground_truth
from mamba_cli.ledger import Ledger
from mamba_cli.map_cache import cached_map
from mamba_cli.map_estimate import AdamPhase, MapEstimate, MapSettings
from mamba_cli.models.user_code import sources_of
from mamba_cli.posterior_summary import write_parameters
from mamba_cli.tuners import given, grid, halving, mamba
from mamba_cli.tuners.guards import Guards, principal_axes
from mamba_cli.tuners.result import Tuning
from mamba_cli.types import (
    AccumulatedReward,
    AnyReward,
    ArmRecord,
    AsksForWhitening,
    HasHoldOut,
    HasNamedParameters,
    Hyperparameters,
    Model,
    PredictiveReward,
    Sampler,
)
from mamba_cli.whitening import Whitening
from mamba_cli.workbench import Workbench

logger = logging.getLogger(__name__)

COMMITTED_GROUND_TRUTH = Path(__file__).resolve().parents[1] / "results" / "ground_truth"
"""Where a checkout of the project has the default models' results; a wheel has no such folder."""

SKIPPED = "ground_truth_skipped.json"
"""In a run's folder, why ``ground_truth=auto`` found none."""


def run(cfg: DictConfig, *, wait_s: float = 0.0) -> None:
    """Run one composed configuration to its end.

    Parameters
    ----------
    cfg
        A composed configuration.
    wait_s
        How long to wait for another process that uses the run's folder.

    Raises
    ------
    ConfigError
        A value is out of range, or the run's folder holds another configuration.
    DataError
        The model's data are missing or corrupt, or ``best.json`` holds no usable winner.
    NothingUsableError
        Every arm failed, the ground truth did not converge, or no repeat was usable.
    StorageError
        A result could not be written.
    """
    if settings_from(cfg).dry_run:
        describe(cfg)
        return
    with opened(cfg, Console(), wait_s=wait_s) as one:
        one.console.banner(one.settings.budget, one.settings.needs_no_size_note)
        one.go()


def describe(cfg: DictConfig) -> None:
    """Print what :func:`run` would do; nothing is written. Raises as it would."""
    settings = settings_from(cfg)
    Parts.of(cfg)

    def num_train() -> int:
        known = OmegaConf.select(cfg, "model.num_train")
        if known is not None:
            return int(known)
        return int(build(cfg.model.posterior, "model.posterior").num_data)

    with Console() as console:
        lines = plan(settings, num_train)
        console.summary(lines, f"{report.title_of(settings)}: dry run, nothing is done")


@contextmanager
def opened(
    cfg: DictConfig,
    console: Console,
    *,
    model: Model | None = None,
    pictures: bool = True,
    wait_s: float = 0.0,
) -> Iterator[Run]:
    """A run whose folder is locked and whose log is written while the context lasts.

    Parameters
    ----------
    cfg
        A composed configuration.
    console
        Where the run says how far it is.
    model
        In place of the model that is configured.
    pictures
        Whether ``tuning.png`` and ``evaluation.png`` are drawn.
    wait_s
        How long to wait for another process that uses the folder.

    Raises
    ------
    ConfigError
        A value is out of range, or the run's folder holds another configuration.
    StorageError
        The folder cannot be made or written.
    """
    settings = settings_from(cfg)
    parts = Parts.of(cfg)
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    config |= digests_of_files(config)
    if model is not None:
        config["model_digest"] = model.digest
    folder = RunFolder.open(settings.run_dir, config, wait_s=wait_s, **_hydra())
    with folder, folder.log():
        try:
            with console:
                yield Run(
                    cfg, settings, parts, folder, console, config, model=model, pictures=pictures
                )
        except Exception as error:
            # Whoever called shows it to a person; a job of a sweep has its log alone.
            logger.error("%s", error, exc_info=not isinstance(error, MambaError))
            raise


def digests_of_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sha256 of the files that a user's model is read from, by the key that names them.

    Part of what a run's folder remembers: a file that is changed makes another run. Modules that a
    source imports from beside it count as well.

    Raises
    ------
    DataError
        A file cannot be read.
    """
    found: dict[str, Path] = {}
    for key in ("data", "test_data"):
        given = config["model"].get(key)
        if isinstance(given, str) and (path := Path(given).expanduser()).exists():
            found |= {
                f"model.{key}" if file == path else f"model.{key}.{file.name}": file
                for file in files_of(path)
            }
    for key in ("file", "target"):
        given = config["model"].get(key)
        place = given.rpartition(":")[0] if key == "target" and isinstance(given, str) else given
        if isinstance(place, str) and place:
            own = Path(place).stem if place.endswith(".py") else place
            found |= {
                f"model.{key}" if name == own else f"model.{key}.{name}": file
                for name, file in sources_of(place).items()
            }
    digests = {key: artifacts.sha256_of(file) for key, file in found.items()}
    return {"file_sha256": digests} if digests else {}


@dataclass(frozen=True)
class Parts:
    """What is configured and needs no data."""

    reward: AnyReward | None
    sampler: Sampler
    scheme: MinibatchScheme
    noise: NoiseKeyFn

    @classmethod
    def of(cls, cfg: DictConfig) -> Parts:
        """Build them, before there is a folder that would remember a wrong value."""
        reward = build(cfg.tuner.reward, "tuner.reward") if "reward" in cfg.tuner else None
        sampler = build(cfg.sampler.kernel, "sampler.kernel")
        sampler(lambda position, minibatch: position)  # a kernel checks its parameters when made
        scheme, noise = build(cfg.minibatch, "minibatch"), build(cfg.noise, "noise")
        return cls(reward, sampler, scheme, noise)


class Run:
    """The stages of one run, in the order of :meth:`go`."""

    def __init__(
        self,
        cfg: DictConfig,
        settings: RunSettings,
        parts: Parts,
        folder: RunFolder,
        console: Console,
        config: Mapping[str, Any],
        *,
        model: Model | None = None,
        pictures: bool = True,
    ) -> None:
        self.cfg, self.settings, self.parts = cfg, settings, parts
        self.folder, self.console = folder, console
        self.model, self.pictures = model, pictures
        self.ledger = Ledger(folder, config, settings, parts.reward)
        self.stages = set(settings.stages)
        if settings.ground_truth is None:
            self.stages.discard("ground_truth")
        self.moments = Moments.load(self.moments_path)
        self.stage_number = 0
        self.pace = replay.pace_of(settings.clock, folder.path, settings.replay, config)
        self.store = replay.SteppedStore(folder, self.pace)
        self.key_tune, self.key_evaluate = jax.random.split(jax.random.key(settings.seed))

    @property
    def moments_path(self) -> Path:
        return self.folder.path / "moments.npz"

    def go(self) -> None:
        """All stages that were asked for and are not finished yet, then the closing table."""
        best, rows = self.winner(), self.folder.read_metrics()
        needs_tuning = "tune" in self.stages and best is None
        if "evaluate" in self.stages and best is None and not needs_tuning:
            raise ConfigError(
                f"stages={list(self.settings.stages)}: evaluate needs a winner, and "
                f"{self.folder.best_path} is not there; add tune to stages"
            )
        bench = None
        if needs_tuning:
            bench = self.prepare()
            best = self.tune(bench)
        num_rows = len(rows)
        if best is not None:
            rows = self._of_the_winner(best, rows)
        needs_truth = (
            "ground_truth" in self.stages
            and self._lacks_truth(rows)
            and not self._truth_was_skipped()
        )
        if needs_truth and "evaluate" in self.stages:
            rows = rows[: len(self.moments.std)]  # a chain whose moments are lost runs again
        needs_evaluation = (
            "evaluate" in self.stages and len(rows) < self.settings.evaluation.num_repeats
        )
        changed = needs_tuning or len(rows) < num_rows
        unfinished = not self.ledger.finished or changed or needs_truth or needs_evaluation
        if needs_truth or needs_evaluation:
            bench = bench or self.prepare()
            if best is not None:
                check_best(best, self.folder.best_path, bench.model.num_data)
            if needs_truth:
                rows = self.ground_truth(bench, rows)
            if needs_evaluation:
                assert best is not None
                rows = self.evaluate(bench, best, rows)
        self._draw_tuning(again=False)
        if self.pictures:
            report.draw_evaluation(self.folder, self.settings, self.moments, rows, again=unfinished)
        if unfinished:
            self.ledger.write(finished=True)
        self.folder.drop_checkpoint(mamba.CHECKPOINT)
        earlier = self.settings.replay
        same, lines = replay.verdict(earlier, self.folder.path) if earlier else (True, [])
        self.close(best, rows, idle=not unfinished, notes=lines if same else ["not identical"])
        if not same:
            raise NothingUsableError("\n  ".join(lines))

    def winner(self) -> dict[str, Any] | None:
        """``best.json``, checked; ``None`` where there is none. Raises ``DataError``."""
        best = self.folder.read_best()
        if best is not None:
            check_best(best, self.folder.best_path)
            if not self.folder.tuning_path.exists():
                logger.warning(
                    "%s is missing: how the winner was found is not on record, and tuning.png "
                    "cannot be drawn; delete best.json to tune again",
                    self.folder.tuning_path,
                )
        return best

    def _of_the_winner(
        self, best: Mapping[str, Any], rows: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """``rows`` without what other hyperparameters made, which would be read as the winner's.

        A repeat's number is its place, so that nothing after the first of those is kept.
        """
        own = list(itertools.takewhile(lambda row: made_with(best, row), rows))
        if len(own) == len(rows):
            return rows
        logger.warning(
            "%s: %d of %d repeats were not made with the hyperparameters of best.json; they are "
            "dropped, and the stage evaluate makes them again",
            self.folder.metrics_path,
            len(rows) - len(own),
            len(rows),
        )
        self.folder.write_metrics(own)
        self.moments = self.moments.first(len(own))
        self.moments.save(self.moments_path)
        (self.folder.path / "evaluation.png").unlink(missing_ok=True)
        return own

    def prepare(self) -> Workbench:
        """The model, its MAP, and what chains are made of."""
        self._stage("model", self.settings.model)
        model: Model = self.model or build(self.cfg.model.posterior, "model.posterior")
        self.console.message(f"{model.num_data:,} training rows, dimension {model.dim:,}")
        if not self._grid_is_open():
            self.settings.tuner.points(model.num_data)  # a batch above the rows is refused here
        self.ledger.data_digests[self.settings.model] = model.digest
        if isinstance(self.parts.reward, PredictiveReward):
            self.parts.reward.check(model)
        if isinstance(self.settings.tuner, GridSettings):
            _check_metric(model, self.settings.tuner.metric)
        with self.ledger.stage("map"):
            estimate = self.find_map(model)
            self.ledger.map = _without_position(estimate)
            if self._grid_is_open():
                self._lay_grid(model, estimate)
        return self.bench_of(model, estimate)

    def _grid_is_open(self) -> bool:
        tuner = self.settings.tuner
        return not isinstance(tuner, FixedSettings) and tuner.grid.is_open

    def _lay_grid(self, model: Model, estimate: MapEstimate) -> None:
        """Fill in what the configuration leaves open of the grid, and say what it is."""
        tuner = self.settings.tuner
        assert not isinstance(tuner, FixedSettings)
        key = jax.random.key(self.settings.map_search.seed)
        scale = adaptive_grid.largest_curvature(model, estimate.position, key)
        grid = tuner.grid
        sizes = grid.step_sizes or adaptive_grid.step_sizes(scale)
        percents = grid.batch_percents or adaptive_grid.batch_percents(model.num_data)
        filled = replace(grid, step_sizes=sizes, batch_percents=percents)
        self.settings = replace(self.settings, tuner=replace(tuner, grid=filled))
        self.console.say(f"grid: {adaptive_grid.describe(scale, sizes, percents)}")

    def bench_of(self, model: Model, estimate: MapEstimate) -> Workbench:
        """What chains of a model that start at its MAP are made of."""
        position = np.asarray(estimate.position)
        if self.settings.sampler.control_variates:
            estimator = gradients.control_variates(model, jax.numpy.asarray(position))
        else:
            estimator = gradients.standard(model)
        tuner, reward = self.settings.tuner, self.parts.reward
        scored = 0 if isinstance(tuner, FixedSettings) else tuner.max_draws
        keeps_gradients = getattr(reward, "gradients", None) == "stochastic"
        return Workbench(
            model=model,
            start=position,
            estimator=estimator,
            sampler=self.parts.sampler,
            scheme=self.parts.scheme,
            noise=self.parts.noise,
            capacity=2 * max(scored, self.settings.evaluation.max_draws),
            keep_gradients=keeps_gradients,
            pace=self.pace,
            block_features=reward.features(model.dim)
            if isinstance(reward, AccumulatedReward)
            else None,
            seconds=self.ledger.seconds,
        )

    def tuning_bench(self, bench: Workbench) -> Workbench:
        """The bench that arms run on: for rewards on predictions, without the rows held out.

        Their MAP is without these rows too.
        """
        reward = self.parts.reward
        if not isinstance(reward, PredictiveReward):
            return bench
        assert isinstance(bench.model, HasHoldOut), f"{bench.model.name} cannot hold rows out"
        part = bench.model.hold_out(reward.hold_out_fraction, reward.hold_out_seed)
        num_held_out = bench.model.num_data - part.num_data
        self.console.message(
            f"{part.num_data:,} training rows for the arms, {num_held_out:,} for the reward"
        )
        return self.bench_of(part, self.find_map(part))

    def find_map(self, model: Model) -> MapEstimate:
        """Where the model's chains start; kept for the runs to come."""
        search = self.settings.map_search
        return cached_map(
            model,
            _map_settings(search),
            seed=search.seed,
            cache_dir=self.settings.results_dir / "map",
            reporter=self.console,
        )

    def tune(self, bench: Workbench) -> dict[str, Any]:
        """Choose the hyperparameters; write ``tuning.csv`` and ``best.json``."""
        tuner = self.settings.tuner
        self._stage("tune", f"{self.settings.sampler.name} by {tuner.name}")
        with self.ledger.stage("tuning"):
            arms_bench = self.tuning_bench(bench)
            tuning = self._search(arms_bench)
        self.store.write_tuning(tuning.records)
        if tuning.winner is None:
            self._draw_tuning(again=True)
            self.ledger.write(finished=True)
            raise NothingUsableError(
                report.all_failed(tuning, self.settings, self.folder.tuning_path)
            )
        num_data, num_arm_data = bench.model.num_data, arms_bench.model.num_data
        # The same share of the rows, where the arms had fewer.
        batch_size = max(1, round(tuning.winner.batch_size * num_data / num_arm_data))
        best = best_of(tuning.winner._replace(batch_size=batch_size), num_data)
        best["budget"] = self.settings.budget
        best |= report.certainty(tuning, self.settings, self.parts.reward)
        self.folder.write_best(best)
        self._draw_tuning(again=True)
        return best

    def _search(self, bench: Workbench) -> Tuning:
        tuner = self.settings.tuner
        arms = [Hyperparameters(*point) for point in tuner.points(bench.model.num_data)]
        if isinstance(tuner, FixedSettings):
            return given.tune(arms[0])
        common: dict[str, Any] = {
            "max_draws": tuner.max_draws,
            "rng_key": self.key_tune,
            "store": self.store,
            "reporter": self.console,
        }
        if isinstance(tuner, GridSettings):
            return grid.tune(
                bench,
                arms,
                num_iterations=tuner.num_iterations,
                noise_scale=tuner.noise_scale,
                metric=tuner.metric,
                check_from_map=tuner.check_from_map,
                **common,
            )
        reward = self.parts.reward
        assert reward is not None
        records = self.folder.read_tuning()
        winner = complete_winner(records, arms, tuner)
        if winner is not None:
            self.console.message("tuning.csv is complete: the winner is taken from it")
            return mamba.finished(
                records, winner.rung + 1, -1.0 if reward.higher_is_better else 1.0
            )
        if _reads_own_gradients(reward) and _is_reshuffled(bench, arms):
            logger.warning(
                "tuner.reward=%s reads the sampler's own gradients, which depend on where the "
                "chain has been under minibatch=reshuffle: what reshuffling gains in accuracy is "
                "not seen. A reward on full gradients sees it, reward@tuner.reward=whitened_ksd",
                reward.name,
            )
        if isinstance(reward, AsksForWhitening):
            bench.whitening = self.whitening_of(bench, reward.whitening)
        return mamba.tune(
            bench,
            reward,
            arms,
            reduction_factor=tuner.reduction_factor,
            longest_arm_s=tuner.longest_arm_s,
            score_on=tuner.score_on,
            guards=self.guards_of(bench) if tuner.guards else None,
            check_s=tuner.check_s,
            keep_ties=tuner.keep_ties,
            **common,
        )

    def guards_of(self, bench: Workbench) -> Guards:
        """Guards that measure by the reward's coordinates, or by the Hessian at the MAP."""
        whitening = bench.whitening
        if whitening is None:
            try:
                whitening = self.whitening_of(bench, "hessian")
            except NothingUsableError as error:
                raise NothingUsableError(
                    f"tuner.guards=true measures by the curvature at the MAP, which is no scale "
                    f"here ({error}); tuner.guards=false runs without"
                ) from error
        return Guards(bench.start, principal_axes(whitening), bench.log_densities)

    def whitening_of(self, bench: Workbench, method: str) -> Whitening:
        """The coordinates of a reward that asks for some, the same for every arm."""
        began_s = time.perf_counter()
        whitening = whitening_at(bench.model, bench.start, method)
        bench.seconds.whitening += time.perf_counter() - began_s
        kind = "diagonal" if whitening.is_diagonal else "dense"
        self.console.message(f"coordinates whitened by the {method} at the MAP, {kind}")
        return whitening

    def ground_truth(self, bench: Workbench, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """NUTS, or its cached result; finished repeats are compared with it.

        With ``ground_truth=auto`` there may be none: it is said why, and not tried again.
        """
        settings = self.settings.ground_truth
        assert settings is not None
        self._stage("ground truth", f"NUTS, {settings.num_draws:,} draws on all rows")
        ours = ("recompute", "max_s")
        asked = {field: value for field, value in vars(settings).items() if field not in ours}
        nuts = NutsSettings(**asked)
        with self.ledger.stage("ground_truth"):
            try:
                if settings.max_s is not None:
                    nuts = self._affordable(bench, nuts, settings.max_s)
                truth = nuts_ground_truth(
                    bench.model,
                    jax.numpy.asarray(bench.start),
                    nuts,
                    cache_dir=self.settings.results_dir / "ground_truth",
                    search_dirs=(COMMITTED_GROUND_TRUTH,),
                    recompute=settings.recompute,
                    reporter=self.console,
                )
            except NothingUsableError as error:
                if settings.max_s is not None:
                    self._skip_truth(str(error))
                    return rows
                raise NothingUsableError(
                    f"{error}; another configuration runs {report.ANOTHER_FOLDER}"
                ) from error
        reference = Reference(np.asarray(truth.std), np.asarray(truth.prediction_std))
        self.moments = replace(self.moments, reference=reference)
        if rows:
            self.moments.save(self.moments_path)
            rows = self.moments.compared(rows)
            self.folder.write_metrics(rows)
        return rows

    def _affordable(self, bench: Workbench, nuts: NutsSettings, max_s: float) -> NutsSettings:
        """The settings NUTS is run with, if it is expected to take at most ``max_s`` seconds."""
        cost = nuts_cost.estimate(bench.model, jax.numpy.asarray(bench.start), nuts)
        self.console.say(f"{cost.describe()}; ground_truth.max_s={max_s:g}")
        earlier = self.settings.replay
        if earlier is not None:
            # What a clock decided there would be decided anew here.
            skipped = artifacts.read_json(earlier / SKIPPED)
            if skipped is not None:
                raise NothingUsableError(str(skipped["reason"]))
        elif cost.seconds > max_s:
            raise NothingUsableError(f"{cost.describe()}, and ground_truth.max_s is {max_s:g}")
        return nuts_cost.settings_for(cost, nuts)

    @property
    def _skipped_path(self) -> Path:
        return self.folder.path / SKIPPED

    def _skip_truth(self, reason: str) -> None:
        logger.warning("the ground truth is skipped: %s", reason)
        artifacts.write_json(self._skipped_path, {"reason": reason})

    def _truth_was_skipped(self) -> bool:
        settings = self.settings.ground_truth
        assert settings is not None
        return settings.max_s is not None and not settings.recompute and self._skipped_path.exists()

    def evaluate(
        self, bench: Workbench, best: Mapping[str, Any], rows: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The repeats that are missing in ``metrics.csv``."""
        settings = self.settings.evaluation
        self._stage("evaluate", f"{settings.num_repeats} x {settings.budget_s:g} s")
        hyperparameters = Hyperparameters(
            float(best["step_size"]), int(best["batch_size"]), int(best["num_integration_steps"])
        )
        names = {
            "model": self.settings.model,
            "sampler": self.settings.sampler.name,
            "tuner": self.settings.tuner.name,
            "seed": self.settings.seed,
        }
        with self.ledger.stage("evaluation"):
            for repeat in range(len(rows), settings.num_repeats):
                result = evaluate(
                    bench,
                    hyperparameters,
                    budget_s=settings.budget_s,
                    max_draws=settings.max_draws,
                    rng_key=repeat_key(self.key_evaluate, repeat),
                    burn_in_fraction=settings.burn_in_fraction,
                    reference=self.moments.reference,
                    reporter=self.console,
                    place=f"repeat {repeat}",
                    curve_points=settings.curve_points,
                    curve_metric=settings.curve_metric,
                )
                self.store.write_steps()
                if settings.curve_points:
                    self.folder.write_curve(repeat, result.curve)
                # Before the row that counts the repeat, so that no row is without its moments.
                self.moments = self.moments.with_repeat(repeat, result)
                self.moments.save(self.moments_path)
                if isinstance(bench.model, HasNamedParameters):
                    write_parameters(self.folder.parameters_path, bench.model, repeat, result.draws)
                row = {**names, "repeat": repeat, **result.row, "budget": self.settings.budget}
                rows = [*rows, row]
                self.folder.write_metrics(rows)
                self.ledger.write()
        return rows

    def close(
        self,
        best: Mapping[str, Any] | None,
        rows: Sequence[Mapping[str, Any]],
        *,
        idle: bool,
        notes: Sequence[str] = (),
    ) -> None:
        """The closing table; an evaluation without a usable repeat is an error."""
        lines: list[tuple[str, str]] = []
        if best is not None:
            lines += report.winner_lines(best, self.settings, self.parts.reward)
        lines += report.metric_lines(rows)
        done = " (finished before; nothing left to do)" if idle else ""
        lines += [("time", duration(self.ledger.elapsed_s) + done)]
        lines += [("replay", note) for note in notes]
        lines += [("written to", str(self.folder.path))]
        note = size_note(self.settings.budget, self.settings.needs_no_size_note)
        title = report.title_of(self.settings)
        self.console.summary(lines, title + (f" ({note})" if note else ""))
        failed = [row for row in rows if row.get("status") != "ok"]
        if rows and len(failed) == len(rows):
            raise NothingUsableError(
                f"no repeat of the evaluation was usable: {failed[0]['status']}, "
                f"{failed[0]['reason']}; see {self.folder.metrics_path}. Other settings run "
                f"{report.ANOTHER_FOLDER}"
            )

    def _lacks_truth(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a row is missing, or was never compared; or all are to be compared anew."""
        settings = self.settings.ground_truth
        assert settings is not None
        wanted = self.settings.evaluation.num_repeats if "evaluate" in self.stages else 1
        usable = [row for row in rows if row["status"] == "ok"]
        compared = all("relative_std_error" in row for row in usable)
        return settings.recompute or len(rows) < wanted or not compared

    def _draw_tuning(self, *, again: bool) -> None:
        if self.pictures:
            report.draw_tuning(self.folder, self.settings, self.parts.reward, again=again)

    def _stage(self, name: str, detail: str) -> None:
        self.stage_number += 1
        self.console.stage(self.stage_number, 1 + len(self.stages), name, detail)


def _check_metric(model: Model, metric: str) -> None:
    """Refuse a grid search for a metric that a user's model has no test part for."""
    start = model.initial_position(jax.random.key(0))
    known = model.predictive_metrics(jax.jit(model.predict)(start, model.test_inputs))
    if metric not in known:
        has = ", ".join(known) or "none: it has no test_data"
        raise ConfigError(
            f"tuner.metric={metric!r}: model {model.name} has no such metric; it has {has}."
        )


def _reads_own_gradients(reward: AnyReward | None) -> bool:
    """Whether a reward is made of the sampler's minibatch gradients."""
    is_stochastic = bool(getattr(reward, "gradients", None) == "stochastic")
    return is_stochastic or isinstance(reward, AccumulatedReward)


def _is_reshuffled(bench: Workbench, arms: Sequence[Hyperparameters]) -> bool:
    """Whether a minibatch depends on those before it, as where the rows have a random order."""
    schemes = (bench.scheme(bench.model.num_data, arm.batch_size) for arm in arms)
    arrangements = [scheme.arrangement for scheme in schemes]
    return any(a is not None and a.order_seed is not None for a in arrangements)


def _map_settings(search: MapSearchSettings) -> MapSettings:
    chosen: dict[str, Any] = {}
    if search.phases is not None:
        chosen["phases"] = tuple(AdamPhase(**vars(phase)) for phase in search.phases)
    if search.max_lbfgs_iterations is not None:
        chosen["max_lbfgs_iterations"] = search.max_lbfgs_iterations
    return MapSettings(**chosen)


def _without_position(estimate: MapEstimate) -> dict[str, Any]:
    """How near the start of the chains is to a mode, for ``provenance.json``."""
    return {name: value for name, value in estimate._asdict().items() if name != "position"}


def complete_winner(
    records: Sequence[ArmRecord], arms: Sequence[Hyperparameters], tuner: MambaSettings
) -> ArmRecord | None:
    """The one arm that the last rung of a finished halving of these ``arms`` promoted.

    ``None`` where ``records`` are of an unfinished halving, or of other arms.
    """
    last = len(halving.schedule(len(arms), tuner.reduction_factor, tuner.longest_arm_s)) - 1
    tried = [r[2:5] for r in sorted(records, key=lambda r: r.arm) if r.rung == 0]
    winners = [record for record in records if record.rung == last and record.promoted]
    return winners[0] if tried == [tuple(arm) for arm in arms] and len(winners) == 1 else None


def _hydra() -> dict[str, Any]:
    """What was typed, for ``.hydra/``; nothing when a configuration was composed by hand."""
    if not HydraConfig.initialized():
        return {}
    node = HydraConfig.get()
    return {
        "overrides": list(node.overrides.task),
        "hydra_config": OmegaConf.to_container(node, resolve=False),
    }
