"""From a chain to a reward, or to the reason why it has none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.chain import Chain
from mamba_cli.errors import NothingUsableError, first_line, is_out_of_memory
from mamba_cli.gradients import chunk_sizes
from mamba_cli.tuners.guards import Guards
from mamba_cli.types import (
    AccumulatedReward,
    AnyReward,
    ArmRecord,
    Array,
    Hyperparameters,
    PredictiveReward,
    Scored,
    ScoredDraws,
)
from mamba_cli.workbench import Workbench


class Score(NamedTuple):
    """``reward`` is NaN unless ``status`` is ok; ``reward_s`` includes the gradients.

    ``std_error`` is the reward's own, NaN where it gives none.
    """

    reward: float
    num_scored: int
    reward_s: float
    status: str
    reason: str
    std_error: float = math.nan


def record_of(
    index: int,
    arm: Hyperparameters,
    score: Score,
    *,
    rung: int = 0,
    budget_s: float = math.nan,
    compile_s: float = 0.0,
    elapsed_s: float = 0.0,
    num_steps: int = 0,
    num_draws: int = 0,
) -> ArmRecord:
    """The row of ``tuning.csv`` of arm number ``index``; not promoted so far."""
    return ArmRecord(
        rung=rung,
        arm=index,
        step_size=arm.step_size,
        batch_size=arm.batch_size,
        num_integration_steps=arm.num_integration_steps,
        budget_s=budget_s,
        elapsed_s=elapsed_s,
        compile_s=compile_s,
        reward_s=score.reward_s,
        num_steps=num_steps,
        num_draws=num_draws,
        num_scored=score.num_scored,
        reward=score.reward,
        status=score.status,
        reason=score.reason,
        promoted=False,
        reward_std_error=score.std_error,
    )


def failure(chain: Chain, budget_s: float | None = None) -> tuple[str, str] | None:
    """Why a chain cannot be scored, as (status, reason), or None.

    An arm needs two draws: with one, a chain that moves cannot be told from a frozen one.
    """
    if chain.nonfinite_step is not None:
        return "diverged", f"position not finite at step {chain.nonfinite_step}"
    if chain.num_draws < 2:
        within = "" if budget_s is None else f" in {budget_s:.3g} s"
        return "no_draws", (
            f"{chain.num_draws} draws from {chain.num_steps} gradient steps{within}, 2 are needed"
        )
    return None


def is_constant(positions: np.ndarray) -> bool:
    """Whether no coordinate moved: steps below the resolution of float32."""
    return bool(np.all(positions == positions[0]))


@dataclass(frozen=True)
class Scorer:
    """Applies a reward to chains: to their draws and gradients there, or to their predictions."""

    bench: Workbench
    reward: AnyReward
    guards: Guards | None = None

    @property
    def thin(self) -> int:
        """Every how many of the draws count: a parameter of the rewards that have it."""
        return getattr(self.reward, "thin", 1)

    @property
    def sign(self) -> float:
        """Times the reward gives a number of which lower is better."""
        return -1.0 if self.reward.higher_is_better else 1.0

    def warm_up(self, num_draws: int) -> float:
        """Compile what scoring ``num_draws`` draws needs, thinned; return the seconds it took.

        Raises
        ------
        NothingUsableError
            There is not enough memory: no arm could be scored.
        """
        bench, began = self.bench, self.bench.clock()
        num_draws = max(2, num_draws // self.thin)
        rng = np.random.default_rng(0)
        noise = rng.standard_normal((num_draws, len(bench.start))).astype(np.float32)
        positions = bench.start + np.float32(1e-3) * noise
        try:
            if isinstance(self.reward, AccumulatedReward):
                pass
            elif isinstance(self.reward, PredictiveReward):
                self.reward(bench.model, partial(bench.posterior_predictive, positions))
            else:
                if self.reward.gradients == "full":
                    # One chunk of each size that so many draws, or a slow arm's, are cut to.
                    for size in sorted({min(size, num_draws) for size in chunk_sizes(bench.model)}):
                        bench.scores(np.repeat(bench.start[None], size, axis=0))
                self.reward(self._draws(positions, -noise, jax.random.key(0)))
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise NothingUsableError(
                f"scoring {num_draws} draws of dimension {len(bench.start):,} takes more memory "
                f"than there is ({first_line(error)}); lower tuner.max_draws"
            ) from error
        elapsed_s = bench.clock() - began
        bench.seconds.compile += elapsed_s
        return elapsed_s

    def score(
        self,
        chain: Chain,
        num_draws: int,
        rng_key: Array,
        budget_s: float | None = None,
        lifetimes: float = 1.0,
    ) -> Score:
        """The reward of ``chain`` on at most ``num_draws`` thinned draws.

        ``lifetimes`` is how many times as long an arm runs that reaches the end.
        """
        bench, began = self.bench, self.bench.clock()
        failed = failure(chain, budget_s)
        if failed is not None:
            return Score(math.nan, 0, 0.0, *failed)
        thin = self.thin
        positions, scores = (kept[thin - 1 :: thin] for kept in chain.thinned(num_draws))
        if len(positions) < 2:
            reason = (
                f"tuner.reward.thin={thin} leaves {len(positions)} of {chain.num_draws} draws, "
                f"2 are needed"
            )
            return Score(math.nan, len(positions), 0.0, "no_draws", reason)
        if is_constant(positions):
            reason = f"all {chain.num_draws} draws are equal: the step size is too small to move"
            return Score(math.nan, 0, bench.clock() - began, "frozen", reason)
        if self.guards is not None:
            verdict = self.guards.verdict(positions, num_steps=chain.num_steps, lifetimes=lifetimes)
            if verdict is not None:
                elapsed_s = bench.clock() - began
                bench.seconds.reward += elapsed_s
                return Score(math.nan, 0, elapsed_s, *verdict)
        gradients_s, num_scored = 0.0, len(positions)
        given: float | Scored
        if isinstance(self.reward, AccumulatedReward):
            assert bench.whitening is not None
            given, num_scored = self.reward(chain.block_sums(), bench.whitening), chain.num_draws
        elif isinstance(self.reward, PredictiveReward):
            predict = partial(bench.posterior_predictive, positions)
            given = self.reward(bench.model, predict)
        else:
            if self.reward.gradients == "full":
                scores = bench.scores(positions)
            gradients_s = bench.clock() - began
            given = self.reward(self._draws(positions, scores, rng_key))
        value, std_error = given if isinstance(given, Scored) else (float(given), math.nan)
        elapsed_s = bench.clock() - began
        bench.seconds.gradients += gradients_s
        bench.seconds.reward += elapsed_s - gradients_s
        if not math.isfinite(value):
            reason = f"{self.reward.name} is {value} on draws as far as {_reach(chain, positions)}"
            return Score(math.nan, num_scored, elapsed_s, "diverged", reason)
        return Score(value, num_scored, elapsed_s, "ok", "", std_error)

    def _draws(self, positions: np.ndarray, scores: np.ndarray, rng_key: Array) -> ScoredDraws:
        whitening = self.bench.whitening
        return ScoredDraws(jnp.asarray(positions), jnp.asarray(scores), rng_key, whitening)


def _reach(chain: Chain, positions: np.ndarray) -> str:
    distance = np.max(np.abs(positions.astype(np.float64) - np.asarray(chain.carry.origin)))
    return f"{distance:.3g} from the start in one coordinate"
