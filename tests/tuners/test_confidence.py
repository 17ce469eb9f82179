"""The set of arms that contains the best: by hand, and how often it does over repetitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from mamba_cli.tuners.confidence import (
    arms_of_best_set,
    best_set,
    mark_best_set,
    promote_ties,
    student_quantile,
    unspent_s,
)
from mamba_cli.tuners.halving import Rung, promote, schedule
from mamba_cli.tuners.scoring import Score, record_of
from mamba_cli.types import ArmRecord, Hyperparameters

NAN = math.nan


def record(
    rung: int, arm: int, reward: float, std_error: float = NAN, elapsed_s: float = 1.0
) -> ArmRecord:
    status = "ok" if math.isfinite(reward) else "diverged"
    score = Score(reward, 10, 0.0, status, "", std_error)
    return record_of(arm, Hyperparameters(0.1, 5), score, rung=rung, elapsed_s=elapsed_s)


def test_an_arm_is_left_out_beyond_t_standard_errors_of_the_difference() -> None:
    # Two arms: one comparison, t = 1.753050 at 15 degrees of freedom; errors 3 and 4 make 5.
    assert best_set([1.0, 1.0 + 5 * 1.75], [3.0, 4.0]) == [0, 1]
    assert best_set([1.0, 1.0 + 5 * 1.76], [3.0, 4.0]) == [0]
    # Six arms: t = 2.602480 at 1 %.
    assert best_set([0.0, 2.60, *[9.0] * 4], [0.0, 1.0, *[0.1] * 4]) == [0, 1]
    assert best_set([0.0, 2.61, *[9.0] * 4], [0.0, 1.0, *[0.1] * 4]) == [0]


@pytest.mark.parametrize("degrees", [10, 15, 31])
@pytest.mark.parametrize("tail", [0.05, 0.01, 1e-3, 1e-5])
def test_the_quantile_is_that_of_students_law(tail: float, degrees: int) -> None:
    expected = scipy.stats.t.ppf(1 - tail, degrees)
    assert student_quantile(1 - tail, degrees) == pytest.approx(expected, rel=5e-3)


def test_what_has_no_reward_is_outside_and_what_has_no_error_inside() -> None:
    assert best_set([2.0, NAN, 1.0, math.inf], [0.1, 0.1, 0.1, 0.1]) == [2]
    assert best_set([2.0, 1.0, 50.0], [0.1, 0.1, NAN]) == [1, 2]
    assert best_set([2.0, 1.0], [0.1, NAN]) == [1, 0]
    assert best_set([], []) == []
    assert best_set([NAN, 3.0], [NAN, NAN]) == [1]


def test_arms_are_compared_with_those_that_ran_as_long() -> None:
    # Arm 2 was pruned within noise of its rung; arm 3 was not. In rung 1 they would both lose.
    records = [
        record(0, 0, 5.0, 0.5),
        record(0, 1, 5.2, 0.5),
        record(0, 2, 5.9, 0.5),
        record(0, 3, 9.0, 0.5),
        record(0, 4, NAN),
        record(1, 0, 1.0, 0.01),
        record(1, 1, 2.0, 0.01),
    ]
    marked = mark_best_set(records, 1.0)
    assert [r.in_best_set for r in marked] == [False, False, True, False, False, True, False]
    assert arms_of_best_set(marked, 1.0) == [0, 2]
    # The same with a reward that is maximised.
    flipped = [r._replace(reward=-r.reward) for r in records]
    assert arms_of_best_set(mark_best_set(flipped, -1.0), -1.0) == [0, 2]
    assert mark_best_set(marked, 1.0) == marked
    # Without any error nothing is claimed.
    silent = [r._replace(reward_std_error=NAN) for r in records]
    assert not any(r.in_best_set for r in mark_best_set(silent, 1.0))


def test_ties_of_the_last_promoted_arm_take_the_slots_that_are_left() -> None:
    losses, errors = [1.0, 2.0, 2.1, 9.0, 2.2, NAN], [0.1, 0.1, 0.1, 0.1, 0.1, NAN]
    assert promote_ties(losses, errors, 2, 0) == [0, 1]
    assert promote_ties(losses, errors, 2, 1) == [0, 1, 2]
    assert promote_ties(losses, errors, 2, 5) == [0, 1, 2, 4]
    assert promote_ties(losses, [NAN] * 6, 2, 5) == [0, 1]
    assert promote_ties([NAN, NAN], [NAN, NAN], 1, 1) == []


def test_the_unspent_seconds_are_those_given_and_not_taken() -> None:
    rungs = (Rung(4, 1.0, 2), Rung(2, 2.0, 1))
    first = [record(0, arm, 1.0, elapsed_s=s) for arm, s in enumerate((1.0, 1.01, 0.2, 0.0))]
    assert unspent_s(rungs, first) == pytest.approx(1.79)
    # Three arms in the second rung, one more than its slots; 0.8 s of it are not taken.
    second = [record(1, arm, 1.0, elapsed_s=s) for arm, s in ((0, 3.0), (1, 3.01), (2, 1.4))]
    assert unspent_s(rungs, first + second) == pytest.approx(4 + 4 - 7.41)
    assert unspent_s(rungs, []) == 0.0


def batch_means_error(draws: np.ndarray, num_blocks: int) -> float:
    means = draws[: num_blocks * (len(draws) // num_blocks)].reshape(num_blocks, -1).mean(axis=1)
    return float(np.std(means, ddof=1) / math.sqrt(num_blocks))


def halving_records(
    losses: np.ndarray, rho: float, rng: np.random.Generator, longest_s: float
) -> list[ArmRecord]:
    """Successive halving of arms whose reward is the mean of an AR(1) chain, 100 draws a second.

    Errors are batch means of the draws; the noise of a draw has standard deviation 1.
    """
    rungs = schedule(len(losses), 3, longest_s)
    num_draws = [round(100 * rung.seconds) for rung in rungs]
    total = sum(num_draws)
    noise = rng.standard_normal((len(losses), total)) * math.sqrt(1 - rho**2)
    chains = np.empty_like(noise)
    state = rng.standard_normal(len(losses))
    for i in range(total):
        state = rho * state + noise[:, i]
        chains[:, i] = state
    alive, records, made = list(range(len(losses))), [], 0
    for number, rung in enumerate(rungs):
        made += num_draws[number]
        of_rung = []
        for arm in alive:
            draws = chains[arm, :made]
            error = max(batch_means_error(draws, num_blocks) for num_blocks in (16, 8))
            of_rung.append(record(number, arm, losses[arm] + draws.mean(), error, made / 100))
        kept = promote([r.reward for r in of_rung], rung.num_promoted)
        alive = [alive[index] for index in kept]
        records += of_rung
    return records


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_the_set_contains_the_best_arm_as_often_as_it_says(rho: float) -> None:
    # 500 halvings of 9 arms that are all as good as the best, the hardest case: one in nine wins.
    # The first rung has 100 draws of each, worth 11 at rho = 0.8. The standard error of a coverage
    # of 95 % over 500 repetitions is 1 %. Half of the confidence would cover 86 and 73 %.
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(500):
        records = halving_records(2.0 + 1e-3 * (np.arange(9) > 0), rho, rng, 4.0)
        covered += 0 in arms_of_best_set(mark_best_set(records, 1.0), 1.0)
    assert covered >= 0.93 * 500


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_the_set_is_small_where_arms_differ(rho: float) -> None:
    rng = np.random.default_rng(8)
    spread = math.sqrt((1 + rho) / (1 - rho))
    losses = 2.0 + spread * np.array([0.0, 0.1, 0.1, 0.15, 0.2, 0.5, 0.8, 1.0, 3.0])
    sizes = []
    for _ in range(100):
        records = mark_best_set(halving_records(losses, rho, rng, 4.0), 1.0)
        sizes.append(len(arms_of_best_set(records, 1.0)))
    assert 1 < np.mean(sizes) < 6
