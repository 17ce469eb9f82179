"""What a user's model becomes: a :class:`mamba_cli.types.Model` made of functions.

``models/python.py`` and ``models/numpyro.py`` find the functions and the data; everything here
is the same for both: the checks before anything is sampled, the digest, the test part.

Without predictions of its own, a model is measured by the density of its test rows: the mean over
draws of p(y_i | theta) is the posterior predictive density of a row, and ``log_loss`` the mean of
minus its logarithm.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from mamba_cli import metrics
from mamba_cli.data.arrays import require_memory
from mamba_cli.data.split import hold_out_rows
from mamba_cli.errors import ConfigError
from mamba_cli.types import Array, PyTree

ROWS_PER_CHECK = 1024
"""Rows whose log likelihood is computed together when the start is checked."""


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A posterior over one flat position, from functions of it.

    Attributes
    ----------
    name
        Of result files and messages.
    dim
        Length of a position.
    data
        A pytree of arrays with the leading axis ``num_data``.
    prior
        Log prior density at a position, with the Jacobian of its transformation.
    row_likelihoods
        Log likelihood of each row of a minibatch, ``[n]``.
    start
        A start for the optimiser, from a key.
    named
        The parameters at a position, by name.
    prediction
        Prediction for test inputs; ``None`` for the density of test rows.
    test_inputs
        What is predicted for: rows laid out as ``data``, where ``prediction`` is ``None``.
    test_targets
        What predictions are measured against; ``None`` without predictions.
    """

    name: str
    dim: int
    data: PyTree
    prior: Callable[[Array], Array]
    row_likelihoods: Callable[[Array, PyTree], Array]
    start: Callable[[Array], Array]
    named: Callable[[Array], dict[str, Array]]
    prediction: Callable[[Array, PyTree], Array] | None = None
    test_inputs: PyTree = None
    test_targets: np.ndarray | None = None
    _programs: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.test_inputs is None:
            none = jax.tree.map(lambda leaf: leaf[:0], self.data)
            object.__setattr__(self, "test_inputs", none)

    @property
    def num_data(self) -> int:
        return int(jax.tree.leaves(self.data)[0].shape[0])

    @cached_property
    def digest(self) -> str:
        """Sha256 of the computation that the densities are, and of the data.

        The computation as JAX sees it, with every constant: it changes with a helper function or
        a global that the model's file only imports, and not with a comment.
        """
        state = hashlib.sha256()
        position = jnp.zeros(self.dim, jnp.float32)
        row = jax.tree.map(lambda leaf: leaf[:1], self.data)
        for traced in (
            jax.make_jaxpr(self.prior)(position),
            jax.make_jaxpr(self.row_likelihoods)(position, row),
        ):
            state.update(re.sub(r"0x[0-9a-f]+", "", str(traced)).encode())
            for constant in _constants_of(traced):
                state.update(f"{constant.dtype}{constant.shape}".encode())
                state.update(np.ascontiguousarray(constant).data)
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.data)[0]:
            state.update(f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}".encode())
            state.update(np.ascontiguousarray(leaf).data)
        return state.hexdigest()

    def initial_position(self, rng_key: Array) -> Array:
        """A start for the optimiser, ``[dim]``."""
        return self.start(rng_key)

    def log_prior(self, position: Array) -> Array:
        """Log prior density of the flat position, a scalar."""
        return self.prior(position)

    def log_likelihood(self, position: Array, minibatch: PyTree) -> Array:
        """Log likelihood summed over the rows of ``minibatch``, a scalar."""
        return jnp.sum(self.row_likelihoods(position, minibatch))

    def constrain(self, position: Array) -> dict[str, Array]:
        """The parameters at ``position`` ``[dim]``, by name, each in its own space."""
        return self.named(position)

    def predict(self, position: Array, inputs: PyTree) -> Array:
        """The user's prediction, or the density of each row of ``inputs``, ``[num, ...]``."""
        if self.prediction is not None:
            return self.prediction(position, inputs)
        return jnp.exp(self.log_prediction(position, inputs))

    @property
    def predicts_densities(self) -> bool:
        """Whether :meth:`predict` is the density of test rows."""
        return self.prediction is None

    def log_prediction(self, position: Array, inputs: PyTree) -> Array:
        """Log density of each row of ``inputs``, ``[num]``."""
        if not num_rows_of(inputs):
            return jnp.zeros(0, jnp.float32)
        return self.row_likelihoods(position, inputs)

    def predictive_metrics(self, prediction: Array) -> dict[str, float]:
        """Metrics of the posterior predictive; empty where the model has no test part.

        Without predictions of its own, ``prediction`` is the log of the predictive density.
        """
        if not num_rows_of(self.test_inputs):
            return {}
        if self.prediction is None:
            return {"log_loss": float(-np.mean(np.asarray(prediction, np.float64)))}
        assert self.test_targets is not None
        return metrics_of(np.asarray(prediction, np.float64), self.test_targets)

    def hold_out(self, fraction: float, seed: int) -> OwnModel:
        """The same model on a part of its rows; the density of the rest is what is measured.

        Parameters
        ----------
        fraction
            Part of the training rows to hold out, in (0, 1).
        seed
            Seed of the random choice (NumPy's PCG64).

        Raises
        ------
        DataError
            There is no memory for a copy of the rows.
        """
        require_memory(
            sum(leaf.nbytes for leaf in jax.tree.leaves(self.data)),
            f"model {self.name}: rewards on rows held out copy the others, which",
            "Take a reward that needs no held-out rows, as reward@tuner.reward=stein_moments.",
        )
        kept, held_out = hold_out_rows(self.num_data, fraction, seed)

        def part(rows: np.ndarray) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[rows]), self.data)

        return replace(
            self,
            data=part(kept),
            test_inputs=part(held_out),
            prediction=None,
            test_targets=None,
        )


