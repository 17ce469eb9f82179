"""Standard error of a kernel Stein discrepancy, autocorrelation included.

The V-statistic is a mean over pairs of draws, KSD^2 = sum_{i,j} k_ij / m^2, so it is known without
a block of consecutive draws as soon as the sums over pairs of blocks are: the delete-one-block
jackknife,

    SE^2 = (B - 1) / B sum_b (KSD_(-b) - mean of KSD_(-.))^2,

costs no more than the discrepancy itself. Whole blocks are left out, so that draws within a block
may depend on one another (Kuensch, 1989); to first order it is the block bootstrap of the
V-statistic without its resampling noise. With B = 8 blocks the error has an error of about 25 %.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from jax.typing import ArrayLike

from mamba_cli.rewards.draws import checked_draws
from mamba_cli.whitening import Floats

NUM_BLOCKS = 8
FEWEST_DRAWS = 2 * NUM_BLOCKS
"""Below, there is no standard error."""


def ksd_std_error(
    positions: ArrayLike, scores: ArrayLike, *, c: float = 1.0, beta: float = -0.5
) -> float:
    """Standard error of :func:`mamba_cli.rewards.ksd` over chains like this one.

    Parameters
    ----------
    positions, scores
        Draws in their order, evenly thinned, and gradients of the log density there,
        ``[num_draws, dim]``.
    c, beta
        Of the kernel (c^2 + r^2)^beta.

    Returns
    -------
    float
        NaN for fewer than ``FEWEST_DRAWS`` draws, or where an input is not finite. Around 0, where
        the draws are exact, the discrepancy is of the size of its own error and the jackknife is
        off by a factor of order one.
    """
    x, s = (array.astype(np.float64) for array in checked_draws(positions, scores))
    if len(x) < FEWEST_DRAWS or not (np.isfinite(x).all() and np.isfinite(s).all()):
        return math.nan
    cuts = np.linspace(0, len(x), NUM_BLOCKS + 1).round().astype(int)
    blocks = [slice(first, last) for first, last in pairwise(cuts)]
    sums = np.zeros((NUM_BLOCKS, NUM_BLOCKS))
    centred = x - x.mean(axis=0)
    for a, rows in enumerate(blocks):
        for b, columns in enumerate(blocks[: a + 1]):
            kernel = _stein_kernel(centred[rows], s[rows], centred[columns], s[columns], c, beta)
            sums[a, b] = sums[b, a] = kernel.sum()
    left = len(x) - np.diff(cuts)
    squares = (sums.sum() - 2 * sums.sum(axis=1) + np.diagonal(sums)) / left**2
    without = np.sqrt(np.maximum(squares, 0.0))
    return float(np.sqrt((NUM_BLOCKS - 1) * np.var(without)))


def _stein_kernel(x: Floats, sx: Floats, y: Floats, sy: Floats, c: float, beta: float) -> Floats:
    """The Stein kernel of :func:`mamba_cli.rewards.ksd` between two sets of draws, ``[m, n]``."""
    dim = x.shape[1]
    own_x, own_y = np.sum(x * x, axis=1)[:, None], np.sum(y * y, axis=1)
    squared_distance = np.maximum(own_x + own_y - 2 * x @ y.T, 0.0)
    along = np.sum(x * sx, axis=1)[:, None] + np.sum(y * sy, axis=1) - x @ sy.T - sx @ y.T
    q = c**2 + squared_distance
    curvature = dim + 2 * (beta - 1) * squared_distance / q
    kernel: Floats = q**beta * (sx @ sy.T - 2 * beta / q * (along + curvature))
    return kernel
