"""Predictive metrics as rewards: the paper's alternatives to a discrepancy (its section 3).

The arms sample the posterior of a part of the training rows, and their posterior predictive is
measured on the rest, so that the test set stays a test set. These rewards say how well an arm
predicts, not how near its draws are to the posterior: a chain that stays near the MAP can win.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from mamba_cli.errors import ConfigError
from mamba_cli.metrics import HIGHER_IS_BETTER
from mamba_cli.rewards.draws import is_finite_number, require
from mamba_cli.types import Model, PredictFn


@dataclass(frozen=True)
class PredictiveMetric:
    """A metric of the posterior predictive on held-out training rows.

    Parameters
    ----------
    name
        A key of the model's ``predictive_metrics``: accuracy, log_loss, rmse, ece or mce.
    hold_out_fraction
        Share of the training rows that the arms are measured on, in (0, 1); they sample the rest.
    hold_out_seed
        Which rows these are.

    Raises
    ------
    ConfigError
        A parameter out of range; the message names its key.
    """

    name: str
    hold_out_fraction: float = 0.1
    hold_out_seed: int = 0
    higher_is_better: bool = field(init=False)

    def __post_init__(self) -> None:
        require_hold_out(self.hold_out_fraction, self.hold_out_seed)
        object.__setattr__(self, "higher_is_better", self.name in HIGHER_IS_BETTER)

    def check(self, model: Model) -> None:
        """Refuse a model without the metric, before anything is sampled.

        Raises
        ------
        ConfigError
            Naming the metrics the model has.
        """
        start = model.initial_position(jax.random.key(0))
        known = model.predictive_metrics(jax.jit(model.predict)(start, model.test_inputs))
        if self.name not in known:
            raise ConfigError(
                f"tuner.reward.name={self.name}: model {model.name} has no such metric; it has "
                f"{', '.join(known)}"
            )

    def __call__(self, model: Model, predict: PredictFn) -> float:
        return model.predictive_metrics(predict(model.test_inputs))[self.name]


def require_hold_out(fraction: object, seed: object) -> None:
    """Check what the predictive rewards share.

    Raises
    ------
    ConfigError
        Naming ``tuner.reward.hold_out_fraction`` or ``tuner.reward.hold_out_seed``.
    """
    require(
        is_finite_number(fraction) and 0 < float(fraction) < 1,  # type: ignore[arg-type]
        "hold_out_fraction",
        fraction,
        "a number between 0 and 1 (both excluded)",
    )
    allowed = isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0
    require(allowed, "hold_out_seed", seed, "an integer, 0 or more")
