"""Every reward of ``conf/`` that asks for a whitening, on a chain: what it is given and costs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from gaussian_model import gaussian_mean

from mamba_cli import curvature, gradients, minibatch
from mamba_cli.chain import Budget, Chain, advance
from mamba_cli.config import build, group_options
from mamba_cli.rewards import SteinMoments
from mamba_cli.samplers.sgld import sgld
from mamba_cli.tuners.scoring import Scorer
from mamba_cli.types import AccumulatedReward, AsksForWhitening, Hyperparameters
from mamba_cli.workbench import Workbench

MODEL = gaussian_mean(num_data=256, dim=3)
NAMES = ("linear_ksd", "psd", "sliced_ksd", "stein_moments", "whitened_ksd")


@cache
def bench() -> Workbench:
    return Workbench(
        MODEL,
        np.asarray(MODEL.posterior_mean, np.float32),
        gradients.standard(MODEL),
        sgld,
        minibatch.without_replacement,
        64,
        block_features=SteinMoments().features(3),
        whitening=curvature.whitening_at(MODEL, MODEL.posterior_mean),
    )


@cache
def chain_of(step_size: float) -> Chain:
    program, _ = bench().program(256)
    hyperparameters = Hyperparameters(step_size, 256)
    chain = program.start(jax.random.key(1), bench().start, hyperparameters)
    return advance(program, chain, Budget(steps=2000)).compact()


def test_these_are_the_rewards_that_ask(compose) -> None:
    asking = []
    for name in group_options()["reward"]:
        cfg = compose("tuner=mamba_ksd", f"reward@tuner.reward={name}", "data_dir=unused")
        if isinstance(build(cfg.tuner.reward, "tuner.reward"), AsksForWhitening):
            asking.append(name)
    assert tuple(sorted(asking)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_of_the_right_width_is_better_than_one_that_hardly_moved(name, compose) -> None:
    cfg = compose("tuner=mamba_ksd", f"reward@tuner.reward={name}")
    reward = build(cfg.tuner.reward, "tuner.reward")
    scorer = Scorer(bench(), reward)
    scorer.warm_up(64)
    chains = [chain_of(h) for h in (0.3 / MODEL.precision, 1e-9)]
    good, still = (scorer.score(chain, 64, jax.random.key(2)) for chain in chains)
    assert (good.status, still.status) == ("ok", "ok")
    assert good.reward < still.reward
    assert good.num_scored == (
        2000 if isinstance(reward, AccumulatedReward) else chain_of(0.3 / MODEL.precision).num_kept
    )
    has_error = name in ("stein_moments", "linear_ksd")
    assert math.isfinite(good.std_error) == has_error
    assert good.std_error > 0 or not has_error


def test_what_is_accumulated_needs_no_gradient_over_all_rows(monkeypatch) -> None:
    monkeypatch.setattr(Workbench, "scores", lambda self, positions: pytest.fail("computed"))
    scorer = Scorer(bench(), SteinMoments())
    scorer.warm_up(64)
    before = replace(bench().seconds)
    assert scorer.score(chain_of(1e-3), 64, jax.random.key(2)).status == "ok"
    assert bench().seconds.gradients == before.gradients
