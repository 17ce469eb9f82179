"""The paper's nine tables, from the folders of finished runs.

Each as ``<label>.csv`` in the paper's rows and columns, ``<label>_long.csv`` with a row for every
number (mean and sd over repeats, and each repeat), and ``<label>.md`` for a reader.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from experiments.paper.cells import (
    AS_PUBLISHED,
    SAMPLERS,
    STUDIES,
    Cell,
    Scale,
    State,
    metrics_of,
    shown,
    study_of,
)
from experiments.paper.schedule import reason_of
from mamba_cli.artifacts import atomic_write, read_json, read_tuning, write_table
from mamba_cli.errors import DataError, first_line

SIGNIFICANCE = 0.05
"""Of the one-sided Welch test by which the best tuner has to beat every other one."""

CHAIN_FAILURES = ("diverged", "frozen", "no winner")
"""How the note of a run begins that was made and has no number for it: a result, and a bad one."""

IN_README = "LR_std_estimates"
"""The table that README.md shows, between these two lines."""

BEGIN = f"<!-- {IN_README}: written by make tables -->"
END = f"<!-- End of {IN_README} -->"

LARGE = 1e6
"""Numbers as large are those of chains that went far astray."""

LONG_COLUMNS = (
    "sampler",
    "tuner",
    "metric",
    "mean",
    "sd",
    "repeats",
    "usable",
    "is_best",
    "values",
    "note",
)


class Metric(NamedTuple):
    """A row of a table: where its number is in a run's files, and how it is shown."""

    name: str
    column: str
    heading: str
    factor: float = 1.0
    lower_is_better: bool | None = True  # None: neither
    shown_as: str = "{:.3g}"


METRICS = {
    metric.name: metric
    for metric in (
        Metric("ksd", "ksd", "KSD", shown_as="{:.4g}"),
        Metric(
            "relative_std_error_percent",
            "relative_std_error",
            "ξ(σ̂) × 10²",
            100.0,
            shown_as="{:.1f}",
        ),
        Metric("accuracy_percent", "accuracy", "accuracy (%)", 100.0, False, "{:.2f}"),
        Metric("num_samples", "num_samples", "# of samples", 1.0, None, "{:,.0f}"),
        Metric("rmse", "rmse", "RMSE", shown_as="{:.3f}"),
        Metric("mse_of_draws", "mse_of_draws", "MSE of draws", shown_as="{:.3f}"),
        Metric("ece_percent", "ece", "ECE (%)", 100.0, shown_as="{:.2f}"),
        Metric("mce_percent", "mce", "MCE (%)", 100.0, shown_as="{:.1f}"),
        Metric("log10_step_size", "step_size", "log₁₀(h)", 1.0, None, "{:.2f}"),
        Metric("batch_percent", "batch_percent", "τ (%)", 1.0, None),
        Metric("num_integration_steps", "num_integration_steps", "L", 1.0, None, "{:.0f}"),
    )
}

HYPERPARAMETERS = ("log10_step_size", "batch_percent", "num_integration_steps")

ROWS: dict[str, tuple[str, ...]] = {
    "LR_std_estimates": ("ksd", "relative_std_error_percent"),
    "LR_hyperparameters": HYPERPARAMETERS,
    "LR_std_estimates_full": (
        "relative_std_error_percent",
        "ksd",
        "accuracy_percent",
        "num_samples",
    ),
    AS_PUBLISHED: (
        "ksd",
        "relative_std_error_percent",
        "num_samples",
        *HYPERPARAMETERS,
    ),
    "PMF_uncertainty_tests": ("ksd", "relative_std_error_percent"),
    "PMF_hyperparameters": HYPERPARAMETERS,
    "PMF_uncertainty_tests_full": (
        "relative_std_error_percent",
        "ksd",
        "rmse",
        "mse_of_draws",
        "num_samples",
    ),
    "NN_uncertainty_tests": ("ece_percent", "mce_percent"),
    "NN_hyperparameters": HYPERPARAMETERS,
    "NN_uncertainty_tests_full": (
        "ece_percent",
        "mce_percent",
        "accuracy_percent",
        "num_samples",
    ),
}
"""Metrics of every table, in the paper's order. ``mse_of_draws`` is what the paper calls RMSE."""

