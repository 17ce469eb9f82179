"""True errors: how far moments or predictions are from those of the posterior."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Floats = np.ndarray


def gaussian_w2(mean: Floats, covariance: Floats, reference: Floats) -> float:
    """2-Wasserstein distance of N(mean, covariance) and N(0, reference), ``[d]``, ``[d, d]``.

    sqrt(|m|^2 + tr(C + S - 2 (S^1/2 C S^1/2)^1/2)); infinite where a moment is not finite.
    """
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        return float("inf")
    values, vectors = np.linalg.eigh(reference)
    root = (vectors * np.sqrt(values)) @ vectors.T
    crossed = np.linalg.eigvalsh(root @ covariance @ root)
    bures = np.trace(covariance) + np.trace(reference) - 2 * np.sqrt(np.maximum(crossed, 0)).sum()
    return float(np.sqrt(mean @ mean + max(bures, 0.0)))


def whitened_w2(
    mean: Floats, covariance: Floats, true_mean: Floats, true_covariance: Floats
) -> float:
    """The same in coordinates in which the posterior's covariance is the identity."""
    factor = np.linalg.cholesky(np.linalg.inv(true_covariance))
    delta = factor.T @ (mean - true_mean)
    return gaussian_w2(delta, factor.T @ covariance @ factor, np.eye(len(delta)))


class PredictionMoments(NamedTuple):
    """Mean and standard deviation over draws of every prediction, ``[num_predictions]``."""

    mean: Floats
    std: Floats


def predicted_w2(found: PredictionMoments, truth: PredictionMoments) -> float:
    """Root mean square over predictions of the 2-Wasserstein distance of N(mean, std^2).

    sqrt(mean of (m - m*)^2 + (s - s*)^2); infinite where a moment is not finite.
    """
    assert found.mean.shape == found.std.shape == truth.mean.shape == truth.std.shape
    squares = (found.mean - truth.mean) ** 2 + (found.std - truth.std) ** 2
    distance = float(np.sqrt(np.mean(squares)))
    return distance if np.isfinite(distance) else float("inf")
