"""Bayesian neural network for handwritten digits (appendix C.3 of the paper).

    p(y_i = k | x_i) = beta_k(x_i),   beta(x) = softmax(phi(x B + b) A + a)

with all weights and biases N(0, 1). The paper's hidden layer is a softmax too, phi =
softmax over the hidden units; tanh, relu and sigmoid are offered beside it. Images are
kept as bytes and scaled to [0, 1] when they are used, a quarter of the memory and of
the traffic of gathering a minibatch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mamba_cli import metrics
from mamba_cli.data import mnist
from mamba_cli.data.download import DataDir
from mamba_cli.data.split import hold_out_rows
from mamba_cli.errors import ConfigError
from mamba_cli.types import Array

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "softmax": jax.nn.softmax,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
}
LARGEST_BYTE = 255.0


class LabelledImages(NamedTuple):
    """Rows of the data: bytes ``[n, num_pixels]`` and labels ``[n]``, uint8 both."""

    images: Array
    labels: Array


class Parameters(NamedTuple):
    """The position's four blocks, in their order in the flat vector."""

    output_weights: Array  # A [num_hidden, num_classes]
    hidden_weights: Array  # B [num_pixels, num_hidden]
    output_biases: Array  # a [num_classes]
    hidden_biases: Array  # b [num_hidden]


class Backward(NamedTuple):
    """What the gradient of a row is made of, besides its image."""

    activations: Array  # h = phi(x B + b) [n, num_hidden]
    outputs: Array  # r = one-hot label - beta [n, num_classes], d log likelihood / d output
    hidden: Array  # d = phi'(x B + b)^T A r [n, num_hidden], the same of the hidden layer


def _pixels(images: Array) -> Array:
    return images.astype(jnp.float32) / LARGEST_BYTE