SAMPLER_NAMES = {name: name.upper().replace("_", "-") for name in SAMPLERS}
TUNER_NAMES = {
    "mamba_ksd": "MAMBA-KSD",
    "mamba_fssd": "MAMBA-FSSD",
    "grid": "Grid search",
    "heuristic": "Heuristic",
}


class Summary(NamedTuple):
    """A number of a table over its repeats. ``note`` says why one has none."""

    values: tuple[float, ...]
    repeats: int
    note: str = ""
    is_best: bool = False

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """Of one repeat; ``None`` where there are fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


class Sample(NamedTuple):
    """What a test of two means asks of each: the sample sd and how many numbers."""

    mean: float
    sd: float
    count: int


Place = tuple[str, str, str]  # sampler, tuner, metric


NOT_RUN = "not run yet"

_states: dict[tuple[object, ...], tuple[State, str]] = {}


def _state_of(cell: Cell, scale: Scale) -> tuple[State, str]:
    """A cell's state, kept while its files stay as they are: a table asks for it many times."""
    files = [cell.folder(scale) / "provenance.json"]
    if cell.rescores is not None:
        files += [c.folder(scale) / "steps.json" for c in (cell, cell.rescores)]
    key = (*cell.overrides(scale), *(f.stat().st_mtime_ns if f.exists() else 0 for f in files))
    if key not in _states:
        _states[key] = cell.state(scale)
    return _states[key]


def why_not_shown(cell: Cell, scale: Scale) -> str:
    """Why what is in a cell's folder cannot be shown; empty where it can. Raises ``DataError``."""
    state, why = _state_of(cell, scale)
    if state is State.DONE:
        return ""
    reason = reason_of(cell.folder(scale))
    if reason or state in (State.MISSING, State.UNFINISHED):
        return reason or NOT_RUN
    return f"{'made otherwise' if state is State.CHANGED else state.value}: {why}"


def values_of(cell: Cell, metric: str, scale: Scale) -> tuple[list[float], str]:
    """The numbers that a run has of a metric, and why it has none."""
    try:
        why = why_not_shown(cell, scale)
        return ([], why) if why else _values_in(cell.folder(scale), metric)
    except DataError as error:
        return [], f"damaged: {first_line(error).partition(';')[0]}"


def _values_in(folder: Path, metric: str) -> tuple[list[float], str]:
    best = read_json(folder / "best.json")
    if best is None:
        arms = read_tuning(folder / "tuning.csv")
        if any(arm.status == "no_draws" for arm in arms if arm.rung == arms[-1].rung):
            return [], "no usable arm: some were too slow to make two draws"
        return [], "no winner: every arm failed"
    if metric in HYPERPARAMETERS:
        value = float(best[METRICS[metric].column])
        return [math.log10(value) if metric == "log10_step_size" else value], ""
    rows = metrics_of(folder)
    usable = [row for row in rows if row["status"] == "ok"]
    column, factor = METRICS[metric].column, METRICS[metric].factor
    found = [factor * float(row[column]) for row in usable if row.get(column) is not None]
    if found or not rows:
        return found, ""
    if usable:
        return [], "no ground truth" if column == "relative_std_error" else "no such number"
    return [], f"{rows[0]['status']}: {rows[0]['reason']}"


def summary_of(label: str, sampler: str, tuner: str, metric: str, scale: Scale) -> Summary:
    """A number of the runs that a table shows; of a metric that it does not show, too."""
    cells = [c for c in shown(label, scale) if (c.sampler, c.tuner) == (sampler, tuner)]
    return summary_of_runs(cells, metric, scale)


def summary_of_runs(cells: Sequence[Cell], metric: str, scale: Scale) -> Summary:
    """A metric over runs that are repeats of one another."""
    pairs = [values_of(cell, metric, scale) for cell in cells]
    values = tuple(value for numbers, _ in pairs for value in numbers)
    notes = dict.fromkeys(note for _, note in pairs if note)
    return Summary(values, len(cells), "; ".join(notes))


def summaries(label: str, scale: Scale) -> dict[Place, Summary]:
    """Every number of a table, the best of each sampler marked where it is beyond the noise."""
    found: dict[Place, Summary] = {}
    for metric in ROWS[label]:
        for sampler in SAMPLERS:
            if metric == "num_integration_steps" and not sampler.startswith("sghmc"):
                continue
            for tuner in study_of(label).tuners:
                found[sampler, tuner, metric] = summary_of(label, sampler, tuner, metric, scale)
    return mark_best(found)


