"""Draws a second of the timed chain: three models, six samplers and more, every batch size.

For each cell, in one run on one machine: our timed chain, by each scheme of minibatches;
BlackJAX's kernel of the same sampler in a compiled loop (rows with replacement, its gradient
estimators); and a floor, the time that the arithmetic, the memory traffic and the normal
variates of a step must take at the rates measured at the start of the same run. What the
library of the paper reached on a machine of this kind is quoted beside them.

A figure is the best of several short runs, gradients, minibatches, noise and bookkeeping
included, compilation excluded. Cells already in the CSV are not measured again: delete it to
start anew. ``QUICK=1`` measures less, elsewhere.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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

SAMPLERS: Mapping[str, Sampler] = {
    "sgld": sgld, "sghmc": sghmc, "sgnht": sgnht, "badodab": badodab,
}  # fmt: skip
LENGTH = {"sghmc": 5}
PERCENT = {"logreg": (0.1, 1, 10, 100), "pmf": (1, 10, 100), "bnn": (1, 10, 100)}
SCHEMES: Mapping[str, tuple[MinibatchScheme, NoiseKeyFn]] = {
    "without_replacement": (minibatch.without_replacement, threefry),
    "reshuffle": (reshuffle, threefry),
    "without_replacement, counter_hash": (minibatch.without_replacement, counter_hash),
}

# Draws a second of SGMCMCJax's own timed loop on two cores, at these batch sizes.
PUBLISHED_BATCH_SIZES = {
    "logreg": (1000, 10_000, 100_000), "pmf": (800, 8000, 80_000), "bnn": (600, 6000),
}  # fmt: skip
PUBLISHED = {
    ("logreg", "sgld"): (9298, 3040, 489), ("logreg", "sgld_cv"): (8999, 2097, 330),
    ("logreg", "sghmc"): (3550, 591, 87), ("logreg", "sgnht"): (8285, 3001, 444),
    ("pmf", "sgld"): (2787, 1199, 174), ("pmf", "sgld_cv"): (2487, 837, 47),
    ("pmf", "sghmc"): (563, 227, 22), ("pmf", "sghmc_cv"): (440, 151, 12),
    ("pmf", "sgnht"): (1820, 1028, 129),
    ("bnn", "sgld"): (836, 105), ("bnn", "sgld_cv"): (558, 43),
    ("bnn", "sghmc"): (107, 23), ("bnn", "sghmc_cv"): (109, 12), ("bnn", "sgnht"): (689, 108),
}  # fmt: skip


class Cell(NamedTuple):
    """One row of the CSV."""

    model: str
    sampler: str
    batch_size: int
    num_integration_steps: int
    kind: str  # a scheme of ours, or blackjax
    draws_per_s: float
    floor_draws_per_s: float
    published_draws_per_s: float
    compile_s: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.sampler, str(self.batch_size), self.kind


class Rates(NamedTuple):
    """What the machine can do, measured."""

    flops_per_s: float
    bytes_per_s: float
    normals_per_s: float


class Work(NamedTuple):
    """What one gradient step must do."""

    flops: float
    bytes: float
    normals: float

    def seconds(self, rates: Rates) -> float:
        """Arithmetic and memory traffic may overlap; the normals are arithmetic too."""
        arithmetic = self.flops / rates.flops_per_s + self.normals / rates.normals_per_s
        return max(arithmetic, self.bytes / rates.bytes_per_s)


def best_s(call: Callable[[], Any], repeats: int = 20) -> float:
    """Seconds of the fastest of several calls, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return min(times[1:])


def measured_rates() -> Rates:
    """Matrix products of the network's size, a sum over 400 MB, 10^6 normals."""
    x, w = (jnp.ones(shape, jnp.float32) for shape in ((6000, 784), (784, 100)))
    flops = 2 * 6000 * 784 * 100 / best_s(partial(jax.jit(jnp.matmul), x, w))
    columns = jnp.ones((100, 1_000_000), jnp.float32)
    weights = jnp.ones(100, jnp.float32)
    num_bytes = columns.nbytes / best_s(partial(jax.jit(jnp.matmul), weights, columns))
    normal = jax.jit(lambda key: jax.random.normal(key, (1_000_000,)))
    return Rates(flops, num_bytes, 1_000_000 / best_s(partial(normal, jax.random.key(0))))


def work_of(model: Any, batch_size: int, control_variates: bool) -> Work:
    """Multiplications and additions, and the bytes of rows and of vectors of the dimension."""
    n, dim = batch_size, model.dim
    vectors = 5 * 4 * dim  # position, gradient and noise read, position and gradient written
    whole = n == model.num_data
    if model.name == "logreg":
        products = 3 if control_variates and not whole else 2
        return Work(2 * products * n * dim, 4 * n * dim + vectors, dim)
    if model.name == "pmf":
        d = model.latent_dim
        if whole:
            cells = model.num_users * model.num_items
            return Work(3 * 2 * cells * d, cells + vectors, dim)
        # Two rows of the factors read and two of the gradient read and written, per rating.
        reads = 8 if control_variates else 6
        return Work((8 if control_variates else 6) * n * d, n * (12 + reads * 4 * d) + vectors, dim)
    per_row = 2 * 2 * (model.num_pixels + 3 * model.num_classes / 2) * model.num_hidden
    statistics = 4 * (2 * model.num_hidden + model.num_classes) if control_variates else 0
    return Work(n * per_row, n * (model.num_pixels + 1 + statistics) + vectors, dim)


