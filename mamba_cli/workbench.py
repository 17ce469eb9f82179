"""What tuners and evaluation work with: the model, its start, and compiled chains."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli.chain import ChainProgram, Clock, MinibatchScheme, NoiseKeyFn
from mamba_cli.errors import is_out_of_memory
from mamba_cli.gradients import (
    GradientEstimator,
    available_cores,
    full_gradients,
    full_log_densities,
)
from mamba_cli.noise import threefry
from mamba_cli.pacing import Pace, WallClock
from mamba_cli.types import (
    Arrangement,
    Array,
    FeatureFn,
    HasDensityPredictions,
    HasSquaredError,
    Hyperparameters,
    Model,
    PyTree,
    Sampler,
)
from mamba_cli.whitening import Whitening

PREDICTION_CHUNK = 16
"""Draws whose predictions are averaged per dispatch."""

SumFn = Callable[[Array, Array, PyTree], Array]


@dataclass
class Seconds:
    """Where the time of a run went, in seconds."""

    compile: float = 0.0
    calibration: float = 0.0
    sampling: float = 0.0
    gradients: float = 0.0
    reward: float = 0.0
    whitening: float = 0.0
    check: float = 0.0


@dataclass
class Workbench:
    """A model ready to be sampled.

    Parameters
    ----------
    model
        The posterior.
    start
        Where chains start: the MAP, ``[dim]``.
    estimator
        The stochastic gradient that drives the sampler.
    sampler
        Makes the kernel for a gradient.
    scheme
        How minibatches are drawn.
    capacity
        Draws a chain's buffer holds; at least twice what is scored gives evenly spaced draws.
    keep_gradients
        Whether chains keep the sampler's own gradients (stochastic rewards read them).
    block_features
        What chains sum over blocks of draws, for a reward that is read off these sums.
    whitening
        The coordinates of rewards that ask for them.
    noise
        Turns the key of a step into that of the generator of its noise.
    clock
        Seconds, monotonic; tests put their own here.
    pace
        What a chain's seconds are: the clock's, or steps at a measured cost.
    """

    model: Model
    start: np.ndarray
    estimator: GradientEstimator
    sampler: Sampler
    scheme: MinibatchScheme
    capacity: int
    keep_gradients: bool = False
    block_features: FeatureFn | None = None
    whitening: Whitening | None = None
    noise: NoiseKeyFn = threefry
    clock: Clock = time.perf_counter
    pace: Pace = field(default_factory=WallClock)
    seconds: Seconds = field(default_factory=Seconds)
    _programs: dict[int, ChainProgram] = field(default_factory=dict)
    _arranged: dict[Arrangement | None, PyTree] = field(default_factory=dict)
    _full_gradients: Callable[[Array | np.ndarray], np.ndarray] | None = None
    _full_log_densities: Callable[[np.ndarray], np.ndarray] | None = None
    _predict_sum: SumFn | None = None
    _prediction_sum: SumFn | None = None
    _squared_error_sum: SumFn | None = None
    _square_sum: SumFn | None = None

    def program(self, batch_size: int) -> tuple[ChainProgram, float]:
        """The compiled program for a batch size, and the seconds its compilation took just now."""
        program = self._uncompiled(batch_size)
        compile_s = program.compile(self.start, self.clock)
        self.seconds.compile += compile_s
        return program, compile_s

    def compile(self, batch_sizes: Iterable[int]) -> dict[int, float]:
        """Compile the programs of several batch sizes side by side, a thread per core.

        Returns the seconds each took, overlapping; the workbench counts the seconds of all
        together. One that does not fit into memory is left to :meth:`program`, which says so.
        """
        programs = {size: self._uncompiled(size) for size in dict.fromkeys(batch_sizes)}
        began = self.clock()
        for program in programs.values():
            program.rows()  # before the threads, which share them

        def seconds_of(program: ChainProgram) -> float:
            try:
                return program.compile(self.start, self.clock)
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                return 0.0

        with ThreadPoolExecutor(available_cores()) as pool:
            taken = list(pool.map(seconds_of, programs.values()))
        self.seconds.compile += self.clock() - began
        return dict(zip(programs, taken, strict=True))

    def calibrate(self, arms: Iterable[Hyperparameters]) -> None:
        """Let the pace measure, once for each shape among ``arms``, what it has to.

        Called when the programs are compiled and nothing else runs.
        """
        began = self.clock()
        shapes = {(arm.batch_size, arm.num_integration_steps): arm for arm in arms}
        programs = ((self._uncompiled(arm.batch_size), arm) for arm in shapes.values())
        self.pace.prepare(programs, self.start, self.clock)
        self.seconds.calibration += self.clock() - began

    def _uncompiled(self, batch_size: int) -> ChainProgram:
        if batch_size not in self._programs:
            self._programs[batch_size] = ChainProgram(
                self.estimator,
                self.sampler,
                self.scheme,
                batch_size,
                capacity=self.capacity,
                keep_gradients=self.keep_gradients,
                block_features=self.block_features,
                noise=self.noise,
                arranged=self._arranged,
            )
        return self._programs[batch_size]

    def scores(self, positions: np.ndarray) -> np.ndarray:
        """Gradients of the log posterior over all rows, ``[m, dim]`` for ``[m, dim]``."""
        if self._full_gradients is None:
            self._full_gradients = full_gradients(self.model)
        return self._full_gradients(positions)

    def log_densities(self, positions: np.ndarray) -> np.ndarray:
        """Log posterior density over all rows, up to a constant, ``[m]`` for ``[m, dim]``."""
        if self._full_log_densities is None:
            self._full_log_densities = full_log_densities(self.model)
        return self._full_log_densities(positions)

    def posterior_predictive(self, positions: np.ndarray, inputs: PyTree = None) -> Array:
        """The mean over draws ``[m, dim]`` of the model's prediction for ``inputs``.

        Without ``inputs``, for the model's test inputs. Of densities it is the log of the mean; see
        :class:`~mamba_cli.types.HasDensityPredictions`.
        """
        model = self.model
        inputs = model.test_inputs if inputs is None else inputs
        if isinstance(model, HasDensityPredictions) and model.predicts_densities:
            if self._predict_sum is None:
                self._predict_sum = jax.jit(partial(_log_sum_over_draws, model.log_prediction))
            return _log_mean_over_draws(self._predict_sum, positions, inputs)
        if self._predict_sum is None:
            self._predict_sum = jax.jit(partial(_sum_over_draws, model.predict))
        return _mean_over_draws(self._predict_sum, positions, inputs)

    def predictive_std(self, positions: np.ndarray) -> np.ndarray:
        """Standard deviation over draws ``[m, dim]`` of the predictions for the test inputs."""
        if self._prediction_sum is None:
            self._prediction_sum = jax.jit(partial(_sum_over_draws, self.model.predict))
        mean = _mean_over_draws(self._prediction_sum, positions, self.model.test_inputs)
        if self._square_sum is None:

            def square(position: Array, inputs: tuple[PyTree, Array]) -> Array:
                return (self.model.predict(position, inputs[0]) - inputs[1]) ** 2

            self._square_sum = jax.jit(partial(_sum_over_draws, square))
        inputs = (self.model.test_inputs, mean)
        variance = _mean_over_draws(self._square_sum, positions, inputs)
        std = np.sqrt(np.asarray(variance, np.float64) * len(positions) / (len(positions) - 1))
        return np.ravel(std)

    def mse_of_draws(self, positions: np.ndarray) -> float | None:
        """The mean over draws ``[m, dim]`` of each draw's own mean squared error.

        None where the model predicts no numbers.
        """
        model = self.model
        if not isinstance(model, HasSquaredError):
            return None
        if self._squared_error_sum is None:

            def squared_error(position: Array, inputs: PyTree) -> Array:
                return model.squared_error(model.predict(position, inputs))

            self._squared_error_sum = jax.jit(partial(_sum_over_draws, squared_error))
        return float(_mean_over_draws(self._squared_error_sum, positions, model.test_inputs))


def _mean_over_draws(sum_over_draws: SumFn, positions: np.ndarray, inputs: PyTree) -> Array:
    """Mean of a function of position and inputs over draws, ``PREDICTION_CHUNK`` at a time."""
    parts = (sum_over_draws(*chunk, inputs) for chunk in _chunks(positions))
    total: Array = reduce(operator.add, parts)
    return total / len(positions)


def _log_mean_over_draws(log_sum_over_draws: SumFn, positions: np.ndarray, inputs: PyTree) -> Array:
    """Log of the mean over draws of exp of a function; nothing over- or underflows."""
    parts = (
        np.asarray(log_sum_over_draws(*chunk, inputs), np.float64) for chunk in _chunks(positions)
    )
    total: np.ndarray = reduce(np.logaddexp, parts)
    return jnp.asarray(total - np.log(len(positions)), jnp.float32)


def _chunks(positions: np.ndarray) -> Iterator[tuple[Array, Array]]:
    """The draws ``PREDICTION_CHUNK`` at a time; those of weight 0 fill up the last chunk."""
    padding = -len(positions) % PREDICTION_CHUNK
    padded = np.concatenate([positions, np.repeat(positions[-1:], padding, axis=0)])
    weights = np.concatenate([np.ones(len(positions)), np.zeros(padding)])
    for first in range(0, len(padded), PREDICTION_CHUNK):
        part = slice(first, first + PREDICTION_CHUNK)
        yield jnp.asarray(padded[part], jnp.float32), jnp.asarray(weights[part], jnp.float32)


def _sum_over_draws(
    function: Callable[[Array, PyTree], Array], positions: Array, weights: Array, inputs: PyTree
) -> Array:
    def add(total: Array, draw: tuple[Array, Array]) -> tuple[Array, None]:
        position, weight = draw
        # A draw of weight zero is padding: select, so that it cannot spread a NaN.
        return jnp.where(weight > 0, total + function(position, inputs), total), None

    shape = jax.eval_shape(function, positions[0], inputs)
    return lax.scan(add, jnp.zeros(shape.shape, shape.dtype), (positions, weights))[0]


def _log_sum_over_draws(
    function: Callable[[Array, PyTree], Array], positions: Array, weights: Array, inputs: PyTree
) -> Array:
    """log sum exp of ``function`` over draws, relative to the largest value so far."""

    def add(carry: tuple[Array, Array], draw: tuple[Array, Array]) -> tuple[Any, None]:
        peak, total = carry
        value = jnp.where(draw[1] > 0, function(draw[0], inputs), -jnp.inf)
        higher = jnp.maximum(peak, value)
        # Where no draw has a density yet, or one has an infinite one, there is nothing to scale by.
        scale = jnp.where(jnp.isfinite(higher), higher, 0.0)
        return (higher, total * jnp.exp(peak - scale) + jnp.exp(value - scale)), None

    shape = jax.eval_shape(function, positions[0], inputs)
    start = (jnp.full(shape.shape, -jnp.inf), jnp.zeros(shape.shape))
    peak, total = lax.scan(add, start, (positions, weights))[0]
    return jnp.where(jnp.isfinite(peak), peak, 0.0) + jnp.log(total)
