"""The pictures a run leaves behind, drawn from its records.

Figures are made with matplotlib's objects on the Agg canvas: no window system, no global state.
matplotlib is imported where a figure is made, because importing it takes longer than a small run.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mamba_cli.artifacts import atomic_write
from mamba_cli.types import ArmRecord

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers, without the yellow and black that paper and
# text hide.
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "D", "^", "v", "P")
_PRUNED = "#9a9a9a"
_FAINT = "#c8c8c8"
_WARNING = "#B00020"
_DPI = 150

# Width of a letter of the heading (bold, 13 points), rounded up: a longer heading is broken.
_LETTER_INCHES = 0.125

# Rewards further than this many decades from the best one are marked at the edge: one nearly
# divergent arm would otherwise flatten the basin that the picture is for.
_DECADES_SHOWN = 5.0

# Larger errors of a standard deviation are counted together: a few would hide all the others.
_LARGEST_ERROR_PERCENT = 300.0

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.usetex": False,
    "svg.fonttype": "none",
}


def usable(record: ArmRecord) -> bool:
    """Whether the record holds a reward that can be compared: status ok, a finite number."""
    return record.status == "ok" and math.isfinite(record.reward)


def winning_arm(records: Sequence[ArmRecord], higher_is_better: bool = False) -> int | None:
    """The arm with the best usable reward of the last rung, or ``None`` if it has none."""
    last = max((record.rung for record in records), default=0)
    candidates = [record for record in records if record.rung == last and usable(record)]
    sign = -1.0 if higher_is_better else 1.0
    best = min(candidates, key=lambda record: (sign * record.reward, record.arm), default=None)
    return None if best is None else best.arm


class _Arm(NamedTuple):
    """One arm through the rungs: its usable points, its last record, and how it ended."""

    arm: int
    points: list[ArmRecord]
    last: ArmRecord
    survived: bool

    @property
    def failure(self) -> str | None:
        if usable(self.last):
            return None
        return "no finite reward" if self.last.status == "ok" else self.last.status


def _arms(records: Sequence[ArmRecord]) -> list[_Arm]:
    last_rung = max((record.rung for record in records), default=0)
    arms = []
    for arm in sorted({record.arm for record in records}):
        own = sorted((record for record in records if record.arm == arm), key=lambda r: r.rung)
        points = [record for record in own if usable(record)]
        survived = usable(own[-1]) and own[-1].rung == last_rung
        arms.append(_Arm(arm, points, own[-1], survived))
    return arms


class _Scale(NamedTuple):
    """How rewards become heights: the kind of axis, its limits, and who lies beyond them."""

    kind: str  # "log" | "linear" | "asinh"
    lower: float
    upper: float
    linear_width: float = 1.0


def _scale(rewards: Sequence[float], higher_is_better: bool) -> _Scale:
    """The axis for these finite rewards, with a free band on the better side for a label."""
    if not rewards:
        return _Scale("linear", 0.0, 1.0)
    low, high = min(rewards), max(rewards)
    if low > 0 and high / low > 8 and not higher_is_better:
        floor = math.log10(low)
        ceiling = min(math.log10(high), floor + _DECADES_SHOWN)
        floor, ceiling = _with_band(floor, ceiling, higher_is_better)
        return _Scale("log", 10.0**floor, 10.0**ceiling)
    typical = float(np.median(np.abs(rewards)))
    if typical > 0 and max(abs(low), abs(high)) > 1e3 * typical:
        # Both signs (an unbiased statistic) and far outliers: linear near zero, log beyond.
        lower, upper = _with_band(
            math.asinh(low / typical), math.asinh(high / typical), higher_is_better
        )
        return _Scale("asinh", typical * math.sinh(lower), typical * math.sinh(upper), typical)
    return _Scale("linear", *_with_band(low, high, higher_is_better))


def _with_band(low: float, high: float, higher_is_better: bool) -> tuple[float, float]:
    span = (high - low) or (abs(high) or 1.0) * 0.2
    near, far = 0.06 * span, 0.24 * span
    return (low - near, high + far) if higher_is_better else (low - far, high + near)


def _colours(batch_sizes: Sequence[int]) -> dict[int, Any]:
    ordered = sorted(set(batch_sizes))
    if len(ordered) <= len(_PALETTE):
        return dict(zip(ordered, _PALETTE, strict=False))
    from matplotlib import colormaps

    shades = np.linspace(0.0, 0.9, len(ordered))
    return {size: colormaps["viridis"](shade) for size, shade in zip(ordered, shades, strict=True)}


def _markers(lengths: Sequence[int]) -> dict[int, str]:
    ordered = sorted(set(lengths))
    return {length: _MARKERS[index % len(_MARKERS)] for index, length in enumerate(ordered)}


def _failure_rows(arms: Sequence[_Arm]) -> dict[str, int]:
    """How many arms failed in each way, in a fixed order."""
    order = ("diverged", "frozen", "no_draws", "out_of_memory", "no finite reward")
    counts: dict[str, int] = {}
    for arm in arms:
        if arm.failure is not None:
            counts[arm.failure] = counts.get(arm.failure, 0) + 1
    known = [name for name in order if name in counts]
    return {name: counts[name] for name in [*known, *sorted(counts.keys() - set(order))]}


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def _new_figure(width: float, height: float, title: str, note: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.12, h_pad=0.06, wspace=0.03, hspace=0.0)  # type: ignore[call-arg]
    wide = int(width / _LETTER_INCHES)
    heading = "\n".join(textwrap.fill(line, wide) for line in (title, note) if line)
    figure.suptitle(heading, fontsize=13, fontweight="bold", color=_WARNING if note else "black")
    return figure


def _plain_tick(value: float, _: float) -> str:
    return f"{value:g}"


def _power_tick(value: float, _: float) -> str:
    """A power of ten, or a multiple of one: what an axis over many decades is labelled with."""
    if value <= 0:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = value / 10.0**exponent
    if math.isclose(factor, 1.0, rel_tol=1e-6):
        return f"$10^{{{exponent}}}$"
    return f"${factor:g}\\times10^{{{exponent}}}$"


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """Powers of ten, and 2 and 5 between them where there are few."""
    from matplotlib.ticker import (
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
    )

    decades = math.log10(high / low) if 0 < low < high else 1.0
    if decades < 0.6:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_minor_locator(NullLocator())
    else:
        subdivisions = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0,)
        axis.set_major_locator(LogLocator(subs=subdivisions, numticks=12))
    readable = low > 5e-4 and high < 2e4
    axis.set_major_formatter(FuncFormatter(_plain_tick if readable else _power_tick))
    axis.set_minor_formatter(NullFormatter())


def _set_reward_axis(axes: Axes, scale: _Scale) -> None:
    if scale.kind == "asinh":
        axes.set_yscale("asinh", linear_width=scale.linear_width)
        axes.set_yticks(_asinh_ticks(scale))
        axes.yaxis.set_major_formatter(_asinh_tick)
    else:
        axes.set_yscale(scale.kind)
    axes.set_ylim(scale.lower, scale.upper)
    if scale.kind == "log":
        _log_ticks(axes.yaxis, scale.lower, scale.upper)
    axes.grid(True, axis="y", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)


def _asinh_ticks(scale: _Scale) -> list[float]:
    """Zero, and on both sides the powers of ten beyond the linear part, every few decades."""
    first = math.ceil(math.log10(3 * scale.linear_width))
    last = math.floor(math.log10(max(-scale.lower, scale.upper)))
    stride = max(1, math.ceil((last - first + 1) / 7))
    powers = [10.0**exponent for exponent in range(first, last + 1, stride)]
    ticks = [-power for power in reversed(powers)] + [0.0, *powers]
    return [tick for tick in ticks if scale.lower <= tick <= scale.upper]


def _asinh_tick(value: float, _: float) -> str:
    if value == 0:
        return "0"
    return f"${'-' if value < 0 else ''}10^{{{round(math.log10(abs(value)))}}}$"


def _shown(reward: float, scale: _Scale) -> float:
    return min(max(reward, scale.lower), scale.upper)


def _off_scale(reward: float, scale: _Scale) -> bool:
    return not scale.lower <= reward <= scale.upper


def _place_in_time(time: float, limits: tuple[float, float]) -> float:
    """A place on a log axis for any time: an arm that made no draw spent none."""
    low, high = limits
    floor = low * (high / low) ** 0.02
    return min(max(time, floor), high) if math.isfinite(time) else floor


def _time_limits(records: Sequence[ArmRecord]) -> tuple[float, float]:
    times = [r.elapsed_s for r in records if r.elapsed_s > 0 and math.isfinite(r.elapsed_s)]
    if not times:
        return 0.1, 1.0
    low, high = min(times), max(times)
    if high / low > 1e4:
        low = high / 1e4
    margin = max((high / low) ** 0.08, 1.15)
    return low / margin, high * margin


class _Panel(NamedTuple):
    """What both panels of a picture of the tuning share."""

    arms: list[_Arm]
    winner: int | None
    scale: _Scale
    colours: Mapping[int, Any]
    markers: Mapping[int, str]
    failures: Mapping[str, int]
    reward_name: str
    higher_is_better: bool

    def reward_label(self) -> str:
        return f"{self.reward_name} ({'higher' if self.higher_is_better else 'lower'} is better)"


def _panel(
    records: Sequence[ArmRecord], reward_name: str, higher_is_better: bool, winner: int | None
) -> _Panel:
    arms = _arms(records)
    rewards = [record.reward for arm in arms for record in arm.points]
    return _Panel(
        arms=arms,
        winner=winning_arm(records, higher_is_better) if winner is None else winner,
        scale=_scale(rewards, higher_is_better),
        colours=_colours([record.batch_size for record in records]),
        markers=_markers([record.num_integration_steps for record in records]),
        failures=_failure_rows(arms),
        reward_name=reward_name,
        higher_is_better=higher_is_better,
    )


def _lanes(number: int) -> list[float]:
    return list(np.linspace(0.27, -0.27, number)) if number > 1 else [0.0]


def _draw_failures(axes: Axes, panel: _Panel, places: Mapping[int, float], named: bool) -> None:
    """Marks for the arms that failed, one row a kind of failure, counted in the row's name."""
    rows = {name: -index for index, name in enumerate(panel.failures)}
    # Arms fail at the same time or step size: a lane a batch size keeps their marks apart.
    lanes = dict(zip(sorted(panel.colours), _lanes(len(panel.colours)), strict=True))
    for arm in panel.arms:
        if arm.failure is not None:
            axes.plot(
                [places[arm.arm]],
                [rows[arm.failure] + lanes[arm.last.batch_size]],
                linestyle="none",
                marker="x",
                markersize=5,
                markeredgewidth=1.5,
                color=panel.colours[arm.last.batch_size],
                gid="failed",
                clip_on=False,
            )
    axes.set_yticks(
        list(rows.values()),
        [f"{name.replace('_', ' ')} ({count})" for name, count in panel.failures.items()],
    )
    axes.set_ylim(-len(rows) + 0.45, 0.55)
    axes.hlines(np.arange(1, len(rows)) * -1.0 + 0.5, 0, 1, "white", transform=_across(axes))
    axes.tick_params(axis="both", which="both", length=0, labelbottom=False, labelleft=named)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_facecolor("#f5f5f5")


