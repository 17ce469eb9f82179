"""Evaluation: a fresh chain of the chosen hyperparameters, scored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mamba_cli import metrics
from mamba_cli.chain import Budget, Chain, ChainProgram, advance
from mamba_cli.rewards import ksd
from mamba_cli.tuners.scoring import failure, is_constant
from mamba_cli.types import Array, Hyperparameters, Reporter, SilentReporter
from mamba_cli.workbench import Workbench

SECONDS_PER_ADVANCE = 0.5
"""How often a long evaluation says how far it is; a piece loses at most half a percent of it."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one repeat (columns of ``metrics.csv``) and the posterior sd it found."""

    row: dict[str, Any]
    std: np.ndarray


def evaluate(
    bench: Workbench,
    hyperparameters: Hyperparameters,
    *,
    budget_s: float,
    max_draws: int,
    rng_key: Array,
    burn_in_fraction: float = 0.0,
    reference_std: np.ndarray | None = None,
    reporter: Reporter | None = None,
) -> Evaluation:
    """Run a chain from the MAP for ``budget_s`` seconds and score it.

    The draws of the first ``burn_in_fraction`` of the seconds are dropped; all that follows
    speaks of the draws after them. Standard deviations are those of *all* draws. KSD (IMQ
    kernel, c = 1, beta = -1/2, gradients over all rows), the posterior predictive and the mean
    squared error of draws are of at most ``max_draws`` draws, evenly spaced over the chain. A
    chain that fails has empty metrics, a status and a reason.

    Parameters
    ----------
    bench
        The model, its start and its compiled chains.
    hyperparameters
        What the tuner chose.
    budget_s
        Seconds of sampling; compilation, gradients and metrics come on top.
    max_draws
        Thinned draws for the discrepancy and the prediction.
    rng_key
        Key of the chain.
    burn_in_fraction
        In [0, 1).
    reference_std
        Standard deviations of the ground truth, ``[dim]``, if there is one.
    reporter
        Shown the seconds sampled.
    """
    reporter = reporter or SilentReporter()
    program, _ = bench.program(hyperparameters.batch_size)
    chain = program.start(rng_key, bench.start, hyperparameters)
    reporter.start("evaluation", budget_s, "s")
    burn_in: dict[str, Any] = {"burn_in_s": 0.0, "num_burn_in_steps": 0}
    if burn_in_fraction > 0:
        chain = _sample_until(burn_in_fraction * budget_s, bench, program, chain, reporter)
        if chain.nonfinite_step is None:
            burn_in = {"burn_in_s": chain.elapsed_s, "num_burn_in_steps": chain.num_steps}
            chain = chain.without_draws()
    chain = _sample_until(budget_s, bench, program, chain, reporter)
    reporter.finish()
    bench.seconds.sampling += chain.elapsed_s
    chain = chain.compact()
    return Evaluation(_row(bench, chain, max_draws, reference_std, burn_in), chain.std)


def _sample_until(
    end_s: float, bench: Workbench, program: ChainProgram, chain: Chain, reporter: Reporter
) -> Chain:
    """Continue ``chain`` until its own seconds are ``end_s``, in pieces."""
    pieces_s = SECONDS_PER_ADVANCE
    while chain.nonfinite_step is None:
        remaining_s = end_s - chain.elapsed_s
        pieces = max(1, round(remaining_s / pieces_s))
        steps_before, elapsed_before_s = chain.num_steps, chain.elapsed_s
        chain = advance(program, chain, Budget(seconds=remaining_s / pieces), bench.clock)
        reporter.update(min(chain.elapsed_s, end_s) - min(elapsed_before_s, end_s))
        if pieces == 1 or chain.elapsed_s >= end_s:
            break
        if chain.num_steps == steps_before:
            pieces_s = remaining_s  # a step is longer than a piece: the rest in one go
    return chain


def _row(
    bench: Workbench,
    chain: Chain,
    max_draws: int,
    reference_std: np.ndarray | None,
    burn_in: dict[str, Any],
) -> dict[str, Any]:
    hyperparameters = chain.hyperparameters
    row: dict[str, Any] = {
        "step_size": hyperparameters.step_size,
        "log10_step_size": math.log10(hyperparameters.step_size),
        "batch_size": hyperparameters.batch_size,
        "batch_percent": 100 * hyperparameters.batch_size / bench.model.num_data,
        "num_integration_steps": hyperparameters.num_integration_steps,
        "num_samples": chain.num_draws,
        "elapsed_s": chain.elapsed_s,
        "num_steps": chain.num_steps,
        **burn_in,
    }
    failed = failure(chain)
    if failed is not None:
        return row | {"status": failed[0], "reason": failed[1]}
    positions, _ = chain.thinned(max_draws)
    if is_constant(positions):
        return row | {"status": "frozen", "reason": "all draws are equal"}
    began = bench.clock()
    scores = bench.scores(positions)
    gradients_s = bench.clock() - began
    row["ksd"] = ksd(positions, scores)
    row |= bench.model.predictive_metrics(bench.posterior_predictive(positions))
    mse_of_draws = bench.mse_of_draws(positions)
    if mse_of_draws is not None:
        row["mse_of_draws"] = mse_of_draws
    bench.seconds.gradients += gradients_s
    bench.seconds.reward += bench.clock() - began - gradients_s
    if reference_std is not None:
        row["relative_std_error"] = metrics.relative_std_error(chain.std, reference_std)
    row["num_scored"] = len(positions)
    if not math.isfinite(row["ksd"]):
        return row | {"status": "diverged", "reason": f"KSD is {row['ksd']}"}
    return row | {"status": "ok", "reason": ""}


def best_of(record: Any, num_data: int) -> dict[str, Any]:
    """The content of ``best.json`` for a winning :class:`~mamba_cli.types.ArmRecord`."""
    return {
        "arm": record.arm,
        "step_size": record.step_size,
        "batch_size": record.batch_size,
        "batch_percent": 100 * record.batch_size / num_data,
        "num_integration_steps": record.num_integration_steps,
        "reward": record.reward if math.isfinite(record.reward) else None,
        "status": record.status,
    }


def repeat_key(rng_key: Array, repeat: int) -> Array:
    """Key of one repeat of the evaluation."""
    return jax.random.fold_in(rng_key, repeat)
