"""Posteriors with a known truth, each a :class:`mamba_cli.types.Model` with its true error.

| name | posterior | truth | error |
| --- | --- | --- | --- |
| gaussian | mean of Gaussian rows, condition number 10^4, dimension 10 | closed form | moments |
| logreg | the product's, 50,000 rows, dimension 10 | importance sampling from Laplace | moments |
| skewed | log rates of rare Poisson counts: the log of a gamma variable | closed form | moments |
| two_modes | the two-component mixture of Welling and Teh (2011) | a grid | moments |
| network | 2-3-3 tanh network on 1,000 rows | NUTS | predictions |
| pmf | the product's, all rows | NUTS, where results/ground_truth has it | predictions |

*Moments*: Wasserstein-2 distance of mean and covariance of all draws, in coordinates in which the
posterior's covariance is the identity. *Predictions*: root mean square over the predictions of the
Wasserstein-2 distance of the Gaussians with their means and standard deviations. By the means alone
an arm that has hardly left the MAP can be the best, where predictions spread so widely that a mean
over few independent draws is farther from the truth than the MAP's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reward_study.errors import Floats, PredictionMoments, predicted_w2, whitened_w2
from mamba_cli import artifacts
from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth import NutsSettings, nuts_ground_truth
from mamba_cli.map_estimate import hessian
from mamba_cli.models.logreg import logistic_regression
from mamba_cli.types import Array, Model, Reporter

NUM_IMPORTANCE_DRAWS = 20_000


@dataclass(frozen=True, eq=False)
class Simulated:
    """A model made of a log likelihood per row and a log prior, for studies.

    ``per_row`` maps a position ``[dim]`` and rows ``[n, ...]`` to ``[n]``.
    """

    name: str
    dim: int
    data: Any
    per_row: Callable[[Array, Any], Array]
    prior: Callable[[Array], Array]
    start: np.ndarray
    digest: str
    test_inputs: Any = None
    predictor: Callable[[Array, Any], Array] | None = None

    @property
    def num_data(self) -> int:
        return int(jax.tree.leaves(self.data)[0].shape[0])

    def initial_position(self, rng_key: Array) -> Array:
        return jnp.asarray(self.start, jnp.float32)

    def log_prior(self, position: Array) -> Array:
        return self.prior(position)

    def log_likelihood(self, position: Array, minibatch: Any) -> Array:
        return jnp.sum(self.per_row(position, minibatch))

    def predict(self, position: Array, inputs: Any) -> Array:
        assert self.predictor is not None
        return self.predictor(position, inputs)

    def predictive_metrics(self, prediction: Array) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Target:
    """A posterior and what is true of it.

    Either ``mean`` and ``covariance``, or ``predictions``, the posterior moments of the predictions
    for the model's test inputs.
    """

    model: Model
    batch_percents: tuple[float, ...]
    mean: Floats | None = None
    covariance: Floats | None = None
    predictions: PredictionMoments | None = None

    def error(
        self, mean: Floats, covariance: Floats, predict: Callable[[], PredictionMoments]
    ) -> float:
        """True error of an arm by the moments of its draws, or by those of its predictions."""
        if self.predictions is not None:
            return predicted_w2(predict(), self.predictions)
        assert self.mean is not None
        assert self.covariance is not None
        return whitened_w2(mean, covariance, self.mean, self.covariance)


class NotThereYet(Exception):
    """The truth of a posterior takes hours and is not in results/ground_truth."""


def gaussian(num_rows: int = 10_000, dim: int = 10, condition: float = 1e4) -> Target:
    """x_i ~ N(theta, P^-1) with a flat prior: N(mean of x, (N P)^-1)."""
    rng = np.random.default_rng(0)
    vectors, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    values = np.geomspace(condition**-0.5, condition**0.5, dim)
    precision = (vectors * values) @ vectors.T
    rows = rng.standard_normal((num_rows, dim)) / np.sqrt(values) @ vectors.T
    roots = jnp.asarray(vectors * np.sqrt(values), jnp.float32)

    def per_row(position: Array, minibatch: Array) -> Array:
        return -0.5 * jnp.sum(((minibatch - position) @ roots) ** 2, axis=1)

    mean = rows.astype(np.float32).astype(np.float64).mean(axis=0)
    model = Simulated(
        name="gaussian",
        dim=dim,
        data=jnp.asarray(rows, jnp.float32),
        per_row=per_row,
        prior=lambda position: jnp.float32(0.0) * jnp.sum(position),
        start=mean,
        digest="gaussian",
    )
    return Target(model, (100, 10, 1, 0.1), mean, np.linalg.inv(num_rows * precision))


def skewed(num_rows: int = 1_000, dim: int = 5) -> Target:
    """y_ij ~ Poisson(exp(theta_j) / N), exp(theta_j) ~ Gamma(1, 1) a priori.

    exp(theta_j) is Gamma(1 + sum_i y_ij, 2) a posteriori: with two to six events in all, theta_j
    is skewed to the left.
    """
    from scipy.special import digamma, polygamma

    rng = np.random.default_rng(1)
    events = np.arange(2, 2 + dim)
    counts = np.zeros((num_rows, dim), np.float32)
    for column, number in enumerate(events):
        counts[rng.choice(num_rows, number, replace=False), column] = 1.0

    def per_row(position: Array, minibatch: Array) -> Array:
        return minibatch @ position - jnp.sum(jnp.exp(position)) / num_rows

    model = Simulated(
        name="skewed",
        dim=dim,
        data=jnp.asarray(counts),
        per_row=per_row,
        prior=lambda position: jnp.sum(position - jnp.exp(position)),
        start=np.log((1 + events) / 2),
        digest="skewed",
    )
    shape = 1.0 + events
    mean, variance = digamma(shape) - np.log(2.0), polygamma(1, shape)
    return Target(model, (100, 10, 1, 0.1), mean, np.diag(variance))


def two_modes(num_rows: int = 100) -> Target:
    """x_i ~ N(t_1, 2)/2 + N(t_1 + t_2, 2)/2, t_1 ~ N(0, 10), t_2 ~ N(0, 1), data at (0, 1).

    The example of Welling and Teh (2011), with modes near (0, 1) and (1, -1). Moments from a grid.
    """
    rng = np.random.default_rng(2)
    rows = rng.normal(np.where(rng.random(num_rows) < 0.5, 0.0, 1.0), np.sqrt(2.0))
    data = jnp.asarray(rows[:, None], jnp.float32)

    def per_row(position: Array, minibatch: Array) -> Array:
        centres = jnp.stack([position[0], position[0] + position[1]])
        return jax.nn.logsumexp(-((minibatch - centres) ** 2) / 4, axis=1)

    def prior(position: Array) -> Array:
        return -(position[0] ** 2) / 20 - position[1] ** 2 / 2

    model = Simulated("two_modes", 2, data, per_row, prior, np.array([0.1, 0.9]), "two_modes")
    axis = np.linspace(-4, 4, 401)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    log_density = jax.jit(jax.vmap(lambda p: prior(p) + jnp.sum(per_row(p, data))))
    values = np.asarray(log_density(jnp.asarray(points, jnp.float32)), np.float64)
    weights = np.exp(values - values.max())
    mean, covariance = weighted_moments(points, weights)
    return Target(model, (100, 30, 10, 3), mean, covariance)


def logreg(num_rows: int = 50_000) -> Target:
    """The product's logistic regression, smaller; truth by importance sampling."""
    from mamba_cli.map_estimate import find_map

    model = logistic_regression(num_train=num_rows, num_test=10)
    mode = np.asarray(find_map(model, rng_key=jax.random.key(0)).position)
    mean, covariance = importance_moments(model, mode)
    return Target(model, (100, 10, 1, 0.1), mean, covariance)


