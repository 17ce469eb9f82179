"""Theorem 1 of the paper: how likely successive halving is to lose the best arm.

The setting of the theorem: M arms of which arm 1 is the best, arm s short of it by the gap
alpha_1s >= 0 (sorted, s = 2, ..., M), and an estimate of every arm's reward whose error after t
seconds is sub-Gaussian with variance proxy sigma^2 / t. The complexity is
H_2 = max_{s >= 2} s / alpha_s^2, so that alpha_s^2 >= s / H_2 for every s.

**As printed**, with L = log_eta M,

    P(best arm lost) <= (2 eta - 1) L exp(-eta T / (4 sigma^2 H_2 (L + 1))).

It does not hold; :func:`printed_bound` is there to be compared with.

**Derivation of a bound that holds.** Rung i has n_i arms, R_i seconds of each when it is scored,
and keeps n_{i+1} of them.

1. *Two* estimates are compared, not one with a true mean: their difference has variance proxy
   2 sigma^2 / R_i, so that arm s beats arm 1 with probability at most
   exp(-alpha_s^2 R_i / (4 sigma^2)). (The printed lemma has 2 in place of 4.)
2. Arm 1 is lost in rung i only if at least n_{i+1} other arms beat it. Leave the q best of these
   others out, 0 <= q < n_{i+1}. Of the n_i - 1 - q that remain at least n_{i+1} - q beat arm 1,
   and the j-th best of them has a rank of at least q + 1 + j among all arms. By Markov's
   inequality

       P(lost in rung i) <= 1 / (n_{i+1} - q)
                            sum_{j=1}^{n_i - 1 - q} exp(-alpha_{q+1+j}^2 R_i / (4 sigma^2)).

   Its minimum over q, summed over the rungs, is :func:`error_bound`. Nothing was asked of M.
3. Where M = eta^K, n_{i+1} = n_i / eta and R_i >= r_i = T / (n_i K). Take
   q = ceil(n_{i+1} / 2) - 1. Then n_{i+1} - q >= n_{i+1} / 2, there are at most
   (2 eta - 1) n_{i+1} / 2 terms, and in each alpha^2 >= (q + 2) / H_2 >= n_{i+1} / (2 H_2):

       P(best arm lost) <= (2 eta - 1) K exp(-T / (8 eta sigma^2 H_2 K)),

   which is :func:`corrected_bound`.

The printed exponent has eta where step 3 has 1 / eta. In the paper's last inequality of the proof
of its Lemma 3, eta^i / M is replaced by eta / (2 s_i); but s_i = M / (2 eta^{i+1}) arms are set
aside, and eta^i / M = 1 / (2 eta s_i): off by eta^2. Step 1 accounts for another factor of 2.

sigma^2 is a variance *times seconds*, and of a chain, not of independent draws: a standard error
that allows for autocorrelation, squared, times the seconds it took. (The paper's Lemma 1 is further
short of a factor of 4: a V-statistic of order 2 has the asymptotic variance
4 Var(E k), Serfling 1980, theorem 5.5.1A. Measured standard errors need no such formula.)

References
----------
Karnin, Koren and Somekh (2013), *Almost Optimal Exploration in Multi-Armed Bandits*, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mamba_cli.tuners.halving import Rung, schedule, total_s
from mamba_cli.types import ArmRecord

SHORTEST_S = 1e-9
"""A budget below this is none."""

FLAT = 1e-12
"""A budget is found to this relative precision."""


class Problem(NamedTuple):
    """What a run's own estimates say of the theorem's terms.

    ``sigma`` is in units of the reward times root seconds; ``gaps`` are alpha_2 <= alpha_3 <= ...
    (arms that failed are at an infinite distance).
    """

    sigma: float
    gaps: tuple[float, ...]

    @property
    def h2(self) -> float:
        """H_2 of the gaps."""
        return complexity(self.gaps)


def complexity(gaps: Sequence[float]) -> float:
    """H_2 = max_{s >= 2} s / alpha_s^2.

    Parameters
    ----------
    gaps
        alpha_s of every arm but the best, in any order; infinite for an arm that cannot win.

    Returns
    -------
    float
        Infinite where a gap is not above 0; 0 without other arms.
    """
    ordered = sorted(gaps)
    if not ordered:
        return 0.0
    if not ordered[0] > 0:
        return math.inf
    return max(rank / gap**2 for rank, gap in enumerate(ordered, start=2))


def printed_bound(
    num_arms: int, reduction_factor: int, budget_s: float, *, sigma: float, h2: float
) -> float:
    """The paper's Theorem 1 i), as printed: it does *not* bound the probability.

    (2 eta - 1) log_eta M exp(-eta T / (4 sigma^2 H_2 (log_eta M + 1))), at most 1.

    Parameters
    ----------
    num_arms, reduction_factor
        M and eta.
    budget_s
        T, the seconds of all arms in all rungs.
    sigma
        Standard deviation of an estimate after one second.
    h2
        The complexity H_2.
    """
    log_m = math.log(num_arms) / math.log(reduction_factor)
    exponent = reduction_factor * budget_s / (4 * sigma**2 * h2 * (log_m + 1))
    return min(1.0, (2 * reduction_factor - 1) * log_m * math.exp(-exponent))


def corrected_bound(
    num_arms: int, reduction_factor: int, budget_s: float, *, sigma: float, h2: float
) -> float:
    """(2 eta - 1) K exp(-T / (8 eta sigma^2 H_2 K)), at most 1, for M = eta^K arms.

    Parameters are those of :func:`printed_bound`. The derivation is at the top of this module;
    :func:`error_bound` is sharper and needs no power of eta.

    Raises
    ------
    ValueError
        ``num_arms`` is not a power of ``reduction_factor``.
    """
    rungs = schedule(num_arms, reduction_factor, 1.0)
    if reduction_factor ** len(rungs) != num_arms:
        raise ValueError(f"num_arms={num_arms} must be a power of {reduction_factor}")
    exponent = budget_s / (8 * reduction_factor * sigma**2 * h2 * len(rungs))
    return min(1.0, (2 * reduction_factor - 1) * len(rungs) * math.exp(-exponent))


def error_bound(
    rungs: Sequence[Rung], *, sigma: float, gaps: Sequence[float], continued: bool = True
) -> float:
    """A bound on the probability that the best arm is lost in one of these rungs, at most 1.

    Step 2 of the derivation at the top of this module::

        sum_i min_q 1/(n_{i+1} - q) sum_{j=1}^{n_i-1-q} exp(-alpha_{q+1+j}^2 R_i / (4 sigma^2))

    Parameters
    ----------
    rungs
        As :func:`mamba_cli.tuners.halving.schedule` makes them.
    sigma
        Standard deviation of an estimate after one second.
    gaps
        alpha_s of every arm but the best, in any order. Where only H_2 is known, sqrt(s / H_2)
        for s = 2, ..., M are the smallest gaps it allows.
    continued
        Whether an arm is scored on its whole chain, R_i = r_0 + ... + r_i, or on the rung's part
        of it, R_i = r_i.

    Raises
    ------
    ValueError
        There is not one gap for every arm but the best.
    """
    num_arms = rungs[0].num_arms
    if len(gaps) != num_arms - 1:
        raise ValueError(f"{num_arms} arms have {num_arms - 1} gaps, got {len(gaps)}")
    squares = np.sort(np.asarray(gaps, np.float64)) ** 2
    if num_arms > 1 and not np.min(gaps) > 0:
        return 1.0
    total, elapsed_s = 0.0, 0.0
    for rung in rungs:
        elapsed_s = elapsed_s + rung.seconds if continued else rung.seconds
        beaten = np.exp(-squares * elapsed_s / (4 * sigma**2)) if sigma > 0 else 0.0 * squares
        # Left out: q = 0, ..., n_{i+1} - 1; the n_i - 1 - q next best gaps are summed.
        sums = [beaten[q : rung.num_arms - 1].sum() for q in range(rung.num_promoted)]
        total += min(sums / np.arange(rung.num_promoted, 0, -1))
    return float(min(1.0, total))


def budget_for(
    error: float,
    num_arms: int,
    reduction_factor: int,
    *,
    sigma: float,
    gaps: Sequence[float],
) -> float:
    """T in seconds for which :func:`error_bound` is ``error``; infinite where none is enough.

    Parameters
    ----------
    error
        The probability of losing the best arm, above 0 and below 1.
    num_arms, reduction_factor
        M and eta.
    sigma, gaps
        As for :func:`error_bound`.
    """
    if num_arms > 1 and not min(gaps) > 0:
        return math.inf

    def bound(longest_arm_s: float) -> float:
        rungs = schedule(num_arms, reduction_factor, longest_arm_s)
        return error_bound(rungs, sigma=sigma, gaps=gaps)

    low, high = 0.0, 1.0
    while bound(high) > error:
        low, high = high, 2 * high
    while high - low > FLAT * high:
        if high < SHORTEST_S:
            return 0.0  # rewards without noise, or no usable arm beside the winner
        middle = 0.5 * (low + high)
        low, high = (middle, high) if bound(middle) > error else (low, middle)
    return total_s(schedule(num_arms, reduction_factor, high))


def problem_of(records: Sequence[ArmRecord], winner: ArmRecord, sign: float) -> Problem:
    """The theorem's terms as a run estimates them, the winner taken for the best arm.

    sigma is the largest std_error sqrt(elapsed_s) over the arms, and the gaps are differences of
    rewards, both in the last rung of each arm. An arm that failed is at an infinite distance; one
    that was pruned early with a reward below the winner's, on a shorter chain, leaves no gap. The
    terms are estimates, and what follows from them is no guarantee but a measure.

    Parameters
    ----------
    records, winner
        All rungs of a tuning, and its winner.
    sign
        Times the reward gives a number of which lower is better.
    """
    last = {record.arm: record for record in records}
    usable = {arm: record for arm, record in last.items() if record.status == "ok"}
    sigmas = [r.reward_std_error * math.sqrt(r.elapsed_s) for r in usable.values()]
    gaps = [
        sign * (usable[arm].reward - winner.reward) if arm in usable else math.inf
        for arm in last
        if arm != winner.arm
    ]
    return Problem(max((s for s in sigmas if math.isfinite(s)), default=math.nan), tuple(gaps))
