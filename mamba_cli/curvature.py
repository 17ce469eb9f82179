"""The scale of a posterior around its mode, for rewards that measure by it.

In low dimension the Hessian of -log p at the MAP. In high dimension a diagonal, that of the
curvature of the log prior plus the empirical Fisher information of the likelihood,

    P_jj = -d2/dtheta_j^2 log p(theta) + N var_i(d/dtheta_j log f(y_i | theta)),

the variance over rows of their gradients. It is positive wherever the data say anything, also where
the mode is not quite reached or the likelihood is not concave.

Both terms are estimated without the gradients of single rows. The difference of the gradients of
two random halves of n rows has the mean square n var_i: N/n of it is one probe of all coordinates,
at the price of one gradient over n rows. The diagonal of the prior's Hessian H is the mean of
e_j (H e)_j over vectors e of random signs (Hutchinson, 1990).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mamba_cli import gradients, map_estimate
from mamba_cli.errors import NothingUsableError
from mamba_cli.types import Array, Model, PyTree
from mamba_cli.whitening import MAX_DENSE_DIM, Whitening

METHODS = ("hessian", "fisher")

NUM_PROBES = 32
"""Pairs of halves: a diagonal entry has a relative error of sqrt(2 / 32) = 25 %, its root 12 %."""

MAX_ROWS_PER_PROBE = 16_384
"""Rows of both halves together; all probes see half a million."""


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
        precision = fisher_diagonal(model, position)
    try:
        return Whitening.of_precision(position, precision)
    except np.linalg.LinAlgError as error:
        raise NothingUsableError(
            f"tuner.reward: the curvature of {model.name} at the MAP is no scale to measure by "
            f"({error}); take a reward without a whitening, reward@tuner.reward=ksd"
        ) from error


def fisher_diagonal(
    model: Model, position: Array, seed: int = 0, num_probes: int = NUM_PROBES
) -> np.ndarray:
    """Diagonal of prior curvature plus empirical Fisher information, ``[dim]`` float64.

    The likelihood's part is a mean of squares; where the prior's is not positive (a log density
    that is not concave) it is left out. Costs ``num_probes`` gradients over at most
    ``MAX_ROWS_PER_PROBE`` rows. A coordinate that only few rows depend on, and these not in every
    probe, has a larger error than ``NUM_PROBES`` says. A single row is taken as it is.
    """
    num_data, rng = model.num_data, np.random.default_rng(seed)
    num_rows = min(num_data - num_data % 2, MAX_ROWS_PER_PROBE)
    # Rows are picked in NumPy, which copies each whole: XLA gathers element by element.
    data = jax.tree.map(np.asarray, model.data)

    @jax.jit
    def likelihood_gradient(rows: PyTree) -> Array:
        of_block = partial(jax.grad(model.log_likelihood), position)
        total: Array = gradients.sum_over_blocks(of_block, rows)
        return total

    @jax.jit
    def prior_curvature(sign: Array) -> Array:
        return -sign * jax.jvp(jax.grad(model.log_prior), (position,), (sign,))[1]

    def of_rows(indices: np.ndarray) -> np.ndarray:
        rows = jax.tree.map(lambda leaf: leaf[indices], data)
        return np.asarray(likelihood_gradient(rows), np.float64)

    fisher, prior = np.zeros(model.dim), np.zeros(model.dim)
    for _ in range(num_probes):
        if num_rows == 0:
            fisher += of_rows(np.zeros(1, int)) ** 2
        else:
            halves = np.split(rng.choice(num_data, num_rows, replace=False), 2)
            one, other = (of_rows(indices) for indices in halves)
            fisher += (num_data / num_rows) * (one - other) ** 2
        sign = rng.choice(np.array([-1, 1], np.float32), model.dim)
        prior += np.asarray(prior_curvature(jnp.asarray(sign)))
    return (fisher + np.maximum(prior, 0.0)) / num_probes
