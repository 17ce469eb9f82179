"""Sliced kernel Stein discrepancy (Gong, Li and Hernández-Lobato, 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
from jax.typing import ArrayLike

from mamba_cli.rewards.draws import (
    checked_draws,
    is_finite_number,
    require,
    require_whitening,
    whitened,
)
from mamba_cli.types import ScoredDraws
from mamba_cli.whitening import Floats

SLICE_SEED = 0
"""Of the random slices: every arm is measured along the same ones."""

ELEMENTS_PER_PASS = 1 << 14
"""Numbers of an array of one pass over some of the axes, so that it stays in the cache."""

LARGEST_RADIUS = 37.0
"""Farther out exp(-u^2 / 2), with which the features of a point begin, is 0 in float64."""

FEATURES_PER_DRAW = 8
"""A pair of draws along an axis costs as much as so many features of a draw."""

FEATURES_PER_PASS = 64


def sliced_ksd(
    positions: ArrayLike, scores: ArrayLike, *, num_slices: int = 10, length_scale: float = 1.0
) -> float:
    r"""Sliced KSD with the axes as score directions and the best of a finite set of slices.

    .. math::
        S^2 = \sum_{r} \max_{g \in G_r} \frac{1}{n^2} \sum_{i,j} h_{r,g}(x_i, x_j), \qquad
        h_{r,g} = s^r_x s^r_y k + (r^\top g)\big(s^r_y \partial_u k + s^r_x \partial_v k\big)
                  + (r^\top g)^2 \partial_u \partial_v k

    with :math:`s^r = r^\top s`, :math:`u = g^\top x`, :math:`v = g^\top y` and the Gaussian kernel
    :math:`k = \exp(-(u - v)^2 / 2 l^2)`. The directions r are the axes (the paper's orthogonal
    basis), and the candidates for the slice of r are r itself and ``num_slices`` random unit
    vectors, the same for every r: the paper's maxSKSD takes the supremum over all unit vectors by
    gradient ascent, and Gong et al. (2021b) show that finitely many random slices suffice. The
    length is fixed, in place of the median distance of the draws, which is another for every arm.

    Each term is a V-statistic of a positive definite kernel, so that nothing is negative. It is
    summed by the features of the kernel, not pair by pair: with u and v counted from their middle
    and in lengths,

    .. math::
        k = \sum_{m \ge 0} \varphi_m(u) \varphi_m(v), \quad
        \varphi_m(u) = e^{-u^2 / 2} u^m / \sqrt{m!}, \quad
        \frac{1}{n^2} \sum_{i,j} h_{r,g} = \sum_m \Big(\frac{1}{n} \sum_i \big[s^r_i \varphi_m(u_i)
        + \frac{r^\top g}{l} \varphi'_m(u_i)\big]\Big)^2.

    M = R^2 + 9 R + 16 terms are taken, R being the largest of all absolute u: those left out are
    below 1e-17 of the squares of the features and of their derivatives. That is O(n M d) for the
    axes and as much for every slice, M 45 to 70 for draws of unit scale. All pairs are summed,
    O(n^2 d), where the draws are too few for that to pay or too far from one another: M above 8 n
    along an axis, above n along a slice, or R above 37.

    Parameters
    ----------
    positions, scores
        Draws and the gradients of the log density there, ``[num_draws, dim]``, in coordinates of
        unit scale.
    num_slices
        Random slices, 0 or more.
    length_scale
        l, above 0.

    Returns
    -------
    float
        S; NaN when an input is not finite, or so far out that a square overflows.

    Raises
    ------
    ValueError
        No draws, or shapes that are not equal ``[num_draws, dim]``.

    References
    ----------
    Gong, Li and Hernández-Lobato, "Sliced kernelized Stein discrepancy" (ICLR 2021); Gong, Zhang,
    Li and Hernández-Lobato, "Active slices for sliced Stein discrepancy" (ICML 2021).
    """
    positions, scores = checked_draws(positions, scores)
    if not (np.isfinite(positions).all() and np.isfinite(scores).all()):
        return float("nan")
    x, s = (array.astype(np.float64, copy=False) for array in (positions, scores))
    dim = x.shape[1]
    slices = np.random.default_rng(SLICE_SEED).standard_normal((num_slices, dim))
    slices /= np.linalg.norm(slices, axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        best = _along_axes(x, s, length_scale)
        for direction in slices:
            best = np.maximum(best, _along_slice(x @ direction, s, direction, length_scale))
        return float(np.sqrt(np.maximum(np.sum(best), 0.0)))


def _along_axes(x: Floats, s: Floats, length_scale: float) -> Floats:
    """The V-statistic of h for every axis r with the slice g = r, ``[dim]``."""
    num_draws, dim = x.shape
    low, high = np.min(x, axis=0), np.max(x, axis=0)
    middle, counts = (low + high) / 2, _num_features((high - low) / 2 / length_scale)
    # Axes of like spread take as many features, and go together.
    order = np.argsort(counts)
    by_features = int(np.sum(counts <= FEATURES_PER_DRAW * num_draws))
    found = np.empty(dim)

    def fill(first: int, last: int, step: int) -> None:
        for start in range(first, last, step):
            axes = order[start : min(start + step, last)]
            u, scores = (x[:, axes] - middle[axes]).T / length_scale, s[:, axes].T
            if first < by_features:
                count = int(counts[axes[-1]])
                found[axes] = _by_features(u, scores, 1.0 / length_scale, count)
            else:
                found[axes] = _by_pairs(u, scores, 1.0 / length_scale)

    fill(0, by_features, max(1, ELEMENTS_PER_PASS // num_draws))
    fill(by_features, dim, max(1, ELEMENTS_PER_PASS // num_draws**2))
    return found


def _along_slice(u: Floats, s: Floats, direction: Floats, length_scale: float) -> Floats:
    """The V-statistic of h for every axis r with one slice g, of projections ``[num_draws]``."""
    low, high = np.min(u), np.max(u)
    u, slopes = (u - (low + high) / 2) / length_scale, direction / length_scale
    count = _num_features(float(high - low) / 2 / length_scale)
    if not count <= len(s):
        return _by_pairs(u[None], s.T, slopes)
    feature, features = np.exp(-0.5 * u**2), np.empty((int(count), len(s)))
    for m in range(len(features)):
        features[m] = feature
        feature = feature * u / np.sqrt(m + 1)
    of_slope = _derivatives(np.sum(features, axis=1), features @ u)
    total = np.zeros(s.shape[1])
    for first in range(0, len(features), FEATURES_PER_PASS):
        own = slice(first, first + FEATURES_PER_PASS)
        total += np.sum((features[own] @ s + of_slope[own, None] * slopes) ** 2, axis=0)
    return total / len(s) ** 2


def _num_features(radius: Floats | float) -> Floats:
    """How many features matter to float64 for points up to ``radius`` out; infinite if too far.

    The features of a point u, squared, are the probabilities of a Poisson variable of mean u^2.
    """
    found = np.ceil(np.square(radius) + 9 * np.asarray(radius) + 16)
    return np.where(np.asarray(radius) <= LARGEST_RADIUS, found, np.inf)


def _derivatives(of_features: Floats, with_positions: Floats) -> Floats:
    """Sums over draws of phi_m' = sqrt(m) phi_(m-1) - u phi_m from those of phi_m and u phi_m."""
    before = np.concatenate([[0.0], of_features[:-1]])
    return np.sqrt(np.arange(len(of_features))) * before - with_positions


def _by_features(u: Floats, s: Floats, slope: float, count: int) -> Floats:
    """1/n^2 sum_ij h for projections and scores ``[dim, num_draws]``; ``slope`` is r.g / l."""
    feature = np.exp(-0.5 * u**2)
    with_scores = s - slope * u
    total, before = np.zeros(len(u)), np.zeros(len(u))
    for m in range(count):
        # As in _derivatives, with the scores in the same sum as u.
        sums = np.einsum("ri,ri->r", with_scores, feature) + slope * np.sqrt(m) * before
        total += sums**2
        before = np.sum(feature, axis=1)
        feature *= u
        feature *= 1 / np.sqrt(m + 1)
    return total / u.shape[1] ** 2


def _by_pairs(u: Floats, s: Floats, slopes: Floats | float) -> Floats:
    """1/n^2 sum_ij h by all pairs, for projections of one slice or of each axis.

    ``u`` is ``[1, num_draws]`` or ``[dim, num_draws]``, ``s`` the latter.
    """
    difference = u[:, :, None] - u[:, None, :]
    kernel = np.exp(-0.5 * difference**2)
    products = s @ kernel[0] if len(kernel) == 1 else np.matmul(kernel, s[:, :, None])[:, :, 0]
    of_scores = np.sum(s * products, axis=1)
    # sum_ij k (u_i - u_j)(s_i - s_j) = 2 sum_i s_i sum_j k (u_i - u_j)
    of_slope = 2.0 * np.sum(s * np.sum(kernel * difference, axis=2), axis=1)
    curvature = np.sum(kernel * (1.0 - difference**2), axis=(1, 2))
    total: Floats = of_scores + slopes * of_slope + np.square(slopes) * curvature
    return total / s.shape[1] ** 2


@dataclass(frozen=True)
class SlicedKernelSteinDiscrepancy:
    """``sliced_ksd`` of an arm's thinned draws in whitened coordinates: lower is better.

    Costs at most O(num_draws^2 dim) a slice, after one gradient over all rows per draw.

    Parameters
    ----------
    num_slices
        Random slices tried beside the axes, a whole number of 0 or more.
    length_scale
        Of the Gaussian kernel, in posterior standard deviations, above 0.
    whitening
        ``hessian`` or ``fisher``, at the MAP; see ``curvature.whitening_at``.
    gradients
        Whose scores: ``full``, over all rows, or ``stochastic``, the sampler's own.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    num_slices: int = 10
    length_scale: float = 1.0
    whitening: str = "hessian"
    gradients: str = "full"
    name: str = "sliced_ksd"
    higher_is_better: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_whitening(self.whitening, self.gradients)
        count, length = self.num_slices, self.length_scale
        whole = isinstance(count, Integral) and not isinstance(count, bool) and count >= 0
        require(whole, "num_slices", count, "a whole number, at least 0")
        require(is_finite_number(length) and length > 0, "length_scale", length, "above 0")

    def __call__(self, draws: ScoredDraws) -> float:
        return sliced_ksd(
            *whitened(draws), num_slices=self.num_slices, length_scale=self.length_scale
        )
