"""The pictures: what is on them, read back from matplotlib's objects."""

from __future__ import annotations

import io
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mamba_cli import plots
from mamba_cli.errors import StorageError
from mamba_cli.types import ArmRecord

pytestmark = pytest.mark.rendered

BATCH_SIZES = (1_000, 10_000, 100_000)


def record(rung: int, arm: int, **changes: Any) -> ArmRecord:
    plain = ArmRecord(
        rung=rung,
        arm=arm,
        step_size=10.0 ** -(1 + arm % 3),
        batch_size=BATCH_SIZES[arm // 3],
        num_integration_steps=1,
        budget_s=0.1,
        elapsed_s=0.1 * 3**rung,
        compile_s=0.0,
        reward_s=0.0,
        num_steps=100,
        num_draws=100,
        num_scored=100,
        reward=10.0 / (arm + 1) / (rung + 1),
        status="ok",
        reason="",
        promoted=True,
    )
    return plain._replace(**changes)


def halving(**changes: Any) -> list[ArmRecord]:
    """Nine arms, three, one: the arms with the highest number are the best."""
    return [
        record(rung, arm, **changes)
        for rung, arms in enumerate([range(9), (6, 7, 8), (8,)])
        for arm in arms
    ]


def artists(axes: Any, gid: str) -> list[Any]:
    return [artist for artist in axes.get_children() if artist.get_gid() == gid]


def texts(figure: Any) -> str:
    import matplotlib.text

    return "\n".join(item.get_text() for item in figure.findobj(matplotlib.text.Text))


def legend(figure: Any) -> list[str]:
    return [item.get_text() for item in figure.legends[0].get_texts()]


def png_size(content: bytes) -> tuple[int, int]:
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def assert_nothing_overlaps(figure: Any) -> None:
    """No text on another text of the figure, none outside it."""
    import matplotlib.text

    figure.canvas.draw()
    boxes = [
        (item.get_text(), item.get_window_extent())
        for item in figure.findobj(matplotlib.text.Text)
        if item.get_visible() and item.get_text().strip()
    ]
    ticks = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        for label in (tick.label1, tick.label2)
    }
    # Tick labels of ticks beyond the limits exist and are not drawn.
    drawn = [
        (item.get_text(), item.get_window_extent())
        for item in figure.findobj(matplotlib.text.Text)
        if item.get_visible() and item.get_text().strip() and item not in ticks
    ]
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            drawn += [
                (tick.label1.get_text(), tick.label1.get_window_extent())
                for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high
                and tick.label1.get_visible()
                and tick.label1.get_text()
            ]
    assert len(boxes) >= len(drawn) > 5
    width, height = figure.canvas.get_width_height()
    for index, (text, box) in enumerate(drawn):
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
        for other, other_box in drawn[index + 1 :]:
            assert not box.shrunk(0.9, 0.9).overlaps(other_box.shrunk(0.9, 0.9)), (text, other)


def test_one_line_an_arm_through_the_rungs() -> None:
    figure = plots.halving_figure(halving(), "title", reward_name="KSD")
    left = figure.axes[0]
    lines = {
        line.get_label(): line
        for line in [*artists(left, "arm"), *artists(left, "winner")]
        if hasattr(line, "get_xdata")
    }
    assert set(lines) == {f"arm {arm}" for arm in range(9)}
    assert [len(lines[f"arm {arm}"].get_xdata()) for arm in range(9)] == [1] * 6 + [2, 2, 3]
    np.testing.assert_allclose(lines["arm 8"].get_xdata(), [0.1, 0.3, 0.9])
    np.testing.assert_allclose(lines["arm 8"].get_ydata(), [10 / 9, 10 / 18, 10 / 27])
    assert left.get_xscale() == "log"
    assert left.get_yscale() == "log"
    assert left.get_ylabel() == "KSD (lower is better)"


def test_the_winner_is_bold_and_named_and_pruned_arms_are_grey() -> None:
    figure = plots.halving_figure(halving(), "title")
    left = figure.axes[0]
    lines = {line.get_label(): line for line in left.get_lines()}
    assert lines["arm 8"].get_linewidth() == max(line.get_linewidth() for line in lines.values())
    assert lines["arm 8"].get_color() == "#009E73"
    assert all(lines[f"arm {arm}"].get_color() == "#c8c8c8" for arm in range(8))
    assert len(artists(left, "pruned")) == 8
    assert "arm 8: h = 0.001, n = 100,000, L = 1" in texts(figure)
    assert legend(figure) == ["n = 1,000", "n = 10,000", "n = 100,000", "pruned", "winner"]


def test_survivors_take_the_colour_of_their_batch_size() -> None:
    records = [record(rung, arm) for rung in range(2) for arm in (0, 3, 6)]
    left = plots.halving_figure(records, "title").axes[0]
    colours = {line.get_label(): line.get_color() for line in left.get_lines()}
    assert [colours[f"arm {arm}"] for arm in (0, 3, 6)] == ["#0072B2", "#D55E00", "#009E73"]


