"""Predictions as what has to converge."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from nuts_runs import SETTINGS
from small_posteriors import LINEAR, InOnePiece

from mamba_cli.errors import ConfigError
from mamba_cli.ground_truth.predictions import Predictions


@dataclass(frozen=True, eq=False)
class Untested(InOnePiece):
    """Has nothing to predict."""

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.zeros(0)


def test_predictions_cannot_be_asked_of_a_model_without_test_data() -> None:
    settings = replace(SETTINGS, criterion="predictions")
    model = Untested(LINEAR.data[:40], 2)
    with pytest.raises(ConfigError, match=r"criterion=predictions.*has no test data"):
        Predictions(model, settings)
