"""What is provably broken, before a reward counts: chains that do not move, chains that run away.

A discrepancy is a number also where there is nothing to measure: raw KSD gives a chain frozen at
the MAP a good one. The guards look at an arm's kept draws in *principal whitened coordinates*,

    u = (theta - theta_MAP) V diag(lambda)^(1/2),    V diag(lambda) V^T the precision at the MAP,

in which a Gaussian posterior has E[u_j^2] = 1 in every direction j, and a diffusion of step h
started at the MAP has E[u_j^2] = lambda_j h t after t steps, as long as that is small: the stiffest
directions move first.

**Frozen.** The largest of the spreads E[u_j^2] is below ``FROZEN_SPREAD``: no direction, not even
the stiffest, has covered a seventh of the posterior's scale. Such a chain scores like a point. An
arm with few draws must not be called frozen for being short: its spread is first extrapolated to
the end of the longest arm's seconds, in proportion to time, or to its square while the chain is in
its first ``FLIGHT_STEPS`` steps, where a momentum may carry it in a straight line. Soft directions
are no evidence: a sound chain needs long for them. Nor is a small effective sample size, which the
message gives: a slow chain and a frozen one both have about one.

**Diverged.** The energy, the fall of the log density below that of the MAP in units of dim / 2
(about 1 on the typical set of a Gaussian), is above ``ENERGY_LIMIT``, or above ``ENERGY_SUSPECT``
and growing ``ENERGY_GROWTH``-fold from the second quarter of the draws to the last. The quadratic
energy |u|^2 / dim costs nothing and only raises the suspicion: where the posterior is not Gaussian
a sound chain may be far out in it. The log density itself, at a few draws, decides. So it does for
the direction in which the chain is farthest out: where it would rise by more than
``DIRECTION_LIMIT`` + log(dim) if that one coordinate of a draw were the MAP's, half the draws are
more than five standard deviations out, where one in 10^6 belongs. That is how a chain looks whose
step is too long for one direction and whose gradient is bounded: it swings there and never
overflows. A chain too wide by less is no matter for a guard: any good reward sees it.

**Drifting**, in the check run of a winner: its energy in the second half is ``DRIFT_GROWTH`` times
that of the first half, or of 1 if that is more, by more than four standard errors, and above
1 + 6 sqrt(2 / dim): six standard deviations of one draw, since the draws of a slow chain are hardly
more than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from numpyro.diagnostics import effective_sample_size

from mamba_cli.whitening import Whitening

FROZEN_SPREAD = 0.02
"""Mean square of a whitened coordinate below which a direction has not moved."""

FEWEST_NUMBERS = 8
"""Coordinates of draws, of all draws together, below which they may be small by chance."""

FLIGHT_STEPS = 200
"""Two relaxation times of the momentum at the friction 0.01 of the samplers."""

ENERGY_SUSPECT = 10.0
"""Energy, in units of dim / 2, above which it is worth a look at the log density."""

ENERGY_LIMIT = 50.0
"""Energy, in units of dim / 2, that no typical set has: 7 standard deviations in one dimension."""

DIRECTION_LIMIT = 12.5
"""Fall of the log density along one direction, five standard deviations of a Gaussian."""

ENERGY_GROWTH = 4.0
"""Of a suspect chain: the energy of the last quarter of its draws over that of the second."""

DRIFT_GROWTH = 2.0
"""Of a check run: the energy of its second half over that of its first."""

NUM_ENERGIES = 16
"""Draws of each part of a suspect chain whose log density is evaluated."""

Floats = NDArray[np.floating[Any]]
LogDensities = Callable[[np.ndarray], np.ndarray]


class Verdict(NamedTuple):
    """Why an arm does not count: a status of ``tuning.csv`` and its reason."""

    status: str  # frozen | diverged | out_of_memory
    reason: str


@dataclass(frozen=True)
class Guards:
    """The guards of one tuning.

    Parameters
    ----------
    start
        The MAP, where chains start, ``[dim]``.
    axes
        Principal whitened coordinates there: :func:`principal_axes`.
    log_densities
        From positions ``[m, dim]`` to log posterior densities ``[m]``, up to a constant.
    """

    start: np.ndarray
    axes: Whitening
    log_densities: LogDensities

    def verdict(
        self, positions: np.ndarray, *, num_steps: int = 0, lifetimes: float = 1.0
    ) -> Verdict | None:
        """Whether an arm is frozen or diverged by its draws; None if it may be scored.

        Parameters
        ----------
        positions
            Draws of the whole chain in their order, evenly thinned, ``[m, dim]``.
        num_steps
            Gradient steps they took.
        lifetimes
            The seconds of an arm that reaches the end over this arm's seconds so far, at least 1.
        """
        whitened = self.whitened(positions)
        if not np.all(np.isfinite(whitened)):
            return Verdict("diverged", "a draw is not finite")
        spread = float(np.max(np.mean(whitened**2, axis=0)))
        exponent = 1 if num_steps > FLIGHT_STEPS else 2
        enough = whitened.size >= FEWEST_NUMBERS
        if enough and spread * max(lifetimes, 1.0) ** exponent < FROZEN_SPREAD:
            return Verdict("frozen", _frozen_reason(whitened, spread))
        return self._runaway(positions, whitened)

    def drift(self, positions: np.ndarray) -> Verdict | None:
        """Whether a check run, ``[m, dim]``, runs away or is on its way; None if it is at rest."""
        whitened = self.whitened(positions)
        if not np.all(np.isfinite(whitened)):
            return Verdict("diverged", "a draw is not finite")
        runaway = self._runaway(positions, whitened)
        if runaway is not None or len(positions) < 2:
            return runaway
        halves = _parts(len(positions), 2)
        before, after = (float(np.mean(_quadratic(whitened[part]))) for part in halves)
        if not self._risen(before, after):
            return None
        energies = [self.energies(positions[part]) for part in halves]
        before, after = (float(np.mean(values)) for values in energies)
        noise = math.sqrt(sum(float(np.var(values)) / len(values) for values in energies))
        if not self._risen(before, after) or after - before <= 4 * noise:
            return None
        return Verdict(
            "diverged",
            f"drifts: the energy rose from {before:.3g} to {after:.3g} times dim/2 within the run",
        )

    def whitened(self, positions: np.ndarray) -> Floats:
        """Deviations from the start in principal whitened coordinates, ``[m, dim]``."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.axes.deviations(np.asarray(positions, np.float64) - self.start)

    def energies(self, positions: np.ndarray) -> Floats:
        """(log p(start) - log p) / (dim / 2) at up to ``NUM_ENERGIES`` of the draws.

        Infinite where the density is 0 or not a number.
        """
        values = self._values(_evenly(positions))
        return _falls(self._log_density_at_start, values) / (0.5 * positions.shape[1])

    def falls_along(self, positions: np.ndarray, direction: int) -> Floats:
        """log p(theta') - log p(theta) at up to ``NUM_ENERGIES`` of the draws.

        theta' is theta with one principal coordinate, the ``direction``, as it is at the start.
        """
        chosen, factor = np.asarray(_evenly(positions), np.float64), self.axes.factor
        if self.axes.is_diagonal:
            moved = chosen.copy()
            moved[:, direction] = self.start[direction]
        else:
            axis = factor[:, direction] / np.linalg.norm(factor[:, direction])
            moved = chosen - np.outer((chosen - self.start) @ axis, axis)
        before, after = np.split(self._values(np.concatenate([moved, chosen])), 2)
        return _falls(before, after)

    @cached_property
    def _log_density_at_start(self) -> Floats:
        return self._values(self.start[None])

    def _values(self, positions: np.ndarray) -> Floats:
        return np.asarray(self.log_densities(positions), np.float64)

    def _far_out(self, positions: np.ndarray, whitened: Floats) -> Verdict | None:
        squares = np.median(whitened**2, axis=0)
        direction, limit = int(np.argmax(squares)), DIRECTION_LIMIT + math.log(len(self.start))
        if 0.5 * squares[direction] <= limit:
            return None
        fall = float(np.median(self.falls_along(positions, direction)))
        if fall <= limit:
            return None
        far = math.sqrt(squares[direction])
        return Verdict(
            "diverged",
            f"half of the last draws are {far:.3g} posterior standard deviations or more from the "
            f"MAP in one direction, where the density is lower by exp({fall:.3g})",
        )

    def _risen(self, before: float, after: float) -> bool:
        floor = 1.0 + 6.0 * math.sqrt(2.0 / len(self.start))
        return after > max(floor, DRIFT_GROWTH * max(before, 1.0))

    def _runaway(self, positions: np.ndarray, whitened: Floats) -> Verdict | None:
        quarters = _parts(len(positions), 4)
        last, earlier = quarters[-1], quarters[1] if len(quarters) == 4 else quarters[0]
        if np.median(_quadratic(whitened[last])) <= ENERGY_SUSPECT:
            return self._far_out(positions[last], whitened[last])
        energy = float(np.median(self.energies(positions[last])))
        if energy > ENERGY_LIMIT:
            return Verdict(
                "diverged",
                f"the energy is {energy:.3g} times dim/2 above the MAP, {ENERGY_LIMIT:g} at most "
                "on any typical set",
            )
        if energy > ENERGY_SUSPECT and len(quarters) == 4:
            before = float(np.median(self.energies(positions[earlier])))
            if energy > ENERGY_GROWTH * max(before, 1.0):
                return Verdict(
                    "diverged", f"the energy grows: from {before:.3g} to {energy:.3g} times dim/2"
                )
        return self._far_out(positions[last], whitened[last])


