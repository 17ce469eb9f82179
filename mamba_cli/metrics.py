"""How good a set of draws, or the prediction made from it, is. Pure NumPy in float64.

A quantity that is not finite goes through: the metric is then ``nan`` (or infinite), not an error.
Shapes that do not fit are an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

HIGHER_IS_BETTER = frozenset({"accuracy"})
"""Of the metrics of a prediction, those that are maximised."""


def expected_calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 10
) -> float:
    """Mean gap between confidence and accuracy, over bins of confidence.

    ::

        ECE = sum_b |B_b|/n |accuracy(B_b) - confidence(B_b)|

    over the predictions whose confidence (the probability of the predicted class) falls into bin b
    of ``num_bins`` of equal width on [0, 1]: (0, 0.1], (0.1, 0.2], ... with 0 in the first. Empty
    bins are skipped.

    Parameters
    ----------
    probabilities
        ``[n, num_classes]``, or ``[n]``: P(y = 1) of two classes.
    labels
        ``[n]`` integers from 0.
    num_bins
        1 or more.

    Returns
    -------
    float
        In [0, 1]; ``nan`` when a probability is.

    Raises
    ------
    ValueError
        No predictions, shapes that do not fit, labels that are no classes, or no bins.

    References
    ----------
    Guo et al. (2017), *On Calibration of Modern Neural Networks*, Eq. 3.
    """
    gaps, shares = _calibration_gaps(probabilities, labels, num_bins)
    return float(shares @ gaps)


def maximum_calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 10
) -> float:
    """Largest gap between confidence and accuracy over the bins that are not empty.

    Parameters, returned value and errors are those of :func:`expected_calibration_error`.

    References
    ----------
    Guo et al. (2017), *On Calibration of Modern Neural Networks*, Eq. 5.
    """
    gaps, _ = _calibration_gaps(probabilities, labels, num_bins)
    return float(gaps.max())


def relative_std_error(std: ArrayLike, reference_std: ArrayLike) -> float:
    """Relative error of posterior standard deviations, ``||std - ref||_2 / ||ref||_2``.

    Parameters
    ----------
    std, reference_std
        ``[dim]``.

    Returns
    -------
    float
        0 where they agree.

    Raises
    ------
    ValueError
        Shapes that differ, or a reference that is zero.

    References
    ----------
    Coullon, South and Nemeth, Section 5.1.
    """
    estimate, reference = _same_shape(std, reference_std)
    norm = np.linalg.norm(reference)
    if norm == 0:
        raise ValueError("relative_std_error needs a reference that is not zero")
    return float(np.linalg.norm(estimate - reference) / norm)


def rmse(prediction: ArrayLike, target: ArrayLike) -> float:
    """Root mean squared error of one prediction, ``sqrt(mean((prediction - target)^2))``.

    Given the posterior-mean prediction this is the error of the posterior mean.

    Parameters
    ----------
    prediction, target
        ``[n]``.

    Returns
    -------
    float
        In the units of the target.

    Raises
    ------
    ValueError
        Shapes that differ, or nothing in them.
    """
    predicted, wanted = _same_shape(prediction, target)
    return float(np.sqrt(np.mean((predicted - wanted) ** 2)))


def mse_of_draws(predictions: ArrayLike, targets: ArrayLike) -> float:
    """Mean over draws of each draw's mean squared error, without a root.

    It holds the posterior variance of the prediction as well as the error of its mean. This is what
    the paper tabulates as RMSE.

    Parameters
    ----------
    predictions
        ``[num_draws, n]``.
    targets
        ``[n]``.

    Returns
    -------
    float
        In the squared units of the target.

    Raises
    ------
    ValueError
        Shapes that do not fit, or nothing in them.
    """
    predicted, wanted = _float64(predictions), _float64(targets)
    if predicted.ndim != 2 or predicted.shape[1:] != wanted.shape or predicted.size == 0:
        raise ValueError(
            f"expected [num_draws, n] and [n], got {predicted.shape} and {wanted.shape}"
        )
    return float(np.mean((predicted - wanted) ** 2))


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Share of predictions whose most probable class is the label.

    Ties go to the class of lower index. Parameters and errors are those of
    :func:`expected_calibration_error`; ``nan`` when a probability is.
    """
    p, y = _class_probabilities(probabilities, labels)
    return float(np.mean(p.argmax(axis=1) == y)) if np.isfinite(p).all() else float("nan")


