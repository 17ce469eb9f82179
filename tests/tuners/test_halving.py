"""Successive halving: the paper's schedule in integers, and promotion that nothing spoils."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_cli.tuners.halving import (
    Rung,
    draws_to_score,
    num_rungs,
    promote,
    schedule,
    total_s,
)

# By hand: |S_{i+1}| = floor(|S_i| / eta), K = floor(log_eta M), at least one rung.
SIZES = {
    (1, 2): [1],
    (1, 3): [1],
    (2, 2): [2],
    (2, 3): [2],
    (3, 2): [3],
    (3, 3): [3],
    (8, 2): [8, 4, 2],
    (8, 3): [8],
    (10, 2): [10, 5, 2],
    (10, 3): [10, 3],
    (56, 2): [56, 28, 14, 7, 3],
    (56, 3): [56, 18, 6],
    (243, 2): [243, 121, 60, 30, 15, 7, 3],
    (243, 3): [243, 81, 27, 9, 3],
}


@pytest.mark.parametrize(("num_arms", "factor"), SIZES)
def test_sizes_of_the_rungs(num_arms: int, factor: int) -> None:
    sizes = SIZES[num_arms, factor]
    rungs = schedule(num_arms, factor, 2.0)
    assert [rung.num_arms for rung in rungs] == sizes
    assert [rung.num_promoted for rung in rungs] == [*sizes[1:], 1]
    assert num_rungs(num_arms, factor) == len(sizes)


def test_paper_grid() -> None:
    # 56 arms, eta = 3, R = 1: sets 56, 18, 6 and then 2, of which the best wins.
    # r_i = (1 / |S_i|) / (1/56 + 1/18 + 1/6) = 9 / 121, 28 / 121, 84 / 121 of R.
    rungs = schedule(56, 3, 1.0)
    assert [rung.seconds for rung in rungs] == pytest.approx([9 / 121, 28 / 121, 84 / 121])
    assert total_s(rungs) == pytest.approx(3 * 56 * 9 / 121)  # T = R K / sum of 1 / |S_i|
    assert 56 // 3 // 3 // 3 == 2


def test_one_round_gives_the_longest_arm_all_its_time() -> None:
    assert schedule(2, 3, 5.0) == (Rung(2, 5.0, 1),)
    assert schedule(1, 2, 5.0) == (Rung(1, 5.0, 1),)


@given(
    num_arms=st.integers(1, 5000),
    factor=st.integers(2, 12),
    longest_arm_s=st.floats(1e-3, 1e4),
)
def test_schedule_properties(num_arms: int, factor: int, longest_arm_s: float) -> None:
    rungs = schedule(num_arms, factor, longest_arm_s)
    count = len(rungs)
    assert factor**count <= num_arms < factor ** (count + 1) or (count == 1 and num_arms < factor)
    assert sum(rung.seconds for rung in rungs) == pytest.approx(longest_arm_s)
    for rung in rungs:
        assert rung.num_arms * rung.seconds == pytest.approx(total_s(rungs) / count)
        assert 1 <= rung.num_promoted <= rung.num_arms
    inverse = sum(Fraction(1, rung.num_arms) for rung in rungs)
    assert total_s(rungs) == pytest.approx(float(longest_arm_s * count / inverse))
    for rung, after in itertools.pairwise(rungs):
        assert after.num_arms == rung.num_arms // factor == rung.num_promoted
        assert after.seconds > rung.seconds
    # The paper's r_i = T / (|S_i| K).
    assert rungs[0].seconds == pytest.approx(total_s(rungs) / (num_arms * count))


@pytest.mark.parametrize("factor", [2, 3, 5, 7, 10])
def test_powers_of_the_factor_are_not_rounded_down(factor: int) -> None:
    # log(243) / log(3) is 4.999999999999999 in floating point.
    for exponent in range(1, 15):
        assert num_rungs(factor**exponent, factor) == exponent
        assert num_rungs(factor**exponent - 1, factor) == max(1, exponent - 1)


@pytest.mark.parametrize(
    ("num_arms", "factor", "longest_arm_s"),
    [(0, 3, 1.0), (5, 1, 1.0), (5, 0, 1.0), (5, 3, 0.0), (5, 3, -1.0), (5, 3, math.nan)],
)
def test_values_out_of_range_are_refused(num_arms: int, factor: int, longest_arm_s: float) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        schedule(num_arms, factor, longest_arm_s)


@pytest.mark.parametrize(
    ("rewards", "num_promoted", "expected"),
    [
        ([3.0, 1.0, 2.0], 2, [1, 2]),
        ([3.0, math.nan, 2.0], 2, [2, 0]),
        ([math.nan, math.nan, 2.0, math.nan, 1.0], 2, [4, 2]),
        ([-math.inf, 1.0, math.inf], 3, [1]),
        ([math.nan, math.nan], 1, []),
        ([], 1, []),
        ([1.0, 1.0, 1.0], 2, [0, 1]),
        ([-1.0, -2.0], 1, [1]),
    ],
)
def test_promotion(rewards: list[float], num_promoted: int, expected: list[int]) -> None:
    assert promote(rewards, num_promoted) == expected


@given(
    st.lists(st.floats(-10, 10) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=30),
    st.integers(1, 10),
)
def test_nothing_that_is_not_finite_is_promoted_or_spoils_the_order(
    rewards: list[float], num_promoted: int
) -> None:
    promoted = promote(rewards, num_promoted)
    finite = sorted(reward for reward in rewards if math.isfinite(reward))
    assert [rewards[index] for index in promoted] == finite[:num_promoted]
    assert len(set(promoted)) == len(promoted)


def test_draws_to_score_share_the_cost() -> None:
    rungs = schedule(56, 3, 1.0)
    # 100 draws in the last rung of 6 arms; 600 / 18 = 33 and 600 / 56 = 10 before.
    assert [draws_to_score(rung, rungs, 100) for rung in rungs] == [16, 33, 100]
    assert [draws_to_score(rung, rungs, 20) for rung in rungs] == [16, 16, 20]
    assert [draws_to_score(rung, rungs, 5) for rung in rungs] == [5, 5, 5]


@given(num_arms=st.integers(1, 2000), factor=st.integers(2, 6), max_draws=st.integers(2, 10_000))
def test_draws_to_score_are_bounded_and_grow(num_arms: int, factor: int, max_draws: int) -> None:
    rungs = schedule(num_arms, factor, 1.0)
    counts = [draws_to_score(rung, rungs, max_draws) for rung in rungs]
    assert counts == sorted(counts)
    assert counts[-1] == max_draws or (counts[-1] <= max_draws and len(rungs) == 1)
    assert all(min(8, max_draws) <= count <= max_draws for count in counts)