def test_rungs_are_marked_where_they_ended() -> None:
    figure = plots.halving_figure(halving(), "title")
    marks = artists(figure.axes[0], "rung")
    assert [mark.get_text() for mark in marks] == [
        "rung 0\n9 arms",
        "rung 1\n3 arms",
        "rung 2\n1 arm",
    ]
    np.testing.assert_allclose([mark.get_position()[0] for mark in marks], [0.1, 0.3, 0.9])


def test_the_second_panel_is_the_last_rung_by_step_size() -> None:
    figure = plots.halving_figure(halving(), "title")
    right = figure.axes[1]
    lines = artists(right, "batch size")
    assert [line.get_label() for line in lines] == [f"n = {size:,}, L = 1" for size in BATCH_SIZES]
    np.testing.assert_allclose(lines[2].get_xdata(), [1e-3, 1e-2, 1e-1])
    np.testing.assert_allclose(lines[2].get_ydata(), [10 / 27, 10 / 16, 10 / 14])
    (star,) = artists(right, "winner")
    assert star.get_marker() == "*"
    assert star.get_xdata() == [1e-3]
    assert right.get_xlabel() == "step size h"


def with_failures() -> list[ArmRecord]:
    return [
        item._replace(status="diverged", reward=math.nan)
        if item.arm in (0, 3)
        else item._replace(status="no_draws", reward=math.nan, elapsed_s=0.0)
        if item.arm == 1
        else item._replace(reward=math.inf)
        if item.arm == 2
        else item._replace(status="frozen", reward=1e-9)
        if item.arm == 7 and item.rung == 1
        else item
        for item in halving()
    ]


def test_no_failed_arm_is_dropped() -> None:
    figure = plots.halving_figure(with_failures(), "title")
    assert len(figure.axes) == 4
    _, _, strip, other = figure.axes
    assert [label.get_text() for label in strip.get_yticklabels()] == [
        "diverged (2)",
        "frozen (1)",
        "no draws (1)",
        "no finite reward (1)",
    ]
    for axes in (strip, other):
        assert len(artists(axes, "failed")) == 5
    assert "failed (5)" in legend(figure)
    low, high = strip.get_xlim()
    for mark in artists(strip, "failed"):
        assert low <= mark.get_xdata()[0] <= high


def test_a_failed_arm_keeps_the_points_from_before_it_failed() -> None:
    figure = plots.halving_figure(with_failures(), "title")
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert len(lines["arm 7"].get_xdata()) == 1
    assert "arm 0" not in lines


def test_a_frozen_arm_never_wins_by_its_number() -> None:
    records = [record(0, 0, reward=1.0), record(0, 1, reward=1e-9, status="frozen")]
    assert plots.winning_arm(records) == 0


def test_the_winner_is_of_the_last_rung_and_finite() -> None:
    assert plots.winning_arm(halving()) == 8
    records = [record(0, 0, reward=0.1), record(1, 1, reward=0.5), record(1, 2, reward=math.nan)]
    assert plots.winning_arm(records) == 1
    tied = [record(0, 2, reward=0.5), record(0, 1, reward=0.5)]
    assert plots.winning_arm(tied) == 1
    assert plots.winning_arm([record(0, 0, reward=math.inf)]) is None
    assert plots.winning_arm([]) is None
    higher = [record(0, 0, reward=0.9), record(0, 1, reward=0.8)]
    assert plots.winning_arm(higher, higher_is_better=True) == 0


def test_a_winner_can_be_given() -> None:
    records = [record(0, arm) for arm in range(3)]
    assert "arm 0: h = 0.1" in texts(plots.halving_figure(records, "title", winner=0))


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_the_winners_name_stands_clear_of_the_data(higher_is_better: bool) -> None:
    records = halving()
    if higher_is_better:
        records = [item._replace(reward=1 / (1 + item.reward)) for item in records]
    figure = plots.halving_figure(records, "title", higher_is_better=higher_is_better)
    figure.canvas.draw()
    left = figure.axes[0]
    (name,) = (item for item in artists(left, "winner") if hasattr(item, "get_text"))
    box = name.get_bbox_patch().get_window_extent()
    for line in left.get_lines():
        if line.get_label().startswith("arm"):
            points = line.get_transform().transform(line.get_xydata())
            assert not any(box.contains(*point) for point in points)


def test_higher_is_better_is_said_and_linear() -> None:
    records = [item._replace(reward=0.01 * (item.arm + 1)) for item in halving()]
    figure = plots.halving_figure(records, "t", reward_name="accuracy", higher_is_better=True)
    assert figure.axes[0].get_ylabel() == "accuracy (higher is better)"
    assert figure.axes[0].get_yscale() == "linear"


