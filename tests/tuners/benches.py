"""Workbenches on a fake clock, rewards that look at step sizes, and a store in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from fake_time import FakeClock, TimedProgram, counting_without_refresh
from gaussian_model import GaussianMean, gaussian_mean

from mamba_cli import gradients, minibatch
from mamba_cli.types import ArmRecord, Hyperparameters, Sampler, ScoredDraws
from mamba_cli.workbench import Workbench

MODEL = gaussian_mean(num_data=64, dim=3)
CAPACITY = 64


@cache
def _compiled(sampler: Sampler, batch_size: int) -> TimedProgram:
    program = TimedProgram(
        gradients.standard(MODEL),
        sampler,
        minibatch.without_replacement,
        batch_size,
        capacity=CAPACITY,
        keep_gradients=True,
    )
    program.clock = FakeClock()
    program.compile(np.zeros(3, np.float32))
    return program


def fake_bench(
    sampler: Sampler = counting_without_refresh,
    costs_s: Mapping[int, float] | None = None,
    *,
    start: np.ndarray | None = None,
    model: GaussianMean = MODEL,
) -> Workbench:
    """A workbench whose steps take ``costs_s[batch_size]`` seconds of its fake clock.

    Programs are compiled once per session and lent, so no test pays for compilation.
    """
    clock = FakeClock()
    bench = Workbench(
        model,
        np.zeros(3, np.float32) if start is None else start,
        gradients.standard(model),
        sampler,
        minibatch.without_replacement,
        CAPACITY,
        keep_gradients=True,
        clock=clock,
    )
    for batch_size, cost_s in (costs_s or {5: 1 / 1024}).items():
        program = _compiled(sampler, batch_size)
        program.clock, program.cost_s, program.dispatched = clock, cost_s, ()
        program.cost_per_step_s = cost_s
        bench._programs[batch_size] = program
    return bench


def arms_of(*step_sizes: float, batch_size: int = 5, length: int = 1) -> list[Hyperparameters]:
    return [Hyperparameters(step_size, batch_size, length) for step_size in step_sizes]


def step_size_of(draws: ScoredDraws) -> float:
    """The step size of the counting sampler, read off its draws."""
    last = np.asarray(draws.positions)[-1]
    return float(last[0] / last[2])


@dataclass
class FakeReward:
    """``value(step size)`` of draws of the counting sampler; remembers what it was shown."""

    value: Callable[[float], float]
    higher_is_better: bool = False
    gradients: str = "stochastic"
    name: str = "fake"
    clock: FakeClock | None = None
    cost_s: float = 0.0
    seen: list[ScoredDraws] = field(default_factory=list)

    def __call__(self, draws: ScoredDraws) -> float:
        if self.clock is not None:
            self.clock.now += self.cost_s
        if not np.all(np.isfinite(draws.positions)) or len(np.unique(draws.positions)) < 2:
            raise AssertionError("a reward must not be shown draws that cannot be scored")
        if float(np.max(np.abs(draws.positions))) < 0.1:  # the warm-up, around a start of 0
            return 0.0
        self.seen.append(draws)
        return self.value(step_size_of(draws))


def nearest_to(target: float) -> Callable[[float], float]:
    return lambda step_size: abs(math.log2(step_size / target)) + 1.0


class Killed(Exception):
    """The process ended here."""


@dataclass
class MemoryStore:
    """``Checkpoints`` in memory; ``kill_after`` counts the writes that still succeed."""

    records: list[ArmRecord] = field(default_factory=list)
    checkpoints: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = field(
        default_factory=dict
    )
    kill_after: int | None = None

    def _alive(self) -> None:
        if self.kill_after is not None:
            if self.kill_after == 0:
                raise Killed
            self.kill_after -= 1

    def write_tuning(self, records: list[ArmRecord]) -> None:
        self._alive()
        self.records = list(records)

    def read_tuning(self) -> list[ArmRecord]:
        return list(self.records)

    def save_checkpoint(
        self, name: str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
    ) -> None:
        self._alive()
        copies = {key: np.array(array) for key, array in arrays.items()}
        self.checkpoints[name] = (copies, copy.deepcopy(dict(meta)))

    def load_checkpoint(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        return self.checkpoints.get(name)

    def drop_checkpoint(self, name: str) -> None:
        self.checkpoints.pop(name, None)


def plain(records: list[ArmRecord]) -> list[str]:
    """Records that can be compared: NaN equals NaN."""
    return [repr(tuple(record)) for record in records]
