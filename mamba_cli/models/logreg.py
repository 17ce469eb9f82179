"""Bayesian logistic regression on simulated data (appendix C.1 of the paper).

y_i ~ Bernoulli(sigma(x_i . theta)), theta ~ N(0, v I). The covariates are Gaussian
with AR(1) correlation rho^|j-k| and unit variance, and the true coefficients are a
draw from the prior.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli import metrics
from mamba_cli.data.split import hold_out_rows
from mamba_cli.errors import ConfigError
from mamba_cli.types import Array, Columns


@jax.custom_jvp
def log_sigmoid(logit: Array) -> Array:
    """log sigma(u) = min(u, 0) - log(1 + exp(-|u|)), with derivative sigma(-u).

    The derivatives are given by hand because autodiff of a stable form costs three
    transcendental functions where one is enough, and it is all a sampler needs.
    """
    return jnp.minimum(logit, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(logit)))


@log_sigmoid.defjvp
def _log_sigmoid_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (logit,), (tangent,) = primals, tangents
    return log_sigmoid(logit), sigmoid_of_minus(logit) * tangent


@jax.custom_jvp
def sigmoid_of_minus(logit: Array) -> Array:
    """sigma(-u), in a form that shares exp(-|u|) with :func:`log_sigmoid` and never overflows."""
    decay = jnp.exp(-jnp.abs(logit))
    return jnp.where(logit > 0, decay, 1.0) / (1.0 + decay)


@sigmoid_of_minus.defjvp
def _sigmoid_of_minus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # By hand too: the derivative of |u| at 0 would make the curvature vanish there.
    (logit,), (tangent,) = primals, tangents
    value = sigmoid_of_minus(logit)
    return value, -value * (1.0 - value) * tangent


def _logits(position: Array, rows: Array | Columns) -> Array:
    return position @ rows.values if isinstance(rows, Columns) else rows @ position


@dataclass(frozen=True, eq=False)
class LogisticRegression:
    """Logistic regression as a :class:`mamba_cli.types.Model`.

    ``data`` holds the *signed* rows (2 y_i - 1) x_i, ``[num_data, dim]``: the
    likelihood of a row is sigma(signed row . theta), so label and covariates are
    one memory access. ``test_inputs`` are plain covariates ``[num_test, dim]``.
    """

    data: Array
    test_inputs: Array
    test_labels: np.ndarray
    prior_variance: float
    true_position: np.ndarray
    name: str = field(default="logreg")

    @property
    def dim(self) -> int:
        return int(self.data.shape[1])

    @property
    def num_data(self) -> int:
        return int(self.data.shape[0])

    @cached_property
    def digest(self) -> str:
        """Sha256 of everything the posterior depends on."""
        state = hashlib.sha256(f"{self.name} prior_variance={self.prior_variance!r}".encode())
        state.update(np.asarray(self.data).tobytes())
        return state.hexdigest()

    def initial_position(self, rng_key: Array) -> Array:
        """The prior mean: the posterior is log-concave, so any start will do."""
        return jnp.zeros(self.dim, jnp.float32)

    def log_prior(self, position: Array) -> Array:
        """-|theta|^2 / (2 v)."""
        return -0.5 / self.prior_variance * jnp.sum(position**2)

    @property
    def reads_columns(self) -> bool:
        """Rows are short: as columns they are read and worked on several times as fast."""
        return True

    def log_likelihood(self, position: Array, minibatch: Array | Columns) -> Array:
        """Sum of log sigma((2 y_i - 1) x_i . theta) over the signed rows ``[n, dim]``."""
        return jnp.sum(log_sigmoid(_logits(position, minibatch)))

    def centre_statistics(self, centre: Array, rows: Array) -> tuple[()]:
        """None: the centre's logits are cheaper than reading them from memory."""
        return ()

    def gradient_difference(
        self, position: Array, centre: Array, rows: Array | Columns, statistics: tuple[()]
    ) -> Array:
        """sum_i (sigma(-u_i) - sigma(-u*_i)) x_i, with the logits u at position, u* at centre.

        One product with the rows for both gradients; at the centre it is exactly zero.
        """
        here, there = (sigmoid_of_minus(_logits(at, rows)) for at in (position, centre))
        weights = here - there
        return rows.values @ weights if isinstance(rows, Columns) else weights @ rows

    def log_likelihoods(self, positions: Array, minibatch: Array) -> Array:
        """``log_likelihood`` at each of ``positions`` ``[m, dim]``, ``[m]``.

        Unlike ``vmap`` of one position, this product leaves the rows on the fastest axis.
        """
        return jnp.sum(log_sigmoid(positions @ minibatch.T), axis=1)

    def predict(self, position: Array, inputs: Array) -> Array:
        """P(y = 1) for covariates ``[num_inputs, dim]``."""
        return jax.nn.sigmoid(inputs @ position)

    def predictive_metrics(self, prediction: Array) -> dict[str, float]:
        """``accuracy``, ``log_loss``, ``ece`` and ``mce`` on the test rows."""
        probabilities = np.asarray(prediction, np.float64)
        return {
            "accuracy": metrics.accuracy(probabilities, self.test_labels),
            "log_loss": metrics.log_loss(probabilities, self.test_labels),
            "ece": metrics.expected_calibration_error(probabilities, self.test_labels),
            "mce": metrics.maximum_calibration_error(probabilities, self.test_labels),
        }

    def hold_out(self, fraction: float, seed: int) -> LogisticRegression:
        """The same model on a part of the training rows, with the rest as its test part.

        For rewards on predictions, which must not see the test data. A row that is held out is
        its signed row with label 1, which every metric takes for the row with its own label.

        Parameters
        ----------
        fraction
            Part of the training rows to hold out, in (0, 1).
        seed
            Seed of the random choice (NumPy's PCG64).
        """
        kept, held_out = hold_out_rows(self.num_data, fraction, seed)
        signed_rows = np.asarray(self.data)
        return replace(
            self,
            data=jnp.asarray(signed_rows[kept]),
            test_inputs=jnp.asarray(signed_rows[held_out]),
            test_labels=np.ones(len(held_out), np.int64),
        )


