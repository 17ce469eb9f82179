"""The ground truth: NumPyro's NUTS on all rows, its diagnostics, its cache.

The sampler moves in coordinates z with theta = m + A z, m the MAP. Whitened by the Laplace
approximation there, A = L^-T with L L^T the Hessian, the posterior of z is nearly N(0, I): a step
size and an identity mass matrix fit all directions at once.

Above ``MAX_DENSE_DIM`` dimensions A is diagonal and found during the warm-up, since there the MAP
of a hierarchical model tells little of the curvature where its draws are. The information identity

    E[s_i^2] = E[-d^2 log p / d theta_i^2],    s = grad log p(theta), theta from the posterior,

gives the mean curvature of a coordinate from the gradients that NUTS has anyway, without a Hessian:
A_ii = E[s_i^2]^(-1/2) over a window of steps of all chains, windows doubling in length. The first
window has the row norms of the Hessian at the MAP instead, E[(H v)_i^2] for v ~ N(0, I), which are
positive also where the Hessian is not positive definite (Dauphin et al., 2015).

NUTS compares energies whose differences are of order 1, while the log density of a million rows is
of order 1e5, where float32 resolves 0.01. So the potential is the difference to the MAP, taken row
by row before anything is summed:

    U(z) = -sum_i [l_i(m + A z) - l_i(m)] - [log p(m + A z) - log p(m)].

One pass over the data gives value and gradient, for a group of chains: the rows come in blocks that
stay in the cache while one chain after the other uses them. Groups move in threads of their own,
one to a core, since a pass keeps one core busy. Where a model has its likelihood of all rows in one
piece, that is taken instead, and every chain is a group: none waits for another's longer
trajectory.

Coordinates of a model with symmetries (matrix factorisation: sign and order of the latent
dimensions) differ between chains that agree on everything the data can tell. There R-hat and ESS
of the predictions and of the log posterior decide; those of the coordinates are reported beside.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer.hmc import hmc

from mamba_cli import artifacts, gradients, map_estimate
from mamba_cli.compilation import cpu_threads
from mamba_cli.errors import ConfigError, NothingUsableError, StorageError
from mamba_cli.map_estimate import RowBlocks
from mamba_cli.types import (
    Array,
    HasFullLikelihood,
    HasIdentified,
    Model,
    PyTree,
    Reporter,
    SilentReporter,
)

ALGORITHM_VERSION = 1
"""Part of the digest: raised when the draws would follow another law, or moments be others."""

CHECKPOINT_VERSION = 2
"""Raised when the numbers of a checkpoint change their meaning but not their names and shapes."""

SECONDS_BETWEEN_LOOKS = 2.0
"""How often a run that waits for another one's chains looks whether they are done."""

MAX_DENSE_DIM = 1000
"""Above this a Hessian is too large: coordinates are scaled one by one."""

