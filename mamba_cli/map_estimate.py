"""The MAP: start of the chains, centre of control variates and of the ground truth.

A start or a centre is good when its gradient is small against the gradient at a draw of the
posterior, whose norm is about sqrt(tr H), with H the Hessian of the negative log posterior at the
mode. Low dimension is finished by Newton's method with the exact Hessian. In high dimension Adam
goes through phases, from small minibatches and large steps to large minibatches (or all rows) and
small steps, and L-BFGS may follow.

A sum over a million float32 terms loses the digits that a small gradient is made of. So Newton's
method and L-BFGS read rows in blocks that fit the cache, and the sums over blocks are compensated
(Kahan, 1965): their two halves are added in float64 on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from mamba_cli import gradients
from mamba_cli.errors import NothingUsableError
from mamba_cli.minibatch import gather
from mamba_cli.types import Array, Model, PyTree, Reporter, SilentReporter

BLOCK_BYTES = 192 * 1024
MAX_BLOCK_ROWS = 4096
MIN_BLOCK_ROWS = 512

MAX_COPY_BYTES = 256 << 20
"""Rows that take more are cut into blocks anew in every pass over them, not copied."""

STEPS_PER_DISPATCH = 50
"""Adam's steps between two looks at the progress: a second or less on the largest model."""

SILENT = SilentReporter()


@dataclass(frozen=True)
class AdamPhase:
    """A number of Adam steps on -(log posterior)/N.

    Attributes
    ----------
    num_steps
        Steps; the moments of Adam start anew.
    batch_size
        Rows of a minibatch, drawn with replacement; ``None`` for all rows.
    learning_rate, final_learning_rate
        At the first and after the last step, half a cosine in between.
    """

    num_steps: int
    batch_size: int | None
    learning_rate: float
    final_learning_rate: float = 0.0


@dataclass(frozen=True)
class MapSettings:
    """How the MAP is looked for.

    Attributes
    ----------
    max_newton_dim
        Largest dimension for Newton's method with a dense Hessian.
    tolerance
        Stop when the relative gradient norm (see :class:`MapEstimate`) is below this.
    max_newton_iterations, max_lbfgs_iterations
        Iterations after which the search ends whatever the gradient.
    phases
        Of Adam, in high dimension.
    lbfgs_memory
        Pairs of differences that L-BFGS keeps.
    num_trace_probes
        Random signs for Hutchinson's estimate of tr H, in high dimension.
    """

    max_newton_dim: int = 200
    tolerance: float = 1e-4
    max_newton_iterations: int = 50
    phases: tuple[AdamPhase, ...] = (AdamPhase(5_000, 1_000, 1e-2),)
    max_lbfgs_iterations: int = 500
    lbfgs_memory: int = 20
    num_trace_probes: int = 8


DEFAULT_SETTINGS = MapSettings()


class MapEstimate(NamedTuple):
    """A mode of the posterior, and how near to one it is.

    ``relative_gradient_norm`` is ``gradient_norm`` / sqrt(tr H): the gradient against its root mean
    square at a draw of the posterior (exactly so for a Gaussian posterior). It is infinite where
    the trace is not positive, so that there is no mode to be near to.
    """

    position: Array  # [dim], float32
    gradient_norm: float
    relative_gradient_norm: float
    log_density: float
    method: str  # newton | adam | adam+lbfgs
    num_iterations: int
    elapsed_s: float


class Block(NamedTuple):
    """Neighbouring rows, the row axis last; those after the first ``num_valid`` are padding."""

    columns: PyTree  # leaves [..., block_rows]
    num_valid: Array  # [], int32


class RowBlocks(NamedTuple):
    """The rows of a data set cut into blocks, the row axis last.

    With rows last, one row after the other is contiguous for each covariate: on CPU this reads
    twice as fast as row after row. The last rows are padding: block b has ``num_valid[b]`` rows.

    A copy of many rows would not fit into memory where the rows themselves are read from a mapped
    file: a block is then turned when it is read. ``term(blocks.read(part))`` over the leading axis
    of ``parts`` is the same either way.
    """

    columns: PyTree  # leaves [num_blocks, ..., block_rows]; None where ``rows`` are read
    num_valid: Array  # [num_blocks], int32
    rows: PyTree = None  # leaves [num_data, ...]
    starts: Array | None = None  # [num_blocks], int32, the first row of each block
    offsets: Array | None = None  # [block_rows], int32

    @property
    def parts(self) -> PyTree:
        """What a block is read from, leading axis ``num_blocks``."""
        return (self.columns if self.rows is None else self.starts), self.num_valid

    def read(self, part: PyTree) -> Block:
        """The block of one of ``parts``."""
        if self.rows is None:
            return Block(*part)
        start, num_valid = part
        assert self.offsets is not None
        num_data = jax.tree.leaves(self.rows)[0].shape[0]
        block = gather(self.rows, (start + self.offsets) % num_data)
        # The barrier keeps XLA from gathering anew for each of the sums that a block has part in.
        columns = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -1), block)
        return Block(lax.optimization_barrier(columns), num_valid)


