"""Logistic regression against SciPy in float64, and the law of its simulated data."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from mamba_cli.errors import ConfigError
from mamba_cli.models.logreg import LogisticRegression, log_sigmoid, logistic_regression

MODEL = logistic_regression(num_train=20_000, num_test=2000, dim=6, data_seed=1)
POSITION = np.array([0.3, -1.0, 2.0, 0.0, 0.5, -0.2], np.float32)


def test_log_likelihood_and_gradient_are_those_of_the_bernoulli_law() -> None:
    rows = np.asarray(MODEL.data[:500], np.float64)
    logits = rows @ POSITION.astype(np.float64)
    value, gradient = jax.value_and_grad(MODEL.log_likelihood)(
        jnp.asarray(POSITION), MODEL.data[:500]
    )
    np.testing.assert_allclose(value, special.log_expit(logits).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, special.expit(-logits) @ rows, rtol=1e-5, atol=1e-4)


def test_second_derivatives_are_those_of_the_sigmoid() -> None:
    rows = np.asarray(MODEL.data[:500], np.float64)
    p = special.expit(rows @ POSITION.astype(np.float64))
    hessian = jax.hessian(MODEL.log_likelihood)(jnp.asarray(POSITION), MODEL.data[:500])
    np.testing.assert_allclose(hessian, -(rows.T * (p * (1 - p))) @ rows, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("logit", [-1e4, -90.0, -20.0, -1.0, 0.0, 1.0, 20.0, 90.0, 1e4])
def test_log_sigmoid_of_any_size(logit: float) -> None:
    value, slope = jax.value_and_grad(log_sigmoid)(jnp.float32(logit))
    np.testing.assert_allclose(value, special.log_expit(logit), rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(slope, special.expit(-logit), rtol=1e-6, atol=1e-37)


def test_log_prior_is_gaussian() -> None:
    model = logistic_regression(num_train=10, num_test=1, dim=6, prior_variance=2.5)
    squares = float(np.sum(POSITION.astype(np.float64) ** 2))
    value, gradient = jax.value_and_grad(model.log_prior)(jnp.asarray(POSITION))
    np.testing.assert_allclose(value, -squares / 5.0, rtol=1e-6)
    np.testing.assert_allclose(gradient, -POSITION / 2.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("correlation", 1.0),
        ("correlation", -1.0),
        ("correlation", float("nan")),
        ("prior_variance", 0.0),
        ("prior_variance", float("inf")),
        ("prior_variance", float("nan")),
    ],
)
def test_a_parameter_out_of_its_range_is_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{key}={value}: expected"):
        logistic_regression(num_train=10, num_test=1, dim=2, **{key: value})  # type: ignore[arg-type]


def test_shapes_and_start() -> None:
    assert (MODEL.dim, MODEL.num_data) == (6, 20_000)
    assert MODEL.data.shape == (20_000, 6)
    assert MODEL.data.dtype == MODEL.test_inputs.dtype == jnp.float32
    assert MODEL.test_inputs.shape == (2000, 6)
    assert MODEL.test_labels.shape == (2000,)
    assert set(np.unique(MODEL.test_labels)) == {0, 1}
    start = MODEL.initial_position(jax.random.key(0))
    assert start.shape == (6,)
    assert start.dtype == jnp.float32


def test_defaults_are_the_papers() -> None:
    parameters = logistic_regression.__defaults__
    assert parameters == (1_000_000, 200_000, 10, 0.4, 10.0, 0)


@pytest.mark.parametrize("correlation", [-0.7, 0.0, 0.4])
def test_covariates_have_an_autoregressive_law(correlation: float) -> None:
    num_rows = 40_000
    model = logistic_regression(
        num_train=1, num_test=num_rows, dim=5, correlation=correlation, data_seed=2
    )
    covariates = np.asarray(model.test_inputs, np.float64)
    j = np.arange(5)
    expected = correlation ** np.abs(j[:, None] - j)
    # The standard error of a second moment of unit Gaussians is at most √(2 / rows).
    standard_error = np.sqrt(2 / num_rows)
    np.testing.assert_allclose(
        covariates.T @ covariates / num_rows, expected, atol=4.5 * standard_error
    )
    np.testing.assert_allclose(covariates.mean(axis=0), 0, atol=4.5 / np.sqrt(num_rows))


def test_labels_follow_the_true_coefficients() -> None:
    # sum (y - p) c has mean 0 and variance sum p (1 - p) c^2 for any function c of the row.
    for rows, labels in [
        (np.asarray(MODEL.test_inputs, np.float64), MODEL.test_labels),
        (np.asarray(MODEL.data, np.float64), np.ones(MODEL.num_data)),
    ]:
        p = special.expit(rows @ MODEL.true_position)
        # Along the coefficients, a scale wrong by a tenth is 5 standard errors.
        columns = [rows @ MODEL.true_position, *rows.T]
        if labels is MODEL.test_labels:
            columns.append(np.ones(len(p)))
        for column in columns:
            z = ((labels - p) @ column) / np.sqrt((p * (1 - p)) @ column**2)
            assert abs(z) < 4.5
    assert 0.2 < MODEL.test_labels.mean() < 0.8
    # Signed rows are rows times a sign, not the rows: their mean follows the coefficients.
    assert np.asarray(MODEL.data, np.float64).mean(axis=0) @ MODEL.true_position > 0.1


def test_true_coefficients_are_a_draw_from_the_prior() -> None:
    draws = np.concatenate(
        [
            logistic_regression(1, 1, 50, prior_variance=10.0, data_seed=seed).true_position
            for seed in range(40)
        ]
    )
    # 2,000 draws: the variance has a relative standard error of √(2 / 2000), 3 %.
    assert abs(draws.var() / 10 - 1) < 4.5 * np.sqrt(2 / 2000)
    assert abs(draws.mean()) < 4.5 * np.sqrt(10 / 2000)


def test_the_seed_decides_the_data() -> None:
    same = logistic_regression(num_train=20_000, num_test=2000, dim=6, data_seed=1)
    other = logistic_regression(num_train=20_000, num_test=2000, dim=6, data_seed=2)
    assert same.digest == MODEL.digest
    np.testing.assert_array_equal(same.data, MODEL.data)
    np.testing.assert_array_equal(same.test_labels, MODEL.test_labels)
    assert other.digest != MODEL.digest
    assert not np.array_equal(other.data, MODEL.data)


def test_the_digest_covers_data_and_prior() -> None:
    small = logistic_regression(num_train=50, num_test=5, dim=2)
    assert len(small.digest) == len(hashlib.sha256().hexdigest())

    def digest(data: jax.Array, prior_variance: float) -> str:
        return LogisticRegression(
            data, small.test_inputs, small.test_labels, prior_variance, small.true_position
        ).digest

    assert digest(small.data, small.prior_variance) == small.digest
    assert digest(small.data.at[3, 1].add(1e-6), small.prior_variance) != small.digest
    assert digest(small.data, 10.5) != small.digest


def test_a_prior_so_wide_that_labels_are_certain() -> None:
    model = logistic_regression(num_train=100, num_test=100, dim=5, prior_variance=1e8)
    assert np.all(np.asarray(model.data, np.float64) @ model.true_position > 0)


def test_predictions_are_probabilities_of_one() -> None:
    prediction = MODEL.predict(jnp.asarray(POSITION), MODEL.test_inputs)
    logits = np.asarray(MODEL.test_inputs, np.float64) @ POSITION
    np.testing.assert_allclose(prediction, special.expit(logits), rtol=1e-4, atol=1e-6)


def test_metrics_of_a_prediction() -> None:
    prediction = MODEL.predict(jnp.asarray(MODEL.true_position, jnp.float32), MODEL.test_inputs)
    found = MODEL.predictive_metrics(prediction)
    p = np.asarray(prediction, np.float64)
    y = MODEL.test_labels
    assert set(found) == {"accuracy", "log_loss", "ece", "mce"}
    assert found["accuracy"] == pytest.approx(np.mean((p > 0.5) == (y == 1)))
    likelihood = np.where(y == 1, p, 1 - p)
    assert found["log_loss"] == pytest.approx(-np.mean(np.log(likelihood)), rel=1e-3)
    assert 0 <= found["ece"] <= found["mce"] <= 1
    assert found["ece"] < 0.05  # the truth is calibrated
    worse = MODEL.predictive_metrics(1 - prediction)
    assert worse["accuracy"] == pytest.approx(1 - found["accuracy"], abs=1e-3)
    assert worse["log_loss"] > found["log_loss"]


def test_hold_out_divides_the_training_rows() -> None:
    model = logistic_regression(num_train=300, num_test=10, dim=3, data_seed=1)
    part = model.hold_out(0.25, seed=2)
    assert (part.num_data, len(part.test_labels)) == (225, 75)
    rows = np.concatenate([np.asarray(part.data), np.asarray(part.test_inputs)])
    order = np.lexsort(rows.T)
    whole = np.asarray(model.data)
    np.testing.assert_array_equal(rows[order], whole[np.lexsort(whole.T)])
    assert part.digest != model.digest
    # The log loss is minus the mean log likelihood of the rows held out.
    position = jnp.asarray(model.true_position, jnp.float32)
    found = part.predictive_metrics(part.predict(position, part.test_inputs))["log_loss"]
    expected = -float(model.log_likelihood(position, part.test_inputs)) / 75
    assert found == pytest.approx(expected, rel=1e-4)
