"""Probabilistic matrix factorisation of movie ratings (appendix C.2 of the paper).

    R_ij | U, V      ~ N(m + U_i . V_j, 1/alpha)      for the observed pairs (i, j)
    U_i              ~ N(mu_U, diag(lambda_U)^-1)     and V_j likewise
    mu_W | lambda_W  ~ N(mu0, diag(lambda_W)^-1)      W = U, V
    lambda_Wk        ~ Gamma(a0, rate b0)

m is the mean of the training ratings. The precisions are sampled as logarithms, whose
density includes the Jacobian lambda: the power a0 - 1 of the Gamma density becomes a0.
The model is Salakhutdinov and Mnih's (2008), with diagonal instead of full precisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mamba_cli import metrics
from mamba_cli.data import movielens
from mamba_cli.data.download import DataDir
from mamba_cli.data.split import hold_out_rows
from mamba_cli.errors import ConfigError
from mamba_cli.models.rating_matrix import RatingMatrix, rating_matrix, squared_error
from mamba_cli.types import Array

SMALLEST_RATING = 1.0
LARGEST_RATING = 5.0


class Ratings(NamedTuple):
    """Rows of the data: ids from 0, ratings with the training mean taken off; ``[n]`` each."""

    users: Array
    items: Array
    centred_ratings: Array


class Pairs(NamedTuple):
    """User-item pairs to predict the rating of, ids from 0; ``[n]`` each."""

    users: Array
    items: Array


class Parameters(NamedTuple):
    """The position's six blocks, in their order in the flat vector."""

    users: Array  # U [num_users, latent_dim]
    users_mean: Array  # mu_U [latent_dim]
    users_log_precision: Array  # log lambda_U [latent_dim]
    items: Array  # V [num_items, latent_dim]
    items_mean: Array  # mu_V [latent_dim]
    items_log_precision: Array  # log lambda_V [latent_dim]


def _residuals(parameters: Parameters, rows: Ratings) -> Array:
    users, items, centred_ratings = rows
    return centred_ratings - jnp.sum(parameters.users[users] * parameters.items[items], axis=-1)


