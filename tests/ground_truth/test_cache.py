"""Results as files, read before anything is sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from nuts_runs import SETTINGS, CountedSampler, ask, independent_samples
from small_posteriors import LINEAR, Symmetric

from mamba_cli import artifacts
from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth import GroundTruth, cache, nuts_ground_truth


def test_a_second_run_reads_the_first(tmp_path: Path, sampler: CountedSampler) -> None:
    first, second = ask(tmp_path), ask(tmp_path)
    assert sampler.calls == 1
    for name in GroundTruth._fields:
        np.testing.assert_equal(getattr(second, name), getattr(first, name))
    np.testing.assert_array_equal(first.mean, sampler.samples.mean)
    assert first.ess_per_s == pytest.approx(first.ess_bulk.min() / 2.0)
    path = tmp_path / f"test-{first.digest}.npz"
    assert path.exists()
    assert len(first.digest) == 16


def test_recompute_samples_again(tmp_path: Path, sampler: CountedSampler) -> None:
    ask(tmp_path)
    sampler.samples = independent_samples(mean=np.asarray([7.0, 7.0]))
    assert ask(tmp_path, recompute=True).mean[0] == 7
    assert ask(tmp_path).mean[0] == 7
    assert sampler.calls == 2


def test_a_result_elsewhere_is_read_and_not_touched(
    tmp_path: Path, sampler: CountedSampler
) -> None:
    shipped, cache = tmp_path / "shipped", tmp_path / "cache"
    truth = ask(shipped)
    before = {file.name: file.read_bytes() for file in shipped.iterdir()}
    found = ask(cache, search_dirs=[tmp_path / "absent", shipped])
    assert sampler.calls == 1
    assert found.digest == truth.digest
    assert not cache.exists()
    ask(cache, search_dirs=[shipped], recompute=True)
    assert sampler.calls == 2
    assert {file.name: file.read_bytes() for file in shipped.iterdir()} == before


def test_a_damaged_result_is_done_again(tmp_path: Path, sampler: CountedSampler) -> None:
    truth = ask(tmp_path)
    (tmp_path / f"test-{truth.digest}.npz").write_bytes(b"PK")
    assert ask(tmp_path).digest == truth.digest
    assert sampler.calls == 2


def test_a_cached_result_is_held_to_the_limits_of_the_day(
    tmp_path: Path, sampler: CountedSampler
) -> None:
    ask(tmp_path)
    with pytest.raises(NothingUsableError, match="needed 9000"):
        ask(tmp_path, replace(SETTINGS, min_ess=9000))
    assert sampler.calls == 1


def test_a_result_without_predictions_is_no_answer_where_they_have_to_converge(
    tmp_path: Path, sampler: CountedSampler
) -> None:
    model = Symmetric(LINEAR.data[:40], 2)
    noise = np.random.default_rng(3).normal(size=(4, 500, 2))
    sampler.samples = independent_samples(draws=3.0 + 0.1 * noise)
    nuts_ground_truth(model, jnp.zeros(2), SETTINGS, cache_dir=tmp_path)
    asked = replace(SETTINGS, criterion="predictions")
    squares = (3.0 + 0.1 * noise.reshape(-1, 2)) ** 2
    sampler.samples = sampler.samples._replace(
        prediction_mean=squares.mean(axis=0), prediction_std=squares.std(axis=0, ddof=1)
    )
    truth = nuts_ground_truth(model, jnp.zeros(2), asked, cache_dir=tmp_path)
    assert sampler.calls == 2
    assert truth.prediction_std.size == 2
    # It answers both questions from now on.
    nuts_ground_truth(model, jnp.zeros(2), SETTINGS, cache_dir=tmp_path)
    assert sampler.calls == 2


def test_long_arrays_are_summarised_for_a_reader(
    tmp_path: Path, sampler: CountedSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_LISTED", 1)
    truth = ask(tmp_path)
    (path,) = tmp_path.glob("*.json")
    shown = artifacts.read_json(path)
    assert shown is not None
    assert shown["std"]["largest"] == pytest.approx(truth.std.max())
    assert ask(tmp_path).std.dtype == np.float32