def row_blocks(data: PyTree, num_data: int) -> RowBlocks:
    """Cut ``data``, a pytree with leading axis ``num_data``, into :class:`RowBlocks`."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(data))
    target = min(max(BLOCK_BYTES // max(num_bytes // num_data, 1), MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)
    num_blocks = -(-num_data // target)
    block_rows = -(-num_data // num_blocks)
    padding = num_blocks * block_rows - num_data

    def cut(leaf: Array) -> Array:
        # Copies of real rows: whatever the model computes of them is finite.
        padded = jnp.concatenate([leaf, leaf[:padding]]) if padding else leaf
        return jnp.moveaxis(padded.reshape(num_blocks, block_rows, *leaf.shape[1:]), 1, -1)

    starts = np.arange(num_blocks) * block_rows
    num_valid = jnp.asarray(np.clip(num_data - starts, 0, block_rows).astype(np.int32))
    if num_bytes <= MAX_COPY_BYTES:
        return RowBlocks(jax.tree.map(cut, data), num_valid)
    offsets = jnp.arange(block_rows, dtype=jnp.int32)
    return RowBlocks(None, num_valid, data, jnp.asarray(starts.astype(np.int32)), offsets)


def row_log_likelihoods(model: Model, position: Array, columns: PyTree) -> Array:
    """Log likelihood of each row of one block, ``[block_rows]``; rows are on the last axis."""

    def of_row(row: PyTree) -> Array:
        return model.log_likelihood(position, jax.tree.map(lambda leaf: leaf[None], row))

    return jax.vmap(of_row, in_axes=-1)(columns)


def log_likelihoods_of_rows(model: Model, position: Array, blocks: RowBlocks) -> Array:
    """Log likelihood of every row, ``[num_blocks, block_rows]``."""

    def of_part(part: PyTree) -> Array:
        return row_log_likelihoods(model, position, blocks.read(part).columns)

    return lax.map(of_part, blocks.parts)


def block_log_likelihood(
    model: Model, position: Array, columns: PyTree, num_valid: Array, reference: Array | float = 0.0
) -> Array:
    """Sum over the valid rows of one block of log likelihood minus ``reference``, a scalar.

    Subtracted row by row, a reference near the log likelihoods keeps the digits of their
    difference: the sum itself, 1e5 or more, has a resolution of 0.01 in float32.
    """
    differences = row_log_likelihoods(model, position, columns) - reference
    valid = jnp.arange(differences.shape[0]) < num_valid
    return jnp.sum(jnp.where(valid, differences, 0.0))


def compensated_sum(term: Callable[..., PyTree], blocks: PyTree) -> tuple[PyTree, PyTree]:
    """Sum ``term(block)`` over the leading axis of ``blocks`` in twice the working precision.

    Kahan (1965): the rounding error of every addition is kept and taken off the next term.

    Returns
    -------
    total, error
        Pytrees of the shape of a term. ``total - error`` in higher precision is the sum.
    """
    first = jax.tree.map(lambda leaf: leaf[0], blocks)
    shapes = jax.eval_shape(term, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(carry: tuple[PyTree, PyTree], block: PyTree) -> tuple[tuple[PyTree, PyTree], None]:
        total, error = carry
        corrected = jax.tree.map(jnp.subtract, term(block), error)
        new_total = jax.tree.map(jnp.add, total, corrected)
        lost = jax.tree.map(lambda new, old, add: (new - old) - add, new_total, total, corrected)
        return (new_total, lost), None

    carry, _ = lax.scan(add, (zeros, zeros), blocks)
    return carry


def _exact(total: PyTree, error: PyTree) -> PyTree:
    """The two halves of a compensated sum, added in float64."""
    return jax.tree.map(lambda t, e: np.asarray(t, np.float64) - np.asarray(e), total, error)


class _Derivatives(NamedTuple):
    value: np.ndarray  # []
    gradient: np.ndarray  # [dim]
    hessian: np.ndarray  # [dim, dim]


def _derivatives_fn(model: Model) -> Callable[[Array, RowBlocks], _Derivatives]:
    """Value, gradient and Hessian of the log posterior, summed over blocks, in float64."""

    def all_of(function: Callable[[Array], Array], position: Array) -> PyTree:
        value, gradient = jax.value_and_grad(function)(position)
        return value, gradient, jax.hessian(function)(position)

    @jax.jit
    def halves(position: Array, blocks: RowBlocks) -> PyTree:
        def term(part: PyTree) -> PyTree:
            block = blocks.read(part)

            def likelihood(at: Array) -> Array:
                return block_log_likelihood(model, at, *block)

            return all_of(likelihood, position)

        return all_of(model.log_prior, position), compensated_sum(term, blocks.parts)

    def derivatives(position: Array, blocks: RowBlocks) -> _Derivatives:
        prior, likelihood = halves(position, blocks)
        total = jax.tree.map(lambda a, b: np.asarray(a) + b, prior, _exact(*likelihood))
        return _Derivatives(*total)

    return derivatives


def hessian(model: Model, position: Array, *, blocks: RowBlocks | None = None) -> np.ndarray:
    """Hessian of the negative log posterior at ``position``, ``[dim, dim]`` in float64.

    H = -d2/dtheta2 [log p(theta) + sum_i log f(y_i | theta)], exact (not Gauss-Newton), over all
    rows. ``blocks`` saves cutting the data again where the caller has done so.
    """
    blocks = row_blocks(model.data, model.num_data) if blocks is None else blocks
    derivatives = _derivatives_fn(model)
    matrix = derivatives(jnp.asarray(position, jnp.float32), blocks).hessian
    return -0.5 * (matrix + matrix.T)


def hessian_product(model: Model, position: Array, vector: Array, data: PyTree) -> Array:
    """H v, with H the Hessian of the log posterior over all rows at ``position``, ``[dim]``.

    ``data`` is as of ``gradients.all_data``.
    """

    def product(function: Callable[[Array], Array]) -> Array:
        return jax.jvp(jax.grad(function), (position,), (vector,))[1]

    likelihood: Array = gradients.over_all_rows(model, product, data)
    return likelihood + product(model.log_prior)


def hessian_trace(model: Model, position: Array, rng_key: Array, num_probes: int) -> float:
    """Hutchinson's estimate of tr H: the mean of s.Hs over vectors s of random signs."""

    @jax.jit
    def quadratic_forms(position: Array, data: PyTree, probes: Array) -> Array:
        def of_probe(sign: Array) -> Array:
            def form(function: Callable[[Array], Array]) -> Array:
                return jnp.vdot(sign, jax.jvp(jax.grad(function), (position,), (sign,))[1])

            return gradients.over_all_rows(model, form, data) + form(model.log_prior)

        return lax.map(of_probe, probes)

    probes = jax.random.rademacher(rng_key, (num_probes, model.dim), jnp.float32)
    forms = quadratic_forms(position, gradients.all_data(model), probes)
    return -float(np.mean(np.asarray(forms, np.float64)))


