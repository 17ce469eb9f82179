"""The timed chain: the only module that times a chain.

A :class:`ChainProgram` is one sampler compiled for one batch size. It runs many steps
per dispatch inside a compiled loop; step size, L, number of steps, data and the
constants of the gradient are arguments, so every arm of one batch size shares one
program. A :class:`Chain` is a value: :func:`advance` returns the chain continued by a
budget of seconds or steps.

What is stored is bounded. Draw number j (1, 2, ...) is kept while j is a multiple of
``stride``; when the buffer of ``capacity`` draws is full, every other draw is dropped
and the stride doubles. The kept draws are therefore a function of the number of draws
alone, not of how the run was cut into dispatches, rungs or resumed pieces, and between
``capacity / 2`` and ``capacity`` of them are there as soon as enough were made. What is
wanted of *every* draw (moments) is accumulated inside the loop.

Sums whose standard error is wanted are kept block by block: draw j is added to block
``(j - 1) // block_length``, and when all blocks are full, neighbours are merged and the length
doubles. As with the kept draws, the blocks are a function of the number of draws alone.

The random key of step i is ``fold_in(chain_key, i)``: a chain is a deterministic
function of its key and its number of steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli.compilation import compile_fully, compile_quickly
from mamba_cli.gradients import GradientEstimator, num_rows
from mamba_cli.minibatch import arrange
from mamba_cli.noise import threefry
from mamba_cli.threefry import unrolled
from mamba_cli.types import (
    Arrangement,
    Array,
    BlockSums,
    FeatureFn,
    Hyperparameters,
    Kernel,
    Minibatcher,
    PyTree,
    Sampler,
)

CLOSE_ENOUGH = 0.005
"""A timed chain stops when less than this share of its budget, or half a step, is left."""

SHARE_PER_DISPATCH = 0.75
"""Share of the remaining time that one dispatch aims for: the last ones are short."""

AFTER_BURN_IN = 2**32 - 1
"""Folded into a chain's key when its draws are forgotten; no step has this number."""

MAX_STEPS_PER_DISPATCH = 1 << 17
"""Bounds the number of float32 terms in the in-loop sums, which are float64 between dispatches."""

MAX_BLOCKS, MIN_BLOCKS, BLOCK_SUMS_BYTES = 32, 8, 4 << 20
"""Blocks a chain keeps sums of, both powers of two: fewer where many would take more bytes."""

MAX_STEPS = 2**31 - 1
"""Where a chain ends, whatever its budget: steps are counted in int32."""

QUICK_MAX_DIM = 1_000
"""Largest dimension for which a quick compilation costs nothing when the program runs."""

LAYOUT_VERSION = 1
"""Raised when the numbers of a saved chain change their meaning but not their names and shapes."""

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class LayoutError(Exception):
    """A saved chain is not laid out as this program's are: another version of the code wrote it."""


class MinibatchScheme(Protocol):
    def __call__(self, num_data: int, batch_size: int) -> Minibatcher: ...


class NoiseKeyFn(Protocol):
    """Turns the key of a step into that of the generator of its noise; see ``noise``."""

    def __call__(self, rng_key: Array) -> Array: ...


class Budget(NamedTuple):
    """How long to go on: exactly one of ``seconds`` and ``steps``."""

    seconds: float | None = None
    steps: int | None = None


class Carry(NamedTuple):
    """What the compiled loop carries; leaves are arrays, so it can be saved."""

    sampler: PyTree
    minibatch: PyTree
    key_data: Array  # [2] uint32
    origin: Array  # [dim] float32, where the chain started
    step: Array  # [] int32, gradient steps done, all of them finite
    nonfinite_step: Array  # [] int32, first step that was not finite, else 0
    stride: Array  # [] int32, draws per kept draw
    positions: Array  # [capacity, dim] float32, kept draws
    gradients: Array  # [capacity or 0, dim] float32, the sampler's gradient at each
    blocks: PyTree  # leaves [num_blocks, ...] float32, sums of the block features
    block_length: Array  # [] int32, draws per block


def moment_features(delta: Array, gradient: Array) -> PyTree:
    """First and second powers of the deviation: the running mean and variance."""
    return {"first": delta, "second": delta**2}


