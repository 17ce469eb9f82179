from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.typing import NDArray

from mamba_cli import gradients
from mamba_cli.data import mnist
from mamba_cli.errors import ConfigError
from mamba_cli.models import bnn
from mamba_cli.models.bnn import BayesianNeuralNetwork, LabelledImages

REAL = Path(os.environ.get("MAMBA_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))
needs_mnist = pytest.mark.skipif(
    not (REAL / "mnist" / "train-images-idx3-ubyte.gz").is_file(),
    reason=f"the MNIST files are not in {REAL / 'mnist'} (set MAMBA_DATA_DIR)",
)
NUM_PIXELS, NUM_HIDDEN, NUM_CLASSES = 12, 6, 10


def small_images() -> mnist.Mnist:
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (n, NUM_PIXELS)).astype(np.uint8) for n in (40, 8))
    train_labels, test_labels = (rng.integers(0, 10, n).astype(np.uint8) for n in (40, 8))
    return mnist.Mnist(train, train_labels, test, test_labels)


def small_model(activation: str = "softmax") -> BayesianNeuralNetwork:
    return bnn.from_images(small_images(), num_hidden=NUM_HIDDEN, activation=activation)


@pytest.fixture(scope="module")
def model() -> BayesianNeuralNetwork:
    return small_model()


def random_position(seed: int) -> NDArray[np.float64]:
    dim = NUM_HIDDEN * (NUM_PIXELS + 1) + NUM_CLASSES * (NUM_HIDDEN + 1)
    return np.random.default_rng(seed).normal(size=dim)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


HIDDEN = {
    "softmax": softmax,
    "tanh": np.tanh,
    "relu": lambda u: np.maximum(u, 0.0),
    "sigmoid": lambda u: 1 / (1 + np.exp(-u)),
}


