"""NUTS in blocks of steps, from the first of the warm-up to the last draw."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli import map_estimate
from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth.checkpoint import (
    Checkpoint,
    layout_of,
    load_checkpoint,
    save_checkpoint,
    unpack,
)
from mamba_cli.ground_truth.coordinates import Coordinates, coordinates_and_starts
from mamba_cli.ground_truth.lock import clear
from mamba_cli.ground_truth.potential import Target, make_target
from mamba_cli.ground_truth.predictions import Predictions
from mamba_cli.ground_truth.programs import Programs, compile_programs
from mamba_cli.ground_truth.progress import Kept, Progress
from mamba_cli.ground_truth.settings import NutsSettings
from mamba_cli.types import Array, HasFullLikelihood, Model, PyTree, Reporter, SilentReporter

WINDOW_ENDS = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Shares of the warm-up after which the scale of each coordinate is found anew."""

TOLD_BYTES = 64 * 2**20
"""Chains that take more memory say so before they start."""

SILENT = SilentReporter()

logger = logging.getLogger(__name__)


class Samples(NamedTuple):
    """What the chains did after warm-up.

    ``draws`` are positions, every ``thinning``-th draw of each chain; moments and counts are those
    of all draws.
    """

    draws: np.ndarray  # [num_chains, num_kept, dim], float64
    thinning: int
    log_densities: np.ndarray  # [num_chains, num_draws], relative to the MAP; not thinned
    mean: np.ndarray  # [dim]
    std: np.ndarray  # [dim]
    prediction_mean: np.ndarray  # [num_test], with the criterion "predictions"
    prediction_std: np.ndarray
    num_divergences: int
    num_leapfrogs: int
    mean_accept: float
    step_sizes: tuple[float, ...]  # one per chain
    elapsed_s: float
    warmup_s: float
    compile_s: float


