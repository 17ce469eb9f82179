"""Standard errors that allow for autocorrelation, from means over blocks of draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mamba_cli.whitening import Floats

MIN_ERROR_BLOCKS = 4
"""Blocks below which there is no standard error."""


def batch_means_error(value: Callable[..., Floats], *features: Floats) -> float:
    """Standard error of ``value`` of the means of features over blocks of equal length.

    Parameters
    ----------
    value
        A function of means ``[m, ...]``, to ``[m]``.
    features
        The means of every block, ``[num_blocks, ...]`` each.

    Returns
    -------
    float
        The jackknife's, or that with half as many blocks if it is larger; NaN with fewer than
        ``MIN_ERROR_BLOCKS`` blocks.
    """
    errors = []
    for _ in range(2):
        num_blocks = len(features[0])
        if num_blocks < MIN_ERROR_BLOCKS:
            break
        without_one = [(f.sum(axis=0) - f) / (num_blocks - 1) for f in features]
        values = value(*without_one)
        spread = np.sum((values - values.mean()) ** 2)
        errors.append(float(np.sqrt((num_blocks - 1) / num_blocks * spread)))
        features = tuple(0.5 * (f[0 : 2 * (num_blocks // 2) : 2] + f[1::2]) for f in features)
    return max(errors, default=math.nan)
