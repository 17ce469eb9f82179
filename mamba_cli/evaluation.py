"""Evaluation: a fresh chain of the chosen hyperparameters, scored."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mamba_cli import artifacts, metrics
from mamba_cli.chain import Chain, ChainProgram
from mamba_cli.errors import DataError, first_line, is_out_of_memory
from mamba_cli.rewards import ksd
from mamba_cli.tuners.scoring import failure, is_constant
from mamba_cli.types import Array, HasSquaredError, Hyperparameters, Reporter, SilentReporter
from mamba_cli.workbench import Workbench

NO_PREDICTIONS = np.zeros(0)

CURVE_BEGIN = 0.01
"""Of a chain's seconds, where the first point of its curve is."""


class Reference(NamedTuple):
    """Standard deviations of the ground truth."""

    std: np.ndarray  # [dim]
    prediction_std: np.ndarray = NO_PREDICTIONS  # [num_test]; none where positions are identified


def relative_errors(
    std: np.ndarray, prediction_std: np.ndarray, reference: Reference
) -> dict[str, float]:
    """``relative_std_error``, and ``relative_std_error_predictions`` where both sides have some."""
    errors = {"relative_std_error": metrics.relative_std_error(std, reference.std)}
    if prediction_std.size and prediction_std.shape == reference.prediction_std.shape:
        errors["relative_std_error_predictions"] = metrics.relative_std_error(
            prediction_std, reference.prediction_std
        )
    return errors


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one repeat (columns of ``metrics.csv``), the posterior mean and sd it found.

    Both are NaN unless the row's status is ok. ``draws`` ``[num_scored, dim]`` are those that were
    scored, evenly spaced over the chain; none of a chain that failed. ``curve`` has a row for every
    point in time at which the draws so far were scored (columns of ``curve.csv``).
    """

    row: dict[str, Any]
    mean: np.ndarray
    std: np.ndarray
    draws: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    prediction_std: np.ndarray = field(default_factory=lambda: NO_PREDICTIONS)
    curve: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Moments:
    """Posterior means and sds of the repeats, ``[num_repeats, dim]``; NaN where one failed.

    Beside them the sds of the predictions for the test inputs, ``[num_repeats, num_test]``, of a
    model that predicts numbers. They are kept beside ``metrics.csv``, so that a ground truth that
    comes later, or again, is compared with the chains that ran before it.
    """

    mean: np.ndarray
    std: np.ndarray
    prediction_std: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    reference: Reference | None = None

    @classmethod
    def load(cls, path: Path) -> Moments:
        """What is kept at ``path``; no repeats where there is no file, or a damaged one."""
        arrays, _ = artifacts.read_arrays(path) or ({}, {})
        nothing = np.zeros((0, 0))
        std = arrays.get("std", nothing)
        reference = None
        if "reference_std" in arrays:
            of_predictions = arrays.get("reference_prediction_std", NO_PREDICTIONS)
            reference = Reference(arrays["reference_std"], of_predictions)
        return cls(
            arrays.get("mean", nothing),
            std,
            # A file of a version that kept no predictions has as many repeats without any.
            arrays.get("prediction_std", np.zeros((len(std), 0))),
            reference,
        )

    def save(self, path: Path) -> None:
        """Write ``path``. Raises ``StorageError``."""
        arrays = {"mean": self.mean, "std": self.std, "prediction_std": self.prediction_std}
        if self.reference is not None:
            arrays["reference_std"] = self.reference.std
            arrays["reference_prediction_std"] = self.reference.prediction_std
        artifacts.write_arrays(path, arrays, {})

    def with_repeat(self, repeat: int, result: Evaluation) -> Moments:
        """These, with ``result`` as repeat number ``repeat`` and nothing after it."""

        def put(kept: np.ndarray, new: np.ndarray) -> np.ndarray:
            # Of a repeat that failed there are no predictions: its row is as long as the others.
            new = new if len(new) else np.full(kept.shape[1], np.nan)
            table = np.full((repeat + 1, len(new)), np.nan)
            known = kept[:repeat]
            if known.shape[1] == len(new):
                table[: len(known)] = known
            table[repeat] = new
            return table

        return replace(
            self,
            mean=put(self.mean, result.mean),
            std=put(self.std, result.std),
            prediction_std=put(self.prediction_std, result.prediction_std),
        )

    def first(self, num_repeats: int) -> Moments:
        """Those of the first ``num_repeats`` repeats, or of as many as there are."""
        return replace(
            self,
            mean=self.mean[:num_repeats],
            std=self.std[:num_repeats],
            prediction_std=self.prediction_std[:num_repeats],
        )

    def compared(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``rows`` with the relative errors of every usable one that is kept here."""
        assert self.reference is not None
        compared = list(rows)
        kept = zip(rows, self.std, self.prediction_std, strict=False)
        for index, (row, std, prediction_std) in enumerate(kept):
            if row["status"] == "ok" and np.all(np.isfinite(std)):
                errors = relative_errors(std, prediction_std, self.reference)
                compared[index] = {**row, **errors}
        return compared


