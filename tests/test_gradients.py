"""Gradient estimators against float64 NumPy; control variates exact at their centre."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_model import GaussianMean, gaussian_mean

from mamba_cli import gradients, minibatch
from mamba_cli.gradients import GradientEstimator
from mamba_cli.models.logreg import LogisticRegression, logistic_regression
from mamba_cli.types import Array

NUM_DATA = 600
MODEL = logistic_regression(num_train=NUM_DATA, num_test=10, dim=4, data_seed=3)
POSITIONS = np.random.default_rng(0).normal(size=(70, 4)).astype(np.float32)
CENTRE = np.array([0.5, -1.0, 2.0, 0.1], np.float32)


def logreg_gradient(
    model: LogisticRegression, position: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """-theta / v + (N/n) sum of sigma(-u) x over the signed rows, float64."""
    position, rows = position.astype(np.float64), rows.astype(np.float64)
    weights = 1 / (1 + np.exp(rows @ position))
    return -position / model.prior_variance + model.num_data / len(rows) * weights @ rows


def assert_close(actual: Array, expected: np.ndarray, rtol: float = 2e-6) -> None:
    """To ``rtol`` of the largest component: components of a sum of many terms may cancel."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.max(np.abs(expected)))


def estimate(estimator: GradientEstimator, position: np.ndarray, rows: Array) -> Array:
    return jax.jit(estimator.estimate)(estimator.constants, jnp.asarray(position), rows)


@pytest.mark.parametrize("batch", [slice(0, 1), slice(10, 60), slice(0, NUM_DATA)])
def test_standard_gradient_is_the_scaled_sum_with_the_prior_once(batch: slice) -> None:
    rows = MODEL.data[batch]
    for position in POSITIONS[:3]:
        expected = logreg_gradient(MODEL, position, np.asarray(rows))
        assert_close(estimate(gradients.standard(MODEL), position, rows), expected)


@pytest.mark.parametrize("batch", [slice(0, 1), slice(10, 60), slice(0, NUM_DATA)])
def test_control_variates_correct_by_the_same_minibatch_at_the_centre(batch: slice) -> None:
    rows = np.asarray(MODEL.data)
    estimator = gradients.control_variates(MODEL, jnp.asarray(CENTRE))
    for position in POSITIONS[:3]:
        expected = (
            logreg_gradient(MODEL, CENTRE, rows)
            + logreg_gradient(MODEL, position, rows[batch])
            - logreg_gradient(MODEL, CENTRE, rows[batch])
        )
        # Two minibatch gradients cancel: their rounding is relative to the larger of them.
        scale = np.max(np.abs(logreg_gradient(MODEL, CENTRE, rows[batch])))
        actual = estimate(estimator, position, MODEL.data[batch])
        np.testing.assert_allclose(actual, expected, atol=4e-6 * (scale + np.abs(expected).max()))


@pytest.mark.parametrize("batch_size", [1, 7, 100, NUM_DATA])
def test_control_variates_are_the_full_gradient_at_the_centre_for_every_minibatch(
    batch_size: int,
) -> None:
    estimator = gradients.control_variates(MODEL, jnp.asarray(CENTRE))
    batcher = minibatch.without_replacement(NUM_DATA, batch_size)

    def at_centre(key: Array) -> Array:
        rows, _ = batcher.draw(key, batcher.init(key), estimator.rows)
        return estimator.estimate(estimator.constants, jnp.asarray(CENTRE), rows)

    found = np.asarray(jax.jit(jax.vmap(at_centre))(jax.random.split(jax.random.key(0), 200)))
    assert_close(found, np.tile(logreg_gradient(MODEL, CENTRE, np.asarray(MODEL.data)), (200, 1)))
    assert np.all(found == found[0])  # no minibatch leaves a rounding error of its own


def test_control_variates_of_quadratic_potentials_have_no_noise() -> None:
    model = gaussian_mean(num_data=60)
    estimator = gradients.control_variates(model, jnp.asarray(model.posterior_mean, jnp.float32))
    position = model.posterior_mean + 0.3
    for batch in (slice(0, 1), slice(7, 19)):
        found = estimate(estimator, position.astype(np.float32), model.data[batch])
        np.testing.assert_allclose(found, np.full(3, -0.3 * model.precision), rtol=2e-5)


