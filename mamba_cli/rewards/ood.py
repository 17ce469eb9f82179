"""Recognising what is foreign as a reward: letters among digits.

A network that knows what it does not know is uncertain of the letters of notMNIST. The reward is
the probability that a random letter has a larger predictive entropy than a random held-out digit:
the area under the curve of true against false positives (Hendrycks and Gimpel, 2017).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import jax.numpy as jnp
import numpy as np

from mamba_cli import metrics
from mamba_cli.data import notmnist
from mamba_cli.data.download import DataDir
from mamba_cli.errors import ConfigError
from mamba_cli.rewards.predictive import require_hold_out
from mamba_cli.types import Array, Model, PredictFn

NUM_PIXELS = 784


@dataclass(frozen=True)
class OutOfDistribution:
    """AUROC of the predictive entropy, letters against held-out digits.

    Parameters
    ----------
    data_dir
        Folder that holds ``notmnist/``, ``None`` for the per-user cache.
    hold_out_fraction, hold_out_seed
        The digits, as in :class:`~mamba_cli.rewards.predictive.PredictiveMetric`.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    data_dir: DataDir = None
    hold_out_fraction: float = 0.1
    hold_out_seed: int = 0
    name: str = "ood"
    higher_is_better: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        require_hold_out(self.hold_out_fraction, self.hold_out_seed)

    def check(self, model: Model) -> None:
        """Refuse a model that does not read such images, before anything is sampled.

        Raises
        ------
        ConfigError
            The model does not read images of 28 by 28 bytes.
        DataError
            The letters are not there.
        """
        inputs = model.test_inputs
        shape: tuple[int, ...] = getattr(inputs, "shape", ())
        if len(shape) != 2 or shape[1] != NUM_PIXELS or inputs.dtype != np.uint8:
            raise ConfigError(
                f"tuner.reward.name={self.name}: model {model.name} does not read images of "
                f"{NUM_PIXELS} bytes, which the letters of notMNIST are; choose another reward"
            )
        self._letters()

    def __call__(self, model: Model, predict: PredictFn) -> float:
        letters = self._letters()
        digits = metrics.predictive_entropy(np.asarray(predict(model.test_inputs)))
        return metrics.auroc(metrics.predictive_entropy(np.asarray(predict(letters))), digits)

    def _letters(self) -> Array:
        return jnp.asarray(_load_letters(None if self.data_dir is None else str(self.data_dir)))


@cache
def _load_letters(data_dir: str | None) -> np.ndarray:
    return notmnist.load_letters(data_dir)
