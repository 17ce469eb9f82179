"""Chains on a clock that only moves when a step is made, and a sampler that only counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mamba_cli.chain import Carry, ChainProgram, Clock
from mamba_cli.types import Array, GradientFn, Hyperparameters, Kernel, PyTree


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TimedProgram(ChainProgram):
    """A program whose steps take ``cost_s`` each, and its dispatches ``overhead_s`` more."""

    clock: FakeClock
    cost_s: float = 1.0
    overhead_s: float = 0.0
    compiling_s: float = 0.0
    dispatched: tuple[int, ...] = ()

    def dispatch(
        self, carry: Carry, hyperparameters: Hyperparameters, num_steps: int
    ) -> tuple[Carry, PyTree]:
        before = int(carry.step)
        carry, sums = super().dispatch(carry, hyperparameters, num_steps)
        self.dispatched += (num_steps,)
        made = int(carry.step) - before + int(carry.nonfinite_step > 0)
        self.clock.now += self.overhead_s + made * self.cost_s
        return carry, sums

    def compile(self, position: np.ndarray, clock: Clock | None = None) -> float:
        if self._run is not None:
            return 0.0
        self.clock.now += self.compiling_s
        return self.compiling_s + super().compile(position, self.clock)


class CountingState(NamedTuple):
    position: Array
    gradient: Array


def counting(gradient: GradientFn) -> Kernel:
    """Counts instead of sampling: where a step, a refresh or a step size is lost, it shows.

    The position is (h times steps, refreshes, steps since the last refresh), relative to the
    start. The gradient is minus the position. A negative h counts steps by one, and makes step
    number -h not finite.
    """

    def at(position: Array) -> CountingState:
        return CountingState(position, -position)

    def init(rng_key: Array, position: Array, minibatch: Any, step_size: Array) -> CountingState:
        return at(position)

    def step(rng_key: Array, state: Any, minibatch: Any, step_size: Array) -> CountingState:
        by = jnp.where(step_size < 0, 1.0, step_size)
        moved = state.position + jnp.stack([by, jnp.float32(0), jnp.float32(1)])
        last = (step_size < 0) & (moved[0] >= -step_size)
        return at(jnp.where(last, jnp.inf, moved))

    def refresh(rng_key: Array, state: Any, step_size: Array) -> CountingState:
        position = state.position
        return at(jnp.stack([position[0], position[1] + 1, jnp.float32(0)]))

    return Kernel(init, step, refresh)


def counting_without_refresh(gradient: GradientFn) -> Kernel:
    return counting(gradient)._replace(refresh=None)
