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

import numpy as np

NUM_BLOCKS = 8
FEWEST_DRAWS = 2 * NUM_BLOCKS
"""Below, there is no standard error."""


def block_of_draws(num_draws: int) -> np.ndarray:
    """The block of every draw: ``NUM_BLOCKS`` of them, of consecutive draws, equal but for one."""
    cuts = np.linspace(0, num_draws, NUM_BLOCKS + 1).round().astype(int)
    return np.repeat(np.arange(NUM_BLOCKS), np.diff(cuts))


def error_of_sums(sums: np.ndarray, num_draws: np.ndarray) -> float:
    """Standard error of the root of a V-statistic.

    Parameters
    ----------
    sums
        Of the kernel over the pairs of every two blocks, ``[NUM_BLOCKS, NUM_BLOCKS]``, float64.
    num_draws
        Of every block, ``[NUM_BLOCKS]``.

    Returns
    -------
    float
        NaN where a sum is not finite. Around 0, where the draws are exact, the discrepancy is of
        the size of its own error and the jackknife is off by a factor of order one.
    """
    if not np.isfinite(sums).all():
        return float("nan")
    left = num_draws.sum() - num_draws
    squares = (sums.sum() - 2 * sums.sum(axis=1) + np.diagonal(sums)) / left**2
    without = np.sqrt(np.maximum(squares, 0.0))
    return float(np.sqrt((NUM_BLOCKS - 1) * np.var(without)))
