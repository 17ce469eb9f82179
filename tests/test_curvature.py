"""The scale of a posterior, on models whose curvature is known."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_model import gaussian_mean

from mamba_cli import curvature
from mamba_cli.errors import NothingUsableError
from mamba_cli.models.logreg import logistic_regression

MODEL = gaussian_mean(num_data=5000, dim=3, variance=4.0)


def test_the_hessian_in_low_dimension() -> None:
    whitening = curvature.whitening_at(MODEL, MODEL.posterior_mean)
    assert not whitening.is_diagonal
    expected = MODEL.precision**0.5 * np.eye(3)
    np.testing.assert_allclose(whitening.factor, expected, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(whitening.centre, MODEL.posterior_mean, rtol=1e-6)


def test_the_fisher_diagonal_is_that_of_the_gradients_of_rows() -> None:
    """Against the sum over rows, in float64: one probe has a relative sd of sqrt(2)."""
    model = logistic_regression(num_train=3000, num_test=10, dim=4)
    position, num_probes = np.array([0.3, -0.2, 0.1, 0.5]), 400
    rows = np.asarray(model.data, np.float64)
    slopes = rows / (1 + np.exp(rows @ position))[:, None]
    expected = np.sum(slopes**2, axis=0) + 1 / model.prior_variance
    estimate = curvature.fisher_diagonal(
        model, jnp.asarray(position, jnp.float32), jax.random.key(1), num_probes
    )
    # Four coordinates within 4 standard errors; a factor of 2 is 14 away.
    np.testing.assert_allclose(estimate, expected, rtol=4 * np.sqrt(2 / num_probes))


def test_the_prior_is_exact_where_the_data_say_nothing() -> None:
    model = gaussian_mean(num_data=7, dim=3, variance=1e12)
    estimate = curvature.fisher_diagonal(model, jnp.zeros(3), jax.random.key(0), 3)
    np.testing.assert_allclose(estimate, 1 / model.prior_variance, rtol=1e-5)


def test_the_diagonal_is_taken_in_high_dimension_and_where_it_is_asked_for() -> None:
    high = gaussian_mean(num_data=400, dim=curvature.MAX_DENSE_DIM + 1)
    for model, method in ((high, "hessian"), (MODEL, "fisher")):
        whitening = curvature.whitening_at(model, model.posterior_mean, method)
        assert whitening.is_diagonal
        # The mean over coordinates of precisions, each with a relative sd of 0.25 (and 0.1 from
        # the residuals' squares in the empirical information).
        ratio = np.mean(whitening.factor**2) / model.precision
        assert ratio == pytest.approx(1.0, abs=4 * 0.27 / np.sqrt(model.dim))


def test_a_posterior_without_a_scale_is_an_error() -> None:
    flat = replace(gaussian_mean(num_data=3, dim=2), prior_variance=-0.1)  # precision 3 - 10
    with pytest.raises(NothingUsableError, match=r"gaussian_mean at the MAP.*reward=ksd"):
        curvature.whitening_at(flat, np.zeros(2))
