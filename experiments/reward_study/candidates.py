"""The rewards a study compares: every option of conf/reward that is a Stein discrepancy."""

from __future__ import annotations

import hydra
import numpy as np
from hydra.core.global_hydra import GlobalHydra

from mamba_cli.config import build, group_options
from mamba_cli.types import (
    AccumulatedReward,
    BlockSums,
    PredictiveReward,
    Reward,
    Scored,
    ScoredDraws,
)
from mamba_cli.whitening import Whitening

# The paper's published code minimised the unbiased FSSD^2, without a root.
VARIANTS: dict[str, tuple[str, list[str]]] = {"fssd_u": ("fssd", ["tuner.reward.statistic=u"])}

Candidate = Reward | AccumulatedReward


def candidates(names: list[str] | None = None) -> dict[str, Candidate]:
    """Rewards by name: the options of conf/reward, and ``VARIANTS`` of them.

    Those on predictions are left out: they rank by rows held out of another posterior. A name that
    is not there yet is left out too.
    """
    chosen = {name: (name, list[str]()) for name in group_options()["reward"]} | VARIANTS
    found: dict[str, Candidate] = {}
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("mamba_cli.conf", version_base="1.3"):
        for name, (option, changes) in chosen.items():
            if names is not None and name not in names:
                continue
            overrides = ["tuner=mamba_ksd", f"reward@tuner.reward={option}", *changes]
            reward = build(hydra.compose("config", overrides).tuner.reward, "tuner.reward")
            if not isinstance(reward, PredictiveReward):
                found[name] = reward
    return found


def whitening_method(reward: Candidate) -> str | None:
    """The whitening a reward asks for, if any."""
    return getattr(reward, "whitening", None)


def loss_of(
    reward: Candidate, draws: ScoredDraws, sums: BlockSums, whitenings: dict[str, Whitening]
) -> Scored:
    """A reward as a number of which lower is better, with its standard error."""
    method = whitening_method(reward)
    if isinstance(reward, AccumulatedReward):
        given: float | Scored = reward(sums, whitenings[reward.whitening])
    else:
        given = reward(draws._replace(whitening=None if method is None else whitenings[method]))
    value, error = given if isinstance(given, Scored) else (float(given), float("nan"))
    sign = -1.0 if reward.higher_is_better else 1.0
    return Scored(sign * value, error)


def finite_or_worst(losses: np.ndarray) -> np.ndarray:
    """Losses with what is not finite at infinity: it never wins."""
    return np.where(np.isfinite(losses), losses, np.inf)
