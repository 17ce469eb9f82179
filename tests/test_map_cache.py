"""A MAP is searched for once for a model, its settings and a seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gaussian_model import gaussian_mean

from mamba_cli.map_cache import cache_path, cached_map
from mamba_cli.map_estimate import AdamPhase, MapEstimate, MapSettings
from mamba_cli.types import SilentReporter

MODEL = gaussian_mean(num_data=64, dim=3)
SETTINGS = MapSettings()


class Listening(SilentReporter):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def found_in(folder: Path, reporter: Listening | None = None) -> MapEstimate:
    return cached_map(MODEL, SETTINGS, seed=0, cache_dir=folder, reporter=reporter or Listening())


def test_the_second_run_takes_the_first_ones_map(tmp_path: Path) -> None:
    first, reporter = found_in(tmp_path), Listening()
    again = found_in(tmp_path, reporter)
    np.testing.assert_allclose(first.position, MODEL.posterior_mean, rtol=1e-6)
    np.testing.assert_array_equal(first.position, again.position)
    assert first[1:] == again[1:]  # the seconds too: nothing was searched
    (message,) = reporter.messages
    assert message.startswith("MAP taken from gaussian_mean-")
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    first = found_in(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    reporter = Listening()
    again = found_in(tmp_path, reporter)
    np.testing.assert_array_equal(first.position, again.position)
    assert reporter.messages[-1].startswith("MAP by newton")
    np.testing.assert_array_equal(found_in(tmp_path).position, first.position)


@pytest.mark.parametrize(
    ("model", "settings", "seed"),
    [
        (replace(MODEL, digest="1" * 64), SETTINGS, 0),
        (MODEL, MapSettings(phases=(AdamPhase(10, None, 0.1),)), 0),
        (MODEL, SETTINGS, 1),
    ],
)
def test_another_question_has_another_file(model: object, settings: object, seed: int) -> None:
    here = cache_path(MODEL, SETTINGS, 0, Path("map"))
    assert here.parent == Path("map")
    assert cache_path(model, settings, seed, Path("map")) != here  # type: ignore[arg-type]
    assert cache_path(MODEL, MapSettings(), 0, Path("map")) == here
