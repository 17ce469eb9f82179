"""MAP estimates kept between runs: every run of a model starts from the same one.

In high dimension the search takes as long as a tuning. Its result depends on the model, on the
settings of the search and on its seed, which is not the run's: runs of several seeds compare
chains, not starts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli import artifacts
from mamba_cli.map_estimate import MapEstimate, MapSettings, describe, find_map
from mamba_cli.types import Model, Reporter

ALGORITHM_VERSION = 1
"""Part of the digest: raised when the search would end somewhere else."""


def cache_path(model: Model, settings: MapSettings, seed: int, folder: Path) -> Path:
    """``<folder>/<model>-<digest>.npz``, the digest that of all the result depends on."""
    question = {
        "algorithm": ALGORITHM_VERSION,
        "model": model.name,
        "model_digest": model.digest,
        "settings": asdict(settings),
        "seed": seed,
    }
    digest = hashlib.sha256(artifacts.to_json(question).encode()).hexdigest()[:16]
    return folder / f"{model.name}-{digest}.npz"


def cached_map(
    model: Model,
    settings: MapSettings,
    *,
    seed: int,
    cache_dir: Path,
    reporter: Reporter,
    clock: Callable[[], float] = time.perf_counter,
) -> MapEstimate:
    """The MAP, found before or now; see :func:`~mamba_cli.map_estimate.find_map`.

    A result that is found is written to ``cache_dir``, and one that is there is taken as it is,
    its ``elapsed_s`` that of the search that found it.

    Raises
    ------
    NothingUsableError
        The log density or its gradient is not finite.
    StorageError
        The result could not be written.
    """
    path = cache_path(model, settings, seed, cache_dir)
    known = artifacts.read_arrays(path)
    if known is not None:
        arrays, meta = known
        estimate = MapEstimate(position=jnp.asarray(arrays["position"]), **meta)
        reporter.message(f"MAP taken from {path.name}: {describe(estimate)}")
        return estimate
    estimate = find_map(
        model, rng_key=jax.random.key(seed), settings=settings, reporter=reporter, clock=clock
    )
    meta = estimate._asdict()
    position = np.asarray(meta.pop("position"))
    if np.isfinite(estimate.relative_gradient_norm):  # infinity would come back as nothing
        artifacts.write_arrays(path, {"position": position}, meta)
    return estimate