def evaluate(
    bench: Workbench,
    hyperparameters: Hyperparameters,
    *,
    budget_s: float,
    max_draws: int,
    rng_key: Array,
    burn_in_fraction: float = 0.0,
    reference: Reference | None = None,
    reporter: Reporter | None = None,
    place: str = "evaluation",
    curve_points: int = 0,
    curve_metric: str = "ksd",
) -> Evaluation:
    """Run a chain from the MAP for ``budget_s`` seconds and score it.

    The draws of the first ``burn_in_fraction`` of the seconds are dropped; all that follows
    speaks of the draws after them. Standard deviations are those of *all* draws. KSD (IMQ
    kernel, c = 1, beta = -1/2, gradients over all rows), the posterior predictive and the mean
    squared error of draws are of at most ``max_draws`` draws, evenly spaced over the chain. A
    chain that fails has empty metrics, a status and a reason; so has one for which there is not
    enough memory.

    Parameters
    ----------
    bench
        The model, its start and its compiled chains.
    hyperparameters
        What the tuner chose.
    budget_s
        Seconds of sampling; compilation, gradients and metrics come on top.
    max_draws
        Thinned draws for the discrepancy and the prediction.
    rng_key
        Key of the chain.
    burn_in_fraction
        In [0, 1).
    reference
        The ground truth, if there is one.
    reporter
        Shown the seconds sampled.
    place
        What the chain is called in the pace's ledger of steps.
    curve_points
        Points in time, evenly spaced on a log scale over the last two decades of the seconds, at
        which the draws so far are scored as well; scoring takes none of the chain's seconds.
    curve_metric
        By what: ``ksd``, or a predictive metric of the model.
    """
    reporter = reporter or SilentReporter()
    row = _empty_row(bench, hyperparameters)
    nothing = np.full(bench.model.dim, np.nan)
    curve: list[dict[str, Any]] = []
    try:
        program, _ = bench.program(hyperparameters.batch_size)
        bench.calibrate([hyperparameters])
        chain = program.start(rng_key, bench.start, hyperparameters)
        reporter.start("evaluation", budget_s, "s")
        try:
            burn_in_s = burn_in_fraction * budget_s
            if burn_in_s > 0:
                burn_in = f"{place}, burn-in"
                chain = _sampled(bench, program, chain, burn_in_s, burn_in, reporter)
                if chain.nonfinite_step is None:
                    row |= {"burn_in_s": chain.elapsed_s, "num_burn_in_steps": chain.num_steps}
                    chain = chain.without_draws()
            planned_s = burn_in_s
            for number, end_s in enumerate(curve_times(burn_in_s, budget_s, curve_points)):
                piece_s = bench.pace.left_s(end_s, chain, planned_s)
                piece = f"{place}, point {number}"
                chain = _sampled(bench, program, chain, piece_s, piece, reporter)
                planned_s = end_s
                curve.append(_point(bench, chain, max_draws, curve_metric))
                if chain.nonfinite_step is not None:
                    break
            if not curve_points:
                left_s = bench.pace.left_s(budget_s, chain, burn_in_s)
                chain = _sampled(bench, program, chain, left_s, place, reporter)
        finally:
            reporter.finish()
        chain = chain.compact()
        row |= {
            "num_samples": chain.num_draws,
            "elapsed_s": chain.elapsed_s,
            "num_steps": chain.num_steps,
        }
        row |= _scored(bench, chain, max_draws)
        if chain.nonfinite_step is not None and row["num_burn_in_steps"]:
            row["reason"] += f" after {row['num_burn_in_steps']} steps of burn-in"
        if row["status"] != "ok":
            return Evaluation(row, nothing, nothing, curve=tuple(curve))
        draws = chain.thinned(max_draws)[0]
        prediction_std = NO_PREDICTIONS
        if isinstance(bench.model, HasSquaredError):
            prediction_std = bench.predictive_std(draws)
        if reference is not None:
            row |= relative_errors(chain.std, prediction_std, reference)
        return Evaluation(row, chain.mean, chain.std, draws, prediction_std, tuple(curve))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failed = {"status": "out_of_memory", "reason": first_line(error)}
        return Evaluation(row | failed, nothing, nothing, curve=tuple(curve))


