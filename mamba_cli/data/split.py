"""Setting a part of the training rows aside."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mamba_cli.errors import ConfigError


def hold_out_rows(
    num_rows: int, fraction: float, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Row numbers kept and held out, each ascending; together 0 ... ``num_rows`` - 1.

    Parameters
    ----------
    fraction
        Part of the rows to hold out, in (0, 1).
    seed
        Seed of the uniform choice (NumPy's PCG64).

    Raises
    ------
    ConfigError
        ``fraction`` leaves no row on one of the two sides.
    """
    num_held_out = round(fraction * num_rows)
    if not 0 < num_held_out < num_rows:
        raise ConfigError(
            f"held-out fraction {fraction} of {num_rows:,} training rows: expected a number in "
            "(0, 1) that leaves rows on both sides"
        )
    order = np.random.default_rng(seed).permutation(num_rows)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])
