"""The true errors against distances worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.reward_study.errors import (
    PredictionMoments,
    gaussian_w2,
    predicted_w2,
    whitened_w2,
)
from experiments.reward_study.study import Problem
from experiments.reward_study.targets import Simulated, Target


def test_the_distance_of_gaussians() -> None:
    # |m|^2 + sum (sigma_k - 1)^2 for commuting covariances.
    covariance = np.diag([4.0, 0.25])
    distance = gaussian_w2(np.array([3.0, 0.0]), covariance, np.eye(2))
    assert distance == pytest.approx(np.sqrt(9 + 1 + 0.25))
    shifted = whitened_w2(np.array([5.0, 1.0]), np.diag([16.0, 1.0]), np.ones(2), 4 * np.eye(2))
    assert shifted == pytest.approx(np.sqrt(4 + 1 + 0.25))
    assert gaussian_w2(np.array([np.nan, 0.0]), covariance, np.eye(2)) == np.inf


def test_the_distance_of_predictions_counts_their_spread() -> None:
    truth = PredictionMoments(np.array([1.0, 2.0]), np.array([0.5, 3.0]))
    assert predicted_w2(truth, truth) == 0
    # ((3^2 + 0.5^2) + (4^2 + 0^2)) / 2
    found = PredictionMoments(np.array([4.0, -2.0]), np.array([1.0, 3.0]))
    assert predicted_w2(found, truth) == pytest.approx(np.sqrt(25.25 / 2))
    assert predicted_w2(PredictionMoments(np.array([np.nan, 0.0]), np.zeros(2)), truth) == np.inf


def test_the_predictions_of_draws() -> None:
    rng = np.random.default_rng(0)
    rows, inputs = rng.standard_normal((40, 2)), rng.standard_normal((5, 2))
    model = Simulated(
        name="line",
        dim=2,
        data=rows.astype(np.float32),
        per_row=lambda position, minibatch: -0.5 * ((minibatch - position) ** 2).sum(axis=1),
        prior=lambda position: -0.5 * (position**2).sum(),
        start=np.zeros(2),
        digest="line",
        test_inputs=inputs.astype(np.float32),
        predictor=lambda position, points: points @ position,
    )
    target = Target(model, (100,), predictions=PredictionMoments(np.zeros(5), np.ones(5)))
    draws = rng.standard_normal((30, 2)).astype(np.float32)
    found = Problem("line", target, "sgld", {}).predicted(draws)
    values = draws.astype(np.float64) @ inputs.T
    np.testing.assert_allclose(found.mean, values.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.std, values.std(axis=0, ddof=1), rtol=1e-4)