def ours(
    estimator: gradients.GradientEstimator,
    centre: np.ndarray,
    sampler: str,
    scheme: str,
    batch_size: int,
    seconds: float,
    arranged: dict[Any, PyTree],
) -> tuple[float, float]:
    """Draws a second of the timed chain, the best of three, and the seconds of compilation."""
    by, noise = SCHEMES[scheme]
    program = ChainProgram(
        estimator, SAMPLERS[sampler], by, batch_size, capacity=200, noise=noise, arranged=arranged
    )
    program.rows()
    compile_s = program.compile(centre)
    length = LENGTH.get(sampler, 1)
    hyperparameters = Hyperparameters(1e-8, batch_size, length)
    best = 0.0
    for repeat in range(3):
        chain = program.start(jax.random.key(repeat), centre, hyperparameters)
        chain = advance(program, chain, Budget(seconds=seconds))
        best = max(best, chain.num_steps / chain.elapsed_s / length)
    return best, compile_s


def blackjax_kernel(name: str, estimator: Any, length: int) -> Any:
    """BlackJAX's sampler of this name, or None where there is none."""
    import blackjax

    if name == "sghmc":
        return blackjax.sghmc(estimator, num_integration_steps=length)
    return {"sgld": blackjax.sgld, "sgnht": blackjax.sgnht}.get(name, lambda _: None)(estimator)


def theirs(
    model: Model, centre: np.ndarray, sampler: str, control_variates: bool, n: int, seconds: float
) -> float | None:
    """Draws a second of BlackJAX's kernel in a compiled loop over freshly drawn rows."""
    try:
        from blackjax.sgmcmc import gradients as theirs_of
    except ImportError:
        return None
    length, rows, num_data = LENGTH.get(sampler, 1), model.data, model.num_data
    at = jnp.asarray(centre)

    def of_one_row(position: Array, row: PyTree) -> Array:
        return model.log_likelihood(position, jax.tree.map(lambda leaf: leaf[None], row))

    estimator = theirs_of.grad_estimator(model.log_prior, of_one_row, num_data)
    full = gradients.full_gradients(model)(centre[None])[0] if control_variates else None

    @partial(jax.jit, static_argnums=2)
    def run(key: Array, rows: PyTree, num_draws: int) -> Array:
        def with_control_variates(position: Array, batch: PyTree) -> Array:
            difference = estimator(position, batch) - estimator(at, batch)
            return jnp.asarray(full) + difference

        gradient = with_control_variates if control_variates else estimator
        kernel = blackjax_kernel(sampler, gradient, length)
        key_init, key_loop = jax.random.split(key)
        state = kernel.init(at, key_init) if sampler == "sgnht" else kernel.init(at)

        def step(state: Any, key: Array) -> tuple[Any, None]:
            key_rows, key_step = jax.random.split(key)
            batch = minibatch.gather(rows, jax.random.randint(key_rows, (n,), 0, num_data))
            return kernel.step(key_step, state, batch, 1e-8), None

        return jax.lax.scan(step, state, jax.random.split(key_loop, num_draws))[0]

    if blackjax_kernel(sampler, estimator, length) is None:
        return None
    once_s = best_s(lambda: run(jax.random.key(0), rows, 2), 2)
    num_draws = max(2, int(2 * seconds / once_s))
    return num_draws / best_s(lambda: run(jax.random.key(1), rows, num_draws), 2)


def models(
    names: Iterable[str], data_dir: str | None, num_train: int
) -> Iterable[tuple[Any, np.ndarray]]:
    """The models, each with the centre of its control variates."""
    if "logreg" in names:
        logreg = logistic_regression(num_train=num_train, num_test=1)
        yield logreg, np.asarray(find_map(logreg, rng_key=jax.random.key(0)).position)
    loaders: Mapping[str, Callable[..., Any]] = {
        "pmf": probabilistic_matrix_factorization,
        "bnn": bayesian_neural_network,
    }
    for name in loaders.keys() & set(names):
        try:
            model = loaders[name](data_dir=data_dir)
        except DataError as error:
            print(f"{name} is left out: {error}")
            continue
        yield model, np.asarray(model.initial_position(jax.random.key(0)))