def hessian_row_norms(model: Model, position: Array, rng_key: Array, num_probes: int) -> np.ndarray:
    """Estimate of ||H_i||, the norms of the rows of the Hessian, ``[dim]`` float64.

    The root mean square of (H v)_i over ``num_probes`` vectors v ~ N(0, I): positive also where
    H is not positive definite, with a relative standard error of (2 num_probes)^-1/2.
    """

    @jax.jit
    def squares(position: Array, data: PyTree, probes_key: Array) -> Array:
        def of_probe(key: Array) -> Array:
            probe = jax.random.normal(key, (model.dim,), jnp.float32)
            return hessian_product(model, position, probe, data) ** 2

        return jnp.mean(lax.map(of_probe, jax.random.split(probes_key, num_probes)), axis=0)

    mean = squares(position, gradients.all_data(model), rng_key)
    return np.sqrt(np.asarray(mean, np.float64))


def _full_value_and_gradient(model: Model) -> Callable[[Array, PyTree], tuple[Array, Array]]:
    """Log posterior and its gradient over all rows, for data as of ``gradients.all_data``."""

    def value_and_gradient(position: Array, data: PyTree) -> tuple[Array, Array]:
        def at_position(function: Callable[[Array], Array]) -> PyTree:
            return jax.value_and_grad(function)(position)

        likelihood = gradients.over_all_rows(model, at_position, data)
        total: tuple[Array, Array] = jax.tree.map(jnp.add, at_position(model.log_prior), likelihood)
        return total

    return value_and_gradient


