"""The workbench: programs made once, full-data scores, and predictions averaged over draws."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_model import GaussianMean, gaussian_mean
from scipy.special import logsumexp

from mamba_cli import gradients, minibatch
from mamba_cli.models.python import from_functions
from mamba_cli.samplers.sgld import sgld
from mamba_cli.types import Array, Model
from mamba_cli.workbench import PREDICTION_CHUNK, Workbench

MODEL = gaussian_mean(num_data=64, dim=3)


def bench_of(model: Model) -> Workbench:
    return Workbench(
        model,
        np.zeros(model.dim, np.float32),
        gradients.standard(model),
        sgld,
        minibatch.without_replacement,
        capacity=8,
    )


def test_a_program_is_compiled_once_for_a_batch_size() -> None:
    bench = bench_of(MODEL)
    program, compile_s = bench.program(5)
    assert compile_s > 0
    assert (program.batch_size, program.capacity, program.keep_gradients) == (5, 8, False)
    again, more_s = bench.program(5)
    assert again is program
    assert more_s == 0.0
    assert bench.seconds.compile == compile_s


def test_compilation_is_measured_on_the_injected_clock() -> None:
    ticks = iter(range(100))
    bench = replace(bench_of(MODEL), clock=lambda: float(next(ticks)))
    _, compile_s = bench.program(5)
    assert compile_s == int(compile_s) >= 1


def test_scores_are_full_data_gradients() -> None:
    positions = np.random.default_rng(0).normal(size=(40, 3))
    scores = bench_of(MODEL).scores(positions)
    assert isinstance(scores, np.ndarray)
    expected = MODEL.precision * (MODEL.posterior_mean - positions)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-3)


@dataclass(frozen=True, eq=False)
class Squares(GaussianMean):
    """Predicts something that is not linear in the position: a mean of squares shows."""

    def predict(self, position: Array, inputs: Array) -> Array:
        return (inputs @ position) ** 2


@pytest.mark.parametrize(
    "num_draws",
    [1, 2, PREDICTION_CHUNK - 1, PREDICTION_CHUNK, PREDICTION_CHUNK + 1, 3 * PREDICTION_CHUNK + 5],
)
def test_posterior_predictive_is_the_mean_over_draws(num_draws: int) -> None:
    model = Squares(MODEL.data)
    positions = np.random.default_rng(1).normal(size=(num_draws, 3)).astype(np.float32)
    found = bench_of(model).posterior_predictive(positions)
    inputs = np.asarray(model.test_inputs, np.float64)
    expected = ((inputs @ positions.astype(np.float64).T) ** 2).mean(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class Ratings(GaussianMean):
    """Predicts numbers whose targets are 3."""

    def squared_error(self, prediction: Array) -> Array:
        return jnp.mean((prediction - 3.0) ** 2)


def test_mse_of_draws_keeps_the_variance_of_the_prediction() -> None:
    """Draws that predict 2 and 4 where 3 is true: their mean is exact, each is off by 1."""
    model = Ratings(jnp.eye(3))
    positions = np.asarray([[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]], np.float32)
    bench = bench_of(model)
    np.testing.assert_allclose(bench.posterior_predictive(positions), 3.0)
    assert bench.mse_of_draws(positions) == pytest.approx(1.0)
    assert bench_of(MODEL).mse_of_draws(positions) is None


def test_other_inputs_are_predicted_on_request() -> None:
    positions = np.asarray([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], np.float32)
    found = bench_of(MODEL).posterior_predictive(positions, jnp.eye(3)[:1])
    np.testing.assert_allclose(found, [2.0])


def test_the_padding_of_a_prediction_does_not_count() -> None:
    # The last draw is the padding; its prediction overflows, and so must the mean, once.
    model = Squares(MODEL.data)
    positions = np.ones((3, 3), np.float32)
    finite = bench_of(model).posterior_predictive(positions)
    assert np.all(np.isfinite(finite))
    positions[-1] = 1e30
    assert np.all(np.isinf(bench_of(model).posterior_predictive(positions)))


def test_test_inputs_are_arguments_of_the_prediction() -> None:
    bench = bench_of(MODEL)
    positions = np.ones((2, 3), np.float32)
    first = bench.posterior_predictive(positions)
    bench.model = GaussianMean(MODEL.data * 2)
    np.testing.assert_allclose(bench.posterior_predictive(positions), 2 * first, rtol=1e-6)
    assert isinstance(first, jnp.ndarray)


@pytest.mark.parametrize("num_draws", [1, PREDICTION_CHUNK, 3 * PREDICTION_CHUNK + 5])
def test_densities_are_averaged_by_their_logs(num_draws: int) -> None:
    """Of rows 0 to 300 standard deviations away, against float64: exp(-45,000) is 0 in float32."""
    rows = np.linspace(0, 300, 50, dtype=np.float32)
    model = from_functions(
        lambda theta: -0.5 * theta**2,
        lambda theta, row: -0.5 * (row - theta) ** 2,
        np.zeros(4),
        jnp.array(0.0),
        test_data=rows,
    )
    draws = np.random.default_rng(0).normal(size=(num_draws, 1)).astype(np.float32)
    log_densities = -0.5 * (rows.astype(np.float64) - draws) ** 2
    exact = logsumexp(log_densities, axis=0) - np.log(num_draws)
    assert exact.min() < -40_000
    bench = bench_of(model)
    found = bench.posterior_predictive(draws)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
    metrics = model.predictive_metrics(found)
    assert metrics == {"log_loss": pytest.approx(-exact.mean(), rel=1e-6)}
    if num_draws > 1:
        std = np.exp(log_densities).std(axis=0, ddof=1)
        # The standard deviation is of the densities themselves: its square is in single precision.
        smallest = float(np.finfo(np.float32).tiny) ** 0.5
        np.testing.assert_allclose(bench.predictive_std(draws), std, rtol=1e-4, atol=smallest)
