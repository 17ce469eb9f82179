"""How many draws a second the machine's own rates allow: a bound from below on a step's time.

Rates are measured, in the process that measures the chains: matrix products, reading memory in
order (by the size of what is read, since caches differ), logistic functions, normal variates by
each generator. A minibatch of single rows is bound by copying these rows in random order, which is
measured for the model and the batch size at hand with NumPy's compiled loop, on one thread and on
all, whichever is faster.

What a step must do is counted for the algorithm with the fewest operations that is known here; what
may overlap is taken to overlap; and nothing is counted for keys, for drawing which rows, or for
starting operations. A step at the floor is therefore not to be had, but one far above it has room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mamba_cli.gradients import available_cores
from mamba_cli.noise import counter_hash, threefry
from mamba_cli.threefry import unrolled
from mamba_cli.types import Array, PyTree

STREAM_BYTES = (1_000_000, 4_000_000, 40_000_000, 400_000_000)
GENERATORS = {"threefry": threefry, "counter_hash": counter_hash}
MOST_COPIED_ROWS = 1_000_000


class Rates(NamedTuple):
    """What the machine can do."""

    flops_per_s: float
    bytes_per_s: Mapping[int, float]  # by the size of what is read again and again
    sigmoids_per_s: float
    normals_per_s: Mapping[str, float]  # by generator

    def describe(self) -> str:
        stream = ", ".join(
            f"{rate / 1e9:.0f} GB/s of {size / 1e6:g} MB" for size, rate in self.bytes_per_s.items()
        )
        normals = ", ".join(f"{v / 1e6:.0f} by {k}" for k, v in self.normals_per_s.items())
        return (
            f"{self.flops_per_s / 1e9:.0f} GFLOP/s; {stream}; "
            f"{self.sigmoids_per_s / 1e6:.0f} million logistic functions and normals ({normals}) /s"
        )

    def stream_s(self, num_bytes: float, size: float) -> float:
        """Seconds to read so many bytes of what is ``size`` bytes large, in order."""
        smaller = [rate for at, rate in self.bytes_per_s.items() if at <= size]
        return num_bytes / max([self.bytes_per_s[STREAM_BYTES[0]], *smaller][-1:])

    def arithmetic_s(self, work: Work, generator: str) -> float:
        return (
            work.flops / self.flops_per_s
            + work.sigmoids / self.sigmoids_per_s
            + work.normals / self.normals_per_s[generator]
        )


class Work(NamedTuple):
    """What one gradient step must do."""

    flops: float
    sigmoids: float
    normals: float
    row_bytes: float  # of its rows, read in order
    vector_bytes: float  # of positions, gradients and what rows are combined with


def best_s(call: Callable[[], Any], repeats: int = 10) -> float:
    """Seconds of the fastest of several calls, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return min(times[1:])


@cache
def measured_rates() -> Rates:
    """Loops inside one program, so that what it costs to call it is not in the figures."""
    x, w = (jnp.ones(shape, jnp.float32) for shape in ((6000, 784), (784, 100)))
    flops = 2 * 6000 * 784 * 100 / best_s(partial(jax.jit(jnp.matmul), x, w))
    stream = {size: _stream_bytes_per_s(size) for size in STREAM_BYTES}
    normals = {name: _normals_per_s(key_of) for name, key_of in GENERATORS.items()}
    return Rates(flops, stream, _sigmoids_per_s(), normals)