@dataclass(frozen=True)
class Chain:
    """A chain at rest: everything needed to continue it, score it or save it."""

    hyperparameters: Hyperparameters
    carry: Carry
    sums: PyTree  # float64 sums of the features over all draws
    elapsed_s: float

    @property
    def num_steps(self) -> int:
        """Gradient steps done."""
        return int(self.carry.step)

    @property
    def num_draws(self) -> int:
        """Draws made: one per step, or one per L steps where momentum is redrawn."""
        return self.num_steps // self.hyperparameters.num_integration_steps

    @property
    def nonfinite_step(self) -> int | None:
        """Number (from 1) of the first step whose position squared is not finite, or None."""
        return int(self.carry.nonfinite_step) or None

    @property
    def position(self) -> np.ndarray:
        """The last position, ``[dim]``."""
        return np.asarray(self.carry.sampler.position)

    @property
    def num_kept(self) -> int:
        """Draws in the buffer."""
        return self.num_draws // int(self.carry.stride)

    @property
    def mean(self) -> np.ndarray:
        """Mean of all draws, ``[dim]`` float64; NaN without draws."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.carry.origin, np.float64) + self.sums["first"] / self.num_draws

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of all draws (divisor: their number), ``[dim]`` float64."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self.sums["first"] / self.num_draws
            return np.sqrt(np.maximum(self.sums["second"] / self.num_draws - mean**2, 0.0))

    def block_sums(self) -> BlockSums:
        """The sums of the program's ``block_features``, of the blocks that hold a draw."""
        num_draws, length = self.num_draws, int(self.carry.block_length)
        used = -(-num_draws // length)
        counts = np.full(used, length)
        counts[used - 1 :] = num_draws - (used - 1) * length
        blocks = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[:used], self.carry.blocks)
        return BlockSums(blocks, counts, np.asarray(self.carry.origin, np.float64))

    def thinned(self, max_draws: int) -> tuple[np.ndarray, np.ndarray]:
        """At most ``max_draws`` of the kept draws, evenly spaced, and the gradients there.

        Returns
        -------
        positions, gradients
            ``[m, dim]`` each with m = min(max_draws, kept); ``gradients`` are the
            sampler's own and ``[0, dim]`` when the program does not keep them.
        """
        chosen = self._chosen(max_draws)
        positions, gradients = np.asarray(self.carry.positions), np.asarray(self.carry.gradients)
        return positions[chosen], gradients[chosen] if len(gradients) else gradients

    def thinned_numbers(self, max_draws: int) -> np.ndarray:
        """Which draws (1, 2, ...) those of :meth:`thinned` are, ``[m]``."""
        return (self._chosen(max_draws) + 1) * int(self.carry.stride)

    def _chosen(self, max_draws: int) -> np.ndarray:
        kept = self.num_kept
        if kept <= max_draws:
            return np.arange(kept)
        return ((np.arange(max_draws) + 1) * kept) // max_draws - 1

    def compact(self, max_kept: int | None = None) -> Chain:
        """The same chain in host memory, its buffer cut to the draws that are in it.

        With ``max_kept`` the draws are thinned further, by doubling the stride, until at
        most so many are left. :func:`advance` takes the chain up again as it is.
        """
        stride, kept = int(self.carry.stride), self.num_kept
        buffers = [np.asarray(self.carry.positions)[:kept], np.asarray(self.carry.gradients)[:kept]]
        while max_kept is not None and len(buffers[0]) > max_kept:
            buffers = [buffer[1::2] for buffer in buffers]
            stride *= 2
        cut: dict[str, Any] = dict(zip(("positions", "gradients"), buffers, strict=True))
        carry = self.carry._replace(stride=jnp.int32(stride), **cut)
        return replace(self, carry=jax.tree.map(np.array, carry))

    def without_draws(self) -> Chain:
        """The same chain with no draw made yet: what came before was burn-in.

        Position, auxiliary variables and ``elapsed_s`` stay. Steps are counted anew, with keys
        of their own; moments are taken about the position here.
        """
        key = jax.random.wrap_key_data(jnp.asarray(self.carry.key_data))
        carry = self.carry._replace(
            key_data=jax.random.key_data(jax.random.fold_in(key, AFTER_BURN_IN)),
            # A copy, because a carry is donated and may hold no buffer twice.
            origin=jnp.array(self.carry.sampler.position, copy=True),
            step=jnp.int32(0),
            stride=jnp.int32(1),
            blocks=jax.tree.map(jnp.zeros_like, self.carry.blocks),
            block_length=jnp.int32(1),
        )
        return replace(self, carry=carry, sums=jax.tree.map(np.zeros_like, self.sums))


