"""The paper's five figures, from the folders of finished runs, and the data behind each as CSV."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.paper.cells import (
    ALL_DRAWS,
    CURVES,
    KSD_TESTS,
    SAMPLERS,
    STUDIES,
    THINNING,
    Cell,
    Scale,
    ksd_test_cells,
)
from experiments.paper.schedule import is_finished, reason_of
from experiments.paper.tables import SAMPLER_NAMES, TUNER_NAMES
from mamba_cli import artifacts
from mamba_cli.artifacts import atomic_write, read_table, read_tuning, write_table

STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.4,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}

DPI = 200


class Look(NamedTuple):
    """Colour (Okabe and Ito's, told apart by colour-blind readers), dashes and marker of a line."""

    colour: str
    dashes: Any
    marker: str


LOOKS = {
    "mamba_ksd": Look("#0072B2", "-", "o"),
    "mamba_fssd": Look("#009E73", "--", "s"),
    "grid": Look("#D55E00", "-.", "^"),
    "heuristic": Look("#000000", ":", "D"),
}
TEST_LOOKS = {
    "full-all": Look("#0072B2", "-", "o"),
    "full-thinned": Look("#56B4E9", "--", "s"),
    "stochastic-all": Look("#D55E00", "-", "^"),
    "stochastic-thinned": Look("#E69F00", "--", "D"),
}
TEST_NAMES = {
    "full-all": "full gradients, all draws",
    "full-thinned": f"full gradients, thinned by {THINNING}",
    "stochastic-all": "stochastic gradients, all draws",
    "stochastic-thinned": f"stochastic gradients, thinned by {THINNING}",
}
MODEL_NAMES = {"logreg": "Logistic regression", "pmf": "PMF", "bnn": "Neural network"}

CURVE_COLUMNS = ("sampler", "tuner", "repeat", "point", *artifacts.CURVE_COLUMNS[1:])
TEST_COLUMNS = (
    "model",
    "line",
    "step_size",
    "batch_size",
    "num_draws",
    "num_scored",
    "ksd",
    "status",
    "reason",
)

Row = dict[str, Any]


class Point(NamedTuple):
    """The runs of a line at one point in time."""

    elapsed_s: float
    mean: float
    sd: float
    num_usable: int
    num_runs: int


def curve_rows(lines: Sequence[Cell], scale: Scale) -> list[Row]:
    """Every point of every repeat; a line whose run is not finished has one row that says why."""
    rows: list[Row] = []
    for cell in lines:
        names = {"sampler": cell.sampler, "tuner": cell.tuner}
        folder = cell.folder(scale)
        if not is_finished(folder) or not (folder / "curve.csv").exists():
            reason = reason_of(folder) or "not run yet"
            rows.append({**names, "status": "missing", "reason": reason})
            continue
        _, found = read_table(folder / "curve.csv")
        seen: dict[str, int] = {}
        for row in found:
            point = seen[row["repeat"]] = seen.get(row["repeat"], -1) + 1
            rows.append({**names, "point": point, **row})
    return rows


def points_of(rows: Sequence[Mapping[str, Any]], sampler: str, tuner: str) -> list[Point]:
    """Mean and sd over the runs of a line, point by point; those without a value are left out."""
    own = [r for r in rows if (r["sampler"], r["tuner"]) == (sampler, tuner) and "point" in r]
    num_runs = len({row["repeat"] for row in own})
    points = []
    for number in sorted({int(row["point"]) for row in own}):
        usable = [r for r in own if int(r["point"]) == number and r["status"] == "ok"]
        values = [float(row["value"]) for row in usable]
        if values:
            elapsed_s = statistics.fmean(float(row["elapsed_s"]) for row in usable)
            sd = statistics.stdev(values) if len(values) > 1 else 0.0
            points.append(Point(elapsed_s, statistics.fmean(values), sd, len(values), num_runs))
    return points


def curves_figure(name: str, rows: Sequence[Mapping[str, Any]], note: str) -> Figure:
    """Six panels, a sampler each: mean and two sds of the runs, over seconds of sampling."""
    study = STUDIES[CURVES[name]]
    is_ece = study.model == "bnn"
    factor, label = (100.0, "ECE (%)") if is_ece else (1.0, "KSD")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True)
        for axes, sampler in zip(panels.flat, SAMPLERS, strict=True):
            missing = []
            lows, highs = [], []
            for tuner in study.tuners:
                points = points_of(rows, sampler, tuner)
                look = LOOKS[tuner]
                if not points or points[-1].num_usable < points[-1].num_runs:
                    missing.append((tuner, points))
                if not points:
                    continue
                times = [p.elapsed_s for p in points]
                means = [factor * p.mean for p in points]
                below = [factor * max(p.mean - 2 * p.sd, p.mean / 20) for p in points]
                above = [factor * (p.mean + 2 * p.sd) for p in points]
                axes.fill_between(times, below, above, color=look.colour, alpha=0.15, linewidth=0)
                axes.plot(times, means, look.dashes, color=look.colour, marker=look.marker)
                lows += means
                highs += means
            _log_axes(axes, lows, highs)
            axes.set_title(SAMPLER_NAMES[sampler])
            for line, (tuner, points) in enumerate(missing):
                left = (
                    f"{points[-1].num_usable} of {points[-1].num_runs} at the end"
                    if points
                    else ("no value")
                )
                axes.text(
                    0.03,
                    0.03 + 0.08 * line,
                    f"{TUNER_NAMES[tuner]}: {left}",
                    transform=axes.transAxes,
                    fontsize=6.5,
                    color=LOOKS[tuner].colour,
                )
        for axes in panels[-1]:
            axes.set_xlabel("seconds of sampling")
        for axes in panels[:, 0]:
            axes.set_ylabel(label)
        handles = [_handle(LOOKS[tuner], TUNER_NAMES[tuner]) for tuner in study.tuners]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        _mark(figure, note)
    return figure


