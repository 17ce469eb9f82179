"""Evaluation: a fresh chain on a posterior in closed form, and rows that say why they failed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fake_time import FakeClock, TimedProgram
from gaussian_model import gaussian_mean

from mamba_cli import artifacts, gradients, minibatch
from mamba_cli.errors import DataError
from mamba_cli.evaluation import (
    Evaluation,
    Moments,
    Reference,
    best_of,
    check_best,
    curve_times,
    evaluate,
    repeat_key,
)
from mamba_cli.samplers.sgld import sgld
from mamba_cli.types import ArmRecord, Hyperparameters
from mamba_cli.workbench import Workbench

MODEL = gaussian_mean(num_data=64, dim=3)
MODE = MODEL.posterior_mean.astype(np.float32)
GOOD = Hyperparameters(5e-3, 64)  # 0.3 of 1 / precision; all rows, so no gradient noise
STEP_S = 1 / 8192


@cache
def compiled() -> TimedProgram:
    program = TimedProgram(
        gradients.standard(MODEL), sgld, minibatch.without_replacement, 64, capacity=400
    )
    program.clock = FakeClock()
    program.compile(MODE)
    return program


def bench_of(cost_s: float = STEP_S) -> Workbench:
    clock, program = FakeClock(), compiled()
    program.clock, program.cost_s, program.cost_per_step_s = clock, cost_s, cost_s
    program.dispatched = ()
    bench = Workbench(
        MODEL,
        MODE,
        gradients.standard(MODEL),
        sgld,
        minibatch.without_replacement,
        400,
        clock=clock,
    )
    bench._programs[64] = program
    return bench


def run(hyperparameters: Hyperparameters = GOOD, **changes: Any) -> Evaluation:
    settings: dict[str, Any] = {
        "budget_s": 4.0,
        "max_draws": 200,
        "rng_key": jax.random.key(1),
        "reference": Reference(MODEL.posterior_std),
    }
    settings |= changes
    bench = settings.pop("bench", None) or bench_of()
    return evaluate(bench, hyperparameters, **settings)


def test_a_good_chain_has_the_standard_deviations_of_the_posterior() -> None:
    result = run()
    row = result.row
    assert (row["status"], row["reason"]) == ("ok", "")
    # Of 32,768 draws with autocorrelation rho = 1 - h lambda / 2 = 0.84, variances have a
    # relative standard error of √(2 (1 + rho²) / (1 - rho²) / draws) = 2 %, so deviations 1 %;
    # SGLD's own law (FACTS: 2 / (2 - h lambda / 2) on the variance) makes them 4.1 % too wide.
    widening = math.sqrt(2 / (2 - GOOD.step_size * MODEL.precision / 2))
    np.testing.assert_allclose(result.std, widening * MODEL.posterior_std, rtol=0.045)
    exact = run(reference=Reference(widening * MODEL.posterior_std))
    assert exact.row["relative_std_error"] < 0.045
    assert row["relative_std_error"] == pytest.approx(
        np.linalg.norm(result.std - MODEL.posterior_std) / np.linalg.norm(MODEL.posterior_std)
    )


def test_the_row_counts_the_chain() -> None:
    row = run().row
    assert row["num_samples"] == row["num_steps"] == row["elapsed_s"] / STEP_S
    assert row["elapsed_s"] == pytest.approx(4.0, rel=0.02)
    assert row["num_scored"] == 200
    assert row["step_size"] == 5e-3
    assert row["log10_step_size"] == pytest.approx(-2.30103)
    assert (row["batch_size"], row["batch_percent"]) == (64, 100.0)
    assert row["num_integration_steps"] == 1


def test_metrics_are_those_of_the_posterior() -> None:
    row = run().row
    # The KSD of exact draws with independent scores is about √(d (1 + lambda) / draws).
    assert 0 < row["ksd"] < 3 * math.sqrt(3 * (1 + MODEL.precision) / 200)
    # The predictive is linear in the position: the mean of 200 nearly independent draws.
    scale = np.linalg.norm(np.asarray(MODEL.test_inputs), axis=1).max()
    assert row["rmse"] < 5 * scale * MODEL.posterior_std[0] / math.sqrt(200 / 5)
    assert row["accuracy"] == pytest.approx(1 / (1 + row["rmse"]))


def test_the_burn_in_is_dropped_from_everything_but_the_seconds() -> None:
    far = (MODE + 50 * MODEL.posterior_std).astype(np.float32)
    results = {}
    for fraction in (0.0, 0.25):
        bench = bench_of()
        bench.start = far
        results[fraction] = run(bench=bench, burn_in_fraction=fraction)
    whole, rest = (results[fraction].row for fraction in (0.0, 0.25))
    assert (whole["burn_in_s"], whole["num_burn_in_steps"]) == (0.0, 0)
    assert rest["burn_in_s"] == pytest.approx(1.0, rel=0.02)
    assert rest["num_burn_in_steps"] == rest["burn_in_s"] / STEP_S
    assert rest["elapsed_s"] == pytest.approx(4.0, rel=0.02)
    assert rest["num_samples"] == (rest["elapsed_s"] - rest["burn_in_s"]) / STEP_S
    # Tolerances as in the first test; the whole chain has its way from the start in it, 50
    # deviations squared over about (1 - rho^2)^-1 = 3.4 of 32,768 draws: a quarter of a variance.
    widening = math.sqrt(2 / (2 - GOOD.step_size * MODEL.precision / 2))
    np.testing.assert_allclose(results[0.25].std, widening * MODEL.posterior_std, rtol=0.045)
    assert whole["relative_std_error"] > 0.1


def test_a_curve_scores_the_draws_so_far_and_takes_no_seconds() -> None:
    result = run(curve_points=5)
    plain = run()
    assert [point["metric"] for point in result.curve] == ["ksd"] * 5
    times = [point["elapsed_s"] for point in result.curve]
    # From a hundredth of four seconds to all of them; the clock stands still for the scoring.
    np.testing.assert_allclose(times, 0.04 * 100.0 ** (np.arange(5) / 4), rtol=0.02)
    assert [point["num_samples"] for point in result.curve] == [round(t / STEP_S) for t in times]
    assert result.curve[-1]["value"] == result.row["ksd"]
    assert result.row["elapsed_s"] == pytest.approx(plain.row["elapsed_s"], rel=0.02)
    assert plain.curve == ()
    assert [point["num_scored"] for point in result.curve] == [200] * 5


def test_a_curve_begins_after_the_burn_in_and_ends_where_the_chain_does() -> None:
    assert curve_times(1.0, 3.0, 1) == [3.0]
    assert curve_times(1.0, 3.0, 3) == pytest.approx([1.02, 1.2, 3.0])
    assert curve_times(0.0, 3.0, 0) == []
    failed = run(Hyperparameters(10.0, 64), curve_points=5)
    assert [point["status"] for point in failed.curve] == ["diverged"]
    assert "value" not in failed.curve[0]
    assert failed.row["status"] == "diverged"


def test_a_chain_that_fails_in_its_burn_in_is_a_failure() -> None:
    row = run(Hyperparameters(10.0, 64), burn_in_fraction=0.9).row
    assert row["status"] == "diverged"
    assert row["num_burn_in_steps"] == 0


def test_a_chain_that_fails_after_its_burn_in_says_so() -> None:
    # |1 - h lambda / 2| = 1.1: a factor of 10^38 takes about 900 steps, so 0.11 s.
    growing = Hyperparameters(2 * 2.1 / MODEL.precision, 64)
    row = run(growing, burn_in_fraction=0.01).row
    assert row["status"] == "diverged"
    steps = row["num_burn_in_steps"]
    assert 0 < steps < 400
    assert row["reason"].endswith(f" after {steps} steps of burn-in")
    assert "num_samples" in row


def test_without_a_reference_there_is_no_error_of_the_deviations() -> None:
    row = run(reference=None).row
    assert row["status"] == "ok"
    assert "relative_std_error" not in row


def test_the_key_decides_the_chain() -> None:
    first, again, other = run(), run(), run(rng_key=jax.random.key(2))
    np.testing.assert_array_equal(first.std, again.std)
    assert not np.array_equal(first.std, other.std)
    keys = {tuple(jax.random.key_data(repeat_key(jax.random.key(0), k)).tolist()) for k in range(5)}
    assert len(keys) == 5


def test_a_long_evaluation_is_one_chain_in_pieces() -> None:
    bench = bench_of()
    amounts: list[float] = []

    class Listening:
        def message(self, text: str) -> None: ...

        def start(self, description: str, total: float, unit: str) -> None:
            assert (total, unit) == (3.0, "s")

        def update(self, amount: float, note: str = "") -> None:
            amounts.append(amount)

        def finish(self) -> None:
            amounts.append(0.0)

    row = run(bench=bench, budget_s=3.0, reporter=Listening()).row
    assert len(amounts) == 3.0 / 0.5 + 1
    assert sum(amounts) == pytest.approx(3.0, rel=0.02)
    assert row["elapsed_s"] == pytest.approx(3.0, rel=0.02)
    assert bench.seconds.sampling == row["elapsed_s"]


@pytest.mark.parametrize(("cost_s", "num_steps"), [(0.7, 14), (2.0, 5), (9.0, 1), (15.0, 1)])
def test_steps_longer_than_a_piece_are_made(cost_s: float, num_steps: int) -> None:
    row = run(bench=bench_of(cost_s), budget_s=10.0).row
    assert row["num_steps"] == num_steps
    assert row["status"] == ("ok" if num_steps > 1 else "no_draws")


def test_failures_are_rows_without_metrics() -> None:
    failures = {
        "diverged": run(Hyperparameters(10.0, 64)).row,
        "frozen": run(Hyperparameters(1e-20, 64)).row,
        "no_draws": run(bench=bench_of(100.0)).row,
    }
    assert np.isnan(run(Hyperparameters(1e-20, 64)).std).all()
    for status, row in failures.items():
        assert row["status"] == status
        assert row["reason"]
        assert not {"ksd", "relative_std_error", "rmse", "accuracy"} & set(row)
    assert "step" in failures["diverged"]["reason"]
    assert failures["no_draws"]["num_samples"] == 0


def test_a_chain_without_memory_is_a_row_and_another_error_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(error: Exception) -> Evaluation:
        def scores(bench: Workbench, positions: np.ndarray) -> np.ndarray:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(Workbench, "scores", scores)
            return run()

    allocation = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 8 GiB asked for\nand more")
    result = fails(allocation)
    assert result.row["status"] == "out_of_memory"
    assert result.row["reason"] == "RESOURCE_EXHAUSTED: 8 GiB asked for"
    assert result.row["num_samples"] > 0
    assert "ksd" not in result.row
    assert np.isnan(result.std).all()
    assert fails(MemoryError()).row["reason"] == "MemoryError"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        fails(jax.errors.JaxRuntimeError("INTERNAL: a fault"))
    assert run().row["status"] == "ok"


def result_of(mean: list[float], std: list[float]) -> Evaluation:
    return Evaluation({}, np.array(mean), np.array(std), prediction_std=np.array(std[:1]))


def test_moments_are_kept_by_repeat_and_compared_with_what_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "moments.npz"
    nothing = Moments.load(path)
    assert nothing.std.shape == (0, 0)
    # The first repeat's are unknown: its row was written before moments were kept.
    moments = nothing.with_repeat(1, result_of([1.0, 2.0], [3.0, 4.0]))
    moments = moments.with_repeat(2, result_of([5.0, 6.0], [6.0, 8.0]))
    moments.save(path)
    loaded = Moments.load(path)
    np.testing.assert_array_equal(loaded.mean, [[math.nan] * 2, [1, 2], [5, 6]])
    np.testing.assert_array_equal(loaded.std, [[math.nan] * 2, [3, 4], [6, 8]])
    np.testing.assert_array_equal(loaded.prediction_std, [[math.nan], [3], [6]])
    assert loaded.reference is None
    # Norm of the difference over that of the reference: |(3, 4)| / |(3, 4)| is 5 / 5.
    rows: list[dict[str, Any]] = [
        {"status": "ok"},
        {"status": "diverged"},
        {"status": "ok", "ksd": 1.0},
    ]
    expected = {"status": "ok", "ksd": 1.0, "relative_std_error": 1.0}
    reference = Reference(np.array([3.0, 4.0]))
    assert replace(loaded, reference=reference).compared(rows) == [*rows[:2], expected]
    # Of the predictions: (6 - 4) / 4.
    reference = Reference(np.array([3.0, 4.0]), np.array([4.0]))
    with_truth = replace(loaded, reference=reference)
    with_truth.save(path)
    expected["relative_std_error_predictions"] = 0.5
    assert Moments.load(path).compared(rows) == [*rows[:2], expected]
    # A repeat that failed keeps the place of its predictions empty.
    failed = with_truth.with_repeat(3, Evaluation({}, *np.full((2, 2), math.nan)))
    np.testing.assert_array_equal(failed.prediction_std, [[math.nan], [3], [6], [math.nan]])
    # A repeat that runs again replaces what came after it.
    assert len(loaded.with_repeat(1, result_of([0.0, 0.0], [1.0, 1.0])).std) == 2


def test_moments_of_a_version_that_kept_no_predictions_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "moments.npz"
    std = np.array([[3.0, 4.0], [6.0, 8.0]])
    artifacts.write_arrays(path, {"mean": std, "std": std, "reference_std": std[0]}, {})
    rows: list[dict[str, Any]] = [{"status": "ok"}, {"status": "ok"}]
    compared = Moments.load(path).compared(rows)
    assert [row["relative_std_error"] for row in compared] == [0.0, 1.0]


def record(reward: float) -> ArmRecord:
    counts = {name: 0 for name in ArmRecord._fields}
    values = {"arm": 4, "step_size": 1e-5, "batch_size": 100, "num_integration_steps": 5}
    return ArmRecord(**(counts | values | {"reward": reward, "status": "ok"}))  # type: ignore[arg-type]


def test_best_is_what_the_winner_was() -> None:
    assert best_of(record(2.5), 400) == {
        "arm": 4,
        "step_size": 1e-5,
        "batch_size": 100,
        "batch_percent": 25.0,
        "num_integration_steps": 5,
        "reward": 2.5,
        "status": "ok",
    }
    assert best_of(record(math.nan), 400)["reward"] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step_size", "abc"),
        ("step_size", -1),
        ("step_size", math.nan),
        ("step_size", True),
        ("batch_size", 0),
        ("batch_size", 101),
        ("batch_size", 2.5),
        ("num_integration_steps", 0),
        ("batch_percent", None),
        ("arm", -1),
        ("reward", "low"),
    ],
)
def test_a_best_that_no_chain_can_be_run_with_is_refused(key: str, value: Any) -> None:
    best = best_of(record(0.5), 100)
    path = Path("best.json")
    check_best(best, path, 100)
    check_best(best | {"reward": None}, path, 100)
    with pytest.raises(DataError, match=f"best.json.*{key}=.*delete it: the same command tunes"):
        check_best(best | {key: value}, path, 100)
    if key != "reward":
        del best[key]
        with pytest.raises(DataError, match=f"no {key}"):
            check_best(best, path)