def _draw_halving(axes: Axes, panel: _Panel, limits: tuple[float, float]) -> None:
    for arm in sorted(panel.arms, key=lambda arm: (arm.survived, arm.arm == panel.winner)):
        if arm.points:
            _draw_arm(axes, arm, panel, limits)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    _log_ticks(axes.xaxis, *limits)
    axes.set_xlabel("time spent by the arm's chain (s)")
    axes.set_ylabel(panel.reward_label())


def _draw_arm(axes: Axes, arm: _Arm, panel: _Panel, limits: tuple[float, float]) -> None:
    times = [_place_in_time(record.elapsed_s, limits) for record in arm.points]
    heights = [_shown(record.reward, panel.scale) for record in arm.points]
    is_winner = arm.arm == panel.winner
    if arm.survived:
        look: dict[str, Any] = {
            "color": panel.colours[arm.last.batch_size],
            "linewidth": 3.2 if is_winner else 1.5,
            "marker": panel.markers[arm.last.num_integration_steps],
            "markersize": 7 if is_winner else 5,
            "zorder": 5 if is_winner else 4,
        }
    else:
        look = {"color": _FAINT, "linewidth": 1.0, "marker": ".", "markersize": 4, "zorder": 2}
    axes.plot(times, heights, gid="winner" if is_winner else "arm", label=f"arm {arm.arm}", **look)
    if not arm.survived and arm.failure is None:
        axes.plot(
            times[-1:],
            heights[-1:],
            linestyle="none",
            marker="x",
            markersize=4.5,
            color=_PRUNED,
            zorder=3,
            gid="pruned",
        )
    for time, height, record in zip(times, heights, arm.points, strict=True):
        if _off_scale(record.reward, panel.scale):
            _draw_off_scale(axes, time, height, panel)


