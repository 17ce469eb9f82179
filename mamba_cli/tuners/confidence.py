"""How sure a tuning is: the arms that may be the best, and what becomes of ties.

**The set.** For estimates L_i of losses with standard errors e_i, arm i is left out if some arm j
is better beyond doubt, L_i - L_j > t sqrt(e_i^2 + e_j^2). The arm that is truly the best is left
out only if one of the k - 1 others seems that much better than it: with t the quantile of
1 - 5 % / (k - 1), one-sided, that happens in at most 5 % of tunings (Bonferroni; the subset
selection of Gupta, 1965, for unequal errors). The errors are estimates too, of 8 to 32 blocks of a
chain, and short of the truth where blocks are: t is of Student's law with ``DEGREES`` degrees of
freedom. An arm is compared with those that ran as long, in
the last rung in which it was scored; over K rungs each has 5 % / K. Arms pruned within noise are
therefore in the set; an arm whose own error is unknown cannot be left out, nor leave others out.

What the errors do not know the set does not know either: a chain that has not mixed, or a reward
that falls faster with time for one arm than for another.

**Ties.** The number of slots of a rung is fixed by the budget. What failed arms leave of it (one
that diverges stops at once) and what empty slots leave buys more slots in the next rung: they go to
the arms nearest below the cut that one comparison at 95 % cannot tell from the last promoted. So no
tuning takes longer than T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from mamba_cli.tuners.halving import Rung, promote
from mamba_cli.types import ArmRecord

ERROR = 0.05
"""The share of tunings whose set may lack the best arm."""

DEGREES = 15
"""Of freedom of a standard error, for the quantiles: one from 16 blocks has so many."""


def best_set(
    losses: Sequence[float], std_errors: Sequence[float], error: float = ERROR
) -> list[int]:
    """Indices of arms that may be the best, in order of their losses.

    Parameters
    ----------
    losses
        Estimates, lower is better; an arm without a finite one is not in the set.
    std_errors
        Their standard errors; NaN where there is none.
    error
        The probability that the best arm is not in the set.
    """
    finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
    if len(finite) < 2:
        return finite
    quantile = student_quantile(1.0 - error / (len(finite) - 1))
    values = np.asarray([losses[index] for index in finite])
    squares = np.asarray([std_errors[index] for index in finite]) ** 2
    noise = quantile * np.sqrt(squares[:, None] + squares[None, :])
    # A comparison with NaN is false: an unknown error leaves nothing out.
    beaten = (values[:, None] - values[None, :] > noise).any(axis=1)
    return sorted(
        (i for i, out in zip(finite, beaten, strict=True) if not out), key=losses.__getitem__
    )


def mark_best_set(records: Sequence[ArmRecord], sign: float) -> list[ArmRecord]:
    """The records with ``in_best_set`` filled in, in the last usable row of each arm.

    Parameters
    ----------
    records
        All rungs of a tuning. Where no reward has a standard error they come back as they are.
    sign
        Times the reward gives a number of which lower is better.
    """
    if not any(math.isfinite(record.reward_std_error) for record in records):
        return list(records)
    last: dict[int, ArmRecord] = {record.arm: record for record in records}
    marked = []
    num_rungs = len({record.rung for record in records})
    members: set[tuple[int, int]] = set()
    for rung in {record.rung for record in records}:
        own = [record for record in records if record.rung == rung and record.status == "ok"]
        inside = best_set(
            [sign * record.reward for record in own],
            [record.reward_std_error for record in own],
            ERROR / num_rungs,
        )
        members |= {(rung, own[index].arm) for index in inside}
    for record in records:
        is_last = last[record.arm] is record
        marked.append(record._replace(in_best_set=is_last and (record.rung, record.arm) in members))
    return marked


def arms_of_best_set(records: Sequence[ArmRecord], sign: float) -> list[int]:
    """The arms marked by :func:`mark_best_set`: those that got furthest first, then by reward."""
    inside = [record for record in records if record.in_best_set]
    inside.sort(key=lambda record: (-record.rung, sign * record.reward))
    return [record.arm for record in inside]


def promote_ties(
    losses: Sequence[float], std_errors: Sequence[float], num_promoted: int, num_extra: int
) -> list[int]:
    """As :func:`mamba_cli.tuners.halving.promote`, with up to ``num_extra`` ties of the last one.

    A tie is an arm whose loss is above that of the last promoted arm by less than 1.75 standard
    errors of the difference.
    """
    promoted = promote(losses, num_promoted)
    if not promoted or num_extra <= 0:
        return promoted
    cut = promoted[-1]
    quantile = student_quantile(1.0 - ERROR)
    rest = [index for index in promote(losses, len(losses)) if index not in promoted]
    tied = [
        index
        for index in rest
        if losses[index] - losses[cut] <= quantile * math.hypot(std_errors[index], std_errors[cut])
    ]
    return promoted + tied[:num_extra]


def student_quantile(probability: float, degrees: int = DEGREES) -> float:
    """Quantile of Student's law: its expansion in 1 / degrees to the fourth order.

    Abramowitz and Stegun, 26.7.5; right to 0.1 % for 15 degrees and a tail of 1e-5.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**order for order, term in enumerate(terms, start=1))


def unspent_s(rungs: Sequence[Rung], records: Sequence[ArmRecord]) -> float:
    """Seconds of sampling that the rungs run so far were given and did not take."""
    num_run = 1 + max((record.rung for record in records), default=-1)
    given_s = sum(rung.num_arms * rung.seconds for rung in rungs[:num_run])
    last = {record.arm: record.elapsed_s for record in records}
    return given_s - sum(last.values())
