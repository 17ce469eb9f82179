"""The MAP against float64 optimisers and closed forms."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special

from mamba_cli import config, map_estimate
from mamba_cli.errors import NothingUsableError
from mamba_cli.map_estimate import AdamPhase, MapSettings, find_map
from mamba_cli.models import bnn, pmf

REAL = Path(os.environ.get("MAMBA_DATA_DIR", Path(__file__).parents[2] / "shared" / "data"))
KEY = jax.random.key(0)


@dataclass(frozen=True, eq=False)
class _Model:
    """What an optimiser needs of a model; the rest of the protocol is absent."""

    data: Any
    dim: int
    num_data: int
    name: str = "test"
    start: float = 0.0

    def initial_position(self, rng_key: jax.Array) -> jax.Array:
        return jnp.full(self.dim, self.start, jnp.float32)


@dataclass(frozen=True, eq=False)
class _Logistic(_Model):
    prior_variance: float = 10.0

    def log_prior(self, position: jax.Array) -> jax.Array:
        return -0.5 * jnp.sum(position**2) / self.prior_variance

    def log_likelihood(self, position: jax.Array, minibatch: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.log_sigmoid(minibatch @ position))


@dataclass(frozen=True, eq=False)
class _Linear(_Model):
    """y ~ N(X theta, 1), theta ~ N(0, I): rows are a pytree of covariates and responses."""

    def log_prior(self, position: jax.Array) -> jax.Array:
        return -0.5 * jnp.sum(position**2)

    def log_likelihood(self, position: jax.Array, minibatch: dict[str, jax.Array]) -> jax.Array:
        return -0.5 * jnp.sum((minibatch["y"] - minibatch["x"] @ position) ** 2)


@dataclass(frozen=True, eq=False)
class _Cauchy(_Model):
    """Location of a Cauchy law, flat prior: the log density is convex far from the data."""

    def log_prior(self, position: jax.Array) -> jax.Array:
        return jnp.zeros(())

    def log_likelihood(self, position: jax.Array, minibatch: jax.Array) -> jax.Array:
        return -jnp.sum(jnp.log1p((minibatch - position[0]) ** 2))


def _logistic(num_data: int = 9001, dim: int = 4) -> _Logistic:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(num_data, dim)).astype(np.float32)
    truth = 2 * rng.normal(size=dim)
    labels = rng.random(num_data) < scipy.special.expit(rows @ truth)
    signed = rows * np.where(labels, 1, -1)[:, None].astype(np.float32)
    return _Logistic(jnp.asarray(signed), dim, num_data)


def _logistic_float64(model: _Logistic) -> Any:
    """Negative log posterior, its gradient and Hessian in float64 NumPy."""
    rows = np.asarray(model.data, np.float64)
    variance = model.prior_variance

    def value(theta: np.ndarray) -> float:
        return np.logaddexp(0, -rows @ theta).sum() + theta @ theta / (2 * variance)

    def gradient(theta: np.ndarray) -> np.ndarray:
        return -rows.T @ scipy.special.expit(-rows @ theta) + theta / variance

    def hessian(theta: np.ndarray) -> np.ndarray:
        p = scipy.special.expit(rows @ theta)
        return (rows * (p * (1 - p))[:, None]).T @ rows + np.eye(model.dim) / variance

    return value, gradient, hessian


def _linear(num_data: int, dim: int) -> _Linear:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(num_data, dim)).astype(np.float32)
    y = (x @ rng.normal(size=dim) + rng.normal(size=num_data)).astype(np.float32)
    return _Linear({"x": jnp.asarray(x), "y": jnp.asarray(y)}, dim, num_data)


def test_newton_agrees_with_a_float64_optimiser() -> None:
    model = _logistic()
    value, gradient, hessian = _logistic_float64(model)
    expected = scipy.optimize.minimize(
        value, np.zeros(model.dim), jac=gradient, hess=hessian, method="trust-exact", tol=1e-10
    )
    found = find_map(model, rng_key=KEY)
    assert found.method == "newton"
    assert found.position.dtype == jnp.float32
    np.testing.assert_allclose(found.position, expected.x, atol=2e-6)
    assert found.log_density == pytest.approx(-expected.fun, rel=1e-6)


def test_the_gradient_norm_is_the_true_one_and_small() -> None:
    """In float64 at the float32 position: of the order of rounding, far below sqrt(lambda)."""
    model = _logistic()
    _, gradient, hessian = _logistic_float64(model)
    found = find_map(model, rng_key=KEY)
    theta = np.asarray(found.position, np.float64)
    true_norm = np.linalg.norm(gradient(theta))
    curvature = hessian(theta)
    assert found.gradient_norm == pytest.approx(true_norm, abs=5e-4)
    assert true_norm < 1e-4 * np.sqrt(np.linalg.eigvalsh(curvature)[0])
    relative = found.gradient_norm / np.sqrt(np.trace(curvature))
    assert found.relative_gradient_norm == pytest.approx(relative, rel=1e-3)


def test_a_search_cut_short_says_how_far_it_came() -> None:
    model = _logistic()
    _, gradient, _ = _logistic_float64(model)
    found = find_map(model, rng_key=KEY, settings=MapSettings(max_newton_iterations=1))
    true_norm = np.linalg.norm(gradient(np.asarray(found.position, np.float64)))
    assert found.num_iterations == 1
    assert found.gradient_norm == pytest.approx(true_norm, rel=1e-5)
    assert found.relative_gradient_norm > 0.1


def test_hessian_agrees_with_the_closed_form() -> None:
    model = _logistic()
    theta = np.linspace(-1, 1, model.dim)
    _, _, hessian = _logistic_float64(model)
    found = map_estimate.hessian(model, jnp.asarray(theta, jnp.float32))
    assert found.dtype == np.float64
    expected = hessian(theta.astype(np.float32).astype(np.float64))
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def test_newton_leaves_a_region_where_the_log_density_is_convex() -> None:
    data = jnp.asarray([-0.4, 0.1, 0.3, 0.9, 1.2], jnp.float32)
    model = _Cauchy(data, dim=1, num_data=5, start=8.0)
    expected = scipy.optimize.minimize_scalar(
        lambda t: np.log1p((np.asarray(data, np.float64) - t) ** 2).sum(),
        bounds=(-1, 2),
        method="bounded",
        options={"xatol": 1e-9},
    )
    found = find_map(model, rng_key=KEY)
    np.testing.assert_allclose(found.position[0], expected.x, atol=1e-5)
    assert found.relative_gradient_norm < 1e-4


def test_the_step_is_uphill_whatever_the_curvature() -> None:
    """H = diag(2, -1): Newton's own step would go down along the second axis."""
    step = map_estimate._ascent_step(np.asarray([2.0, 3.0]), -np.diag([2.0, -1.0]))
    np.testing.assert_allclose(step, [1.0, 3.0])


