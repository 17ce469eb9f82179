"""The polynomial Stein discrepancy of order 2, as published, on thinned draws."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jax.typing import ArrayLike

from mamba_cli.rewards.draws import checked_draws, require_whitening, whitened
from mamba_cli.types import ScoredDraws
from mamba_cli.whitening import MAX_DENSE_DIM


def psd(positions: ArrayLike, scores: ArrayLike) -> float:
    r"""Polynomial Stein discrepancy of order 2: the norm of the mean Stein features.

    .. math::
        PSD = \sqrt{\sum_k z_k^2}, \qquad z_k = \frac1n \sum_i (\mathcal{A} P_k)(x_i), \qquad
        \mathcal{A} f = \Delta f + \nabla f \cdot s,

    over all monomials :math:`P_k` of degree 1 and 2. With the score :math:`s`,

    ======================  ==================================
    :math:`x_j`             :math:`s_j`
    :math:`x_j^2`           :math:`2 x_j s_j + 2`
    :math:`x_j x_l, j < l`  :math:`x_l s_j + x_j s_l`
    ======================  ==================================

    all of which have mean zero under the posterior. It depends on the coordinates, on their scale
    and on their axes. Above ``whitening.MAX_DENSE_DIM`` dimensions the mixed monomials are left
    out, the variant without interactions, in O(n d) instead of O(n d^2).

    Parameters
    ----------
    positions, scores
        Draws and the gradients of the log density there, ``[num_draws, dim]``.

    Returns
    -------
    float
        The discrepancy; NaN when an input is not finite.

    Raises
    ------
    ValueError
        No draws, or shapes that are not equal ``[num_draws, dim]``.

    References
    ----------
    Srinivasan, Sutton, Drovandi and South, "The polynomial Stein discrepancy for assessing moment
    convergence", arXiv 2412.05135.
    """
    positions, scores = checked_draws(positions, scores)
    if not (np.isfinite(positions).all() and np.isfinite(scores).all()):
        return float("nan")
    x, s = positions.astype(np.float64), scores.astype(np.float64)
    num_draws, dim = x.shape
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sum(np.mean(s, axis=0) ** 2)
        squares += np.sum((2 * np.mean(x * s, axis=0) + 2) ** 2)
        if dim <= MAX_DENSE_DIM:
            product = s.T @ x / num_draws
            mixed = product + product.T
            squares += np.sum(np.triu(mixed, 1) ** 2)
        return float(np.sqrt(squares))


@dataclass(frozen=True)
class PolynomialSteinDiscrepancy:
    """``psd`` of an arm's thinned draws in whitened coordinates, as a reward: lower is better.

    Costs O(num_draws dim^2), O(num_draws dim) in high dimension, after one gradient over all rows
    per draw. ``stein_moments`` reads every draw and needs no such gradients.

    Parameters
    ----------
    whitening
        ``hessian`` or ``fisher``, at the MAP; see ``curvature.whitening_at``.
    gradients
        Whose scores: ``full``, over all rows, or ``stochastic``, the sampler's own.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    whitening: str = "hessian"
    gradients: str = "full"
    name: str = "psd"
    higher_is_better: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_whitening(self.whitening, self.gradients)

    def __call__(self, draws: ScoredDraws) -> float:
        return psd(*whitened(draws))
