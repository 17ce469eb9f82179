"""What both Stein discrepancies ask of draws and of their keys, and how draws are padded."""

from __future__ import annotations

from math import ceil, isfinite
from numbers import Real
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from mamba_cli.errors import ConfigError
from mamba_cli.types import ScoredDraws
from mamba_cli.whitening import Floats

# Draws are handled in square blocks of pairs, so that the temporaries stay in cache and memory
# does not grow with the square of the number of draws.
BLOCK_SIZE = 256
# Draws are padded to this many, to one block, or to a power of two of blocks: few programs then
# serve every number of draws, and a tuning does not spend its time compiling.
SMALLEST_BUCKET = 64

WHITENINGS = ("hessian", "fisher")
"""What a reward may ask for; see ``curvature.whitening_at``."""


def checked_draws(
    positions: ArrayLike, scores: ArrayLike
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Positions and scores as NumPy floats ``[num_draws, dim]``.

    Raises
    ------
    ValueError
        No draws, or shapes that are not equal and two-dimensional.
    """
    x, s = np.asarray(positions), np.asarray(scores)
    if x.ndim != 2 or x.shape != s.shape or x.size == 0:
        raise ValueError(
            "a Stein discrepancy needs positions and scores of one shape [num_draws, dim] "
            f"with at least one draw, got {x.shape} and {s.shape}"
        )
    dtype = np.float32 if x.dtype == s.dtype == np.float32 else np.float64
    return x.astype(dtype, copy=False), s.astype(dtype, copy=False)


def whitened(draws: ScoredDraws) -> tuple[Floats, Floats]:
    """Positions and scores ``[num_draws, dim]`` in the run's whitened coordinates, float64."""
    assert draws.whitening is not None, "the run makes one for every reward that asks"
    return draws.whitening.positions(draws.positions), draws.whitening.scores(draws.scores)


def require_whitening(whitening: object, gradients: object) -> None:
    """Check what rewards in whitened coordinates on thinned draws share.

    Raises
    ------
    ConfigError
        Naming ``tuner.reward.whitening`` or ``tuner.reward.gradients``.
    """
    require(whitening in WHITENINGS, "whitening", whitening, " or ".join(WHITENINGS))
    require(gradients in ("full", "stochastic"), "gradients", gradients, "full or stochastic")


def bucket_size(num_draws: int) -> int:
    """The number of rows that ``num_draws`` draws are padded to: 64, 256, 512, 1024, ..."""
    if num_draws <= SMALLEST_BUCKET:
        return SMALLEST_BUCKET
    return int(BLOCK_SIZE * 2 ** (ceil(num_draws / BLOCK_SIZE) - 1).bit_length())


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise the error that names a reward's key, its value and what is allowed."""
    if not condition:
        raise ConfigError(f"tuner.reward.{key}={value}: must be {allowed}")


def is_finite_number(value: object) -> bool:
    """A finite real number that is not a truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def require_kernel_parameters(c: object, beta: object, gradients: object) -> None:
    """Check what both Stein rewards share.

    Raises
    ------
    ConfigError
        Naming ``tuner.reward.c``, ``tuner.reward.beta`` or ``tuner.reward.gradients``.
    """
    require(is_finite_number(c) and float(c) > 0, "c", c, "a number above 0")  # type: ignore[arg-type]
    require(
        is_finite_number(beta) and -1 < float(beta) < 0,  # type: ignore[arg-type]
        "beta",
        beta,
        "a number between -1 and 0 (both excluded)",
    )
    require(gradients in ("full", "stochastic"), "gradients", gradients, "full or stochastic")


def require_thinning(thin: object) -> None:
    """Raises ``ConfigError``, naming ``tuner.reward.thin``, unless it is a whole number above 0."""
    is_whole = isinstance(thin, int) and not isinstance(thin, bool) and thin >= 1
    require(is_whole, "thin", thin, "a whole number of at least 1")
