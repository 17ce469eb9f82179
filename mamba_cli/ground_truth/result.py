"""What the ground truth is: moments, diagnostics and where they are from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

NOTHING = np.zeros(0)


class GroundTruth(NamedTuple):
    """Moments of the posterior and the diagnostics of the chains that gave them.

    ``elapsed_s`` is the time of sampling, of which ``warmup_s`` was warm-up, without ``compile_s``;
    ``ess_per_s`` is the smallest bulk ESS over the seconds after warm-up. ``num_leapfrogs`` and
    ``mean_accept`` count the draws after warm-up, over all chains.
    """

    mean: np.ndarray  # [dim]
    std: np.ndarray  # [dim]
    r_hat: np.ndarray  # [dim], split R-hat
    ess_bulk: np.ndarray  # [dim], of rank-normalised draws
    ess_tail: np.ndarray  # [dim], the smaller of both 5 % tails
    num_draws: int
    num_chains: int
    num_warmup: int
    num_divergences: int
    num_leapfrogs: int
    mean_accept: float
    step_sizes: tuple[float, ...]  # one per chain
    elapsed_s: float
    warmup_s: float
    compile_s: float
    ess_per_s: float
    digest: str
    provenance: dict[str, Any]
    # Of the predictions for the test inputs [num_test], with the criterion "predictions".
    prediction_mean: np.ndarray = NOTHING
    prediction_std: np.ndarray = NOTHING
    prediction_r_hat: np.ndarray = NOTHING
    prediction_ess_bulk: np.ndarray = NOTHING
    prediction_ess_tail: np.ndarray = NOTHING
    log_density_r_hat: float | None = None
    log_density_ess: float | None = None  # the smaller of bulk and tail
