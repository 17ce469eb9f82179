"""Small models that the tests of the ground truth share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special


@dataclass(frozen=True, eq=False)
class RowModel:
    """What NUTS needs of a model; the rest of the protocol is absent."""

    data: jax.Array
    dim: int
    name: str = "test"
    digest: str = "0"

    @property
    def num_data(self) -> int:
        return int(self.data.shape[0])


@dataclass(frozen=True, eq=False)
class Logistic(RowModel):
    prior_variance: float = 10.0

    def log_prior(self, position: jax.Array) -> jax.Array:
        return -0.5 * jnp.sum(position**2) / self.prior_variance

    def log_likelihood(self, position: jax.Array, minibatch: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.log_sigmoid(minibatch @ position))


def logistic(num_data: int, dim: int, scale: float, seed: int) -> Logistic:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_data, dim)).astype(np.float32)
    labels = rng.random(num_data) < scipy.special.expit(rows @ (scale * rng.normal(size=dim)))
    return Logistic(jnp.asarray(rows * np.where(labels, 1, -1)[:, None], jnp.float32), dim)


def with_start(model: RowModel) -> Any:
    class Started(type(model)):  # type: ignore[misc]
        def initial_position(self, rng_key: jax.Array) -> jax.Array:
            return jnp.zeros(self.dim)

    return Started(model.data, model.dim)


@dataclass(frozen=True, eq=False)
class Linear(RowModel):
    """y ~ N(x.theta, 1), theta ~ N(0, I): rows hold x, then y."""

    def log_prior(self, position: jax.Array) -> jax.Array:
        return -0.5 * jnp.sum(position**2)

    def log_likelihood(self, position: jax.Array, minibatch: jax.Array) -> jax.Array:
        return -0.5 * jnp.sum((minibatch[:, -1] - minibatch[:, :-1] @ position) ** 2)


def _linear() -> Linear:
    """5,001 rows, so two blocks with padding; the two coefficients are correlated by -0.95."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5001, 2)) @ np.linalg.cholesky([[1, 0.95], [0.95, 1]]).T
    x = x.astype(np.float32)
    y = x @ np.asarray([3.0, -2.0]) + rng.normal(size=5001)
    return Linear(jnp.asarray(np.column_stack([x, y]), jnp.float32), 2)


LINEAR = _linear()


def linear_posterior() -> tuple[np.ndarray, np.ndarray]:
    rows = np.asarray(LINEAR.data, np.float64)
    x, y = rows[:, :2], rows[:, 2]
    covariance = np.linalg.inv(x.T @ x + np.eye(2))
    return covariance @ x.T @ y, covariance


@dataclass(frozen=True, eq=False)
class InOnePiece(Linear):
    """The likelihood of all rows from sums; predicts y at x = (1, 0) and at (0, 1)."""

    @property
    def full_data(self) -> dict[str, jax.Array]:
        x, y = self.data[:, :-1], self.data[:, -1]
        return {"xx": x.T @ x, "xy": x.T @ y}

    @property
    def test_inputs(self) -> jax.Array:
        return jnp.eye(2)

    def full_log_likelihood(
        self, position: jax.Array, full_data: dict[str, jax.Array]
    ) -> jax.Array:
        return position @ full_data["xy"] - 0.5 * position @ full_data["xx"] @ position

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return inputs @ position


@dataclass(frozen=True, eq=False)
class Symmetric(InOnePiece):
    """Sign-symmetric: predictions are the squares of the coordinates."""

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.append((inputs @ position) ** 2, 5.0)  # and one that no draw moves

    def full_log_likelihood(
        self, position: jax.Array, full_data: dict[str, jax.Array]
    ) -> jax.Array:
        return -0.5 * jnp.sum((position**2 - 9.0) ** 2)
