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

ELEMENTS_PER_PASS = 1 << 20
"""Kernel values held at once: coordinates are taken so many at a time."""


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

    O(n^2 d) for the axes and as much for every random slice. Each term is a V-statistic of a
    positive definite kernel, so that nothing is negative.

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
    step = max(1, ELEMENTS_PER_PASS // num_draws**2)
    parts = [
        _statistics(x[:, first : first + step].T, s[:, first : first + step].T, 1.0, length_scale)
        for first in range(0, dim, step)
    ]
    return np.concatenate(parts)


def _along_slice(u: Floats, s: Floats, direction: Floats, length_scale: float) -> Floats:
    """The V-statistic of h for every axis r with one slice g, of projections ``[num_draws]``."""
    return _statistics(u[None], s.T, direction, length_scale)


def _statistics(u: Floats, s: Floats, overlap: Floats | float, length_scale: float) -> Floats:
    """1/n^2 sum_ij h for projections ``[dim or 1, num_draws]``, scores ``[dim, num_draws]``."""
    difference = (u[:, :, None] - u[:, None, :]) / length_scale
    kernel = np.exp(-0.5 * difference**2)
    of_scores = np.sum(s * _products(kernel, s), axis=1)
    # sum_ij k (u_i - u_j)(s_i - s_j) = 2 sum_i s_i sum_j k (u_i - u_j)
    slope = 2.0 * np.sum(s * np.sum(kernel * difference, axis=2), axis=1) / length_scale
    curvature = np.sum(kernel * (1.0 - difference**2), axis=(1, 2)) / length_scale**2
    total: Floats = of_scores + overlap * slope + np.square(overlap) * curvature
    return total / s.shape[1] ** 2


def _products(kernel: Floats, s: Floats) -> Floats:
    """K_r s_r for every r, ``[dim, num_draws]``; one kernel for all, or one for each."""
    if len(kernel) == 1:
        return s @ kernel[0]
    product: Floats = np.matmul(kernel, s[:, :, None])[:, :, 0]
    return product


@dataclass(frozen=True)
class SlicedKernelSteinDiscrepancy:
    """``sliced_ksd`` of an arm's thinned draws in whitened coordinates: lower is better.

    Costs O(num_draws^2 dim) a slice, after one gradient over all rows per draw.

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
