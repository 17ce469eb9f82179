"""MAMBA on a fake clock: budgets, promotion and continuation are exact, failures are data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from benches import (
    CAPACITY,
    MODEL,
    FakeReward,
    Killed,
    MemoryStore,
    arms_of,
    fake_bench,
    nearest_to,
    plain,
    step_size_of,
)
from fake_time import FakeClock, TimedProgram, counting, counting_without_refresh

from mamba_cli import chain as chain_module
from mamba_cli import gradients, minibatch
from mamba_cli.artifacts import RunFolder
from mamba_cli.chain import Budget, Carry, advance
from mamba_cli.rewards import KernelSteinDiscrepancy
from mamba_cli.samplers.sgld import sgld
from mamba_cli.tuners import mamba
from mamba_cli.tuners.halving import schedule
from mamba_cli.tuners.result import Tuning
from mamba_cli.types import ArmRecord, Hyperparameters, Reward, ScoredDraws
from mamba_cli.workbench import Workbench

KEY = jax.random.key(3)
POWERS = [2.0**k for k in range(-5, 5)]  # ten step sizes: rungs of 10, 5 and 2 for eta = 2


def tune(bench: Workbench, reward: Reward, arms: list[Hyperparameters], **changes: Any) -> Tuning:
    settings: dict[str, Any] = {
        "reduction_factor": 2,
        "longest_arm_s": 1.0,
        "max_draws": 16,
        "score_on": "chain",
        "rng_key": KEY,
    }
    return mamba.tune(bench, reward, arms, **(settings | changes))


def of_rung(tuning: Tuning, rung: int) -> list[ArmRecord]:
    return [record for record in tuning.records if record.rung == rung]


# Budgets, promotion, continuation


def test_promotion_is_exact() -> None:
    # Distances to 2: h = 2 first, then 1 and 4, then 0.5 and 8: a tie goes to the earlier arm.
    reward = FakeReward(nearest_to(2.0))
    tuning = tune(fake_bench(), reward, arms_of(*POWERS))
    assert [record.arm for record in of_rung(tuning, 0)] == list(range(10))
    assert [record.arm for record in of_rung(tuning, 1)] == [6, 5, 7, 4, 8]
    assert [record.arm for record in of_rung(tuning, 2)] == [6, 5]
    assert [r.arm for r in of_rung(tuning, 0) if r.promoted] == [4, 5, 6, 7, 8]
    assert [r.arm for r in of_rung(tuning, 1) if r.promoted] == [6, 5]
    assert [r.arm for r in of_rung(tuning, 2) if r.promoted] == [6]
    assert tuning.winner == of_rung(tuning, 2)[0]
    assert tuning.hyperparameters == Hyperparameters(2.0, 5, 1)
    for record in tuning.records:
        assert record.reward == nearest_to(2.0)(record.step_size)
        assert (record.status, record.reason) == ("ok", "")


def test_a_reward_may_be_maximised() -> None:
    reward = FakeReward(lambda h: -nearest_to(2.0)(h), higher_is_better=True)
    tuning = tune(fake_bench(), reward, arms_of(*POWERS))
    assert [record.arm for record in of_rung(tuning, 1)] == [6, 5, 7, 4, 8]
    assert tuning.winner is not None
    assert tuning.winner.arm == 6
    assert tuning.winner.reward == -1.0  # as the reward gave it


def test_budgets_are_exact() -> None:
    bench = fake_bench(costs_s={5: 1 / 1024, 7: 1 / 64})
    began = bench.clock()
    arms = arms_of(*POWERS[:5]) + arms_of(*POWERS[5:], batch_size=7)
    tuning = tune(bench, FakeReward(nearest_to(1.0)), arms, longest_arm_s=4.0)
    rungs = schedule(10, 2, 4.0)
    for number, rung in enumerate(rungs):
        records = of_rung(tuning, number)
        assert len(records) == rung.num_arms
        due_s = sum(r.seconds for r in rungs[: number + 1])
        for record in records:
            cost_s = 1 / 1024 if record.batch_size == 5 else 1 / 64
            assert record.budget_s == rung.seconds
            # On this clock only steps take time, so the seconds are those of the steps.
            assert record.elapsed_s == pytest.approx(record.num_steps * cost_s, rel=1e-12)
            assert abs(record.elapsed_s - due_s) <= (number + 1) * max(0.02 * rung.seconds, cost_s)
            assert record.num_draws == record.num_steps
            assert record.compile_s == record.reward_s == 0.0
    spent_s = bench.clock() - began
    assert bench.seconds.sampling == pytest.approx(spent_s)
    assert spent_s == pytest.approx(sum(r.num_arms * r.seconds for r in rungs), rel=0.02)
    last = {record.arm: record for record in tuning.records}
    assert spent_s == pytest.approx(sum(record.elapsed_s for record in last.values()))


def test_a_survivor_is_one_uninterrupted_chain() -> None:
    # The chain of arm a has the key fold_in(fold_in(key, a), 0), rung after rung.
    shown: list[ScoredDraws] = []

    class Watching(FakeReward):
        def __call__(self, draws: ScoredDraws) -> float:
            shown.append(draws)
            return float(len(shown))

    bench = fake_bench(sgld)
    tuning = tune(bench, Watching(nearest_to(1.0)), arms_of(1e-3, 2e-3, 4e-3, 8e-3))
    winner = tuning.winner
    assert winner is not None
    assert winner.arm == 0
    draws = np.asarray(shown[-2].positions)  # arm 0 in the last rung of two arms
    assert winner.num_scored == len(draws) == 16
    program, _ = bench.program(5)
    key = jax.random.fold_in(jax.random.fold_in(KEY, 0), 0)
    chain = program.start(key, bench.start, Hyperparameters(1e-3, 5))
    everything = []
    for _ in range(winner.num_steps):
        chain = advance(program, chain, Budget(steps=1), bench.clock).compact()
        everything.append(chain.position)
    numbers = [int(np.flatnonzero((np.array(everything) == d).all(axis=1))[0]) + 1 for d in draws]
    gaps = np.diff(numbers)
    assert gaps.min() >= 1
    assert numbers[0] - 1 <= 2 * gaps.max()  # from the very start of the chain
    assert winner.num_steps - numbers[-1] <= 2 * gaps.max()  # to its end
    whole = advance(
        program,
        program.start(key, bench.start, Hyperparameters(1e-3, 5)),
        Budget(steps=winner.num_steps),
    )
    np.testing.assert_array_equal(whole.position, everything[-1])


def test_every_arm_of_a_rung_is_scored_on_as_many_draws() -> None:
    reward = FakeReward(nearest_to(1.0))
    tuning = tune(fake_bench(), reward, arms_of(*POWERS), max_draws=48)
    # 48 draws for each of the last 2 arms; 96 / 5 and 96 / 10, but at least 16, before.
    assert [r.num_scored for r in tuning.records] == [16] * 10 + [19] * 5 + [48] * 2
    assert [len(draws.positions) for draws in reward.seen] == [16] * 10 + [19] * 5 + [48] * 2
    for draws in reward.seen:
        assert draws.scores.shape == draws.positions.shape
        np.testing.assert_array_equal(draws.scores, -np.asarray(draws.positions))
        numbers = np.asarray(draws.positions)[:, 2]
        assert np.all(np.diff(numbers) > 0)
        assert np.diff(numbers).max() <= 2 * np.diff(numbers).min()


def test_full_gradients_are_those_of_the_model() -> None:
    reward = FakeReward(nearest_to(1.0), gradients="full")
    tune(fake_bench(), reward, arms_of(1.0, 2.0))
    for draws in reward.seen:
        positions = np.asarray(draws.positions, np.float64)
        expected = MODEL.precision * (MODEL.posterior_mean - positions)
        np.testing.assert_allclose(draws.scores, expected, rtol=1e-4, atol=1e-2)


def test_draws_of_several_steps_are_counted_as_draws() -> None:
    bench = fake_bench(counting, {5: 1 / 1024})
    tuning = tune(bench, FakeReward(lambda h: h), arms_of(1.0, 2.0, 3.0, 4.0, length=5))
    for record in tuning.records:
        assert record.num_draws == record.num_steps // 5
        assert record.num_integration_steps == 5
    assert tuning.winner is not None
    assert tuning.winner.num_steps == pytest.approx(1024, rel=0.03)


def test_one_arm_is_run_and_wins() -> None:
    tuning = tune(fake_bench(), FakeReward(nearest_to(1.0)), arms_of(4.0))
    assert tuning.winner is not None
    assert len(tuning.records) == 1
    assert tuning.winner.promoted
    assert tuning.winner.elapsed_s == pytest.approx(1.0, rel=0.02)


def test_fewer_arms_than_the_factor_run_one_round() -> None:
    tuning = tune(fake_bench(), FakeReward(nearest_to(1.0)), arms_of(4.0, 1.0), reduction_factor=3)
    assert [r.promoted for r in tuning.records] == [False, True]
    assert all(r.budget_s == 1.0 for r in tuning.records)


def test_compilation_and_rewards_are_outside_the_budget() -> None:
    clock = FakeClock()
    bench = fake_bench(costs_s={})
    bench.clock = clock
    program = TimedProgram(
        gradients.standard(MODEL),
        counting_without_refresh,
        minibatch.without_replacement,
        5,
        capacity=CAPACITY,
        keep_gradients=True,
    )
    program.clock, program.cost_s, program.compiling_s = clock, 1 / 1024, 100.0
    bench._programs[5] = program
    began = clock()
    reward = FakeReward(nearest_to(1.0), clock=clock, cost_s=7.0)
    tuning = tune(bench, reward, arms_of(1.0, 2.0, 4.0, 8.0))
    first, *others = tuning.records
    assert first.compile_s == pytest.approx(100 + 7 + 2 / 1024)  # the reward's warm-up is one call
    later = [record.compile_s for record in others]
    assert later == [0.0, 0.0, 0.0, 7.0, 0.0]  # a rung warms up the number of draws it scores
    assert all(record.reward_s == 7.0 for record in tuning.records)
    for record in tuning.records:
        assert record.elapsed_s == pytest.approx(record.num_steps / 1024)
    seconds = bench.seconds
    assert seconds.sampling == pytest.approx(8 / 3, rel=0.02)
    assert seconds.compile == pytest.approx(114, rel=1e-3)
    assert seconds.gradients + seconds.reward == pytest.approx(42.0)
    assert clock() - began == pytest.approx(seconds.sampling + seconds.compile + 42.0)


def test_arms_of_one_batch_size_share_a_program() -> None:
    bench = fake_bench(costs_s={5: 1 / 1024, 7: 1 / 1024})
    tune(bench, FakeReward(nearest_to(1.0)), arms_of(*POWERS) + arms_of(*POWERS, batch_size=7))
    assert set(bench._programs) == {5, 7}


# Scores on the rung's own draws


def test_score_on_rung_sees_the_new_draws_only() -> None:
    reward = FakeReward(nearest_to(1.0))
    tuning = tune(fake_bench(), reward, arms_of(1.0, 2.0, 4.0, 8.0), score_on="rung")
    shown = [np.asarray(draws.positions)[:, 2] for draws in reward.seen]
    before = of_rung(tuning, 0)[0].num_steps
    assert [record.arm for record in of_rung(tuning, 1)] == [0, 1]
    assert shown[0].max() <= before
    assert shown[4].min() > before  # arm 0 goes on from where it was
    assert shown[4].max() <= of_rung(tuning, 1)[0].num_steps
    # The record counts the whole chain.
    rungs = schedule(4, 2, 1.0)
    assert of_rung(tuning, 1)[0].elapsed_s == pytest.approx(
        rungs[0].seconds + rungs[1].seconds, rel=0.02
    )
    assert of_rung(tuning, 1)[0].num_draws == of_rung(tuning, 1)[0].num_steps > before
    assert of_rung(tuning, 1)[0].num_steps == of_rung(tuning, 1)[0].elapsed_s * 1024


def test_score_on_rung_restarts_the_auxiliary_variables() -> None:
    # L = 512 is longer than a rung's chain: a continued one would not refresh in rung 1.
    def tuned(score_on: str) -> list[np.ndarray]:
        reward = FakeReward(lambda h: 1.0)
        reward.value = lambda h: float(len(reward.seen))
        tune(
            fake_bench(counting, {5: 1 / 1024}),
            reward,
            arms_of(1.0, 2.0, 4.0, 8.0, length=40),
            score_on=score_on,
        )
        return [np.asarray(draws.positions) for draws in reward.seen]

    first = of_rung(
        tune(
            fake_bench(counting, {5: 1 / 1024}),
            FakeReward(nearest_to(1.0)),
            arms_of(1.0, 2.0, 4.0, 8.0, length=40),
        ),
        0,
    )[0]
    assert first.num_steps % 40  # rung 0 ends in the middle of a draw
    steps = {score_on: tuned(score_on)[4][:, 0] for score_on in ("chain", "rung")}
    assert np.all(steps["chain"] % 40 == 0)  # the draw in progress was finished
    assert np.all((steps["rung"] - first.num_steps) % 40 == 0)  # a new one was begun


# Failures


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_never_wins(bad: float) -> None:
    reward = FakeReward(lambda h: bad if h in (0.25, 2.0, 16.0) else nearest_to(2.0)(h))
    for higher_is_better in (False, True):
        reward.higher_is_better = higher_is_better
        tuning = tune(fake_bench(), reward, arms_of(*POWERS))
        failed = [r for r in tuning.records if r.step_size in (0.25, 2.0, 16.0)]
        assert len(failed) == 3  # none of them reached a second rung
        for record in failed:
            assert record.status == "diverged"
            assert f"fake is {bad}" in record.reason
            assert math.isnan(record.reward)
            assert not record.promoted
        good = [h for h in POWERS if h not in (0.25, 2.0, 16.0)]
        order = sorted(good, key=nearest_to(2.0), reverse=higher_is_better)
        assert [r.step_size for r in of_rung(tuning, 1)] == order[:5]
        assert tuning.winner is not None
        assert tuning.winner.step_size == order[0]


def test_arms_that_diverge_say_at_which_step() -> None:
    tuning = tune(fake_bench(), FakeReward(nearest_to(1.0)), arms_of(-3.0, 1.0, -70.0, 2.0))
    assert [r.status for r in of_rung(tuning, 0)] == ["diverged", "ok", "diverged", "ok"]
    first, _, third, _ = of_rung(tuning, 0)
    assert "step 3" in first.reason
    assert (first.num_steps, first.num_draws, first.num_scored) == (2, 2, 0)
    assert first.elapsed_s == 3 / 1024
    assert "step 70" in third.reason
    assert tuning.winner is not None
    assert tuning.winner.step_size == 1.0


def test_an_arm_that_diverges_in_a_later_rung_loses() -> None:
    # 333 steps in rung 0 and as many again in rung 1: step 400 is in rung 1.
    reward = FakeReward(lambda h: h)
    tuning = tune(fake_bench(), reward, arms_of(-400.0, 2.0, 3.0, 4.0))
    assert [r.step_size for r in of_rung(tuning, 1)] == [-400.0, 2.0]
    record = of_rung(tuning, 1)[0]
    assert record.status == "diverged"
    assert "step 400" in record.reason
    assert record.num_steps == 399
    assert tuning.winner is not None
    assert tuning.winner.arm == 1


def test_a_rung_of_failures_ends_the_tuning_without_a_winner() -> None:
    # Both arms that are left diverge in rung 1; those that lost in rung 0 do not come back.
    store, reporter = MemoryStore(), Listening()
    arms = arms_of(-400.0, -450.0, 3.0, 4.0)
    reward = FakeReward(lambda h: h)
    tuning = tune(fake_bench(), reward, arms, store=store, reporter=reporter)
    assert [r.status for r in of_rung(tuning, 0)] == ["ok"] * 4
    assert [r.status for r in of_rung(tuning, 1)] == ["diverged"] * 2
    assert tuning.winner is None
    told = "no arm of rung 2/2 was usable: the tuning ends without a winner"
    assert reporter.messages[-1] == told
    reporter = Listening()
    assert tune(fake_bench(), reward, arms, store=store, reporter=reporter).winner is None
    assert reporter.messages[-1] == told


def test_a_constant_chain_is_frozen() -> None:
    # Steps of 1e-9 do not move a float32 of 2, however good the reward of standing still.
    bench = fake_bench(sgld, start=MODEL.posterior_mean.astype(np.float32))
    tuning = tune(
        bench, KernelSteinDiscrepancy(gradients="stochastic"), arms_of(1e-20, 1e-3, 1e-19, 1e-4)
    )
    assert [r.status for r in of_rung(tuning, 0)] == ["frozen", "ok", "frozen", "ok"]
    assert "too small to move" in of_rung(tuning, 0)[0].reason
    assert tuning.winner is not None
    assert tuning.winner.step_size in (1e-3, 1e-4)


def test_an_arm_without_draws_is_a_row() -> None:
    bench = fake_bench(costs_s={5: 1 / 1024, 7: 100.0})
    arms = arms_of(1.0, 2.0, 3.0) + arms_of(1.0, batch_size=7)
    tuning = tune(bench, FakeReward(nearest_to(1.0)), arms)
    record = of_rung(tuning, 0)[3]
    assert record.status == "no_draws"
    assert "0 draws from 0 gradient steps in 0.333 s" in record.reason
    assert record.elapsed_s == 0.0
    assert tuning.winner is not None


def test_one_draw_is_not_enough() -> None:
    bench = fake_bench(costs_s={5: 0.2})
    tuning = tune(bench, FakeReward(nearest_to(1.0)), arms_of(1.0, 2.0), longest_arm_s=0.2)
    assert [r.status for r in tuning.records] == ["no_draws"] * 2
    assert [r.num_steps for r in tuning.records] == [1, 1]
    assert tuning.winner is None


def test_a_budget_too_small_for_anyone_has_no_winner() -> None:
    tuning = tune(fake_bench(), FakeReward(nearest_to(1.0)), arms_of(*POWERS), longest_arm_s=1e-9)
    assert tuning.winner is None
    assert [r.status for r in tuning.records] == ["no_draws"] * 10


def test_every_arm_failing_leaves_a_table_and_no_winner() -> None:
    store = MemoryStore()
    arms = arms_of(*(-float(k) for k in range(1, 11)))
    tuning = tune(fake_bench(), FakeReward(nearest_to(1.0)), arms, store=store)
    assert tuning.winner is None
    assert [r.status for r in tuning.records] == ["diverged"] * 10
    assert [r.reason for r in tuning.records] == [
        f"position not finite at step {k}" for k in range(1, 11)
    ]
    assert not any(r.promoted for r in tuning.records)
    assert plain(store.records) == plain(tuning.records)
    again = tune(fake_bench(), FakeReward(nearest_to(1.0)), arms, store=store)
    assert again.winner is None
    assert plain(again.records) == plain(tuning.records)


def test_fewer_usable_arms_than_places() -> None:
    arms = arms_of(-1.0, -2.0, 3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0)
    tuning = tune(fake_bench(), FakeReward(nearest_to(1.0)), arms, reduction_factor=3)
    assert [r.arm for r in of_rung(tuning, 1)] == [2]
    assert tuning.winner == of_rung(tuning, 1)[0]


def refusing(bench: Workbench, batch_size: int, error: Exception, after_step: int = 0) -> None:
    """Make the program of a batch size fail to go on from some step of a chain."""
    program = bench._programs[batch_size]
    dispatch = program.dispatch

    def failing(carry: Carry, *arguments: Any) -> Any:
        if int(carry.step) >= after_step:
            raise error
        return dispatch(carry, *arguments)

    program.dispatch = failing  # type: ignore[method-assign]


@pytest.fixture
def bench_of_two() -> Any:
    bench = fake_bench(costs_s={5: 1 / 1024, 7: 1 / 1024})
    yield bench
    for program in bench._programs.values():
        vars(program).pop("dispatch", None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 GB\nmore"), "9 GB"),
        (MemoryError("Unable to allocate 9 GB"), "Unable to allocate"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_arm_out_of_memory_is_a_row(bench_of_two: Any, error: Exception, reason: str) -> None:
    refusing(bench_of_two, 7, error)
    arms = arms_of(1.0, 2.0, 4.0) + arms_of(1.0, batch_size=7)
    tuning = tune(bench_of_two, FakeReward(nearest_to(1.0)), arms)
    record = of_rung(tuning, 0)[3]
    assert record.status == "out_of_memory"
    assert reason in record.reason
    assert "\n" not in record.reason
    assert (record.num_steps, record.num_draws, record.elapsed_s) == (0, 0, 0.0)
    assert not record.promoted
    assert tuning.winner is not None
    assert tuning.winner.batch_size == 5


def test_out_of_memory_in_a_later_rung_keeps_the_counts(bench_of_two: Any) -> None:
    arms = arms_of(1.0, batch_size=7) + arms_of(2.0, 4.0, 8.0)
    whole = tune(bench_of_two, FakeReward(nearest_to(1.0)), arms)
    assert [r.arm for r in of_rung(whole, 1)] == [0, 1]
    refusing(bench_of_two, 7, MemoryError(), after_step=of_rung(whole, 0)[0].num_steps)
    tuning = tune(bench_of_two, FakeReward(nearest_to(1.0)), arms)
    before, after = of_rung(tuning, 0)[0], of_rung(tuning, 1)[0]
    assert before.status == "ok"
    assert (after.arm, after.status) == (0, "out_of_memory")
    assert after.num_steps == before.num_steps
    assert after.elapsed_s == before.elapsed_s
    assert tuning.winner is not None
    assert tuning.winner.arm == 1


def test_a_reward_out_of_memory_is_a_row() -> None:
    def value(step_size: float) -> float:
        if step_size == 1.0:
            raise MemoryError("Unable to allocate the Gram matrix")
        return step_size

    tuning = tune(fake_bench(), FakeReward(value), arms_of(1.0, 2.0, 3.0, 4.0))
    record = tuning.records[0]
    assert record.status == "out_of_memory"
    assert record.num_steps > 0  # the chain was run
    assert tuning.winner is not None
    assert tuning.winner.step_size == 2.0


def test_other_errors_are_not_swallowed(bench_of_two: Any) -> None:
    refusing(bench_of_two, 7, jax.errors.JaxRuntimeError("INTERNAL: a mistake of ours"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a mistake of ours"):
        tune(bench_of_two, FakeReward(nearest_to(1.0)), arms_of(1.0, 2.0, batch_size=7))


# Resuming


def settings_of(name: str) -> tuple[dict[str, Any], Any]:
    bench = {"chain": fake_bench, "rung": fake_bench, "sghmc-like": lambda: fake_bench(counting)}
    length = 3 if name == "sghmc-like" else 1
    arms = arms_of(*POWERS[:8], -5.0, 8.5, length=length)
    changes = {"arms": arms, "score_on": "rung" if name == "rung" else "chain"}
    return changes, bench[name]


@pytest.mark.parametrize("name", ["chain", "rung", "sghmc-like"])
@pytest.mark.parametrize("kill_after", [0, 1, 2, 3, 4, 5])
def test_a_killed_tuning_resumes_after_its_last_rung(name: str, kill_after: int) -> None:
    # Two writes a rung, the table and the checkpoint; three rungs.
    changes, bench = settings_of(name)
    whole_reward = FakeReward(nearest_to(2.0))
    whole = tune(bench(), whole_reward, store=MemoryStore(), **changes)
    store = MemoryStore(kill_after=kill_after)
    with pytest.raises(Killed):
        tune(bench(), FakeReward(nearest_to(2.0)), store=store, **changes)
    store.kill_after = None
    resumed_reward = FakeReward(nearest_to(2.0))
    resumed = tune(bench(), resumed_reward, store=store, **changes)
    assert plain(resumed.records) == plain(whole.records)
    assert resumed.winner == whole.winner
    assert plain(store.records) == plain(whole.records)
    # Rungs whose checkpoint was written are not run again.
    rungs_done = kill_after // 2
    scored = [sum(r.num_scored > 0 for r in of_rung(whole, rung)) for rung in range(3)]
    assert len(resumed_reward.seen) == sum(scored[rungs_done:])
    # What is scored is bit for bit what the uninterrupted run scored.
    tail = whole_reward.seen[sum(scored[:rungs_done]) :]
    for ours, theirs in zip(resumed_reward.seen, tail, strict=True):
        np.testing.assert_array_equal(ours.positions, theirs.positions)
        np.testing.assert_array_equal(ours.scores, theirs.scores)
        assert jax.random.key_data(ours.rng_key).tolist() == (
            jax.random.key_data(theirs.rng_key).tolist()
        )


@pytest.mark.parametrize("damage", ["chains", "meta"])
def test_rungs_of_another_version_are_run_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    changes, bench = settings_of("chain")
    whole = tune(bench(), FakeReward(nearest_to(2.0)), **changes)
    store = MemoryStore(kill_after=4)
    with pytest.raises(Killed):
        tune(bench(), FakeReward(nearest_to(2.0)), store=store, **changes)
    store.kill_after = None
    if damage == "chains":
        monkeypatch.setattr(chain_module, "LAYOUT_VERSION", chain_module.LAYOUT_VERSION + 1)
    else:
        monkeypatch.setattr(mamba, "CHECKPOINT_VERSION", mamba.CHECKPOINT_VERSION + 1)
    reward = FakeReward(nearest_to(2.0))
    again = tune(bench(), reward, store=store, **changes)
    assert plain(again.records) == plain(whole.records)
    assert plain(store.records) == plain(whole.records)
    assert len(reward.seen) == sum(r.num_scored > 0 for r in whole.records)
    assert caplog.messages == ["another version saved the finished rungs: the tuning starts again"]


def test_a_finished_tuning_is_read_and_not_run() -> None:
    store = MemoryStore()
    first = tune(fake_bench(), FakeReward(nearest_to(2.0)), arms_of(*POWERS), store=store)
    bench, reward = fake_bench(), FakeReward(nearest_to(2.0))
    began = bench.clock()
    again = tune(bench, reward, arms_of(*POWERS), store=store)
    assert plain(again.records) == plain(first.records)
    assert again.winner == first.winner
    assert bench.clock() == began
    assert reward.seen == []


def test_a_run_folder_keeps_a_tuning(tmp_path: Path) -> None:
    arms = arms_of(*POWERS[:8], -5.0, 8.5)
    whole = tune(fake_bench(), FakeReward(nearest_to(2.0)), arms)
    config = {"seed": 0}

    class Interrupting(FakeReward):
        def __call__(self, draws: ScoredDraws) -> float:
            if len(self.seen) == 12:  # in the second rung
                raise Killed
            return super().__call__(draws)

    with (
        RunFolder.open(tmp_path / "run", config) as folder,
        pytest.raises(Killed),
    ):
        tune(fake_bench(), Interrupting(nearest_to(2.0)), arms, store=folder)
    with RunFolder.open(tmp_path / "run", config) as folder:
        reward = FakeReward(nearest_to(2.0))
        resumed = tune(fake_bench(), reward, arms, store=folder)
        assert plain(folder.read_tuning()) == plain(whole.records)
    assert plain(resumed.records) == plain(whole.records)
    assert resumed.winner == whole.winner
    assert len(reward.seen) == 7


# What a person sees


class Listening:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.bars: list[tuple[str, float, str]] = []
        self.amount = 0.0
        self.open = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def start(self, description: str, total: float, unit: str) -> None:
        assert not self.open
        self.open, self.amount = 1, 0.0
        self.bars.append((description, total, unit))

    def update(self, amount: float, note: str = "") -> None:
        self.amount += amount
        self.note = note

    def finish(self) -> None:
        self.open = 0
        assert self.amount == pytest.approx(self.bars[-1][1])


def test_the_reporter_hears_of_rungs_and_the_best_so_far() -> None:
    reporter = Listening()
    tune(fake_bench(), FakeReward(nearest_to(2.0)), arms_of(*POWERS), reporter=reporter)
    assert len(reporter.bars) == 3
    assert "rung 1/3: 10 arms" in reporter.bars[0][0]
    assert "10 arms, 3 rungs" in reporter.messages[0]
    assert "h=2" in reporter.note
    assert not reporter.open


def test_step_sizes_are_read_off_the_draws() -> None:
    # The counting sampler is what these tests rest on.
    reward = FakeReward(lambda h: h)
    tune(fake_bench(), reward, arms_of(0.5, 3.0))
    assert [step_size_of(draws) for draws in reward.seen] == [0.5, 3.0]
