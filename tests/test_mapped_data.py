"""Rows that stay in their file: the same results bit for bit, in memory that does not hold them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_cli import gradients, map_estimate
from mamba_cli.chain import Budget, ChainProgram, advance
from mamba_cli.curvature import fisher_diagonal
from mamba_cli.data import arrays
from mamba_cli.data.arrays import checked_rows, on_device, read_data
from mamba_cli.errors import ConfigError, DataError
from mamba_cli.map_estimate import MapSettings, find_map
from mamba_cli.minibatch import without_replacement
from mamba_cli.models.own import OwnModel
from mamba_cli.models.python import from_functions
from mamba_cli.samplers.sgld import sgld
from mamba_cli.types import Hyperparameters

NUM_DATA, DIM = 5_003, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_DATA, DIM)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", (rng.random(NUM_DATA) < 1 / (1 + np.exp(-x[:, 0]))))
    return tmp_path


def log_likelihood(w: Any, datum: Any) -> Any:
    logit = datum["x"] @ w
    return datum["y"] * logit - jnp.logaddexp(0.0, logit)


def model_of(data: Any) -> OwnModel:
    return from_functions(lambda w: -0.5 * jnp.sum(w**2), log_likelihood, data, jnp.zeros(DIM))


@pytest.fixture
def both(folder: Path) -> tuple[OwnModel, OwnModel]:
    """The model with its rows in their files, and in memory."""
    mapped = read_data(folder)
    return model_of(mapped), model_of({name: np.array(leaf) for name, leaf in mapped.items()})


def test_arrays_that_are_mapped_are_read_where_they_lie(folder: Path) -> None:
    data = read_data(folder)
    placed = on_device(checked_rows(data, "folder"))
    for name in ("x", "y"):
        assert placed[name].unsafe_buffer_pointer() == data[name].ctypes.data
        np.testing.assert_array_equal(placed[name], np.load(folder / f"{name}.npy"))


@pytest.mark.parametrize("of", [lambda x: x.astype(np.float64), lambda x: x.astype(">f4")])
def test_arrays_that_have_to_be_converted_are_in_memory(folder: Path, of: Any) -> None:
    np.save(folder / "x.npy", of(np.load(folder / "x.npy")))
    x = checked_rows(read_data(folder), "folder")["x"]
    assert x.dtype == np.float32
    assert not isinstance(x, np.memmap)


def test_values_are_checked_in_the_file_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CHECK_BYTES", 1200)  # a hundred rows
    x = np.load(folder / "x.npy")
    x[4_321, 2] = np.nan
    np.save(folder / "x.npy", x)
    with pytest.raises(DataError, match=r"x, row 4321, column 2 \(counted from 0\) is nan"):
        checked_rows(read_data(folder), "folder")


def test_only_what_stays_in_its_file_may_be_larger_than_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_available_bytes", lambda: 1000)
    model = model_of(read_data(folder))
    assert model.num_data == NUM_DATA
    with pytest.raises(DataError, match="held out copy the others"):
        model.hold_out(0.1, 0)
    np.save(folder / "x.npy", np.load(folder / "x.npy").astype(np.float64))
    with pytest.raises(DataError, match=r"In a \.npy of float32, int32 or bool rows stay"):
        model_of(read_data(folder))


def test_a_folder_without_arrays_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no array in it"):
        checked_rows(read_data(tmp_path), "folder")
    with pytest.raises(ConfigError, match=r"or be a folder of \.npy files"):
        read_data(tmp_path / "data.txt")


def test_every_pass_over_the_rows_is_that_of_memory_bit_for_bit(
    both: tuple[OwnModel, OwnModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, in_memory = both
    assert mapped.digest == in_memory.digest
    settings = MapSettings(max_newton_dim=2, max_lbfgs_iterations=5)
    for limit in (map_estimate.MAX_COPY_BYTES, 0):  # rows copied into blocks, and read as they lie
        monkeypatch.setattr(map_estimate, "MAX_COPY_BYTES", limit)
        for how in (MapSettings(), settings):
            one, other = (find_map(m, rng_key=jax.random.key(0), settings=how) for m in both)
            np.testing.assert_array_equal(one.position, other.position)
            assert one.log_density == other.log_density
    point = np.asarray(one.position)
    for function in (
        lambda model: gradients.full_gradients(model)(point[None]),
        lambda model: gradients.full_log_densities(model)(point[None]),
        lambda model: fisher_diagonal(model, jnp.asarray(point)),
        lambda model: map_estimate.hessian(model, jnp.asarray(point)),
    ):
        np.testing.assert_array_equal(function(mapped), function(in_memory))


@pytest.mark.parametrize("batch_size", [50, 4_000, NUM_DATA])
def test_chains_are_those_of_memory_bit_for_bit(
    both: tuple[OwnModel, OwnModel], batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "WHOLE_ROWS", 2_000)
    start = np.zeros(DIM, np.float32)
    ends = []
    for model in both:
        estimator = gradients.control_variates(model, jnp.asarray(start))
        program = ChainProgram(estimator, sgld, without_replacement, batch_size, capacity=20)
        chain = program.start(jax.random.key(1), start, Hyperparameters(1e-4, batch_size, 1))
        ends.append(advance(program, chain, Budget(steps=100)))
    np.testing.assert_array_equal(ends[0].position, ends[1].position)
    np.testing.assert_array_equal(ends[0].sums["second"], ends[1].sums["second"])
    assert np.all(ends[0].position != 0)


def test_blocks_read_as_they_lie_are_those_that_are_copied(
    both: tuple[OwnModel, OwnModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = both[0]
    copied = map_estimate.row_blocks(model.data, model.num_data)
    monkeypatch.setattr(map_estimate, "MAX_COPY_BYTES", 0)
    read = map_estimate.row_blocks(model.data, model.num_data)
    assert copied.rows is None
    assert read.columns is None
    for index in range(len(copied.num_valid)):
        one, other = (
            blocks.read(jax.tree.map(lambda leaf: leaf[index], blocks.parts))  # noqa: B023
            for blocks in (copied, read)
        )
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_all_rows_in_blocks_are_all_rows(
    both: tuple[OwnModel, OwnModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, position = both[0], jnp.array([0.5, -1.0, 2.0])
    x, y = np.asarray(model.data["x"], np.float64), np.asarray(model.data["y"])
    exact = x.T @ (y - 1 / (1 + np.exp(-x @ np.asarray(position, np.float64)))) - position
    monkeypatch.setattr(gradients, "WHOLE_ROWS", 1_000)
    gradient = gradients.scaled_gradient(model, position, model.data)
    np.testing.assert_allclose(gradient, exact, rtol=1e-5)


CHILD = """
import resource, sys
import jax.numpy as jnp, numpy as np
import mamba_cli as mamba