def _stream_bytes_per_s(size: int) -> float:
    """Products of a row vector with a matrix of so many bytes."""
    columns = jnp.ones((100, size // 400), jnp.float32)
    num_times = max(1, 200_000_000 // size)

    @jax.jit
    def run(row: Array, columns: Array) -> Array:
        return lax.fori_loop(0, num_times, lambda _, row: row + 1e-30 * (row @ columns)[:100], row)

    return columns.nbytes * num_times / best_s(lambda: run(jnp.ones(100), columns), 5)


def _sigmoids_per_s(size: int = 65_536, num_times: int = 100) -> float:
    @jax.jit
    def run(x: Array) -> Array:
        return lax.fori_loop(0, num_times, lambda _, x: jax.nn.sigmoid(x), x)

    return size * num_times / best_s(lambda: run(jnp.ones(size)), 5)


def _normals_per_s(
    key_of: Callable[[Array], Array], size: int = 65_536, num_times: int = 20
) -> float:
    @jax.jit
    def run(key: Array) -> Array:
        def add(number: Array, total: Array) -> Array:
            return total + jax.random.normal(key_of(jax.random.fold_in(key, number)), (size,))

        return lax.fori_loop(0, num_times, add, jnp.zeros(size))

    key = unrolled(jax.random.key_data(jax.random.key(0)))  # as chains have it
    return size * num_times / best_s(lambda: run(key), 5)


def copy_s(rows: PyTree, num_copied: int, repeats: int = 10) -> float:
    """Seconds to copy so many rows in random order, fresh ones every time."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
    num_copied = min(num_copied, MOST_COPIED_ROWS)
    rng = np.random.default_rng(0)
    orders = iter(rng.integers(0, len(leaves[0]), (2 * (repeats + 1), num_copied)))
    into = [np.empty((num_copied, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]

    def copy(order: np.ndarray, part: slice) -> None:
        for leaf, copied in zip(leaves, into, strict=True):
            np.take(leaf, order[part], axis=0, out=copied[part], mode="clip")

    one_s = best_s(lambda: copy(next(orders), slice(None)), repeats)
    num_threads = available_cores()
    cuts = [num_copied * thread // num_threads for thread in range(num_threads + 1)]
    parts = [slice(*ends) for ends in pairwise(cuts)]
    with ThreadPoolExecutor(num_threads) as pool:

        def copy_all() -> None:
            list(pool.map(partial(copy, next(orders)), parts))

        fastest_s = min(one_s, best_s(copy_all, repeats))
    # Less what a call costs that copies one row.
    first = np.zeros(1, np.int64)
    return max(0.0, fastest_s - best_s(lambda: copy(first, slice(None, 1)), repeats))


def work_of(model: Any, batch_size: int, control_variates: bool) -> list[Work]:
    """The ways to make a step, of which the fastest counts.

    A product of n rows with a vector or of a vector with n rows is 2 n dim operations. Position,
    gradient and noise are read, and position, gradient and the draw written.
    """
    n, dim = batch_size, model.dim
    vectors = 6 * 4 * dim
    whole = n == model.num_data
    centred = control_variates and not whole
    if model.name == "logreg":
        products = 3 if centred else 2  # both logits, and one product back
        return [Work(2 * products * n * dim, (products - 1) * n, dim, 4 * n * dim, vectors)]
    if model.name == "pmf":
        d = model.latent_dim
        # Of every rating two latent vectors are read, four with a centre, and two vectors of the
        # gradient read and written.
        per_rating = 10 if centred else 6
        sparse = Work(
            per_rating * n * d,
            0,
            dim,
            n * (16 if centred else 12),
            vectors + n * (8 if centred else 6) * 4 * d,
        )
        if not whole:
            return [sparse]
        ratings = model.num_users * model.num_items
        return [sparse, Work(3 * 2 * ratings * d, 0, dim, ratings, vectors)]
    if model.name == "bnn":
        outputs = 3 * model.num_classes / 2  # three products of the output layer, two of the hidden
        per_row = 2 * 2 * (model.num_pixels + outputs) * model.num_hidden
        statistics = 4 * (2 * model.num_hidden + model.num_classes) if centred else 0
        sigmoids = n * (model.num_hidden + model.num_classes)
        return [Work(n * per_row, sigmoids, dim, n * (model.num_pixels + 1 + statistics), vectors)]
    raise ValueError(f"no count of operations for {model.name}")


def floor_s(
    model: Any,
    batch_size: int,
    control_variates: bool,
    num_integration_steps: int,
    generator: str,
    copied_s: float | None,
) -> float:
    """Seconds of a draw at least.

    ``copied_s`` is how long it takes to copy the rows in random order, None for a step that reads
    them in order.
    """
    rates = measured_rates()
    data_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.data))

    def of(work: Work) -> float:
        rows_s = rates.stream_s(work.row_bytes, data_bytes) if copied_s is None else copied_s
        memory_s = rows_s + rates.stream_s(work.vector_bytes, 0)
        return max(rates.arithmetic_s(work, generator), memory_s)

    step_s = min(of(work) for work in work_of(model, batch_size, control_variates))
    momentum_s = model.dim / rates.normals_per_s[generator] if num_integration_steps > 1 else 0
    return num_integration_steps * step_s + momentum_s