def test_adam_and_lbfgs_reach_the_closed_form_in_high_dimension() -> None:
    model = _linear(num_data=2000, dim=250)
    x, y = (np.asarray(model.data[k], np.float64) for k in ("x", "y"))
    expected = np.linalg.solve(x.T @ x + np.eye(250), x.T @ y)
    settings = MapSettings(phases=(AdamPhase(300, 100, 1e-2),))
    found = find_map(model, rng_key=KEY, settings=settings)
    gradient = x.T @ (y - x @ found.position) - found.position
    assert found.method == "adam+lbfgs"
    assert 300 < found.num_iterations < 800
    np.testing.assert_allclose(found.position, expected, atol=1e-5)
    assert found.gradient_norm == pytest.approx(np.linalg.norm(gradient), abs=5e-3)
    assert found.relative_gradient_norm < 2e-4


def test_the_search_is_a_function_of_the_key() -> None:
    model = _linear(num_data=300, dim=3)
    settings = MapSettings(
        max_newton_dim=0, phases=(AdamPhase(20, 100, 1e-2),), max_lbfgs_iterations=0
    )
    first, again = (find_map(model, rng_key=jax.random.key(1), settings=settings) for _ in range(2))
    np.testing.assert_array_equal(first.position, again.position)
    assert first.gradient_norm == again.gradient_norm


