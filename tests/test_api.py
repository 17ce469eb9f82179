"""From Python: names are lazy, winners and draws are right, and it is the command line's run."""

from __future__ import annotations

import doctest
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from gaussian_model import gaussian_mean
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra

import mamba_cli as mamba
from mamba_cli import api, artifacts
from mamba_cli.errors import ConfigError, NothingUsableError
from mamba_cli.types import Hyperparameters

VARIANCES = np.array([1.0, 4.0])
GRID: dict[str, Any] = {"step_sizes": [0.3, 0.1, 0.03], "longest_arm_s": 0.1, "progress": False}


def log_density(params: dict[str, jax.Array]) -> jax.Array:
    return -0.5 * jnp.sum((params["x"] - 3.0) ** 2 / VARIANCES)


@pytest.fixture(scope="module")
def tuned() -> mamba.Tuned:
    model = mamba.from_log_density(log_density, {"x": jnp.zeros(2)})
    return mamba.tune(model, "sgld", clock="calibrated", **GRID)


def test_nothing_heavy_is_imported_with_the_package() -> None:
    code = (
        "import sys, mamba_cli; assert 'tune' in dir(mamba_cli)\n"
        "heavy = {'jax', 'hydra', 'pandas', 'numpyro', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there_and_no_other() -> None:
    for name in mamba.__all__:
        assert callable(getattr(mamba, name))
    with pytest.raises(AttributeError, match="no attribute 'tunes'"):
        _ = mamba.tunes


def test_the_examples_of_the_docstrings_are_sound() -> None:
    assert doctest.testmod(api).failed == 0
    assert doctest.testmod(api).attempted >= 10


def test_the_winner_is_that_of_the_records(tuned: mamba.Tuned) -> None:
    records = tuned.records
    assert list(records.columns) == list(artifacts.TUNING_COLUMNS)
    won = records[records["promoted"] & (records["rung"] == records["rung"].max())]
    assert len(won) == 1
    assert tuned.winner == Hyperparameters(float(won["step_size"].iloc[0]), 1, 1)
    assert tuned.best.iloc[0]["arm"] == won["arm"].iloc[0]
    assert sorted(tuned.best["arm"]) == [0, 1, 2]
    assert tuned.best["reward"].is_monotonic_increasing  # all in one rung, the lowest wins
    highest = replace(tuned, records=tuned.records.assign(promoted=False), higher_is_better=True)
    assert highest.best["reward"].is_monotonic_decreasing
    assert "by stein_moments over 3 arms" in repr(tuned)
    assert "<table" in tuned._repr_html_()


def test_draws_are_those_of_the_posterior_by_name(tuned: mamba.Tuned) -> None:
    arm = tuned.winner._replace(step_size=0.2)
    fixed = mamba.Tuned("sgld", arm, tuned.records, None, tuned.bench)
    draws = fixed.sample(num_steps=400_000, num_chains=2, burn_in_fraction=0.1, num_draws=500)
    assert set(draws) == {"x"}
    assert draws["x"].shape == (1000, 2)
    assert draws.by_chain["x"].shape == (2, 500, 2)
    assert draws.num_samples == 2 * 360_000
    # SGLD's exact law: variance (1/lambda) / (1 - h lambda / 4), correlation 1 - h lambda / 2 from
    # draw to draw.
    curvature = 1 / VARIANCES
    variance = 1 / (curvature * (1 - 0.2 * curvature / 4))
    correlation = 1 - 0.2 * curvature / 2
    ess = draws.num_samples * (1 - correlation) / (1 + correlation)
    mean_error = np.abs(draws.mean.mean(axis=0) - 3.0) / np.sqrt(variance / ess)
    assert np.all(mean_error < 4), mean_error
    ess_of_squares = draws.num_samples * (1 - correlation**2) / (1 + correlation**2)
    squares = (draws.std**2).mean(axis=0)
    error = np.abs(squares / variance - 1) / np.sqrt(2 / ess_of_squares)
    assert np.all(error < 4), error
    # 360 steps between kept draws: they are independent.
    assert np.all(np.abs(draws["x"].mean(axis=0) - 3.0) < 4 * np.sqrt(variance / 1000))
    assert not np.array_equal(draws.by_chain["x"][0], draws.by_chain["x"][1])
    np.testing.assert_array_less(0, np.diff(draws.steps, axis=1))
    assert draws.steps.max() <= 360_000


def test_steps_make_the_same_draws_whatever_the_clock_says(tuned: mamba.Tuned) -> None:
    first, again = (tuned.sample(num_steps=5_000, seed=7) for _ in range(2))
    np.testing.assert_array_equal(first["x"], again["x"])
    np.testing.assert_array_equal(first.std, again.std)
    other = tuned.sample(num_steps=5_000, seed=8)
    assert not np.array_equal(first["x"], other["x"])


def test_a_table_and_a_density_of_the_draws(tuned: mamba.Tuned) -> None:
    draws = tuned.sample(num_steps=500, num_draws=50)
    table = draws.summary()
    assert list(table.index) == ["x[0]", "x[1]"]
    np.testing.assert_allclose(table["mean"], draws["x"].mean(axis=0), rtol=1e-5)
    expected = -0.5 * np.sum((draws.by_chain["x"].astype(np.float64) - 3.0) ** 2 / VARIANCES, -1)
    np.testing.assert_allclose(draws.log_density(), expected, rtol=1e-4, atol=1e-5)
    assert "50 draws of 500; x [50, 2]" in repr(draws)
    assert "<table" in draws._repr_html_()


def test_a_model_without_names_has_a_position(tmp_path: Path) -> None:
    model = gaussian_mean(num_data=200, dim=3)
    options: dict[str, Any] = {"step_size": np.float64(1e-4), "batch_size": np.int64(20)}
    draws = mamba.sample(model, "sghmc", **options, num_steps=2_000)
    assert draws.hyperparameters == Hyperparameters(1e-4, 20, 10)
    assert {name: array.shape for name, array in draws.items()} == {"position": (200, 3)}
    assert draws.steps[0].tolist() == list(range(10, 2_001, 10))
    full = mamba.sample(model, "sgld", step_size=1e-3, batch_size=200, num_steps=50_000)
    np.testing.assert_allclose(full.mean[0], model.posterior_mean, atol=0.02)


def test_a_folder_keeps_what_the_command_line_would(tmp_path: Path) -> None:
    model = gaussian_mean(num_data=200, dim=3)
    options = {**GRID, "step_sizes": [1e-3, 1e-4], "batch_percents": [10], "run_dir": tmp_path}
    first = mamba.tune(model, "sgld", **options)
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"tuning.csv", "best.json", "provenance.json", "steps.json", "tuning.png"}
    again = mamba.tune(model, "sgld", **options)
    pd.testing.assert_frame_equal(first.records, again.records)
    with pytest.raises(ConfigError, match="model_digest"):
        mamba.tune(replace(model, digest="1" * 64), "sgld", **options)


