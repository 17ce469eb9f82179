"""Whitened coordinates against their definition, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from mamba_cli.whitening import Whitening

RNG = np.random.default_rng(3)
ROOT = RNG.standard_normal((4, 4)) + 3 * np.eye(4)
PRECISION = ROOT @ ROOT.T
CENTRE = RNG.standard_normal(4)


def test_a_gaussian_becomes_standard_normal() -> None:
    whitening = Whitening.of_precision(CENTRE, PRECISION)
    theta = RNG.standard_normal((6, 4))
    w = whitening.positions(theta)
    # |w|^2 is the quadratic form, and the score of N(centre, PRECISION^-1) becomes -w.
    quadratic = [(t - CENTRE) @ PRECISION @ (t - CENTRE) for t in theta]
    np.testing.assert_allclose(np.sum(w**2, axis=1), quadratic, rtol=1e-12)
    np.testing.assert_allclose(whitening.scores(-(theta - CENTRE) @ PRECISION), -w, rtol=1e-10)
    np.testing.assert_allclose(whitening.deviations(theta[0] - theta[1]), w[0] - w[1])


def test_a_diagonal_is_the_same_as_its_matrix() -> None:
    diagonal = np.array([4.0, 0.25, 9.0, 1.0])
    theta, scores = RNG.standard_normal((2, 5, 4))
    dense = Whitening.of_precision(CENTRE, np.diag(diagonal))
    whitening = Whitening.of_precision(CENTRE, diagonal)
    assert whitening.is_diagonal
    assert not dense.is_diagonal
    np.testing.assert_allclose(whitening.positions(theta), dense.positions(theta), rtol=1e-12)
    np.testing.assert_allclose(whitening.scores(scores), dense.scores(scores), rtol=1e-12)


def test_scores_of_any_number_of_axes_are_whitened_along_the_last() -> None:
    whitening = Whitening.of_precision(CENTRE, PRECISION)
    scores = RNG.standard_normal((2, 3, 4))
    whitened = whitening.scores(scores)
    np.testing.assert_allclose(whitened[1, 2], np.linalg.solve(whitening.factor, scores[1, 2]))


@pytest.mark.parametrize(
    "precision", [np.diag([1.0, -1.0]), np.full((2, 2), np.nan), [1.0, 0.0], [np.inf, 1.0]]
)
def test_what_is_no_precision_is_refused(precision) -> None:
    with pytest.raises(np.linalg.LinAlgError):
        Whitening.of_precision(np.zeros(2), precision)