WINDOW_ENDS = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Shares of the warm-up after which the scale of each coordinate is found anew."""

WARMUP_TREE_DEPTH = 7
"""Bounds the trajectories of a warm-up whose coordinates have not found their scale yet."""

TOLD_BYTES = 64 * 2**20
"""Chains that take more memory say so before they start."""

NUM_PROBES = 16
"""Products with the Hessian at the MAP for the first scale of each coordinate."""

CRITERIA = ("positions", "predictions")

DIAGNOSED_TOGETHER = 2048
"""Coordinates whose R-hat and ESS are computed at once: bounds the memory they take."""

SILENT = SilentReporter()

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _require(name: str, value: object, allowed: bool, what: str) -> None:
    if not allowed:
        raise ConfigError(f"ground_truth.{name}={value}: must be {what}")


@dataclass(frozen=True)
class NutsSettings:
    """What is asked of the ground truth.

    Attributes
    ----------
    num_draws
        Draws after warm-up over all chains together; rounded up to a multiple of ``num_chains``.
    num_warmup
        Steps of adaptation of each chain, not kept.
    num_chains
        Chains, from over-dispersed starts; at least two, so that R-hat means something.
    seed
        Of the starts and the chains.
    whiten
        Sample in coordinates whitened by the Laplace approximation; in many dimensions, scaled one
        by one. Without it NumPyro adapts a diagonal mass matrix.
    target_accept, max_tree_depth
        Of NUTS.
    start_scale
        Standard deviation of the starts, in units of the posterior's.
    max_r_hat, min_ess
        Largest split R-hat and smallest bulk or tail effective sample size, over all coordinates,
        of a result that may be used.
    criterion
        What ``max_r_hat`` and ``min_ess`` are asked of: ``positions``, every coordinate, or
        ``predictions``, those for the test inputs and the log posterior.
    converged_share
        Share of the coordinates, or of the predictions, of which that is asked. The log posterior
        is always among them, and the worst of all is reported.
    block_draws
        Draws per chain between two checkpoints. Changes no draw.
    max_stored_bytes
        Draws beyond this are thinned for R-hat and ESS. Moments are always those of all draws.
    """

    num_draws: int = 20_000
    num_warmup: int = 1_000
    num_chains: int = 4
    seed: int = 0
    whiten: bool = True
    target_accept: float = 0.8
    max_tree_depth: int = 10
    start_scale: float = 1.5
    max_r_hat: float = 1.01
    min_ess: float = 400.0
    criterion: str = "positions"
    converged_share: float = 1.0
    block_draws: int = 50
    max_stored_bytes: int = 256 * 1024**2

    def __post_init__(self) -> None:
        _require("num_chains", self.num_chains, self.num_chains >= 2, "an integer, at least 2")
        _require(
            "num_draws",
            self.num_draws,
            self.num_draws >= 4 * self.num_chains,
            f"an integer, at least 4 for each of the {self.num_chains} chains",
        )
        _require("num_warmup", self.num_warmup, self.num_warmup >= 1, "an integer, at least 1")
        _require("max_r_hat", self.max_r_hat, self.max_r_hat > 1, "a number above 1")
        _require("min_ess", self.min_ess, self.min_ess > 0, "a number above 0")
        _require("start_scale", self.start_scale, self.start_scale > 0, "a number above 0")
        _require("block_draws", self.block_draws, self.block_draws >= 1, "an integer, at least 1")
        _require(
            "max_tree_depth",
            self.max_tree_depth,
            self.max_tree_depth >= 1,
            "an integer, at least 1",
        )
        _require(
            "criterion",
            self.criterion,
            self.criterion in CRITERIA,
            " or ".join(CRITERIA),
        )
        _require(
            "converged_share",
            self.converged_share,
            0 < self.converged_share <= 1,
            "above 0 and at most 1",
        )
        _require("target_accept", self.target_accept, 0 < self.target_accept < 1, "between 0 and 1")

    @property
    def draws_per_chain(self) -> int:
        return -(-self.num_draws // self.num_chains)


DEFAULT_SETTINGS = NutsSettings()

# Settings that decide whether a result is good enough, or when it is saved; not which it is.
_WITHOUT_EFFECT = (
    "max_r_hat",
    "min_ess",
    "criterion",
    "converged_share",
    "block_draws",
    "max_stored_bytes",
)


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


def digest(model: Model, settings: NutsSettings) -> str:
    """First 16 hex digits of the sha256 of everything the ground truth depends on.

    That is the model with its data and hyperparameters, the settings that change draws, the seed,
    and the version of this algorithm. Not the MAP: it changes the coordinates, not the posterior.
    """
    chosen = {k: v for k, v in asdict(settings).items() if k not in _WITHOUT_EFFECT}
    question = {
        "algorithm": ALGORITHM_VERSION,
        "model": model.name,
        "model_digest": model.digest,
        "settings": chosen,
    }
    return hashlib.sha256(artifacts.to_json(question).encode()).hexdigest()[:16]


# --- the potential ------------------------------------------------------------------------------


class Coordinates(NamedTuple):
    """theta = centre + matrix @ z; no matrix is a diagonal one, or the identity."""

    centre: np.ndarray  # [dim], float32
    matrix: np.ndarray | None = None  # [dim, dim], float32
    scale: np.ndarray | None = None  # [dim], float32, the diagonal

    def positions(self, z: np.ndarray) -> np.ndarray:
        """Positions ``[..., dim]`` in float64."""
        moved = np.asarray(z, np.float64)
        if self.matrix is not None:
            moved = moved @ np.asarray(self.matrix, np.float64).T
        if self.scale is not None:
            moved = moved * np.asarray(self.scale, np.float64)
        return self.centre.astype(np.float64) + moved


class Target(NamedTuple):
    """All arrays of the potential: passed to the compiled programs, never captured."""

    centre: Array  # [dim]
    matrix: Array | None  # [dim, dim]
    blocks: RowBlocks | None  # None where there is a likelihood of all rows in one piece
    row_reference: Array | None  # [num_blocks, block_rows], log likelihood of rows at the centre
    prior_reference: Array  # [], log prior at the centre; without blocks the log posterior
    full_data: PyTree = None  # what the likelihood of all rows reads
    scale: Array | None = None  # [dim]

    def moved(self, z: Array) -> Array:
        """theta - centre at ``z`` ``[num_chains, dim]``."""
        if self.scale is not None:
            return z * self.scale
        return z if self.matrix is None else z @ self.matrix.T

    def pulled_back(self, slopes: Array) -> Array:
        """The gradient in z of one in theta, ``[num_chains, dim]``."""
        if self.scale is not None:
            return slopes * self.scale
        return slopes if self.matrix is None else slopes @ self.matrix


def laplace_matrix(hessian: np.ndarray) -> np.ndarray:
    """A = L^-T with L L^T the Hessian, so that A A^T is the Laplace covariance, ``[dim, dim]``.

    Raises
    ------
    NothingUsableError
        The Hessian is not positive definite.
    """
    try:
        factor = np.linalg.cholesky(hessian)
    except np.linalg.LinAlgError as error:
        smallest = float(np.linalg.eigvalsh(hessian)[0])
        raise NothingUsableError(
            f"ground truth: the Hessian at the MAP is not positive definite (smallest eigenvalue "
            f"{smallest:.3g}), so there is no Laplace approximation to whiten by; "
            f"set ground_truth.whiten=false"
        ) from error
    return np.linalg.inv(factor).T


def make_target(model: Model, coordinates: Coordinates, blocks: RowBlocks | None) -> Target:
    """The potential's arrays for positions around ``coordinates.centre``."""
    centre = jnp.asarray(coordinates.centre)
    matrix = None if coordinates.matrix is None else jnp.asarray(coordinates.matrix)
    scale = None if coordinates.scale is None else jnp.asarray(coordinates.scale)
    if isinstance(model, HasFullLikelihood):
        data = model.full_data
        log_posterior = jax.jit(partial(_log_posterior, model))(centre, data)
        return Target(centre, matrix, None, None, log_posterior, data, scale)
    assert blocks is not None, "needed where the likelihood is one of rows"

    rows = jax.jit(partial(map_estimate.log_likelihoods_of_rows, model))(centre, blocks)
    prior = jnp.asarray(model.log_prior(centre))
    return Target(centre, matrix, blocks, rows, prior, scale=scale)


