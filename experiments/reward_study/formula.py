r"""SGLD's step size from what it is predicted to do near the mode, without running it.

Near the mode the posterior is N(mode, H^-1) and a minibatch gradient of n of N rows is the full one
with noise of covariance S(n) = N^2 (1/n - 1/N) cov(g_i), g_i the gradients of the rows at the mode.
One step of SGLD, x <- x - (h/2) (H x + noise) + sqrt(h) xi, then leaves the covariance C with

.. math::
    C = A C A + h I + \tfrac{h^2}{4} S, \qquad A = I - \tfrac h2 H,

and in the limit of small h H, that of an Ornstein-Uhlenbeck process,

.. math::
    \tfrac12 (H C + C H) = I + \tfrac h4 S.

Negrea, Yang, Feng, Roy and Huggins, "Statistical inference with stochastic gradient algorithms"
(arXiv 2207.12395, 2022), prove such a limit for large samples and tune by its covariance. Here it
is to be that of the posterior within a tolerance: for every batch size the largest h is taken that
keeps all standard deviations, in any direction, within it, and of these pairs the one with the
least time for an independent draw of the slowest direction, cost (1 + a) / (1 - a) with a the
largest |1 - h lambda / 2|. The limit says nothing about discretisation, and allows any h where
n = N: its h stays at or below 2 / lambda_max, beyond which a step overshoots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.types import Hyperparameters, Model

TOLERANCE = 0.1
"""Relative error of a standard deviation."""

SMALLEST = 1e-9
"""h lambda_max from which the search starts."""


@dataclass(frozen=True)
class Local:
    """The curvature's eigenvalues and the gradient noise in its eigenvectors.

    Shapes: ``values`` ``[dim]``, ascending; ``row_covariance`` ``[dim, dim]``, cov(g_i).
    """

    values: np.ndarray
    row_covariance: np.ndarray
    num_data: int

    def noise(self, batch_size: int) -> np.ndarray:
        """S(n), of minibatches without replacement."""
        share = 1.0 / batch_size - 1.0 / self.num_data
        return self.num_data**2 * share * self.row_covariance

    def covariance(self, step_size: float, batch_size: int, *, limit: bool = False) -> np.ndarray:
        """The stationary C, of the chain or of its limit; ``step_size`` below 4 / lambda_max."""
        identity, noise = np.eye(len(self.values)), self.noise(batch_size)
        if limit:
            rates = 0.5 * (self.values[:, None] + self.values)
            return np.asarray((identity + step_size / 4 * noise) / rates)
        kept = 1.0 - 0.5 * step_size * self.values
        forced = step_size * identity + step_size**2 / 4 * noise
        return np.asarray(forced / (1.0 - kept[:, None] * kept))

    def worst_sd(self, step_size: float, batch_size: int, *, limit: bool = False) -> float:
        """The largest relative error of a standard deviation, over all directions."""
        roots = np.sqrt(self.values)
        whitened = roots[:, None] * self.covariance(step_size, batch_size, limit=limit) * roots
        return float(np.max(np.abs(np.sqrt(np.linalg.eigvalsh(whitened)) - 1.0)))

    def steps_per_draw(self, step_size: float) -> float:
        """Integrated autocorrelation time of the slowest direction."""
        slowest = float(np.max(np.abs(1.0 - 0.5 * step_size * self.values)))
        return (1.0 + slowest) / (1.0 - slowest)


def local(model: Model, mode: np.ndarray, precision: np.ndarray) -> Local:
    """What the formula needs, with the Hessian ``[dim, dim]`` at the mode."""
    values, vectors = np.linalg.eigh(precision)

    def of_row(row: object) -> jax.Array:
        one = jax.tree.map(lambda leaf: leaf[None], row)
        return jax.grad(model.log_likelihood)(jnp.asarray(mode, jnp.float32), one)

    rows = np.asarray(jax.jit(jax.vmap(of_row))(model.data), np.float64) @ vectors
    return Local(values, np.atleast_2d(np.cov(rows.T)), model.num_data)


def choose(
    at: Local, costs_s: Mapping[int, float], *, limit: bool, tolerance: float = TOLERANCE
) -> Hyperparameters:
    """The step size and batch size with the least time for an independent draw."""
    found = []
    for batch_size, cost_s in costs_s.items():
        step_size = largest_step(at, batch_size, limit=limit, tolerance=tolerance)
        time_s = cost_s * at.steps_per_draw(step_size)
        found.append((time_s, Hyperparameters(step_size, batch_size, 1)))
    return min(found)[1]


def largest_step(at: Local, batch_size: int, *, limit: bool, tolerance: float) -> float:
    """The largest h of which the predicted standard deviations are within the tolerance."""
    largest = float(at.values[-1])
    low, high = SMALLEST / largest, (2.0 if limit else 4.0 * (1 - 1e-9)) / largest
    if at.worst_sd(high, batch_size, limit=limit) <= tolerance:
        return high
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        if at.worst_sd(middle, batch_size, limit=limit) <= tolerance:
            low = middle
        else:
            high = middle
    return low