def draw(cells: list[dict[str, str]], path: Path) -> None:
    """Bars of draws a second per cell, with the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in PERCENT if any(cell["model"] == name for cell in cells)]
    figure, panels = pyplot.subplots(len(names), 1, figsize=(13, 4 * len(names)), squeeze=False)
    for panel, name in zip(panels[:, 0], names, strict=True):
        of_model = [cell for cell in cells if cell["model"] == name]
        labels = list(dict.fromkeys((c["sampler"], int(c["batch_size"])) for c in of_model))
        kinds = list(dict.fromkeys(cell["kind"] for cell in of_model))
        for offset, kind in enumerate(kinds):
            own = [c for c in of_model if c["kind"] == kind]
            where = [
                labels.index((c["sampler"], int(c["batch_size"]))) + 0.8 * offset / len(kinds)
                for c in own
            ]
            heights = [float(c["draws_per_s"]) for c in own]
            panel.bar(where, heights, 0.8 / len(kinds), label=kind, align="edge")
        for place, label in enumerate(labels):
            floor = next(
                float(c["floor_draws_per_s"])
                for c in of_model
                if (c["sampler"], int(c["batch_size"])) == label
            )
            panel.hlines(floor, place, place + 0.8, colors="black", linewidth=1.5)
        panel.set_yscale("log")
        panel.set_ylabel("draws a second")
        panel.set_title(f"{name}: draws a second (black: what the machine's rates allow)")
        panel.set_xticks(
            [place + 0.4 for place in range(len(labels))],
            [f"{sampler}\n{size:,}" for sampler, size in labels],
            fontsize=6,
        )
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    quick = bool(os.environ.get("QUICK"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-train", type=int, default=100_000 if quick else 1_000_000)
    parser.add_argument("--seconds", type=float, default=0.1 if quick else 0.5)
    parser.add_argument("--models", nargs="+", default=list(PERCENT))
    parser.add_argument("--samplers", nargs="+", default=["sgld"] if quick else list(SAMPLERS))
    parser.add_argument("--data-dir", default=os.environ.get("MAMBA_DATA_DIR"))
    folder = Path("results") / ("quick" if quick else "") / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "chain.csv"
    cells: list[dict[str, str]] = []
    if path.exists():
        cells = list(csv.DictReader(path.open()))
    done = {(c["model"], c["sampler"], c["batch_size"], c["kind"]) for c in cells}
    rates = measured_rates()
    print(
        f"{rates.flops_per_s / 1e9:.0f} GFLOP/s, {rates.bytes_per_s / 1e9:.1f} GB/s, "
        f"{rates.normals_per_s / 1e6:.0f} million normals/s, {jax.devices()[0].device_kind}"
    )
    wanted = models(arguments.models, arguments.data_dir, arguments.num_train)
    for model, centre in wanted:
        arranged: dict[str, dict[Any, PyTree]] = {}
        for name in arguments.samplers:
            for suffix in ("", "_cv"):
                estimator = (
                    gradients.control_variates(model, jnp.asarray(centre))
                    if suffix
                    else gradients.standard(model)
                )
                published = dict(
                    zip(
                        PUBLISHED_BATCH_SIZES[model.name],
                        PUBLISHED.get((model.name, name + suffix), ()),
                        strict=False,
                    )
                )
                for percent in PERCENT[model.name]:
                    n = int(percent * model.num_data / 100)
                    length = LENGTH.get(name, 1)
                    floor_s = length * work_of(model, n, bool(suffix)).seconds(rates)
                    comparable = model.name != "logreg" or model.num_data == 1_000_000
                    known = published.get(n, float("nan")) if comparable else float("nan")
                    for kind in (*SCHEMES, "blackjax"):
                        if (model.name, name + suffix, str(n), kind) in done:
                            continue
                        if n == model.num_data and kind == "reshuffle":
                            continue
                        if model.name == "logreg" and kind.endswith("counter_hash"):
                            continue
                        compile_s = float("nan")
                        if kind == "blackjax":
                            speed = theirs(model, centre, name, bool(suffix), n, arguments.seconds)
                        else:
                            speed, compile_s = ours(
                                estimator, centre, name, kind, n, arguments.seconds,
                                arranged.setdefault(suffix, {}),
                            )  # fmt: skip
                        if speed is None:
                            continue
                        cell = Cell(
                            model.name, name + suffix, n, length, kind, round(speed, 2),
                            round(1 / floor_s, 2), known, round(compile_s, 2),
                        )  # fmt: skip
                        cells.append({k: str(v) for k, v in cell._asdict().items()})
                        write(path, cells)
                        print(describe(cell), flush=True)
    if cells:
        draw(cells, arguments.out / "chain.png")
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory {peak_gb:.2f} GB; {path}")


def write(path: Path, cells: list[dict[str, str]]) -> None:
    part = path.with_suffix(".part")
    with part.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, Cell._fields)
        writer.writeheader()
        writer.writerows(cells)
    part.replace(path)


def describe(cell: Cell) -> str:
    ratio = cell.draws_per_s / cell.published_draws_per_s
    return (
        f"{cell.model:7}{cell.sampler:12}{cell.batch_size:10,} {cell.kind:35}"
        f"{cell.draws_per_s:12,.1f}/s  {cell.floor_draws_per_s / cell.draws_per_s:6.1f} x floor"
        + (f"  {ratio:5.2f} x published" if ratio == ratio else "")
    )


if __name__ == "__main__":
    main()