def _draw_off_scale(axes: Axes, x: float, y: float, panel: _Panel) -> None:
    axes.plot(
        [x],
        [y],
        linestyle="none",
        marker="v" if panel.higher_is_better else "^",
        markersize=7,
        color=_PRUNED,
        zorder=6,
        clip_on=False,
        gid="off scale",
    )


def _across(axes: Axes) -> Any:
    """Data coordinates in y, the whole width in x."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axes.transAxes, axes.transData)


def _mark_rungs(axes: Axes, records: Sequence[ArmRecord], limits: tuple[float, float]) -> None:
    """A line where each rung ended, with its number and how many arms it held."""
    from matplotlib.transforms import blended_transform_factory

    place = blended_transform_factory(axes.transData, axes.transAxes)
    for rung in sorted({record.rung for record in records}):
        own = [record for record in records if record.rung == rung]
        times = [r.elapsed_s for r in own if r.status == "ok"] or [r.elapsed_s for r in own]
        end = float(np.median([_place_in_time(time, limits) for time in times]))
        axes.axvline(end, color="#b5b5b5", linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        count = f"{len(own)} arm" + ("" if len(own) == 1 else "s")
        axes.text(
            end,
            1.015,
            f"rung {rung}\n{count}",
            transform=place,
            ha="center",
            va="bottom",
            fontsize=9.5,
            color="#555555",
            linespacing=1.15,
            gid="rung",
        )


def _name_winner(axes: Axes, panel: _Panel, limits: tuple[float, float]) -> None:
    arm = next((arm for arm in panel.arms if arm.arm == panel.winner and arm.points), None)
    if arm is None:
        return
    last = arm.points[-1]
    point = (_place_in_time(last.elapsed_s, limits), _shown(last.reward, panel.scale))
    axes.annotate(
        f"arm {arm.arm}: {_hyperparameters(last)}",
        xy=point,
        xytext=(0.985, 0.965 if panel.higher_is_better else 0.035),
        textcoords="axes fraction",
        ha="right",
        va="top" if panel.higher_is_better else "bottom",
        fontsize=10.5,
        fontweight="bold",
        color=panel.colours[last.batch_size],
        arrowprops={"arrowstyle": "-", "color": "#777777", "linewidth": 0.9, "shrinkB": 5},
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        zorder=7,
        gid="winner",
    )


def _hyperparameters(record: ArmRecord) -> str:
    return (
        f"h = {record.step_size:.3g}, n = {record.batch_size:,}, L = {record.num_integration_steps}"
    )


def _step_limits(arms: Sequence[_Arm]) -> tuple[float, float]:
    steps = [arm.last.step_size for arm in arms if arm.last.step_size > 0]
    if not steps:
        return 0.1, 1.0
    low, high = min(steps), max(steps)
    margin = max((high / low) ** 0.05, 1.4)
    return low / margin, high * margin


def _draw_by_step_size(axes: Axes, panel: _Panel) -> None:
    """Reward against step size, one line a batch size and L, at each arm's last usable rung."""
    limits = _step_limits(panel.arms)
    groups: dict[tuple[int, int], list[_Arm]] = {}
    for arm in panel.arms:
        groups.setdefault((arm.last.batch_size, arm.last.num_integration_steps), []).append(arm)
    single_length = len(panel.markers) == 1
    for (batch_size, length), members in sorted(groups.items()):
        ordered = sorted(members, key=lambda arm: arm.last.step_size)
        heights = [
            _shown(arm.points[-1].reward, panel.scale) if arm.failure is None else math.nan
            for arm in ordered
        ]
        axes.plot(
            [arm.last.step_size for arm in ordered],
            heights,
            color=panel.colours[batch_size],
            linewidth=1.4,
            linestyle="-" if single_length or length == min(panel.markers) else "--",
            zorder=3,
            gid="batch size",
            label=f"n = {batch_size:,}, L = {length}",
        )
        for arm, height in zip(ordered, heights, strict=True):
            if math.isfinite(height):
                _draw_step_point(axes, arm, height, panel)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    _log_ticks(axes.xaxis, *limits)
    axes.set_xlabel("step size h")