def logistic_regression(
    num_train: int = 1_000_000,
    num_test: int = 200_000,
    dim: int = 10,
    correlation: float = 0.4,
    prior_variance: float = 10.0,
    data_seed: int = 0,
) -> LogisticRegression:
    """Simulate the data and return the model.

    Parameters
    ----------
    num_train, num_test
        Rows of the training and the test part, drawn from the same law.
    dim
        Number of covariates, without intercept as in the paper.
    correlation
        rho of the AR(1) correlation of neighbouring covariates, in (-1, 1).
    prior_variance
        v of the prior N(0, v I), which the true coefficients are drawn from too; above 0.
    data_seed
        Seed of the simulation (NumPy's PCG64); independent of the run's ``seed``.

    Raises
    ------
    ConfigError
        ``correlation`` or ``prior_variance`` is out of its range.
    """
    if not -1.0 < correlation < 1.0:
        raise ConfigError(
            f"model.correlation={correlation}: expected a number above -1 and below 1"
        )
    if not 0.0 < prior_variance < float("inf"):
        raise ConfigError(f"model.prior_variance={prior_variance}: expected a positive number")
    rng = np.random.default_rng(data_seed)
    true_position = rng.normal(scale=np.sqrt(prior_variance), size=dim)

    def simulate(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        covariates = rng.standard_normal((num_rows, dim), dtype=np.float32)
        innovation = np.float32(np.sqrt(1.0 - correlation**2))
        for j in range(1, dim):
            covariates[:, j] *= innovation
            covariates[:, j] += np.float32(correlation) * covariates[:, j - 1]
        # In float64, so that no label hangs on the order in which a CPU's BLAS sums: the data,
        # and with them the digest, are the same everywhere.
        logits = covariates.astype(np.float64) @ true_position
        uniforms = rng.random(num_rows, dtype=np.float32)
        with np.errstate(over="ignore"):  # exp(-u) = inf is a probability of 0
            return covariates, uniforms < 1.0 / (1.0 + np.exp(-logits))

    signed_rows, labels = simulate(num_train)
    signed_rows *= np.where(labels, np.float32(1), np.float32(-1))[:, None]
    test_covariates, test_labels = simulate(num_test)
    return LogisticRegression(
        data=jnp.asarray(signed_rows),
        test_inputs=jnp.asarray(test_covariates),
        test_labels=test_labels.astype(np.int64),
        prior_variance=float(prior_variance),
        true_position=true_position,
    )