def _log_posterior(model: Model, position: Array, data: PyTree) -> Array:
    """Log posterior over all rows, ``data`` as of ``gradients.all_data``."""

    def value(function: Callable[[Array], Array]) -> Array:
        return function(position)

    likelihood: Array = gradients.over_all_rows(model, value, data)
    return likelihood + model.log_prior(position)


def potentials_and_gradients(model: Model, target: Target, z: Array) -> tuple[Array, Array]:
    """U ``[num_chains]`` and dU/dz ``[num_chains, dim]`` at ``z`` ``[num_chains, dim]``, one pass.

    Chains are taken one after the other within a block, in code of their own: a batched product
    puts the chains on the fastest axis, where XLA's vector code is several times slower.
    """
    positions = target.centre + target.moved(z)
    if target.blocks is None:
        of_position = jax.value_and_grad(partial(_log_posterior, model))
        results = [of_position(position, target.full_data) for position in positions]
        values, slopes = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
        return target.prior_reference - values, -target.pulled_back(slopes)

    def log_likelihoods(part: tuple[PyTree, Array]) -> PyTree:
        assert target.blocks is not None
        block = target.blocks.read(part[0])

        def likelihood(position: Array) -> Array:
            return map_estimate.block_log_likelihood(model, position, *block, reference=part[1])

        results = [jax.value_and_grad(likelihood)(position) for position in positions]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

    parts = (target.blocks.parts, target.row_reference)
    (likelihood, gradient), _ = map_estimate.compensated_sum(log_likelihoods, parts)
    prior, prior_gradient = jax.vmap(jax.value_and_grad(model.log_prior))(positions)
    values = likelihood + (prior - target.prior_reference)
    slopes = gradient + prior_gradient
    return -values, -target.pulled_back(slopes)


def potential_fn(model: Model, target: Target) -> Callable[[Array], Array]:
    """U(z) for one chain ``[dim]``, whose ``vmap`` reads the data once for all chains.

    Its derivative is the gradient that came with the value: nothing is stored for a backward pass.
    """

    @custom_vmap
    def value_and_gradient(z: Array, target: Target) -> tuple[Array, Array]:
        values, slopes = potentials_and_gradients(model, target, z[None])
        return values[0], slopes[0]

    @value_and_gradient.def_vmap
    def _all_chains(
        axis_size: int, in_batched: list[Any], z: Array, target: Target
    ) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        assert in_batched[0], "the data are shared, the positions are not"
        return potentials_and_gradients(model, target, z), (True, True)

    @jax.custom_vjp
    def potential(z: Array) -> Array:
        return value_and_gradient(z, target)[0]

    potential.defvjp(
        lambda z: value_and_gradient(z, target),
        lambda gradient, cotangent: (cotangent * gradient,),
    )
    return potential


# --- sampling -----------------------------------------------------------------------------------


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