def find_map(
    model: Model,
    *,
    rng_key: Array,
    settings: MapSettings = DEFAULT_SETTINGS,
    reporter: Reporter = SILENT,
    clock: Callable[[], float] = time.perf_counter,
) -> MapEstimate:
    """Maximise the log posterior over all rows.

    Up to ``settings.max_newton_dim`` dimensions: Newton's method, the Hessian made
    positive definite where it is not and the step halved until the log density rises. Above:
    the phases of Adam, then L-BFGS with a zoom line search on all rows if
    ``settings.max_lbfgs_iterations`` is not 0. Newton and L-BFGS end when the relative gradient
    norm is below ``settings.tolerance``, when float32 positions allow no further progress, or after
    the stated number of iterations; Adam makes all its steps. The norm that was reached is in the
    result.

    Parameters
    ----------
    model
        The posterior. The search starts at ``model.initial_position``.
    rng_key
        For the start, the minibatches and the trace. The result is a function of it.

    Raises
    ------
    NothingUsableError
        The log density or its gradient is not finite at the start or at the end.
    """
    start_s = clock()
    key_start, key_search = jax.random.split(rng_key)
    start = jnp.asarray(model.initial_position(key_start), jnp.float32)
    search = _newton if model.dim <= settings.max_newton_dim else _adam_then_lbfgs
    estimate = search(model, start, key_search, settings, reporter)
    estimate = estimate._replace(elapsed_s=clock() - start_s)
    _check_finite(model, "at the MAP", estimate.log_density, estimate.gradient_norm)
    reporter.message(
        f"MAP by {estimate.method}, {estimate.num_iterations:,} iterations in "
        f"{estimate.elapsed_s:.1f} s: {describe(estimate)}"
    )
    return estimate


def describe(estimate: MapEstimate) -> str:
    """How near to a mode the estimate is, for a reader."""
    return (
        f"gradient norm {estimate.gradient_norm:.2g}, "
        f"{estimate.relative_gradient_norm:.1g} of its size at a draw of the posterior"
    )


def _check_finite(model: Model, where: str, log_density: float, gradient_norm: float) -> None:
    if np.isfinite(log_density) and np.isfinite(gradient_norm):
        return
    raise NothingUsableError(
        f"MAP of {model.name}: {where} the log density is {log_density} and the norm of its "
        f"gradient {gradient_norm}, both must be finite; check the data for values that are not "
        f"finite and the prior of the model"
    )


def _relative(gradient_norm: float, trace: float) -> float:
    return gradient_norm / float(np.sqrt(trace)) if trace > 0 else float("inf")


