"""A model whose posterior is known in closed form: the mean of Gaussian data."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.types import Array


@dataclass(frozen=True, eq=False)
class GaussianMean:
    """x_i ~ N(theta, v I) with theta ~ N(0, w I); a :class:`mamba_cli.types.Model`.

    The posterior is Gaussian with precision N / v + 1 / w in every coordinate.
    """

    data: Array  # [num_data, dim]
    variance: float = 1.0
    prior_variance: float = 10.0
    name: str = "gaussian_mean"
    digest: str = "0" * 64

    @property
    def dim(self) -> int:
        return int(self.data.shape[1])

    @property
    def num_data(self) -> int:
        return int(self.data.shape[0])

    @property
    def test_inputs(self) -> Array:
        return self.data[:5]

    @property
    def precision(self) -> float:
        return self.num_data / self.variance + 1 / self.prior_variance

    @property
    def posterior_mean(self) -> np.ndarray:
        total = np.asarray(self.data, np.float64).sum(axis=0)
        return total / self.variance / self.precision

    @property
    def posterior_std(self) -> np.ndarray:
        return np.full(self.dim, self.precision**-0.5)

    def initial_position(self, rng_key: Array) -> Array:
        return jnp.zeros(self.dim, jnp.float32)

    def log_prior(self, position: Array) -> Array:
        return -0.5 / self.prior_variance * jnp.sum(position**2)

    def log_likelihood(self, position: Array, minibatch: Array) -> Array:
        return -0.5 / self.variance * jnp.sum((minibatch - position) ** 2)

    def predict(self, position: Array, inputs: Array) -> Array:
        return inputs @ position

    def predictive_metrics(self, prediction: Array) -> dict[str, float]:
        """``rmse`` against the prediction at the posterior mean, and ``accuracy`` made of it."""
        target = np.asarray(self.test_inputs, np.float64) @ self.posterior_mean
        rmse = float(np.sqrt(np.mean((np.asarray(prediction, np.float64) - target) ** 2)))
        return {"rmse": rmse, "accuracy": 1 / (1 + rmse)}


def gaussian_mean(
    num_data: int = 64, dim: int = 3, offset: float = 2.0, variance: float = 1.0, seed: int = 0
) -> GaussianMean:
    noise = np.random.default_rng(seed).standard_normal((num_data, dim)) * np.sqrt(variance)
    return GaussianMean(jax.numpy.asarray(offset + noise, jnp.float32), variance)