@pytest.mark.parametrize("kind", ["standard", "control_variates"])
@pytest.mark.parametrize("batch_size", [1, 30, 200])
def test_the_mean_over_a_partition_is_the_full_gradient(kind: str, batch_size: int) -> None:
    estimator = (
        gradients.standard(MODEL)
        if kind == "standard"
        else gradients.control_variates(MODEL, jnp.asarray(CENTRE))
    )
    position = jnp.asarray(POSITIONS[5])
    batches = MODEL.data.reshape(-1, batch_size, 4)
    found = jax.vmap(lambda rows: estimator.estimate(estimator.constants, position, rows))(batches)
    mean = np.asarray(found, np.float64).mean(axis=0)
    assert_close(mean, logreg_gradient(MODEL, POSITIONS[5], np.asarray(MODEL.data)), rtol=1e-5)


def test_an_estimator_hands_out_the_data_and_captures_none() -> None:
    model = gaussian_mean(num_data=2000)
    position = jnp.zeros(3)
    for estimator in (gradients.standard(model), gradients.control_variates(model, position)):
        assert jax.tree.leaves(estimator.rows)[0] is model.data
        jaxpr = jax.make_jaxpr(estimator.estimate)(estimator.constants, position, model.data[:9])
        assert all(np.size(constant) < 100 for constant in jaxpr.consts)
        assert all(leaf.size <= 3 for leaf in jax.tree.leaves(estimator.constants))


@pytest.mark.parametrize("num_positions", [1, 15, 16, 17, 32, 33, 70])
def test_full_gradients_serve_any_number_of_positions(num_positions: int) -> None:
    positions = POSITIONS[:num_positions]
    found = gradients.full_gradients(MODEL)(jnp.asarray(positions))
    assert found.shape == (num_positions, 4)
    rows = np.asarray(MODEL.data)
    expected = np.stack([logreg_gradient(MODEL, position, rows) for position in positions])
    assert_close(found, expected)


@pytest.mark.parametrize("num_positions", [1, 16, 17, 40])
@pytest.mark.parametrize("num_rows", [5, 2048, 5000])
def test_full_log_densities_are_those_of_float64(num_positions: int, num_rows: int) -> None:
    model = logistic_regression(num_train=num_rows, num_test=1, dim=4, data_seed=1)
    positions = POSITIONS[:num_positions]
    found = gradients.full_log_densities(model)(positions)
    exact = positions.astype(np.float64)
    likelihoods = -np.logaddexp(0, -np.asarray(model.data, np.float64) @ exact.T).sum(axis=0)
    priors = [float(model.log_prior(jnp.asarray(position))) for position in positions]
    assert found.shape == (num_positions,)
    np.testing.assert_allclose(found, likelihoods + priors, rtol=2e-6)


def test_a_log_density_that_overflows_is_infinite_without_a_warning(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "available_cores", lambda: 2)
    model = gaussian_mean(num_data=4 * gradients.BLOCK_ROWS)
    # 4.5e38 in all: what each of two threads sums is finite in float32, both together are not.
    far = np.sqrt(2 * 4.5e38 / (model.precision * model.dim))
    positions = np.full((1, model.dim), far, np.float32)
    assert gradients.full_log_densities(model)(positions) == -np.inf
    assert not recwarn.list


def test_full_gradients_compile_only_for_the_chunk_sizes() -> None:
    full = gradients.full_gradients(MODEL)
    for num_positions in gradients.CHUNKS:
        full(jnp.asarray(POSITIONS[:num_positions]))
    events: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for num_positions in (1, 2, 15, 16, 17, 31, 32, 33, 50, 70):
            full(POSITIONS[:num_positions])
        assert not events
        jax.jit(lambda x: 3 * x)(jnp.ones(7))  # the listener does hear of compilations
        assert events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("num_rows", [1, 5, 1023, 1024, 1025, 2048, 5000])
def test_full_gradients_cover_every_row_whatever_the_blocks(num_rows: int) -> None:
    model = logistic_regression(num_train=num_rows, num_test=1, dim=4, data_seed=1)
    found = gradients.full_gradients(model)(jnp.asarray(POSITIONS[:3]))
    rows = np.asarray(model.data)
    expected = np.stack([logreg_gradient(model, position, rows) for position in POSITIONS[:3]])
    assert_close(found, expected)


@pytest.mark.parametrize("block_rows", [1, 3, 4, 6, 7, 12, 13, 100])
def test_sums_over_blocks_of_any_size(block_rows: int) -> None:
    rows = {"x": jnp.arange(12.0), "y": jnp.ones((12, 2))}
    total = gradients.sum_over_blocks(
        lambda block: {"xy": block["x"] @ block["y"], "n": jnp.float32(len(block["x"]))},
        rows,
        block_rows,
    )
    np.testing.assert_array_equal(total["xy"], [66, 66])
    assert total["n"] == 12


