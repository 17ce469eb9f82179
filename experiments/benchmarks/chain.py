"""Draws a second of the timed chain: three models, six samplers, every batch size.

For each cell, in one run on one machine: our timed chain, by each scheme of minibatches; BlackJAX's
kernel of the same sampler in a compiled loop (rows with replacement, its gradient estimator); and
a floor from the machine's own rates (``floor.py``). A figure is the best of several short runs,
gradients, minibatches, noise and bookkeeping included, compilation excluded. A batch of few rows
shows what a step costs whatever its rows do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.sgmcmc.gradients import grad_estimator

from experiments.benchmarks import cells, floor
from experiments.benchmarks.cells import QUICK, Row, Table
from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, ChainProgram, MinibatchScheme, NoiseKeyFn, advance
from mamba_cli.errors import DataError
from mamba_cli.map_estimate import find_map
from mamba_cli.models.bnn import bayesian_neural_network
from mamba_cli.models.logreg import logistic_regression
from mamba_cli.models.pmf import probabilistic_matrix_factorization
from mamba_cli.noise import counter_hash, threefry
from mamba_cli.reshuffle import reshuffle
from mamba_cli.samplers.badodab import badodab
from mamba_cli.samplers.sghmc import sghmc
from mamba_cli.samplers.sgld import sgld
from mamba_cli.samplers.sgnht import sgnht
from mamba_cli.types import Array, Hyperparameters, Model, PyTree, Sampler

KERNELS: Mapping[str, Sampler] = {
    "sgld": sgld, "sghmc": sghmc, "sgnht": sgnht, "badodab": badodab,
}  # fmt: skip
SAMPLERS = ("sgld", "sgld_cv", "sghmc", "sghmc_cv", "sgnht", "sgnht_cv")
LENGTH = {"sghmc": 5}
PERCENT: Mapping[str, tuple[float, ...]] = {
    "logreg": (0.1, 1, 10, 100), "pmf": (1, 10, 100), "bnn": (1, 10, 100),
}  # fmt: skip

KEYS = ("model", "sampler", "batch_size", "kind")
COLUMNS = ("num_data", "num_integration_steps", "draws_per_s", "floor_draws_per_s", "compile_s")

BLACKJAX = "blackjax"

FEW = 16
"""Rows of the batch that shows a step's fixed cost. One row makes XLA take other, slower paths."""


class Kind(NamedTuple):
    """A way to draw minibatches and noise, and the models it is measured on."""

    scheme: MinibatchScheme
    noise: NoiseKeyFn
    generator: str
    models: tuple[str, ...] = tuple(PERCENT)
    reads_in_order: bool = False


KINDS: Mapping[str, Kind] = {
    "without_replacement": Kind(minibatch.without_replacement, threefry, "threefry"),
    "reshuffle": Kind(reshuffle, threefry, "threefry", reads_in_order=True),
    # Of ten normal variates no generator is the slow part.
    "without_replacement, counter_hash": Kind(
        minibatch.without_replacement, counter_hash, "counter_hash", ("pmf", "bnn")
    ),
}


class Cell(NamedTuple):
    """What is measured."""

    model: Any
    centre: np.ndarray
    sampler: str
    estimator: gradients.GradientEstimator
    batch_size: int
    arranged: dict[Any, PyTree]

    @property
    def control_variates(self) -> bool:
        return self.sampler.endswith("_cv")

    @property
    def kernel(self) -> str:
        return self.sampler.removesuffix("_cv")

    @property
    def length(self) -> int:
        """Integration steps of a draw."""
        return LENGTH.get(self.kernel, 1)


def ours(cell: Cell, kind: Kind, seconds: float) -> tuple[float, float]:
    """Draws a second of the timed chain, the best of three runs, and the seconds to compile."""
    program = ChainProgram(
        cell.estimator,
        KERNELS[cell.kernel],
        kind.scheme,
        cell.batch_size,
        capacity=200,
        noise=kind.noise,
        arranged=cell.arranged,
    )
    program.rows()
    compile_s = program.compile(cell.centre)
    hyperparameters = Hyperparameters(1e-8, cell.batch_size, cell.length)
    best = 0.0
    for repeat in range(3):
        chain = program.start(jax.random.key(repeat), cell.centre, hyperparameters)
        chain = advance(program, chain, Budget(seconds=seconds))
        best = max(best, chain.num_steps / chain.elapsed_s / cell.length)
    return best, compile_s


