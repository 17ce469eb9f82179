"""Predictions at the draws, where they are what has to converge."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.ground_truth.settings import NutsSettings, require
from mamba_cli.types import Array, Model, PyTree


class Predictions:
    """Predictions for the test inputs, where they are what has to converge."""

    def __init__(self, model: Model, settings: NutsSettings):
        self.asked = settings.criterion == "predictions"
        self.num = 0
        if self.asked:
            self.inputs = model.test_inputs
            self.program = flattened(model.predict)
            position = jax.ShapeDtypeStruct((model.dim,), jnp.float32)
            self.num = jax.eval_shape(model.predict, position, self.inputs).size
            require(
                "criterion",
                "predictions",
                self.num > 0,
                f"positions: {model.name} has no test data",
            )

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """``[num_draws, num_predictions]``, float32."""
        if not self.asked:
            return np.zeros((len(positions), 0), np.float32)
        return at_each(self.program, positions, self.inputs)


def flattened(function: Callable[[Array, PyTree], Array]) -> Callable[[Array, PyTree], Array]:
    """``function`` compiled, its value a vector."""
    return jax.jit(lambda position, inputs: jnp.ravel(function(position, inputs)))


def at_each(
    program: Callable[[Array, PyTree], Array], positions: np.ndarray, inputs: PyTree
) -> np.ndarray:
    """``program`` at each of ``positions``, ``[num_draws, num_values]`` float32."""
    return np.stack([np.asarray(program(jnp.asarray(p, jnp.float32), inputs)) for p in positions])
