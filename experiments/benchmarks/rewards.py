"""Seconds the Stein discrepancies take, against a row-by-row evaluation of the same sum.

The row-by-row evaluation is a compiled loop over draws, one draw against all others from
their differences, in float32. Draws are exact, of N(0, I). Times are the best of several
calls, compilation apart; the relative difference is that to a float64 evaluation.
Figures of one table were made in one run on one machine; those of different machines do
not compare.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli.rewards import FiniteSetSteinDiscrepancy, ksd
from mamba_cli.types import ScoredDraws

SIZES = ((100, 10), (1000, 10), (8000, 10), (512, 52_580), (512, 79_510))
# Row by row these take the better part of a minute, each time.
LARGE = 1_000_000_000


@jax.jit
def row_by_row(positions: jax.Array, scores: jax.Array) -> jax.Array:
    """Eq. 3 with the default kernel, one row of pairs at a time."""

    def row(x_and_s: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, s = x_and_s
        difference = x - positions
        square = (difference**2).sum(1)
        base = 1 + square
        kernel = jax.lax.rsqrt(base)
        cross = (difference * (s - scores)).sum(1) + x.shape[0]
        return jnp.sum(kernel * (scores @ s + (cross - 3 * square / base) / base))

    return jnp.sqrt(jnp.sum(jax.lax.map(row, (positions, scores)))) / positions.shape[0]


def float64_ksd(positions: np.ndarray, scores: np.ndarray) -> float:
    """Eq. 3 in float64 with the default kernel, 128 rows of pairs at a time."""
    x, s = positions.astype(np.float64), scores.astype(np.float64)
    x -= x.mean(axis=0)
    xx, xs = (x * x).sum(1), (x * s).sum(1)
    sums = []
    for start in range(0, len(x), 128):
        part = slice(start, start + 128)
        square = np.maximum(xx[part, None] + xx - 2 * x[part] @ x.T, 0)
        cross = xs[part, None] + xs - x[part] @ s.T - s[part] @ x.T + x.shape[1]
        base = 1 + square
        sums.append(((s[part] @ s.T + (cross - 3 * square / base) / base) / np.sqrt(base)).sum())
    return math.sqrt(math.fsum(sums)) / len(x)


def first_and_best_s(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds of the first call, compilation included, and of the fastest one after it."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return times[0], min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-large", action="store_true", help="leave out the long positions")
    arguments = parser.parse_args()
    print(
        f"{'KSD':16} {'first s':>9} {'s':>9} {'row by row s':>13} {'ratio':>7} "
        f"{'rel. diff.':>10} {'(row by row)':>12}"
    )
    for num_draws, dim in SIZES:
        large = num_draws**2 * dim > LARGE and dim > 1000
        if large and arguments.skip_large:
            continue
        rng = np.random.default_rng(0)
        positions = rng.standard_normal((num_draws, dim), dtype=np.float32)
        x, s = jnp.asarray(positions), jnp.asarray(-positions)
        first_s, seconds = first_and_best_s(partial(ksd, x, s), arguments.repeats)
        _, slow_s = first_and_best_s(partial(row_by_row, x, s), 1 if large else arguments.repeats)
        exact = float64_ksd(positions, -positions)
        print(
            f"{f'{num_draws:,} x {dim:,}':16} {first_s:9.3f} {seconds:9.4f} {slow_s:13.4f} "
            f"{slow_s / seconds:7.1f} {abs(ksd(x, s) / exact - 1):10.1e} "
            f"{abs(float(row_by_row(x, s)) / exact - 1) if not large else math.nan:12.1e}",
            flush=True,
        )
    print(f"\n{'FSSD':16} {'first s':>9} {'s':>9}   (locations optimised and evaluated)")
    for kernel in ("imq", "gaussian"):
        reward = FiniteSetSteinDiscrepancy(kernel=kernel)
        for num_draws, dim in ((100, 10), (1000, 10)):
            positions = np.random.default_rng(0).standard_normal((num_draws, dim), np.float32)
            draws = ScoredDraws(jnp.asarray(positions), jnp.asarray(-positions), jax.random.key(0))
            first_s, seconds = first_and_best_s(partial(reward, draws), arguments.repeats)
            print(f"{f'{kernel} {num_draws:,} x {dim}':16} {first_s:9.3f} {seconds:9.4f}")


if __name__ == "__main__":
    main()
