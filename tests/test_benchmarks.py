"""The benchmarks run, on little: what they measure is no business of a test."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments.benchmarks import (
    accuracy,
    cells,
    chain,
    floor,
    nuts,
    published,
    report,
    rewards,
    scaling,
    tuning,
)
from experiments.benchmarks.published import COLUMNS, KEYS
from experiments.readme import between


def columns(path: Path) -> list[dict[str, str]]:
    return cells.rows_of(path.stem, path.parent)


def test_a_cell_that_is_there_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    table = cells.Table(path, ("name", "size"), ("seconds",))
    table.add(name="a", size=10, seconds=0.123456)
    again = cells.Table(path, ("name", "size"), ("seconds",))
    assert again.has("a", 10)
    assert not again.has("a", 11)
    assert again.rows[0]["seconds"] == "0.1235"
    text = path.read_text().replace(cells.code(), "000000000000")
    path.write_text(text)
    assert not cells.Table(path, ("name", "size"), ("seconds",)).has("a", 10)


def test_chains_and_discrepancies_are_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, "STREAM_BYTES", (1_000_000,))
    out = ["--out", str(tmp_path)]
    small = ["--models", "logreg", "--samplers", "sgld", "--percents", "10"]
    chain.main([*small, "--num-train", "2000", "--seconds", "0.01", *out])
    kinds = {(row["batch_size"], row["kind"]) for row in columns(tmp_path / "chain.csv")}
    assert kinds == {(str(chain.FEW), "without_replacement")} | {
        ("200", kind) for kind in ("without_replacement", "reshuffle", "blackjax")
    }
    sizes = ["--num-data", "2000", "--num-draws", "20", "--dims", "10"]
    scaling.main(["--seconds", "0.01", *sizes, *out])
    for name in ("chain.png", "scaling.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    report.main(out)
    text = (tmp_path / "report.md").read_text()
    assert "| logreg | sgld | 200 | without_replacement |" in text


def test_what_was_not_measured_is_not_reported_as_met(tmp_path: Path) -> None:
    row = {
        "model": "logreg", "sampler": "sgld", "batch_size": 1000, "kind": "without_replacement",
        "num_data": 1_000_000, "num_integration_steps": 1, "draws_per_s": 10.0,
        "floor_draws_per_s": 1000.0, "compile_s": 1.0,
    }  # fmt: skip
    cells.Table(tmp_path / "chain.csv", chain.KEYS, chain.COLUMNS).add(**row)
    report.main(["--out", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "every measured cell is faster" not in text
    # Without a cell of few rows nothing is known of its share.
    far = [line for line in text.splitlines() if "without_replacement | 100 |" in line]
    assert len(far) == 1
    assert "%" not in far[0]
    published = {
        "model": "logreg", "sampler": "sgld", "num_data": 1_000_000, "draws_per_s": 5.0,
        "versions": "x",
    }  # fmt: skip
    table = cells.Table(tmp_path / "published.csv", KEYS, COLUMNS)
    table.add(**published, batch_size=1000)
    table.add(**published, batch_size=10_000)
    report.main(["--out", str(tmp_path)])
    slower = (tmp_path / "report.md").read_text().partition("slower than the published")[2]
    rows = [line for line in slower.partition("##")[0].splitlines() if "| logreg |" in line]
    # The cell of ours that is missing is listed, the faster one is not.
    assert [line.split("|")[3].strip() for line in rows] == ["10,000"]


def test_the_targets_in_the_readme_are_those_of_the_results() -> None:
    root = Path(__file__).parents[1]
    shown = between(root / "README.md", report.BEGIN, report.END)
    assert shown == "\n".join(report.Figures(root / "results" / "benchmarks").targets())


def test_a_target_says_in_how_many_cells_it_is_met(tmp_path: Path) -> None:
    ours = cells.Table(tmp_path / "chain.csv", chain.KEYS, chain.COLUMNS)
    theirs = cells.Table(tmp_path / "published.csv", KEYS, COLUMNS)
    for sampler, speed in (("sgld", 150.0), ("sgnht", 130.0)):
        key: dict[str, Any] = {"model": "pmf", "sampler": sampler, "batch_size": 800}
        key["num_data"] = 80_000
        ours.add(
            **key, kind="without_replacement", num_integration_steps=1, draws_per_s=speed,
            floor_draws_per_s=1000.0, compile_s=1.0,
        )  # fmt: skip
        theirs.add(**key, draws_per_s=100.0, versions="x")
    lines = report.Figures(tmp_path).targets()
    (line,) = (line for line in lines if line.startswith("| pmf, n = 1 %"))
    assert line.endswith("| at least 1.4 | 1.3 to 1.5 | 1 of 2 |")
    (line,) = (line for line in lines if line.startswith("| bnn, n = 1 %"))
    assert line.endswith("| at least 1.2 | - | 0 of 0 |")


def test_a_cell_without_a_draw_has_no_ratio(tmp_path: Path) -> None:
    table = cells.Table(tmp_path / "chain.csv", chain.KEYS, chain.COLUMNS)
    for sampler in ("sgld", "sgld_cv"):
        for n in (chain.FEW, 1000):
            table.add(
                model="pmf", sampler=sampler, batch_size=n, kind="without_replacement",
                num_data=80_000, num_integration_steps=1, draws_per_s=0.0,
                floor_draws_per_s=1000.0, compile_s=1.0,
            )  # fmt: skip
    report.main(["--out", str(tmp_path)])
    assert (
        "| pmf | without_replacement | 1,000 | sgld | - |" in (tmp_path / "report.md").read_text()
    )


def test_the_ksd_row_by_row_is_the_ksd() -> None:
    found = rewards.time_ksd(40, 10)
    # Single precision, summed in two orders.
    assert found["relative_difference"] < 1e-5


def test_time_to_accuracy_is_when_the_error_stays_below() -> None:
    looks = [
        {"wall_s": str(wall_s), "error": str(error)}
        for wall_s, error in ((1, 0.5), (2, 0.04), (3, 0.06), (4, 0.04), (5, 0.03))
    ]
    assert accuracy.seconds_to(looks, 0.1) == 2
    assert accuracy.seconds_to(looks, 0.05) == 4
    assert accuracy.seconds_to(looks, 0.02) != accuracy.seconds_to(looks, 0.02)


def test_quoted_figures_are_found_by_their_batch_size() -> None:
    assert published.quoted("logreg", "sgld_cv", 10_000) == 2097
    assert published.quoted("bnn", "sghmc_cv", 6000) == 12
    assert published.quoted("logreg", "sghmc_cv", 1000) is None
    assert published.quoted("pmf", "sgld", 123) is None


@pytest.mark.parametrize("program", [tuning, nuts])
def test_the_others_say_what_they_do(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    assert "--out" in capsys.readouterr().out
