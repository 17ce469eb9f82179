"""The tutorial of README.md: its files are written and its commands run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mamba_cli.artifacts import read_table

README = Path(__file__).parents[1] / "README.md"
TRUTH = {"intercept": 1.0, "slopes[0]": 0.5, "slopes[1]": -1.0, "slopes[2]": 2.0}


def blocks() -> list[tuple[str, str, str]]:
    """Language, content, and the text before, of every block of the tutorial."""
    section = re.search(r"^## Your own model\n(.*?)^## ", README.read_text(), re.M | re.S)
    assert section is not None
    parts = re.split(r"^```(\w*)\n(.*?)^```\n", section[1], flags=re.M | re.S)
    return list(zip(parts[1::3], parts[2::3], parts[0::3], strict=False))


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_written(tmp_path: Path) -> None:
    found = blocks()
    assert [language for language, _, _ in found] == ["python", "python", "sh", "python", "sh"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("MAMBA_RESULTS_DIR", None)
    for language, content, before in found:
        if language == "python":
            name = re.findall(r"`(\w+\.py)`", before)[-1]
            (tmp_path / name).write_text(content)
            continue
        done = subprocess.run(
            ["sh", "-e", "-c", content],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step sizes 10^" in done.stderr
    for model in ("python", "numpyro"):
        folder = tmp_path / "results" / "runs" / model / "sgld_cv" / "mamba" / "seed-0"
        _, rows = read_table(folder / "parameters.csv")
        means = {row["parameter"]: float(row["mean"]) for row in rows}
        for name, truth in TRUTH.items():
            # Posterior sds are about 0.009: five of them, for data that are a sd or two away.
            assert means[name] == pytest.approx(truth, abs=0.05), (model, name)
