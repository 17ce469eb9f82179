"""Halving with guards, a check run and ties, on a fake clock: who goes on, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
from benches import (
    FakeReward,
    Killed,
    MemoryStore,
    arms_of,
    fake_bench,
    nearest_to,
    plain,
)

from mamba_cli.pacing import Calibrated, Replayed, StepLedger
from mamba_cli.tuners import mamba
from mamba_cli.tuners.guards import Verdict
from mamba_cli.tuners.halving import schedule, total_s
from mamba_cli.tuners.result import Tuning
from mamba_cli.types import ArmRecord, Hyperparameters, Scored, ScoredDraws

POWERS = [2.0**k for k in range(-5, 5)]


@dataclass
class FakeGuards:
    """Refuses the step sizes it is told to, which it reads off the counting sampler's draws."""

    refused: tuple[float, ...] = ()
    drifting: tuple[float, ...] = ()
    lifetimes: list[tuple[int, float]] = field(default_factory=list)
    checked: list[int] = field(default_factory=list)

    def verdict(self, positions: np.ndarray, *, num_steps: int, lifetimes: float) -> Verdict | None:
        self.lifetimes.append((num_steps, lifetimes))
        step_size = positions[-1, 0] / positions[-1, 2]
        return Verdict("frozen", "refused") if step_size in self.refused else None

    def drift(self, positions: np.ndarray) -> Verdict | None:
        self.checked.append(len(positions))
        step_size = positions[-1, 0] / positions[-1, 2]
        return Verdict("diverged", "drifts") if step_size in self.drifting else None


@dataclass
class SureReward(FakeReward):
    """A reward with a standard error of its own."""

    std_error: float = 0.1

    def __call__(self, draws: ScoredDraws) -> Scored:  # type: ignore[override]
        return Scored(super().__call__(draws), self.std_error)


def tune(reward: Any, arms: list[Hyperparameters], bench: Any = None, **changes: Any) -> Tuning:
    settings: dict[str, Any] = {
        "reduction_factor": 2,
        "longest_arm_s": 1.0,
        "max_draws": 16,
        "score_on": "chain",
        "rng_key": jax.random.key(3),
    }
    return mamba.tune(bench or fake_bench(), reward, arms, **(settings | changes))


def of_rung(tuning: Tuning, rung: int) -> list[ArmRecord]:
    return [record for record in tuning.records if record.rung == rung]


def test_a_refused_arm_is_a_row_and_is_not_promoted() -> None:
    guards = FakeGuards(refused=(2.0, 1.0))
    tuning = tune(FakeReward(nearest_to(2.0)), arms_of(*POWERS), guards=guards)
    record = of_rung(tuning, 0)[6]
    assert (record.step_size, record.status, record.reason) == (2.0, "frozen", "refused")
    assert math.isnan(record.reward)
    assert record.num_scored == 0
    assert not record.promoted
    assert tuning.winner is not None
    assert tuning.winner.step_size == 4.0


def test_guards_know_how_much_longer_an_arm_may_run() -> None:
    guards = FakeGuards()
    tune(FakeReward(nearest_to(2.0)), arms_of(*POWERS), guards=guards)
    rungs = schedule(10, 2, 1.0)
    elapsed_s = np.cumsum([rung.seconds for rung in rungs])
    expected = np.repeat(elapsed_s[-1] / elapsed_s, [10, 5, 2])
    np.testing.assert_allclose([v for _, v in guards.lifetimes], expected, rtol=0.05)
    assert all(num_steps > 0 for num_steps, _ in guards.lifetimes)


def test_a_winner_that_drifts_is_dropped_for_the_next_best() -> None:
    bench = fake_bench()
    guards = FakeGuards(drifting=(2.0,))
    began = bench.clock()
    tuning = tune(FakeReward(nearest_to(2.0)), arms_of(*POWERS), bench, guards=guards, check_s=0.5)
    last = {record.step_size: record for record in of_rung(tuning, 2)}
    dropped = last[2.0]
    assert (dropped.status, dropped.promoted) == ("diverged", False)
    assert math.isnan(dropped.reward)
    assert dropped.reason == "fake 1, but in a check run of 0.5 s: drifts"
    assert tuning.winner == last[1.0]
    assert last[1.0].promoted
    # Both were checked, on top of T; the records count the tuning alone.
    assert bench.seconds.check == pytest.approx(1.0, rel=0.02)
    whole_s = total_s(schedule(10, 2, 1.0))
    assert bench.seconds.sampling == pytest.approx(whole_s, rel=0.02)
    assert bench.clock() - began == pytest.approx(whole_s + 1.0, rel=0.02)
    assert last[1.0].elapsed_s == pytest.approx(1.0, rel=0.02)
    assert guards.checked == [32, 32]


def test_a_winner_whose_check_run_is_out_of_memory_is_dropped_for_the_next_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = fake_bench()
    run = bench.pace.run

    def refusing(program: Any, chain: Any, seconds: float, place: str, clock: Any) -> Any:
        if place.startswith("check") and chain.hyperparameters.step_size == 2.0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 GB\nmore")
        return run(program, chain, seconds, place, clock)

    monkeypatch.setattr(bench.pace, "run", refusing)
    guards = FakeGuards()
    tuning = tune(FakeReward(nearest_to(2.0)), arms_of(*POWERS), bench, guards=guards, check_s=0.5)
    last = {record.step_size: record for record in of_rung(tuning, 2)}
    assert (last[2.0].status, last[2.0].promoted) == ("out_of_memory", False)
    assert last[2.0].reason.endswith("check run of 0.5 s: RESOURCE_EXHAUSTED: Out of memory: 9 GB")
    assert tuning.winner == last[1.0]
    assert guards.checked == [32]


