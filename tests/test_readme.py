"""What the README shows as Python runs as it stands, and its commands compose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from mamba_cli.config import settings_from

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_from_python_runs_as_it_stands() -> None:
    first, second = blocks(section("From Python"), "python")
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


def test_the_commands_of_sweeps_and_replay_have_keys_that_exist(
    compose: Callable[..., DictConfig],
) -> None:
    commands = [
        shlex.split(line.partition("#")[0])
        for title in ("Sweeps", "Reproducible although timed")
        for block in blocks(section(title), "")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("mamba-run")
    ]
    assert len(commands) == 5
    for words in commands:
        own = [word for word in words[1:] if word != "-m" and not word.startswith("hydra")]
        settings_from(compose(*(re.sub(r"(=[^,]*),.*", r"\1", word) for word in own)))
