"""Seconds that rewards take; the KSD against a row-by-row evaluation of the same sum.

Draws are exact, of N(0, I), and so is the whitening. Times are the best of several calls,
compilation apart (``first_s`` has it). The row-by-row evaluation is a compiled loop over draws, one
draw against all others from their differences, in float32; where there are many coordinates it is
timed on a part of the draws and multiplied. ``relative_difference`` is that to float64.
``peak_gb`` is the memory above what the process had before.

``stein_moments`` is read off sums that a chain keeps: what they add to a step of SGLD, at batches
of 1 %, is in ``rewards_step.csv``. Rewards on predictions cost a prediction of the rows held out
for every draw, which belongs to the model and is not here.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import cells, floor
from experiments.benchmarks.cells import QUICK, Table
from experiments.benchmarks.chain import models
from mamba_cli import gradients
from mamba_cli.chain import Budget, ChainProgram, advance
from mamba_cli.minibatch import without_replacement
from mamba_cli.rewards import (
    FiniteSetSteinDiscrepancy,
    KernelSteinDiscrepancy,
    LinearKernelSteinDiscrepancy,
    PolynomialSteinDiscrepancy,
    SlicedKernelSteinDiscrepancy,
    SteinMoments,
    WhitenedKernelSteinDiscrepancy,
    ksd,
)
from mamba_cli.samplers.sgld import sgld
from mamba_cli.types import Hyperparameters, Reward, ScoredDraws
from mamba_cli.whitening import Whitening

KSD_SIZES = ((100, 10), (1000, 10)) if QUICK else ((1000, 10), (8000, 10), (512, 52_580))
REWARD_SIZES = ((96, 10),) if QUICK else ((96, 10), (1000, 10), (50, 52_580), (20, 79_510))
LARGE_DIM = 1000
TIMED_ROWS = 32
"""Draws that are evaluated row by row in many dimensions, where each takes 60 ms."""

REWARDS: Mapping[str, Reward] = {
    "ksd": KernelSteinDiscrepancy(),
    "fssd": FiniteSetSteinDiscrepancy(),
    "linear_ksd": LinearKernelSteinDiscrepancy(),
    "sliced_ksd": SlicedKernelSteinDiscrepancy(),
    "psd": PolynomialSteinDiscrepancy(),
    "whitened_ksd": WhitenedKernelSteinDiscrepancy(),
}

KEYS = ("reward", "num_draws", "dim")
COLUMNS = ("first_s", "seconds", "row_by_row_s", "relative_difference", "peak_gb")


@jax.jit
def row_by_row(
    positions: jax.Array, scores: jax.Array, some: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """The sum of Eq. 3 with the default kernel over ``some`` draws, a row of pairs at a time."""

    def row(x_and_s: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, s = x_and_s
        difference = x - positions
        square = (difference**2).sum(1)
        base = 1 + square
        kernel = jax.lax.rsqrt(base)
        cross = (difference * (s - scores)).sum(1) + x.shape[0]
        return jnp.sum(kernel * (scores @ s + (cross - 3 * square / base) / base))

    return jnp.sum(jax.lax.map(row, some))


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


def exact_draws(num_draws: int, dim: int) -> np.ndarray:
    """Of N(0, I), whose scores are their negatives."""
    return np.random.default_rng(0).standard_normal((num_draws, dim), dtype=np.float32)


def time_ksd(num_draws: int, dim: int) -> dict[str, Any]:
    """The KSD by blocks of matrix products, and row by row."""
    positions = exact_draws(num_draws, dim)
    x, s = jnp.asarray(positions), jnp.asarray(-positions)
    before_gb, began = cells.peak_gb(), time.perf_counter()
    value = float(ksd(x, s))
    first_s = time.perf_counter() - began
    seconds = floor.best_s(partial(ksd, x, s), 3)
    added_gb = cells.peak_gb() - before_gb
    num_rows = TIMED_ROWS if dim > LARGE_DIM else num_draws
    some = (x[:num_rows], s[:num_rows])
    slow_s = floor.best_s(partial(row_by_row, x, s, some), 1) * num_draws / num_rows
    return {
        "first_s": first_s,
        "seconds": seconds,
        "row_by_row_s": slow_s,
        "relative_difference": abs(value / float64_ksd(positions, -positions) - 1),
        "added_gb": added_gb,
    }


def time_reward(name: str, num_draws: int, dim: int) -> dict[str, Any]:
    """A reward on draws and their scores."""
    positions = exact_draws(num_draws, dim)
    whitening = Whitening(np.zeros(dim), np.ones(dim) if dim > LARGE_DIM else np.eye(dim))
    draws = ScoredDraws(
        jnp.asarray(positions), jnp.asarray(-positions), jax.random.key(0), whitening
    )
    before_gb, began = cells.peak_gb(), time.perf_counter()
    call = partial(REWARDS[name], draws)
    jax.block_until_ready(call())
    first_s = time.perf_counter() - began
    seconds = floor.best_s(call, 3)
    added_gb = cells.peak_gb() - before_gb
    return {"first_s": first_s, "seconds": seconds, "added_gb": added_gb}


def step_costs(folder: Path, names: Sequence[str], data_dir: str | None, num_train: int) -> None:
    """What the sums of ``stein_moments`` add to a step."""
    table = Table(folder / "rewards_step.csv", ("model",), ("batch_size", "step_us", "added_us"))
    for model, centre in models(names, data_dir, num_train):
        if table.has(model.name):
            continue
        n = model.num_data // 100
        cost_s = {}
        for features in (None, SteinMoments().features(model.dim)):
            program = ChainProgram(
                gradients.standard(model),
                sgld,
                without_replacement,
                n,
                capacity=200,
                block_features=features,
            )
            program.compile(centre)
            steps = []
            for repeat in range(5):
                chain = program.start(jax.random.key(repeat), centre, Hyperparameters(1e-8, n))
                chain = advance(program, chain, Budget(seconds=0.05 if QUICK else 0.3))
                steps.append(chain.elapsed_s / chain.num_steps)
            cost_s[features is not None] = min(steps)
        table.add(
            model=model.name,
            batch_size=n,
            step_us=1e6 * cost_s[False],
            added_us=1e6 * (cost_s[True] - cost_s[False]),
        )


def draw(table: Table, path: Path) -> None:
    """Seconds of each reward, by the size of what it is given."""
    pyplot = cells.pyplot()
    figure, panel = pyplot.subplots(figsize=(9, 4.5))
    own = [row for row in table.rows if row["reward"] != "ksd, row by row"]
    sizes = list(dict.fromkeys((row["num_draws"], row["dim"]) for row in own))
    names = list(dict.fromkeys(row["reward"] for row in own))
    for number, name in enumerate(names):
        of_name = [row for row in own if row["reward"] == name]
        places = [
            sizes.index((row["num_draws"], row["dim"])) + 0.8 * number / len(names)
            for row in of_name
        ]
        seconds = [float(row["seconds"]) for row in of_name]
        panel.bar(places, seconds, 0.8 / len(names), align="edge", label=name)
    panel.set_yscale("log")
    panel.set_ylabel("seconds, compiled")
    panel.set_title("Rewards, by draws x dimension")
    labels = [f"{int(m):,} x {int(dim):,}" for m, dim in sizes]
    panel.set_xticks([place + 0.4 for place in range(len(sizes))], labels)
    panel.legend(fontsize=8)
    cells.save(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-train", type=int, default=100_000 if QUICK else 1_000_000)
    default = ["logreg"] if QUICK else ["logreg", "pmf", "bnn"]
    parser.add_argument("--models", nargs="*", default=default)
    parser.add_argument("--rewards", nargs="*", default=list(REWARDS), choices=list(REWARDS))
    parser.add_argument("--data-dir", default=os.environ.get("MAMBA_DATA_DIR"))
    parser.add_argument("--out", type=Path, default=cells.FOLDER)
    chosen = parser.parse_args(words)
    table = Table(chosen.out / "rewards.csv", KEYS, COLUMNS)

    def measure(function: Any, reward: str, num_draws: int, dim: int, **own: Any) -> None:
        if not table.has(reward, num_draws, dim):
            found = cells.in_a_process(function, num_draws=num_draws, dim=dim, **own)
            found["peak_gb"] = found.pop("added_gb")
            table.add(reward=reward, num_draws=num_draws, dim=dim, **found)

    for num_draws, dim in KSD_SIZES:
        measure(time_ksd, "ksd, row by row", num_draws, dim)
    for num_draws, dim in REWARD_SIZES:
        for name in chosen.rewards:
            measure(time_reward, name, num_draws, dim, name=name)
    step_costs(chosen.out, chosen.models, chosen.data_dir, chosen.num_train)
    draw(table, chosen.out / "rewards.png")


if __name__ == "__main__":
    main()