@dataclass
class _Moments:
    """Running mean and sum of squared deviations from it."""

    mean: np.ndarray  # [dim], float64
    squares: np.ndarray  # [dim], float64
    count: int = 0

    @classmethod
    def zero(cls, dim: int) -> _Moments:
        return cls(np.zeros(dim), np.zeros(dim))

    def add(self, values: np.ndarray) -> None:
        """Merge ``[n, dim]`` values (Chan, Golub and LeVeque, 1983)."""
        count = len(values)
        mean = values.mean(axis=0, dtype=np.float64)
        shift = mean - self.mean
        total = self.count + count
        self.squares += ((values - mean) ** 2).sum(axis=0)
        self.squares += shift**2 * (self.count * count / total)
        self.mean += shift * (count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        result: np.ndarray = np.sqrt(self.squares / (self.count - 1))
        return result


@dataclass
class _Progress:
    """How far the chains are, and the running moments of their draws."""

    positions: _Moments
    predictions: _Moments  # of no dimension where positions are the criterion
    # Of the gradients in z since the last change of scale, over all chains; [dim]
    squared_gradients: np.ndarray
    num_steps: int = 0  # of each chain, warm-up included
    num_gradients: int = 0  # in the squared gradients
    num_blocks: int = 0
    num_leapfrogs: int = 0
    num_divergences: int = 0
    sum_accept: float = 0.0
    elapsed_s: float = 0.0
    warmup_s: float = 0.0
    compile_s: float = 0.0

    @classmethod
    def start(cls, dim: int, num_predictions: int) -> _Progress:
        return cls(_Moments.zero(dim), _Moments.zero(num_predictions), np.zeros(dim))

    def counters(self) -> dict[str, int | float]:
        return {k: v for k, v in vars(self).items() if isinstance(v, int | float)}

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "mean": self.positions.mean,
            "squares": self.positions.squares,
            "prediction_mean": self.predictions.mean,
            "prediction_squares": self.predictions.squares,
            "squared_gradients": self.squared_gradients,
        }

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> _Progress:
        count = int(meta["num_moments"])
        return cls(
            _Moments(arrays["mean"], arrays["squares"], count),
            _Moments(arrays["prediction_mean"], arrays["prediction_squares"], count),
            arrays["squared_gradients"],
            **meta["counters"],
        )


class _Block(NamedTuple):
    """What a block of steps did; counts and sums are over all chains."""

    z: Array  # [block_draws, num_chains, dim], float32
    potentials: Array  # [block_draws, num_chains]
    squared_gradients: Array  # [dim], of the potential in z
    num_leapfrogs: Array  # [], int32
    sum_accept: Array  # []
    num_divergences: Array  # [], int32


class _Kept(NamedTuple):
    """What stays of a block of draws: some of the positions, all of the potentials."""

    z: np.ndarray  # [num_kept, num_chains, dim], float32
    potentials: np.ndarray  # [num_draws, num_chains]


class _Programs(NamedTuple):
    # keys, starts and step sizes of all chains
    init: Callable[[Array, Array, Array, Target], PyTree]
    advance: Callable[[PyTree, Target, Array], tuple[PyTree, _Block]]
    state_like: PyTree  # shapes and types of the state of all chains


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
    saved = None if checkpoint_dir is None else _load_checkpoint(checkpoint_dir, question)
    key_start, key_chains = jax.random.split(jax.random.key(settings.seed))
    if saved is None:
        coordinates, starts = _coordinates_and_starts(
            model, map_position, blocks, settings, key_start
        )
    else:
        coordinates, starts = saved.coordinates, np.zeros((settings.num_chains, model.dim))
    target = make_target(model, coordinates, blocks)
    keys = jax.random.split(key_chains, settings.num_chains)
    predictions = _Predictions(model, settings)
    _tell_memory(model, settings, reporter)

    start_s = clock()
    programs = _compile(model, keys, jnp.asarray(starts, jnp.float32), target, settings)
    unusable = None if saved is None else _why_unusable(saved, programs, predictions)
    if unusable is not None:
        assert checkpoint_dir is not None
        logger.warning("%s is of another %s: it starts again", checkpoint_dir, unusable)
        _clear(checkpoint_dir)
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
        progress, kept = _Progress.start(model.dim, predictions.num), []
        ones = jnp.ones(settings.num_chains)
        state = programs.init(keys, jnp.asarray(starts, jnp.float32), ones, target)
        _check_starts(model, np.asarray(state.potential_energy))
    else:
        progress, kept = saved.progress, saved.kept
        state = _unpack(programs.state_like, saved.leaves)
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
                kept.append(_Kept(block.z[-first % thinning :: thinning], block.potentials))
            elif coordinates.scale is not None and progress.num_steps in _window_ends(settings):
                coordinates, target, state = _rescaled(
                    coordinates, target, state, programs, progress
                )
            if checkpoint_dir is not None:
                _save_checkpoint(checkpoint_dir, question, coordinates, state, progress, kept)
            reporter.update(settings.num_chains * num_steps, _note(state, progress))
    finally:
        reporter.finish()
    return _samples(coordinates, state, progress, kept, thinning)


