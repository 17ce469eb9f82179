"""Tuning on the study's posteriors by steps: what coverage, seeds and comparisons share.

An arm's seconds are the steps that they buy at the costs in ``costs.csv``, as in a calibrated run:
nothing here reads a clock, and a busy machine changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from experiments.reward_study.candidates import candidates
from experiments.reward_study.study import MAX_DRAWS, Problem, moments_of
from experiments.reward_study.targets import Target
from mamba_cli.chain import Budget, Chain, advance
from mamba_cli.pacing import Calibrated, StepLedger, shape_of
from mamba_cli.tuners import mamba
from mamba_cli.tuners.result import Tuning
from mamba_cli.tuners.scoring import Scorer, failure
from mamba_cli.types import (
    AccumulatedReward,
    BlockSums,
    FeatureFn,
    Hyperparameters,
    Scored,
)
from mamba_cli.whitening import Whitening

REWARD = "stein_moments"
REDUCTION_FACTOR = 3


class Nested:
    """A reward on sums that hold the features of others too, under its own name."""

    def __init__(self, reward: AccumulatedReward) -> None:
        self._reward = reward
        self.name = reward.name
        self.higher_is_better = reward.higher_is_better
        self.whitening = reward.whitening

    def features(self, dim: int) -> FeatureFn:
        return self._reward.features(dim)

    def __call__(self, sums: BlockSums, whitening: Whitening) -> Scored:
        return self._reward(sums._replace(features=sums.features[self.name]), whitening)


class Estimate(NamedTuple):
    """The mean true error of an arm over independent chains, and its standard error.

    Infinite where a chain diverged.
    """

    value: float
    std_error: float


@dataclass(frozen=True)
class Costs:
    """Seconds of a gradient step by batch size."""

    seconds: Mapping[int, float]

    def steps(self, arm: Hyperparameters, seconds: float) -> int:
        """Gradient steps that the seconds buy."""
        return round(seconds / self.seconds[arm.batch_size])


class Stage:
    """A posterior and a sampler, on which arms are tuned, scored and judged."""

    def __init__(
        self, name: str, target: Target, sampler: str, problem: Problem | None = None
    ) -> None:
        self.problem = problem or Problem(name, target, sampler, candidates([REWARD]))
        reward = self.problem.rewards[REWARD]
        assert isinstance(reward, AccumulatedReward)
        self.reward = Nested(reward)
        self.bench = self.problem.bench
        self.bench.whitening = self.problem.whitenings[reward.whitening]
        self.scorer = Scorer(self.bench, self.reward, self.problem.guards)
        self._costs: Costs | None = None

    @property
    def costs(self) -> Costs:
        assert self._costs is not None, "pace first"
        return self._costs

    def pace(self, costs: Costs, lengths: Iterable[int]) -> None:
        """Seconds are steps at these costs from now on; ``lengths`` are the L of the arms."""
        num_rows = self.bench.model.num_data
        shapes = {
            shape_of(num_rows, Hyperparameters(0.0, n, length)): cost_s
            for length in lengths
            for n, cost_s in costs.seconds.items()
        }
        self.bench.pace = Calibrated(StepLedger(costs_s=shapes))
        self._costs = costs

    def tune(self, arms: Sequence[Hyperparameters], longest_arm_s: float, seed: int) -> Tuning:
        """What ``tuner=mamba`` does, its check run included."""
        return mamba.tune(
            self.bench,
            self.reward,
            arms,
            reduction_factor=REDUCTION_FACTOR,
            longest_arm_s=longest_arm_s,
            max_draws=MAX_DRAWS,
            score_on="chain",
            rng_key=jax.random.key(seed),
            guards=self.problem.guards,
            check_s=longest_arm_s,
            keep_ties=True,
        )

    def run(
        self, arm: Hyperparameters, seconds: float, rng_key: jax.Array, chain: Chain | None = None
    ) -> Chain:
        """A chain from the MAP, or one continued."""
        program, _ = self.bench.program(arm.batch_size)
        chain = chain or program.start(rng_key, self.bench.start, arm)
        return advance(program, chain, Budget(steps=self.costs.steps(arm, seconds)))

    def loss(self, chain: Chain, rng_key: jax.Array, lifetimes: float = 1.0) -> float:
        """The reward of a chain that passes the guards, lower is better; NaN of another."""
        score = self.scorer.score(chain, MAX_DRAWS, rng_key, lifetimes=lifetimes)
        return self.scorer.sign * score.reward if score.status == "ok" else math.nan

    def error(self, chain: Chain) -> float:
        """The true error of a chain; infinite where it is not finite."""
        if failure(chain) is not None:
            return math.inf
        predict = partial(self.problem.predicted, chain.thinned(MAX_DRAWS)[0])
        # Draws of a chain about to diverge are too far out for their squares.
        with np.errstate(over="ignore", invalid="ignore"):
            return self.problem.target.error(*moments_of(chain.block_sums()), predict)

    def true_error(
        self, arm: Hyperparameters, seconds: float, num_chains: int, rng_key: jax.Array
    ) -> Estimate:
        """The mean error of independent chains of so many seconds."""
        errors: list[float] = []
        for number in range(num_chains):
            errors.append(self.error(self.run(arm, seconds, jax.random.fold_in(rng_key, number))))
            if not math.isfinite(errors[-1]):
                return Estimate(math.inf, math.nan)
        return Estimate(
            float(np.mean(errors)), float(np.std(errors, ddof=1) / math.sqrt(num_chains))
        )
