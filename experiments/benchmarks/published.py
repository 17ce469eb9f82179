"""Draws a second of the library of the paper, SGMCMCJax, in a timed loop of one call per step.

SGMCMCJax needs an older JAX, so that its loop (``sgmcmcjax_loop.py``) runs in an environment of its
own, ``.venv-published``, which ``make bench`` makes. Models and data are those of ``chain.py``.
``QUOTED`` are the figures that the project was given, from two cores of another machine; those
measured here compare.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import cells
from experiments.benchmarks.cells import QUICK, Table
from experiments.benchmarks.chain import PERCENT, models

PYTHON = cells.ROOT / ".venv-published" / "bin" / "python"
LOOP = Path(__file__).with_name("sgmcmcjax_loop.py")

KEYS = ("model", "sampler", "batch_size")
COLUMNS = ("num_data", "draws_per_s", "versions")

SAMPLERS = ("sgld", "sgld_cv", "sghmc", "sghmc_cv", "sgnht", "sgnht_cv")

# By model and sampler, at the batch sizes of QUOTED_BATCH_SIZES.
QUOTED_BATCH_SIZES = {
    "logreg": (1000, 10_000, 100_000), "pmf": (800, 8000, 80_000), "bnn": (600, 6000),
}  # fmt: skip
QUOTED = {
    ("logreg", "sgld"): (9298, 3040, 489), ("logreg", "sgld_cv"): (8999, 2097, 330),
    ("logreg", "sghmc"): (3550, 591, 87), ("logreg", "sgnht"): (8285, 3001, 444),
    ("pmf", "sgld"): (2787, 1199, 174), ("pmf", "sgld_cv"): (2487, 837, 47),
    ("pmf", "sghmc"): (563, 227, 22), ("pmf", "sghmc_cv"): (440, 151, 12),
    ("pmf", "sgnht"): (1820, 1028, 129),
    ("bnn", "sgld"): (836, 105), ("bnn", "sgld_cv"): (558, 43),
    ("bnn", "sghmc"): (107, 23), ("bnn", "sghmc_cv"): (109, 12), ("bnn", "sgnht"): (689, 108),
}  # fmt: skip


def quoted(model: str, sampler: str, batch_size: int) -> float | None:
    """Draws a second as the project was told them, None where they were not."""
    known = zip(QUOTED_BATCH_SIZES[model], QUOTED.get((model, sampler), ()), strict=False)
    return dict(known).get(batch_size)


def arrays_of(model: Any, centre: np.ndarray) -> dict[str, np.ndarray]:
    """The model's data and start as the loop reads them."""
    if model.name == "logreg":
        # Signed rows are rows with label 1.
        rows = np.asarray(model.data)
        data = {"x": rows, "y": np.ones(len(rows), np.float32)}
        settings = {"prior_variance": model.prior_variance}
    elif model.name == "pmf":
        users, items, ratings = (np.asarray(column) for column in model.data)
        data = {"x": np.stack([users, items], axis=1), "y": ratings}
        settings = {key: getattr(model, key) for key in ("alpha", "mu0", "a0", "b0")}
    else:
        images, labels = (np.asarray(column) for column in model.data)
        data = {
            "x": images.astype(np.float32) / 255,
            "y": np.eye(model.num_classes, dtype=np.float32)[labels],
        }
        settings = {}
    position = model.unravel(centre)._asdict() if hasattr(model, "unravel") else {"theta": centre}
    start = {f"start_{name}": np.asarray(block) for name, block in position.items()}
    return data | start | {name: np.asarray(value) for name, value in settings.items()}


def run(arrays: Mapping[str, np.ndarray], model: str, wanted: list[Any], seconds: float) -> Any:
    """The loop's lines, one for each sampler and batch size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrays.npz"
        np.savez(path, **dict(arrays))
        command = [str(PYTHON), str(LOOP), str(path), model, json.dumps(wanted), str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as loop:
            assert loop.stdout is not None
            for line in loop.stdout:
                yield json.loads(line)
        if loop.returncode:
            raise RuntimeError(f"{LOOP} ended with exit code {loop.returncode}")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-train", type=int, default=100_000 if QUICK else 1_000_000)
    parser.add_argument("--seconds", type=float, default=0.1 if QUICK else 0.5)
    parser.add_argument("--models", nargs="+", default=list(PERCENT), choices=list(PERCENT))
    parser.add_argument("--samplers", nargs="+", default=["sgld"] if QUICK else list(SAMPLERS))
    parser.add_argument("--data-dir", default=os.environ.get("MAMBA_DATA_DIR"))
    parser.add_argument("--out", type=Path, default=cells.FOLDER)
    chosen = parser.parse_args(words)
    if not PYTHON.exists():
        print(f"left out: SGMCMCJax is not installed ({PYTHON.parents[1]}); see the Makefile")
        return
    table = Table(chosen.out / "published.csv", KEYS, COLUMNS)
    for model, centre in models(chosen.models, chosen.data_dir, chosen.num_train):
        sizes = [int(percent * model.num_data / 100) for percent in PERCENT[model.name]]
        wanted = [
            (sampler, n)
            for sampler in chosen.samplers
            for n in (sizes[:1] if QUICK else sizes)
            if not table.has(model.name, sampler, n)
        ]
        if wanted:
            for found in run(arrays_of(model, centre), model.name, wanted, chosen.seconds):
                table.add(model=model.name, num_data=model.num_data, **found)


if __name__ == "__main__":
    main()
