"""Wall time of a whole MAMBA run over T, its seconds of sampling, and where the rest goes.

From the start of tuning (model and MAP in hand) to its winner, by the paper's KSD over its grids:
compilation, sampling, full-data gradients and rewards. Each run has a process of its own. ``cold``:
nothing compiled before, on disk either. ``warm``: with what the cold run left in the cache of
compiled programs. Where T is above a minute, the warm run samples for a fraction of T, which
everything but the sampling does not depend on: its wall time over T is 1 and the rest over T.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks import cells
from experiments.benchmarks.cells import QUICK, Row, Table
from experiments.ten_models.check import composed
from mamba_cli.compilation import use_cache
from mamba_cli.config import MambaSettings
from mamba_cli.console import Console
from mamba_cli.run import opened
from mamba_cli.tuners.halving import schedule, total_s

KEYS = ("model", "sampler", "cache")
PARTS = ("compile", "sampling", "gradients", "reward", "other")
COLUMNS = (
    "num_arms", "budget_s", "full_budget_s", "wall_s", "wall_over_t",
    *(f"{part}_s" for part in PARTS), "map_s", "peak_gb", "step_size", "batch_size",
)  # fmt: skip

MODELS = ("logreg",) if QUICK else ("logreg", "pmf", "bnn")
SAMPLERS = ("sgld",) if QUICK else ("sgld", "sghmc_cv")
WARM_SHARE = {"pmf": 0.1, "bnn": 0.1}


def tune(model: str, sampler: str, share: float, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """One tuning with ``share`` of its budget, timed."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        use_cache()
    with tempfile.TemporaryDirectory() as results:
        cfg = composed(
            [
                f"model={model}",
                f"sampler={sampler}",
                "tuner=mamba_ksd",
                "stages=[tune]",
                "ground_truth=none",
                f"results_dir={results}",
                *overrides,
            ]
        )
        full_s = float(cfg.tuner.longest_arm_s)
        cfg.tuner.longest_arm_s = full_s * share
        with opened(cfg, Console(), pictures=False) as one:
            began = time.perf_counter()
            bench = one.prepare()
            prepared = time.perf_counter()
            best = one.tune(bench)
            wall_s = time.perf_counter() - prepared
            tuner = one.settings.tuner
            assert isinstance(tuner, MambaSettings)
            num_arms = len(tuner.points(bench.model.num_data))
            seconds = one.ledger.seconds
    budget_s = total_s(schedule(num_arms, tuner.reduction_factor, tuner.longest_arm_s))
    spent = {part: float(getattr(seconds, part)) for part in PARTS[:-1]}
    spent["other"] = wall_s - sum(spent.values())
    rest_s = wall_s - spent["sampling"]
    return {
        "num_arms": num_arms,
        "budget_s": budget_s,
        "full_budget_s": budget_s / share,
        "wall_s": wall_s,
        # Sampling takes T to within a percent, so that a part of T tells the whole.
        "wall_over_t": (spent["sampling"] / share + rest_s) / (budget_s / share),
        **{f"{part}_s": value for part, value in spent.items()},
        "map_s": prepared - began,
        "step_size": best["step_size"],
        "batch_size": best["batch_size"],
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of wall time over T, made up of their parts."""
    pyplot = cells.pyplot()
    figure, panel = pyplot.subplots(figsize=(9, 0.5 * len(rows) + 1.6))
    labels = [f"{row['model']}, {row['sampler']}, {row['cache']}" for row in rows]
    left = [0.0] * len(rows)
    for part in PARTS:
        widths = []
        for row in rows:
            full_s, budget_s = float(row["full_budget_s"]), float(row["budget_s"])
            scale = full_s / budget_s if part == "sampling" else 1.0
            widths.append(float(row[f"{part}_s"]) * scale / full_s)
        panel.barh(labels, widths, left=left, label=part)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    panel.axvline(1, color="black", linewidth=1)
    panel.invert_yaxis()
    panel.set(xlabel="wall time over T", title="Whole MAMBA runs, the paper's grids and KSD")
    panel.legend(
        fontsize=8,
        ncols=len(PARTS),
        loc="upper center",
        bbox_to_anchor=(0.4, -0.5 / len(rows) - 0.2),
    )
    cells.save(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    parser.add_argument("--overrides", nargs="*", default=["budget=quick"] if QUICK else [])
    parser.add_argument("--data-dir", default=os.environ.get("MAMBA_DATA_DIR"))
    parser.add_argument("--out", type=Path, default=cells.FOLDER)
    chosen = parser.parse_args(words)
    overrides = list(chosen.overrides)
    if chosen.data_dir:
        overrides.append(f"data_dir={chosen.data_dir}")
    table = Table(chosen.out / "tuning.csv", KEYS, COLUMNS)
    for model in chosen.models:
        for sampler in chosen.samplers:
            if table.has(model, sampler, "cold") and table.has(model, sampler, "warm"):
                continue
            with tempfile.TemporaryDirectory() as cache:
                # The warm run needs what the cold one compiles, also where only it is missing.
                for kind, share in (("cold", 1.0), ("warm", WARM_SHARE.get(model, 1.0))):
                    if table.has(model, sampler, kind):
                        share = 0.1
                    found = cells.in_a_process(
                        tune,
                        environment={"JAX_COMPILATION_CACHE_DIR": cache},
                        model=model,
                        sampler=sampler,
                        share=share,
                        overrides=overrides,
                    )
                    if not table.has(model, sampler, kind):
                        table.add(model=model, sampler=sampler, cache=kind, **found)
    draw(table.rows, chosen.out / "tuning.png")


if __name__ == "__main__":
    main()
