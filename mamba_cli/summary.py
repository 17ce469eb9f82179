"""The console script ``mamba-summary``: any set of runs as one table and one picture.

Gathers every folder below those given that holds a ``metrics.csv``; the table has one row a run,
the mean over its repeats. It is printed, and written to ``summary.csv`` and ``summary.png``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamba_cli.errors import DataError, MambaError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "model",
    "sampler",
    "tuner",
    "seed",
    "budget",
    "step_size",
    "batch_percent",
    "num_integration_steps",
    "ksd",
    "relative_std_error",
    "accuracy",
    "rmse",
    "log_loss",
    "ece",
    "num_samples",
    "repeats",
    "usable",
    "status",
    "run",
)
"""Of ``summary.csv``. ``repeats`` were evaluated, ``usable`` of them went into the means."""

_AVERAGED = (
    "ksd",
    "relative_std_error",
    "accuracy",
    "rmse",
    "log_loss",
    "ece",
    "num_samples",
)

MEASURES = {
    "relative_std_error": "relative error of the posterior sds",
    "rmse": "test RMSE",
    "log_loss": "test log loss",
    "accuracy": "test accuracy",
    "ksd": "KSD",
}
"""What the picture shows, the first that the runs have, in the order of preference."""

_PRINTED = {
    "model": "{}",
    "sampler": "{}",
    "tuner": "{}",
    "seed": "{}",
    "step_size": "{:.3g}",
    "batch_percent": "{:.3g} %",
    "ksd": "{:.4g}",
    "relative_std_error": "{:.4g}",
    "accuracy": "{:.4f}",
    "rmse": "{:.4f}",
    "log_loss": "{:.4f}",
    "ece": "{:.4f}",
    "num_samples": "{:,.0f}",
    "status": "{}",
}


def main() -> None:
    """Entry point of ``mamba-summary``; leaves by ``SystemExit`` with a code of ``mamba-run``'s."""
    sys.exit(_exit_code(sys.argv[1:]))


def _exit_code(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="mamba-summary", description="Gather runs of mamba-run into one table and one picture."
    )
    parser.add_argument("folder", nargs="+", type=Path, help="runs, or folders with runs in them")
    parser.add_argument(
        "--out", type=Path, help="where summary.csv and summary.png go (default: the first folder)"
    )
    given = parser.parse_args(arguments)
    out = given.out or given.folder[0]
    try:
        rows = gathered(given.folder)
        _write(rows, out)
    except MambaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    from mamba_cli.console import align

    print(align(printed(rows), f"{len(rows)} runs"))
    print(f"\nwritten to {out / 'summary.csv'} and {out / 'summary.png'}")
    return 0


def gathered(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """One row a run below ``folders``, sorted by what was run.

    A run that was tuned and not evaluated has a row without metrics, its status ``not evaluated``;
    one without a winner ``no winner``.

    Raises
    ------
    DataError
        A folder is missing, none holds a run, or a file of a run is damaged.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder} is not there: give the folder of a run, or of runs.")
        # os.walk: a glob would follow nothing and stop at a folder that cannot be read.
        for place, _, files in os.walk(folder):
            if "provenance.json" in files:
                found[Path(place)] = None
    if not found:
        listed = ", ".join(map(str, folders))
        raise DataError(f"no run was found in {listed}: none has a provenance.json.")
    rows = [row_of(folder) for folder in found]
    return sorted(rows, key=lambda row: [str(row[column]) for column in COLUMNS[:4]] + [row["run"]])


def row_of(folder: Path) -> dict[str, Any]:
    """The row of the run in ``folder``. Raises ``DataError``."""
    from mamba_cli import artifacts

    provenance = artifacts.read_json(folder / "provenance.json") or {}
    config = provenance.get("config")
    if not isinstance(config, Mapping):
        raise DataError(f"cannot read {folder / 'provenance.json'}: it has no configuration.")
    metrics = artifacts.read_metrics(folder / "metrics.csv")
    best = artifacts.read_json(folder / "best.json")
    names = {key: _name(config, key) for key in ("model", "sampler", "tuner", "budget")}
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {**names, "seed": config.get("seed"), "run": str(folder)}
    for key in ("step_size", "batch_percent", "num_integration_steps"):
        row[key] = (best or {}).get(key)
    usable = [m for m in metrics if m.get("status") == "ok"]
    row |= {"repeats": len(metrics), "usable": len(usable)}
    for column in _AVERAGED:
        values = [float(m[column]) for m in usable if column in m]
        row[column] = math.fsum(values) / len(values) if values else None
    row["status"] = _status(best, metrics, usable)
    return row


def _name(config: Mapping[str, Any], group: str) -> Any:
    chosen = config.get(group)
    return chosen.get("name") if isinstance(chosen, Mapping) else None


def _status(
    best: Mapping[str, Any] | None,
    metrics: Sequence[Mapping[str, Any]],
    usable: Sequence[Mapping[str, Any]],
) -> str:
    if usable:
        return "ok"
    if metrics:
        return str(metrics[0].get("status"))
    return "not evaluated" if best is not None else "no winner"


def printed(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table as text, without the columns that no run has."""
    columns = [c for c in _PRINTED if any(row[c] is not None for row in rows)]
    body = [["" if row[c] is None else _PRINTED[c].format(row[c]) for c in columns] for row in rows]
    return [columns, *body]


def measure_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What the picture shows: of ``MEASURES``, the first that most usable runs have."""
    counts = {name: sum(row[name] is not None for row in rows) for name in MEASURES}
    most = max(counts.values())
    return next((name for name, count in counts.items() if count == most), None) if most else None


def picture(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A dot a run, a line for each sampler and tuner, a panel for each model."""
    from matplotlib.figure import Figure

    measure = measure_of(rows)
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    heights = [len(_labels(rows, model)) for model in models]
    figure = Figure(
        figsize=(8, 1.2 + 0.35 * sum(heights) + 0.8 * len(models)), layout="constrained"
    )
    panels = figure.subplots(len(models), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[
        :, 0
    ]
    for axes, model in zip(panels, models, strict=True):
        labels = _labels(rows, model)
        for place, label in enumerate(labels):
            own = [row for row in rows if row["model"] == model and _label(row) == label]
            values = [row[measure] for row in own if measure and row[measure] is not None]
            axes.plot(values, [place] * len(values), "o", color="C0", alpha=0.6)
            if values:
                axes.plot(sum(values) / len(values), place, "|", color="black", markersize=14)
            failed = len(own) - len(values)
            if failed:
                note = f"{failed} of {len(own)} without a value"
                axes.annotate(
                    note, (0.99, place), xycoords=("axes fraction", "data"), ha="right", fontsize=7
                )
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(model, loc="left", fontsize=10)
        shown = [row[measure] for row in rows if measure and row["model"] == model and row[measure]]
        if shown and min(shown) > 0 and max(shown) > 20 * min(shown):
            axes.set_xscale("log")
    panels[-1].set_xlabel(MEASURES[measure] if measure else "no run has been evaluated")
    return figure


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['sampler']}, {row['tuner']}"


def _labels(rows: Sequence[Mapping[str, Any]], model: str) -> list[str]:
    return list(dict.fromkeys(_label(row) for row in rows if row["model"] == model))


def _write(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write ``summary.csv`` and ``summary.png``. Raises ``StorageError``."""
    from mamba_cli import artifacts

    artifacts.write_table(out / "summary.csv", COLUMNS, rows)
    figure = picture(rows)
    artifacts.atomic_write(
        out / "summary.png", lambda file: figure.savefig(file, format="png", dpi=150)
    )
