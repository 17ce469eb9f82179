"""Ground truths as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mamba_cli import artifacts
from mamba_cli.ground_truth.result import GroundTruth
from mamba_cli.ground_truth.settings import NutsSettings, digest
from mamba_cli.types import Model

_ARRAYS = (
    "mean",
    "std",
    "r_hat",
    "ess_bulk",
    "ess_tail",
    "prediction_mean",
    "prediction_std",
    "prediction_r_hat",
    "prediction_ess_bulk",
    "prediction_ess_tail",
)

MAX_LISTED = 1_000
"""Longer arrays are summarised in the file for a reader."""


def cache_path(model: Model, settings: NutsSettings, folder: Path) -> Path:
    """``<folder>/<model>-<digest>.npz``."""
    return folder / f"{model.name}-{digest(model, settings)}.npz"


def load(
    model: Model,
    settings: NutsSettings,
    *,
    cache_dir: Path,
    search_dirs: Sequence[Path] = (),
) -> GroundTruth | None:
    """A ground truth computed before: from ``cache_dir``, else the first of ``search_dirs``.

    ``None`` where there is none, or the file is damaged (which is logged as a warning). One that
    was made without predictions is none where these have to converge.
    """
    for folder in (cache_dir, *search_dirs):
        found = artifacts.read_arrays(cache_path(model, settings, folder))
        if found is not None:
            arrays, meta = found
            fields: dict[str, Any] = {**arrays, **meta, "step_sizes": tuple(meta["step_sizes"])}
            truth = GroundTruth(**fields)
            if settings.criterion == "positions" or truth.prediction_std.size:
                return truth
    return None


def save(truth: GroundTruth, path: Path) -> None:
    """Write ``path`` (arrays and all else) and a ``.json`` beside it with the same for a reader.

    Arrays of more than ``MAX_LISTED`` numbers are in float32, and only their range in the JSON.

    Raises
    ------
    StorageError
        A file could not be written.
    """
    everything = truth._asdict()
    arrays = {name: np.asarray(everything.pop(name)) for name in _ARRAYS}
    arrays = {name: array for name, array in arrays.items() if array.size}
    shown: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.size > MAX_LISTED:
            arrays[name] = array.astype(np.float32)
            quantiles = np.quantile(array, [0.0, 0.05, 0.5, 0.95, 1.0]).tolist()
            names = ("smallest", "5 %", "median", "95 %", "largest")
            shown[name] = dict(zip(names, quantiles, strict=True))
        else:
            shown[name] = array
    artifacts.write_json(path.with_suffix(".json"), {**shown, **everything})
    artifacts.write_arrays(path, arrays, everything)
