"""Draws in a whitening of their own, and the Gaussian targets they are scored by."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.types import ScoredDraws
from mamba_cli.whitening import Whitening


def gaussian_draws(seed: int, num_draws: int, dim: int, width: float = 1.0):
    """Draws of N(0, width^2 I) and the scores of N(0, I) there, float64."""
    draws = width * np.random.default_rng(seed).standard_normal((num_draws, dim))
    return draws, -draws


def scored(positions, scores, whitening: Whitening) -> ScoredDraws:
    """What a reward is shown; float32, as the chains have it."""
    return ScoredDraws(
        jnp.asarray(positions, jnp.float32),
        jnp.asarray(scores, jnp.float32),
        jax.random.key(0),
        whitening,
    )


def narrow_posterior(dim: int = 3):
    """A posterior of sd 0.01 and correlated, its whitening, and a map from w to theta."""
    rng = np.random.default_rng(11)
    root = 100 * (rng.standard_normal((dim, dim)) + 3 * np.eye(dim))
    precision, centre = root @ root.T, rng.standard_normal(dim)
    whitening = Whitening.of_precision(centre, precision)

    def positions_and_scores(w):
        delta = np.linalg.solve(whitening.factor.T, np.asarray(w).T).T
        return centre + delta, -delta @ precision

    return whitening, positions_and_scores