def require_same_layout(test_rows: PyTree, rows: PyTree, where: str, data: str = "data") -> None:
    """Refuse test rows that differ from ``rows`` in names or shapes. Raises ``ConfigError``."""

    def layout(tree: PyTree) -> dict[str, Any]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        name = partial(jax.tree_util.keystr, simple=True, separator=".")
        return {name(path): leaf.shape[1:] for path, leaf in leaves}

    if layout(test_rows) != layout(rows):
        raise ConfigError(
            f"{where}: is laid out as {layout(test_rows)}; expected rows like {data}, "
            f"{layout(rows)}."
        )


def _constants_of(traced: Any) -> Iterator[np.ndarray]:
    """Every array that a traced computation holds, in those it calls (jit, scan, cond) too."""
    if isinstance(traced, ClosedJaxpr):
        yield from (np.asarray(constant) for constant in traced.consts)
        yield from _constants_of(traced.jaxpr)
    elif isinstance(traced, Jaxpr):
        for equation in traced.eqns:
            literals = (atom.val for atom in equation.invars if isinstance(atom, Literal))
            yield from (np.asarray(value) for value in literals)
            for _, parameter in sorted(equation.params.items()):
                yield from _constants_of(parameter)
    elif isinstance(traced, np.ndarray | jax.Array):
        yield np.asarray(traced)
    elif isinstance(traced, tuple | list):
        for part in traced:
            yield from _constants_of(part)


def num_rows_of(rows: PyTree) -> int:
    """The leading axis that the leaves of ``rows`` share."""
    return int(jax.tree.leaves(rows)[0].shape[0])


