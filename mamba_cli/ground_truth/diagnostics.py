"""What the chains say of themselves: R-hat, effective sample sizes, and whether that is enough.

Coordinates of a model with symmetries (matrix factorisation: sign and order of the latent
dimensions) differ between chains that agree on everything the data can tell. There R-hat and ESS
of the predictions and of the log posterior decide; those of the coordinates are reported beside.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from mamba_cli import artifacts
from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth.predictions import at_each, flattened
from mamba_cli.ground_truth.result import GroundTruth
from mamba_cli.ground_truth.sampling import Samples
from mamba_cli.ground_truth.settings import ALGORITHM_VERSION, NutsSettings, digest
from mamba_cli.types import HasIdentified, Model

DIAGNOSED_TOGETHER = 2048
"""Coordinates whose R-hat and ESS are computed at once: bounds the memory they take."""


def bulk_and_tail_ess(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Effective sample sizes ``[dim]`` of draws ``[num_chains, num_draws, dim]``.

    Bulk: of the normal scores of the ranks, over split chains. Tail: the smaller of those of the
    indicators of the lowest and the highest 5 % (Vehtari et al., 2021, eq. 13 and section 4.3).
    A coordinate that never moves has NaN.
    """
    half = draws.shape[1] // 2
    split = np.concatenate([draws[:, :half], draws[:, -half:]])
    flat = split.reshape(-1, split.shape[-1])
    ranks = flat.argsort(axis=0).argsort(axis=0) + 1.0
    uniform = (ranks - 0.375) / (len(flat) + 0.25)
    scores = np.asarray(jax.scipy.special.ndtri(uniform), np.float64).reshape(split.shape)
    frozen = np.ptp(flat, axis=0) == 0
    low, high = np.quantile(flat, [0.05, 0.95], axis=0)
    tails = [(split <= low).astype(np.float64), (split >= high).astype(np.float64)]
    with np.errstate(invalid="ignore", divide="ignore"):
        bulk = effective_sample_size(scores)
        tail = np.minimum(*[effective_sample_size(indicator) for indicator in tails])
    return np.where(frozen, np.nan, bulk), np.where(frozen, np.nan, tail)


