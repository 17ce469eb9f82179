"""The study's report, and the table in README.md that it writes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments.readme import between
from experiments.reward_study import options, report

ROOT = Path(__file__).parents[2]


def test_the_table_in_the_readme_is_that_of_the_results() -> None:
    shown = between(ROOT / "README.md", report.BEGIN, report.END)
    assert shown == report.readme_table(ROOT / options.RESULTS).strip()


def test_the_summary_is_that_of_the_results() -> None:
    folder = ROOT / options.RESULTS
    shown = (folder / "summary.md").read_text(encoding="utf-8")
    assert shown == report.document(folder, quick=False)


def test_a_target_is_met_or_missed_by_so_much() -> None:
    line = report.target("Regret", 1.7, 1.5, least=False)
    assert line == "* Regret: 1.7, target at most 1.5: **not met**, by 0.2."
    assert report.target("Share", 0.93, 0.93, least=True).endswith("met.")
    assert "not met" in report.target("Share", float("nan"), 0.93, least=True)


def test_what_was_not_run_is_named() -> None:
    table = pd.DataFrame({"target": ["a", "b"], "sampler": ["s", "t"], "agree": 1})
    wanted = [("a", "s"), ("a", "t"), ("b", "s"), ("b", "t")]
    line = report.not_run(table, wanted, ("target", "sampler"))
    assert line == ["* Not run: a t, b s."]
    assert report.not_run(table, wanted[:1], ("target", "sampler")) == []


def test_the_report_has_every_part_that_is_there(tmp_path: Path) -> None:
    summary = pd.DataFrame(
        {
            "reward": ["stein_moments", "ksd"] * 2,
            "guards": [True, True, False, False],
            "problems": 30,
            "rho_median": [0.95, 0.6, 0.9, 0.5],
            "rho_min": [0.9, 0.1, 0.8, 0.0],
            "regret_median": [1.01, 1.4, 1.02, 2.0],
            "regret_max": [1.6, 40.0, 3.0, 1e6],
            "broken": [0, 0, 1, 20],
        }
    )
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", encoding="utf-8")
    summary.to_csv(tmp_path / "summary.csv", index=False)
    report.main(["--out", str(tmp_path), "--readme", str(readme)])
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "Worst regret: 1.6, target at most 1.5: **not met**, by 0.1." in text
    assert "Median regret: 1.01, target at most 1.05: met." in text
    assert text.count(report.NOT_MADE) == len(report.PARTS) - 1
    shown = readme.read_text(encoding="utf-8")
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter\n")
    assert "| `ksd` | 0.60 | 1.40 | 40 | 20 of 30 |" in shown
    assert "old" not in shown


def test_a_toy_run_is_elsewhere_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report.main(["--quick"])
    text = (options.QUICK_RESULTS / "summary.md").read_text(encoding="utf-8")
    assert "Toy sizes" in text
