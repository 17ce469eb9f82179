"""Runs of NUTS on the linear model, and what stands in for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size
from small_posteriors import LINEAR, linear_posterior

from mamba_cli.ground_truth import GroundTruth, NutsSettings, Samples, nuts_ground_truth, sample
from mamba_cli.types import SilentReporter

SETTINGS = NutsSettings(num_draws=3000, num_warmup=300, num_chains=2, block_draws=100)

PROGRAMS: dict[Any, Any] = {}

_WHOLE: list[Samples] = []


class Recorder(SilentReporter):
    """Counts what is reported; raises ``error`` at the ``fail_at``-th update."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        self.messages: list[str] = []
        self.notes: list[str] = []
        self.amounts: list[float] = []
        self.total = 0.0
        self.finished = False
        self.fail_at, self.error = fail_at, error

    def message(self, text: str) -> None:
        self.messages.append(text)

    def start(self, description: str, total: float, unit: str) -> None:
        self.total = total

    def update(self, amount: float, note: str = "") -> None:
        self.amounts.append(amount)
        self.notes.append(note)
        if len(self.amounts) == self.fail_at:
            raise self.error

    def finish(self) -> None:
        self.finished = True


def sample_linear(settings: NutsSettings = SETTINGS, **options: Any) -> Samples:
    return sample(LINEAR, jnp.asarray(linear_posterior()[0], jnp.float32), settings, **options)


def whole_run() -> Samples:
    """The run that others are compared with: not interrupted, all draws kept."""
    if not _WHOLE:
        _WHOLE.append(sample_linear())
    return _WHOLE[0]


def standard_errors(samples: Samples, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the mean and of the standard deviation, from the ESS of draws and of their squares."""
    squares = (samples.draws - samples.mean) ** 2
    ess = effective_sample_size(samples.draws)
    ess_of_squares = effective_sample_size(squares)
    return std / np.sqrt(ess), std / np.sqrt(2 * ess_of_squares)


def independent_samples(**changes: Any) -> Samples:
    draws = np.random.default_rng(0).normal(size=(4, 500, 2))
    flat = draws.reshape(-1, 2)
    samples = Samples(
        draws=draws,
        thinning=1,
        log_densities=np.random.default_rng(1).normal(size=(4, 500)),
        mean=flat.mean(axis=0),
        std=flat.std(axis=0, ddof=1),
        prediction_mean=np.zeros(0),
        prediction_std=np.zeros(0),
        num_divergences=0,
        num_leapfrogs=6000,
        mean_accept=0.9,
        step_sizes=(0.5, 0.5, 0.5, 0.5),
        elapsed_s=3.0,
        warmup_s=1.0,
        compile_s=2.0,
    )
    return samples._replace(**changes)


class CountedSampler:
    def __init__(self, samples: Samples) -> None:
        self.samples, self.calls = samples, 0

    def __call__(self, *arguments: Any, **options: Any) -> Samples:
        self.calls += 1
        return self.samples


def ask(folder: Path, settings: NutsSettings = SETTINGS, **options: Any) -> GroundTruth:
    return nuts_ground_truth(LINEAR, jnp.zeros(2), settings, cache_dir=folder, **options)
