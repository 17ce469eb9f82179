"""What a person is shown of a run: its closing table, its pictures, why nothing was usable."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mamba_cli import plots, theory
from mamba_cli.artifacts import RunFolder
from mamba_cli.config import FixedSettings, GridSettings, MambaSettings, RunSettings
from mamba_cli.console import size_note
from mamba_cli.evaluation import Moments
from mamba_cli.metrics import HIGHER_IS_BETTER
from mamba_cli.tuners import halving
from mamba_cli.tuners.confidence import arms_of_best_set
from mamba_cli.tuners.result import Tuning
from mamba_cli.types import AnyReward

logger = logging.getLogger(__name__)

ANOTHER_FOLDER = "with another run_dir=, or after deleting the folder"
"""How a changed configuration is run: a folder with results refuses any but its own."""

_WORDS = {
    "diverged": "diverged",
    "frozen": "did not move",
    "no_draws": "made too few draws",
    "out_of_memory": "ran out of memory",
}
"""What became of an arm of each status."""

_ADVICE = {
    "diverged": "smaller step sizes",
    "frozen": "larger step sizes",
    "no_draws": "a larger tuner.longest_arm_s",
    "out_of_memory": "smaller batches or a smaller tuner.max_draws",
}
"""What makes arms usable that failed with each status."""

LARGE_ERROR = 0.5
"""A relative error of the posterior standard deviations that is pointed out."""

_SHOWN = {
    "ksd": ("KSD", "{:.4g}", 1.0),
    "relative_std_error": ("relative sd error", "{:.2f} %", 100.0),
    "relative_std_error_predictions": ("the same of predictions", "{:.2f} %", 100.0),
    "accuracy": ("test accuracy", "{:.2f} %", 100.0),
    "rmse": ("test RMSE", "{:.4f}", 1.0),
    "mse_of_draws": ("mean squared error of draws", "{:.4f}", 1.0),
    "ece": ("ECE", "{:.2f} %", 100.0),
    "mce": ("MCE", "{:.2f} %", 100.0),
    "num_samples": ("samples", "{:,.0f}", 1.0),
}


def title_of(settings: RunSettings) -> str:
    """The run in one line."""
    model, sampler, tuner = settings.model, settings.sampler.name, settings.tuner.name
    return f"{model}, {sampler}, {tuner}, seed {settings.seed}"


def all_failed(tuning: Tuning, settings: RunSettings, path: Path) -> str:
    """The message of a tuning without a winner, whose table is at ``path``."""
    advice_for = dict(_ADVICE)
    if isinstance(settings.tuner, GridSettings):
        advice_for["no_draws"] = "a larger tuner.num_iterations"
    last = {record.arm: record for record in tuning.records}
    failed = [record for record in last.values() if record.status != "ok"]
    counts = Counter(record.status for record in failed)
    listed = ", ".join(f"{counts[s]} {_words(s)}" for s in sorted(counts))
    advice = " and ".join(advice_for.get(s, "a larger budget") for s in sorted(counts))
    example = failed[0]
    return (
        f"no arm was usable (of {len(last)}: {listed}), so there is no winner; for example "
        f"h={example.step_size:g}, n={example.batch_size}: {example.reason}. Every arm and its "
        f"reason stand in {path}; try {advice}, {ANOTHER_FOLDER}"
    )


def _words(status: str) -> str:
    return _WORDS.get(status, status.replace("_", " "))


def winner_lines(
    best: Mapping[str, Any], settings: RunSettings, reward: AnyReward | None
) -> list[tuple[str, str]]:
    """The rows of the closing table that name the winner; whether it is at an end of the grid."""
    tuner = settings.tuner
    length = int(best["num_integration_steps"])
    lines = [
        ("step size h", f"{best['step_size']:.4g} (10^{np.log10(best['step_size']):.2f})"),
        ("batch size n", f"{best['batch_size']:,} ({best['batch_percent']:g} %)"),
    ]
    if length > 1:
        lines.append(("integration steps L", str(length)))
    if best.get("reward") is not None:
        metric = tuner.metric if isinstance(tuner, GridSettings) else "metric"
        name = reward.name if reward else metric
        error = best.get("reward_std_error")
        noise = "" if error is None else f" +- {float(f'{error:.2g}'):.6g}"
        lines.append((f"reward ({name})", f"{best['reward']:.4g}{noise}"))
    lines += certainty_lines(best)
    steps = () if isinstance(tuner, FixedSettings) else tuner.grid.step_sizes or ()
    if len(steps) > 1:
        for end, step_size in (("smallest", min(steps)), ("largest", max(steps))):
            if math.isclose(best["step_size"], step_size, rel_tol=1e-9):
                lines.append(("note", f"the step size is the {end} of the grid"))
    return lines


def certainty(tuning: Tuning, settings: RunSettings, reward: AnyReward | None) -> dict[str, Any]:
    """What ``best.json`` says of how sure the winner is; nothing where no reward has an error.

    ``reward_std_error``; ``best_set``, the arms that contain the best with 95 % confidence; and
    ``theorem_1``, the theorem evaluated on the run's own estimates, see ``theory.problem_of``.
    """
    tuner = settings.tuner
    if reward is None or tuning.winner is None or not isinstance(tuner, MambaSettings):
        return {}
    if not math.isfinite(tuning.winner.reward_std_error):
        return {}
    sign = -1.0 if reward.higher_is_better else 1.0
    last = {record.arm: record for record in tuning.records}
    members = [last[arm] for arm in arms_of_best_set(tuning.records, sign)]
    columns = ("arm", "step_size", "batch_size", "num_integration_steps")
    problem = theory.problem_of(tuning.records, tuning.winner, sign)
    num_arms, eta = len(last), tuner.reduction_factor
    rungs = halving.schedule(num_arms, eta, tuner.longest_arm_s)
    common: dict[str, Any] = {"sigma": problem.sigma, "gaps": problem.gaps}
    continued = tuner.score_on == "chain"
    estimates = {
        "sigma": problem.sigma,
        "h2": problem.h2,
        "error_bound": theory.error_bound(rungs, **common, continued=continued),
        "budget_s_for_5_percent": theory.budget_for(0.05, num_arms, eta, **common),
    }
    return {
        "reward_std_error": tuning.winner.reward_std_error,
        "best_set": [{name: getattr(record, name) for name in columns} for record in members],
        "theorem_1": {k: v if math.isfinite(v) else None for k, v in estimates.items()},
    }


def certainty_lines(best: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of the closing table that say how sure the winner is."""
    members = best.get("best_set")
    if not members:
        return []
    if len(members) == 1:
        return [("best with 95 %", "this arm alone")]
    ranges = [f"{len(members)} arms"]
    for name, letter, form in (
        ("step_size", "h", ".3g"),
        ("batch_size", "n", ","),
        ("num_integration_steps", "L", ""),
    ):
        values = [member[name] for member in members]
        if max(values) > min(values):
            ranges.append(f"{letter} {min(values):{form}} to {max(values):{form}}")
    return [("best with 95 %", "one of " + ", ".join(ranges))]