class ChainProgram:
    """One sampler at one batch size, compiled once.

    Parameters
    ----------
    estimator
        The stochastic gradient, its rows and its constants.
    sampler
        Makes the kernel for a gradient.
    scheme
        How minibatches are drawn: ``scheme(num_data, batch_size)``.
    batch_size
        n, the rows of a minibatch.
    capacity
        Draws the buffer holds; rounded up to an even number.
    keep_gradients
        Whether the sampler's own gradient is kept beside each draw.
    features
        What is summed over all draws.
    block_features
        What is summed over blocks of draws, in float32; see :meth:`Chain.block_sums`.
    noise
        Turns the key of a step into that of the generator of its noise.
    arranged
        Where copies of the rows in the scheme's order and layout are kept; programs of one
        estimator may share them.
    """

    def __init__(
        self,
        estimator: GradientEstimator,
        sampler: Sampler,
        scheme: MinibatchScheme,
        batch_size: int,
        *,
        capacity: int,
        keep_gradients: bool = False,
        features: FeatureFn = moment_features,
        block_features: FeatureFn | None = None,
        noise: NoiseKeyFn = threefry,
        arranged: dict[Arrangement | None, PyTree] | None = None,
    ) -> None:
        self._estimator = estimator
        self._sampler = sampler
        self._minibatcher = scheme(num_rows(estimator.rows), batch_size)
        self._arranged = arranged if arranged is not None else {}
        self._features = features
        self._block_features: FeatureFn = block_features or _no_features
        self._noise = noise
        self.batch_size = batch_size
        self.capacity = capacity + capacity % 2
        self.keep_gradients = keep_gradients
        self.cost_per_step_s: float | None = None
        self._start: Any = None
        self._run: Any = None
        self._compress = jax.jit(_compress, donate_argnums=0)
        self._merge = jax.jit(_merge_blocks, donate_argnums=0)

    def rows(self) -> PyTree:
        """What minibatches are drawn from, as the scheme wants it to lie; copied at first use."""
        wanted = self._minibatcher.arrangement
        if wanted not in self._arranged:
            estimator = self._estimator
            self._arranged[wanted] = arrange(
                wanted, estimator.rows, columns=estimator.columns, full_data=estimator.full_data
            )
        return self._arranged[wanted]

    def compile(self, position: np.ndarray, clock: Clock = time.perf_counter) -> float:
        """Compile for positions like ``position`` and run once; return the seconds it took.

        A second call returns 0. The trial run pays for page faults and thread start-up,
        and gives a first estimate of the cost of a step.
        """
        if self._run is not None:
            return 0.0
        began = clock()
        hyperparameters = Hyperparameters(1e-12, self.batch_size, 1)
        arguments = (
            jax.random.key_data(jax.random.key(0)),
            jnp.asarray(position, jnp.float32),
            jnp.float32(hyperparameters.step_size),
        )
        data = (self.rows(), self._estimator.constants)
        compiled = compile_quickly if len(position) <= QUICK_MAX_DIM else compile_fully
        start = compiled(jax.jit(self._start_carry).lower(*arguments, *data))
        carry = start(*arguments, *data)
        run = jax.jit(self._advance_carry, donate_argnums=0)
        traced = _traced(hyperparameters, 1)
        self._start, self._run = start, compiled(run.lower(carry, *traced, *data))
        carry, _ = jax.block_until_ready(self.dispatch(carry, hyperparameters, 1))
        before = clock()
        jax.block_until_ready(self.dispatch(carry, hyperparameters, 1))
        self.cost_per_step_s = clock() - before
        jax.block_until_ready(self._compress(start(*arguments, *data)))
        jax.block_until_ready(self._merge(start(*arguments, *data)))
        return clock() - began

    def start(
        self, rng_key: Array, position: np.ndarray, hyperparameters: Hyperparameters
    ) -> Chain:
        """A chain at ``position`` with no step done."""
        self.compile(position)
        assert self.refreshes or hyperparameters.num_integration_steps == 1, (
            "a draw is several steps only where the sampler redraws its momentum"
        )
        carry = self._start(
            jax.random.key_data(rng_key),
            jnp.asarray(position, jnp.float32),
            jnp.float32(hyperparameters.step_size),
            self.rows(),
            self._estimator.constants,
        )
        return Chain(hyperparameters, carry, self._zero_sums(carry), 0.0)

    def dispatch(
        self, carry: Carry, hyperparameters: Hyperparameters, num_steps: int
    ) -> tuple[Carry, PyTree]:
        """Run ``num_steps`` steps, or up to the first that is not finite. Consumes ``carry``.

        Returns the carry and the float32 sums of the features over the draws made.
        """
        traced = _traced(hyperparameters, num_steps)
        return self._run(carry, *traced, self.rows(), self._estimator.constants)

    def make_room(self, carry: Carry) -> Carry:
        """Drop every other kept draw and double the stride. Consumes ``carry``."""
        return self._compress(carry)

    def merge_blocks(self, carry: Carry) -> Carry:
        """Merge neighbouring blocks and double their length. Consumes ``carry``."""
        return self._merge(carry)

    def restore(self, carry: Carry) -> Carry:
        """The carry of a compact chain on the device, its buffer padded to capacity."""

        def padded(kept: Array, size: int) -> Array:
            buffer = np.zeros((size, kept.shape[1]), np.float32)
            buffer[: len(kept)] = kept
            return jnp.asarray(buffer)

        if isinstance(carry.positions, jax.Array):
            return carry
        full = carry._replace(
            positions=padded(carry.positions, self.capacity),
            gradients=padded(carry.gradients, self.capacity if self.keep_gradients else 0),
        )
        return jax.tree.map(jnp.asarray, full)

    def to_arrays(self, chain: Chain) -> dict[str, np.ndarray]:
        """A compact chain as named arrays, for a checkpoint; see :meth:`from_arrays`."""
        leaves = jax.tree.leaves((chain.carry, chain.sums))
        arrays = {f"leaf-{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
        described = {"layout": self._layout(chain), "elapsed_s": chain.elapsed_s}
        return arrays | {name: np.asarray(value) for name, value in described.items()}

    def from_arrays(
        self,
        arrays: Mapping[str, np.ndarray],
        hyperparameters: Hyperparameters,
        position: np.ndarray,
    ) -> Chain:
        """The chain that :meth:`to_arrays` saved, bit for bit.

        Raises
        ------
        LayoutError
            Names, types or shapes differ from those of this program's chains, or
            ``LAYOUT_VERSION`` does.
        """
        like = self.start(jax.random.key(0), position, hyperparameters)
        if str(arrays.get("layout")) != self._layout(like):
            raise LayoutError
        leaves, structure = jax.tree.flatten((like.carry, like.sums))
        leaves = [arrays[f"leaf-{index}"] for index in range(len(leaves))]
        carry, sums = jax.tree.unflatten(structure, leaves)
        return Chain(hyperparameters, carry, sums, float(arrays["elapsed_s"]))

    @property
    def num_rows(self) -> int:
        """N, the rows that minibatches are drawn from."""
        return num_rows(self._estimator.rows)

    @property
    def refreshes(self) -> bool:
        """Whether the sampler redraws its momentum every ``num_integration_steps`` steps."""
        return self._kernel(self._estimator.constants).refresh is not None

    def _kernel(self, constants: PyTree) -> Kernel:
        def gradient(position: Array, minibatch: PyTree) -> Array:
            return self._estimator.estimate(constants, position, minibatch)

        return self._sampler(gradient)

    def _layout(self, chain: Chain) -> str:
        """Version, and name, type and shape of every leaf; of a buffer, the shape of one draw."""
        carry = chain.carry._replace(
            positions=chain.carry.positions[:0], gradients=chain.carry.gradients[:0]
        )
        leaves, _ = jax.tree_util.tree_flatten_with_path((carry, chain.sums))
        lines = [f"{jax.tree_util.keystr(k)} {leaf.dtype}{list(leaf.shape)}" for k, leaf in leaves]
        kept = f"gradients {'kept' if self.keep_gradients else 'not kept'}"
        return "\n".join([f"version {LAYOUT_VERSION}", kept, *lines])

    def _zero_sums(self, carry: Carry) -> PyTree:
        shapes = jax.eval_shape(self._features, carry.origin, carry.origin)
        return jax.tree.map(lambda shape: np.zeros(shape.shape, np.float64), shapes)

    def _start_carry(
        self, key_data: Array, position: Array, step_size: Array, rows: PyTree, constants: PyTree
    ) -> Carry:
        # Steps use fold_in(key, 1), fold_in(key, 2), ...; 0 is left for the start.
        key = jax.random.fold_in(unrolled(key_data), 0)
        key_scheme, key_batch, key_init = jax.random.split(key, 3)
        minibatch, scheme_state = self._minibatcher.select(
            key_batch, self._minibatcher.init(key_scheme), rows
        )
        state = self._kernel(constants).init(self._noise(key_init), position, minibatch, step_size)
        dim = position.shape[0]
        return Carry(
            sampler=state,
            minibatch=scheme_state,
            key_data=key_data,
            origin=position,
            step=jnp.int32(0),
            nonfinite_step=jnp.int32(0),
            stride=jnp.int32(1),
            positions=jnp.zeros((self.capacity, dim), jnp.float32),
            gradients=jnp.zeros((self.capacity if self.keep_gradients else 0, dim), jnp.float32),
            blocks=_empty_blocks(self._block_features, position),
            block_length=jnp.int32(1),
        )

    def _advance_carry(
        self,
        carry: Carry,
        step_size: Array,
        num_integration_steps: Array,
        num_steps: Array,
        rows: PyTree,
        constants: PyTree,
    ) -> tuple[Carry, PyTree]:
        kernel = self._kernel(constants)
        refresh = kernel.refresh
        key = unrolled(carry.key_data)
        last_step = carry.step + num_steps

        def going(loop: tuple[Carry, PyTree]) -> Array:
            return (loop[0].step < last_step) & (loop[0].nonfinite_step == 0)

        def one_step(loop: tuple[Carry, PyTree]) -> tuple[Carry, PyTree]:
            carry, sums = loop
            number = carry.step + 1
            key_batch, key_step, key_refresh = jax.random.split(jax.random.fold_in(key, number), 3)
            state = carry.sampler
            if refresh is not None:
                state = lax.cond(
                    carry.step % num_integration_steps == 0,
                    lambda s: refresh(self._noise(key_refresh), s, step_size),
                    lambda s: s,
                    state,
                )
            minibatch, scheme_state = self._minibatcher.select(key_batch, carry.minibatch, rows)
            state = kernel.step(self._noise(key_step), state, minibatch, step_size)
            # The square, so that a draw whose second moment would overflow is not summed.
            finite = jnp.isfinite(jnp.vdot(state.position, state.position))
            moved = carry._replace(
                sampler=state,
                minibatch=scheme_state,
                step=jnp.where(finite, number, carry.step),
                nonfinite_step=jnp.where(finite, 0, number),
            )
            if refresh is None:
                return record(moved, sums, number, finite)
            return lax.cond(
                finite & (number % num_integration_steps == 0),
                lambda: record(moved, sums, number // num_integration_steps, finite),
                lambda: (moved, sums),
            )

        def record(carry: Carry, sums: PyTree, draw: Array, finite: Array) -> tuple[Carry, PyTree]:
            # Every draw is written to the slot of its stride; the last one, a multiple of
            # the stride, stays. A draw that is not finite is outside the count of draws.
            slot = (draw - 1) // carry.stride
            position, gradient = carry.sampler.position, carry.sampler.gradient
            positions = lax.dynamic_update_index_in_dim(carry.positions, position, slot, 0)
            gradients = carry.gradients
            if self.keep_gradients:
                gradients = lax.dynamic_update_index_in_dim(gradients, gradient, slot, 0)
            delta = position - carry.origin
            features = self._features(delta, gradient)
            sums = jax.tree.map(lambda s, f: jnp.where(finite, s + f, s), sums, features)
            block = (draw - 1) // carry.block_length

            def added(blocks: Array, feature: Array) -> Array:
                before = lax.dynamic_index_in_dim(blocks, block, 0, keepdims=False)
                after = jnp.where(finite, before + feature, before)
                return lax.dynamic_update_index_in_dim(blocks, after, block, 0)

            blocks = jax.tree.map(added, carry.blocks, self._block_features(delta, gradient))
            return carry._replace(positions=positions, gradients=gradients, blocks=blocks), sums

        features = jax.eval_shape(self._features, carry.origin, carry.origin)
        zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), features)
        return lax.while_loop(going, one_step, (carry, zeros))