def _draw_step_point(axes: Axes, arm: _Arm, height: float, panel: _Panel) -> None:
    colour = panel.colours[arm.last.batch_size]
    is_winner = arm.arm == panel.winner
    axes.plot(
        [arm.last.step_size],
        [height],
        linestyle="none",
        marker="*" if is_winner else panel.markers[arm.last.num_integration_steps],
        markersize=17 if is_winner else 6,
        markeredgecolor="black" if is_winner else colour,
        markeredgewidth=1.0,
        markerfacecolor=colour if arm.survived else "white",
        zorder=6 if is_winner else 4,
        gid="winner" if is_winner else "last rung",
    )
    if _off_scale(arm.points[-1].reward, panel.scale):
        _draw_off_scale(axes, arm.last.step_size, height, panel)


def _say_nothing_usable(axes: Axes, text: str = "no arm gave a finite reward") -> None:
    axes.text(
        0.5,
        0.5,
        text,
        transform=axes.transAxes,
        ha="center",
        va="center",
        fontsize=12,
        color=_WARNING,
        bbox={"facecolor": "white", "edgecolor": "none"},
        gid="nothing",
    )
    axes.set_yticks([])


def _legend_entries(panel: _Panel, halving: bool) -> list[Artist]:
    from matplotlib.lines import Line2D

    entries: list[Artist] = [
        Line2D([], [], color=colour, linewidth=2.5, label=f"n = {size:,}")
        for size, colour in panel.colours.items()
    ]
    if len(panel.markers) > 1:
        entries += [
            Line2D(
                [],
                [],
                color="#555555",
                marker=marker,
                linestyle="-" if length == min(panel.markers) else "--",
                label=f"L = {length}",
            )
            for length, marker in panel.markers.items()
        ]
    if halving and any(not arm.survived and arm.failure is None for arm in panel.arms):
        entries.append(Line2D([], [], color=_PRUNED, marker="x", markersize=5, label="pruned"))
    if panel.winner is not None:
        entries.append(
            Line2D(
                [],
                [],
                linestyle="none",
                marker="*",
                markersize=13,
                markeredgecolor="black",
                markerfacecolor="white",
                label="winner",
            )
        )
    if panel.failures:
        count = sum(panel.failures.values())
        entries.append(
            Line2D([], [], linestyle="none", marker="x", color="black", label=f"failed ({count})")
        )
    off = sum(
        any(_off_scale(record.reward, panel.scale) for record in arm.points) for arm in panel.arms
    )
    if off:
        entries.append(
            Line2D(
                [],
                [],
                linestyle="none",
                marker="v" if panel.higher_is_better else "^",
                color=_PRUNED,
                label=f"off the scale ({off})",
            )
        )
    return entries