def test_one_far_reward_does_not_flatten_the_basin() -> None:
    records = [item._replace(reward=1e30) if item.arm == 4 else item for item in halving()]
    figure = plots.halving_figure(records, "title")
    low, high = figure.axes[0].get_ylim()
    assert high / low < 1e7
    assert "off the scale (1)" in legend(figure)
    (mark,) = artists(figure.axes[0], "off scale")
    assert mark.get_ydata()[0] == pytest.approx(high)


def test_a_reward_of_both_signs_with_outliers_shows_both() -> None:
    rewards = [-1.0, -0.5, 0.2, 0.3, 1e6, 0.1, -0.2, 0.4, -0.9]
    records = [item._replace(reward=rewards[item.arm]) for item in halving()]
    figure = plots.halving_figure(records, "title")
    axes = figure.axes[0]
    assert axes.get_yscale() == "asinh"
    heights = axes.transData.transform([(0.1, value) for value in (-1.0, 0.0, 0.4, 1e6)])[:, 1]
    assert (np.diff(heights) > 5).all()
    assert_nothing_overlaps(figure)


def test_all_arms_failed() -> None:
    records = [record(0, arm, status="diverged", reward=math.nan) for arm in range(9)]
    figure = plots.halving_figure(records, "title")
    assert texts(figure).count("no arm gave a finite reward") == 2
    assert "diverged (9)" in texts(figure)
    assert "winner" not in legend(figure)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(0, 0)],
        [record(0, 0, elapsed_s=0.0)],
        [record(0, 0, reward=0.0)],
        [record(0, 0, reward=-3.0), record(0, 1, reward=-3.0)],
        [record(0, 0, status="no_draws", reward=math.nan, elapsed_s=0.0)],
        [record(0, 0, step_size=1e6), record(0, 3, step_size=1e6)],
        [record(0, 0, elapsed_s=math.nan), record(0, 1)],
    ],
    ids=["none", "one", "no time", "zero", "equal", "no draws", "one step size", "nan time"],
)
def test_odd_records_are_drawn_without_a_warning(records: list[ArmRecord]) -> None:
    for picture in (plots.halving_picture, plots.search_picture):
        buffer = io.BytesIO()
        picture(records, "title", buffer)
        png_size(buffer.getvalue())