def curve_times(begin_s: float, end_s: float, num_points: int) -> list[float]:
    """Points in time after ``begin_s``, from a hundredth of what is left to ``end_s``.

    Evenly spaced on a log scale; a single point is the end.
    """
    if num_points < 2:
        return [end_s] * num_points
    shares = np.geomspace(CURVE_BEGIN, 1.0, num_points)
    return [begin_s + (end_s - begin_s) * float(share) for share in shares]


def _point(bench: Workbench, chain: Chain, max_draws: int, metric: str) -> dict[str, Any]:
    """One row of the curve: the draws of the chain so far, scored."""
    row: dict[str, Any] = {
        "elapsed_s": chain.elapsed_s,
        "num_samples": chain.num_draws,
        "num_scored": 0,
        "metric": metric,
    }
    failed = failure(chain)
    if failed is not None:
        return row | {"status": failed[0], "reason": failed[1]}
    positions, _ = chain.thinned(max_draws)
    began = bench.clock()
    if metric == "ksd":
        value = ksd(positions, bench.scores(positions))
    else:
        value = float(bench.model.predictive_metrics(bench.posterior_predictive(positions))[metric])
    bench.seconds.reward += bench.clock() - began
    row |= {"num_scored": len(positions), "value": value}
    if not math.isfinite(value):
        return row | {"status": "diverged", "reason": f"{metric} is {value}"}
    return row | {"status": "ok", "reason": ""}


def _sampled(
    bench: Workbench,
    program: ChainProgram,
    chain: Chain,
    seconds: float,
    place: str,
    reporter: Reporter,
) -> Chain:
    """``chain`` continued by ``seconds``, or up to where it diverged."""
    began_s = chain.elapsed_s
    chain = bench.pace.run(program, chain, seconds, place, bench.clock, reporter.update)
    bench.seconds.sampling += chain.elapsed_s - began_s
    return chain


def _empty_row(bench: Workbench, hyperparameters: Hyperparameters) -> dict[str, Any]:
    return {
        "step_size": hyperparameters.step_size,
        "log10_step_size": math.log10(hyperparameters.step_size),
        "batch_size": hyperparameters.batch_size,
        "batch_percent": 100 * hyperparameters.batch_size / bench.model.num_data,
        "num_integration_steps": hyperparameters.num_integration_steps,
        "num_samples": 0,
        "elapsed_s": 0.0,
        "num_steps": 0,
        "num_scored": 0,
        "burn_in_s": 0.0,
        "num_burn_in_steps": 0,
    }


