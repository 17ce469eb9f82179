"""Kernel Stein discrepancy in whitened coordinates, as a V- or a U-statistic.

In raw coordinates the kernel has one length for every direction and every posterior: where the
posterior is much narrower, the KSD is little more than the norm of the mean score and does not see
the width of the draws. Whitened by the curvature at the MAP, the same transformation for every arm,
the posterior has unit scale and so has the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from jax.typing import ArrayLike

from mamba_cli.rewards.draws import (
    checked_draws,
    require,
    require_kernel_parameters,
    require_whitening,
    whitened,
)
from mamba_cli.rewards.ksd import ksd, ksd_with_error
from mamba_cli.types import Scored, ScoredDraws

STATISTICS = ("v", "u")


def unbiased_squared_ksd(
    positions: ArrayLike, scores: ArrayLike, *, c: float = 1.0, beta: float = -0.5
) -> float:
    """The U-statistic of KSD^2: pairs i != j only, and no root.

    ::

        1/(n (n - 1)) sum_{i != j} k_pi(x_i, x_j),   k_pi(x, x) = c^(2 beta) (|s|^2 - 2 beta d/c^2)

    Its mean is zero for independent draws from the posterior, so that it may be negative: then it
    says no more than that the draws are too few to tell. NaN for a single draw, or where an input
    is not finite.

    Parameters
    ----------
    positions, scores
        ``[num_draws, dim]``, in whatever coordinates; see :func:`mamba_cli.rewards.ksd.ksd`.

    References
    ----------
    Liu, Lee and Jordan (2016), "A kernelized Stein discrepancy for goodness-of-fit tests".
    """
    positions, scores = checked_draws(positions, scores)
    num_draws, dim = positions.shape
    if num_draws == 1:
        return math.nan
    squares = np.sum(scores.astype(np.float64) ** 2)
    own = c ** (2 * beta) * (squares - num_draws * 2 * beta * dim / c**2)
    total = num_draws**2 * ksd(positions, scores, c=c, beta=beta) ** 2
    return float((total - own) / (num_draws * (num_draws - 1)))


@dataclass(frozen=True)
class WhitenedKernelSteinDiscrepancy:
    """The KSD of an arm's thinned draws in whitened coordinates, as a reward: lower is better.

    Costs O(num_draws^2 dim), after one gradient over all rows per draw.

    Parameters
    ----------
    c, beta
        The kernel (c^2 + r^2)^beta, r in posterior standard deviations.
    statistic
        ``v``: the root of the V-statistic, never negative. ``u``: the U-statistic, no root.
    whitening
        ``hessian`` or ``fisher``, at the MAP; see ``curvature.whitening_at``.
    gradients
        Whose scores: ``full``, over all rows, or ``stochastic``, the sampler's own, whose noise
        counts as an error of the draws.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    c: float = 1.0
    beta: float = -0.5
    statistic: str = "v"
    whitening: str = "hessian"
    gradients: str = "full"
    name: str = "whitened_ksd"
    higher_is_better: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_kernel_parameters(self.c, self.beta, self.gradients)
        require_whitening(self.whitening, self.gradients)
        require(self.statistic in STATISTICS, "statistic", self.statistic, "v or u")

    def __call__(self, draws: ScoredDraws) -> Scored:
        x, s = whitened(draws)
        root, error = ksd_with_error(x, s, c=self.c, beta=self.beta)
        if self.statistic == "v":
            return Scored(root, error)
        # U differs from the square of V by a constant, to first order: the delta method.
        return Scored(unbiased_squared_ksd(x, s, c=self.c, beta=self.beta), 2 * root * error)