def test_rows(figure: str, scale: Scale) -> list[Row]:
    """Every arm of every line."""
    rows: list[Row] = []
    for cell in ksd_test_cells(figure, scale):
        names = {"model": cell.model, "line": cell.variant}
        folder = cell.folder(scale)
        if not is_finished(folder):
            reason = reason_of(folder) or "not run yet"
            rows.append({**names, "status": "missing", "reason": reason})
            continue
        for record in read_tuning(folder / "tuning.csv"):
            rows.append(
                {
                    **names,
                    "step_size": record.step_size,
                    "batch_size": record.batch_size,
                    "num_draws": record.num_draws,
                    "num_scored": record.num_scored,
                    "ksd": record.reward if math.isfinite(record.reward) else None,
                    "status": record.status,
                    "reason": record.reason,
                }
            )
    return rows


def ksd_test_figure(name: str, rows: Sequence[Mapping[str, Any]], note: str) -> Figure:
    """Three panels, a model each; a line for every way to estimate the KSD."""
    by_step = name == "KSD_test_step_size"
    column = "step_size" if by_step else "batch_size"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        panels = figure.subplots(1, 3)
        for axes, model in zip(panels, ALL_DRAWS, strict=True):
            shown: list[float] = []
            for line, look in TEST_LOOKS.items():
                own = [r for r in rows if (r["model"], r["line"]) == (model, line)]
                usable = sorted(
                    (float(r[column]), float(r["ksd"])) for r in own if r.get("status") == "ok"
                )
                shown += [value for _, value in usable]
                axes.plot(
                    [x for x, _ in usable],
                    [y for _, y in usable],
                    look.dashes,
                    color=look.colour,
                    marker=look.marker,
                    markerfacecolor="none" if "thinned" in line else look.colour,
                )
            _log_axes(axes, shown, shown)
            axes.set_title(MODEL_NAMES[model])
            axes.set_xlabel("step size h" if by_step else "batch size n (rows)")
        panels[0].set_ylabel("KSD")
        handles = [_handle(look, TEST_NAMES[line]) for line, look in TEST_LOOKS.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
        _mark(figure, note)
    return figure


def write(name: str, rows: Sequence[Row], scale: Scale) -> list[str]:
    """Write a figure and its data; the lines of what it lacks. Raises ``StorageError``."""
    is_test = name in KSD_TESTS
    figure = (ksd_test_figure if is_test else curves_figure)(name, rows, scale.note)
    folder = scale.root / "figures"
    write_table(folder / f"{name}.csv", TEST_COLUMNS if is_test else CURVE_COLUMNS, rows)
    atomic_write(folder / f"{name}.png", lambda file: figure.savefig(file, format="png", dpi=DPI))
    return [
        f"{', '.join(str(row[key]) for key in list(row)[:2])}: {row['reason']}"
        for row in rows
        if row["status"] == "missing"
    ]


def _log_axes(axes: Axes, lows: Sequence[float], highs: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.grid(which="major")
    _log_ticks(axes.xaxis, *axes.get_xlim())
    positive = [low for low in lows if low > 0]
    if not positive:
        axes.set_yticks([])
        return
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(min(positive) / 2, 2 * max(highs))
    _log_ticks(axes.yaxis, *axes.get_ylim())


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """Powers of ten; over less than two of them 1, 2 and 5 times each, as plain numbers."""
    axis.set_minor_formatter(NullFormatter())
    if high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _handle(look: Look, label: str) -> Line2D:
    return Line2D([], [], color=look.colour, linestyle=look.dashes, marker=look.marker, label=label)


def _mark(figure: Figure, note: str) -> None:
    if note:
        text = note.replace(". ", ".\n")
        look = {"fontsize": 18, "color": "#888888", "alpha": 0.35, "ha": "center", "va": "center"}
        figure.text(0.5, 0.45, text, rotation=20, **look)
