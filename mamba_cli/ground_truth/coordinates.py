"""The coordinates that NUTS moves in, and the starts of the chains in them.

They are z with theta = m + A z, m the MAP. Whitened by the Laplace approximation there, A = L^-T
with L L^T the Hessian, the posterior of z is nearly N(0, I): a step size and an identity mass
matrix fit all directions at once.

Above ``MAX_DENSE_DIM`` dimensions A is diagonal and found during the warm-up, since there the MAP
of a hierarchical model tells little of the curvature where its draws are. The information identity

    E[s_i^2] = E[-d^2 log p / d theta_i^2],    s = grad log p(theta), theta from the posterior,

gives the mean curvature of a coordinate from the gradients that NUTS has anyway, without a Hessian:
A_ii = E[s_i^2]^(-1/2) over a window of steps of all chains, windows doubling in length. The first
window has the row norms of the Hessian at the MAP instead, E[(H v)_i^2] for v ~ N(0, I), which are
positive also where the Hessian is not positive definite (Dauphin et al., 2015).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli import map_estimate
from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth.settings import NutsSettings
from mamba_cli.map_estimate import RowBlocks
from mamba_cli.types import Array, Model

MAX_DENSE_DIM = 1000
"""Above this a Hessian is too large: coordinates are scaled one by one."""

NUM_PROBES = 16
"""Products with the Hessian at the MAP for the first scale of each coordinate."""


class Coordinates(NamedTuple):
    """theta = centre + matrix @ z; no matrix is a diagonal one, or the identity."""

    centre: np.ndarray  # [dim], float32
    matrix: np.ndarray | None = None  # [dim, dim], float32
    scale: np.ndarray | None = None  # [dim], float32, the diagonal

    def positions(self, z: np.ndarray) -> np.ndarray:
        """Positions ``[..., dim]`` in float64."""
        moved = np.asarray(z, np.float64)
        if self.matrix is not None:
            moved = moved @ np.asarray(self.matrix, np.float64).T
        if self.scale is not None:
            moved = moved * np.asarray(self.scale, np.float64)
        return self.centre.astype(np.float64) + moved


def laplace_matrix(hessian: np.ndarray) -> np.ndarray:
    """A = L^-T with L L^T the Hessian, so that A A^T is the Laplace covariance, ``[dim, dim]``.

    Raises
    ------
    NothingUsableError
        The Hessian is not positive definite.
    """
    try:
        factor = np.linalg.cholesky(hessian)
    except np.linalg.LinAlgError as error:
        smallest = float(np.linalg.eigvalsh(hessian)[0])
        raise NothingUsableError(
            f"ground truth: the Hessian at the MAP is not positive definite (smallest eigenvalue "
            f"{smallest:.3g}), so there is no Laplace approximation to whiten by; "
            f"set ground_truth.whiten=false"
        ) from error
    return np.linalg.inv(factor).T


def coordinates_and_starts(
    model: Model,
    map_position: Array,
    blocks: RowBlocks | None,
    settings: NutsSettings,
    rng_key: Array,
) -> tuple[Coordinates, np.ndarray]:
    """The coordinates, and over-dispersed starts in them ``[num_chains, dim]``.

    The starts are drawn from the Laplace approximation widened by ``start_scale``, whitened or not;
    above ``MAX_DENSE_DIM`` from Gaussians, independent in each coordinate, as narrow as the
    coordinate's curvature says.
    """
    centre = np.asarray(map_position, np.float32)
    key_normal, key_probes = jax.random.split(rng_key)
    normal = np.asarray(jax.random.normal(key_normal, (settings.num_chains, model.dim)))
    normal = normal.astype(np.float64) * settings.start_scale
    if model.dim > MAX_DENSE_DIM:
        norms = map_estimate.hessian_row_norms(model, jnp.asarray(centre), key_probes, NUM_PROBES)
        scale = np.maximum(norms, 1.0) ** -0.5
        if settings.whiten:
            return Coordinates(centre, scale=scale.astype(np.float32)), normal
        return Coordinates(centre), normal * scale
    matrix = laplace_matrix(map_estimate.hessian(model, jnp.asarray(centre), blocks=blocks))
    if settings.whiten:
        return Coordinates(centre, matrix.astype(np.float32)), normal
    return Coordinates(centre), normal @ matrix.T