def _why_unusable(saved: _Checkpoint, programs: _Programs, predictions: _Predictions) -> str | None:
    """What a checkpoint has another of than the chains that would go on from it, if anything."""
    if saved.layout != _layout(programs.state_like):
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


def _window_ends(settings: NutsSettings) -> tuple[int, ...]:
    """Steps of the warm-up after which coordinates are scaled anew."""
    return tuple(sorted({int(share * settings.num_warmup) for share in WINDOW_ENDS} - {0}))


def _rescaled(
    coordinates: Coordinates,
    target: Target,
    state: PyTree,
    programs: _Programs,
    progress: _Progress,
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


class _Predictions:
    """Predictions for the test inputs, where they are what has to converge."""

    def __init__(self, model: Model, settings: NutsSettings):
        self.asked = settings.criterion == "predictions"
        self.num = 0
        if self.asked:
            self.inputs = model.test_inputs
            self.program = _flattened(model.predict)
            position = jax.ShapeDtypeStruct((model.dim,), jnp.float32)
            self.num = jax.eval_shape(model.predict, position, self.inputs).size
            _require(
                "criterion",
                "predictions",
                self.num > 0,
                f"positions: {model.name} has no test data",
            )

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """``[num_draws, num_predictions]``, float32."""
        if not self.asked:
            return np.zeros((len(positions), 0), np.float32)
        return _each(self.program, positions, self.inputs)


def _flattened(function: Callable[[Array, PyTree], Array]) -> Callable[[Array, PyTree], Array]:
    """``function`` compiled, its value a vector."""
    return jax.jit(lambda position, inputs: jnp.ravel(function(position, inputs)))


def _each(
    program: Callable[[Array, PyTree], Array], positions: np.ndarray, inputs: PyTree
) -> np.ndarray:
    """``program`` at each of ``positions``, ``[num_draws, num_values]`` float32."""
    return np.stack([np.asarray(program(jnp.asarray(p, jnp.float32), inputs)) for p in positions])


def _coordinates_and_starts(
    model: Model,
    map_position: Array,
    blocks: RowBlocks | None,
    settings: NutsSettings,
    rng_key: Array,
) -> tuple[Coordinates, np.ndarray]:
    """The coordinates, and over-dispersed starts in them ``[num_chains, dim]``.

    The starts are drawn from the Laplace approximation widened by ``start_scale``, whitened or not;
    above ``MAX_DENSE_DIM`` from Gaussians, independent in each coordinate, as narrow as the
    coordinate's curvature says.
    """
    centre = np.asarray(map_position, np.float32)
    key_normal, key_probes = jax.random.split(rng_key)
    normal = np.asarray(jax.random.normal(key_normal, (settings.num_chains, model.dim)))
    normal = normal.astype(np.float64) * settings.start_scale
    if model.dim > MAX_DENSE_DIM:
        norms = map_estimate.hessian_row_norms(model, jnp.asarray(centre), key_probes, NUM_PROBES)
        scale = np.maximum(norms, 1.0) ** -0.5
        if settings.whiten:
            return Coordinates(centre, scale=scale.astype(np.float32)), normal
        return Coordinates(centre), normal * scale
    matrix = laplace_matrix(map_estimate.hessian(model, jnp.asarray(centre), blocks=blocks))
    if settings.whiten:
        return Coordinates(centre, matrix.astype(np.float32)), normal
    return Coordinates(centre), normal @ matrix.T


def _check_starts(model: Model, potentials: np.ndarray) -> None:
    if not np.all(np.isfinite(potentials)):
        raise NothingUsableError(
            f"ground truth of {model.name}: the potential at the starts of the chains is "
            f"{potentials.tolist()}, it must be finite; check the data and the MAP"
        )


def _compile(
    model: Model, keys: Array, starts: Array, target: Target, settings: NutsSettings
) -> _Programs:
    """Compile both programs ahead, so that sampling time has no compilation in it."""
    init_kernel, sample_kernel = hmc(
        potential_fn_gen=lambda target: potential_fn(model, target), algo="NUTS"
    )
    depth = settings.max_tree_depth
    scaled = target.scale is not None

    @jax.jit
    def init(keys: Array, starts: Array, step_sizes: Array, target: Target) -> PyTree:
        def of_chain(key: Array, start: Array, step_size: Array) -> PyTree:
            return init_kernel(
                start,
                settings.num_warmup,
                step_size,
                adapt_mass_matrix=not scaled,
                target_accept_prob=settings.target_accept,
                max_tree_depth=(min(depth, WARMUP_TREE_DEPTH) if scaled else depth, depth),
                model_args=(target,),
                rng_key=key,
            )

        return jax.tree.map(_strongly_typed, jax.vmap(of_chain)(keys, starts, step_sizes))

    # Also tells NumPyro's kernel how long the warm-up is, which it keeps outside the state.
    state_like = jax.eval_shape(init, keys, starts, jnp.ones(len(keys)), target)

    @jax.jit
    def advance(state: PyTree, target: Target, num_steps: Array) -> tuple[PyTree, _Block]:
        def of_chain(state: PyTree) -> PyTree:
            return sample_kernel(state, model_args=(target,))

        step_chains = of_chain if state.potential_energy.ndim == 0 else jax.vmap(of_chain)

        def step(index: Array, carry: tuple[PyTree, _Block]) -> tuple[PyTree, _Block]:
            state, block = carry
            state = step_chains(state)
            squares = jnp.sum(jnp.atleast_2d(state.z_grad) ** 2, axis=0)
            return state, _Block(
                block.z.at[index].set(state.z),
                block.potentials.at[index].set(state.potential_energy),
                block.squared_gradients + squares,
                block.num_leapfrogs + jnp.sum(state.num_steps),
                block.sum_accept + jnp.sum(state.accept_prob),
                block.num_divergences + jnp.sum(state.diverging.astype(jnp.int32)),
            )

        zero, none = jnp.zeros((), jnp.int32), jnp.zeros(())
        z = jnp.zeros((settings.block_draws, *state.z.shape), jnp.float32)
        potentials = jnp.zeros((settings.block_draws, *state.potential_energy.shape))
        squares = jnp.zeros(state.z.shape[-1])
        block = _Block(z, potentials, squares, zero, none, zero)
        return lax.fori_loop(0, num_steps, step, (state, block))

    limit = jnp.zeros((), jnp.int32)
    groups = chain_groups(model, settings.num_chains)
    compiled = {}
    for group in groups:
        like = jax.eval_shape(partial(_of_group, group=group), state_like)
        if len(group) not in compiled:
            compiled[len(group)] = advance.lower(like, target, limit).compile()
    return _Programs(init, partial(_in_groups, compiled, groups), state_like)


def chain_groups(model: Model, num_chains: int) -> tuple[range, ...]:
    """Which chains move together, reading the rows once for all of them; one thread a group.

    As many groups as the process has threads, of sizes that differ by one at most. Chains of a
    likelihood of all rows in one piece share no pass: each is a group. An accelerator takes all
    chains at once.
    """
    if isinstance(model, HasFullLikelihood):
        num_groups = num_chains
    elif jax.default_backend() == "cpu":
        num_groups = min(num_chains, cpu_threads())
    else:
        num_groups = 1
    ends = [number * num_chains // num_groups for number in range(num_groups + 1)]
    return tuple(range(*pair) for pair in pairwise(ends))


def in_threads(function: Callable[[range], T], groups: Sequence[range]) -> list[T]:
    """``function`` of every group, as many at a time as the process has threads."""
    with ThreadPoolExecutor(min(len(groups), cpu_threads())) as pool:
        return list(pool.map(function, groups))


def _of_group(state: PyTree, group: range) -> PyTree:
    """The state of the chains of a group; that of one chain has no leading axis."""
    which = group.start if len(group) == 1 else slice(group.start, group.stop)
    return jax.tree.map(lambda leaf: leaf[which], state)


def _in_groups(
    advance: Mapping[int, Callable[[PyTree, Target, Array], tuple[PyTree, _Block]]],
    groups: Sequence[range],
    state: PyTree,
    target: Target,
    num_steps: Array,
) -> tuple[PyTree, _Block]:
    """Advance all chains; ``advance`` has the program of each size of a group."""

    def of_group(group: range) -> tuple[PyTree, _Block]:
        own = _of_group(state, group)
        return jax.block_until_ready(advance[len(group)](own, target, num_steps))

    states, blocks = zip(*in_threads(of_group, groups), strict=True)

    def together(leaves: Sequence[Array], axis: int) -> Array:
        apart = [
            jnp.expand_dims(leaf, axis) if len(group) == 1 else leaf
            for leaf, group in zip(leaves, groups, strict=True)
        ]
        return jnp.concatenate(apart, axis)

    z = together([block.z for block in blocks], 1)
    potentials = together([block.potentials for block in blocks], 1)
    sums = [sum(leaves) for leaves in zip(*(block[2:] for block in blocks), strict=True)]
    joined = jax.tree.map(lambda *leaves: together(leaves, 0), *states)
    return joined, _Block(z, potentials, *sums)


def _strongly_typed(leaf: Array) -> Array:
    """Without JAX's weak types, which a state read from disk cannot have."""
    return leaf if _is_key(leaf) else jnp.asarray(leaf, leaf.dtype)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _advance_block(
    programs: _Programs,
    state: PyTree,
    target: Target,
    settings: NutsSettings,
    progress: _Progress,
    clock: Callable[[], float],
) -> tuple[PyTree, _Kept]:
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
    return state, _Kept(z, potentials)


def _thinning(dim: int, settings: NutsSettings) -> int:
    num_bytes = 4 * settings.num_chains * settings.draws_per_chain * dim
    return max(1, -(-num_bytes // settings.max_stored_bytes))


def _note(state: PyTree, progress: _Progress) -> str:
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
    progress: _Progress,
    kept: Sequence[_Kept],
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


# --- checkpoints --------------------------------------------------------------------------------


class _Checkpoint(NamedTuple):
    layout: str  # of the state that the leaves are of
    coordinates: Coordinates
    progress: _Progress
    leaves: list[np.ndarray]
    kept: list[_Kept]


def _state_path(folder: Path) -> Path:
    return folder / "state.npz"


def _draws_path(folder: Path, index: int) -> Path:
    return folder / f"draws-{index:05d}.npz"


def _save_checkpoint(
    folder: Path,
    question: str,
    coordinates: Coordinates,
    state: PyTree,
    progress: _Progress,
    kept: Sequence[_Kept],
) -> None:
    """Save the last block's draws, then the state that counts them.

    A run killed between the two leaves draws that the state does not know of; they are written
    again, the same. Earlier draws are never rewritten.
    """
    if kept:
        artifacts.write_arrays(_draws_path(folder, len(kept) - 1), kept[-1]._asdict(), {})
    arrays = {
        "centre": coordinates.centre,
        **progress.arrays(),
        **{f"leaf_{i:03d}": leaf for i, leaf in enumerate(_pack(state))},
    }
    if coordinates.matrix is not None:
        arrays["matrix"] = coordinates.matrix
    if coordinates.scale is not None:
        arrays["scale"] = coordinates.scale
    meta = {
        "version": CHECKPOINT_VERSION,
        "layout": _layout(state),
        "question": question,
        "num_kept": len(kept),
        "num_moments": progress.positions.count,
        "counters": progress.counters(),
    }
    artifacts.write_arrays(_state_path(folder), arrays, meta)


def _load_checkpoint(folder: Path, question: str) -> _Checkpoint | None:
    """The last state saved in ``folder``; ``None`` where there is none, or it cannot be used.

    Whether its leaves fit the sampler of this version is known when that is compiled.
    """
    found = artifacts.read_arrays(_state_path(folder))
    if found is None:
        return None
    arrays, meta = found
    if meta.get("question") != question:
        return None
    if meta.get("version") != CHECKPOINT_VERSION:
        logger.warning("%s is of another version and not used: the chains start again", folder)
        return None
    kept = []
    for index in range(meta["num_kept"]):
        block = artifacts.read_arrays(_draws_path(folder, index))
        if block is None:
            return None
        kept.append(_Kept(**block[0]))
    progress = _Progress.restored(arrays, meta)
    leaves = [arrays[name] for name in sorted(arrays) if name.startswith("leaf_")]
    coordinates = Coordinates(arrays["centre"], arrays.get("matrix"), arrays.get("scale"))
    return _Checkpoint(meta["layout"], coordinates, progress, leaves, kept)


def _layout(state: PyTree) -> str:
    """Name, type and shape of every leaf of a state of the chains."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return "\n".join(
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves
    )


def _pack(state: PyTree) -> list[np.ndarray]:
    """The state's leaves as arrays of numbers; random keys as their raw data."""
    return [
        np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        for leaf in jax.tree.leaves(state)
    ]


def _unpack(state_like: PyTree, leaves: Sequence[np.ndarray]) -> PyTree:
    """The inverse of ``_pack``, for a state of the shapes and types of ``state_like``."""
    like, structure = jax.tree.flatten(state_like)
    restored = [
        jax.random.wrap_key_data(jnp.asarray(leaf)) if _is_key(shape) else jnp.asarray(leaf)
        for shape, leaf in zip(like, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


# --- diagnostics --------------------------------------------------------------------------------


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


def convergence(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split R-hat, bulk and tail ESS ``[dim]`` of draws ``[num_chains, num_draws, dim]``."""
    parts = []
    for first in range(0, draws.shape[-1], DIAGNOSED_TOGETHER):
        part = draws[..., first : first + DIAGNOSED_TOGETHER].astype(np.float64)
        parts.append([np.asarray(split_gelman_rubin(part)), *bulk_and_tail_ess(part)])
    r_hat, bulk, tail = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return r_hat, bulk, tail


def _identified(model: Model, settings: NutsSettings, samples: Samples) -> dict[str, Any]:
    """Moments and diagnostics of the predictions, and the diagnostics of the log posterior.

    Moments are those of all draws, R-hat and ESS of the predictions those of the thinned ones;
    of predictions that are cut off, before they are (:class:`~mamba_cli.types.HasIdentified`).
    A prediction that no draw moves (a rating that is always clipped) has nothing to converge; its
    R-hat is 1 and its ESS the number of draws.
    """
    num_chains, num_draws, dim = samples.draws.shape
    function = model.identified if isinstance(model, HasIdentified) else model.predict
    found = _each(_flattened(function), samples.draws.reshape(-1, dim), model.test_inputs)
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


# --- cache --------------------------------------------------------------------------------------

_ARRAYS = (
    "mean",
    "std",
    "r_hat",
    "ess_bulk",
    "ess_tail",
    "prediction_mean",
    "prediction_std",
    "prediction_r_hat",
    "prediction_ess_bulk",
    "prediction_ess_tail",
)

MAX_LISTED = 1_000
"""Longer arrays are summarised in the file for a reader."""


def cache_path(model: Model, settings: NutsSettings, folder: Path) -> Path:
    """``<folder>/<model>-<digest>.npz``."""
    return folder / f"{model.name}-{digest(model, settings)}.npz"


def load(
    model: Model,
    settings: NutsSettings,
    *,
    cache_dir: Path,
    search_dirs: Sequence[Path] = (),
) -> GroundTruth | None:
    """A ground truth computed before: from ``cache_dir``, else the first of ``search_dirs``.

    ``None`` where there is none, or the file is damaged (which is logged as a warning). One that
    was made without predictions is none where these have to converge.
    """
    for folder in (cache_dir, *search_dirs):
        found = artifacts.read_arrays(cache_path(model, settings, folder))
        if found is not None:
            arrays, meta = found
            fields: dict[str, Any] = {**arrays, **meta, "step_sizes": tuple(meta["step_sizes"])}
            truth = GroundTruth(**fields)
            if settings.criterion == "positions" or truth.prediction_std.size:
                return truth
    return None


def save(truth: GroundTruth, path: Path) -> None:
    """Write ``path`` (arrays and all else) and a ``.json`` beside it with the same for a reader.

    Arrays of more than ``MAX_LISTED`` numbers are in float32, and only their range in the JSON.

    Raises
    ------
    StorageError
        A file could not be written.
    """
    everything = truth._asdict()
    arrays = {name: np.asarray(everything.pop(name)) for name in _ARRAYS}
    arrays = {name: array for name, array in arrays.items() if array.size}
    shown: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.size > MAX_LISTED:
            arrays[name] = array.astype(np.float32)
            quantiles = np.quantile(array, [0.0, 0.05, 0.5, 0.95, 1.0]).tolist()
            names = ("smallest", "5 %", "median", "95 %", "largest")
            shown[name] = dict(zip(names, quantiles, strict=True))
        else:
            shown[name] = array
    artifacts.write_json(path.with_suffix(".json"), {**shown, **everything})
    artifacts.write_arrays(path, arrays, everything)


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
        with _sole_owner(path.with_suffix(".partial"), reporter) as waited:
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
    _clear(partial_dir)
    return truth


def _drop_finished(folder: Path, question: str, settings: NutsSettings) -> None:
    """Remove the chains of a run that ended without converging; unfinished ones stay."""
    saved = _load_checkpoint(folder, question)
    total_steps = settings.num_warmup + settings.draws_per_chain
    if saved is not None and saved.progress.num_steps >= total_steps:
        _clear(folder)


# --- one run at a time --------------------------------------------------------------------------

_LOCK = ".lock"


@contextmanager
def _sole_owner(folder: Path, reporter: Reporter) -> Iterator[bool]:
    """Hold ``folder``, made where it is not; the value is whether another process held it first.

    Waits as long as that takes, which the reporter is told once.
    """
    waited = False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder} cannot be made: {error.strerror or error}") from error
        try:
            lock = artifacts._take_lock(folder)
        except ConfigError:
            if not waited:
                reporter.message(f"ground truth: waiting for {_owner(folder)}, which computes it")
            waited = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
            continue
        # The one before may have removed the file between our opening and our locking it.
        if _is_file(lock, folder / _LOCK):
            break
        os.close(lock)
    try:
        yield waited
    finally:
        with suppress(OSError):
            if [entry.name for entry in folder.iterdir()] == [_LOCK]:
                (folder / _LOCK).unlink()
                folder.rmdir()
        os.close(lock)


def _owner(folder: Path) -> str:
    try:
        owner = (folder / _LOCK).read_text(errors="replace").strip()
    except OSError:
        owner = ""
    return f"process {owner}" if owner else "another process"


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _clear(folder: Path) -> None:
    """Remove what is in ``folder``, but not the lock that holds it."""
    for entry in folder.iterdir():
        if entry.name != _LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