def test_many_batch_sizes_and_both_lengths_are_told_apart() -> None:
    records = [
        record(0, arm, batch_size=100 * (1 + arm // 2), num_integration_steps=5 + 5 * (arm % 2))
        for arm in range(9)
    ]
    figure = plots.halving_figure(records, "title")
    assert {"L = 5", "L = 10"} <= set(legend(figure))
    many = [record(0, 0)._replace(arm=arm, batch_size=100 * (arm + 1)) for arm in range(9)]
    colours = {
        tuple(np.ravel(line.get_color()))
        for line in plots.halving_figure(many, "title").axes[0].get_lines()
        if line.get_label().startswith("arm")
    }
    assert len(colours) == 9


@pytest.mark.parametrize("records", [halving(), with_failures()], ids=["plain", "failures"])
@pytest.mark.parametrize("note", ["", "budget=quick: NOT the paper's size"])
def test_no_text_overlaps_another(records: list[ArmRecord], note: str) -> None:
    figure = plots.halving_figure(records, "logreg · sgld · mamba_ksd · seed 0", note=note)
    assert_nothing_overlaps(figure)
    assert_nothing_overlaps(plots.search_figure(records[:9], "grid", note=note))


def test_the_legend_stands_outside_the_data() -> None:
    figure = plots.halving_figure(with_failures(), "title")
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert all(not box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_a_quick_run_says_so_in_red() -> None:
    note = "budget=quick: NOT the paper's size"
    for figure in (
        plots.halving_figure(halving(), "title", note=note),
        plots.search_figure(halving()[:9], "title", note=note),
        plots.evaluation_figure([1.0], [1.0], note=note),
    ):
        heading = figure.get_suptitle()
        assert heading.endswith(note)
        assert figure._suptitle.get_color() == "#B00020"  # type: ignore[attr-defined]


def test_the_search_picture_has_the_metric_against_the_step_size() -> None:
    figure = plots.search_figure(halving()[:9], "grid", reward_name="log loss")
    (axes,) = figure.axes
    assert axes.get_ylabel() == "log loss (lower is better)"
    assert len(artists(axes, "batch size")) == 3
    assert "arm 8: h = 0.001, n = 100,000, L = 1" in texts(figure)


def test_the_evaluation_picture_by_coordinate() -> None:
    reference = np.array([0.01, 0.02, 0.04])
    std = np.array([[0.011, 0.02, 0.02], [0.01, 0.03, math.nan]])
    figure = plots.evaluation_figure(reference, std, ["a", "b", "long name"])
    upper, lower = figure.axes
    (hollow,) = artists(upper, "reference")
    np.testing.assert_array_equal(hollow.get_ydata(), reference)
    errors = [line.get_ydata() for line in artists(lower, "error")]
    np.testing.assert_allclose(errors, [[10, 0, -50], [0, 50, math.nan]], atol=1e-9)
    assert [label.get_text() for label in lower.get_xticklabels()] == ["a", "b", "long name"]
    assert "1 not finite, left out" in figure.get_suptitle()
    assert lower.get_xlabel() == "coordinate"
    assert_nothing_overlaps(figure)


def test_the_evaluation_picture_of_many_coordinates_is_a_cloud() -> None:
    generator = np.random.default_rng(0)
    reference = generator.lognormal(size=2_000)
    figure = plots.evaluation_figure(reference, 1.1 * reference)
    left, right = figure.axes
    (cloud,) = artists(left, "cloud")
    assert len(cloud.get_xdata()) == 2_000
    assert right.get_xlabel() == "relative error (%)"
    assert sum(patch.get_height() for patch in right.patches) == 2_000
    assert_nothing_overlaps(figure)


def test_the_posterior_without_a_ground_truth_has_a_bar_a_coordinate_and_repeat() -> None:
    mean = np.array([[1.0, -2.0], [1.1, -2.1], [math.nan, 0.0]])
    std = np.array([[0.1, 0.2], [0.1, 0.3], [0.1, 0.2]])
    figure = plots.posterior_figure(mean, std, note="note")
    (axes,) = figure.axes
    assert len(axes.containers) == 2  # the repeat that is not finite is left out
    for container, heights, widths in zip(axes.containers, mean, std, strict=False):
        points, _, (bars,) = container  # type: ignore[misc]
        np.testing.assert_array_equal(points.get_ydata(), heights)
        ends = np.array([segment[:, 1] for segment in bars.get_segments()])
        np.testing.assert_allclose(ends, np.stack([heights - widths, heights + widths], 1))
    assert_nothing_overlaps(figure)


def test_the_posterior_in_many_coordinates_is_a_cloud_and_none_is_said() -> None:
    (axes,) = plots.posterior_figure(np.zeros((1, 500)), np.ones((1, 500))).axes
    (cloud,) = artists(axes, "cloud")
    assert len(cloud.get_xdata()) == 500
    nothing = plots.posterior_figure(np.full((1, 3), math.nan), np.ones((1, 3)))
    assert "no repeat was usable" in texts(nothing)


def test_the_picture_of_a_failed_chain_says_why_under_its_whole_title() -> None:
    title = "logreg, sghmc_cv, mamba_ksd, seed 1234567: posterior standard deviations, " * 2
    why = "diverged: the position is not finite at step 12,345 of a chain of 100,000 steps"
    figure = plots.posterior_figure(
        np.full((1, 3), math.nan), np.ones((1, 3)), title=title, note="note", reason=why
    )
    assert why in texts(figure).replace("\n", " ")
    assert [*title.split(), "note"] == figure.get_suptitle().split()
    figure.canvas.draw()
    (axes,) = figure.axes
    (said,) = axes.texts
    for text in (figure._suptitle, said):  # type: ignore[attr-defined]
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
    assert said.get_window_extent().y1 < figure._suptitle.get_window_extent().y0  # type: ignore[attr-defined]


def test_huge_errors_are_counted_in_the_last_bar() -> None:
    std = np.ones(100)
    std[:3] = 1e6
    std[3] = math.inf
    _, right = plots.evaluation_figure(np.ones(100), std).axes
    assert "3 beyond 300 %" in right.get_xlabel()
    assert sum(patch.get_height() for patch in right.patches) == 99


def test_png_files_have_the_size_they_should_and_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plots.halving_picture(halving(), "title", tmp_path / name)
    content = (tmp_path / "a.png").read_bytes()
    width, height = png_size(content)
    assert (width, height) == (1950, 990)
    assert content == (tmp_path / "b.png").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png"}


def test_every_picture_is_written(tmp_path: Path) -> None:
    plots.search_picture(halving()[:9], "title", tmp_path / "search.png")
    plots.evaluation_picture([1.0, 2.0], [1.1, 2.0], None, tmp_path / "evaluation.png")
    for name in ("search.png", "evaluation.png"):
        png_size((tmp_path / name).read_bytes())


def test_a_picture_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(StorageError, match=r"folder\.png"):
        plots.halving_picture(halving(), "title", tmp_path / "folder.png")


def test_matplotlib_is_imported_when_drawing_and_pyplot_never() -> None:
    code = (
        "import sys, io\n"
        "from mamba_cli import plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plots.halving_picture([], 'title', io.BytesIO())\n"
        "assert 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
