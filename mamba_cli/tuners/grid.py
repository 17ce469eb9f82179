"""The paper's grid search (appendix B.1): every point runs the same number of iterations.

A chain starts at the MAP plus Gaussian noise (without it, the smallest step size would win
by not leaving the MAP), makes ``num_iterations`` draws, and the best predictive metric on
the test set wins.

Around the noisy start a posterior can be flatter than at the MAP, where chains start that are to
be used: in matrix factorisation the search then prefers step sizes that diverge from there. With
``check_from_map`` the winner makes as many draws from the MAP, in ``NUM_CHECKS`` chains, and is
dropped for the next best if one diverges. The paper has no such check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from mamba_cli.chain import Budget, advance
from mamba_cli.errors import first_line, is_out_of_memory
from mamba_cli.metrics import HIGHER_IS_BETTER
from mamba_cli.tuners.result import Checkpoints, Tuning
from mamba_cli.tuners.scoring import Score, failure, is_constant, record_of
from mamba_cli.types import ArmRecord, Array, Hyperparameters, Reporter, SilentReporter
from mamba_cli.workbench import Workbench

NUM_CHECKS = 4
"""Chains of a winner from the MAP: near the limit of stability some diverge and some do not."""


def tune(
    bench: Workbench,
    arms: Sequence[Hyperparameters],
    *,
    num_iterations: int,
    noise_scale: float,
    metric: str,
    max_draws: int,
    rng_key: Array,
    check_from_map: bool = True,
    store: Checkpoints | None = None,
    reporter: Reporter | None = None,
) -> Tuning:
    """Run the grid search and return one record per point and the winner.

    Parameters
    ----------
    bench
        The model, its start and its compiled chains.
    arms
        The points.
    num_iterations
        Draws per point (an iteration of SGHMC is L gradient steps).
    noise_scale
        Standard deviation of the noise added to each coordinate of the MAP.
    metric
        A key of the model's ``predictive_metrics``; ``accuracy`` is maximised, everything
        else minimised.
    max_draws
        Thinned draws whose predictions are averaged.
    rng_key
        Key of the whole search; the point is folded in.
    check_from_map
        Whether a winner has to be stable from ``bench.start`` too.
    store
        Where finished points are kept; a search that finds some goes on after them.
    reporter
        Told how many points are done and the best so far.
    """
    reporter = reporter or SilentReporter()
    records = [] if store is None else [r for r in store.read_tuning() if r.rung == 0]
    sign = -1.0 if metric in HIGHER_IS_BETTER else 1.0
    reporter.start(f"grid: {len(arms)} points x {num_iterations} draws", len(arms), "point")
    reporter.update(len(records), _describe(_best(records, sign), metric))
    for index in range(len(records), len(arms)):
        records.append(
            _run_point(
                bench, index, arms[index], num_iterations, noise_scale, metric, max_draws, rng_key
            )
        )
        if store is not None:
            store.write_tuning(records)
        reporter.update(1, _describe(_best(records, sign), metric))
    reporter.finish()
    winner = _best(records, sign)
    while check_from_map and winner is not None:
        failed = _failure_from_map(bench, winner, num_iterations, rng_key)
        if failed is None:
            break
        status, reason = failed
        reason = f"{metric} {winner.reward:.4g} from the MAP plus noise, but from the MAP: {reason}"
        records[winner.arm] = winner._replace(status=status, reason=reason, reward=math.nan)
        reporter.message(f"point {winner.arm} is dropped for the next best: {reason}")
        winner = _best(records, sign)
    if winner is not None:
        winner = winner._replace(promoted=True)
        records[winner.arm] = winner
    if store is not None:
        store.write_tuning(records)
    return Tuning(records, winner)


def _run_point(
    bench: Workbench,
    index: int,
    arm: Hyperparameters,
    num_iterations: int,
    noise_scale: float,
    metric: str,
    max_draws: int,
    rng_key: Array,
) -> ArmRecord:
    key_noise, key_chain = jax.random.split(jax.random.fold_in(rng_key, index))
    noise = np.asarray(jax.random.normal(key_noise, bench.start.shape))
    position = (bench.start + noise_scale * noise).astype(np.float32)
    num_steps, num_draws, elapsed_s, compile_s = 0, 0, 0.0, 0.0
    try:
        program, compile_s = bench.program(arm.batch_size)
        chain = program.start(key_chain, position, arm)
        wanted = num_iterations * arm.num_integration_steps
        chain = advance(program, chain, Budget(steps=wanted), bench.clock)
        bench.seconds.sampling += chain.elapsed_s
        elapsed_s, num_steps, num_draws = chain.elapsed_s, chain.num_steps, chain.num_draws
        began = bench.clock()
        score = Score(math.nan, 0, 0.0, *(failure(chain) or ("ok", "")))
        if score.status == "ok":
            positions, _ = chain.thinned(max_draws)
            score = _score(bench, positions, metric)
            score = score._replace(reward_s=bench.clock() - began)
            bench.seconds.reward += score.reward_s
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        score = Score(math.nan, 0, 0.0, "out_of_memory", first_line(error))
    return record_of(
        index,
        arm,
        score,
        compile_s=compile_s,
        elapsed_s=elapsed_s,
        num_steps=num_steps,
        num_draws=num_draws,
    )


def _failure_from_map(
    bench: Workbench, record: ArmRecord, num_iterations: int, rng_key: Array
) -> tuple[str, str] | None:
    """What becomes of a point's chain from the MAP that cannot be used, as (status, reason)."""
    arm = Hyperparameters(record.step_size, record.batch_size, record.num_integration_steps)
    program, _ = bench.program(arm.batch_size)
    _, key_chain = jax.random.split(jax.random.fold_in(rng_key, record.arm))
    steps = Budget(steps=num_iterations * arm.num_integration_steps)
    for number in range(1, 1 + NUM_CHECKS):
        chain = program.start(jax.random.fold_in(key_chain, number), bench.start, arm)
        chain = advance(program, chain, steps, bench.clock)
        bench.seconds.check += chain.elapsed_s
        failed = failure(chain)
        if failed is not None:
            return failed
    return None


def _score(bench: Workbench, positions: np.ndarray, metric: str) -> Score:
    if is_constant(positions):
        reason = "all draws are equal: the step size is too small to move"
        return Score(math.nan, 0, 0.0, "frozen", reason)
    prediction = bench.posterior_predictive(positions)
    value = float(bench.model.predictive_metrics(prediction)[metric])
    if not math.isfinite(value):
        return Score(math.nan, len(positions), 0.0, "diverged", f"{metric} is {value}")
    return Score(value, len(positions), 0.0, "ok", "")


def _best(records: Sequence[ArmRecord], sign: float) -> ArmRecord | None:
    usable = [record for record in records if record.status == "ok"]
    return min(usable, key=lambda record: sign * record.reward, default=None)


def _describe(best: ArmRecord | None, metric: str) -> str:
    return "" if best is None else f"best {metric} {best.reward:.4g}: h={best.step_size:.3g}"
