"""Coordinates in which a posterior is nearly standard normal.

With P = F F^T an estimate of the posterior's precision and c its centre,

    w = F^T (theta - c),    s = F^-1 grad log p(theta),

where s is the gradient of the log density of w. A discrepancy in these coordinates sees every
direction of the posterior at its own scale, and one that is invariant to rotations does not depend
on which F was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_DENSE_DIM = 128
"""Beyond, a posterior is whitened coordinate by coordinate: products of matrices cost too much."""

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Whitening:
    """A centre and a square root of the precision.

    Parameters
    ----------
    centre
        c, ``[dim]``.
    factor
        F: a lower triangular matrix ``[dim, dim]``, or the diagonal of a diagonal one ``[dim]``.
    """

    centre: Floats
    factor: Floats

    @classmethod
    def of_precision(cls, centre: ArrayLike, precision: ArrayLike) -> Whitening:
        """By the Cholesky factor of ``[dim, dim]``, or the roots of a diagonal ``[dim]``.

        Raises
        ------
        numpy.linalg.LinAlgError
            The precision is not positive definite, or not finite.
        """
        matrix = np.asarray(precision, np.float64)
        if matrix.ndim == 2:
            if not np.all(np.isfinite(matrix)):
                raise np.linalg.LinAlgError("the precision is not finite")
            factor: Floats = np.linalg.cholesky(matrix)
        else:
            if not np.all((matrix > 0) & np.isfinite(matrix)):
                raise np.linalg.LinAlgError("the precision is not positive")
            factor = np.sqrt(matrix)
        return cls(np.asarray(centre, np.float64), factor)

    @property
    def is_diagonal(self) -> bool:
        return self.factor.ndim == 1

    def positions(self, positions: ArrayLike) -> Floats:
        """w for positions ``[..., dim]``, float64."""
        return self.deviations(np.asarray(positions, np.float64) - self.centre)

    def deviations(self, deltas: ArrayLike) -> Floats:
        """F^T delta for differences of positions ``[..., dim]``, float64."""
        delta = np.asarray(deltas, np.float64)
        whitened: Floats = delta * self.factor if self.is_diagonal else delta @ self.factor
        return whitened

    def scores(self, scores: ArrayLike) -> Floats:
        """F^-1 g for gradients of the log density ``[..., dim]``, float64."""
        g = np.asarray(scores, np.float64)
        if self.is_diagonal:
            return g / self.factor
        flat = np.linalg.solve(self.factor, g.reshape(-1, g.shape[-1]).T).T
        whitened: Floats = flat.reshape(g.shape)
        return whitened
