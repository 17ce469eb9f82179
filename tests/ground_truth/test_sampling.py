"""The draws' law against closed forms and float64 quadrature."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.diagnostics import effective_sample_size
from nuts_runs import SETTINGS, Recorder, sample_linear, standard_errors, whole_run
from small_posteriors import LINEAR, InOnePiece, linear_posterior, logistic, with_start

from mamba_cli import map_estimate
from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth import NutsSettings, Samples, coordinates, nuts_ground_truth, sample
from mamba_cli.ground_truth.sampling import _check_starts, _tell_memory


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("whiten", [True, False])
def test_conjugate_posterior(whiten: bool) -> None:
    """Moments of a Gaussian posterior, whitened or not, within 4.5 standard errors."""
    samples = whole_run() if whiten else sample_linear(replace(SETTINGS, whiten=False))
    mean, covariance = linear_posterior()
    std = np.sqrt(np.diag(covariance))
    error_of_mean, error_of_std = standard_errors(samples, std)
    assert np.all(np.abs(samples.mean - mean) < 4.5 * error_of_mean)
    assert np.all(np.abs(samples.std - std) < 4.5 * error_of_std)
    correlation = np.corrcoef(samples.draws.reshape(-1, 2).T)[0, 1]
    expected = covariance[0, 1] / (std[0] * std[1])
    ess = effective_sample_size(samples.draws).min()
    assert abs(correlation - expected) < 4.5 * (1 - expected**2) / np.sqrt(ess)
    assert samples.num_divergences == 0
    assert 0.7 < samples.mean_accept < 0.98
    assert np.all(error_of_mean < 0.08 * std), "too few effective draws to see anything"


@pytest.mark.usefixtures("compiled_once")
def test_whitened_coordinates_are_isotropic_at_unit_scale() -> None:
    """A step size near the one of N(0, I), few leapfrogs, and no adaptation left to do."""
    samples = whole_run()
    assert all(0.5 < step_size < 1.6 for step_size in samples.step_sizes)
    assert samples.num_leapfrogs / SETTINGS.num_draws < 5


def test_skewed_posterior_against_quadrature(tmp_path: Path) -> None:
    """Logistic regression on 30 rows, far from Gaussian, through the whole function."""
    model = logistic(num_data=30, dim=2, scale=2.0, seed=4)
    settings = NutsSettings(num_draws=6000, num_warmup=400, num_chains=2, block_draws=1000)
    centre = map_estimate.find_map(with_start(model), rng_key=jax.random.key(0)).position
    recorder = Recorder()
    truth = nuts_ground_truth(model, centre, settings, cache_dir=tmp_path, reporter=recorder)

    axis = np.linspace(-14, 18, 801)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    rows = np.asarray(model.data, np.float64)
    log_density = -(grid**2).sum(1) / 20 - np.logaddexp(0, -grid @ rows.T).sum(1)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ grid
    std = np.sqrt(weights @ (grid - mean) ** 2)
    skewness = weights @ ((grid - mean) / std) ** 3
    fourth = weights @ ((grid - mean) / std) ** 4
    assert np.abs(skewness).max() > 0.3, "the posterior is meant to be far from Gaussian"

    error_of_mean = std / np.sqrt(truth.ess_bulk)
    error_of_std = 0.5 * std * np.sqrt((fourth - 1) / truth.ess_tail)
    assert np.all(np.abs(truth.mean - mean) < 4.5 * error_of_mean)
    assert np.all(np.abs(truth.std - std) < 4.5 * error_of_std)
    assert np.all(truth.r_hat < 1.01)
    assert recorder.total == sum(recorder.amounts) == 2 * 400 + 6000
    assert recorder.finished
    assert "warm-up, step size" in recorder.notes[0]
    assert "leapfrogs a draw" in recorder.notes[-1]

    assert not list(tmp_path.glob("*.partial"))
    beside = json.loads(next(tmp_path.glob("test-*.json")).read_text())
    assert beside["provenance"]["settings"]["num_draws"] == 6000
    assert beside["num_leapfrogs"] == truth.num_leapfrogs > 6000
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000


def test_a_likelihood_in_one_piece_is_sampled_chain_by_chain() -> None:
    """Forty rows: few enough for float32 sums to resolve differences of energy."""
    rows = np.asarray(LINEAR.data[:40], np.float64)
    x, y = rows[:, :2], rows[:, 2]
    covariance = np.linalg.inv(x.T @ x + np.eye(2))
    mean = covariance @ x.T @ y
    model = InOnePiece(LINEAR.data[:40], 2)
    settings = replace(SETTINGS, whiten=False)
    samples = sample(model, jnp.asarray(mean, jnp.float32), settings)
    std = np.sqrt(np.diag(covariance))
    error_of_mean, error_of_std = standard_errors(samples, std)
    assert np.all(np.abs(samples.mean - mean) < 4.5 * error_of_mean)
    assert np.all(np.abs(samples.std - std) < 4.5 * error_of_std)
    assert np.all(error_of_mean < 0.1 * std), "too few effective draws to see anything"


SCALES = np.asarray([0.01, 100.0])


@dataclass(frozen=True, eq=False)
class Scales(InOnePiece):
    """N(1, 0.01^2) x N(1, 100^2); the squares are predicted."""

    def log_prior(self, position: jax.Array) -> jax.Array:
        return jnp.zeros(())

    def full_log_likelihood(
        self, position: jax.Array, full_data: dict[str, jax.Array]
    ) -> jax.Array:
        return -0.5 * jnp.sum(((position - 1.0) / jnp.asarray(SCALES, jnp.float32)) ** 2)

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return (inputs @ position) ** 2


def _scaled(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Samples:
    monkeypatch.setattr(coordinates, "MAX_DENSE_DIM", 1)
    settings = replace(SETTINGS, num_warmup=100, criterion="predictions")
    return sample(Scales(LINEAR.data[:4], 2), jnp.ones(2), settings, **options)


def test_many_dimensions_are_scaled_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scales 10^4 apart cost what a round Gaussian costs: a handful of leapfrogs a draw."""
    samples = _scaled(monkeypatch)
    assert samples.num_leapfrogs < 8 * 3000
    error_of_mean, error_of_std = standard_errors(samples, SCALES)
    assert np.all(np.abs(samples.mean - 1.0) < 4.5 * error_of_mean)
    assert np.all(np.abs(samples.std - SCALES) < 4.5 * error_of_std)
    assert np.all(error_of_mean < 0.1 * SCALES)
    squares = samples.draws.reshape(-1, 2) ** 2
    np.testing.assert_allclose(samples.prediction_mean, squares.mean(axis=0), rtol=1e-3)
    np.testing.assert_allclose(samples.prediction_std, squares.std(axis=0, ddof=1), rtol=1e-3)
    potentials = 0.5 * (((samples.draws - 1.0) / SCALES) ** 2).sum(axis=-1)
    np.testing.assert_allclose(-samples.log_densities, potentials, rtol=1e-3, atol=1e-3)
    # Stopped in the second window of the warm-up and while sampling: the same bit for bit.
    for fail_at in (2, 8):
        with pytest.raises(KeyboardInterrupt):
            _scaled(monkeypatch, checkpoint_dir=tmp_path, question="q", reporter=Recorder(fail_at))
    resumed = _scaled(monkeypatch, checkpoint_dir=tmp_path, question="q")
    np.testing.assert_array_equal(resumed.draws, samples.draws)
    np.testing.assert_array_equal(resumed.log_densities, samples.log_densities)
    np.testing.assert_array_equal(resumed.prediction_std, samples.prediction_std)


