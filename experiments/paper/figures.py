"""The paper's five figures, from the folders of finished runs, and the data behind each as CSV."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.paper.cells import (
    CURVES,
    KSD_TESTS,
    SAMPLERS,
    STUDIES,
    THINNING,
    Cell,
    Scale,
    ksd_test_cells,
)
from experiments.paper.tables import NOT_RUN, SAMPLER_NAMES, TUNER_NAMES, why_not_shown
from mamba_cli import artifacts
from mamba_cli.artifacts import atomic_write, read_table, read_tuning, write_table
from mamba_cli.errors import DataError, first_line

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
    "legend.handlelength": 3.2,
    "legend.title_fontsize": 7,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}

DPI = 200

NOTE_SIZE = 6.5
NOTE_HEIGHT = 0.08
"""Of a line of text in a panel: points, and the share of the panel's height that it takes."""

NO_WINNER = "its tuning has no winner"
NOT_TUNED = "its tuning is not done"
"""Of a line over time: why it has no hyperparameters from a run of the tables."""


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
    """The runs of a line at one point in time, ``number`` in their curves."""

    number: int
    elapsed_s: float
    mean: float
    sd: float
    num_usable: int
    num_runs: int


def curve_rows(lines: Sequence[tuple[Cell, str]], scale: Scale) -> list[Row]:
    """Every point of every repeat; a line without a finished run has one row that says why.

    ``lines`` are the runs, and for those without hyperparameters why they have none.
    """
    rows: list[Row] = []
    for cell, why in lines:
        names = {"sampler": cell.sampler, "tuner": cell.tuner}
        try:
            reason = why or why_not_shown(cell, scale)
            found = [] if reason else read_table(cell.folder(scale) / "curve.csv")[1]
        except DataError as error:
            reason = first_line(error)
        if reason or not found:
            reason = reason or "its run has no curve.csv"
            rows.append({**names, "status": "missing", "reason": reason})
            continue
        seen: dict[str, int] = {}
        for row in found:
            point = seen[row["repeat"]] = seen.get(row["repeat"], -1) + 1
            rows.append({**names, "point": point, **row})
    return rows


def points_of(rows: Sequence[Mapping[str, Any]], sampler: str, tuner: str) -> list[Point]:
    """Mean and sd over the runs of a line, point by point; those without a value are left out."""
    own = _measured(rows, sampler, tuner)
    num_runs = len({row["repeat"] for row in own})
    points = []
    for number in sorted({int(row["point"]) for row in own}):
        usable = [r for r in own if int(r["point"]) == number and r["status"] == "ok"]
        values = [float(row["value"]) for row in usable]
        if values:
            elapsed_s = statistics.fmean(float(row["elapsed_s"]) for row in usable)
            sd = statistics.stdev(values) if len(values) > 1 else 0.0
            mean = statistics.fmean(values)
            points.append(Point(number, elapsed_s, mean, sd, len(values), num_runs))
    return points


def end_of(rows: Sequence[Mapping[str, Any]], sampler: str, tuner: str) -> Point | None:
    """A line's point at the end of the figure's curves; ``None`` where no run of it has a value.

    The curve of a chain that diverges breaks off there, so that the last point of a line is not
    always the end.
    """
    last = max((int(row["point"]) for row in rows if "point" in row), default=0)
    points = points_of(rows, sampler, tuner)
    return points[-1] if points and points[-1].number == last else None


def shortfall(rows: Sequence[Mapping[str, Any]], sampler: str, tuner: str) -> str:
    """What a line lacks at the end of the figure, for its reader; empty where it lacks nothing."""
    end = end_of(rows, sampler, tuner)
    if end is not None:
        is_whole = end.num_usable == end.num_runs
        return "" if is_whole else f"{end.num_usable} of {end.num_runs} runs at the end"
    own = _measured(rows, sampler, tuner)
    if not own:
        reasons = [r.get("reason") for r in rows if (r["sampler"], r["tuner"]) == (sampler, tuner)]
        said = (NOT_RUN, NO_WINNER, NOT_TUNED)
        return str(reasons[0]) if reasons and reasons[0] in said else "could not be run"
    lasts = {row["repeat"]: str(row["status"]) for row in own}  # of every run, its last point
    statuses = set(lasts.values()) - {"ok"}
    status = statuses.pop().replace("_", " ") if len(statuses) == 1 else "no value"
    return f"{status} in all {len(lasts)} runs" if len(lasts) > 1 else status