def test_without_a_stable_arm_there_is_no_winner() -> None:
    guards = FakeGuards(drifting=(2.0, 1.0))
    tuning = tune(FakeReward(nearest_to(2.0)), arms_of(*POWERS), guards=guards, check_s=0.5)
    assert tuning.winner is None
    assert not any(record.promoted for record in of_rung(tuning, 2))


def test_without_guards_or_seconds_nothing_is_checked() -> None:
    for changes in ({"check_s": 0.5}, {"guards": FakeGuards(drifting=(2.0,))}):
        tuning = tune(FakeReward(nearest_to(2.0)), arms_of(*POWERS), **changes)
        assert tuning.winner is not None
        assert tuning.winner.step_size == 2.0


@pytest.mark.parametrize("kill_after", [4, 5, 6])
def test_a_tuning_killed_before_its_check_run_resumes_with_it(kill_after: int) -> None:
    arms = arms_of(*POWERS)
    changes: dict[str, Any] = {"guards": FakeGuards(drifting=(2.0,)), "check_s": 0.5}
    whole = tune(FakeReward(nearest_to(2.0)), arms, store=MemoryStore(), **changes)
    store = MemoryStore(kill_after=kill_after)
    if kill_after < 6:
        with pytest.raises(Killed):
            tune(FakeReward(nearest_to(2.0)), arms, store=store, **changes)
    else:
        tune(FakeReward(nearest_to(2.0)), arms, store=store, **changes)
    # Nothing is promoted before the check run: such a table is not taken for a finished one.
    assert not any(record.promoted for record in store.records if record.rung == 2)
    store.kill_after = None
    resumed = tune(FakeReward(nearest_to(2.0)), arms, store=store, **changes)
    assert plain(resumed.records) == plain(whole.records)
    assert resumed.winner == whole.winner


def test_the_seconds_of_arms_that_fail_at_once_keep_ties_alive() -> None:
    # Nine arms, four of which stop at their first steps: of the 0.11 s x 9 of rung 0 their 0.44 s
    # are left, one slot of the 0.33 s of rung 1. The arm next to the cut takes it.
    arms = arms_of(1.0, 2.0, 4.0, 8.0, -1.0, -1.0, -1.0, -1.0, 16.0)
    changes: dict[str, Any] = {"reduction_factor": 3, "longest_arm_s": 4 / 9}
    bench = fake_bench()
    began = bench.clock()
    tuning = tune(
        SureReward(nearest_to(1.0), std_error=1.0), arms, bench, keep_ties=True, **changes
    )
    rungs = schedule(9, 3, 4 / 9)
    assert [r.arm for r in of_rung(tuning, 0) if r.promoted] == [0, 1, 2, 3]
    assert [r.arm for r in of_rung(tuning, 1)] == [0, 1, 2, 3]
    assert bench.clock() - began <= total_s(rungs) * 1.02
    assert tuning.winner is not None
    assert tuning.winner.arm == 0
    # Not where the next arm is worse beyond noise, nor where nothing is asked.
    surer = tune(SureReward(nearest_to(1.0), std_error=0.1), arms, keep_ties=True, **changes)
    assert [r.arm for r in of_rung(surer, 1)] == [0, 1, 2]
    plain_halving = tune(SureReward(nearest_to(1.0), std_error=1.0), arms, **changes)
    assert [r.arm for r in of_rung(plain_halving, 1)] == [0, 1, 2]


def test_a_repeated_tuning_decides_the_same_however_long_it_takes() -> None:
    arms = arms_of(1.0, 2.0, 4.0, 8.0, -1.0, -1.0, -1.0, -1.0, 16.0)
    changes: dict[str, Any] = {"reduction_factor": 3, "longest_arm_s": 4 / 9, "keep_ties": True}
    there, here = FakeGuards(), FakeGuards()
    bench = fake_bench()
    reward = SureReward(nearest_to(1.0), std_error=1.0)
    first = tune(reward, arms, bench, guards=there, **changes)
    slow = fake_bench(costs_s={5: 1 / 64})
    slow.pace = Replayed(bench.pace.ledger)
    again = tune(reward, arms, slow, guards=here, **changes)
    assert [r.promoted for r in again.records] == [r.promoted for r in first.records]
    assert [r.arm for r in of_rung(again, 1)] == [0, 1, 2, 3]
    assert there.lifetimes == here.lifetimes


def test_by_a_calibrated_clock_what_is_left_does_not_hang_on_the_machine() -> None:
    arms = arms_of(1.0, 2.0, 4.0, 8.0, -1.0, -1.0, -1.0, -1.0, 16.0)
    changes: dict[str, Any] = {"reduction_factor": 3, "longest_arm_s": 4 / 9, "keep_ties": True}
    for cost_s in (1 / 1024, 1 / 256, 1 / 4096):  # as measured; then a busy machine, and an idle
        bench = fake_bench(costs_s={5: cost_s})
        bench.pace = Calibrated(StepLedger(costs_s={"n=5 of 64, L=1": 1 / 1024}))
        tuning = tune(SureReward(nearest_to(1.0), std_error=1.0), arms, bench, **changes)
        assert [r.arm for r in of_rung(tuning, 1)] == [0, 1, 2, 3]


def test_the_records_say_how_sure_they_are() -> None:
    tuning = tune(SureReward(nearest_to(2.0), std_error=0.5), arms_of(*POWERS))
    assert {record.reward_std_error for record in tuning.records} == {0.5}
    assert tuning.winner is not None
    assert tuning.winner.in_best_set
    silent = tune(FakeReward(nearest_to(2.0)), arms_of(*POWERS))
    assert all(math.isnan(record.reward_std_error) for record in silent.records)
    assert not any(record.in_best_set for record in silent.records)