@pytest.mark.usefixtures("compiled_once")
def test_thinned_draws_and_moments_of_all() -> None:
    """A third of the memory: every third draw, across blocks; the moments do not change."""
    whole = whole_run()
    thinned = sample_linear(replace(SETTINGS, max_stored_bytes=4 * 3000 * 2 // 3))
    assert thinned.thinning == 3
    np.testing.assert_array_equal(thinned.draws, whole.draws[:, ::3])
    np.testing.assert_array_equal(thinned.mean, whole.mean)
    np.testing.assert_allclose(whole.mean, whole.draws.mean(axis=(0, 1)), rtol=1e-12)
    np.testing.assert_allclose(whole.std, whole.draws.reshape(-1, 2).std(axis=0, ddof=1), rtol=1e-9)


def test_memory_is_told_before_it_is_taken() -> None:
    recorder = Recorder()
    _tell_memory(replace(LINEAR, dim=50_000), SETTINGS, recorder)
    _tell_memory(LINEAR, SETTINGS, recorder)
    (told,) = recorder.messages
    # 3,000 draws of 200 kB are above 256 MiB: every third is kept, in float32 and in float64.
    # A block is 200 draws, and a chain has 40 vectors: (3 x 1,000 + 5 x 200 + 2 x 40) x 200 kB.
    assert "dimension 50,000, 2 chains; about 778 MiB of memory and 191 MiB on disk" in told


def test_a_start_off_the_support_is_an_error() -> None:
    with pytest.raises(NothingUsableError, match="the potential at the starts"):
        _check_starts(LINEAR, np.asarray([1.0, np.inf]))