def _add_legend(figure: Figure, panel: _Panel, halving: bool) -> None:
    entries = _legend_entries(panel, halving)
    if entries:
        figure.legend(
            handles=entries,
            loc="outside lower center",
            ncols=len(entries) if len(entries) <= 8 else (len(entries) + 1) // 2,
            frameon=False,
            columnspacing=1.6,
            handlelength=1.8,
        )


def halving_figure(
    records: Sequence[ArmRecord],
    title: str,
    *,
    reward_name: str = "reward",
    higher_is_better: bool = False,
    note: str = "",
    winner: int | None = None,
) -> Figure:
    """Draw successive halving, arm by arm and rung by rung.

    Left: reward against the time each arm's chain has run, one line an arm. Arms that reached the
    last rung are coloured by batch size, pruned ones are grey, the winner is bold and named.
    Right: reward against step size at each arm's last rung, one line a batch size: the basin.
    Arms that failed stand in a strip above both, a row a kind of failure, with their number.

    Parameters
    ----------
    records
        The rows of ``tuning.csv``.
    title
        Stands above the figure.
    reward_name, higher_is_better
        What the reward is, and which way it is read.
    note
        A second line of the title, in red: that the run is not the paper's size.
    winner
        The winning arm; by default the best usable one of the last rung.
    """
    panel = _panel(records, reward_name, higher_is_better, winner)
    limits = _time_limits(records)
    with _styled():
        figure = _new_figure(13.0, 6.6 + 0.34 * len(panel.failures), title, note)
        strips, mains = _axes_pairs(figure, 2, len(panel.failures), (1.15, 1.0))
        left, right = mains
        _set_reward_axis(left, panel.scale)
        _draw_halving(left, panel, limits)
        _mark_rungs(left, records, limits)
        _name_winner(left, panel, limits)
        _set_reward_axis(right, panel.scale)
        _draw_by_step_size(right, panel)
        pruned = any(not arm.survived and arm.failure is None for arm in panel.arms)
        right.set_title(
            "each arm at its last rung" + (" (hollow: pruned)" if pruned else ""),
            color="#555555",
            fontsize=10,
            pad=12,
        )
        if strips:
            times = {arm.arm: _place_in_time(arm.last.elapsed_s, limits) for arm in panel.arms}
            _draw_failures(strips[0], panel, times, named=True)
            steps = {arm.arm: arm.last.step_size for arm in panel.arms}
            _draw_failures(strips[1], panel, steps, named=False)
        if not any(arm.points for arm in panel.arms):
            _say_nothing_usable(left)
            _say_nothing_usable(right)
        _add_legend(figure, panel, halving=True)
        return figure