def test_the_trace_is_exact_for_a_diagonal_hessian() -> None:
    """Hutchinson's estimate has no variance there: every sign squares to 1."""
    dim = 7
    x = np.repeat(np.eye(dim), 3, axis=0) * np.arange(1, 3 * dim + 1)[:, None]
    data = {"x": jnp.asarray(x, jnp.float32), "y": jnp.zeros(3 * dim)}
    model = _Linear(data, dim, 3 * dim)
    trace = map_estimate.hessian_trace(model, jnp.ones(dim), KEY, num_probes=2)
    assert trace == pytest.approx((x**2).sum() + dim, rel=1e-6)


@dataclass(frozen=True, eq=False)
class _InOnePiece(_Linear):
    """The likelihood of all rows from X^T X and X^T y; that of single rows is refused."""

    @property
    def full_data(self) -> dict[str, jax.Array]:
        x, y = self.data["x"], self.data["y"]
        return {"xx": x.T @ x, "xy": x.T @ y}

    def full_log_likelihood(
        self, position: jax.Array, full_data: dict[str, jax.Array]
    ) -> jax.Array:
        return position @ full_data["xy"] - 0.5 * position @ full_data["xx"] @ position

    def log_likelihood(self, position: jax.Array, minibatch: dict[str, jax.Array]) -> jax.Array:
        raise AssertionError("the likelihood in one piece must be used")


def test_all_rows_are_read_through_the_likelihood_in_one_piece() -> None:
    linear = _linear(num_data=400, dim=30)
    model = _InOnePiece(linear.data, 30, 400)
    x, y = (np.asarray(model.data[k], np.float64) for k in ("x", "y"))
    precision = x.T @ x + np.eye(30)
    settings = MapSettings(
        max_newton_dim=0, phases=(AdamPhase(2_000, None, 0.1),), max_lbfgs_iterations=0
    )
    found = find_map(model, rng_key=KEY, settings=settings)
    assert (found.method, found.num_iterations) == ("adam", 2_000)
    np.testing.assert_allclose(found.position, np.linalg.solve(precision, x.T @ y), atol=1e-4)
    gradient = x.T @ y - precision @ found.position
    assert found.gradient_norm == pytest.approx(np.linalg.norm(gradient), abs=5e-3)


def test_the_relative_norm_is_the_norm_over_the_root_of_the_trace() -> None:
    """Eight probes of random signs: relative variance 2 sum of off-diagonal squares / 8 / tr^2."""
    linear = _linear(num_data=400, dim=30)
    x, y = (np.asarray(linear.data[k], np.float64) for k in ("x", "y"))
    precision = x.T @ x + np.eye(30)
    settings = MapSettings(
        max_newton_dim=0, phases=(AdamPhase(10, None, 0.01),), max_lbfgs_iterations=0
    )
    found = find_map(linear, rng_key=KEY, settings=settings)
    norm = np.linalg.norm(x.T @ y - precision @ found.position)
    trace = np.trace(precision)
    off_diagonal = precision - np.diag(np.diag(precision))
    standard_error = np.sqrt(2 * np.sum(off_diagonal**2) / 8) / trace
    assert found.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert found.relative_gradient_norm == pytest.approx(
        norm / np.sqrt(trace), rel=4 * standard_error / 2
    )


def test_phases_have_their_own_learning_rates_and_moments() -> None:
    """The first step of Adam is its learning rate, whatever the gradient (far from the mode)."""
    model = replace(_linear(num_data=50, dim=3), start=100.0)

    def moved_by(*phases: AdamPhase) -> np.ndarray:
        settings = MapSettings(max_newton_dim=0, phases=phases, max_lbfgs_iterations=0)
        return 100.0 - np.asarray(find_map(model, rng_key=KEY, settings=settings).position)

    np.testing.assert_allclose(moved_by(AdamPhase(1, None, 0.5)), 0.5, rtol=1e-4)
    two = moved_by(AdamPhase(1, None, 0.5), AdamPhase(1, None, 0.25))
    np.testing.assert_allclose(two, 0.75, rtol=1e-4)
    # Gradients all but equal: each step is its learning rate, 0.5 and then half way to 0.1.
    np.testing.assert_allclose(moved_by(AdamPhase(2, None, 0.5, 0.1)), 0.8, rtol=1e-2)