def importance_moments(model: Model, mode: np.ndarray) -> tuple[Floats, Floats]:
    """Mean and covariance from draws of the Laplace approximation, weighted.

    Raises
    ------
    AssertionError
        The weights are worth less than a tenth of the draws: the posterior is far from Gaussian.
    """
    factor = np.linalg.cholesky(hessian(model, jnp.asarray(mode)))
    noise = np.random.default_rng(0).standard_normal((NUM_IMPORTANCE_DRAWS, model.dim))
    points = mode + np.linalg.solve(factor.T, noise.T).T

    @jax.jit
    def log_densities(positions: Array, data: Any) -> Array:
        return jax.lax.map(lambda p: model.log_prior(p) + model.log_likelihood(p, data), positions)

    values = np.asarray(log_densities(jnp.asarray(points, jnp.float32), model.data), np.float64)
    log_weights = values + 0.5 * np.sum(noise**2, axis=1)
    weights = np.exp(log_weights - log_weights.max())
    assert weights.sum() ** 2 / np.sum(weights**2) > 0.1 * NUM_IMPORTANCE_DRAWS
    return weighted_moments(points, weights)


def weighted_moments(points: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Mean ``[dim]`` and covariance ``[dim, dim]`` of weighted points ``[m, dim]``."""
    weights = weights / weights.sum()
    mean = weights @ points
    centred = points - mean
    return mean, (weights[:, None] * centred).T @ centred


def network(cache_dir: Path, reporter: Reporter, num_rows: int = 1_000) -> Target:
    """Three classes of points in the plane, by a network of three tanh units with N(0, 1) weights.

    Units may be exchanged and their signs turned: only predictions are compared, those on a grid.
    """
    from mamba_cli.map_estimate import find_map

    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((num_rows, 2))
    angle = np.arctan2(inputs[:, 1], inputs[:, 0]) + 0.8 * rng.standard_normal(num_rows)
    labels = np.floor((angle % (2 * np.pi)) / (2 * np.pi / 3)).astype(np.int32)
    side = np.linspace(-2, 2, 12)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    hidden, classes = 3, 3
    sizes = np.cumsum([2 * hidden, hidden, hidden * classes])

    def logits(position: Array, points: Array) -> Array:
        weights, biases, output, offsets = jnp.split(position, sizes)
        units = jnp.tanh(points @ weights.reshape(2, hidden) + biases)
        return units @ output.reshape(hidden, classes) + offsets

    def per_row(position: Array, minibatch: Any) -> Array:
        points, label = minibatch
        log_probabilities = jax.nn.log_softmax(logits(position, points))
        return jnp.take_along_axis(log_probabilities, label[:, None], axis=1)[:, 0]

    dim = int(sizes[-1]) + classes
    model = Simulated(
        name="network",
        dim=dim,
        data=(jnp.asarray(inputs, jnp.float32), jnp.asarray(labels)),
        per_row=per_row,
        prior=lambda position: -0.5 * jnp.sum(position**2),
        start=0.5 * rng.standard_normal(dim),
        digest=hashlib.sha256(inputs.tobytes() + labels.tobytes()).hexdigest(),
        test_inputs=jnp.asarray(grid, jnp.float32),
        predictor=lambda position, points: jax.nn.softmax(logits(position, points)),
    )
    mode = find_map(model, rng_key=jax.random.key(0)).position
    settings = NutsSettings(
        num_draws=4_000,
        num_warmup=1_000,
        whiten=False,
        criterion="predictions",
        max_r_hat=1.05,
        min_ess=200,
    )
    truth = nuts_ground_truth(model, mode, settings, cache_dir=cache_dir, reporter=reporter)
    return Target(model, (100, 10, 1), predictions=true_predictions(truth._asdict()))


def pmf(ground_truth_dir: Path, data_dir: str | None) -> Target:
    """The product's matrix factorisation, against the predictions of NUTS.

    Raises
    ------
    NotThereYet
        ``ground_truth_dir`` has no result for it.
    """
    from mamba_cli.models.pmf import probabilistic_matrix_factorization

    model = probabilistic_matrix_factorization(data_dir=data_dir)
    for path in sorted(ground_truth_dir.glob("pmf-*.npz")):
        found = artifacts.read_arrays(path)
        if found is None or found[1]["provenance"]["model_digest"] != model.digest:
            continue
        if "prediction_mean" in found[0]:
            return Target(model, (100, 10, 1), predictions=true_predictions(found[0]))
    raise NotThereYet(f"no predictions of this model by NUTS in {ground_truth_dir}/pmf-*.npz")


NAMES = ("gaussian", "logreg", "skewed", "two_modes", "network", "pmf")

SLOW = {"pmf": 10.0}
"""Times as many seconds for every arm, where a step costs a millisecond."""


def cells(
    names: Iterable[str], samplers: Iterable[str], seconds: Iterable[float]
) -> list[tuple[str, str, float]]:
    """Posterior, sampler and seconds of an arm, each of every other; slow posteriors have more."""
    whole = product(names, samplers, seconds)
    return [(name, sampler, length_s * SLOW.get(name, 1.0)) for name, sampler, length_s in whole]


def true_predictions(arrays: Mapping[str, Any]) -> PredictionMoments:
    """What NUTS has of the predictions."""
    names = ("prediction_mean", "prediction_std")
    return PredictionMoments(*(np.asarray(arrays[name], np.float64) for name in names))


def available(
    name: str, results: Path, ground_truth_dir: Path, reporter: Reporter
) -> Target | None:
    """A posterior by its name; None, with a message, where its truth cannot be had."""
    try:
        return target(name, results, ground_truth_dir, reporter)
    except (NotThereYet, NothingUsableError) as error:
        reporter.message(f"{name} is left out: {error}")
        return None


def target(name: str, results: Path, ground_truth_dir: Path, reporter: Reporter) -> Target:
    """A posterior by its name."""
    if name == "network":
        return network(results / "ground_truth", reporter)
    if name == "pmf":
        return pmf(ground_truth_dir, os.environ.get("MAMBA_DATA_DIR"))
    simple = {"gaussian": gaussian, "logreg": logreg, "skewed": skewed, "two_modes": two_modes}
    return simple[name]()
