"""README.md holds: its Python runs as it stands, its tutorial too, and its commands compose."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig

from mamba_cli.artifacts import read_table
from mamba_cli.config import group_options, settings_from

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TUTORIAL = "Your own model"
# What the tutorial's data are made with.
TRUTH = {"intercept": 1.0, "slopes[0]": 0.5, "slopes[1]": -1.0, "slopes[2]": 2.0}


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Language, content, and the text before, of every block."""
    parts = re.split(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return list(zip(parts[1::3], parts[2::3], parts[0::3], strict=False))


def commands() -> list[list[str]]:
    """The words of every line that starts ``mamba-run``, in a block of any section."""
    lines = [
        line
        for _, content, _ in blocks(README)
        for line in content.replace("\\\n", " ").splitlines()
    ]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("mamba-run ")]


def test_every_python_block_is_run_by_a_test_here() -> None:
    count = {
        title: [language for language, _, _ in blocks(section(title))].count("python")
        for title in re.findall(r"^## (.*)$", README, re.MULTILINE)
    }
    assert {title: n for title, n in count.items() if n} == {"From Python": 2, TUTORIAL: 3}


@pytest.mark.slow
def test_from_python_runs_as_it_stands() -> None:
    first, second = (code for language, code, _ in blocks(section("From Python")) if language)
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    tuned, draws = names["tuned"], names["draws"]
    assert draws["w"].shape[1:] == (3,)
    assert len(draws["w"]) > 100
    assert tuned.records["promoted"].any()
    # The weights that made the data are within five posterior sds (of about 1/sqrt(N p(1-p))).
    np.testing.assert_allclose(draws.mean[0], [1.0, -1.0, 0.5], atol=5 / np.sqrt(20_000 * 0.17))
    assert list(draws.summary().index) == ["w[0]", "w[1]", "w[2]"]
    exec(compile(second, "README.md", "exec"), names)
    assert names["draws"]["x"].shape == (1000, 2)
    assert names["state"].position.shape == (2,)


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_written(tmp_path: Path) -> None:
    found = blocks(section(TUTORIAL))
    assert [language for language, _, _ in found] == ["python", "python", "sh", "python", "sh"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for language, content, before in found:
        if language == "python":
            name = re.findall(r"`(\w+\.py)`", before)[-1]
            (tmp_path / name).write_text(content)
            continue
        done = subprocess.run(
            ["sh", "-e", "-c", content],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
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


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_keys_and_options_that_exist(
    compose: Callable[..., DictConfig], words: list[str]
) -> None:
    own = [word for word in words[1:] if not word.startswith(("-", "hydra"))]
    # Of a sweep, the first of the values.
    first = [re.sub(r"=([^\[{][^,]*),.*", r"=\1", word) for word in own]
    settings_from(compose(*first))


def test_the_table_of_groups_has_every_option() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section("Use"), re.MULTILINE))
    options = group_options()
    for group, names in options.items():
        if group == "noise":  # how normal variates are made is nobody's choice but a benchmark's
            continue
        said = set(re.findall(r"`(\w+)`", rows[group]))
        # A sampler is named once, for its two gradients.
        missing = [name for name in names if name.removesuffix("_cv") not in said]
        assert not missing, (group, missing)
