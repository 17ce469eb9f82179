"""mamba-summary: which runs are found, their means, the table and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mamba_cli import artifacts, summary
from mamba_cli.summary import MEASURES, gathered, measure_of, picture, printed


def make_run(folder: Path, seed: int = 0, sampler: str = "sgld", **changes: Any) -> None:
    names = {"model": "logreg", "sampler": sampler, "tuner": "mamba_ksd", "budget": "quick"}
    config = {key: {"name": value} for key, value in names.items()} | {"seed": seed}
    artifacts.write_json(folder / "provenance.json", {"config": config})
    if changes.get("tuned", True):
        best = {"step_size": 1e-4, "batch_percent": 10.0, "num_integration_steps": 1}
        artifacts.write_json(folder / "best.json", best)
    rows = changes.get("rows", [{"ksd": 2.0, "status": "ok"}, {"ksd": 3.0, "status": "ok"}])
    if rows:
        columns = [*dict.fromkeys(key for row in rows for key in row)]
        artifacts.write_table(folder / "metrics.csv", columns, rows)


def test_a_row_is_the_mean_of_the_usable_repeats(tmp_path: Path) -> None:
    failed = {"status": "diverged", "reason": "h"}
    make_run(tmp_path / "b", 1, rows=[{"ksd": 2.0, "status": "ok"}, failed])
    make_run(tmp_path / "deep" / "a", 0)
    make_run(tmp_path / "c", 2, rows=[failed])
    make_run(tmp_path / "d", 3, rows=[])
    make_run(tmp_path / "e", 4, rows=[], tuned=False)
    rows = gathered([tmp_path])
    assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["ksd"] for row in rows] == [2.5, 2.0, None, None, None]
    assert [row["status"] for row in rows] == [
        "ok",
        "ok",
        "diverged",
        "not evaluated",
        "no winner",
    ]
    assert [(row["repeats"], row["usable"]) for row in rows[:3]] == [(2, 2), (2, 1), (1, 0)]
    assert rows[0]["step_size"] == 1e-4
    assert rows[4]["step_size"] is None
    assert rows[0]["run"] == str(tmp_path / "deep" / "a")


def test_a_run_named_twice_is_one_row(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert len(gathered([tmp_path, tmp_path, tmp_path / "a"])) == 1


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", sampler="sghmc", rows=[{"relative_std_error": 0.125, "status": "ok"}])
    assert summary._exit_code([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 runs" in out
    assert "0.125" in out
    assert "rmse" not in out
    columns, rows = artifacts.read_table(tmp_path / "summary.csv")
    assert columns == list(summary.COLUMNS)
    assert [row["sampler"] for row in rows] == ["sghmc", "sgld"]
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")
    # What it has written is not taken for a run.
    assert len(gathered([tmp_path])) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no run was found"),
        (lambda folder: artifacts.write_json(folder / "provenance.json", {}), "no configuration"),
    ],
)
def test_a_folder_without_runs_is_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    make(tmp_path)
    assert summary._exit_code([str(tmp_path)]) == 3
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summary._exit_code([str(tmp_path / "nothing")]) == 3
    assert "is not there" in capsys.readouterr().err


def test_the_picture_shows_what_most_runs_have(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rows=[{"ksd": 2.0, "accuracy": 0.9, "status": "ok"}])
    make_run(tmp_path / "b", 1, rows=[{"ksd": 50.0, "status": "ok"}])
    make_run(tmp_path / "c", 2, rows=[])
    rows = gathered([tmp_path])
    assert measure_of(rows) == "ksd"
    (axes,) = picture(rows).axes
    assert axes.get_xlabel() == MEASURES["ksd"]
    assert axes.get_xscale() == "log"
    assert list(axes.lines[0].get_xdata()) == [2.0, 50.0]
    assert [text.get_text() for text in axes.texts] == ["1 of 3 without a value"]


def test_runs_without_any_metric_are_a_table_and_an_empty_picture(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rows=[])
    rows = gathered([tmp_path])
    assert printed(rows)[0][-1] == "status"
    (axes,) = picture(rows).axes
    assert axes.get_xlabel() == "no run has been evaluated"