def convergence(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split R-hat, bulk and tail ESS ``[dim]`` of draws ``[num_chains, num_draws, dim]``."""
    parts = []
    for first in range(0, draws.shape[-1], DIAGNOSED_TOGETHER):
        part = draws[..., first : first + DIAGNOSED_TOGETHER].astype(np.float64)
        parts.append([np.asarray(split_gelman_rubin(part)), *bulk_and_tail_ess(part)])
    r_hat, bulk, tail = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return r_hat, bulk, tail


def diagnose(
    model: Model, settings: NutsSettings, samples: Samples, finished: datetime.datetime
) -> GroundTruth:
    """Moments, R-hat, ESS and provenance of ``samples``."""
    r_hat, ess_bulk, ess_tail = convergence(samples.draws)
    identified: dict[str, Any] = {}
    if settings.criterion == "predictions":
        identified = _identified(model, settings, samples)
    sampling_s = samples.elapsed_s - samples.warmup_s
    return GroundTruth(
        mean=samples.mean,
        std=samples.std,
        r_hat=r_hat,
        ess_bulk=ess_bulk,
        ess_tail=ess_tail,
        num_draws=settings.num_chains * settings.draws_per_chain,
        num_chains=settings.num_chains,
        num_warmup=settings.num_warmup,
        num_divergences=samples.num_divergences,
        num_leapfrogs=samples.num_leapfrogs,
        mean_accept=samples.mean_accept,
        step_sizes=samples.step_sizes,
        elapsed_s=samples.elapsed_s,
        warmup_s=samples.warmup_s,
        compile_s=samples.compile_s,
        ess_per_s=float(np.min(ess_bulk)) / max(sampling_s, 1e-9),
        digest=digest(model, settings),
        provenance={
            "algorithm_version": ALGORITHM_VERSION,
            "model": model.name,
            "model_digest": model.digest,
            "num_data": model.num_data,
            "dim": model.dim,
            "settings": asdict(settings),
            "thinning_of_diagnostics": samples.thinning,
            "finished": artifacts.utc(finished),
            **artifacts.machine(),
            "git": artifacts.git_revision(),
        },
        **identified,
    )


def _identified(model: Model, settings: NutsSettings, samples: Samples) -> dict[str, Any]:
    """Moments and diagnostics of the predictions, and the diagnostics of the log posterior.

    Moments are those of all draws, R-hat and ESS of the predictions those of the thinned ones;
    of predictions that are cut off, before they are (:class:`~mamba_cli.types.HasIdentified`).
    A prediction that no draw moves (a rating that is always clipped) has nothing to converge; its
    R-hat is 1 and its ESS the number of draws.
    """
    num_chains, num_draws, dim = samples.draws.shape
    function = model.identified if isinstance(model, HasIdentified) else model.predict
    found = at_each(flattened(function), samples.draws.reshape(-1, dim), model.test_inputs)
    moves = np.ptp(found, axis=0) > 0
    r_hat = np.ones(len(moves))
    bulk = np.full(len(moves), float(len(found)))
    tail = bulk.copy()
    moving = found[:, moves].reshape(num_chains, num_draws, -1)
    r_hat[moves], bulk[moves], tail[moves] = convergence(moving)
    of_density = convergence(samples.log_densities[..., None])
    return {
        "prediction_mean": samples.prediction_mean,
        "prediction_std": samples.prediction_std,
        "prediction_r_hat": r_hat,
        "prediction_ess_bulk": bulk,
        "prediction_ess_tail": tail,
        "log_density_r_hat": float(of_density[0][0]),
        "log_density_ess": float(min(of_density[1][0], of_density[2][0])),
    }


def check_converged(truth: GroundTruth, settings: NutsSettings) -> None:
    """Refuse a result that is not a ground truth.

    Raises
    ------
    NothingUsableError
        Of what ``settings.criterion`` says, fewer than ``settings.converged_share`` have an R-hat
        of at most ``settings.max_r_hat`` and a bulk and a tail ESS of at least
        ``settings.min_ess``; or the log posterior has not. One that is not a number is too large
        or too small.
    """
    of_what = "coordinates"
    r_hats, bulks, tails = truth.r_hat, truth.ess_bulk, truth.ess_tail
    if settings.criterion == "predictions":
        of_what = "predictions"
        r_hats, bulks = truth.prediction_r_hat, truth.prediction_ess_bulk
        tails = truth.prediction_ess_tail
    # Comparisons with NaN are false, which is what they should be here.
    enough = (bulks >= settings.min_ess) & (tails >= settings.min_ess)
    share = float(np.mean((r_hats <= settings.max_r_hat) & enough))
    found = (
        f"{100 * share:.4g} % of the {of_what} have converged (needed "
        f"{100 * settings.converged_share:g} %): R-hat {_worst(r_hats, np.max):.4g} at the worst "
        f"(allowed {settings.max_r_hat:g}), ESS {_worst(bulks, np.min):.0f} in the bulk and "
        f"{_worst(tails, np.min):.0f} in the tails (needed {settings.min_ess:g})"
    )
    usable = share >= settings.converged_share
    if settings.criterion == "predictions":
        r_hat, ess = _or_nan(truth.log_density_r_hat), _or_nan(truth.log_density_ess)
        usable = usable and r_hat <= settings.max_r_hat and ess >= settings.min_ess
        found += f"; the log posterior has an R-hat of {r_hat:.4g} and an ESS of {ess:.0f}"
    if usable:
        return
    raise NothingUsableError(
        f"the ground truth did not converge: {found}; {truth.num_divergences} divergences, from "
        f"{truth.num_draws} draws of {truth.num_chains} chains; raise ground_truth.num_draws or "
        f"ground_truth.num_warmup, or do without (ground_truth=none)"
    )


def _worst(values: np.ndarray, of: Callable[[np.ndarray], Any]) -> float:
    """The largest or smallest that is a number."""
    numbers = values[np.isfinite(values)]
    return float(of(numbers)) if numbers.size else math.nan


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