def advance(
    program: ChainProgram,
    chain: Chain,
    budget: Budget,
    clock: Clock = time.perf_counter,
    dispatches: list[int] | None = None,
) -> Chain:
    """Continue ``chain`` by a budget of seconds or steps. Consumes ``chain``.

    With seconds, it overshoots by at most 2 % of the budget or one gradient step,
    whichever is larger, as long as the machine's speed is steady, and makes no step at
    all when half a step would not fit. A chain that turns non-finite stops at once, at
    ``chain.nonfinite_step``. Neither compilation nor the padding of a compact chain's buffer
    is inside the budget. At ``MAX_STEPS`` steps a chain ends. The steps of every dispatch are
    appended to ``dispatches``: as many budgets of steps make the same chain, bit for bit.
    """
    program.compile(chain.position)
    hyperparameters = chain.hyperparameters
    carry = jax.block_until_ready(program.restore(chain.carry))
    sums, step = chain.sums, chain.num_steps
    began = clock()
    length, stride = hyperparameters.num_integration_steps, int(carry.stride)
    block_length = int(carry.block_length)
    num_blocks = next((len(leaf) for leaf in jax.tree.leaves(carry.blocks)), None)
    nonfinite_step = chain.nonfinite_step
    last_step = None if budget.steps is None else step + budget.steps
    cost_s = program.cost_per_step_s
    spent_s = 0.0
    while nonfinite_step is None:
        if last_step is not None:
            wanted = last_step - step
        else:
            wanted = _steps_that_fit((budget.seconds or 0.0) - spent_s, budget.seconds, cost_s)
        wanted = min(wanted, MAX_STEPS - step)
        if wanted <= 0:
            break
        room = program.capacity * stride * length - step
        if room <= 0:
            carry, stride = program.make_room(carry), 2 * stride
            continue
        if num_blocks is not None:
            block_room = num_blocks * block_length * length - step
            if block_room <= 0:
                carry, block_length = program.merge_blocks(carry), 2 * block_length
                continue
            room = min(room, block_room)
        num_steps = min(wanted, room, MAX_STEPS_PER_DISPATCH)
        if dispatches is not None:
            dispatches.append(num_steps)
        before = clock()
        carry, new_sums = program.dispatch(carry, hyperparameters, num_steps)
        done, nonfinite = (
            int(value) for value in jax.device_get((carry.step, carry.nonfinite_step))
        )
        sums = jax.tree.map(lambda total, new: total + np.asarray(new, np.float64), sums, new_sums)
        now = clock()
        cost_s = (now - before) / num_steps
        step, nonfinite_step, spent_s = done, nonfinite or None, now - began
    if step == MAX_STEPS:
        logger.warning("a chain ends at %d steps, the most it can count", MAX_STEPS)
    if cost_s is not None and nonfinite_step is None:
        program.cost_per_step_s = cost_s
    elapsed_s = chain.elapsed_s + clock() - began
    return Chain(hyperparameters, carry, sums, elapsed_s)