def _measured(
    rows: Sequence[Mapping[str, Any]], sampler: str, tuner: str
) -> list[Mapping[str, Any]]:
    return [r for r in rows if (r["sampler"], r["tuner"]) == (sampler, tuner) and "point" in r]


def curves_figure(name: str, rows: Sequence[Mapping[str, Any]], note: str) -> Figure:
    """Six panels, a sampler each: mean and two sds of the runs, over seconds of sampling.

    A marker is hollow where not every run has a value. What a line lacks is written in its panel.
    """
    study = STUDIES[CURVES[name]]
    is_ece = study.model == "bnn"
    factor, label = (100.0, "ECE (%)") if is_ece else (1.0, "KSD")
    num_runs = max(
        (point.num_runs for s in SAMPLERS for t in study.tuners for point in points_of(rows, s, t)),
        default=0,
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.9), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True)
        for axes, sampler in zip(panels.flat, SAMPLERS, strict=True):
            shown: list[float] = []
            notes = []
            for tuner in study.tuners:
                points, look = points_of(rows, sampler, tuner), LOOKS[tuner]
                lack = shortfall(rows, sampler, tuner)
                if lack:
                    notes.append((f"{TUNER_NAMES[tuner]}: {lack}", look.colour))
                if not points:
                    continue
                shown += _line_over_time(axes, points, look, factor)
            _log_axes(axes, shown)
            _say(axes, notes)
            axes.set_title(SAMPLER_NAMES[sampler])
        for axes in panels[-1]:
            axes.set_xlabel("seconds of sampling")
        for axes in panels[:, 0]:
            axes.set_ylabel(label)
        handles = [_handle(LOOKS[tuner], TUNER_NAMES[tuner]) for tuner in study.tuners]
        title = f"mean ± 2 sd of {num_runs} runs; hollow: not all of them have a value"
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), title=title)
        _mark(figure, note)
    return figure


def _line_over_time(axes: Axes, points: Sequence[Point], look: Look, factor: float) -> list[float]:
    """Draw a line with its band; the means that it shows."""
    times = [p.elapsed_s for p in points]
    means = [factor * p.mean for p in points]
    # On a log axis a band that reaches below zero ends far below its line instead.
    below = [factor * max(p.mean - 2 * p.sd, p.mean / 20) for p in points]
    above = [factor * (p.mean + 2 * p.sd) for p in points]
    axes.fill_between(times, below, above, color=look.colour, alpha=0.15, linewidth=0)
    axes.plot(times, means, linestyle=look.dashes, color=look.colour)
    for is_whole, face in ((True, look.colour), (False, "white")):
        own = [
            (time, mean)
            for time, mean, point in zip(times, means, points, strict=True)
            if (point.num_usable == point.num_runs) == is_whole
        ]
        axes.plot(
            [time for time, _ in own],
            [mean for _, mean in own],
            linestyle="none",
            color=look.colour,
            marker=look.marker,
            markerfacecolor=face,
        )
    return means