def blocks_of(position: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """A, B, a, b by the layout that the class documents."""
    ends = np.cumsum([NUM_HIDDEN * NUM_CLASSES, NUM_PIXELS * NUM_HIDDEN, NUM_CLASSES])
    a, b, a_bias, b_bias = np.split(position, ends)
    return [a.reshape(NUM_HIDDEN, -1), b.reshape(NUM_PIXELS, -1), a_bias, b_bias]


def reference_probabilities(
    position: NDArray[np.float64], images: NDArray[np.uint8], activation: str = "softmax"
) -> NDArray[np.float64]:
    """The paper's beta(x) = softmax(phi(x B + b) A + a) in float64."""
    a, b, a_bias, b_bias = blocks_of(position)
    return softmax(HIDDEN[activation](images / 255.0 @ b + b_bias) @ a + a_bias)


def reference_log_posterior(position: NDArray[np.float64], activation: str = "softmax") -> float:
    data = small_images()
    probabilities = reference_probabilities(position, data.train_images, activation)
    likelihood = np.log(probabilities[np.arange(40), data.train_labels]).sum()
    return float(likelihood - 0.5 * position @ position)


def reference_gradient(position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Backpropagation by hand through both softmaxes."""
    data = small_images()
    a, b, a_bias, b_bias = blocks_of(position)
    pixels = data.train_images / 255.0
    hidden = softmax(pixels @ b + b_bias)
    d_logits = np.eye(10)[data.train_labels] - softmax(hidden @ a + a_bias)
    d_hidden = d_logits @ a.T
    # Jacobian of softmax: diag(h) - h h^T.
    d_inner = hidden * (d_hidden - (hidden * d_hidden).sum(1, keepdims=True))
    blocks = [hidden.T @ d_logits, pixels.T @ d_inner, d_logits.sum(0), d_inner.sum(0)]
    return np.concatenate([block.ravel() for block in blocks]) - position


def as_float32(position: NDArray[np.float64]) -> jax.Array:
    return jnp.asarray(position, jnp.float32)


@pytest.mark.parametrize("activation", ["softmax", "tanh", "relu", "sigmoid"])
def test_log_likelihoods_of_several_positions(activation: str) -> None:
    model = small_model(activation)
    positions = np.stack([random_position(seed) for seed in range(3)])
    expected = [reference_log_posterior(p, activation) + 0.5 * p @ p for p in positions]
    found = model.log_likelihoods(as_float32(positions), model.data)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("num_positions", [1, 5])
def test_full_gradients(model: BayesianNeuralNetwork, num_positions: int) -> None:
    positions = np.stack([random_position(seed) for seed in range(num_positions)])
    found = gradients.full_gradients(model)(as_float32(positions))
    expected = np.stack([reference_gradient(position) for position in positions])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["softmax", "tanh", "relu", "sigmoid"])
def test_log_posterior_and_its_gradient(activation: str) -> None:
    model = small_model(activation)

    @jax.jit
    def value_and_grad(position: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(
            lambda p: model.log_prior(p) + model.log_likelihood(p, model.data)
        )(position)

    position = random_position(1)
    value, gradient = value_and_grad(as_float32(position))
    # Both up to constants, and both drop only the normal density's own.
    assert float(value) == pytest.approx(reference_log_posterior(position, activation), rel=2e-6)
    for direction in np.random.default_rng(2).normal(size=(5, model.dim)):
        step = 1e-6 * direction
        difference = reference_log_posterior(position + step, activation)
        difference -= reference_log_posterior(position - step, activation)
        along = np.asarray(gradient, np.float64) @ direction
        assert difference / 2e-6 == pytest.approx(along, rel=1e-4, abs=1e-3)


def test_gradient_equals_backpropagation_by_hand(model: BayesianNeuralNetwork) -> None:
    gradient = jax.jit(jax.grad(lambda p: model.log_prior(p) + model.log_likelihood(p, model.data)))
    for seed in range(3):
        position = random_position(seed)
        np.testing.assert_allclose(
            gradient(as_float32(position)), reference_gradient(position), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("activation", ["softmax", "relu"])
def test_predictions_are_the_class_probabilities(activation: str) -> None:
    model = small_model(activation)
    position = random_position(4)
    prediction = model.predict(as_float32(position), model.test_inputs)
    reference = reference_probabilities(position, small_images().test_images, activation)
    np.testing.assert_allclose(prediction, reference, rtol=1e-4)
    np.testing.assert_allclose(np.sum(prediction, axis=1), 1.0, rtol=1e-6)


def test_the_mean_over_a_partition_into_minibatches_is_the_full_gradient(
    model: BayesianNeuralNetwork,
) -> None:
    position = as_float32(random_position(5))
    gradient = jax.jit(jax.grad(model.log_likelihood))
    order = np.random.default_rng(6).permutation(40).reshape(5, 8)
    estimates = [
        5 * gradient(position, jax.tree.map(lambda a, r=rows: a[r], model.data)) for rows in order
    ]
    np.testing.assert_allclose(
        np.mean(estimates, axis=0), gradient(position, model.data), rtol=1e-4, atol=1e-4
    )


def test_images_stay_bytes_and_are_arguments(model: BayesianNeuralNetwork) -> None:
    assert model.data.images.dtype == jnp.uint8
    assert model.test_inputs.dtype == jnp.uint8
    jaxpr = jax.make_jaxpr(model.log_likelihood)(as_float32(random_position(0)), model.data)
    assert all(np.size(constant) < 40 for constant in jaxpr.consts)


def test_far_away_positions_stay_finite(model: BayesianNeuralNetwork) -> None:
    position = 1e3 * as_float32(random_position(7))
    value, gradient = jax.jit(jax.value_and_grad(model.log_likelihood))(position, model.data)
    assert np.isfinite(float(value))
    assert np.isfinite(gradient).all()


def test_metrics_of_a_prediction(model: BayesianNeuralNetwork) -> None:
    right = np.eye(10)[model.test_labels]
    scores = model.predictive_metrics(jnp.asarray(right))
    assert scores["accuracy"] == 1.0
    assert scores["ece"] == scores["mce"] == 0.0
    wrong = np.roll(right, 1, axis=1)
    mixed = np.concatenate([right[:6], wrong[6:]])
    scores = model.predictive_metrics(jnp.asarray(mixed))
    assert scores["accuracy"] == 0.75
    # Confidence 1 everywhere and three in four correct: one bin, 0.25 off.
    assert scores["ece"] == pytest.approx(0.25)
    assert scores["mce"] == pytest.approx(0.25)
    uniform = model.predictive_metrics(jnp.full((8, 10), 0.1))
    assert uniform["log_loss"] == pytest.approx(np.log(10.0), rel=1e-6)


def test_hold_out_divides_the_training_images(model: BayesianNeuralNetwork) -> None:
    def rows(images: jax.Array, labels: object) -> set[bytes]:
        stacked = np.concatenate([np.asarray(images), np.asarray(labels)[:, None]], axis=1)
        return {row.astype(np.uint8).tobytes() for row in stacked}

    part = model.hold_out(0.2, seed=3)
    kept, held_out = rows(*part.data), rows(part.test_inputs, part.test_labels)
    assert (part.num_data, len(held_out)) == (32, 8)
    assert kept.isdisjoint(held_out)
    assert kept | held_out == rows(*model.data)
    assert (part.dim, part.activation) == (model.dim, model.activation)
    assert part.digest != model.digest
    with pytest.raises(ConfigError, match="held-out fraction 0"):
        model.hold_out(0.0, seed=0)


def test_digest_tells_models_and_data_apart(model: BayesianNeuralNetwork) -> None:
    images = small_images()
    assert small_model().digest == model.digest
    assert len(model.digest) == 64
    changed = images.train_images.copy()
    changed[0, 0] ^= 1
    digests = {
        model.digest,
        small_model("tanh").digest,
        bnn.from_images(images, num_hidden=5).digest,
        bnn.from_images(images._replace(train_images=changed), num_hidden=NUM_HIDDEN).digest,
    }
    assert len(digests) == 4


def test_hyperparameters_out_of_range_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.activation=swish: expected one of softmax, tanh, relu, sigmoid"
    ):
        bnn.from_images(small_images(), activation="swish")
    with pytest.raises(ConfigError, match=r"model\.num_hidden=0"):
        bnn.from_images(small_images(), num_hidden=0)


def test_ravel_and_unravel_are_inverse(model: BayesianNeuralNetwork) -> None:
    position = jnp.arange(model.dim, dtype=jnp.float32)
    np.testing.assert_array_equal(model.ravel(model.unravel(position)), position)
    assert model.initial_position(jax.random.key(0)).shape == (model.dim,)


@needs_mnist
def test_on_mnist_a_short_optimisation_learns_the_digits() -> None:
    model = bnn.bayesian_neural_network(data_dir=REAL)
    assert (model.num_data, model.dim) == (60_000, 79_510)

    def potential(position: jax.Array, minibatch: LabelledImages) -> jax.Array:
        return -model.log_prior(position) / 60_000 - model.log_likelihood(position, minibatch) / 500

    optimiser = optax.adam(0.02)

    @jax.jit
    def optimise(position: jax.Array, data: LabelledImages) -> jax.Array:
        def step(
            carry: tuple[jax.Array, optax.OptState], minibatch: LabelledImages
        ) -> tuple[object, None]:
            position, state = carry
            updates, state = optimiser.update(jax.grad(potential)(position, minibatch), state)
            return (optax.apply_updates(position, updates), state), None

        minibatches = jax.tree.map(lambda a: a.reshape(120, 500, *a.shape[1:]), data)
        return jax.lax.scan(step, (position, optimiser.init(position)), minibatches)[0][0]

    start = model.initial_position(jax.random.key(0))
    prediction = model.predict(optimise(start, model.data), model.test_inputs)
    assert model.predictive_metrics(prediction)["accuracy"] > 0.85
