"""Finite set Stein discrepancy: Eq. 4 of the paper, with optimised test locations.

Source: Jitkrittum et al. (2017), *A Linear-Time Kernel Goodness-of-Fit Test*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from mamba_cli.rewards.draws import (
    bucket_size,
    checked_draws,
    is_finite_number,
    require,
    require_kernel_parameters,
)
from mamba_cli.types import Array, ScoredDraws

KERNELS = ("imq", "gaussian")
STATISTICS = ("v", "u")
# The median distance is found from at most this many draws, evenly spaced.
MAX_DRAWS_FOR_MEDIAN = 512
# Coordinates turned into float64 at a time, so that a long position is never copied whole.
COORDINATES_PER_PASS = 8192


def fssd(
    positions: ArrayLike,
    scores: ArrayLike,
    test_locations: ArrayLike,
    *,
    kernel: str = "imq",
    c: float = 1.0,
    beta: float = -0.5,
    length_scale: float | None = None,
    statistic: str = "v",
) -> float:
    """Finite set Stein discrepancy between draws and the density that has these scores.

    The flatness of the Stein witness function g at J test locations::

        FSSD = sqrt( 1/(dJ) sum_j |g(v_j)|^2 )
        g(v) = 1/n sum_i xi(x_i, v),   xi(x, v) = s_x k(x, v) + grad_x k(x, v)

    with ``k = (c^2 + |x - v|^2)^beta`` (``imq``) or ``k = exp(-|x - v|^2 / (2 l^2))``
    (``gaussian``). The cost is linear in the number of draws.

    Parameters
    ----------
    positions, scores
        Draws and the gradients of the log density there, ``[num_draws, dim]``.
    test_locations
        ``[num_locations, dim]``.
    kernel, c, beta, length_scale
        The kernel. A ``length_scale`` of ``None`` is the median distance between draws.
    statistic
        ``v``: Eq. 4, the root of the biased statistic. ``u``: the unbiased estimate of FSSD^2
        (pairs i != j only), *without* a root, as the paper's published code computed it. It may be
        negative, and the most negative value says nothing good about the draws.

    Returns
    -------
    float
        The discrepancy; ``nan`` when an input is not finite, or for ``u`` with a single draw.

    Raises
    ------
    ValueError
        No draws or locations, shapes that do not fit, or an unknown kernel or statistic.

    References
    ----------
    Coullon, South and Nemeth, Eq. 4; Jitkrittum et al. (2017), Eq. 2.
    """
    positions, scores = checked_draws(positions, scores)
    locations = np.asarray(test_locations, np.float64)
    num_draws, dim = positions.shape
    if locations.ndim != 2 or locations.shape[1] != dim or not len(locations):
        raise ValueError(f"fssd needs test locations [num_locations, {dim}], got {locations.shape}")
    if kernel not in KERNELS or statistic not in STATISTICS:
        raise ValueError(
            f"fssd knows kernels {KERNELS} and statistics {STATISTICS}, got {kernel}, {statistic}"
        )
    if not all(np.isfinite(array).all() for array in (positions, scores, locations)):
        return float("nan")
    if kernel == "gaussian" and length_scale is None:
        length_scale = median_distance(positions)
    with np.errstate(over="ignore", invalid="ignore"):
        witness_squares, own_squares = _witness(
            positions, scores, locations, _radial_kernel(kernel, c, beta, length_scale)
        )
        biased = witness_squares / locations.size
        if statistic == "v":
            return float(np.sqrt(biased))
        if num_draws == 1:
            return float("nan")
        unbiased = (num_draws**2 * biased - own_squares / locations.size) / (
            num_draws * (num_draws - 1)
        )
        return float(unbiased)


def _radial_kernel(
    kernel: str, c: float, beta: float, length_scale: float | None
) -> Callable[[Any], tuple[Any, Any]]:
    """From r^2: k, and the factor w of grad_x k = w (x - v). Works for NumPy and JAX arrays."""

    def imq(squared_distance: Any) -> tuple[Any, Any]:
        base = c**2 + squared_distance
        value = base**beta
        return value, 2 * beta * value / base

    def gaussian(squared_distance: Any) -> tuple[Any, Any]:
        exp = np.exp if isinstance(squared_distance, np.ndarray) else jnp.exp
        value = exp(-squared_distance / (2 * length_scale**2))  # type: ignore[operator]
        return value, -value / length_scale**2  # type: ignore[operator]

    return imq if kernel == "imq" else gaussian


def _witness(
    positions: np.ndarray[Any, Any],
    scores: np.ndarray[Any, Any],
    locations: np.ndarray[Any, Any],
    radial_kernel: Callable[[Any], tuple[Any, Any]],
) -> tuple[float, float]:
    """In float64: sum_j |g(v_j)|^2, and sum_ij |xi(x_i, v_j)|^2 for the unbiased statistic."""
    num_draws, dim = positions.shape
    passes = [
        slice(k, min(k + COORDINATES_PER_PASS, dim)) for k in range(0, dim, COORDINATES_PER_PASS)
    ]

    def columns(part: slice) -> tuple[np.ndarray[Any, Any], ...]:
        x, s = (array[:, part].astype(np.float64) for array in (positions, scores))
        centre = x.mean(axis=0)
        return x - centre, s, locations[:, part] - centre

    # Per pair of draw and location: |x - v|^2 and s.(x - v); per draw |s|^2.
    squared_distance = np.zeros((num_draws, len(locations)))
    cross = np.zeros((num_draws, len(locations)))
    score_square = np.zeros((num_draws, 1))
    for part in passes:
        x, s, v = columns(part)
        squared_distance += (x**2).sum(1)[:, None] + (v**2).sum(1) - 2 * x @ v.T
        cross += (x * s).sum(1)[:, None] - s @ v.T
        score_square += (s**2).sum(1, keepdims=True)
    squared_distance = np.maximum(squared_distance, 0.0)
    value, factor = radial_kernel(squared_distance)
    own_squares = (
        score_square * value**2 + 2 * value * factor * cross + factor**2 * squared_distance
    ).sum()
    witness_squares = 0.0
    for part in passes:
        x, s, v = columns(part)
        witness = (value.T @ s + factor.T @ x - factor.sum(0)[:, None] * v) / num_draws
        witness_squares += float((witness**2).sum())
    return witness_squares, float(own_squares)


def median_distance(positions: ArrayLike) -> float:
    """The median Euclidean distance between draws: the length scale of the Gaussian kernel.

    Found from at most 512 evenly spaced draws. If more than half of the distances are zero (a
    chain that rarely moves) the median of those above zero is taken, and if none is, 1.

    Source: Jitkrittum et al. (2017), Section 5.
    """
    x = np.asarray(positions)
    x = x[np.unique(np.linspace(0, len(x) - 1, MAX_DRAWS_FOR_MEDIAN).round().astype(int))]
    x = (x - x.mean(axis=0, dtype=np.float64)).astype(np.float64)
    norms = (x**2).sum(1)
    upper = np.triu_indices(len(x), 1)
    squared = (norms[:, None] + norms - 2 * x @ x.T)[upper]
    # Coinciding draws come out as rounding, not as zero.
    moved = squared[squared > 1e-12 * norms.max(initial=0.0)]
    if not moved.size:
        return 1.0
    median = np.median(squared)
    if median <= 1e-12 * norms.max():
        median = np.median(moved)
    return float(np.sqrt(median))


def gaussian_fit_locations(
    rng_key: Array, positions: ArrayLike, num_locations: int
) -> np.ndarray[Any, Any]:
    """Draw test locations from a Gaussian with the mean and covariance of the draws.

    The covariance is full when there are more draws than dimensions, and diagonal otherwise, where
    a full one would be singular.

    Parameters
    ----------
    rng_key
        Every location gets its own numbers.
    positions
        ``[num_draws, dim]``.
    num_locations
        How many.

    Returns
    -------
    np.ndarray
        ``[num_locations, dim]`` float64.
    """
    x = np.asarray(positions)
    num_draws, dim = x.shape
    mean = x.mean(axis=0, dtype=np.float64)
    noise = np.asarray(jax.random.normal(rng_key, (num_locations, dim)), np.float64)
    if num_draws > dim:
        centred = x - mean
        # A root by eigenvectors exists also where a coordinate has not moved.
        eigenvalues, eigenvectors = np.linalg.eigh(centred.T @ centred / (num_draws - 1))
        root = eigenvectors * np.sqrt(np.maximum(eigenvalues, 0.0))
        return np.asarray(mean + noise @ root.T)
    return np.asarray(mean + noise * x.std(axis=0, dtype=np.float64))


def optimise_test_locations(
    positions: ArrayLike,
    scores: ArrayLike,
    test_locations: ArrayLike,
    *,
    kernel: str = "imq",
    c: float = 1.0,
    beta: float = -0.5,
    length_scale: float | None = None,
    num_adam_steps: int = 50,
    learning_rate: float = 0.05,
) -> np.ndarray[Any, Any]:
    """Move test locations so that they maximise the FSSD of the draws.

    Adam ascends log FSSD^2 in coordinates divided by the standard deviation of the draws, so
    ``learning_rate`` is a fraction of a standard deviation, whatever the scale of the posterior.
    A coordinate in which the draws have not moved stays as it is. Returned are the best locations
    met on the way.

    Parameters
    ----------
    positions, scores
        ``[num_draws, dim]``; not the draws on which the result is evaluated.
    test_locations
        Where to start, ``[num_locations, dim]``.
    kernel, c, beta, length_scale
        As in :func:`fssd`.
    num_adam_steps, learning_rate
        Length of the ascent and size of its steps.

    Returns
    -------
    np.ndarray
        ``[num_locations, dim]`` float64.

    Raises
    ------
    ValueError
        As :func:`fssd`.
    """
    positions, scores = checked_draws(positions, scores)
    num_draws, dim = positions.shape
    if kernel == "gaussian" and length_scale is None:
        length_scale = median_distance(positions)
    centre = positions.mean(axis=0, dtype=np.float64)
    centred = (positions - centre).astype(np.float32)
    spread = centred.std(axis=0, dtype=np.float64)
    # Scores and kernel gradients are divided by the same number: log FSSD^2 changes by a constant.
    score_scale = float(np.abs(scores).max()) or 1.0
    moved = spread > 0
    start = (np.asarray(test_locations, np.float64) - centre) / np.where(moved, spread, 1.0)
    bucket = bucket_size(num_draws)
    padded = np.zeros((2, bucket, dim), np.float32)
    padded[0, :num_draws] = centred
    padded[1, :num_draws] = scores / score_scale
    best = _ascend(
        jnp.asarray(padded[0]),
        jnp.asarray(padded[1]),
        jnp.asarray(np.arange(bucket) < num_draws, jnp.float32),
        jnp.asarray(start, jnp.float32),
        jnp.asarray(spread, jnp.float32),
        jnp.asarray([1 / score_scale, c, beta, length_scale or 1.0, learning_rate], jnp.float32),
        jnp.asarray(num_adam_steps, jnp.int32),
        kernel=kernel,
    )
    return np.asarray(centre + np.asarray(best, np.float64) * np.where(moved, spread, 1.0))


@partial(jax.jit, static_argnames=("kernel",))
def _ascend(
    positions: Array,
    scores: Array,
    weights: Array,
    start: Array,
    spread: Array,
    parameters: Array,
    num_adam_steps: Array,
    *,
    kernel: str,
) -> Array:
    """Adam on the locations in units of ``spread``; draws of weight zero are padding."""
    gradient_scale, c, beta, length_scale, learning_rate = parameters
    radial_kernel = _radial_kernel(kernel, c, beta, length_scale)
    position_square = (positions**2).sum(1, keepdims=True)

    def negative_log_square(scaled: Array) -> Array:
        v = jnp.where(spread > 0, scaled * spread, scaled)
        squared_distance = position_square + (v**2).sum(1) - 2 * positions @ v.T
        value, factor = radial_kernel(jnp.maximum(squared_distance, 0.0))
        value, factor = value * weights[:, None], factor * weights[:, None] * gradient_scale
        witness = value.T @ scores + factor.T @ positions - factor.sum(0)[:, None] * v
        # The tiny number keeps the gradient finite where the witness is zero everywhere.
        return -jnp.log((witness**2).sum() + jnp.finfo(witness.dtype).tiny)

    optimizer = optax.adam(learning_rate)

    def step(_: Array, carry: Any) -> Any:
        scaled, state, best, best_loss = carry
        loss, gradient = jax.value_and_grad(negative_log_square)(scaled)
        best = jnp.where(loss < best_loss, scaled, best)
        updates, state = optimizer.update(jnp.where(spread > 0, gradient, 0.0), state)
        return optax.apply_updates(scaled, updates), state, best, jnp.minimum(loss, best_loss)

    # One turn more than steps: the last only judges where the last step led.
    carry = (start, optimizer.init(start), start, jnp.asarray(jnp.inf, start.dtype))
    found: Array = jax.lax.fori_loop(jnp.int32(0), num_adam_steps + 1, step, carry)[2]
    return found


@dataclass(frozen=True)
class FiniteSetSteinDiscrepancy:
    """The FSSD of an arm's draws with optimised test locations, as a reward: lower is better.

    Locations are drawn from a Gaussian fit to every second draw and optimised on these; the
    discrepancy is that of the other draws. A single draw serves both.

    Parameters
    ----------
    num_locations
        J, the number of test locations.
    kernel, c, beta, length_scale, statistic
        As in :func:`fssd`; a ``length_scale`` of ``None`` is the median distance between the draws
        of the first half.
    num_adam_steps, learning_rate
        As in :func:`optimise_test_locations`.
    gradients
        Whose scores are used: ``full``, over all rows, or ``stochastic``, the sampler's own.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    num_locations: int = 10
    kernel: str = "imq"
    c: float = 1.0
    beta: float = -0.5
    length_scale: float | None = None
    statistic: str = "v"
    num_adam_steps: int = 50
    learning_rate: float = 0.05
    gradients: str = "full"
    name: str = "fssd"
    higher_is_better: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_kernel_parameters(self.c, self.beta, self.gradients)
        require(
            _is_integer(self.num_locations) and self.num_locations >= 1,
            "num_locations",
            self.num_locations,
            "an integer, 1 or more",
        )
        require(self.kernel in KERNELS, "kernel", self.kernel, " or ".join(KERNELS))
        require(
            self.length_scale is None
            or (is_finite_number(self.length_scale) and self.length_scale > 0),
            "length_scale",
            self.length_scale,
            "a number above 0, or null for the median distance between draws",
        )
        require(self.statistic in STATISTICS, "statistic", self.statistic, " or ".join(STATISTICS))
        require(
            _is_integer(self.num_adam_steps) and self.num_adam_steps >= 0,
            "num_adam_steps",
            self.num_adam_steps,
            "an integer, 0 or more",
        )
        require(
            is_finite_number(self.learning_rate) and self.learning_rate > 0,
            "learning_rate",
            self.learning_rate,
            "a number above 0",
        )

    def __call__(self, draws: ScoredDraws) -> float:
        positions, scores = checked_draws(draws.positions, draws.scores)
        if not (np.isfinite(positions).all() and np.isfinite(scores).all()):
            return float("nan")
        train = slice(0, None, 2)
        test = slice(1, None, 2) if len(positions) > 1 else train
        length_scale = self.length_scale
        if self.kernel == "gaussian" and length_scale is None:
            length_scale = median_distance(positions[train])
        locations = gaussian_fit_locations(draws.rng_key, positions[train], self.num_locations)
        locations = optimise_test_locations(
            positions[train],
            scores[train],
            locations,
            kernel=self.kernel,
            c=self.c,
            beta=self.beta,
            length_scale=length_scale,
            num_adam_steps=self.num_adam_steps,
            learning_rate=self.learning_rate,
        )
        return fssd(
            positions[test],
            scores[test],
            locations,
            kernel=self.kernel,
            c=self.c,
            beta=self.beta,
            length_scale=length_scale,
            statistic=self.statistic,
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