def _axes_pairs(
    figure: Figure, columns: int, failure_rows: int, widths: Sequence[float]
) -> tuple[list[Axes], list[Axes]]:
    """Main axes side by side, and above each, where arms failed, a strip that shares its x."""
    if not failure_rows:
        grid = figure.add_gridspec(1, columns, width_ratios=list(widths))
        return [], [figure.add_subplot(grid[0, column]) for column in range(columns)]
    grid = figure.add_gridspec(
        2, columns, width_ratios=list(widths), height_ratios=[0.34 * failure_rows, 5.0]
    )
    mains = [figure.add_subplot(grid[1, column]) for column in range(columns)]
    strips = [
        figure.add_subplot(grid[0, column], sharex=mains[column]) for column in range(columns)
    ]
    return strips, mains


def search_figure(
    records: Sequence[ArmRecord],
    title: str,
    *,
    reward_name: str = "metric",
    higher_is_better: bool = False,
    note: str = "",
    winner: int | None = None,
) -> Figure:
    """Draw a search without rungs (the grid tuner): metric against step size.

    One line a batch size and L; arms that failed stand in a strip above. Parameters as in
    ``halving_figure``.
    """
    panel = _panel(records, reward_name, higher_is_better, winner)
    with _styled():
        figure = _new_figure(8.5, 6.0 + 0.34 * len(panel.failures), title, note)
        strips, (axes,) = _axes_pairs(figure, 1, len(panel.failures), (1.0,))
        _set_reward_axis(axes, panel.scale)
        _draw_by_step_size(axes, panel)
        axes.set_ylabel(panel.reward_label())
        _name_best_step(axes, panel)
        if strips:
            steps = {arm.arm: arm.last.step_size for arm in panel.arms}
            _draw_failures(strips[0], panel, steps, named=True)
        if not any(arm.points for arm in panel.arms):
            _say_nothing_usable(axes)
        _add_legend(figure, panel, halving=False)
        return figure


def _name_best_step(axes: Axes, panel: _Panel) -> None:
    arm = next((arm for arm in panel.arms if arm.arm == panel.winner and arm.points), None)
    if arm is None:
        return
    axes.text(
        0.985,
        0.965 if panel.higher_is_better else 0.035,
        f"arm {arm.arm}: {_hyperparameters(arm.last)}",
        transform=axes.transAxes,
        ha="right",
        va="top" if panel.higher_is_better else "bottom",
        fontweight="bold",
        color=panel.colours[arm.last.batch_size],
        gid="winner",
    )


def evaluation_figure(
    reference_std: ArrayLike,
    std: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    title: str = "posterior standard deviations",
    note: str = "",
    reference_name: str = "NUTS",
) -> Figure:
    """Draw a sampler's posterior standard deviations against the ground truth's.

    Up to 40 coordinates: each with its name, the reference hollow, every repeat of the sampler
    filled, and below the relative error ``std / reference_std - 1``. More: a cloud about the
    diagonal, and the distribution of the relative error.

    Parameters
    ----------
    reference_std
        ``[dim]``, positive.
    std
        ``[dim]`` or ``[num_repeats, dim]``; what is not finite is left out and counted.
    names
        Names of the coordinates.
    """
    reference = np.asarray(reference_std, dtype=float)
    repeats = np.atleast_2d(np.asarray(std, dtype=float))
    assert repeats.shape[1] == reference.size, "one standard deviation a coordinate"
    lost = int(np.sum(~np.isfinite(repeats)))
    if lost:
        note = "; ".join(filter(None, [note, f"{lost} not finite, left out"]))
    with _styled():
        if reference.size <= 40:
            labels = list(names) if names else [str(index) for index in range(reference.size)]
            return _coordinates_figure(reference, repeats, labels, title, note, reference_name)
        return _cloud_figure(reference, repeats, title, note, reference_name)


