"""Draws a second against the number of rows at a fixed batch size; KSD seconds against its size.

A minibatch costs what its rows cost, however many there are: flat, but for what memory that no
cache holds costs more. That is measured beside it, as the time of one access among a chain of
dependent ones in an array of the size of the data.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.benchmarks import cells, floor
from experiments.benchmarks.cells import QUICK, Table
from experiments.benchmarks.chain import KINDS, Cell, ours
from mamba_cli import gradients
from mamba_cli.models.logreg import logistic_regression
from mamba_cli.rewards import ksd
from mamba_cli.types import Array

NUM_DATA = (10_000, 100_000) if QUICK else (100_000, 1_000_000, 10_000_000)
BATCH_SIZES = (1000,) if QUICK else (1000, 10_000)
SCHEMES = ("without_replacement", "reshuffle")

NUM_DRAWS = (100, 200) if QUICK else (250, 500, 1000, 2000, 4000, 8000)
DIMS = (10, 100) if QUICK else (10, 100, 1000, 10_000, 52_580)
FIXED_DRAWS = 100 if QUICK else 512
FIXED_DIM = 10

NUM_ACCESSES = 200_000


def access_s(num_bytes: int) -> float:
    """Seconds of one read of memory whose place is known by the one before it."""
    num_places = num_bytes // 4
    order = np.random.default_rng(0).permutation(num_places).astype(np.int32)
    following = np.empty(num_places, np.int32)
    following[order] = np.roll(order, -1)  # one cycle through all places

    @jax.jit
    def run(following: Array, place: Array) -> Array:
        return lax.fori_loop(0, NUM_ACCESSES, lambda _, place: following[place], place)

    return floor.best_s(partial(run, jnp.asarray(following), jnp.int32(0)), 3) / NUM_ACCESSES


def measure_chain(folder: Path, seconds: float, sizes: Sequence[int] = NUM_DATA) -> Table:
    """SGLD on a logistic regression of ten covariates."""
    keys = ("num_data", "batch_size", "scheme")
    table = Table(folder / "scaling_rows.csv", keys, ("draws_per_s", "access_ns"))
    for num_data in sizes:
        wanted = [
            (n, scheme)
            for n in BATCH_SIZES
            for scheme in SCHEMES
            if n < num_data and not table.has(num_data, n, scheme)
        ]
        if not wanted:
            continue
        model = logistic_regression(num_train=num_data, num_test=1)
        centre = np.asarray(model.true_position, np.float32)
        estimator, arranged = gradients.standard(model), dict[Any, Any]()
        access_ns = 1e9 * access_s(model.data.nbytes)
        for n, scheme in wanted:
            cell = Cell(model, centre, "sgld", estimator, n, arranged)
            draws_per_s, _ = ours(cell, KINDS[scheme], seconds)
            table.add(
                num_data=num_data,
                batch_size=n,
                scheme=scheme,
                draws_per_s=draws_per_s,
                access_ns=access_ns,
            )
    return table


def measure_ksd(
    folder: Path, num_draws: Sequence[int] = NUM_DRAWS, dims: Sequence[int] = DIMS
) -> Table:
    """Draws of N(0, I), at a fixed dimension and at a fixed number of draws."""
    table = Table(folder / "scaling_ksd.csv", ("num_draws", "dim"), ("seconds",))
    sizes = [(m, FIXED_DIM) for m in num_draws] + [(FIXED_DRAWS, dim) for dim in dims]
    for m, dim in dict.fromkeys(sizes):
        if not table.has(m, dim):
            positions = np.random.default_rng(0).standard_normal((m, dim), dtype=np.float32)
            x, s = jnp.asarray(positions), jnp.asarray(-positions)
            table.add(num_draws=m, dim=dim, seconds=floor.best_s(partial(ksd, x, s), 3))
    return table


def draw(chain: Table, discrepancy: Table, path: Path) -> None:
    pyplot = cells.pyplot()
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4))
    for n in BATCH_SIZES:
        for scheme in SCHEMES:
            own = [r for r in chain.rows if (r["batch_size"], r["scheme"]) == (str(n), scheme)]
            rows = [int(row["num_data"]) for row in own]
            left.loglog(
                rows, [float(r["draws_per_s"]) for r in own], "o-", label=f"{scheme}, {n:,}"
            )
    left.set(xlabel="rows of data N", ylabel="draws a second", title="SGLD, logreg, by batch size")
    left.legend(fontsize=7)
    for panel, column, fixed in ((middle, "num_draws", "dim"), (right, "dim", "num_draws")):
        at = str(FIXED_DIM if fixed == "dim" else FIXED_DRAWS)
        own = sorted(
            (int(row[column]), float(row["seconds"]))
            for row in discrepancy.rows
            if row[fixed] == at
        )
        panel.loglog(*zip(*own, strict=True), "o-")
        name = {"num_draws": "draws", "dim": "dimension"}
        title = f"KSD, dimension {at}" if fixed == "dim" else f"KSD, {at} draws"
        panel.set(xlabel=name[column], ylabel="seconds", title=title)
    for panel in (left, middle, right):
        panel.set_ylim(bottom=panel.get_ylim()[0] / 2, top=panel.get_ylim()[1] * 2)
        panel.grid(alpha=0.3)
    cells.save(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.05 if QUICK else 0.3)
    parser.add_argument("--num-data", type=int, nargs="+", default=list(NUM_DATA))
    parser.add_argument("--num-draws", type=int, nargs="+", default=list(NUM_DRAWS))
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS))
    parser.add_argument("--out", type=Path, default=cells.FOLDER)
    chosen = parser.parse_args(words)
    chain = measure_chain(chosen.out, chosen.seconds, chosen.num_data)
    discrepancy = measure_ksd(chosen.out, chosen.num_draws, chosen.dims)
    draw(chain, discrepancy, chosen.out / "scaling.png")


if __name__ == "__main__":
    main()
