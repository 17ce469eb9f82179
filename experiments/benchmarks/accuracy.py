"""Time to accuracy on the logistic regression: the figure to decide by.

The relative error of the posterior sds (against the ground truth that comes with the program)
against wall seconds from the model in hand: MAP, tuning, compilation and sampling all counted, in a
new process with nothing compiled before. Each sampler is tuned by ``tuner=mamba``, by the paper's
``mamba_ksd``, or takes the heuristic's step size; NUTS runs on all rows. A chain's sds are those of
all its draws. ``accuracy.csv`` has the course of every chain, ``accuracy_table.csv`` the seconds to
come below 10, 5 and 2 % and stay there as long as it was watched.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import cells
from experiments.benchmarks.cells import QUICK, Row, Table
from experiments.ten_models.check import composed
from mamba_cli import ground_truth
from mamba_cli.artifacts import read_arrays
from mamba_cli.chain import Budget, advance
from mamba_cli.compilation import use_cache
from mamba_cli.config import build
from mamba_cli.console import Console
from mamba_cli.errors import MambaError
from mamba_cli.map_estimate import find_map
from mamba_cli.metrics import relative_std_error
from mamba_cli.run import COMMITTED_GROUND_TRUTH, opened
from mamba_cli.types import Hyperparameters, SilentReporter

SAMPLERS = ("sgld", "sgld_cv", "sghmc", "sghmc_cv", "sgnht", "sgnht_cv")
TUNERS = ("mamba", "mamba_ksd", "heuristic")
ERRORS = (0.10, 0.05, 0.02)

FIRST_S, RATIO = 0.05, 1.25
"""Seconds of sampling at the first look at a chain, and from one to the next."""

KEYS = ("sampler", "tuner", "look")
COLUMNS = ("wall_s", "sampling_s", "num_draws", "error", "step_size", "batch_size")
TABLE_COLUMNS = ("before_sampling_s", *(f"s_to_{100 * e:g}_percent" for e in ERRORS), "last_error")


def reference_std(overrides: Sequence[str]) -> np.ndarray:
    """The sds of the ground truth that comes with the program, ``[dim]``."""
    cfg = composed(["model=logreg", *overrides])
    model = build(cfg.model.posterior, "model.posterior")
    for path in sorted(COMMITTED_GROUND_TRUTH.glob("logreg-*.npz")):
        found = read_arrays(path)
        if found is not None and found[1]["provenance"]["model_digest"] == model.digest:
            return np.asarray(found[0]["std"])
    raise FileNotFoundError(f"no ground truth of this model in {COMMITTED_GROUND_TRUTH}")


def course(
    sampler: str, tuner: str, seconds: float, reference: Sequence[float], overrides: Sequence[str]
) -> dict[str, Any]:
    """One chain from the model in hand on, looked at more and more rarely."""
    use_cache()
    with tempfile.TemporaryDirectory() as results:
        cfg = composed(
            [
                "model=logreg",
                f"sampler={sampler}",
                f"tuner={tuner}",
                "stages=[tune]",
                "ground_truth=none",
                f"results_dir={results}",
                *overrides,
            ]
        )
        model = build(cfg.model.posterior, "model.posterior")
        began = time.perf_counter()
        with opened(cfg, Console(), model=model, pictures=False) as one:
            bench = one.prepare()
            try:
                best = one.tune(bench)
            except MambaError as error:
                print(error, file=sys.stderr)
                return {"looks": [], "before_sampling_s": time.perf_counter() - began}
        arm = Hyperparameters(
            float(best["step_size"]), int(best["batch_size"]), int(best["num_integration_steps"])
        )
        program, _ = bench.program(arm.batch_size)
        chain = program.start(jax.random.key(1), bench.start, arm)
        before_sampling_s = time.perf_counter() - began
        looks = []
        end_s = FIRST_S
        while chain.nonfinite_step is None:
            chain = advance(program, chain, Budget(seconds=end_s - chain.elapsed_s))
            error = relative_std_error(chain.std, np.asarray(reference))
            looks.append(
                {
                    "wall_s": time.perf_counter() - began,
                    "sampling_s": chain.elapsed_s,
                    "num_draws": chain.num_draws,
                    "error": error if math.isfinite(error) else None,
                    "step_size": arm.step_size,
                    "batch_size": arm.batch_size,
                }
            )
            if end_s >= seconds:
                break
            end_s = min(RATIO * end_s, seconds)
    return {"looks": looks, "before_sampling_s": before_sampling_s}


def course_of_nuts(
    num_warmup: int, num_draws: int, reference: Sequence[float], overrides: Sequence[str]
) -> dict[str, Any]:
    """NUTS as the ground truth runs it, with the error after every block of draws."""
    use_cache()
    cfg = composed(["model=logreg", *overrides])
    model = build(cfg.model.posterior, "model.posterior")
    began = time.perf_counter()
    centre = find_map(model, rng_key=jax.random.key(0)).position
    settings = ground_truth.NutsSettings(
        num_draws=num_draws, num_warmup=num_warmup, num_chains=4, seed=0, block_draws=25
    )
    looks: list[float] = []

    class Watch(SilentReporter):
        """Told after every block."""

        def update(self, amount: float, note: str = "") -> None:
            looks.append(time.perf_counter() - began)

    samples = ground_truth.sample(model, jnp.asarray(centre), settings, reporter=Watch())
    per_chain = samples.draws.shape[1]
    blocks = math.ceil(per_chain / settings.block_draws)
    found = []
    for number, wall_s in enumerate(looks[-blocks:]):
        own = samples.draws[:, : (number + 1) * settings.block_draws].reshape(-1, model.dim)
        error = relative_std_error(own.std(axis=0), np.asarray(reference))
        found.append(
            {
                "wall_s": wall_s,
                "sampling_s": wall_s - looks[-blocks - 1],
                "num_draws": len(own),
                "error": error,
                "step_size": float(np.mean(samples.step_sizes)),
                "batch_size": model.num_data,
            }
        )
    return {"looks": found, "before_sampling_s": looks[-blocks - 1]}


def seconds_to(looks: Sequence[Row], error: float) -> float:
    """Wall seconds until the error is below, and stays there; NaN where it never does."""
    found = math.nan
    for look in reversed(looks):
        if not look["error"] or float(look["error"]) > error:
            break
        found = float(look["wall_s"])
    return found


def courses(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Sampler, tuner and the looks at its chain."""
    names = dict.fromkeys((row["sampler"], row["tuner"]) for row in rows)
    for name in names:
        yield (*name, [row for row in rows if (row["sampler"], row["tuner"]) == name])


