"""NUTS compiled once for many tests, and replaced in others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from nuts_runs import PROGRAMS, CountedSampler, independent_samples

from mamba_cli import ground_truth
from mamba_cli.ground_truth import NutsSettings, sampling


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse the programs of one set of shapes: compiling NUTS takes seconds."""
    real = sampling.compile_programs

    def cached(model: Any, keys: Any, starts: Any, target: Any, settings: NutsSettings) -> Any:
        key = (id(model), replace(settings, seed=0, num_draws=99, max_stored_bytes=1))
        if key not in PROGRAMS:
            PROGRAMS[key] = real(model, keys, starts, target, settings)
        return PROGRAMS[key]

    monkeypatch.setattr(sampling, "compile_programs", cached)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> CountedSampler:
    """Stands in for NUTS: 2,000 independent draws at once."""
    counted = CountedSampler(independent_samples())
    monkeypatch.setattr(ground_truth, "sample", counted)
    return counted
