"""The posterior by parameter."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mamba_cli.artifacts import read_table
from mamba_cli.posterior_summary import named_draws, summarise, write_parameters
from mamba_cli.types import Array


class Named:
    def constrain(self, position: Array) -> dict[str, Array]:
        return {"sigma": jnp.exp(position[0]), "w": position[1:].reshape(2, 2)}


POSITIONS = np.log(np.arange(1.0, 51.0)).reshape(10, 5)


def test_every_number_of_every_parameter_has_a_row() -> None:
    rows = summarise(named_draws(Named(), POSITIONS))
    assert [row["parameter"] for row in rows] == ["sigma", "w[0,0]", "w[0,1]", "w[1,0]", "w[1,1]"]
    sigma = np.arange(1.0, 51.0).reshape(10, 5)[:, 0]  # 1, 6, ..., 46
    assert rows[0]["mean"] == pytest.approx(23.5, rel=1e-5)
    assert rows[0]["sd"] == pytest.approx(np.sqrt(25 * 110 / 12), rel=1e-5)
    assert rows[0]["q50"] == pytest.approx(23.5, rel=1e-5)
    assert rows[0]["q05"] == pytest.approx(np.quantile(sigma, 0.05), rel=1e-5)
    assert rows[4]["q95"] == pytest.approx(np.quantile(POSITIONS[:, 4], 0.95), rel=1e-5)
    assert {row["num_draws"] for row in rows} == {10}


def test_a_repeat_follows_those_before_it_and_replaces_those_after(tmp_path: Path) -> None:
    path = tmp_path / "parameters.csv"
    write_parameters(path, Named(), 0, POSITIONS)
    write_parameters(path, Named(), 1, POSITIONS + 1)
    columns, rows = read_table(path)
    assert columns[:4] == ["repeat", "parameter", "mean", "sd"]
    assert [row["repeat"] for row in rows] == ["0"] * 5 + ["1"] * 5
    write_parameters(path, Named(), 0, POSITIONS + 2)
    _, again = read_table(path)
    assert len(again) == 5
    assert float(again[1]["mean"]) == pytest.approx(float(rows[1]["mean"]) + 2, rel=1e-5)


def test_a_repeat_without_draws_has_no_rows(tmp_path: Path) -> None:
    write_parameters(tmp_path / "p.csv", Named(), 0, np.zeros((0, 0)))
    assert read_table(tmp_path / "p.csv")[1] == []


def test_one_draw_has_no_sd() -> None:
    assert summarise({"a": np.array([2.0])})[0]["sd"] is None