def _steps_that_fit(remaining_s: float, budget_s: float | None, cost_s: float | None) -> int:
    if cost_s is None:
        return 1
    if remaining_s <= max(CLOSE_ENOUGH * (budget_s or 0.0), 0.5 * cost_s):
        return 0
    return max(1, int(SHARE_PER_DISPATCH * remaining_s / cost_s)) if cost_s > 0 else 1


def _traced(hyperparameters: Hyperparameters, num_steps: int) -> tuple[Array, Array, Array]:
    return (
        jnp.float32(hyperparameters.step_size),
        jnp.int32(hyperparameters.num_integration_steps),
        jnp.int32(num_steps),
    )


def _compress(carry: Carry) -> Carry:
    def every_other(buffer: Array) -> Array:
        return jnp.zeros_like(buffer).at[: buffer.shape[0] // 2].set(buffer[1::2])

    return carry._replace(
        stride=2 * carry.stride,
        positions=every_other(carry.positions),
        gradients=every_other(carry.gradients),
    )


def _no_features(delta: Array, gradient: Array) -> PyTree:
    return ()


def _empty_blocks(features: FeatureFn, position: Array) -> PyTree:
    """Zeros ``[num_blocks, ...]`` for sums of the features at one position."""
    shapes = jax.eval_shape(features, position, position)
    num_bytes = 4 * sum(shape.size for shape in jax.tree.leaves(shapes))
    num_blocks = MAX_BLOCKS
    while num_blocks > MIN_BLOCKS and num_blocks * num_bytes > BLOCK_SUMS_BYTES:
        num_blocks //= 2
    return jax.tree.map(lambda shape: jnp.zeros((num_blocks, *shape.shape), jnp.float32), shapes)


def _merge_blocks(carry: Carry) -> Carry:
    def merged(blocks: Array) -> Array:
        half = len(blocks) // 2
        pairs = blocks.reshape(half, 2, *blocks.shape[1:]).sum(axis=1)
        return jnp.zeros_like(blocks).at[:half].set(pairs)

    return carry._replace(
        blocks=jax.tree.map(merged, carry.blocks), block_length=2 * carry.block_length
    )