def metric_lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
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
    errors = [float(row.get("relative_std_error", 0.0)) for row in usable]
    if max(errors, default=0.0) > LARGE_ERROR:
        far = f"the posterior sds are {100 * max(errors):.0f} % off those of NUTS"
        lines.append(("note", far + (" in the worst repeat" if len(usable) > 1 else "")))
    if len(usable) < len(rows):
        lines.append(("failed repeats", f"{len(rows) - len(usable)} of {len(rows)}"))
    return lines


def draw_tuning(
    folder: RunFolder, settings: RunSettings, reward: AnyReward | None, *, again: bool
) -> None:
    """``tuning.png`` from ``tuning.csv``; nothing for hyperparameters that were not searched.

    A picture that is there is drawn ``again`` only where its numbers are new.
    """
    tuner, records = settings.tuner, folder.read_tuning()
    if not records or isinstance(tuner, FixedSettings):
        return
    best = folder.read_best()
    common: dict[str, Any] = {
        "title": title_of(settings),
        "note": size_note(settings.budget, settings.needs_no_size_note),
        "winner": None if best is None else int(best["arm"]),
    }

    def draw(path: Path) -> None:
        if isinstance(tuner, GridSettings):
            common["reward_name"] = tuner.metric
            common["higher_is_better"] = tuner.metric in HIGHER_IS_BETTER
            plots.search_picture(records, path_or_buffer=path, **common)
        else:
            assert reward is not None
            common["reward_name"] = reward.name
            common["higher_is_better"] = reward.higher_is_better
            plots.halving_picture(records, path_or_buffer=path, **common)

    _draw(folder.path / "tuning.png", draw, again)


def draw_evaluation(
    folder: RunFolder,
    settings: RunSettings,
    moments: Moments,
    rows: Sequence[Mapping[str, Any]],
    *,
    again: bool,
) -> None:
    """``evaluation.png``: the repeats against the ground truth, or alone where there is none."""
    if not len(moments.std):
        return
    usable = np.all(np.isfinite(moments.std), axis=1)
    title, note = title_of(settings), size_note(settings.budget, settings.needs_no_size_note)

    def draw(path: Path) -> None:
        if moments.reference is None or not usable.any():
            failed = [row for row in rows if row.get("status") != "ok"]
            plots.posterior_picture(
                moments.mean,
                moments.std,
                path,
                title=f"{title}: posterior",
                note=note,
                reason=f"{_words(failed[0]['status'])}: {failed[0]['reason']}" if failed else "",
            )
        else:
            plots.evaluation_picture(
                moments.reference.std,
                moments.std[usable],
                None,
                path,
                title=f"{title}: posterior standard deviations",
                note=note,
            )

    _draw(folder.path / "evaluation.png", draw, again)


def _draw(path: Path, draw: Callable[[Path], None], again: bool) -> None:
    """Draw a picture that is missing, or ``again``; a fault there costs no result."""
    if path.exists() and not again:
        return
    try:
        draw(path)
    except Exception as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # an earlier one would show other numbers
        logger.warning(
            "%s could not be drawn (%s: %s); the numbers are kept, and the same command draws a "
            "missing picture",
            path,
            type(error).__name__,
            error,
        )
