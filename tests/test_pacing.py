"""Seconds into steps: by the clock, at a measured cost, by a ledger. On a fake clock."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from fake_time import FakeClock, TimedProgram, counting_without_refresh
from gaussian_model import gaussian_mean

from mamba_cli import gradients, minibatch, pacing
from mamba_cli.chain import Chain
from mamba_cli.errors import DataError
from mamba_cli.pacing import Calibrated, Pace, Replayed, StepLedger, WallClock
from mamba_cli.samplers.sgld import sgld
from mamba_cli.types import Hyperparameters, Sampler
from mamba_cli.workbench import Workbench

MODEL = gaussian_mean(num_data=64, dim=3)
START = np.zeros(3, np.float32)
ARM = Hyperparameters(1e-3, 5)


def compiled(sampler: Sampler) -> TimedProgram:
    made = TimedProgram(
        gradients.standard(MODEL), sampler, minibatch.without_replacement, 5, capacity=512
    )
    made.clock = FakeClock()
    made.compile(START)
    made.cost_s = made.cost_per_step_s = 1 / 1024
    return made


@pytest.fixture(scope="module")
def program() -> TimedProgram:
    return compiled(sgld)


def run(pace: Pace, program: TimedProgram, seconds: float, **changes: Any) -> Chain:
    chain = program.start(jax.random.key(1), START, ARM)
    asked: dict[str, Any] = {"place": "here", "clock": program.clock}
    return pace.run(program, chain, seconds, **(asked | changes))


def same(first: Chain, second: Chain) -> bool:
    leaves = [jax.tree.leaves((chain.carry, chain.sums)) for chain in (first, second)]
    return all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


def test_calibrated_seconds_are_steps_whatever_the_machine_does(program: TimedProgram) -> None:
    pace = Calibrated()
    pace.prepare([(program, ARM)], START, program.clock)
    assert pace.ledger.costs_s == {"n=5 of 64, L=1": 1 / 1024}
    assert run(pace, program, 100.4 / 1024).num_steps == 100
    program.cost_s = 1 / 64  # another process takes the machine
    try:
        assert run(pace, program, 100.6 / 1024).num_steps == 101
        assert run(WallClock(), program, 100.6 / 1024).num_steps < 10
    finally:
        program.cost_s = program.cost_per_step_s = 1 / 1024


def test_a_cost_is_the_median_of_warm_dispatches(
    program: TimedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter([9.0, 1 / 1024, 1 / 1024, 5.0, 1 / 512, 1 / 1024])  # the first one warms

    def dispatch(self: TimedProgram, *arguments: Any) -> Any:
        self.cost_s = next(costs)
        return original(self, *arguments)

    original = TimedProgram.dispatch
    monkeypatch.setattr(TimedProgram, "dispatch", dispatch)
    measured = pacing.measure_cost_s(program, ARM, START, program.clock)
    program.cost_s = program.cost_per_step_s = 1 / 1024
    assert measured == 1 / 1024
    assert next(costs, None) is None


def test_a_shape_is_timed_once_and_a_long_step_one_by_one() -> None:
    program = compiled(counting_without_refresh)
    bench = Workbench(
        MODEL,
        START,
        gradients.standard(MODEL),
        counting_without_refresh,
        minibatch.without_replacement,
        512,
        clock=program.clock,
        pace=Calibrated(),
    )
    bench._programs[5] = program
    program.dispatched = ()
    program.cost_s = program.cost_per_step_s = 0.25  # longer than a dispatch aims for
    bench.calibrate([Hyperparameters(step_size, 5) for step_size in (0.1, 0.2, 0.3)])
    assert program.dispatched == (1,) * (1 + pacing.NUM_TIMED)
    assert bench.seconds.calibration == 0.25 * (1 + pacing.NUM_TIMED)


def test_no_time_for_half_a_step_is_no_step(program: TimedProgram) -> None:
    pace = Calibrated(StepLedger(costs_s={"n=5 of 64, L=1": 1.0}))
    assert run(pace, program, 0.4).num_steps == 0
    assert run(pace, program, 0.6).num_steps == 1


def test_progress_is_told_in_seconds_of_budget(program: TimedProgram) -> None:
    told: list[float] = []
    pace = Calibrated(StepLedger(costs_s={"n=5 of 64, L=1": 1 / 1024}))
    chain = run(pace, program, 1.25, tick=told.append)
    assert told == [0.5, 0.5, 0.25]
    assert chain.num_steps == 1280
    told.clear()
    repeated = run(Replayed(pace.ledger), program, 1.25, tick=told.append)
    assert sum(told) == pytest.approx(1.25)
    assert same(chain, repeated)


@pytest.mark.parametrize("seconds", [0.0, 3 / 1024, 0.1])
def test_a_ledger_repeats_a_chain_of_the_wall_clock_bit_for_bit(
    program: TimedProgram, seconds: float
) -> None:
    wall = WallClock()
    program.overhead_s = 1 / 700
    chain = run(wall, program, seconds)
    program.overhead_s, program.cost_s = 0.0, 1 / 10
    try:
        ledger = StepLedger.from_dict(wall.ledger.to_dict("wall"))
        repeated = run(Replayed(ledger), program, seconds)
        assert same(chain, repeated)
        assert sum(wall.ledger.dispatches["here"]) == chain.num_steps
        assert len(wall.ledger.dispatches["here"]) > 1 or seconds < 0.1
        longer = run(WallClock(), program, seconds + 1.0)
        assert not same(chain, longer)
    finally:
        program.cost_s = program.cost_per_step_s = 1 / 1024


def test_a_chain_that_diverges_diverges_again_at_the_same_step() -> None:
    # The counting sampler, which a negative h makes not finite at step -h.
    program = compiled(counting_without_refresh)
    arm = Hyperparameters(-7.0, 5)

    def chain(pace: Pace) -> Chain:
        start = program.start(jax.random.key(0), START, arm)
        return pace.run(program, start, 1.0, "here", program.clock)

    wall = WallClock()
    first, again = chain(wall), chain(Replayed(wall.ledger))
    assert first.nonfinite_step == again.nonfinite_step == 7
    assert first.num_steps == again.num_steps == 6


def test_where_memory_ran_out_it_does_again(
    program: TimedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: Any) -> Any:
        raise MemoryError("40 GB are not there")

    pace = WallClock()
    with monkeypatch.context() as patched:
        patched.setattr(TimedProgram, "dispatch", no_memory)
        with pytest.raises(MemoryError):
            run(pace, program, 0.1)
        assert Calibrated().prepare([(program, ARM)], START, program.clock) is None
    assert pace.ledger.dispatches == {}
    with pytest.raises(MemoryError, match="40 GB are not there"):
        run(Replayed(pace.ledger), program, 0.1)
    run(pace, program, 0.1)
    assert pace.ledger.failures == {}


def test_what_is_not_in_the_ledger_is_not_made_up(program: TimedProgram) -> None:
    with pytest.raises(DataError, match="no entry for here"):
        run(Replayed(StepLedger()), program, 1.0)


def test_what_was_left_for_ties_is_not_measured_again() -> None:
    pace = WallClock()
    assert pace.num_extra("rung 0", 2) == 2
    again = Replayed(StepLedger.from_dict(pace.ledger.to_dict("wall")))
    assert again.num_extra("rung 0", 0) == 2
    assert again.ledger.num_extra == {"rung 0": 2}
    # A ledger of a version that kept none.
    older = StepLedger.from_dict({"version": 1, "dispatches": {}, "failures": {}, "costs_s": {}})
    assert Replayed(older).num_extra("rung 0", 1) == 1


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"version": 0, "dispatches": {}, "failures": {}, "costs_s": {}},
        {"version": 1, "dispatches": {"rung 0, arm 0": 7}, "failures": {}, "costs_s": {}},
        {"version": 1, "dispatches": []},
    ],
)
def test_what_is_no_ledger_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"version|not a ledger"):
        StepLedger.from_dict(values)


def test_a_replay_that_scores_otherwise_follows_the_arms_that_went_on() -> None:
    ledger = StepLedger(
        dispatches={"rung 0, arm 0": [1], "rung 0, arm 3": [1], "rung 1, arm 3": [2]}
    )
    follows, plain = Replayed(ledger, follows=True), Replayed(ledger)
    assert follows.going_on(0, False, [0, 3], [0]) == [1]
    assert follows.going_on(0, False, [0, 3], [1, 0]) == [1]
    assert follows.going_on(1, True, [3], [0]) == [0]  # the winner is by the new scores
    # A replay decides for itself, and what it decides is compared.
    assert plain.going_on(0, False, [0, 3], [0]) == [0]
    # A tuning that ended there ends there.
    ended = Replayed(StepLedger(dispatches={"rung 0, arm 0": [1]}), follows=True)
    assert ended.going_on(0, False, [0], [0]) == []