@dataclass(frozen=True, eq=False)
class BayesianNeuralNetwork:
    """The network as a :class:`mamba_cli.types.Model`.

    Parameters
    ----------
    data
        Training images and labels.
    test_inputs, test_labels
        Images ``[num_test, num_pixels]``, bytes, and their labels.
    num_hidden
        Hidden units.
    activation
        phi, a key of ``ACTIVATIONS``.
    num_classes
        Output units.
    """

    data: LabelledImages
    test_inputs: Array
    test_labels: NDArray[np.int64]
    num_hidden: int
    activation: str
    num_classes: int = mnist.NUM_CLASSES
    name: str = field(default="bnn")

    @property
    def num_pixels(self) -> int:
        return int(self.data.images.shape[1])

    @property
    def dim(self) -> int:
        """(num_pixels + 1) num_hidden + (num_hidden + 1) num_classes."""
        return (self.num_pixels + 1) * self.num_hidden + (self.num_hidden + 1) * self.num_classes

    @property
    def num_data(self) -> int:
        return int(self.data.images.shape[0])

    @cached_property
    def digest(self) -> str:
        """Sha256 of name, hyperparameters, training data and test data."""
        settings = (
            f"{self.name} num_hidden={self.num_hidden} activation={self.activation} "
            f"num_classes={self.num_classes}"
        )
        state = hashlib.sha256(settings.encode())
        for array in (*self.data, self.test_inputs, self.test_labels):
            state.update(np.asarray(array).tobytes())
        return state.hexdigest()

    def unravel(self, position: Array) -> Parameters:
        """The four blocks of a flat position ``[dim]``."""
        hidden, classes = self.num_hidden, self.num_classes
        sizes = (hidden * classes, self.num_pixels * hidden, classes, hidden)
        a_weights, b_weights, a_biases, b_biases = jnp.split(position, np.cumsum(sizes)[:-1])
        return Parameters(
            a_weights.reshape(hidden, classes),
            b_weights.reshape(self.num_pixels, hidden),
            a_biases,
            b_biases,
        )

    def ravel(self, parameters: Parameters) -> Array:
        """The flat position ``[dim]`` of four blocks."""
        return jnp.concatenate([jnp.ravel(block) for block in parameters])

    def initial_position(self, rng_key: Array) -> Array:
        """N(0, 0.1^2) for every weight and bias: small, so that no unit starts saturated."""
        return 0.1 * jax.random.normal(rng_key, (self.dim,), jnp.float32)

    def log_prior(self, position: Array) -> Array:
        """-|theta|^2 / 2."""
        return -0.5 * jnp.sum(position**2)

    def logits(self, position: Array, images: Array) -> Array:
        """phi(x B + b) A + a for images as bytes, ``[n, num_classes]``."""
        p = self.unravel(position)
        hidden = ACTIVATIONS[self.activation](_pixels(images) @ p.hidden_weights + p.hidden_biases)
        return hidden @ p.output_weights + p.output_biases

    def log_likelihood(self, position: Array, minibatch: LabelledImages) -> Array:
        """Sum of log beta_{y_i}(x_i) over the rows of ``minibatch``."""
        logits = self.logits(position, minibatch.images)
        one_hot = jax.nn.one_hot(minibatch.labels, self.num_classes)
        return jnp.sum(logits * one_hot) - jnp.sum(jax.nn.logsumexp(logits, axis=-1))

    def log_likelihoods(self, positions: Array, minibatch: LabelledImages) -> Array:
        """``log_likelihood`` at each of ``positions`` ``[m, dim]``, ``[m]``.

        The hidden weights of all positions side by side make one product with the images, which
        are turned into numbers once.
        """
        p, count = jax.vmap(self.unravel)(positions), len(positions)
        weights = jnp.moveaxis(p.hidden_weights, 0, 1).reshape(self.num_pixels, -1)
        pre = _pixels(minibatch.images) @ weights + p.hidden_biases.ravel()
        hidden = ACTIVATIONS[self.activation](pre.reshape(-1, count, self.num_hidden))
        logits = jnp.einsum("nmh,mhk->nmk", hidden, p.output_weights) + p.output_biases
        one_hot = jax.nn.one_hot(minibatch.labels, self.num_classes)[:, None]
        normalisers = jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum(logits * one_hot, axis=(0, 2)) - jnp.sum(normalisers, axis=0)

    def centre_statistics(self, centre: Array, rows: LabelledImages) -> Backward:
        """Activations and residuals at the centre, of every row."""
        return self._backward(self.unravel(centre), rows)

    def gradient_difference(
        self, position: Array, centre: Array, rows: LabelledImages, statistics: Backward
    ) -> Array:
        """Gradient of ``log_likelihood`` at ``position`` less that at ``centre``, ``[dim]``.

        With the residuals d of the hidden layer, the gradient of its weights is x^T d: that of
        the difference is x^T (d - d*), one product for both. Those of the output layer, h^T r
        and h*^T r*, are products of the rows put side by side.
        """
        here, there = self._backward(self.unravel(position), rows), statistics
        outputs = here.outputs - there.outputs
        hidden = here.hidden - there.hidden
        return self.ravel(
            Parameters(
                output_weights=jnp.concatenate([here.activations, -there.activations]).T
                @ jnp.concatenate([here.outputs, there.outputs]),
                hidden_weights=_pixels(rows.images).T @ hidden,
                output_biases=jnp.sum(outputs, axis=0),
                hidden_biases=jnp.sum(hidden, axis=0),
            )
        )

    def _backward(self, p: Parameters, rows: LabelledImages) -> Backward:
        activation = ACTIVATIONS[self.activation]
        logits = _pixels(rows.images) @ p.hidden_weights + p.hidden_biases
        activations, pull_back = jax.vjp(activation, logits)
        beta = jax.nn.softmax(activations @ p.output_weights + p.output_biases)
        outputs = jax.nn.one_hot(rows.labels, self.num_classes) - beta
        (hidden,) = pull_back(outputs @ p.output_weights.T)
        return Backward(activations, outputs, hidden)

    def predict(self, position: Array, inputs: Array) -> Array:
        """Class probabilities of images as bytes, ``[num_inputs, num_classes]``."""
        return jax.nn.softmax(self.logits(position, inputs))

    def predictive_metrics(self, prediction: Array) -> dict[str, float]:
        """``accuracy``, ``log_loss``, ``ece`` and ``mce`` on the test images."""
        probabilities = np.asarray(prediction, np.float64)
        return {
            "accuracy": metrics.accuracy(probabilities, self.test_labels),
            "log_loss": metrics.log_loss(probabilities, self.test_labels),
            "ece": metrics.expected_calibration_error(probabilities, self.test_labels),
            "mce": metrics.maximum_calibration_error(probabilities, self.test_labels),
        }

    def hold_out(self, fraction: float, seed: int) -> BayesianNeuralNetwork:
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
        images, labels = np.asarray(self.data.images), np.asarray(self.data.labels)
        return replace(
            self,
            data=LabelledImages(jnp.asarray(images[kept]), jnp.asarray(labels[kept])),
            test_inputs=jnp.asarray(images[held_out]),
            test_labels=labels[held_out].astype(np.int64),
        )


def from_images(
    images: mnist.Mnist,
    *,
    num_hidden: int = 100,
    activation: str = "softmax",
) -> BayesianNeuralNetwork:
    """The model on images in memory; parameters as in :func:`bayesian_neural_network`.

    Raises
    ------
    ConfigError
        A hyperparameter out of its range.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"model.activation={activation}: expected one of {', '.join(ACTIVATIONS)}"
        )
    if num_hidden < 1:
        raise ConfigError(f"model.num_hidden={num_hidden}: expected an integer of at least 1")
    return BayesianNeuralNetwork(
        data=LabelledImages(jnp.asarray(images.train_images), jnp.asarray(images.train_labels)),
        test_inputs=jnp.asarray(images.test_images),
        test_labels=images.test_labels.astype(np.int64),
        num_hidden=int(num_hidden),
        activation=activation,
    )


def bayesian_neural_network(
    data_dir: DataDir = None, num_hidden: int = 100, activation: str = "softmax"
) -> BayesianNeuralNetwork:
    """Load MNIST and return the model.

    Parameters
    ----------
    data_dir
        Folder with the data, ``None`` for the per-user cache; what is missing is downloaded.
    num_hidden
        Hidden units.
    activation
        phi of the hidden layer: softmax as in the paper, tanh, relu or sigmoid.

    Raises
    ------
    ConfigError
        A hyperparameter out of its range.
    DataError
        The data are missing or not what they should be.
    """
    return from_images(mnist.load_mnist(data_dir), num_hidden=num_hidden, activation=activation)
