"""The scale of a posterior around its mode, for rewards that measure by it.

In low dimension the Hessian of -log p at the MAP. In high dimension a diagonal, that of the
curvature of the log prior plus the empirical Fisher information of the likelihood,

    P_jj = -d2/dtheta_j^2 log p(theta) + sum_i (d/dtheta_j log f(y_i | theta))^2,

which is positive wherever the data say anything, also where the mode is not quite reached or the
likelihood is not concave. Both sums are estimated without their terms: with signs e of mean zero
the sum of squares is the mean of (sum_i e_i grad_j log f_i)^2, and the diagonal of a Hessian H the
mean of e_j (H e)_j (Hutchinson, 1990).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mamba_cli import map_estimate
from mamba_cli.errors import NothingUsableError
from mamba_cli.map_estimate import RowBlocks, row_blocks, row_log_likelihoods
from mamba_cli.types import Array, Model
from mamba_cli.whitening import MAX_DENSE_DIM, Whitening

METHODS = ("hessian", "fisher")

NUM_PROBES = 32
"""Vectors of signs: a diagonal entry has a relative error of sqrt(2 / 32) = 25 %, its root 12 %."""


def whitening_at(model: Model, centre: ArrayLike, method: str = "hessian") -> Whitening:
    """Coordinates whitened by the curvature at ``centre`` ``[dim]``, usually the MAP.

    Parameters
    ----------
    method
        ``hessian``: the Hessian, up to ``whitening.MAX_DENSE_DIM`` dimensions; the diagonal of the
        module's docstring above. ``fisher``: that diagonal in any dimension.

    Raises
    ------
    NothingUsableError
        The curvature is not finite or not positive definite: ``centre`` is no mode, or the
        posterior is flat in some direction.
    """
    assert method in METHODS, method
    position = jnp.asarray(centre, jnp.float32)
    if method == "hessian" and model.dim <= MAX_DENSE_DIM:
        precision = map_estimate.hessian(model, position)
    else:
        precision = fisher_diagonal(model, position, jax.random.key(0))
    try:
        return Whitening.of_precision(position, precision)
    except np.linalg.LinAlgError as error:
        raise NothingUsableError(
            f"tuner.reward: the curvature of {model.name} at the MAP is no scale to measure by "
            f"({error}); take a reward without a whitening, reward@tuner.reward=ksd"
        ) from error


def fisher_diagonal(
    model: Model, position: Array, rng_key: Array, num_probes: int = NUM_PROBES
) -> np.ndarray:
    """Diagonal of prior curvature plus empirical Fisher information, ``[dim]`` float64.

    Costs ``num_probes`` gradients over all rows. The likelihood's part is a mean of squares; where
    the prior's is not positive (a log density that is not concave) it is left out.
    """
    key_prior, key_rows = jax.random.split(rng_key)
    blocks = row_blocks(model.data, model.num_data)
    num_blocks, block_rows = len(blocks.num_valid), _block_rows(blocks)

    @jax.jit
    def squared_sum(position: Array, blocks: RowBlocks, key: Array) -> Array:
        def of_block(total: Array, numbered: tuple[Array, RowBlocks]) -> tuple[Array, None]:
            number, block = numbered
            valid = jnp.arange(block_rows) < block.num_valid
            signs = jax.random.rademacher(jax.random.fold_in(key, number), (block_rows,))
            weights = jnp.where(valid, signs, 0).astype(jnp.float32)

            def signed(at: Array) -> Array:
                return jnp.vdot(weights, row_log_likelihoods(model, at, block.columns))

            return total + jax.grad(signed)(position), None

        numbered = (jnp.arange(num_blocks), blocks)
        return lax.scan(of_block, jnp.zeros_like(position), numbered)[0] ** 2

    @jax.jit
    def prior_curvature(position: Array, key: Array) -> Array:
        sign = jax.random.rademacher(key, position.shape, jnp.float32)
        return -sign * jax.jvp(jax.grad(model.log_prior), (position,), (sign,))[1]

    fisher, prior = np.zeros(model.dim), np.zeros(model.dim)
    for probe in range(num_probes):
        fisher += np.asarray(squared_sum(position, blocks, jax.random.fold_in(key_rows, probe)))
        prior += np.asarray(prior_curvature(position, jax.random.fold_in(key_prior, probe)))
    return (fisher + np.maximum(prior, 0.0)) / num_probes


def _block_rows(blocks: RowBlocks) -> int:
    return int(jax.tree.leaves(blocks.columns)[0].shape[-1])