def metrics_of(prediction: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The metrics that make sense for a prediction and its targets.

    Whole-number or boolean targets with probabilities ``[num_test]`` or
    ``[num_test, num_classes]`` are labels: accuracy, log_loss, ece, mce. Others are numbers: rmse.
    """
    are_labels = targets.dtype.kind in "iub" and targets.ndim == 1
    are_probabilities = bool(np.all((prediction >= 0) & (prediction <= 1)))
    if are_labels and are_probabilities and _has_classes(prediction, targets):
        labels = targets.astype(np.int64)
        return {
            "accuracy": metrics.accuracy(prediction, labels),
            "log_loss": metrics.log_loss(prediction, labels),
            "ece": metrics.expected_calibration_error(prediction, labels),
            "mce": metrics.maximum_calibration_error(prediction, labels),
        }
    return {"rmse": metrics.rmse(prediction, targets)}


def _has_classes(prediction: np.ndarray, targets: np.ndarray) -> bool:
    largest = int(targets.max())
    if prediction.ndim == 1:
        return int(targets.min()) >= 0 and largest <= 1
    return prediction.ndim == 2 and largest < prediction.shape[1]


def require_scalar(value: Any, where: str, expected: str) -> Array:
    """``value`` as a float32 scalar.

    Raises
    ------
    ConfigError
        It is not one real number.
    """
    shape = getattr(value, "shape", ())
    is_number = isinstance(value, int | float) or (
        hasattr(value, "dtype") and np.dtype(value.dtype).kind in "fiub"
    )
    if not is_number:
        raise ConfigError(f"{where}: returned {type(value).__name__}; expected {expected}.")
    if shape != ():
        raise ConfigError(
            f"{where}: returned an array of shape {tuple(shape)}; expected {expected}, a scalar "
            "(sum over the entries)."
        )
    return jnp.asarray(value, jnp.float32)


def checked(model: OwnModel, functions: tuple[str, str, str]) -> OwnModel:
    """``model``, once its densities have proved finite at the start.

    Parameters
    ----------
    functions
        What messages call the start, the prior and the likelihood.

    Raises
    ------
    ConfigError
        The log prior, the log likelihood of a row (which is named), or a gradient is not finite.
    """
    of_start, of_prior, of_likelihood = functions
    position = model.start(jax.random.key(0))
    some = jax.tree.map(lambda leaf: leaf[:ROWS_PER_CHECK], model.data)
    prior, slope, slopes = jax.jit(partial(_slopes, model))(position, some)
    if not np.isfinite(float(prior)):
        raise ConfigError(
            f"{of_prior}: is {float(prior)} at the start that {of_start} gives; expected a finite "
            "number."
        )
    rows = _row_values(model, position)
    bad = np.flatnonzero(~np.isfinite(rows))
    if len(bad):
        raise ConfigError(
            f"{of_likelihood}: is {rows[bad[0]]} for row {bad[0]} of the data (counted from 0) at "
            f"the start that {of_start} gives, and so for {len(bad):,} of {len(rows):,} rows; "
            "expected finite numbers."
        )
    for name, gradient in ((of_prior, slope), (of_likelihood, slopes)):
        if not np.all(np.isfinite(np.asarray(gradient))):
            raise ConfigError(
                f"{name}: its gradient is not finite at the start that {of_start} gives; chains "
                "follow gradients (a frequent cause is the derivative of a branch of jnp.where "
                "that is not taken)."
            )
    return model


def _slopes(model: OwnModel, position: Array, rows: PyTree) -> tuple[Array, Array, Array]:
    """The log prior, its gradient, and that of the log likelihood of ``rows``."""
    prior, slope = jax.value_and_grad(model.prior)(position)
    return prior, slope, jax.grad(model.log_likelihood)(position, rows)


def _row_values(model: OwnModel, position: Array) -> np.ndarray:
    """Log likelihood of every row ``[num_data]`` at ``position``."""
    of_block = jax.jit(model.row_likelihoods)
    # Sliced in NumPy, where it costs nothing: JAX compiles a slice for each place.
    data = jax.tree.map(np.asarray, model.data)
    values = []
    for first in range(0, model.num_data, ROWS_PER_CHECK):
        # The last block is filled up with rows seen before: one shape, one program.
        last = min(first + ROWS_PER_CHECK, model.num_data)
        begin = max(0, last - ROWS_PER_CHECK)
        block = jax.tree.map(lambda leaf: leaf[begin:last], data)  # noqa: B023
        values.append(np.asarray(of_block(position, block))[first - begin :])
    return np.concatenate(values)