@dataclass(frozen=True, eq=False)
class InOnePiece(GaussianMean):
    """A likelihood of all rows in one piece, from sums of the data; that of rows is refused."""

    @property
    def full_data(self) -> dict[str, Array]:
        return {"sum": jnp.sum(self.data, axis=0), "rows": jnp.float32(self.num_data)}

    def full_log_likelihood(self, position: Array, full_data: dict[str, Array]) -> Array:
        mean = full_data["sum"] / full_data["rows"]
        return -0.5 * full_data["rows"] * jnp.sum((mean - position) ** 2)

    def log_likelihood(self, position: Array, minibatch: Array) -> Array:
        raise AssertionError("the likelihood in one piece must be used")


@pytest.mark.parametrize("num_positions", [1, 5])
def test_full_gradients_use_the_likelihood_in_one_piece(num_positions: int) -> None:
    model = InOnePiece(gaussian_mean(num_data=60).data)
    positions = POSITIONS[:num_positions, :3]
    found = gradients.full_gradients(model)(jnp.asarray(positions))
    expected = model.precision * (model.posterior_mean - positions)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    densities = gradients.full_log_densities(model)(positions)
    one_by_one = [
        model.log_prior(position) + model.full_log_likelihood(position, model.full_data)
        for position in positions
    ]
    np.testing.assert_allclose(densities, one_by_one, rtol=1e-6)


@dataclass(frozen=True, eq=False)
class SeveralAtOnce(GaussianMean):
    """The likelihoods of several positions together; that of one is refused."""

    def log_likelihoods(self, positions: Array, minibatch: Array) -> Array:
        return jax.vmap(super().log_likelihood, in_axes=(0, None))(positions, minibatch)

    def log_likelihood(self, position: Array, minibatch: Array) -> Array:
        raise AssertionError("the likelihoods of several positions must be used")


@pytest.mark.parametrize("kind", [GaussianMean, SeveralAtOnce])
@pytest.mark.parametrize("num_positions", [1, 3, 9])
def test_full_gradients_in_high_dimension(kind: type[GaussianMean], num_positions: int) -> None:
    dim = gradients.MAX_SHORT_DIM + 7
    model = kind(gaussian_mean(num_data=2500, dim=dim).data)
    positions = np.random.default_rng(4).normal(size=(num_positions, dim)).astype(np.float32)
    found = gradients.full_gradients(model)(jnp.asarray(positions))
    assert_close(found, model.precision * (model.posterior_mean - positions), rtol=1e-5)
    densities = gradients.full_log_densities(model)(positions)
    # Up to a constant: both are quadratic about the posterior mean.
    deviations = positions - model.posterior_mean
    expected = -0.5 * model.precision * np.sum(deviations**2, axis=1)
    atol = 2e-6 * np.max(np.abs(expected))
    np.testing.assert_allclose(densities - densities[0], expected - expected[0], atol=atol)


@dataclass(frozen=True, eq=False)
class TwoArrays:
    """The same posterior with its data in a pytree of two leaves."""

    inner: GaussianMean

    @property
    def data(self) -> dict[str, Array]:
        return {"first": self.inner.data[:, :1], "rest": self.inner.data[:, 1:]}

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def num_data(self) -> int:
        return self.inner.num_data

    def log_prior(self, position: Array) -> Array:
        return self.inner.log_prior(position)

    def log_likelihood(self, position: Array, minibatch: dict[str, Array]) -> Array:
        rows = jnp.concatenate([minibatch["first"], minibatch["rest"]], axis=1)
        return self.inner.log_likelihood(position, rows)


def test_data_may_be_a_pytree() -> None:
    model = TwoArrays(gaussian_mean(num_data=1500))
    assert gradients.num_rows(model.data) == 1500
    position = np.array([1.0, 2.0, 3.0], np.float32)
    found = gradients.full_gradients(model)(jnp.asarray(position[None]))[0]  # type: ignore[arg-type]
    expected = model.inner.precision * (model.inner.posterior_mean - position)
    assert_close(found, expected)
    rows = jax.tree.map(lambda leaf: leaf[:10], model.data)
    found = gradients.scaled_gradient(model, jnp.asarray(position), rows)  # type: ignore[arg-type]
    mean = np.asarray(model.inner.data[:10], np.float64).mean(axis=0)
    assert_close(found, 1500 * (mean - position) - position / 10)