def summarise(table: Table, path: Path) -> None:
    """Write ``accuracy_table.csv``."""
    path.unlink(missing_ok=True)
    summary = Table(path, KEYS[:2], TABLE_COLUMNS)
    for sampler, tuner, looks in courses(table.rows):
        summary.add(
            sampler=sampler,
            tuner=tuner,
            before_sampling_s=float(looks[0]["wall_s"]) - float(looks[0]["sampling_s"] or "nan"),
            last_error=float(looks[-1]["error"] or "nan"),
            **{
                name: seconds_to(looks, error)
                for name, error in zip(TABLE_COLUMNS[1:-1], ERRORS, strict=True)
            },
        )


def draw(rows: Sequence[Row], path: Path) -> None:
    pyplot = cells.pyplot()
    figure, panels = pyplot.subplots(1, len(TUNERS), figsize=(14, 4.6), sharex=True, sharey=True)
    for panel, tuner in zip(panels, TUNERS, strict=True):
        for sampler, by, looks in courses(rows):
            if by not in (tuner, "nuts"):
                continue
            style = "k--" if by == "nuts" else "-"
            seen = [look for look in looks if look["error"]]
            panel.loglog(
                [float(look["wall_s"]) for look in seen],
                [100 * float(look["error"]) for look in seen],
                style,
                label="NUTS" if by == "nuts" else sampler,
            )
        for error in ERRORS:
            panel.axhline(100 * error, color="grey", linewidth=0.5)
        panel.set(xlabel="wall seconds from the model in hand", title=f"tuner={tuner}")
        panel.grid(alpha=0.2)
    panels[0].set_ylabel("relative error of the posterior sds, %")
    panels[0].legend(fontsize=7)
    cells.save(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", nargs="+", default=["sgld_cv"] if QUICK else list(SAMPLERS))
    parser.add_argument("--tuners", nargs="+", default=["mamba"] if QUICK else list(TUNERS))
    parser.add_argument("--seconds", type=float, default=1.0 if QUICK else 8.0)
    parser.add_argument(
        "--nuts", type=int, nargs=2, default=[200, 1600], metavar=("WARMUP", "DRAWS")
    )
    parser.add_argument("--without-nuts", action="store_true", default=QUICK)
    # The rows of the ground truth, whatever else is small.
    quick = ["tuner.longest_arm_s=0.5"] if QUICK else []
    parser.add_argument("--overrides", nargs="*", default=quick)
    parser.add_argument("--out", type=Path, default=cells.FOLDER)
    chosen = parser.parse_args(words)
    table = Table(chosen.out / "accuracy.csv", KEYS, COLUMNS)
    shared = {"reference": reference_std([]).tolist()}
    wanted = [(sampler, tuner) for tuner in chosen.tuners for sampler in chosen.samplers]
    if not chosen.without_nuts:
        wanted.append(("nuts", "nuts"))
    for sampler, tuner in wanted:
        if table.has(sampler, tuner, 0):
            continue
        with tempfile.TemporaryDirectory() as cache:
            cold = {"JAX_COMPILATION_CACHE_DIR": cache}
            if tuner == "nuts":
                warmup, draws = chosen.nuts
                found = cells.in_a_process(
                    course_of_nuts,
                    environment=cold,
                    num_warmup=warmup,
                    num_draws=draws,
                    overrides=[],
                    **shared,
                )
            else:
                own = [] if tuner == "heuristic" else chosen.overrides
                found = cells.in_a_process(
                    course,
                    environment=cold,
                    sampler=sampler,
                    tuner=tuner,
                    seconds=chosen.seconds,
                    overrides=own,
                    **shared,
                )
        for number, look in enumerate(found["looks"]):
            table.add(sampler=sampler, tuner=tuner, look=number, **look)
        if not found["looks"]:
            table.add(sampler=sampler, tuner=tuner, look=0, wall_s=found["before_sampling_s"])
    summarise(table, chosen.out / "accuracy_table.csv")
    draw(table.rows, chosen.out / "accuracy.png")


if __name__ == "__main__":
    main()
