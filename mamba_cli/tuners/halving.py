"""Successive halving as pure arithmetic (the paper's Algorithm 1).

M arms, K = floor(log_eta M) rungs; rung i gives each of its |S_i| arms

    r_i = T / (|S_i| K)  seconds,     |S_{i+1}| = floor(|S_i| / eta),

so that every rung costs T / K. The budget is stated as R, the time of an arm that
lives to the end: R = sum_i r_i, hence T = R K / sum_i (1 / |S_i|).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Rung(NamedTuple):
    """``num_arms`` arms run for ``seconds`` each; the best ``num_promoted`` go on."""

    num_arms: int
    seconds: float
    num_promoted: int


def num_rungs(num_arms: int, reduction_factor: int) -> int:
    """floor(log_eta M) in integer arithmetic, and at least one.

    Floating point gives 4 rather than 5 for M = 243, eta = 3. Fewer arms than eta run
    one rung, of which the best arm wins.
    """
    count = 0
    while num_arms >= reduction_factor:
        num_arms //= reduction_factor
        count += 1
    return max(count, 1)


def schedule(num_arms: int, reduction_factor: int, longest_arm_s: float) -> tuple[Rung, ...]:
    """The rungs of successive halving.

    Parameters
    ----------
    num_arms
        M, at least 1.
    reduction_factor
        eta, at least 2.
    longest_arm_s
        R, the seconds that an arm gets in all its rungs together.

    Returns
    -------
    tuple of Rung
        The last rung promotes one arm, the winner: where floor(|S_i| / eta) leaves more
        than one arm after it, the best of them wins.

    Raises
    ------
    ValueError
        If a parameter is outside its range.
    """
    if num_arms < 1 or reduction_factor < 2 or not longest_arm_s > 0:
        raise ValueError(
            f"num_arms={num_arms} must be >= 1, reduction_factor={reduction_factor} >= 2 "
            f"and longest_arm_s={longest_arm_s} > 0"
        )
    sizes = [num_arms]
    for _ in range(num_rungs(num_arms, reduction_factor) - 1):
        sizes.append(sizes[-1] // reduction_factor)
    inverse_sum = sum(1 / size for size in sizes)
    promoted = [*sizes[1:], 1]
    return tuple(
        Rung(size, longest_arm_s / (size * inverse_sum), survivors)
        for size, survivors in zip(sizes, promoted, strict=True)
    )


def total_s(rungs: Sequence[Rung]) -> float:
    """T, the seconds of all arms in all rungs."""
    return sum(rung.num_arms * rung.seconds for rung in rungs)


def promote(rewards: Sequence[float], num_promoted: int) -> list[int]:
    """Indices of the ``num_promoted`` lowest finite rewards, best first; ties keep their order.

    What is not finite is never promoted, so fewer indices may come back.
    """
    finite = [index for index, reward in enumerate(rewards) if math.isfinite(reward)]
    return sorted(finite, key=lambda index: rewards[index])[:num_promoted]


def draws_to_score(rung: Rung, rungs: Sequence[Rung], max_draws: int) -> int:
    """How many draws of each arm a rung scores, at most ``max_draws``.

    Scoring costs full-data gradients, so the rungs share it as they share the time: each
    rung scores about the same number of draws over all its arms, ``max_draws`` per arm in
    the last one, and at least 16 (or ``max_draws``), which is what one pass over the data
    serves. Within a rung every arm is scored on the same number, if it made so many.
    """
    share = max_draws * rungs[-1].num_arms // rung.num_arms
    return min(max_draws, max(16, share))
