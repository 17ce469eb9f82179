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
"""Numbers held at once by one array, so that a pass stays in the cache: so many axes at a time."""


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
        \frac{1}{n^2} \sum_{i,j} h_{r,g} = \sum_m \Big(\frac{1}{n} \sum_i s^r_i \varphi_m(u_i)
        + \frac{r^\top g}{l} \varphi'_m(u_i)\Big)^2,

    of which R^2 + 9 R + 16 terms are all that float64 can tell, R being the largest \|u\|. So O(n M
    d) for the axes and as much for every slice, M about 70 for draws of unit scale; O(n^2 d), by
    pairs, where draws are so far from one another that M is above n.

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
        S; NaN when an input is not finite.

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
    x, s = positions.astype(np.float64), scores.astype(np.float64)
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
    u = _from_middle(np.ascontiguousarray(x.T), length_scale)
    counts = _num_features(np.max(np.abs(u), axis=1))
    # Axes of like spread take as many features, and go together.
    order = np.argsort(counts)
    few = int(np.searchsorted(counts[order], num_draws, side="right"))
    found = np.empty(dim)
    step = max(1, ELEMENTS_PER_PASS // num_draws)
    for first in range(0, few, step):
        axes = order[first : min(first + step, few)]
        scores = s[:, axes].T
        found[axes] = _by_features(u[axes], scores, 1.0 / length_scale, int(counts[axes[-1]]))
    for axis in order[few:]:
        own = slice(axis, axis + 1)
        found[own] = _by_pairs(u[own], s[:, own].T, 1.0 / length_scale)
    return found


def _along_slice(u: Floats, s: Floats, direction: Floats, length_scale: float) -> Floats:
    """The V-statistic of h for every axis r with one slice g, of projections ``[num_draws]``."""
    u = _from_middle(u[None], length_scale)
    count = int(_num_features(np.max(np.abs(u))))
    slopes = direction / length_scale
    if count > len(s):
        return _by_pairs(u, s.T, slopes)
    feature, features = np.exp(-0.5 * u[0] ** 2), np.empty((count, len(s)))
    for m in range(count):
        features[m] = feature
        feature = feature * u[0] / np.sqrt(m + 1)
    of_slope = _derivative_sums(features.sum(axis=1), features @ u[0])
    total: Floats = np.sum((features @ s + of_slope[:, None] * slopes) ** 2, axis=0)
    return total / len(s) ** 2


def _from_middle(u: Floats, length_scale: float) -> Floats:
    """Projections ``[dim, num_draws]`` in lengths of the kernel, from the middle of their range."""
    middle = (np.min(u, axis=1) + np.max(u, axis=1)) / 2
    return (u - middle[:, None]) / length_scale


def _num_features(radius: Floats) -> Floats:
    """How many features of the Gaussian kernel matter to float64 for points that far out.

    The features of a point u, squared, are the probabilities of a Poisson variable of mean u^2.
    """
    return np.ceil(radius**2 + 9 * radius + 16)


def _by_features(u: Floats, s: Floats, slope: float, count: int) -> Floats:
    """1/n^2 sum_ij h for projections and scores ``[dim, num_draws]``; ``slope`` is r.g / l."""
    feature = np.exp(-0.5 * u**2)
    with_scores = s - slope * u
    total, before = np.zeros(len(u)), np.zeros(len(u))
    for m in range(count):
        # The derivative of feature m is sqrt(m) times feature m - 1, less u times feature m.
        sums = np.einsum("ri,ri->r", with_scores, feature) + slope * np.sqrt(m) * before
        total += sums**2
        before = np.sum(feature, axis=1)
        feature *= u
        feature *= 1 / np.sqrt(m + 1)
    return total / u.shape[1] ** 2


def _derivative_sums(of_features: Floats, with_positions: Floats) -> Floats:
    """Sums over draws of the features' derivatives from those of phi_m and u phi_m, ``[count]``."""
    before = np.concatenate([[0.0], of_features[:-1]])
    return np.sqrt(np.arange(len(of_features))) * before - with_positions


def _by_pairs(u: Floats, s: Floats, slopes: Floats | float) -> Floats:
    """1/n^2 sum_ij h, all pairs: projections ``[1, num_draws]``, scores ``[dim, num_draws]``."""
    difference = u.T - u
    kernel = np.exp(-0.5 * difference**2)
    of_scores = np.sum(s * (s @ kernel), axis=1)
    # sum_ij k (u_i - u_j)(s_i - s_j) = 2 sum_i s_i sum_j k (u_i - u_j)
    of_slope = 2.0 * s @ np.sum(kernel * difference, axis=1)
    curvature = np.sum(kernel * (1.0 - difference**2))
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