def _scored(bench: Workbench, chain: Chain, max_draws: int) -> dict[str, Any]:
    """The metrics of a chain and its status."""
    failed = failure(chain)
    if failed is not None:
        return {"status": failed[0], "reason": failed[1]}
    positions, _ = chain.thinned(max_draws)
    if is_constant(positions):
        return {"status": "frozen", "reason": "all draws are equal"}
    began = bench.clock()
    scores = bench.scores(positions)
    gradients_s = bench.clock() - began
    row: dict[str, Any] = {"ksd": ksd(positions, scores)}
    row |= bench.model.predictive_metrics(bench.posterior_predictive(positions))
    mse_of_draws = bench.mse_of_draws(positions)
    if mse_of_draws is not None:
        row["mse_of_draws"] = mse_of_draws
    bench.seconds.gradients += gradients_s
    bench.seconds.reward += bench.clock() - began - gradients_s
    row["num_scored"] = len(positions)
    if not math.isfinite(row["ksd"]):
        return row | {"status": "diverged", "reason": f"KSD is {row['ksd']}"}
    return row | {"status": "ok", "reason": ""}


def best_of(record: Any, num_data: int) -> dict[str, Any]:
    """The content of ``best.json`` for a winning :class:`~mamba_cli.types.ArmRecord`."""
    return {
        "arm": record.arm,
        "step_size": record.step_size,
        "batch_size": record.batch_size,
        "batch_percent": 100 * record.batch_size / num_data,
        "num_integration_steps": record.num_integration_steps,
        "reward": record.reward if math.isfinite(record.reward) else None,
        "status": record.status,
    }


def made_with(best: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row of ``metrics.csv`` is of the hyperparameters of ``best.json``."""
    return all(
        row.get(key) is not None and math.isclose(float(row[key]), best[key], rel_tol=1e-9)
        for key in ("step_size", "batch_size", "num_integration_steps")
    )


def check_best(best: Mapping[str, Any], path: Path, num_data: int | None = None) -> None:
    """Refuse a ``best.json`` that a chain could not be run with.

    Parameters
    ----------
    best
        The content of the file.
    path
        Where it lies, for the message.
    num_data
        Rows of the model's training data, where they are known: no batch is larger.

    Raises
    ------
    DataError
        A key is missing, or its value is not one that ``best_of`` writes.
    """
    rows = math.inf if num_data is None else num_data
    most = "" if num_data is None else f" and at most {num_data:,} (the training rows)"
    whole = "a whole number, at least 1"
    allowed: dict[str, tuple[bool, float, float, str]] = {
        "arm": (True, 0, math.inf, "a whole number, at least 0"),
        "step_size": (False, math.ulp(0.0), sys.float_info.max, "a finite number above 0"),
        "batch_size": (True, 1, rows, whole + most),
        "batch_percent": (False, math.ulp(0.0), 100, "a number above 0 and at most 100"),
        "num_integration_steps": (True, 1, math.inf, whole),
    }
    if best.get("reward") is not None:  # that of hyperparameters that were not searched is null
        largest = sys.float_info.max
        allowed["reward"] = (False, -largest, largest, "a finite number, or null")
    for key, (is_whole, low, high, expected) in allowed.items():
        value = best.get(key)
        kinds = (int,) if is_whole else (int, float)
        if isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high:
            continue
        found = f"{key}={json.dumps(value)}" if key in best else f"no {key}"
        raise DataError(
            f"cannot use {path}: found {found}, expected {expected}; delete it: the same command "
            f"tunes again"
        )


def repeat_key(rng_key: Array, repeat: int) -> Array:
    """Key of one repeat of the evaluation."""
    return jax.random.fold_in(rng_key, repeat)