def test_a_hydra_application_may_use_it() -> None:
    with initialize_config_module("mamba_cli.conf", version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        mamba.kernel("sgld", lambda position, minibatch: -position)
        assert GlobalHydra.instance().hydra is outer


def test_a_kernel_alone_takes_its_parameters() -> None:
    with pytest.raises(ConfigError, match=r"sampler.kernel.frictoin is not a parameter.*friction"):
        mamba.kernel("sghmc", lambda position, minibatch: -position, frictoin=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": "sgdl"}, "Did you mean sgld"),
        ({"reward": "kds"}, "Did you mean ksd"),
        ({"model": "logerg"}, "Did you mean logreg"),
        ({"longest_arm_s": -1}, "tuner.longest_arm_s=-1.0 is not allowed"),
        ({"clock": "sundial"}, "budget.clock='sundial'"),
        (
            {"overrides": ["tuner.longest_arm=3"]},
            r"tuner\.longest_arm is not a key .* Did you mean tuner\.longest_arm_s\?",
        ),
        (
            {"longest_arm_s": "abc"},
            "longest_arm_s='abc' is not allowed: it must be a finite number",
        ),
        ({"model": lambda params: 0.0}, "model is a function; expected what from_functions"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    asked = {"model": "logreg", "progress": False} | arguments
    with pytest.raises(ConfigError, match=message):
        mamba.tune(**asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of seconds and num_steps"),
        ({"seconds": 1, "num_steps": 1}, "one of seconds and num_steps"),
        ({"seconds": 0}, "seconds=0"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"num_steps": 9, "num_chains": 2.0}, r"num_chains=2\.0 is not allowed: it must be an int"),
        ({"seconds": "long"}, "seconds='long'"),
        ({"num_steps": 9, "num_draws": 0}, "num_draws=0"),
        ({"num_steps": 9, "num_chains": 0}, "num_chains=0"),
        ({"num_steps": 9, "burn_in_fraction": 1.0}, "burn_in_fraction=1.0"),
        ({"num_steps": 9, "step_size": 0.1}, "has its hyperparameters"),
    ],
)
def test_sampling_that_cannot_be_is_refused(
    tuned: mamba.Tuned, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned.sample(**options)


def test_a_chain_that_diverges_is_an_error(tuned: mamba.Tuned) -> None:
    arm = tuned.winner._replace(step_size=1e6)
    with pytest.raises(NothingUsableError, match="diverged at step"):
        mamba.Tuned("sgld", arm, tuned.records, None, tuned.bench).sample(num_steps=1000)


@pytest.fixture
def arviz() -> Any:
    return pytest.importorskip("arviz")


def test_arviz_gets_chains_and_statistics(tuned: mamba.Tuned, arviz: Any) -> None:
    draws = tuned.sample(num_steps=2_000, num_chains=2, num_draws=100)
    data = draws.to_arviz(log_density=True)
    posterior, stats = data["posterior"], data["sample_stats"]
    np.testing.assert_array_equal(posterior["x"].values, draws.by_chain["x"])
    assert posterior["x"].dims[:2] == ("chain", "draw")
    assert posterior.attrs["step_size"] == draws.hyperparameters.step_size
    np.testing.assert_array_equal(stats["num_steps"].values, draws.steps)
    np.testing.assert_allclose(stats["lp"].values, draws.log_density())


def test_without_arviz_it_is_said_what_to_install(
    tuned: mamba.Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ConfigError, match=r"mamba-cli\[arviz\]"):
        tuned.sample(num_steps=10).to_arviz()