def sample(
    model: Model,
    map_position: Array,
    settings: NutsSettings,
    *,
    checkpoint_dir: Path | None = None,
    question: str = "",
    reporter: Reporter = SILENT,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Run NUTS in blocks of draws, saving the whole state after each.

    Parameters
    ----------
    model, map_position, settings
        The posterior, the centre of the coordinates, and what is asked.
    checkpoint_dir
        Where blocks are saved; ``None`` saves nothing. A run that finds its own blocks there goes
        on after the last, and on as many threads its draws are those of a run without
        interruption, bit for bit.
    question
        The digest that a checkpoint must carry to be taken up.
    reporter, clock
        Progress in draws, warm-up included; seconds.

    Raises
    ------
    NothingUsableError
        The Hessian at the MAP is not positive definite, or a chain starts where the potential is
        not finite.
    StorageError
        A block could not be saved.
    """
    in_one_piece = isinstance(model, HasFullLikelihood)
    blocks = None if in_one_piece else map_estimate.row_blocks(model.data, model.num_data)
    saved = None if checkpoint_dir is None else load_checkpoint(checkpoint_dir, question)
    key_start, key_chains = jax.random.split(jax.random.key(settings.seed))
    if saved is None:
        coordinates, starts = coordinates_and_starts(
            model, map_position, blocks, settings, key_start
        )
    else:
        coordinates, starts = saved.coordinates, np.zeros((settings.num_chains, model.dim))
    target = make_target(model, coordinates, blocks)
    keys = jax.random.split(key_chains, settings.num_chains)
    predictions = Predictions(model, settings)
    _tell_memory(model, settings, reporter)

    start_s = clock()
    programs = compile_programs(model, keys, jnp.asarray(starts, jnp.float32), target, settings)
    unusable = None if saved is None else _why_unusable(saved, programs, predictions)
    if unusable is not None:
        assert checkpoint_dir is not None
        logger.warning("%s is of another %s: it starts again", checkpoint_dir, unusable)
        clear(checkpoint_dir)
        return sample(
            model,
            map_position,
            settings,
            checkpoint_dir=checkpoint_dir,
            question=question,
            reporter=reporter,
            clock=clock,
        )
    if saved is None:
        progress, kept = Progress.start(model.dim, predictions.num), []
        ones = jnp.ones(settings.num_chains)
        state = programs.init(keys, jnp.asarray(starts, jnp.float32), ones, target)
        _check_starts(model, np.asarray(state.potential_energy))
    else:
        progress, kept = saved.progress, saved.kept
        state = unpack(programs.state_like, saved.leaves)
    progress.compile_s += clock() - start_s

    total_steps = settings.num_warmup + settings.draws_per_chain
    thinning = _thinning(model.dim, settings)
    reporter.start("ground truth: NUTS", settings.num_chains * total_steps, "draws")
    try:
        if progress.num_steps:
            reporter.message(f"resuming after {progress.num_blocks} blocks of NUTS")
            reporter.update(settings.num_chains * progress.num_steps, "taken up again")
        while progress.num_steps < total_steps:
            state, block = _advance_block(programs, state, target, settings, progress, clock)
            num_steps, first = len(block.z), progress.num_steps - settings.num_warmup - len(block.z)
            if first >= 0:
                positions = coordinates.positions(block.z).reshape(-1, model.dim)
                progress.positions.add(positions)
                progress.predictions.add(predictions(positions))
                kept.append(Kept(block.z[-first % thinning :: thinning], block.potentials))
            elif coordinates.scale is not None and progress.num_steps in _window_ends(settings):
                coordinates, target, state = _rescaled(
                    coordinates, target, state, programs, progress
                )
            if checkpoint_dir is not None:
                save_checkpoint(checkpoint_dir, question, coordinates, state, progress, kept)
            reporter.update(settings.num_chains * num_steps, _note(state, progress))
    finally:
        reporter.finish()
    return _samples(coordinates, state, progress, kept, thinning)


def _why_unusable(saved: Checkpoint, programs: Programs, predictions: Predictions) -> str | None:
    """What a checkpoint has another of than the chains that would go on from it, if anything."""
    if saved.layout != layout_of(programs.state_like):
        return "version of the sampler"
    if len(saved.progress.predictions.mean) != predictions.num:
        return "ground_truth.criterion"
    return None


def _tell_memory(model: Model, settings: NutsSettings, reporter: Reporter) -> None:
    """Say how much memory and disk the chains will take, where that is much.

    In memory: the draws that are kept, once as sampled and once in float64; a block of draws of
    all chains, likewise; and the chains, whose trajectories hold some 40 vectors each.
    """
    vector = 4 * model.dim
    kept = settings.num_chains * settings.draws_per_chain // _thinning(model.dim, settings)
    block = settings.num_chains * settings.block_draws
    memory = vector * (3 * kept + 5 * block + settings.num_chains * 40)
    if memory > TOLD_BYTES:
        reporter.message(
            f"NUTS: dimension {model.dim:,}, {settings.num_chains} chains; about "
            f"{memory / 2**20:,.0f} MiB of memory and {vector * kept / 2**20:,.0f} MiB on disk"
        )


def _check_starts(model: Model, potentials: np.ndarray) -> None:
    if not np.all(np.isfinite(potentials)):
        raise NothingUsableError(
            f"ground truth of {model.name}: the potential at the starts of the chains is "
            f"{potentials.tolist()}, it must be finite; check the data and the MAP"
        )


def _window_ends(settings: NutsSettings) -> tuple[int, ...]:
    """Steps of the warm-up after which coordinates are scaled anew."""
    return tuple(sorted({int(share * settings.num_warmup) for share in WINDOW_ENDS} - {0}))


def _advance_block(
    programs: Programs,
    state: PyTree,
    target: Target,
    settings: NutsSettings,
    progress: Progress,
    clock: Callable[[], float],
) -> tuple[PyTree, Kept]:
    """One block, within one window of the warm-up or after it: the state, and every draw."""
    warming = progress.num_steps < settings.num_warmup
    ends = _window_ends(settings) if target.scale is not None else ()
    ends = (*ends, settings.num_warmup, settings.num_warmup + settings.draws_per_chain)
    end = next(end for end in ends if end > progress.num_steps)
    num_steps = min(settings.block_draws, end - progress.num_steps)
    start_s = clock()
    state, block = programs.advance(state, target, jnp.asarray(num_steps, jnp.int32))
    z, potentials = np.asarray(block.z)[:num_steps], np.asarray(block.potentials)[:num_steps]
    seconds = clock() - start_s
    progress.elapsed_s += seconds
    progress.num_steps += num_steps
    progress.num_blocks += 1
    if warming:
        progress.warmup_s += seconds
        progress.squared_gradients += np.asarray(block.squared_gradients, np.float64)
        progress.num_gradients += num_steps * settings.num_chains
    else:
        progress.num_leapfrogs += int(block.num_leapfrogs)
        progress.num_divergences += int(block.num_divergences)
        progress.sum_accept += float(block.sum_accept)
    return state, Kept(z, potentials)


def _rescaled(
    coordinates: Coordinates,
    target: Target,
    state: PyTree,
    programs: Programs,
    progress: Progress,
) -> tuple[Coordinates, Target, PyTree]:
    """The chains where they are, in coordinates scaled by the gradients of the last window.

    Their step sizes go on from where they were.
    """
    scale = coordinates.scale
    assert scale is not None
    mean_squares = progress.squared_gradients / progress.num_gradients
    # A coordinate without any gradient stays as it is.
    factor = np.where(mean_squares > 0, mean_squares, 1.0) ** -0.5
    coordinates = coordinates._replace(scale=(scale * factor).astype(np.float32))
    target = target._replace(scale=jnp.asarray(coordinates.scale))
    starts = jnp.asarray(np.asarray(state.z) * (scale / coordinates.scale), jnp.float32)
    fresh = programs.init(state.rng_key, starts, state.adapt_state.step_size, target)
    progress.squared_gradients = np.zeros_like(progress.squared_gradients)
    progress.num_gradients = 0
    return coordinates, target, fresh._replace(i=state.i)


def _thinning(dim: int, settings: NutsSettings) -> int:
    num_bytes = 4 * settings.num_chains * settings.draws_per_chain * dim
    return max(1, -(-num_bytes // settings.max_stored_bytes))


def _note(state: PyTree, progress: Progress) -> str:
    step_size = float(np.mean(np.asarray(state.adapt_state.step_size)))
    if not progress.positions.count:
        return f"warm-up, step size {step_size:.2g}"
    leapfrogs = progress.num_leapfrogs / progress.positions.count
    note = f"step size {step_size:.2g}, {leapfrogs:.1f} leapfrogs a draw"
    divergences = progress.num_divergences
    return f"{note}, {divergences} divergences" if divergences else note


def _samples(
    coordinates: Coordinates,
    state: PyTree,
    progress: Progress,
    kept: Sequence[Kept],
    thinning: int,
) -> Samples:
    z = np.concatenate([block.z for block in kept]).swapaxes(0, 1)
    predictions = progress.predictions
    return Samples(
        draws=coordinates.positions(z),
        thinning=thinning,
        log_densities=-np.concatenate([block.potentials for block in kept]).T,
        mean=progress.positions.mean,
        std=progress.positions.std,
        prediction_mean=predictions.mean,
        prediction_std=predictions.std,
        num_divergences=progress.num_divergences,
        num_leapfrogs=progress.num_leapfrogs,
        mean_accept=progress.sum_accept / progress.positions.count,
        step_sizes=tuple(np.asarray(state.adapt_state.step_size).tolist()),
        elapsed_s=progress.elapsed_s,
        warmup_s=progress.warmup_s,
        compile_s=progress.compile_s,
    )
