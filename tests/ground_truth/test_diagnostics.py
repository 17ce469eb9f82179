"""R-hat and effective sample sizes, and what they refuse."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nuts_runs import SETTINGS, CountedSampler, Recorder, ask, independent_samples
from small_posteriors import LINEAR, RowModel, Symmetric

from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth import GroundTruth, NutsSettings, diagnostics, nuts_ground_truth
from mamba_cli.ground_truth.diagnostics import (
    _identified,
    bulk_and_tail_ess,
    check_converged,
    convergence,
    diagnose,
)


@dataclass(frozen=True, eq=False)
class TwoModes(RowModel):
    """Two unit Gaussians at -8 and 8; the data say nothing."""

    def log_prior(self, position: jax.Array) -> jax.Array:
        return jnp.logaddexp(-0.5 * (position[0] - 8) ** 2, -0.5 * (position[0] + 8) ** 2)

    def log_likelihood(self, position: jax.Array, minibatch: jax.Array) -> jax.Array:
        return jnp.sum(0.0 * minibatch * position[0])


@pytest.mark.usefixtures("compiled_once")
def test_two_modes_are_no_ground_truth(tmp_path: Path) -> None:
    """Chains that stay in different modes: R-hat tells, and nothing is written."""
    model = TwoModes(jnp.zeros((5, 1)), dim=1)
    settings = NutsSettings(num_draws=400, num_warmup=100, num_chains=2, seed=1, start_scale=20.0)
    with pytest.raises(NothingUsableError, match="at the worst") as caught:
        nuts_ground_truth(model, jnp.asarray([8.0]), settings, cache_dir=tmp_path)
    assert caught.value.exit_code == 4
    assert not list(tmp_path.glob("*.npz"))
    assert not list(tmp_path.glob("*.json"))
    # Asked again, the finished chains are judged again, not run again.
    recorder = Recorder()
    with pytest.raises(NothingUsableError, match="at the worst"):
        nuts_ground_truth(
            model, jnp.asarray([8.0]), settings, cache_dir=tmp_path, reporter=recorder
        )
    assert len(recorder.amounts) == 1


def test_too_few_effective_draws_are_no_ground_truth(
    tmp_path: Path, sampler: CountedSampler
) -> None:
    with pytest.raises(NothingUsableError, match=r"ESS .* \(needed 5000\)"):
        ask(tmp_path, replace(SETTINGS, min_ess=5000))


@pytest.mark.parametrize("frozen", [np.zeros((4, 500, 2)), np.full((4, 500, 2), np.nan)])
def test_frozen_or_lost_chains_are_no_ground_truth(
    tmp_path: Path, sampler: CountedSampler, frozen: np.ndarray
) -> None:
    sampler.samples = independent_samples(draws=frozen)
    with pytest.raises(NothingUsableError, match="did not converge"):
        ask(tmp_path)


@pytest.mark.parametrize("lost", ["r_hat", "ess_bulk", "ess_tail"])
def test_one_diagnostic_that_is_not_a_number_is_enough(
    tmp_path: Path, sampler: CountedSampler, lost: str
) -> None:
    truth = ask(tmp_path)
    check_converged(truth, SETTINGS)
    with pytest.raises(NothingUsableError, match="did not converge"):
        check_converged(
            truth._replace(**{lost: np.asarray([1000.0, np.nan])}),
            replace(SETTINGS, max_r_hat=2000.0),
        )


def test_divergences_are_told_and_recorded(tmp_path: Path, sampler: CountedSampler) -> None:
    sampler.samples = independent_samples(num_divergences=3)
    recorder = Recorder()
    assert ask(tmp_path, reporter=recorder).num_divergences == 3
    assert "3 of 3000 draws ended in a divergence" in recorder.messages[0]
    assert ask(tmp_path).num_divergences == 3


def test_ess_of_independent_and_of_correlated_draws() -> None:
    """AR(1) with coefficient 0.8: n (1 - 0.8) / (1 + 0.8) in the bulk. Within 15 %."""
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(4, 20_000, 2))
    draws = noise.copy()
    for t in range(1, draws.shape[1]):
        draws[:, t, 1] = 0.8 * draws[:, t - 1, 1] + 0.6 * noise[:, t, 1]
    bulk, tail = bulk_and_tail_ess(draws)
    np.testing.assert_allclose(bulk, [80_000, 80_000 / 9], rtol=0.15)
    assert tail[0] == pytest.approx(80_000, rel=0.15)
    assert 1.05 * bulk[1] < tail[1] < 0.5 * 80_000, "tails forget sooner than the middle"


def test_many_coordinates_are_diagnosed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0).normal(size=(4, 100, 5))
    whole = convergence(draws)
    monkeypatch.setattr(diagnostics, "DIAGNOSED_TOGETHER", 2)
    for found, expected in zip(convergence(draws), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(whole[1:], bulk_and_tail_ess(draws))


def test_predictions_decide_where_coordinates_are_not_identified(
    tmp_path: Path, sampler: CountedSampler
) -> None:
    """Two chains at +3, two at -3: they disagree on the sign alone."""
    signs = np.asarray([1.0, 1.0, -1.0, -1.0])[:, None, None]
    noise = np.random.default_rng(3).normal(size=(4, 500, 2))
    squares = (3.0 + 0.1 * noise.reshape(-1, 2)) ** 2
    sampler.samples = independent_samples(
        draws=signs * (3.0 + 0.1 * noise),
        prediction_mean=squares.mean(axis=0),
        prediction_std=squares.std(axis=0, ddof=1),
    )
    model = Symmetric(LINEAR.data[:40], 2)

    def ask(criterion: str) -> GroundTruth:
        settings = replace(SETTINGS, criterion=criterion)
        return nuts_ground_truth(model, jnp.zeros(2), settings, cache_dir=tmp_path)

    with pytest.raises(NothingUsableError, match="0 % of the coordinates have converged"):
        ask("positions")
    truth = ask("predictions")
    assert np.all(truth.r_hat > 2)  # reported all the same
    np.testing.assert_array_equal(truth.prediction_mean, squares.mean(axis=0))
    assert np.all(truth.prediction_r_hat < 1.01)
    assert truth.log_density_r_hat is not None
    assert truth.log_density_r_hat < 1.01
    assert truth.prediction_ess_bulk[2] == 2000
    again = ask("predictions")
    assert sampler.calls == 2  # the second answer is that of the file
    np.testing.assert_array_equal(again.prediction_std, truth.prediction_std)


@dataclass(frozen=True, eq=False)
class CutOff(Symmetric):
    """Predicts nothing but its bound, and is diagnosed by what it is before that."""

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.clip(self.identified(position, inputs), 0.0, 1.0)

    def identified(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return inputs @ position


def test_predictions_that_are_cut_off_are_diagnosed_before_that(sampler: CountedSampler) -> None:
    signs = np.asarray([1.0, 1.0, 1.0, -1.0])[:, None, None]
    draws = signs * (3.0 + 0.1 * np.random.default_rng(3).normal(size=(4, 500, 2)))
    samples = independent_samples(draws=draws)
    settings = replace(SETTINGS, criterion="predictions")
    found = _identified(CutOff(LINEAR.data[:4], 2), settings, samples)
    assert np.all(found["prediction_r_hat"] > 2)
    np.testing.assert_allclose(found["prediction_r_hat"], convergence(draws)[0])


def test_a_stated_share_has_to_converge_and_the_log_posterior_always() -> None:
    values = np.ones(200)
    truth = _asked_share(values, r_hat=np.where(np.arange(200) < 2, 1.5, 1.0))
    with pytest.raises(NothingUsableError, match=r"99 % of the predictions.*needed 99\.5 %"):
        check_converged(truth, _share(0.995))
    check_converged(truth, _share(0.99))
    for change in ({"log_density_r_hat": 1.5}, {"log_density_ess": 5.0}, {"log_density_ess": None}):
        with pytest.raises(NothingUsableError, match="the log posterior has an R-hat"):
            check_converged(truth._replace(**change), _share(0.99))


def _share(share: float) -> NutsSettings:
    return replace(SETTINGS, criterion="predictions", converged_share=share)


def _asked_share(values: np.ndarray, r_hat: np.ndarray) -> GroundTruth:
    samples = independent_samples()
    truth = diagnose(LINEAR, SETTINGS, samples, datetime.datetime.now(datetime.UTC))
    return truth._replace(
        prediction_r_hat=r_hat,
        prediction_ess_bulk=1000 * values,
        prediction_ess_tail=1000 * values,
        log_density_r_hat=1.0,
        log_density_ess=1000.0,
    )