@dataclass(frozen=True, eq=False)
class ProbabilisticMatrixFactorization:
    """Matrix factorisation as a :class:`mamba_cli.types.Model`.

    Parameters
    ----------
    data
        Training ratings; no user-item pair may occur twice.
    test_inputs, test_ratings
        Pairs to predict and their ratings, ``[num_test]``.
    rating_mean
        m, which ``data.centred_ratings`` lack.
    num_users, num_items
        Sizes of the rating matrix.
    latent_dim
        D, the length of the latent vectors.
    alpha
        Precision of a rating given the latent vectors.
    mu0, a0, b0
        Prior mean of mu_W; shape and rate of the Gamma prior of lambda_W.
    """

    data: Ratings
    test_inputs: Pairs
    test_ratings: NDArray[np.float32]
    rating_mean: float
    num_users: int
    num_items: int
    latent_dim: int
    alpha: float
    mu0: float
    a0: float
    b0: float
    name: str = field(default="pmf")

    @property
    def dim(self) -> int:
        """D (num_users + num_items + 4)."""
        return self.latent_dim * (self.num_users + self.num_items + 4)

    @property
    def num_data(self) -> int:
        return int(self.data.users.shape[0])

    @cached_property
    def digest(self) -> str:
        """Sha256 of name, hyperparameters, training ratings and test pairs."""
        settings = (
            f"{self.name} num_users={self.num_users} num_items={self.num_items} "
            f"latent_dim={self.latent_dim} alpha={self.alpha!r} mu0={self.mu0!r} "
            f"a0={self.a0!r} b0={self.b0!r} rating_mean={self.rating_mean!r}"
        )
        state = hashlib.sha256(settings.encode())
        for array in (*self.data, *self.test_inputs, self.test_ratings):
            state.update(np.asarray(array).tobytes())
        return state.hexdigest()

    @cached_property
    def full_data(self) -> RatingMatrix:
        """All training ratings, as :meth:`full_log_likelihood` reads them."""
        return rating_matrix(*self.data, self.num_users, self.num_items)

    @cached_property
    def seen_users(self) -> NDArray[np.bool_]:
        """Whether a user has a training rating, ``[num_users]``."""
        return np.bincount(np.asarray(self.data.users), minlength=self.num_users) > 0

    @cached_property
    def seen_items(self) -> NDArray[np.bool_]:
        """Whether an item has a training rating, ``[num_items]``."""
        return np.bincount(np.asarray(self.data.items), minlength=self.num_items) > 0

    @property
    def num_unseen_test_pairs(self) -> int:
        """Test pairs whose user or item has no training rating."""
        users_seen = self.seen_users[np.asarray(self.test_inputs.users)]
        items_seen = self.seen_items[np.asarray(self.test_inputs.items)]
        return int(np.sum(~(users_seen & items_seen)))

    def unravel(self, position: Array) -> Parameters:
        """The six blocks of a flat position ``[dim]``."""
        d = self.latent_dim
        sizes = (self.num_users * d, d, d, self.num_items * d, d, d)
        # jnp.split is differentiated to one concatenation, slices to six padded sums.
        blocks = jnp.split(position, np.cumsum(sizes)[:-1])
        users, users_mean, users_log_precision, items, items_mean, items_log_precision = blocks
        return Parameters(
            users.reshape(self.num_users, d),
            users_mean,
            users_log_precision,
            items.reshape(self.num_items, d),
            items_mean,
            items_log_precision,
        )

    def ravel(self, parameters: Parameters) -> Array:
        """The flat position ``[dim]`` of six blocks."""
        return jnp.concatenate([jnp.ravel(block) for block in parameters])

    def initial_position(self, rng_key: Array) -> Array:
        """Latent vectors N(0, 0.1^2 I), means 0, precisions at their prior mean a0/b0.

        Small and random, because U = V = 0 is a saddle point of the posterior.
        """
        zeros = jnp.zeros(self.latent_dim, jnp.float32)
        log_precision = jnp.full(self.latent_dim, np.log(self.a0 / self.b0), jnp.float32)
        users_key, items_key = jax.random.split(rng_key)
        shapes = (self.num_users, self.latent_dim), (self.num_items, self.latent_dim)
        return self.ravel(
            Parameters(
                0.1 * jax.random.normal(users_key, shapes[0], jnp.float32),
                zeros,
                log_precision,
                0.1 * jax.random.normal(items_key, shapes[1], jnp.float32),
                zeros,
                log_precision,
            )
        )

    def log_prior(self, position: Array) -> Array:
        """Sum over W = U, V of log p(W | mu_W, lambda_W) p(mu_W | lambda_W) p(log lambda_W).

        With l = log lambda and n rows of W, per latent dimension and up to a constant

            (n + 1)/2 l - e^l/2 [sum_i (W_i - mu)^2 + (mu - mu0)^2] + a0 l - b0 e^l.
        """
        p = self.unravel(position)
        return self._log_prior_of_side(
            p.users, p.users_mean, p.users_log_precision
        ) + self._log_prior_of_side(p.items, p.items_mean, p.items_log_precision)

    def _log_prior_of_side(self, latent: Array, mean: Array, log_precision: Array) -> Array:
        precision = jnp.exp(log_precision)
        squares = jnp.sum((latent - mean) ** 2, axis=0) + (mean - self.mu0) ** 2
        normal = 0.5 * (latent.shape[0] + 1) * log_precision - 0.5 * precision * squares
        gamma = self.a0 * log_precision - self.b0 * precision
        return jnp.sum(normal + gamma)

    def log_likelihood(self, position: Array, minibatch: Ratings) -> Array:
        """-alpha/2 sum of (R_ij - m - U_i . V_j)^2 over the rows, up to a constant."""
        return -0.5 * self.alpha * jnp.sum(_residuals(self.unravel(position), minibatch) ** 2)

    def centre_statistics(self, centre: Array, rows: Ratings) -> Array:
        """R_ij - m - U*_i . V*_j of every row, ``[n]``: the residuals at the centre."""
        return _residuals(self.unravel(centre), rows)

    def gradient_difference(
        self, position: Array, centre: Array, rows: Ratings, statistics: Array
    ) -> Array:
        """Gradient of ``log_likelihood`` at ``position`` less that at ``centre``, ``[dim]``.

        With the residuals e at ``position`` and e* (``statistics``) at ``centre``

            dU_i = alpha sum_j (e_ij V_j - e*_ij V*_j)
            dV_j = alpha sum_i (e_ij U_i - e*_ij U*_i):

        one sum of rows for each side, as for a single gradient.
        """
        here, there = self.unravel(position), self.unravel(centre)
        users, items, _ = rows
        residuals = self.alpha * _residuals(here, rows)[:, None]
        at_centre = self.alpha * statistics[:, None]
        of_users = residuals * here.items[items] - at_centre * there.items[items]
        of_items = residuals * here.users[users] - at_centre * there.users[users]
        zeros = jax.tree.map(jnp.zeros_like, here)
        return self.ravel(
            zeros._replace(
                users=zeros.users.at[users].add(of_users),
                items=zeros.items.at[items].add(of_items),
            )
        )

    def full_log_likelihood(self, position: Array, full_data: RatingMatrix) -> Array:
        """``log_likelihood`` of all rows, whose gradient costs a third of that of a minibatch.

        Equal to ``log_likelihood(position, data)``. ``full_data`` is the attribute of that name,
        an argument so that a compiled program need not hold a copy of it.
        """
        p = self.unravel(position)
        return -0.5 * self.alpha * squared_error(p.users, p.items, full_data)

    def predict(self, position: Array, inputs: Pairs | Ratings) -> Array:
        """Expected ratings clip(m + U_i . V_j, 1, 5) of one draw, ``[num_inputs]``."""
        expected = self.identified(position, inputs)
        return jnp.clip(expected, SMALLEST_RATING, LARGEST_RATING)

    def identified(self, position: Array, inputs: Pairs | Ratings) -> Array:
        """Expected ratings m + U_i . V_j of one draw, ``[num_inputs]``.

        Users and items without a training rating take their prior mean mu_W: given
        the other parameters their latent vectors follow the prior, so this is the exact
        expectation over them.
        """
        p = self.unravel(position)
        users, items = inputs[0], inputs[1]
        user_vectors = jnp.where(
            jnp.asarray(self.seen_users)[users, None], p.users[users], p.users_mean
        )
        item_vectors = jnp.where(
            jnp.asarray(self.seen_items)[items, None], p.items[items], p.items_mean
        )
        return self.rating_mean + jnp.sum(user_vectors * item_vectors, axis=-1)

    def squared_error(self, prediction: Array) -> Array:
        """Mean squared error of one prediction ``[num_test]`` of the test ratings, a scalar.

        Its mean over draws is ``mse_of_draws``, the quantity that the paper's table calls
        RMSE; the RMSE here is that of the mean prediction.
        """
        return jnp.mean((prediction - jnp.asarray(self.test_ratings)) ** 2)

    def predictive_metrics(self, prediction: Array) -> dict[str, float]:
        """``rmse`` of a prediction ``[num_test]`` of the test ratings."""
        return {"rmse": metrics.rmse(np.asarray(prediction, np.float64), self.test_ratings)}

    def hold_out(self, fraction: float, seed: int) -> ProbabilisticMatrixFactorization:
        """The same model on a part of the training data, with the rest as its test part.

        For rewards on predictions, which must not see the test data.

        Parameters
        ----------
        fraction
            Part of the training rows to hold out, in (0, 1).
        seed
            Seed of the random choice (NumPy's PCG64).
        """
        kept, held_out = hold_out_rows(self.num_data, fraction, seed)
        ratings = np.rint(np.asarray(self.data.centred_ratings, np.float64) + self.rating_mean)
        rows = movielens.Ratings(
            np.asarray(self.data.users), np.asarray(self.data.items), ratings.astype(np.int8)
        )
        fold = movielens.Fold(
            jax.tree.map(lambda column: column[kept], rows),
            jax.tree.map(lambda column: column[held_out], rows),
            self.num_users,
            self.num_items,
        )
        return from_fold(
            fold,
            latent_dim=self.latent_dim,
            alpha=self.alpha,
            mu0=self.mu0,
            a0=self.a0,
            b0=self.b0,
        )