def mark_best(found: Mapping[Place, Summary]) -> dict[Place, Summary]:
    """``found`` with the best tuner of each sampler and metric marked, where there is one.

    It has the best mean, and beats every other tuner. Without repeats the noise is not known, and
    nothing is marked.
    """
    marked = dict(found)
    for sampler, metric in dict.fromkeys((s, m) for s, _, m in found):
        lower = METRICS[metric].lower_is_better
        if lower is None:
            continue
        rivals = {t: summary for (s, t, m), summary in found.items() if (s, m) == (sampler, metric)}
        usable = {tuner: summary for tuner, summary in rivals.items() if summary.values}
        if not usable:
            continue
        sign = 1.0 if lower else -1.0
        best = min(usable, key=lambda tuner: sign * (usable[tuner].mean or 0.0))
        others = [summary for tuner, summary in rivals.items() if tuner != best]
        if len(usable[best].values) > 1 and all(beats(usable[best], o, lower) for o in others):
            place = (sampler, best, metric)
            marked[place] = marked[place]._replace(is_best=True)
    return marked


def chains_failed(summary: Summary) -> bool:
    """Whether there is no number since the chain of every run failed, and for no other reason."""
    notes = summary.note.split("; ")
    return not summary.values and all(note.startswith(CHAIN_FAILURES) for note in notes)


def failures_of(summary: Summary) -> int:
    """How many runs have no number since their chain failed; where others lack it too, at least."""
    failed = [note.startswith(CHAIN_FAILURES) for note in summary.note.split("; ")]
    return summary.repeats - len(summary.values) if all(failed) else int(any(failed))


def beats(first: Summary, second: Summary, lower_is_better: bool) -> bool:
    """Whether the first is better beyond the noise, or has numbers and the other's chains failed.

    One that failed in some of its runs beats nothing, since what is left of it has been chosen by
    its luck. A run that is still to be made says nothing for or against.
    """
    if not first.values or failures_of(first):
        return False
    return chains_failed(second) or is_better(first, second, lower_is_better)


def is_better(first: Summary, second: Summary, lower_is_better: bool) -> bool:
    """Whether the first mean is better by more than the noise of both."""
    if first.sd is None or second.sd is None or first.mean is None or second.mean is None:
        return False
    own = Sample(first.mean, first.sd, len(first.values))
    other = Sample(second.mean, second.sd, len(second.values))
    return is_lower(own, other) if lower_is_better else is_lower(other, own)


def is_lower(first: Sample, second: Sample) -> bool:
    """Whether the first mean is lower by more than the noise of both: Welch's test, one-sided."""
    if first.sd == second.sd == 0:
        return first.mean < second.mean
    test = stats.ttest_ind_from_stats(*first, *second, equal_var=False, alternative="less")
    return bool(test.pvalue < SIGNIFICANCE)


def write(label: str, scale: Scale) -> list[str]:
    """Write the three files of a table; the lines of what it lacks. Raises ``StorageError``."""
    found = summaries(label, scale)
    folder = scale.root / "tables"
    long = [
        {
            "sampler": sampler,
            "tuner": tuner,
            "metric": metric,
            "mean": summary.mean,
            "sd": summary.sd,
            "repeats": summary.repeats,
            "usable": len(summary.values),
            "is_best": summary.is_best,
            "values": " ".join(f"{value:.8g}" for value in summary.values),
            "note": summary.note,
        }
        for (sampler, tuner, metric), summary in found.items()
    ]
    write_table(folder / f"{label}_long.csv", LONG_COLUMNS, long)
    header, rows = laid_out(label, found)
    table = [dict(zip(header, row, strict=True)) for row in rows]
    write_table(folder / f"{label}.csv", header, table)
    text = markdown(label, scale, header, rows, found)
    atomic_write(folder / f"{label}.md", text.encode())
    return lacking(found)


def body(label: str, scale: Scale) -> str:
    """A written table without its heading."""
    text = (scale.root / "tables" / f"{label}.md").read_text(encoding="utf-8")
    return text.partition("\n")[2].strip()