def log_likelihood(w, row):
    return -0.5 * (row[-1] - row[:3] @ w) ** 2

def tune(data):
    model = mamba.from_functions(
        lambda w: -0.5 * jnp.sum(w**2), log_likelihood, data, jnp.zeros(3)
    )
    return mamba.tune(
        model, longest_arm_s=0.05, step_sizes=[1e-7, 1e-8], batch_percents=[100, 0.01],
        progress=False,
    )

path, headroom = sys.argv[1], int(sys.argv[3])
small = np.array(np.load(path, mmap_mode="r")[:300_000])
tune(small)  # what programs take of any data is taken now
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
limit = 1024 * int(status["VmData"].split()[0]) + headroom
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
data = np.load(path, mmap_mode="r" if sys.argv[2] == "mapped" else None)
print("tuned to", tune(data).winner)
"""


@pytest.mark.parametrize("kept", ["mapped", "in memory"])
def test_a_file_larger_than_the_memory_that_is_left_is_tuned_on(tmp_path: Path, kept: str) -> None:
    num_data, width, part = 1_200_000, 64, 100_000
    headroom = num_data * width * 4 // 2  # of 307 MB
    path = tmp_path / "data.npy"
    file = np.lib.format.open_memmap(path, "w+", np.float32, (num_data, width))
    rows = np.random.default_rng(0).normal(size=(part, width)).astype(np.float32)
    rows[:, -1] += rows[:, :3] @ np.array([1, -1, 0.5], np.float32)
    for first in range(0, num_data, part):
        file[first : first + part] = rows
    file.flush()
    given = [sys.executable, "-c", CHILD, str(path), kept, str(headroom)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=300)
    if kept == "mapped":
        assert done.returncode == 0, done.stderr
        assert "tuned to" in done.stdout
    else:
        assert "Unable to allocate" in done.stderr