def blackjax_kernel(name: str, estimator: Any, length: int) -> Any:
    """BlackJAX's sampler of this name, or None where there is none."""
    if name == "sghmc":
        return blackjax.sghmc(estimator, num_integration_steps=length)
    return {"sgld": blackjax.sgld, "sgnht": blackjax.sgnht}.get(name, lambda _: None)(estimator)


def theirs(cell: Cell, seconds: float) -> float | None:
    """Draws a second of BlackJAX's kernel in a compiled loop over freshly drawn rows."""
    model: Model = cell.model
    at, n, num_data = jnp.asarray(cell.centre), cell.batch_size, model.num_data

    def of_one_row(position: Array, row: PyTree) -> Array:
        return model.log_likelihood(position, jax.tree.map(lambda leaf: leaf[None], row))

    plain = grad_estimator(model.log_prior, of_one_row, num_data)
    if blackjax_kernel(cell.kernel, plain, cell.length) is None:
        return None
    # Its own control variates would take the gradient at the centre in every call of the loop.
    full = (
        gradients.full_gradients(model)(cell.centre[None])[0]
        if cell.control_variates
        else np.zeros(0)
    )

    @jax.jit
    def run(key: Array, rows: PyTree, full: Array, num_draws: Array) -> Array:
        def with_control_variates(position: Array, batch: PyTree) -> Array:
            return full + (plain(position, batch) - plain(at, batch))

        gradient = with_control_variates if cell.control_variates else plain
        kernel = blackjax_kernel(cell.kernel, gradient, cell.length)
        state = kernel.init(at, key) if cell.kernel == "sgnht" else kernel.init(at)

        def step(number: Array, state: Any) -> Any:
            key_rows, key_step = jax.random.split(jax.random.fold_in(key, number))
            batch = rows
            if n < num_data:
                batch = minibatch.gather(rows, jax.random.randint(key_rows, (n,), 0, num_data))
            return kernel.step(key_step, state, batch, 1e-8)

        return jax.lax.fori_loop(0, num_draws, step, state)

    def call(num_draws: int) -> Any:
        return run(jax.random.key(1), model.data, jnp.asarray(full), num_draws)

    num_draws = max(2, int(seconds / (floor.best_s(lambda: call(2), 2) / 2)))
    return num_draws / floor.best_s(lambda: call(num_draws), 2)


def models(
    names: Iterable[str], data_dir: str | None, num_train: int
) -> Iterator[tuple[Any, np.ndarray]]:
    """The models, each with the centre of its control variates."""
    if "logreg" in names:
        logreg = logistic_regression(num_train=num_train, num_test=1)
        yield logreg, np.asarray(find_map(logreg, rng_key=jax.random.key(0)).position)
    loaders: Mapping[str, Callable[..., Any]] = {
        "pmf": probabilistic_matrix_factorization,
        "bnn": bayesian_neural_network,
    }
    for name in (name for name in loaders if name in names):
        try:
            model = loaders[name](data_dir=data_dir)
        except DataError as error:
            print(f"{name} is left out: {error}")
            continue
        yield model, np.asarray(model.initial_position(jax.random.key(0)))


def cells_of(
    model: Any, centre: np.ndarray, samplers: Iterable[str], percents: Iterable[float]
) -> Iterator[Cell]:
    """All samplers and batch sizes of a model; samplers of one gradient share its rows."""
    made: dict[bool, tuple[gradients.GradientEstimator, dict[Any, PyTree]]] = {}
    for sampler in samplers:
        centred = sampler.endswith("_cv")
        if centred not in made:
            of = partial(gradients.control_variates, model, jnp.asarray(centre))
            made[centred] = (of() if centred else gradients.standard(model), {})
        estimator, arranged = made[centred]
        for n in (FEW, *(int(percent * model.num_data / 100) for percent in percents)):
            yield Cell(model, centre, sampler, estimator, n, arranged)


