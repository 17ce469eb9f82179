"""A posterior in the user's own terms: mean, sd and quantiles of each named parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli import artifacts
from mamba_cli.types import HasNamedParameters

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}

COLUMNS = ("repeat", "parameter", "mean", "sd", *QUANTILES, "num_draws")


def named_draws(model: HasNamedParameters, positions: np.ndarray) -> dict[str, np.ndarray]:
    """The parameters at each position ``[num_draws, dim]``, by name, ``[num_draws, ...]``.

    One draw after the other, so that what the model computes on the way is needed once.
    """
    values = jax.jit(lambda stacked: lax.map(model.constrain, stacked))(
        jnp.asarray(positions, jnp.float32)
    )
    return {name: np.asarray(array) for name, array in values.items()}


def summarise(draws: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """One row a number: ``sigma``, ``slopes[0]``, ``weights[0,1]``, in float64.

    The sd has the divisor n - 1; it is empty for a single draw.
    """
    rows = []
    for name, array in draws.items():
        flat = np.asarray(array, np.float64).reshape(len(array), -1)
        cuts = np.quantile(flat, list(QUANTILES.values()), axis=0)
        for column, index in enumerate(np.ndindex(array.shape[1:])):
            place = f"[{','.join(map(str, index))}]" if index else ""
            values = flat[:, column]
            rows.append(
                {
                    "parameter": name + place,
                    "mean": values.mean(),
                    "sd": values.std(ddof=1) if len(values) > 1 else None,
                    **dict(zip(QUANTILES, cuts[:, column], strict=True)),
                    "num_draws": len(values),
                }
            )
    return rows


def write_parameters(
    path: Path, model: HasNamedParameters, repeat: int, positions: np.ndarray
) -> None:
    """Write the parameters of one repeat to ``path``, after those of the repeats before it.

    Raises
    ------
    StorageError
        The file could not be written.
    """
    _, earlier = artifacts.read_table(path)
    kept: list[dict[str, Any]] = [row for row in earlier if int(row["repeat"]) < repeat]
    new = summarise(named_draws(model, positions)) if len(positions) else []
    artifacts.write_table(path, COLUMNS, [*kept, *({"repeat": repeat, **row} for row in new)])
