"""The linear-time estimate of the kernel Stein discrepancy (Liu, Lee and Jordan, 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from jax.typing import ArrayLike

from mamba_cli.rewards.batch_means import batch_means_error
from mamba_cli.rewards.draws import (
    checked_draws,
    require_kernel_parameters,
    require_whitening,
    whitened,
)
from mamba_cli.types import Scored, ScoredDraws
from mamba_cli.whitening import Floats


def linear_ksd(
    positions: ArrayLike, scores: ArrayLike, *, c: float = 1.0, beta: float = -0.5
) -> Scored:
    """Mean of the Stein kernel over disjoint pairs of draws: an unbiased estimate of KSD^2.

    ::

        2/n sum_{i=1}^{n/2} k_pi(x_i, x_{i + n/2})

    O(n d) for n draws in d dimensions, where the U-statistic takes O(n^2 d). It may be negative,
    no root is taken, and it is far noisier: n/2 pairs of the n (n - 1)/2. The paper pairs
    neighbours, which are independent there; draws of a chain are paired half a chain
    apart, so that their correlation is not taken for a discrepancy.

    Parameters
    ----------
    positions, scores
        Draws, in order, and the gradients of the log density there, ``[num_draws, dim]``.
    c, beta
        Scale (c > 0) and exponent (-1 < beta < 0) of the kernel (c^2 + r^2)^beta.

    Returns
    -------
    Scored
        The estimate and its standard error by batch means over pairs; NaN for one draw, or where
        an input is not finite.

    Raises
    ------
    ValueError
        No draws, or shapes that are not equal ``[num_draws, dim]``.

    References
    ----------
    Liu, Lee and Jordan (2016), "A kernelized Stein discrepancy for goodness-of-fit tests",
    the linear-time estimator.
    """
    positions, scores = checked_draws(positions, scores)
    half = len(positions) // 2
    if half == 0 or not (np.isfinite(positions).all() and np.isfinite(scores).all()):
        return Scored(math.nan, math.nan)
    x, s = positions.astype(np.float64), scores.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = stein_kernel(x[:half], x[half : 2 * half], s[:half], s[half : 2 * half], c, beta)
        error = batch_means_error(lambda mean: mean[:, 0], pairs[:, None])
        return Scored(float(np.mean(pairs)), error)


def stein_kernel(x: Floats, y: Floats, sx: Floats, sy: Floats, c: float, beta: float) -> Floats:
    """k_pi(x_i, y_i) with scores sx, sy, ``[m]`` for ``[m, dim]``; see ``rewards.ksd.ksd``."""
    difference = x - y
    r2 = np.sum(difference**2, axis=1)
    q = c**2 + r2
    cross = np.sum(difference * (sx - sy), axis=1)
    curvature = x.shape[1] + 2 * (beta - 1) * r2 / q
    value: Floats = q**beta * (np.sum(sx * sy, axis=1) - 2 * beta / q * (cross + curvature))
    return value


@dataclass(frozen=True)
class LinearKernelSteinDiscrepancy:
    """``linear_ksd`` of an arm's thinned draws in whitened coordinates: lower is better.

    Costs O(num_draws dim), after one gradient over all rows per draw. As a reward it is here for
    comparison: among many arms its noise often makes the most negative value the winner.

    Parameters
    ----------
    c, beta
        The kernel (c^2 + r^2)^beta, r in posterior standard deviations.
    whitening
        ``hessian`` or ``fisher``, at the MAP; see ``curvature.whitening_at``.
    gradients
        Whose scores: ``full``, over all rows, or ``stochastic``, the sampler's own. The noise of
        the latter is independent between the draws of a pair and averages out.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    c: float = 1.0
    beta: float = -0.5
    whitening: str = "hessian"
    gradients: str = "full"
    name: str = "linear_ksd"
    higher_is_better: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_kernel_parameters(self.c, self.beta, self.gradients)
        require_whitening(self.whitening, self.gradients)

    def __call__(self, draws: ScoredDraws) -> Scored:
        return linear_ksd(*whitened(draws), c=self.c, beta=self.beta)