def test_rows(figure: str, scale: Scale) -> list[Row]:
    """Every arm of every line."""
    rows: list[Row] = []
    for cell in ksd_test_cells(figure, scale):
        names = {"model": cell.model, "line": cell.variant}
        try:
            reason = why_not_shown(cell, scale)
            records = [] if reason else read_tuning(cell.folder(scale) / "tuning.csv")
        except DataError as error:
            reason = first_line(error)
        if reason:
            rows.append({**names, "status": "missing", "reason": reason})
            continue
        for record in records:
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
    """Three panels, a model each; a line for every way to estimate the KSD.

    How many settings of a line have no value is written in its panel.
    """
    by_step = name == "KSD_test_step_size"
    column = "step_size" if by_step else "batch_size"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        panels = figure.subplots(1, 3)
        for axes, model in zip(panels, MODEL_NAMES, strict=True):
            shown: list[float] = []
            lacks: dict[str, str] = {}
            for line, look in TEST_LOOKS.items():
                own = [r for r in rows if (r["model"], r["line"]) == (model, line)]
                usable = sorted(
                    (float(r[column]), float(r["ksd"])) for r in own if r.get("status") == "ok"
                )
                lacks[line] = _arms_lacking(own)
                shown += [value for _, value in usable]
                axes.plot(
                    [x for x, _ in usable],
                    [y for _, y in usable],
                    linestyle=look.dashes,
                    color=look.colour,
                    marker=look.marker,
                    markerfacecolor=_face(line, look),
                )
            _log_axes(axes, shown)
            if not shown:
                axes.set_xticks([])
            if len(set(lacks.values())) == 1:  # often the same arms diverge, whatever scores them
                notes = [(f"every line: {lack}", "#000000") for lack in {*lacks.values()} if lack]
            else:
                notes = [
                    (f"{line.replace('-', ', ')}: {lack}", TEST_LOOKS[line].colour)
                    for line, lack in lacks.items()
                    if lack
                ]
            _say(axes, notes)
            axes.set_title(MODEL_NAMES[model])
            axes.set_xlabel("step size h" if by_step else "batch size n (rows)")
        panels[0].set_ylabel("KSD")
        handles = [
            _handle(look, TEST_NAMES[line], _face(line, look)) for line, look in TEST_LOOKS.items()
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
        _mark(figure, note)
    return figure


def _arms_lacking(own: Sequence[Mapping[str, Any]]) -> str:
    """What a line of a figure of the KSD lacks; empty where every arm has a value."""
    if not own or own[0]["status"] == "missing":
        untried = not own or own[0].get("reason") == NOT_RUN
        return NOT_RUN if untried else "could not be run"
    failed = sum(row["status"] != "ok" for row in own)
    return f"{failed} of {len(own)} missing" if failed else ""


def _face(line: str, look: Look) -> str:
    """The inside of a line's markers: lines of thinned draws lie upon those of all."""
    return "none" if line.endswith("thinned") else look.colour


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


def _log_axes(axes: Axes, shown: Sequence[float]) -> None:
    """Log axes around the values ``shown``."""
    axes.set_xscale("log")
    axes.grid(which="major")
    _log_ticks(axes.xaxis, *axes.get_xlim())
    positive = [value for value in shown if value > 0]
    if not positive:
        axes.set_yticks([])
        return
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(min(positive) / 2, 2 * max(positive))
    _log_ticks(axes.yaxis, *axes.get_ylim())


def _say(axes: Axes, notes: Iterable[tuple[str, str]]) -> None:
    """Write lines of text, each with its colour, below what is drawn."""
    notes = list(notes)
    if notes and axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        share = NOTE_HEIGHT * len(notes)
        axes.set_ylim(low * (low / high) ** (share / (1 - share)), high)
        _log_ticks(axes.yaxis, *axes.get_ylim())
    for number, (text, colour) in enumerate(reversed(notes)):
        place = (0.03, 0.02 + NOTE_HEIGHT * number)
        axes.text(*place, text, transform=axes.transAxes, fontsize=NOTE_SIZE, color=colour)


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """Powers of ten; over less than two of them some multiples besides, as plain numbers."""
    axis.set_minor_formatter(NullFormatter())
    if high < 100 * low:
        is_short = high < 8 * low
        subs = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0) if is_short else (1.0, 2.0, 5.0)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _handle(look: Look, label: str, face: str | None = None) -> Line2D:
    return Line2D(
        [],
        [],
        color=look.colour,
        linestyle=look.dashes,
        marker=look.marker,
        markerfacecolor=face or look.colour,
        label=label,
    )


def _mark(figure: Figure, note: str) -> None:
    if note:
        text = note.replace(". ", ".\n")
        look = {"fontsize": 18, "color": "#888888", "alpha": 0.35, "ha": "center", "va": "center"}
        figure.text(0.5, 0.45, text, rotation=20, **look)
