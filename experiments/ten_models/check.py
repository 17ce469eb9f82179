"""Tune ten models of ten kinds, and compare each posterior with that of NUTS.

    python -m experiments.ten_models.check                # make ten-models
    python -m experiments.ten_models.check --reference    # NUTS alone, before

Every model is a file and a data file to the run, as with ``mamba-run model=numpyro``. The reference
is NumPyro's own NUTS on the same model, which shares no code with this program; its summary and
diagnostics are kept in ``reference.json`` beside this file. The table, ``ten_models.csv`` and
``ten_models.md``, has for the worst number of each model the distance of the posterior means in
posterior sds, and the relative error of the sd.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import hydra
import numpy as np
from hydra.core.global_hydra import GlobalHydra
from numpyro.diagnostics import summary
from omegaconf import DictConfig

from experiments.ten_models.models import MODELS, NUM_CHAINS, NUM_DRAWS, data_of, nuts
from mamba_cli import pacing
from mamba_cli.artifacts import read_table, write_json, write_table
from mamba_cli.chain import ChainProgram, Clock
from mamba_cli.console import Console
from mamba_cli.errors import MambaError
from mamba_cli.run import opened
from mamba_cli.types import Hyperparameters

HERE = Path(__file__).parent
REFERENCE = HERE / "reference.json"
NUM_ROWS = 500

MEAN_TOLERANCE = 0.3
"""Posterior sds: three standard errors of a mean at 100 effective draws, as few as the softest
direction has."""

SD_TOLERANCE = 0.4
"""Relative. SGLD's variance along an axis of curvature lambda is 1 / (1 - h lambda / 4) times too
large: with the largest steps that win, h lambda = 1.7, the sd is 0.33 too large. The mixture's
means show it: 0.25 is predicted by the Hessian at the MAP. Monte Carlo error adds 0.07, one
standard error at 100 effective draws."""

OVERRIDES = (
    "sampler=sgld_cv",
    "tuner=mamba",
    "budget=quick",
    "ground_truth=none",
    "budget.clock=calibrated",
    "tuner.longest_arm_s=0.1",
    "evaluation.max_draws=500",
)


EVALUATION_S = 1.0
"""Of a chain, for a model that needs no longer one."""


class Comparison(NamedTuple):
    """The worst number of a model; ``*_of`` says which it is."""

    mean_distance: float  # in posterior sds
    mean_of: str
    sd_error: float  # relative, with its sign
    sd_of: str

    def agrees(self, mean: float = MEAN_TOLERANCE, sd: float = SD_TOLERANCE) -> bool:
        """Whether both are within their tolerances."""
        return self.mean_distance <= mean and abs(self.sd_error) <= sd


def reference_of(name: str) -> dict[str, Any]:
    """Mean and sd of every identified number by NumPyro's NUTS, and how far to trust them."""
    mcmc = nuts(name, data_of(name, NUM_ROWS))
    wanted = MODELS[name].identified
    samples = mcmc.get_samples(group_by_chain=True)
    found = summary({k: draws for k, draws in samples.items() if k in wanted or not wanted})
    parameters = {}
    for parameter, numbers in found.items():
        means, sds = np.asarray(numbers["mean"]), np.asarray(numbers["std"])
        for index in np.ndindex(means.shape):
            place = f"[{','.join(map(str, index))}]" if index else ""
            parameters[parameter + place] = [float(means[index]), float(sds[index])]
    return {
        "num_rows": NUM_ROWS,
        "num_chains": NUM_CHAINS,
        "num_draws": NUM_DRAWS,
        "num_divergent": int(np.sum(mcmc.get_extra_fields()["diverging"])),
        "r_hat": max(float(np.max(numbers["r_hat"])) for numbers in found.values()),
        "ess": min(float(np.min(numbers["n_eff"])) for numbers in found.values()),
        "parameters": parameters,
    }


def overrides_of(name: str, data: Path, results: Path) -> list[str]:
    """What a user would type after ``mamba-run``, but for sampler, tuner and budgets."""
    constants = [f"+model.kwargs.{key}={value}" for key, value in MODELS[name].kwargs.items()]
    return [
        "model=numpyro",
        f"model.target={HERE / 'models.py'}:{name}",
        f"model.data={data}",
        *constants,
        f"model.name={name}",
        f"results_dir={results}",
    ]


