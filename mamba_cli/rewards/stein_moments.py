r"""Stein moments: the polynomial Stein discrepancy of order 2, summed while sampling.

In coordinates w whitened at the mode, with s the gradient of the log density there, every density
that decays fast enough has E[s] = 0 and E[s w^T] = -I (integration by parts: the Langevin Stein
operator applied to w_i and w_i w_j). What is left of them under the law of the draws,

.. math::
    z_1 = E[s], \qquad Z_2 = \tfrac12 E[s w^\top + w s^\top] + I,

says how wrong the first two moments are. Two numbers are made of it, each zero exactly where both
vanish and the same in every rotation of w:

.. math::
    D_{norm}^2 = \|z_1\|^2 + \|Z_2\|_F^2, \qquad
    D_{W}^2 = \|z_1\|^2 + \sum_k \big(\sqrt{c_k} - 1\big)^2,

with c_k the eigenvalues of I - Z_2 - z_1 z_1^T, those below zero taken as zero. ``norm`` is the
discrepancy of the paper. For a Gaussian posterior, N(0, I) in w, and draws of mean m and covariance
C, z_1 = -m and Z_2 = I - C - m m^T, so that c_k are the eigenvalues of C and ``wasserstein`` is the
2-Wasserstein distance of two Gaussians with the moments of draws and posterior, in posterior
standard deviations; for other posteriors it is the same function of what the scores say. Near zero
it weighs Z_2 by a half, far out it grows like the width of the draws where ``norm`` grows like its
square: noise in Z_2 is not magnified. A chain frozen at the mode has sqrt(dim) by both.

**Why the sampler's own gradients will do.** The features are linear in the score. A kernel of this
package evaluates the gradient of step t at the position it has just arrived at, on a minibatch
drawn after the move: given that position (and all of the past), the estimate has the mean of the
full gradient, so that the sums have the same mean as with full gradients, and noise on top that
averages out. A discrepancy that is quadratic in the scores (a KSD) is biased by that noise.

* *Noise.* In whitened coordinates the estimate from n of N rows without replacement has a variance
  of about (N - n)/n per coordinate, so the norm's D^2 of T draws is raised by about
  (dim + (dim^2 + dim)/2)(N - n)/(n T). Like the error of the draws themselves it falls with their
  number: an arm with a small minibatch has to make up for it by draws. At n = N it is zero.
* *Without replacement* changes the size of the noise, (N - n)/(N - 1), not its mean.
* *Reshuffle*, where a pass over the data hands every row out once, is unbiased draw by draw only on
  average over a pass: given the past, the rows left over are known, and the position has moved with
  the rows before them. E[s_t | position] then differs from the score by a term of the order of what
  one pass moves the position by, the same order as the bias of the chain itself, and the noise of
  z_1 nearly cancels within a pass. The value remains comparable between arms whose passes are short
  against their mixing time.
* *Control variates* leave the mean as it is (the correction has mean zero at every position) and
  take most of the noise away near the mode.
* *L integration steps*: a draw is summed once per L steps, with the gradient at that draw's own
  position. Explicit Euler moves with an older gradient but stores the one at the new position.
* *The first draws* after the start at the mode have w near 0, and contribute I to Z_2 instead of 0:
  a chain of T draws that needs tau draws to spread has Z_2 near I tau/T. This is an error its
  estimates have too, and it is wanted: the reward of a slow arm is that of its draws so far.

**Standard error**, by batch means: with D_(b) the value without block b of B equal blocks,

    SE(D)^2 = (B - 1)/B sum_b (D_(b) - mean of D_(b))^2        (the jackknife over blocks).

The larger of this with B blocks and with B/2 of twice the length is taken, so that blocks shorter
than the correlation time show. Both are too small for a chain that has not mixed at all, as every
estimate from one chain is; and where D is all noise, D itself is of the size of its error and the
jackknife is off by a factor of order one.

Cost: O(dim^2) a draw up to ``whitening.MAX_DENSE_DIM`` dimensions; beyond, O(dim), with a diagonal
whitening and the diagonal of Z_2 alone. Nothing per draw is stored, and no gradient over all rows
is computed.

References
----------
Srinivasan, Sutton, Drovandi and South, "The polynomial Stein discrepancy for assessing moment
convergence" (arXiv 2412.05135), of which this is the order 2, with the norm of Z_2 in place of the
sum over monomials, so that it does not depend on the axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from mamba_cli.rewards.batch_means import batch_means_error
from mamba_cli.rewards.draws import WHITENINGS, require
from mamba_cli.types import Array, BlockSums, FeatureFn, PyTree, Scored
from mamba_cli.whitening import MAX_DENSE_DIM, Floats, Whitening

DISTANCES = ("wasserstein", "norm")


def outer_features(delta: Array, gradient: Array) -> PyTree:
    """g and g delta^T, ``[dim]`` and ``[dim, dim]``."""
    return {"gradient": gradient, "product": gradient[:, None] * delta}


def diagonal_features(delta: Array, gradient: Array) -> PyTree:
    """g and the diagonal of g delta^T, ``[dim]`` both."""
    return {"gradient": gradient, "product": gradient * delta}


def stein_moments(sums: BlockSums, whitening: Whitening) -> tuple[Floats, Floats]:
    """The discrepancies of order 1 and 2 of every block, in whitened coordinates.

    Parameters
    ----------
    sums
        Of :func:`outer_features`, or of :func:`diagonal_features` with a diagonal whitening.
    whitening
        Applied here, after the sums: it is linear.

    Returns
    -------
    first, second
        z_1 ``[num_blocks, dim]`` and Z_2 ``[num_blocks, dim, dim]``, or its diagonal
        ``[num_blocks, dim]``, of the draws of each block.
    """
    counts = np.asarray(sums.num_draws, np.float64)
    raw_gradient = sums.features["gradient"] / counts[:, None]
    gradient = whitening.scores(raw_gradient)
    # Deviations are summed relative to where the chain started; w is relative to the centre.
    offset = whitening.deviations(sums.origin - whitening.centre)
    product = sums.features["product"]
    if product.ndim == 2:
        assert whitening.is_diagonal, "the diagonal of Z_2 does not follow from that of the sums"
        # Scaled back and forth: s_j w_j = g_j delta_j in any diagonal whitening.
        return gradient, product / counts[:, None] + gradient * offset + 1.0
    product = product / counts[:, None, None]
    # s w^T = F^-1 g delta^T F: the last axis is a deviation, the first a score.
    swapped = np.swapaxes(whitening.deviations(product), 1, 2)
    cross = np.swapaxes(whitening.scores(swapped), 1, 2) + gradient[:, :, None] * offset
    return gradient, 0.5 * (cross + np.swapaxes(cross, 1, 2)) + np.eye(len(offset))


def moment_distance(first: Floats, second: Floats, distance: str = "wasserstein") -> Floats:
    """One number of z_1 and Z_2; see the module's docstring.

    Parameters
    ----------
    first, second
        z_1 ``[..., dim]`` and Z_2 ``[..., dim, dim]``, or its diagonal ``[..., dim]``: the
        covariance is then taken as diagonal.
    distance
        ``wasserstein`` or ``norm``.

    Returns
    -------
    array
        ``[...]``.
    """
    squares = np.sum(first**2, axis=-1)
    is_diagonal = second.ndim == first.ndim
    if distance == "norm":
        axes = -1 if is_diagonal else (-2, -1)
        return np.asarray(np.sqrt(squares + np.sum(second**2, axis=axes)))
    assert distance == "wasserstein", distance
    if is_diagonal:
        variances: Floats = 1.0 - second - first**2
    else:
        outer = first[..., :, None] * first[..., None, :]
        variances = np.linalg.eigvalsh(np.eye(first.shape[-1]) - second - outer)
    widths = np.sqrt(np.maximum(variances, 0.0))
    return np.asarray(np.sqrt(squares + np.sum((widths - 1.0) ** 2, axis=-1)))


@dataclass(frozen=True)
class SteinMoments:
    """The discrepancy of the module's docstring, as a reward: lower is better.

    Parameters
    ----------
    whitening
        ``hessian`` or ``fisher``, at the MAP; see ``curvature.whitening_at``.
    distance
        ``wasserstein`` or ``norm``.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    whitening: str = "hessian"
    distance: str = "wasserstein"
    name: str = "stein_moments"
    higher_is_better: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require(self.whitening in WHITENINGS, "whitening", self.whitening, " or ".join(WHITENINGS))
        require(self.distance in DISTANCES, "distance", self.distance, " or ".join(DISTANCES))

    def features(self, dim: int) -> FeatureFn:
        """Raw coordinates: what whitens them is applied to the sums."""
        dense = self.whitening == "hessian" and dim <= MAX_DENSE_DIM
        return outer_features if dense else diagonal_features

    def __call__(self, sums: BlockSums, whitening: Whitening) -> Scored:
        if not all(np.isfinite(leaf).all() for leaf in sums.features.values()):
            return Scored(math.nan, math.nan)
        counts = np.asarray(sums.num_draws)
        moments = stein_moments(sums, whitening)
        distance = partial(moment_distance, distance=self.distance)
        value = distance(*(np.average(block, axis=0, weights=counts) for block in moments))
        full = [block[counts == counts[0]] for block in moments]
        return Scored(float(value), batch_means_error(distance, *full))