def from_fold(
    fold: movielens.Fold,
    *,
    latent_dim: int = 20,
    alpha: float = 3.0,
    mu0: float = 0.0,
    a0: float = 4.0,
    b0: float = 5.0,
) -> ProbabilisticMatrixFactorization:
    """The model on ratings in memory; parameters as in :func:`probabilistic_matrix_factorization`.

    Raises
    ------
    ConfigError
        A hyperparameter out of its range.
    """
    if latent_dim < 1:
        raise ConfigError(f"model.latent_dim={latent_dim}: expected an integer of at least 1")
    positive: Mapping[str, float] = {"alpha": alpha, "a0": a0, "b0": b0}
    for key, value in positive.items():
        if not 0.0 < value < float("inf"):
            raise ConfigError(f"model.{key}={value}: expected a positive number")
    rating_mean = float(np.mean(fold.train.ratings, dtype=np.float64))
    centred = (fold.train.ratings - rating_mean).astype(np.float32)
    return ProbabilisticMatrixFactorization(
        data=Ratings(
            jnp.asarray(fold.train.users), jnp.asarray(fold.train.items), jnp.asarray(centred)
        ),
        test_inputs=Pairs(jnp.asarray(fold.test.users), jnp.asarray(fold.test.items)),
        test_ratings=fold.test.ratings.astype(np.float32),
        rating_mean=rating_mean,
        num_users=fold.num_users,
        num_items=fold.num_items,
        latent_dim=int(latent_dim),
        alpha=float(alpha),
        mu0=float(mu0),
        a0=float(a0),
        b0=float(b0),
    )


def probabilistic_matrix_factorization(
    fold: int = 1,
    data_dir: DataDir = None,
    latent_dim: int = 20,
    alpha: float = 3.0,
    mu0: float = 0.0,
    a0: float = 4.0,
    b0: float = 5.0,
) -> ProbabilisticMatrixFactorization:
    """Load a fold of MovieLens 100K and return the model.

    Parameters
    ----------
    fold
        1 to 5: the published split.
    data_dir
        Folder with the data, ``None`` for the per-user cache; what is missing is downloaded.
    latent_dim
        D, the length of the latent vectors.
    alpha
        Precision of a rating given the latent vectors.
    mu0, a0, b0
        Prior mean of mu_W; shape and rate of the Gamma prior of lambda_W.

    Raises
    ------
    ConfigError
        ``fold`` or a hyperparameter out of its range.
    DataError
        The data are missing or not what they should be.
    """
    return from_fold(
        movielens.load_movielens(fold, data_dir),
        latent_dim=latent_dim,
        alpha=alpha,
        mu0=mu0,
        a0=a0,
        b0=b0,
    )