def composed(overrides: Sequence[str]) -> DictConfig:
    """The configuration that ``mamba-run`` makes of the same words."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("mamba_cli.conf", version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides))


def stated_cost_s(program: ChainProgram, arm: Hyperparameters, start: Any, clock: Clock) -> float:
    """Seconds of a step, of about the size they have for these models on an idle core.

    In place of the measured ones, so that seconds are the same steps on every machine and the
    result hangs on the seed alone.
    """
    return 5e-6 + 2e-8 * arm.batch_size


def tune(
    name: str, results: Path, overrides: Sequence[str] = (), evaluation_s: float = EVALUATION_S
) -> Path:
    """Run one model, data file and all; the run's folder. What is finished is not done again."""
    data = results / "data" / f"{name}.npz"
    if not data.exists():  # written again it has another checksum, and its run would be refused
        data.parent.mkdir(parents=True, exist_ok=True)
        np.savez(data, **data_of(name, NUM_ROWS))
    budget = f"evaluation.budget_s={evaluation_s * MODELS[name].longer}"
    cfg = composed([*overrides_of(name, data, results), *OVERRIDES, budget, *overrides])
    with (
        patch.object(pacing, "measure_cost_s", stated_cost_s),
        opened(cfg, Console(), pictures=False) as one,
    ):
        one.go()
    return Path(cfg.run_dir)


def compare(folder: Path, reference: dict[str, Any]) -> Comparison:
    """The run in ``folder`` and the reference, over every number that the reference has."""
    _, rows = read_table(folder / "parameters.csv")
    found = {row["parameter"]: (float(row["mean"]), float(row["sd"])) for row in rows}
    means, sds = [], []
    for parameter, (mean, sd) in reference["parameters"].items():
        means.append((abs(found[parameter][0] - mean) / sd, parameter))
        sds.append((found[parameter][1] / sd - 1, parameter))
    return Comparison(*max(means), *max(sds, key=lambda pair: abs(pair[0])))


def row_of(name: str, folder: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    worst = compare(folder, reference)
    _, metrics = read_table(folder / "metrics.csv")
    best = json.loads((folder / "best.json").read_text())
    return {
        "model": name,
        "num_rows": reference["num_rows"],
        "num_compared": len(reference["parameters"]),
        **{key: best[key] for key in ("step_size", "batch_size")},
        "num_samples": metrics[0]["num_samples"],
        **worst._asdict(),
        "agrees": worst.agrees(),
        "nuts_r_hat": reference["r_hat"],
        "nuts_ess": reference["ess"],
        "nuts_divergent": reference["num_divergent"],
    }


def markdown(rows: Sequence[dict[str, Any]], command: str) -> str:
    """The table for a reader."""
    lines = [
        f"Ten NumPyro models, tuned as they stand (`{command}`), against NumPyro's own NUTS: the "
        "worst number of each model. `make ten-models` makes the table again.",
        "",
        "| model | numbers | h | n | draws | mean off, sds | sd off | "
        "NUTS: R-hat | ESS | divergent |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['num_compared']} | {float(row['step_size']):.2g} "
            f"| {row['batch_size']} | {int(row['num_samples']):,} "
            f"| {row['mean_distance']:.2f} ({row['mean_of']}) "
            f"| {100 * row['sd_error']:+.0f} % ({row['sd_of']}) | {row['nuts_r_hat']:.3f} "
            f"| {row['nuts_ess']:,.0f} | {row['nuts_divergent']} |"
        )
    longer = ", ".join(f"{name} {m.longer}" for name, m in MODELS.items() if m.longer > 1)
    held = f"{MEAN_TOLERANCE:g} posterior sds in the mean and {100 * SD_TOLERANCE:g} % in the sd"
    count = sum(row["agrees"] for row in rows)
    lines += [
        "",
        f"Within {held}: {count} of {len(rows)}. Seconds are steps at a stated cost, so that the "
        f"table is the same on a busy machine; chains are of {EVALUATION_S:g} s (times: {longer}), "
        f"500 draws of each are compared. An sd that is too large is mostly the step size: the "
        "variance of SGLD is 1 / (1 - h lambda / 4) times the posterior's along an axis of "
        "curvature lambda. One that is too small is a chain that has not been everywhere yet.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("results/runs/ten_models"))
    parser.add_argument("--out", type=Path, default=Path("results/ten_models"))
    parser.add_argument("--reference", action="store_true", help="make reference.json, no more")
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("overrides", nargs="*", help="of mamba-run, after --")
    asked = parser.parse_args()
    known = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    if asked.reference:
        for name in asked.only:
            known[name] = reference_of(name)
            write_json(REFERENCE, known)
            print(name, {key: known[name][key] for key in ("r_hat", "ess", "num_divergent")})
        return
    rows = []
    for name in asked.only:
        try:
            folder = tune(name, asked.runs, asked.overrides)
        except MambaError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        rows.append(row_of(name, folder, known[name]))
        print(rows[-1], flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    write_table(asked.out / "ten_models.csv", list(rows[0]), rows)
    command = " ".join([*OVERRIDES, *asked.overrides])
    (asked.out / "ten_models.md").write_text(markdown(rows, command))
    if len(rows) < len(asked.only) or not all(row["agrees"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
