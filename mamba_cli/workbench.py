"""What tuners and evaluation work with: the model, its start, and compiled chains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli.chain import ChainProgram, Clock, MinibatchScheme
from mamba_cli.errors import is_out_of_memory
from mamba_cli.gradients import GradientEstimator, available_cores, full_gradients
from mamba_cli.types import Array, Model, PyTree, Sampler

PREDICTION_CHUNK = 16
"""Draws whose predictions are averaged per dispatch."""


@dataclass
class Seconds:
    """Where the time of a run went, in seconds."""

    compile: float = 0.0
    sampling: float = 0.0
    gradients: float = 0.0
    reward: float = 0.0


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
    clock
        Seconds, monotonic; tests put their own here.
    """

    model: Model
    start: np.ndarray
    estimator: GradientEstimator
    sampler: Sampler
    scheme: MinibatchScheme
    capacity: int
    keep_gradients: bool = False
    clock: Clock = time.perf_counter
    seconds: Seconds = field(default_factory=Seconds)
    _programs: dict[int, ChainProgram] = field(default_factory=dict)
    _full_gradients: Callable[[Array | np.ndarray], np.ndarray] | None = None
    _predict_sum: Callable[[Array, Array, PyTree], Array] | None = None

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

    def _uncompiled(self, batch_size: int) -> ChainProgram:
        if batch_size not in self._programs:
            self._programs[batch_size] = ChainProgram(
                self.estimator,
                self.sampler,
                self.scheme,
                batch_size,
                capacity=self.capacity,
                keep_gradients=self.keep_gradients,
            )
        return self._programs[batch_size]

    def scores(self, positions: np.ndarray) -> np.ndarray:
        """Gradients of the log posterior over all rows, ``[m, dim]`` for ``[m, dim]``."""
        if self._full_gradients is None:
            self._full_gradients = full_gradients(self.model)
        return self._full_gradients(positions)

    def posterior_predictive(self, positions: np.ndarray) -> Array:
        """The mean over draws ``[m, dim]`` of the model's prediction for its test inputs."""
        if self._predict_sum is None:
            self._predict_sum = jax.jit(self._sum_of_predictions)
        padding = -len(positions) % PREDICTION_CHUNK
        padded = np.concatenate([positions, np.repeat(positions[-1:], padding, axis=0)])
        weights = np.concatenate([np.ones(len(positions)), np.zeros(padding)])
        total = None
        for first in range(0, len(padded), PREDICTION_CHUNK):
            part = slice(first, first + PREDICTION_CHUNK)
            added = self._predict_sum(
                jnp.asarray(padded[part], jnp.float32),
                jnp.asarray(weights[part], jnp.float32),
                self.model.test_inputs,
            )
            total = added if total is None else total + added
        assert total is not None
        return total / len(positions)

    def _sum_of_predictions(self, positions: Array, weights: Array, inputs: PyTree) -> Array:
        def add(total: Array, draw: tuple[Array, Array]) -> tuple[Array, None]:
            position, weight = draw
            # A draw of weight zero is padding: select, so that it cannot spread a NaN.
            prediction = self.model.predict(position, inputs)
            return jnp.where(weight > 0, total + prediction, total), None

        shape = jax.eval_shape(self.model.predict, positions[0], inputs)
        return lax.scan(add, jnp.zeros(shape.shape, shape.dtype), (positions, weights))[0]
