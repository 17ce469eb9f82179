"""The ground truth: NumPyro's NUTS on all rows, its diagnostics, its cache.

The sampler moves in coordinates whitened at the MAP (``coordinates``), in a potential that is the
difference to the MAP (``potential``). Chains move in groups that share a pass over the data
(``groups``, ``programs``), a block of steps at a time, each saved (``sampling``, ``checkpoint``).
A result is used only when the chains agree (``diagnostics``), and is kept (``cache``); of two runs
that want the same one, the second waits (``lock``).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mamba_cli.ground_truth.cache import cache_path, load, save
from mamba_cli.ground_truth.checkpoint import load_checkpoint
from mamba_cli.ground_truth.coordinates import MAX_DENSE_DIM, Coordinates, laplace_matrix
from mamba_cli.ground_truth.diagnostics import bulk_and_tail_ess, check_converged, diagnose
from mamba_cli.ground_truth.groups import chain_groups, in_threads
from mamba_cli.ground_truth.lock import clear, sole_owner
from mamba_cli.ground_truth.potential import make_target, potentials_and_gradients
from mamba_cli.ground_truth.result import GroundTruth
from mamba_cli.ground_truth.sampling import SILENT, Samples, sample
from mamba_cli.ground_truth.settings import DEFAULT_SETTINGS, NutsSettings, digest
from mamba_cli.types import Array, Model, Reporter

__all__ = [
    "MAX_DENSE_DIM",
    "Coordinates",
    "GroundTruth",
    "NutsSettings",
    "Samples",
    "bulk_and_tail_ess",
    "chain_groups",
    "in_threads",
    "laplace_matrix",
    "make_target",
    "nuts_ground_truth",
    "potentials_and_gradients",
    "sample",
]


def nuts_ground_truth(
    model: Model,
    map_position: Array,
    settings: NutsSettings = DEFAULT_SETTINGS,
    *,
    cache_dir: Path,
    search_dirs: Sequence[Path] = (),
    recompute: bool = False,
    reporter: Reporter = SILENT,
    clock: Callable[[], float] = time.perf_counter,
) -> GroundTruth:
    """Posterior moments by NUTS, from the cache where the same question was answered before.

    Parameters
    ----------
    model, map_position, settings
        The posterior, its mode and what is asked.
    cache_dir
        Where the result is written, and a folder ``<model>-<digest>.partial`` while the chains run.
        A run that was killed goes on from there; one that finds another process at work there
        waits for it, and takes its result.
    search_dirs
        Further folders with results, read only.
    recompute
        Sample although there is a result. A run of this that was interrupted still goes on.
    reporter, clock
        Progress in draws; seconds.

    Raises
    ------
    NothingUsableError
        The chains did not converge (see :func:`check_converged`), or could not start.
    StorageError
        A block or the result could not be written.
    """
    path = cache_path(model, settings, Path(cache_dir))
    known = None
    if not recompute:
        known = load(model, settings, cache_dir=Path(cache_dir), search_dirs=search_dirs)
    if known is None:
        with sole_owner(path.with_suffix(".partial"), reporter) as waited:
            # Whoever held the folder may have answered the question.
            if waited or not recompute:
                known = load(model, settings, cache_dir=Path(cache_dir))
            if known is None:
                return _compute(model, map_position, settings, path, recompute, reporter, clock)
    check_converged(known, settings)
    r_hats = known.prediction_r_hat if settings.criterion == "predictions" else known.r_hat
    r_hat = float(np.max(r_hats))
    reporter.message(
        f"ground truth: {known.num_draws:,} draws made on {known.provenance['finished']} "
        f"are taken from {path.name}; R-hat at most {r_hat:.3f}"
    )
    return known


def _compute(
    model: Model,
    map_position: Array,
    settings: NutsSettings,
    path: Path,
    recompute: bool,
    reporter: Reporter,
    clock: Callable[[], float],
) -> GroundTruth:
    """Sample, diagnose, check and save; what is saved meanwhile is removed at the end."""
    partial_dir = path.with_suffix(".partial")
    question = digest(model, settings)
    if recompute:
        _drop_finished(partial_dir, question, settings)
    samples = sample(
        model,
        map_position,
        settings,
        checkpoint_dir=partial_dir,
        question=question,
        reporter=reporter,
        clock=clock,
    )
    truth = diagnose(model, settings, samples, datetime.datetime.now(datetime.UTC))
    if truth.num_divergences:
        reporter.message(
            f"ground truth: {truth.num_divergences} of {truth.num_draws} draws ended in a "
            f"divergence; the moments may miss a narrow region"
        )
    check_converged(truth, settings)
    save(truth, path)
    clear(partial_dir)
    return truth


def _drop_finished(folder: Path, question: str, settings: NutsSettings) -> None:
    """Remove the chains of a run that ended without converging; unfinished ones stay."""
    saved = load_checkpoint(folder, question)
    total_steps = settings.num_warmup + settings.draws_per_chain
    if saved is not None and saved.progress.num_steps >= total_steps:
        clear(folder)