def _coordinates_figure(
    reference: np.ndarray,
    repeats: np.ndarray,
    names: Sequence[str],
    title: str,
    note: str,
    reference_name: str,
) -> Figure:
    figure = _new_figure(max(7.0, 3.0 + 0.45 * reference.size), 6.0, title, note)
    grid = figure.add_gridspec(2, 1, height_ratios=[1.5, 1.0])
    upper = figure.add_subplot(grid[0])
    lower = figure.add_subplot(grid[1], sharex=upper)
    places = np.arange(reference.size)
    spread = np.linspace(-0.12, 0.12, len(repeats)) if len(repeats) > 1 else np.zeros(1)
    upper.plot(
        places,
        reference,
        linestyle="none",
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgecolor="black",
        label=reference_name,
        gid="reference",
    )
    for index, (row, offset) in enumerate(zip(repeats, spread, strict=True)):
        look: dict[str, Any] = {
            "linestyle": "none",
            "marker": "o",
            "markersize": 4.5,
            "color": _PALETTE[0],
        }
        label = "sampler, each repeat" if len(repeats) > 1 else "sampler"
        upper.plot(places + offset, row, label=label if index == 0 else None, **look)
        lower.plot(places + offset, 100 * (row / reference - 1), gid="error", **look)
    values = np.concatenate([reference, repeats[np.isfinite(repeats)]])
    if values.min() > 0 and values.max() / values.min() > 8:
        upper.set_yscale("log")
        _log_ticks(upper.yaxis, *upper.get_ylim())
    upper.set_ylabel("posterior sd")
    upper.tick_params(labelbottom=False)
    lower.axhline(0, color="black", linewidth=0.9)
    lower.set_ylabel("relative error (%)")
    lower.set_xlabel("coordinate")
    lower.set_xticks(places, names, rotation=45 if max(map(len, names)) > 4 else 0)
    for axes in (upper, lower):
        axes.grid(True, axis="y", color="#ececec", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _cloud_figure(
    reference: np.ndarray, repeats: np.ndarray, title: str, note: str, reference_name: str
) -> Figure:
    figure = _new_figure(11.0, 5.4, title, note)
    grid = figure.add_gridspec(1, 2)
    left, right = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    wide = np.broadcast_to(reference, repeats.shape)
    kept = np.isfinite(repeats) & (repeats > 0)
    left.plot(
        wide[kept],
        repeats[kept],
        linestyle="none",
        marker=".",
        markersize=3,
        alpha=0.4,
        color=_PALETTE[0],
        rasterized=True,
        gid="cloud",
    )
    ends = [float(reference.min()), float(reference.max())]
    left.plot(ends, ends, color="black", linewidth=1.0, gid="diagonal")
    if ends[0] > 0 and ends[1] / ends[0] > 8:
        left.set_xscale("log")
        left.set_yscale("log")
        _log_ticks(left.xaxis, *left.get_xlim())
        _log_ticks(left.yaxis, *left.get_ylim())
    left.set_xlabel(f"posterior sd, {reference_name}")
    left.set_ylabel("posterior sd, sampler")
    errors = 100 * (repeats[kept] / wide[kept] - 1)
    beyond = int(np.sum(errors > _LARGEST_ERROR_PERCENT))
    errors = np.minimum(errors, _LARGEST_ERROR_PERCENT)
    if errors.size:
        margin = max(0.02 * float(np.ptp(errors)), 0.1)
        edges = np.linspace(errors.min() - margin, errors.max() + margin, 61)
        right.hist(errors, bins=edges.tolist(), color=_PALETTE[0])
    right.axvline(0, color="black", linewidth=1.0)
    right.set_xlabel(
        "relative error (%)"
        + (f"; {beyond} beyond {_LARGEST_ERROR_PERCENT:g} % in the last bar" if beyond else "")
    )
    right.set_ylabel("coordinates")
    return figure


def posterior_figure(
    mean: ArrayLike,
    std: ArrayLike,
    *,
    title: str = "posterior mean and standard deviation",
    note: str = "",
    reason: str = "",
) -> Figure:
    """Draw the posterior that a sampler found, where there is no ground truth to hold it to.

    Up to 40 coordinates: each with its mean and a bar of one standard deviation either way, one
    a repeat. More: the cloud of standard deviations against means.

    Parameters
    ----------
    mean, std
        ``[num_repeats, dim]``. Repeats that are not finite are left out; the picture of no repeat
        says so.
    reason
        Why no repeat was usable, for the picture of none.
    """
    means, stds = np.atleast_2d(np.asarray(mean, float)), np.atleast_2d(np.asarray(std, float))
    assert means.shape == stds.shape, "a mean and a standard deviation for each coordinate"
    finite = np.all(np.isfinite(means) & np.isfinite(stds), axis=1)
    means, stds = means[finite], stds[finite]
    few = means.shape[1] <= 40
    with _styled():
        figure = _new_figure(
            max(7.0, 3.0 + 0.45 * means.shape[1]) if few else 8.0, 5.4, title, note
        )
        axes = figure.add_subplot()
        if not means.size:
            why = textwrap.fill(reason, 60)
            _say_nothing_usable(axes, "\n".join(filter(None, ["no repeat was usable", why])))
            axes.set_xticks([])
            return figure
        axes.grid(True, axis="y", color="#ececec", linewidth=0.8)
        axes.set_axisbelow(True)
        places = np.arange(means.shape[1])
        spread = np.linspace(-0.18, 0.18, len(means)) if len(means) > 1 else np.zeros(1)
        for row, width, offset in zip(means, stds, spread, strict=True):
            if few:
                axes.errorbar(
                    places + offset, row, width, fmt="o", markersize=4.5, color=_PALETTE[0]
                )
            else:
                look: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": 3}
                axes.plot(
                    row, width, alpha=0.4, color=_PALETTE[0], rasterized=True, gid="cloud", **look
                )
        if few:
            axes.set_xticks(places)
            axes.set_xlabel("coordinate")
            axes.set_ylabel("posterior mean and sd")
        else:
            axes.set_xlabel("posterior mean")
            axes.set_ylabel("posterior sd")
        return figure


def save_picture(figure: Figure, path_or_buffer: str | Path | BinaryIO) -> None:
    """Write ``figure`` as a PNG: to a file, atomically, or into a binary buffer.

    The same figure gives the same bytes. Raises ``StorageError``.
    """

    def write(file: BinaryIO) -> None:
        with _styled():
            figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})

    if isinstance(path_or_buffer, str | Path):
        atomic_write(path_or_buffer, write)
    else:
        write(path_or_buffer)


