"""The grid search: every point the same number of draws, the best predictive metric wins."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from benches import MODEL, Killed, MemoryStore, arms_of, fake_bench, plain
from fake_time import counting

from mamba_cli.samplers.sgld import sgld
from mamba_cli.tuners import grid
from mamba_cli.tuners.result import Tuning
from mamba_cli.types import Hyperparameters
from mamba_cli.workbench import Workbench

KEY = jax.random.key(8)
START = MODEL.posterior_mean.astype(np.float32)


def tune(bench: Workbench, arms: list[Hyperparameters], **changes: Any) -> Tuning:
    settings: dict[str, Any] = {
        "num_iterations": 200,
        "noise_scale": 0.2,
        "metric": "rmse",
        "max_draws": 50,
        "rng_key": KEY,
        "check_from_map": False,
    }
    return grid.tune(bench, arms, **(settings | changes))


def sgld_bench(**changes: Any) -> Workbench:
    return fake_bench(sgld, start=START, **changes)


# h = 1e-4 hardly leaves the noisy start, 1e-2 finds the mode in 200 steps, 0.1 is beyond the
# stability limit of 4 / precision = 0.06.
ARMS = arms_of(1e-4, 1e-2, 1e-3)


def test_the_lowest_error_wins() -> None:
    tuning = tune(sgld_bench(), ARMS)
    rewards = [record.reward for record in tuning.records]
    assert tuning.winner is not None
    assert tuning.winner.arm == int(np.argmin(rewards)) == 1
    assert [record.promoted for record in tuning.records] == [False, True, False]
    assert tuning.hyperparameters == ARMS[1]


def test_a_metric_may_be_maximised() -> None:
    # The model's accuracy falls with its error.
    tuning = tune(sgld_bench(), ARMS, metric="accuracy")
    assert tuning.winner is not None
    assert tuning.winner.arm == 1
    assert tuning.winner.reward == max(record.reward for record in tuning.records) > 0


def test_every_point_makes_the_same_number_of_draws() -> None:
    bench = fake_bench(counting)
    arms = arms_of(1.0, 2.0, length=1) + arms_of(1.0, length=5)
    tuning = tune(bench, arms, num_iterations=120)
    assert [record.num_draws for record in tuning.records] == [120, 120, 120]
    assert [record.num_steps for record in tuning.records] == [120, 120, 600]
    assert [record.elapsed_s * 1024 for record in tuning.records] == [120, 120, 600]
    assert bench.seconds.sampling * 1024 == 840
    assert all(30 <= record.num_scored <= 50 for record in tuning.records)
    assert all(math.isnan(record.budget_s) for record in tuning.records)


def test_chains_start_at_the_mode_plus_noise_of_the_scale() -> None:
    starts: list[np.ndarray] = []
    bench = sgld_bench()
    program, _ = bench.program(5)
    start = program.start

    def watching(key: Any, position: np.ndarray, arm: Hyperparameters) -> Any:
        starts.append(position)
        return start(key, position, arm)

    program.start = watching  # type: ignore[method-assign]
    try:
        tune(bench, arms_of(*[1e-3] * 100), num_iterations=2, noise_scale=0.2)
    finally:
        del program.start  # type: ignore[method-assign]
    noise = np.array(starts) - START
    assert len(np.unique(noise)) == 300
    # 300 values: the standard deviation is known to √(1 / 600), 4 %.
    assert abs(noise.std() / 0.2 - 1) < 4.5 * np.sqrt(1 / 600)
    assert abs(noise.mean()) < 4.5 * 0.2 / np.sqrt(300)


def test_a_winner_that_diverges_from_the_map_is_dropped_for_the_next_best() -> None:
    bench = sgld_bench()
    advance_, watched = grid.advance, []

    def failing(program: Any, chain: Any, budget: Any, clock: Any) -> Any:
        at_map = np.array_equal(np.asarray(chain.carry.origin), bench.start)
        chain = advance_(program, chain, budget, clock)
        watched.append((chain.hyperparameters.step_size, at_map))
        if at_map and chain.hyperparameters.step_size == 1e-2:
            carry = chain.carry._replace(nonfinite_step=jax.numpy.int32(7))
            return replace(chain, carry=carry)
        return chain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "advance", failing)
        tuning = tune(bench, ARMS, check_from_map=True)
        unchecked = tune(bench, ARMS)
    # Which of the other two is next is up to their draws; those of the check come after.
    first, second, _ = np.argsort([record.reward for record in unchecked.records])
    assert first == 1
    assert tuning.winner is not None
    assert tuning.winner.arm == second
    dropped = tuning.records[1]
    assert dropped.status == "diverged"
    assert dropped.reason.endswith("but from the MAP: position not finite at step 7")
    assert math.isnan(dropped.reward)
    assert not dropped.promoted
    # Three points, then from the MAP the best, whose first chain fails, and four chains of the
    # next best; without the check, the points.
    assert [at_map for _, at_map in watched] == [False] * 3 + [True] * 5 + [False] * 3
    assert unchecked.winner is not None
    assert unchecked.winner.arm == 1


def test_failures_are_rows_and_never_win() -> None:
    arms = arms_of(1e6, 1e-3, 1e-20, 0.1)
    tuning = tune(sgld_bench(), arms, noise_scale=0.0)
    assert [r.status for r in tuning.records] == ["diverged", "ok", "frozen", "diverged"]
    diverged, _, frozen, _ = tuning.records
    assert "not finite at step" in diverged.reason
    assert diverged.num_steps < 200
    assert "too small to move" in frozen.reason
    assert all(math.isnan(r.reward) for r in tuning.records if r.status != "ok")
    assert tuning.winner is not None
    assert tuning.winner.arm == 1


def test_too_few_iterations_are_no_draws() -> None:
    tuning = tune(sgld_bench(), ARMS, num_iterations=1)
    assert [r.status for r in tuning.records] == ["no_draws"] * 3
    assert tuning.winner is None


def test_no_point_usable_has_no_winner() -> None:
    store = MemoryStore()
    tuning = tune(sgld_bench(), arms_of(1e6, 1e5), store=store)
    assert tuning.winner is None
    assert [r.status for r in store.records] == ["diverged"] * 2
    assert not any(r.promoted for r in tuning.records)


def test_a_point_out_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = sgld_bench()
    program, _ = bench.program(5)
    dispatch = program.dispatch

    def failing(carry: Any, arm: Hyperparameters, num_steps: int) -> Any:
        if arm.step_size == 1e-2:
            raise MemoryError
        return dispatch(carry, arm, num_steps)

    monkeypatch.setattr(program, "dispatch", failing)
    tuning = tune(bench, ARMS)
    record = tuning.records[1]
    assert (record.status, record.reason) == ("out_of_memory", "MemoryError")
    assert (record.num_steps, record.num_draws) == (0, 0)
    assert tuning.winner is not None
    assert tuning.winner.arm != 1


@pytest.mark.parametrize("kill_after", [0, 1, 2, 3])
def test_a_killed_search_resumes_after_its_last_point(kill_after: int) -> None:
    whole = tune(sgld_bench(), ARMS, store=MemoryStore())
    store = MemoryStore(kill_after=kill_after)
    with pytest.raises(Killed):
        tune(sgld_bench(), ARMS, store=store)
    assert len(store.records) == kill_after
    store.kill_after = None
    bench = sgld_bench()
    began = bench.clock()
    resumed = tune(bench, ARMS, store=store)
    assert plain(resumed.records) == plain(whole.records)
    assert [resumed.winner] == [record for record in resumed.records if record.promoted]
    assert plain(store.records) == plain(whole.records)
    assert (bench.clock() - began) * 1024 == 200 * (3 - kill_after)
