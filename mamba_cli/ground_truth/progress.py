"""How far the chains are, and what is kept of their draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass
class Moments:
    """Running mean and sum of squared deviations from it."""

    mean: np.ndarray  # [dim], float64
    squares: np.ndarray  # [dim], float64
    count: int = 0

    @classmethod
    def zero(cls, dim: int) -> Moments:
        return cls(np.zeros(dim), np.zeros(dim))

    def add(self, values: np.ndarray) -> None:
        """Merge ``[n, dim]`` values (Chan, Golub and LeVeque, 1983)."""
        count = len(values)
        mean = values.mean(axis=0, dtype=np.float64)
        shift = mean - self.mean
        total = self.count + count
        self.squares += ((values - mean) ** 2).sum(axis=0)
        self.squares += shift**2 * (self.count * count / total)
        self.mean += shift * (count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        result: np.ndarray = np.sqrt(self.squares / (self.count - 1))
        return result


@dataclass
class Progress:
    """How far the chains are, and the running moments of their draws."""

    positions: Moments
    predictions: Moments  # of no dimension where positions are the criterion
    # Of the gradients in z since the last change of scale, over all chains; [dim]
    squared_gradients: np.ndarray
    num_steps: int = 0  # of each chain, warm-up included
    num_gradients: int = 0  # in the squared gradients
    num_blocks: int = 0
    num_leapfrogs: int = 0
    num_divergences: int = 0
    sum_accept: float = 0.0
    elapsed_s: float = 0.0
    warmup_s: float = 0.0
    compile_s: float = 0.0

    @classmethod
    def start(cls, dim: int, num_predictions: int) -> Progress:
        return cls(Moments.zero(dim), Moments.zero(num_predictions), np.zeros(dim))

    def counters(self) -> dict[str, int | float]:
        return {k: v for k, v in vars(self).items() if isinstance(v, int | float)}

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "mean": self.positions.mean,
            "squares": self.positions.squares,
            "prediction_mean": self.predictions.mean,
            "prediction_squares": self.predictions.squares,
            "squared_gradients": self.squared_gradients,
        }

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Progress:
        count = int(meta["num_moments"])
        return cls(
            Moments(arrays["mean"], arrays["squares"], count),
            Moments(arrays["prediction_mean"], arrays["prediction_squares"], count),
            arrays["squared_gradients"],
            **meta["counters"],
        )


class Kept(NamedTuple):
    """What stays of a block of draws: some of the positions, all of the potentials."""

    z: np.ndarray  # [num_kept, num_chains, dim], float32
    potentials: np.ndarray  # [num_draws, num_chains]