def lacking(found: Mapping[Place, Summary]) -> list[str]:
    """Why numbers of a table are missing: for each reason, of which tuners and in how many runs."""
    missing: dict[str, dict[str, None]] = {}
    for (sampler, tuner, _), summary in found.items():
        if summary.note:
            count = f"{summary.repeats - len(summary.values)} of {summary.repeats}"
            who = f"{SAMPLER_NAMES[sampler]}, {TUNER_NAMES[tuner]} ({count})"
            missing.setdefault(summary.note, {})[who] = None
    return [f"{note}: {'; '.join(who)}" for note, who in missing.items()]


def laid_out(label: str, found: Mapping[Place, Summary]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as the paper has them; text, since a cell may be ``diverged``.

    Tables of results in short have tuners down and samplers across, the others samplers down.
    """
    tuners = study_of(label).tuners
    samplers_across = label == study_of(label).tables[0]
    down, across = (tuners, SAMPLERS) if samplers_across else (SAMPLERS, tuners)
    header = ["tuner" if samplers_across else "sampler", "metric", *across]
    rows = []
    for first in down:
        for metric in ROWS[label]:
            places = [(b, first, metric) if samplers_across else (first, b, metric) for b in across]
            if any(place in found for place in places):
                rows.append([first, metric, *(cell_text(found[p], metric) for p in places)])
    return header, rows


def cell_text(summary: Summary, metric: str) -> str:
    """``mean ± sd``, with how many repeats had a number where not all; a choice as it is."""
    shown_as = METRICS[metric].shown_as
    if not summary.values:
        return summary.note.partition(":")[0] or "-"
    if metric in HYPERPARAMETERS:
        texts = [shown_as.format(value) for value in summary.values]
        text = texts[0] if len(set(texts)) == 1 else " / ".join(texts)
    else:
        text = number_text(summary.mean, shown_as)
        if summary.sd is not None:
            is_large = abs(summary.mean or 0.0) >= LARGE
            text += f" ± {f'{summary.sd:.2g}' if is_large else number_text(summary.sd, shown_as)}"
    return text + count_text(len(summary.values), summary.repeats)


def count_text(usable: int, repeats: int) -> str:
    """How many repeats a number is of, where not of all."""
    return f" ({usable} of {repeats})" if usable < repeats else ""


def number_text(value: float | None, shown_as: str) -> str:
    """As the metric is shown; what is beyond a table's width, with three digits."""
    return f"{value:.3g}" if abs(value or 0.0) >= LARGE else shown_as.format(value)


def markdown(
    label: str,
    scale: Scale,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    found: Mapping[Place, Summary],
) -> str:
    """The table for a reader."""
    names = {**SAMPLER_NAMES, **TUNER_NAMES}
    best = {place for place, summary in found.items() if summary.is_best}
    samplers_across = header[0] == "tuner"
    lines = [f"# {label}", ""]
    if scale.note:
        lines += [f"**{scale.note}**", ""]
    lines += [
        "| " + " | ".join(["", "", *(names[name] for name in header[2:])]) + " |",
        "| --- | --- |" + " ---: |" * len(header[2:]),
    ]
    for first, metric, *cells in rows:
        places = [
            (second, first, metric) if samplers_across else (first, second, metric)
            for second in header[2:]
        ]
        bold = [f"**{c}**" if p in best else c for c, p in zip(cells, places, strict=True)]
        lines.append(f"| {names[first]} | {METRICS[metric].heading} | " + " | ".join(bold) + " |")
    repeats = max(summary.repeats for summary in found.values())
    notes = [f"Mean ± sd over {repeats} runs with seeds of their own."]
    if repeats == 1:
        notes = ["One run of each: the noise is not known, and nothing is marked as best."]
    elif label not in _hyperparameter_tables():
        notes.append(
            "Bold: better than every other tuner of the sampler, by a one-sided Welch test at "
            f"{100 * SIGNIFICANCE:g} % or because all chains of the other failed."
        )
    if label in _hyperparameter_tables():
        chose = "What the run chose." if repeats == 1 else f"What each of {repeats} runs chose"
        chose += "" if repeats == 1 else ", once where all chose the same."
        notes = [f"{chose} h is the paper's."]
    lines += ["", " ".join(notes)]
    why = lacking(found)
    lines += ["", *(f"* {reason}" for reason in why)] if why else []
    return "\n".join(lines) + "\n"


def _hyperparameter_tables() -> list[str]:
    return [study.tables[1] for study in STUDIES.values()]