def measure(cell: Cell, table: Table, seconds: float) -> None:
    """Every kind of one cell that is not in the table yet."""
    name, n, num_data = cell.model.name, cell.batch_size, cell.model.num_data
    copied: dict[bool, float | None] = {}

    def floor_of(kind: Kind, batches_per_draw: int) -> float:
        in_order = kind.reads_in_order or n in (FEW, num_data)
        if in_order not in copied:
            copied[in_order] = None if in_order else floor.copy_s(cell.estimator.rows, n)
        copied_s = copied[in_order]
        if copied_s is not None:
            copied_s *= batches_per_draw / cell.length
        return floor.floor_s(
            cell.model, n, cell.control_variates, cell.length, kind.generator, copied_s
        )

    for label in (*KINDS, BLACKJAX):
        # BlackJAX draws its noise as JAX does by default, and rows at random.
        kind = KINDS["without_replacement" if label == BLACKJAX else label]
        skipped = n == FEW and label != "without_replacement"
        same = n == num_data and kind.reads_in_order
        key = (name, cell.sampler, n, label)
        if name not in kind.models or skipped or same or table.has(*key):
            continue
        compile_s = float("nan")
        if label == BLACKJAX:
            draws_per_s = theirs(cell, seconds)
        else:
            draws_per_s, compile_s = ours(cell, kind, seconds)
        if draws_per_s is not None:
            table.add(
                **dict(zip(KEYS, key, strict=True)),
                num_data=num_data,
                num_integration_steps=cell.length,
                draws_per_s=draws_per_s,
                # BlackJAX makes all integration steps of a draw on one minibatch.
                floor_draws_per_s=1 / floor_of(kind, 1 if label == BLACKJAX else cell.length),
                compile_s=compile_s,
            )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of draws a second, with the floor of each as a line across it."""
    pyplot = cells.pyplot()
    rows = [row for row in rows if row["batch_size"] != str(FEW)]
    names = list(dict.fromkeys(row["model"] for row in rows))
    if not names:
        return
    figure, panels = pyplot.subplots(len(names), 1, figsize=(13, 4 * len(names)), squeeze=False)
    kinds = [kind for kind in (*KINDS, BLACKJAX) if any(row["kind"] == kind for row in rows)]
    for panel, name in zip(panels[:, 0], names, strict=True):
        of_model = [row for row in rows if row["model"] == name]
        groups = list(dict.fromkeys((row["sampler"], row["batch_size"]) for row in of_model))
        width = 0.84 / len(kinds)
        for number, kind in enumerate(kinds):
            own = [row for row in of_model if row["kind"] == kind]
            where = [
                groups.index((row["sampler"], row["batch_size"])) + number * width for row in own
            ]
            heights = [float(row["draws_per_s"]) for row in own]
            panel.bar(where, heights, width, align="edge", color=f"C{number}")
            floors = [float(row["floor_draws_per_s"]) for row in own]
            ends = [place + width for place in where]
            panel.hlines(floors, where, ends, colors="black", linewidth=1.2)
        panel.set_yscale("log")
        panel.set_xlim(-0.3, len(groups))
        panel.set_ylabel("draws a second")
        panel.set_title(f"{name} (black lines: what the machine's rates allow)", fontsize=10)
        panel.set_xticks(
            [place + 0.42 for place in range(len(groups))],
            [f"{sampler}\n{int(size):,}" for sampler, size in groups],
            fontsize=6,
        )
        panel.grid(axis="y", alpha=0.3)
    bars = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{number}") for number in range(len(kinds))]
    panels[0, 0].legend(bars, kinds, fontsize=8, ncols=len(kinds))
    cells.save(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-train", type=int, default=100_000 if QUICK else 1_000_000)
    parser.add_argument("--seconds", type=float, default=0.05 if QUICK else 0.3)
    parser.add_argument("--models", nargs="+", default=list(PERCENT), choices=list(PERCENT))
    every = [name + suffix for name in KERNELS for suffix in ("", "_cv")]
    default = ["sgld", "sghmc_cv"] if QUICK else list(SAMPLERS)
    parser.add_argument("--samplers", nargs="+", default=default, choices=every)
    parser.add_argument("--percents", nargs="+", type=float, default=[1] if QUICK else None)
    parser.add_argument("--data-dir", default=os.environ.get("MAMBA_DATA_DIR"))
    parser.add_argument("--out", type=Path, default=cells.FOLDER)
    chosen = parser.parse_args(words)
    table = Table(chosen.out / "chain.csv", KEYS, COLUMNS)
    print(floor.measured_rates().describe())
    for model, centre in models(chosen.models, chosen.data_dir, chosen.num_train):
        percents = chosen.percents or PERCENT[model.name]
        for cell in cells_of(model, centre, chosen.samplers, percents):
            measure(cell, table, chosen.seconds)
    draw(table.rows, chosen.out / "chain.png")


if __name__ == "__main__":
    main()