def _ascent_step(gradient: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """|H|^-1 gradient ``[dim]``: Newton's step where H is positive definite, uphill anywhere.

    |H| has the absolute values of the eigenvalues of H (Gill, Murray and Wright, 1981, 4.4.2).
    """
    values, vectors = np.linalg.eigh(-hessian)
    sizes = np.maximum(np.abs(values), 1e-10 * np.max(np.abs(values)) + 1e-30)
    return vectors @ ((vectors.T @ gradient) / sizes)


def _newton(
    model: Model, start: Array, rng_key: Array, settings: MapSettings, reporter: Reporter
) -> MapEstimate:
    """Newton's method; one step more after the tolerance is met, as it squares the error."""
    blocks = row_blocks(model.data, model.num_data)
    derivatives = _derivatives_fn(model)

    def norms(at: _Derivatives) -> tuple[float, float]:
        gradient_norm = float(np.linalg.norm(at.gradient))
        return gradient_norm, _relative(gradient_norm, -float(np.trace(at.hessian)))

    position = start
    current = derivatives(position, blocks)
    _check_finite(model, "at the start", float(current.value), norms(current)[0])
    num_iterations = 0
    close = False
    while num_iterations < settings.max_newton_iterations and not close:
        close = norms(current)[1] <= settings.tolerance
        improved = _line_search(derivatives, position, current, blocks)
        if improved is None:
            break
        num_iterations += 1
        position, current = improved
    gradient_norm, relative = norms(current)
    return MapEstimate(
        position, gradient_norm, relative, float(current.value), "newton", num_iterations, 0.0
    )


def _line_search(
    derivatives: Callable[[Array, RowBlocks], _Derivatives],
    position: Array,
    current: _Derivatives,
    blocks: RowBlocks,
    max_halvings: int = 40,
) -> tuple[Array, _Derivatives] | None:
    """Halve Newton's step until it is an improvement; ``None`` if it never is.

    Close to the mode the rise of the log density is below the rounding of float32 terms; there a
    smaller gradient decides.
    """
    step = _ascent_step(current.gradient, current.hessian)
    rounding = 1e-7 * abs(float(current.value))
    for halvings in range(max_halvings):
        moved = np.asarray(position, np.float64) + step * 0.5**halvings
        candidate = jnp.asarray(moved, jnp.float32)
        if np.array_equal(candidate, position):
            return None
        new = derivatives(candidate, blocks)
        if not all(np.all(np.isfinite(part)) for part in new):
            continue
        rise = float(new.value - current.value)
        smaller = np.linalg.norm(new.gradient) < np.linalg.norm(current.gradient)
        if rise > rounding or (rise > -rounding and smaller):
            return candidate, new
    return None


def _adam_then_lbfgs(
    model: Model, start: Array, rng_key: Array, settings: MapSettings, reporter: Reporter
) -> MapEstimate:
    key_adam, key_trace = jax.random.split(rng_key)
    data = gradients.all_data(model)
    value_and_gradient = jax.jit(_full_value_and_gradient(model))

    def checked(position: Array, where: str) -> tuple[float, float]:
        value, gradient = value_and_gradient(position, data)
        log_density = float(value)
        norm = float(np.linalg.norm(np.asarray(gradient, np.float64)))
        _check_finite(model, where, log_density, norm)
        return log_density, norm

    def trace(position: Array) -> float:
        return hessian_trace(model, position, key_trace, settings.num_trace_probes)

    checked(start, "at the start")
    position, num_iterations = start, 0
    for number, phase in enumerate(settings.phases):
        key_phase = jax.random.fold_in(key_adam, number)
        name = f"MAP: Adam, phase {number + 1} of {len(settings.phases)}"
        position = _adam(model, position, key_phase, phase, name, reporter)
        num_iterations += phase.num_steps
    method = "adam"
    if settings.max_lbfgs_iterations > 0:
        checked(position, "after Adam")
        blocks = row_blocks(model.data, model.num_data)
        method = "adam+lbfgs"
        position, count = _lbfgs(model, position, blocks, trace(position), settings, reporter)
        num_iterations += count
    log_density, gradient_norm = checked(position, "at the MAP")
    relative = _relative(gradient_norm, trace(position))
    return MapEstimate(position, gradient_norm, relative, log_density, method, num_iterations, 0.0)


def _reference(model: Model, position: Array, blocks: RowBlocks) -> tuple[Array, Array]:
    """Log likelihood of every row ``[num_blocks, block_rows]`` and log prior at ``position``."""
    return log_likelihoods_of_rows(model, position, blocks), model.log_prior(position)


def _relative_value_and_gradient(
    model: Model, position: Array, blocks: RowBlocks, reference: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Log density at ``position`` minus that at the reference, and its gradient ``[dim]``."""

    def term(part: tuple[PyTree, Array]) -> PyTree:
        block = blocks.read(part[0])

        def likelihood(at: Array) -> Array:
            return block_log_likelihood(model, at, *block, reference=part[1])

        return jax.value_and_grad(likelihood)(position)

    (value, gradient), _ = compensated_sum(term, (blocks.parts, reference[0]))
    prior, prior_gradient = jax.value_and_grad(model.log_prior)(position)
    return value + (prior - reference[1]), gradient + prior_gradient


def _adam(
    model: Model,
    start: Array,
    rng_key: Array,
    phase: AdamPhase,
    name: str,
    reporter: Reporter,
) -> Array:
    """One phase of Adam; many steps per dispatch."""
    batch_size = None if phase.batch_size is None else min(phase.batch_size, model.num_data)
    schedule = optax.cosine_decay_schedule(
        phase.learning_rate,
        max(phase.num_steps, 1),
        phase.final_learning_rate / phase.learning_rate,
    )
    optimiser = optax.adam(schedule)
    full = _full_value_and_gradient(model)

    def gradient(position: Array, data: PyTree, key: Array) -> Array:
        if batch_size is None:
            return full(position, data)[1]
        indices = jax.random.randint(key, (batch_size,), 0, model.num_data)
        minibatch = jax.tree.map(lambda leaf: leaf[indices], data)
        return gradients.scaled_gradient(model, position, minibatch)

    @jax.jit
    def advance(carry: PyTree, data: PyTree, first: Array, last: Array) -> PyTree:
        def step(index: Array, carry: PyTree) -> PyTree:
            position, state = carry
            ascent = gradient(position, data, jax.random.fold_in(rng_key, index))
            updates, state = optimiser.update(-ascent / model.num_data, state)
            return optax.apply_updates(position, updates), state

        return lax.fori_loop(first, last, step, carry)

    carry = (start, optimiser.init(start))
    data = gradients.all_data(model) if batch_size is None else model.data
    reporter.start(name, phase.num_steps, "steps")
    try:
        for first in range(0, phase.num_steps, STEPS_PER_DISPATCH):
            last = min(first + STEPS_PER_DISPATCH, phase.num_steps)
            carry = jax.block_until_ready(advance(carry, data, first, last))
            reporter.update(last - first)
    finally:
        reporter.finish()
    return carry[0]


def _lbfgs(
    model: Model,
    start: Array,
    blocks: RowBlocks,
    trace: float,
    settings: MapSettings,
    reporter: Reporter,
) -> tuple[Array, int]:
    """L-BFGS on all rows until the gradient norm is below tolerance * sqrt(trace).

    Values are relative to the start, row by row: the line search compares differences far below
    the resolution of the log density.
    """
    target = settings.tolerance * np.sqrt(max(trace, 0.0))
    optimiser = optax.lbfgs(memory_size=settings.lbfgs_memory)
    per_dispatch = 10

    @jax.custom_vjp
    def loss(position: Array, blocks: RowBlocks, reference: PyTree) -> Array:
        return -_relative_value_and_gradient(model, position, blocks, reference)[0]

    def forward(position: Array, blocks: RowBlocks, reference: PyTree) -> tuple[Array, Array]:
        value, gradient = _relative_value_and_gradient(model, position, blocks, reference)
        return -value, -gradient

    def backward(gradient: Array, cotangent: Array) -> tuple[Array, None, None]:
        return cotangent * gradient, None, None

    loss.defvjp(forward, backward)

    @jax.jit
    def advance(
        position: Array, state: PyTree, blocks: RowBlocks, reference: PyTree, limit: Array
    ) -> PyTree:
        def value_fn(at: Array) -> Array:
            return loss(at, blocks, reference)

        value_and_gradient = optax.value_and_grad_from_state(value_fn)

        def unfinished(carry: PyTree) -> Array:
            count, _, _, norm, moved = carry
            return (count < limit) & ~(norm <= target) & moved

        def step(carry: PyTree) -> PyTree:
            count, position, state, _, _ = carry
            value, gradient = value_and_gradient(position, state=state)
            updates, state = optimiser.update(
                gradient, state, position, value=value, grad=gradient, value_fn=value_fn
            )
            new = optax.apply_updates(position, updates)
            norm = jnp.linalg.norm(optax.tree.get(state, "grad"))
            return count + 1, new, state, norm, jnp.any(new != position)

        norm = jnp.linalg.norm(jax.grad(value_fn)(position))
        return lax.while_loop(unfinished, step, (0, position, state, norm, True))

    reference = jax.jit(partial(_reference, model))(start, blocks)
    position, state = start, optimiser.init(start)
    num_iterations = 0
    reporter.start("MAP: L-BFGS", settings.max_lbfgs_iterations, "iterations")
    try:
        while num_iterations < settings.max_lbfgs_iterations:
            limit = min(per_dispatch, settings.max_lbfgs_iterations - num_iterations)
            count, position, state, norm, moved = advance(position, state, blocks, reference, limit)
            num_iterations += int(count)
            reporter.update(int(count), f"gradient norm {float(norm):.3g}")
            if not bool(moved) or not float(norm) > target:
                break
    finally:
        reporter.finish()
    return position, num_iterations