def principal_axes(whitening: Whitening) -> Whitening:
    """The same precision P = F F^T with the factor F = V diag(lambda)^(1/2), its eigenvectors.

    The coordinates of another factor are a rotation of these and mix stiff with soft directions.
    """
    if whitening.is_diagonal:
        return whitening
    vectors, roots, _ = np.linalg.svd(whitening.factor)
    return Whitening(whitening.centre, vectors * roots)


def _evenly(positions: np.ndarray) -> np.ndarray:
    """At most ``NUM_ENERGIES`` of the draws, evenly spaced."""
    chosen = np.unique(np.linspace(0, len(positions) - 1, NUM_ENERGIES).round().astype(int))
    return np.asarray(positions[chosen])


def _falls(before: Floats, after: Floats) -> Floats:
    """before - after of log densities; infinite where it is not a number."""
    with np.errstate(invalid="ignore"):
        falls = before - after
    return np.where(np.isfinite(falls), falls, np.inf)


def _frozen_reason(whitened: Floats, spread: float) -> str:
    most = int(np.argmax(np.mean(whitened**2, axis=0)))
    # Of one chain; the library divides by 0 where nothing varies.
    with np.errstate(all="ignore"):
        size = float(effective_sample_size(whitened[None, :, most]))
    return (
        f"the draws reach {math.sqrt(spread):.2g} of the posterior's scale in the direction that "
        f"moved most (effective sample size there {size:.2g}, of {len(whitened)} draws)"
    )


def _quadratic(whitened: Floats) -> Floats:
    """|u|^2 / dim of each draw, ``[m]``."""
    with np.errstate(over="ignore"):
        return np.asarray(np.mean(whitened**2, axis=1))


def _parts(num_draws: int, num_parts: int) -> list[slice]:
    """Consecutive equal parts of the draws; fewer than that of draws are one part each."""
    cuts = np.linspace(0, num_draws, min(num_parts, num_draws) + 1).round().astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(cuts)]