def halving_picture(
    records: Sequence[ArmRecord],
    title: str,
    path_or_buffer: str | Path | BinaryIO,
    *,
    reward_name: str = "reward",
    higher_is_better: bool = False,
    note: str = "",
    winner: int | None = None,
) -> None:
    """Write the picture of ``halving_figure`` as a PNG. Raises ``StorageError``."""
    figure = halving_figure(
        records,
        title,
        reward_name=reward_name,
        higher_is_better=higher_is_better,
        note=note,
        winner=winner,
    )
    save_picture(figure, path_or_buffer)


def search_picture(
    records: Sequence[ArmRecord],
    title: str,
    path_or_buffer: str | Path | BinaryIO,
    *,
    reward_name: str = "metric",
    higher_is_better: bool = False,
    note: str = "",
    winner: int | None = None,
) -> None:
    """Write the picture of ``search_figure`` as a PNG. Raises ``StorageError``."""
    figure = search_figure(
        records,
        title,
        reward_name=reward_name,
        higher_is_better=higher_is_better,
        note=note,
        winner=winner,
    )
    save_picture(figure, path_or_buffer)


def evaluation_picture(
    reference_std: ArrayLike,
    std: ArrayLike,
    names: Sequence[str] | None,
    path_or_buffer: str | Path | BinaryIO,
    *,
    title: str = "posterior standard deviations",
    note: str = "",
    reference_name: str = "NUTS",
) -> None:
    """Write the picture of ``evaluation_figure`` as a PNG. Raises ``StorageError``."""
    figure = evaluation_figure(
        reference_std, std, names, title=title, note=note, reference_name=reference_name
    )
    save_picture(figure, path_or_buffer)


def posterior_picture(
    mean: ArrayLike,
    std: ArrayLike,
    path_or_buffer: str | Path | BinaryIO,
    *,
    title: str = "posterior mean and standard deviation",
    note: str = "",
    reason: str = "",
) -> None:
    """Write the picture of ``posterior_figure`` as a PNG. Raises ``StorageError``."""
    figure = posterior_figure(mean, std, title=title, note=note, reason=reason)
    save_picture(figure, path_or_buffer)
