"""Metrics against hand calculations and scikit-style direct loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_cli import metrics


def calibration_by_loop(probabilities, labels, num_bins):
    """ECE and MCE written bin by bin, membership by exact integer comparison."""
    gaps, weights = [], []
    confidence = probabilities.max(1)
    correct = probabilities.argmax(1) == labels
    for b in range(num_bins):
        inside = (confidence * num_bins > b) & (confidence * num_bins <= b + 1)
        if inside.any():
            gaps.append(abs(correct[inside].mean() - confidence[inside].mean()))
            weights.append(inside.mean())
    return float(np.dot(gaps, weights)), max(gaps)


def test_calibration_of_two_predictions_in_the_last_bin():
    # Confidences (0.95, 1.0), correct (1, 0): accuracy 0.5, mean confidence 0.975.
    probabilities, labels = [[0.05, 0.95], [0.0, 1.0]], [1, 0]
    assert metrics.expected_calibration_error(probabilities, labels) == pytest.approx(0.475)
    assert metrics.maximum_calibration_error(probabilities, labels) == pytest.approx(0.475)


def test_binary_probabilities_are_those_of_class_one():
    # 0.2 predicts class 0 with confidence 0.8.
    p, y = np.array([0.2, 0.9, 0.6, 0.45]), np.array([0, 1, 0, 1])
    two_columns = np.stack([1 - p, p], axis=1)
    for metric in (
        metrics.expected_calibration_error,
        metrics.maximum_calibration_error,
        metrics.accuracy,
        metrics.log_loss,
    ):
        assert metric(p, y) == pytest.approx(metric(two_columns, y), rel=1e-14)
    # Bins (0.7, 0.8], (0.8, 0.9], and (0.5, 0.6] which holds 0.6 and 0.55, both wrong.
    expected = (0.2 + 0.1 + 0.6 + 0.55) / 4
    assert metrics.expected_calibration_error(p, y) == pytest.approx(expected)
    assert metrics.maximum_calibration_error(p, y) == pytest.approx(0.575)


def test_calibration_matches_a_loop_over_bins():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(5) * 0.4, size=400)
    labels = rng.integers(0, 5, size=400)
    for num_bins in (1, 4, 10, 15):
        ece, mce = calibration_by_loop(probabilities, labels, num_bins)
        assert metrics.expected_calibration_error(probabilities, labels, num_bins) == pytest.approx(
            ece
        )
        assert metrics.maximum_calibration_error(probabilities, labels, num_bins) == pytest.approx(
            mce
        )


def test_one_bin_measures_mean_confidence_against_accuracy():
    probabilities = [[0.7, 0.3], [0.6, 0.4], [0.1, 0.9]]
    assert metrics.expected_calibration_error(probabilities, [0, 1, 1], 1) == pytest.approx(
        abs((0.7 + 0.6 + 0.9) / 3 - 2 / 3)
    )


def test_both_ends_of_the_range_are_counted():
    # Three classes that get nothing at all: confidence 0, in the first bin; and certainty.
    probabilities = [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert metrics.expected_calibration_error(probabilities, [1, 0]) == 0.0
    assert metrics.expected_calibration_error(probabilities, [0, 1]) == 1.0


@given(st.integers(1, 40), st.integers(2, 4), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_calibration_errors_are_ordered_and_bounded(num, num_classes, num_bins, seed):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(num_classes), size=num)
    y = rng.integers(0, num_classes, size=num)
    ece = metrics.expected_calibration_error(p, y, num_bins)
    mce = metrics.maximum_calibration_error(p, y, num_bins)
    assert 0 <= ece <= mce + 1e-15
    assert mce <= 1


def test_calibrated_predictions_have_a_small_error():
    # The label is drawn with the stated probability. Confidences lie in the 5 upper bins, about
    # 4,000 in each, so the standard error of a bin's accuracy is at most 0.5/sqrt(3,800).
    rng = np.random.default_rng(1)
    p = rng.uniform(size=20_000)
    y = (rng.uniform(size=p.size) < p).astype(int)
    assert metrics.maximum_calibration_error(p, y, 10) < 4 * 0.5 / math.sqrt(3_800)
    # Too sure of itself: p = 0.75 is announced as 0.9.
    overconfident = p**2 / (p**2 + (1 - p) ** 2)
    assert metrics.expected_calibration_error(overconfident, y, 10) > 0.05


def test_relative_std_error():
    assert metrics.relative_std_error([3.0, 4.0], [3.0, 4.0]) == 0
    assert metrics.relative_std_error([3.0, 9.0], [3.0, 4.0]) == pytest.approx(1.0)
    assert metrics.relative_std_error([6.0, 8.0], [3.0, 4.0]) == pytest.approx(1.0)
    assert metrics.relative_std_error([0.0, 0.0], [3.0, 4.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="not zero"):
        metrics.relative_std_error([1.0], [0.0])


def test_rmse_has_a_root_and_mse_of_draws_has_none():
    assert metrics.rmse([1.0, 2.0, 6.0], [1.0, 4.0, 2.0]) == pytest.approx(math.sqrt(20 / 3))
    predictions = np.array([[1.0, 2.0], [3.0, 4.0]])
    targets = np.array([1.0, 4.0])
    assert metrics.mse_of_draws(predictions, targets) == pytest.approx((0 + 4 + 4 + 0) / 4)
    # Mean square over draws = square of the mean's error + variance of the draws.
    split = metrics.rmse(predictions.mean(0), targets) ** 2 + predictions.var(0).mean()
    assert metrics.mse_of_draws(predictions, targets) == pytest.approx(split)


def test_accuracy():
    assert metrics.accuracy([0.2, 0.9, 0.6, 0.4], [0, 1, 0, 1]) == 0.5
    assert metrics.accuracy([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]], [2, 1]) == 0.5
    # A tie goes to the lower class.
    assert metrics.accuracy([0.5], [0]) == 1


def test_log_loss():
    assert metrics.log_loss([0.25, 0.25], [1, 0]) == pytest.approx(
        -(math.log(0.25) + math.log(0.75)) / 2
    )
    assert metrics.log_loss([[0.2, 0.3, 0.5]], [1]) == pytest.approx(-math.log(0.3))
    # Saturated and wrong: finite, at the resolution of the type that saturated.
    saturated = metrics.log_loss(np.array([1.0], np.float32), [0])
    assert saturated == pytest.approx(-math.log(2.0**-23))
    assert metrics.log_loss(np.array([1.0]), [0]) == pytest.approx(-math.log(2.0**-52))
    assert metrics.log_loss([1.0], [1]) == 0


def test_predictive_entropy():
    entropy = metrics.predictive_entropy([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
    np.testing.assert_allclose(entropy, [math.log(4), 0, math.log(2)], atol=1e-15)
    np.testing.assert_allclose(
        metrics.predictive_entropy([0.5, 0.0, 1.0]), [math.log(2), 0, 0], atol=1e-15
    )


def test_what_is_not_finite_goes_through_as_nan():
    p, y = np.array([0.2, np.nan]), np.array([0, 1])
    for metric in (
        metrics.expected_calibration_error,
        metrics.maximum_calibration_error,
        metrics.accuracy,
        metrics.log_loss,
    ):
        assert math.isnan(metric(p, y))
    assert math.isnan(metrics.rmse([np.nan], [1.0]))
    assert math.isnan(metrics.relative_std_error([np.nan], [1.0]))
    assert np.isnan(metrics.predictive_entropy(p)).tolist() == [False, True]


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.accuracy([0.1, 0.2], [1]),
        lambda: metrics.accuracy([], []),
        lambda: metrics.accuracy([[0.1, 0.9]], [2]),
        lambda: metrics.accuracy([[0.1, 0.9]], [-1]),
        lambda: metrics.accuracy([[0.1, 0.9]], [0.5]),
        lambda: metrics.accuracy(np.zeros((2, 2, 2)), [0, 1]),
        lambda: metrics.expected_calibration_error([0.1], [1], 0),
        lambda: metrics.rmse([1.0], [1.0, 2.0]),
        lambda: metrics.mse_of_draws([1.0], [1.0]),
        lambda: metrics.mse_of_draws([[1.0]], [1.0, 2.0]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(ValueError, match=r".+"):
        call()


def test_float32_input_is_computed_in_float64():
    prediction = np.full(100_000, 1e-4, np.float32)
    assert metrics.rmse(prediction, np.zeros_like(prediction)) == pytest.approx(
        float(np.float32(1e-4)), rel=1e-12
    )


def test_auroc_counts_pairs() -> None:
    """(3 > 1, 3 > 2, 2 > 1, 2 = 2): three and a half of four pairs."""
    assert metrics.auroc([3.0, 2.0], [1.0, 2.0]) == 3.5 / 4
    assert metrics.auroc([1.0, 1.0], [1.0]) == 0.5
    assert metrics.auroc([0.0], [1.0, 2.0]) == 0.0
    assert np.isnan(metrics.auroc([np.nan], [1.0]))
    with pytest.raises(ValueError, match="both kinds"):
        metrics.auroc([], [1.0])


def test_auroc_is_the_share_of_pairs_in_the_right_order() -> None:
    rng = np.random.default_rng(0)
    positives, negatives = rng.integers(0, 9, 40), rng.integers(0, 7, 30)
    pairs = positives[:, None] - negatives[None, :]
    expected = np.mean((pairs > 0) + 0.5 * (pairs == 0))
    assert metrics.auroc(positives, negatives) == pytest.approx(expected, rel=1e-12)