def _settings_of(compose: Any, model: str) -> MapSettings:
    search = config.settings_from(compose(f"model={model}", "budget=quick")).map_search
    assert search.phases is not None
    phases = tuple(AdamPhase(**vars(phase)) for phase in search.phases)
    return MapSettings(phases=phases, max_lbfgs_iterations=0)


@pytest.mark.skipif(
    not (REAL / "ml-100k" / "u.data").is_file(),
    reason=f"the MovieLens files are not in {REAL / 'ml-100k'} (set MAMBA_DATA_DIR)",
)
def test_on_fold_1_the_map_of_the_quick_budget_predicts_ratings(compose: Any) -> None:
    """1.012 in a trial with a search of 3,000 steps; the mean rating alone has 1.15."""
    model = pmf.probabilistic_matrix_factorization(fold=1, data_dir=REAL)
    found = find_map(model, rng_key=KEY, settings=_settings_of(compose, "pmf"))
    prediction = model.predict(found.position, model.test_inputs)
    assert model.predictive_metrics(prediction)["rmse"] < 1.05
    assert found.relative_gradient_norm < 0.3


@pytest.mark.skipif(
    not (REAL / "mnist" / "train-images-idx3-ubyte.gz").is_file(),
    reason=f"the MNIST files are not in {REAL / 'mnist'} (set MAMBA_DATA_DIR)",
)
def test_on_mnist_the_map_of_the_quick_budget_reads_digits(compose: Any) -> None:
    """94.6 % in a trial with a longer search."""
    model = bnn.bayesian_neural_network(data_dir=REAL)
    found = find_map(model, rng_key=KEY, settings=_settings_of(compose, "bnn"))
    prediction = model.predict(found.position, model.test_inputs)
    assert model.predictive_metrics(prediction)["accuracy"] > 0.92


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("max_newton_dim", [0, 200])
def test_data_that_are_not_finite_are_an_error_at_the_start(
    bad: float, max_newton_dim: int
) -> None:
    model = _linear(num_data=300, dim=3)
    spoilt = replace(model, data={**model.data, "y": model.data["y"].at[7].set(bad)})
    with pytest.raises(NothingUsableError, match="MAP of test: at the start the log density is"):
        find_map(spoilt, rng_key=KEY, settings=MapSettings(max_newton_dim=max_newton_dim))


def test_the_reporter_is_told_the_gradient_norm() -> None:
    messages: list[str] = []

    class Reporter(map_estimate.SilentReporter):
        def message(self, text: str) -> None:
            messages.append(text)

    found = find_map(_logistic(num_data=500), rng_key=KEY, reporter=Reporter())
    assert len(messages) == 1
    assert f"gradient norm {found.gradient_norm:.2g}" in messages[0]


@pytest.mark.parametrize("num_data", [1, 600, 4096, 4097, 10_000])
def test_blocks_hold_every_row_once(num_data: int) -> None:
    data = {"x": jnp.arange(2.0 * num_data).reshape(num_data, 2), "y": jnp.arange(1.0 * num_data)}
    blocks = map_estimate.row_blocks(data, num_data)
    y = np.asarray(blocks.columns["y"])
    x = np.asarray(blocks.columns["x"])
    valid = np.arange(y.shape[1]) < np.asarray(blocks.num_valid)[:, None]
    assert y.shape[1] <= map_estimate.MAX_BLOCK_ROWS
    np.testing.assert_array_equal(y[valid], np.arange(num_data))
    np.testing.assert_array_equal(x.swapaxes(1, 2)[valid], np.asarray(data["x"]))


def test_compensated_sum_keeps_twice_the_digits() -> None:
    rng = np.random.default_rng(0)
    terms = (1e4 * (1 + rng.random(3000))).astype(np.float32)
    total, error = jax.jit(lambda t: map_estimate.compensated_sum(lambda x: x, t))(terms)
    exact = terms.astype(np.float64).sum()
    naive = float(np.cumsum(terms, dtype=np.float32)[-1])
    assert abs(naive - exact) > 10
    # Each term is rounded when the error is taken off it: a random walk of 3,000 steps.
    allowed = 5 * np.sqrt(3000) * 1e4 * 2.0**-24
    assert float(total) - float(error) == pytest.approx(exact, abs=allowed)