def log_loss(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean negative log probability of the labels, in nats.

    Probabilities below the machine epsilon of their own type are raised to it, so that one float32
    probability that saturated does not make the mean infinite.

    Parameters and errors are those of :func:`expected_calibration_error`; ``nan`` when a
    probability is.
    """
    p, y = _class_probabilities(probabilities, labels)
    chosen = p[np.arange(len(y)), y]
    return float(-np.mean(np.log(np.maximum(chosen, _epsilon(probabilities)))))


def predictive_entropy(probabilities: ArrayLike) -> FloatArray:
    """Entropy of each prediction, ``-sum_k p_k log p_k``, in nats.

    Parameters
    ----------
    probabilities
        ``[n, num_classes]``, or ``[n]``: P(y = 1) of two classes.

    Returns
    -------
    NDArray
        ``[n]``, from 0 (certain) to log(num_classes).

    Raises
    ------
    ValueError
        Another number of axes, or no classes.

    References
    ----------
    Lakshminarayanan et al. (2017), *Simple and Scalable Predictive Uncertainty Estimation*.
    """
    p = _two_columns(_float64(probabilities))
    # 0 log 0 is 0.
    return -np.sum(p * np.log(np.where(p == 0, 1.0, p)), axis=1)


def auroc(positives: ArrayLike, negatives: ArrayLike) -> float:
    """Probability that a random positive scores above a random negative, ties counted half.

    The area under the receiver operating characteristic, by the rank sum of Mann and Whitney.

    Parameters
    ----------
    positives, negatives
        Scores ``[n]`` and ``[m]``.

    Returns
    -------
    float
        In [0, 1]; ``nan`` when a score is.

    Raises
    ------
    ValueError
        No positives or no negatives.
    """
    above, below = _float64(positives).ravel(), np.sort(_float64(negatives).ravel())
    if above.size == 0 or below.size == 0:
        raise ValueError(f"auroc needs scores of both kinds, got {above.size} and {below.size}")
    if np.isnan(above).any() or np.isnan(below).any():
        return float("nan")
    smaller = np.searchsorted(below, above, side="left")
    not_larger = np.searchsorted(below, above, side="right")
    return float(np.mean(smaller + not_larger) / (2 * below.size))


def _calibration_gaps(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int
) -> tuple[FloatArray, FloatArray]:
    """Of each bin that is not empty: |accuracy - confidence| and its share of the predictions."""
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins}: must be 1 or more")
    p, y = _class_probabilities(probabilities, labels)
    if not np.isfinite(p).all():
        return np.array([np.nan]), np.array([1.0])
    confidence = p.max(axis=1)
    correct = (p.argmax(axis=1) == y).astype(np.float64)
    interior_edges = np.arange(1, num_bins) / num_bins
    bins = np.digitize(confidence, interior_edges, right=True)
    count = np.bincount(bins, minlength=num_bins)
    total_gap = np.bincount(bins, weights=correct - confidence, minlength=num_bins)
    filled = count > 0
    return np.abs(total_gap[filled] / count[filled]), count[filled] / len(y)


def _class_probabilities(
    probabilities: ArrayLike, labels: ArrayLike
) -> tuple[FloatArray, NDArray[np.int64]]:
    """Probabilities ``[n, num_classes]`` and labels ``[n]``, checked against each other."""
    p = _two_columns(_float64(probabilities))
    y = np.asarray(labels)
    if y.shape != p.shape[:1] or y.size == 0:
        raise ValueError(f"expected one label per prediction, got {y.shape} for {p.shape}")
    classes = y.astype(np.int64)
    if (classes != y).any() or classes.min() < 0 or classes.max() >= p.shape[1]:
        raise ValueError(f"labels must be integers from 0 to {p.shape[1] - 1}")
    return p, classes


def _two_columns(p: FloatArray) -> FloatArray:
    """``[n]`` probabilities of class 1 as ``[n, 2]``; ``[n, num_classes]`` as it is."""
    if p.ndim == 1:
        return np.stack([1 - p, p], axis=1)
    if p.ndim != 2 or p.shape[1] == 0:
        raise ValueError(f"expected probabilities [n, num_classes] or [n], got {p.shape}")
    return p


def _same_shape(first: ArrayLike, second: ArrayLike) -> tuple[FloatArray, FloatArray]:
    a, b = _float64(first), _float64(second)
    if a.shape != b.shape or a.size == 0:
        raise ValueError(f"expected two arrays of one shape, got {a.shape} and {b.shape}")
    return a, b


def _float64(values: ArrayLike) -> FloatArray:
    return np.asarray(values, np.float64)


def _epsilon(values: Any) -> float:
    dtype = np.asarray(values).dtype
    return float(np.finfo(dtype if dtype == np.float32 else np.float64).eps)
