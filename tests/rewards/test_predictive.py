"""Rewards on predictions: metrics of held-out rows, letters told from digits, clear refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_model import gaussian_mean

from mamba_cli.data import mnist
from mamba_cli.errors import ConfigError, DataError
from mamba_cli.models import bnn
from mamba_cli.models.logreg import logistic_regression
from mamba_cli.rewards import KernelSteinDiscrepancy, OutOfDistribution, PredictiveMetric
from mamba_cli.types import PredictiveReward

REAL = Path(os.environ.get("MAMBA_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))


def network(num_pixels: int = 784) -> bnn.BayesianNeuralNetwork:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (n, num_pixels)).astype(np.uint8) for n in (40, 8)]
    labels = [rng.integers(0, 10, n).astype(np.uint8) for n in (40, 8)]
    return bnn.from_images(mnist.Mnist(images[0], labels[0], images[1], labels[1]), num_hidden=3)


def test_the_reward_is_the_metric_of_the_rows_held_out() -> None:
    model = logistic_regression(num_train=500, num_test=10, dim=3).hold_out(0.2, 1)
    position = jnp.asarray(model.true_position, jnp.float32)
    reward = PredictiveMetric("accuracy")
    value = reward(model, lambda inputs: model.predict(position, inputs))
    signed_rows = np.asarray(model.test_inputs, np.float64)
    assert len(signed_rows) == 100
    assert value == np.mean(signed_rows @ model.true_position > 0)


def test_accuracy_is_maximised_and_losses_are_minimised() -> None:
    assert PredictiveMetric("accuracy").higher_is_better
    assert not any(PredictiveMetric(n).higher_is_better for n in ("ece", "mce", "log_loss", "rmse"))
    assert OutOfDistribution().higher_is_better


def test_rewards_of_both_kinds_are_told_apart() -> None:
    assert isinstance(PredictiveMetric("ece"), PredictiveReward)
    assert isinstance(OutOfDistribution(), PredictiveReward)
    assert not isinstance(KernelSteinDiscrepancy(), PredictiveReward)


def test_a_metric_that_a_model_lacks_is_refused_with_those_it_has() -> None:
    model = gaussian_mean()
    PredictiveMetric("rmse").check(model)
    message = r"tuner\.reward\.name=ece: model gaussian_mean has no such metric.*rmse, accuracy"
    with pytest.raises(ConfigError, match=message):
        PredictiveMetric("ece").check(model)


@pytest.mark.parametrize("make", [lambda **k: PredictiveMetric("ece", **k), OutOfDistribution])
@pytest.mark.parametrize(
    ("key", "value"),
    [("hold_out_fraction", 0.0), ("hold_out_fraction", 1), ("hold_out_seed", -1)],
)
def test_values_out_of_range_are_named(
    make: Callable[..., PredictiveReward], key: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"tuner.reward.{key}={value}"):
        make(**{key: value})


def test_ood_refuses_models_that_read_no_such_images(tmp_path: Path) -> None:
    reward = OutOfDistribution(data_dir=tmp_path)
    for model in (gaussian_mean(), network(num_pixels=12)):
        with pytest.raises(ConfigError, match=r"ood: model .* does not read images of 784"):
            reward.check(model)
    with pytest.raises(DataError, match="notMNIST is not in"):
        reward.check(network())


@pytest.mark.skipif(
    not (REAL / "notmnist").is_dir(),
    reason=f"the notMNIST file is not in {REAL / 'notmnist'} (set MAMBA_DATA_DIR)",
)
def test_ood_compares_the_entropy_of_letters_and_digits() -> None:
    reward, model = OutOfDistribution(data_dir=REAL), network()
    reward.check(model)

    def predict(sure_of_digits: bool) -> Callable[[Any], Any]:
        def of(inputs: Any) -> Any:
            is_digits = inputs is model.test_inputs
            sure = np.eye(10)[np.zeros(len(inputs), int)]
            unsure = np.full((len(inputs), 10), 0.1)
            return sure if is_digits == sure_of_digits else unsure

        return of

    assert reward(model, predict(True)) == 1.0
    assert reward(model, predict(False)) == 0.0
    assert reward(model, lambda inputs: np.full((len(inputs), 10), 0.1)) == 0.5
