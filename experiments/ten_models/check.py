"""Tune ten models of ten kinds by the command line, and compare each posterior with NUTS.

    python experiments/ten_models/check.py --rows 500 --results results/ten_models

Every model is a file and a data file to ``mamba-run``, as a user's would be. The reference is
NumPyro's own NUTS on the same model, whose summary is kept in ``reference.json`` beside this file
(``--reference`` makes it again). The table has, for the worst parameter of each model, the
distance of the posterior means in posterior sds, and the relative error of the sd.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
REFERENCE = HERE / "reference.json"
NUM_ROWS = 500


def reference_of(name: str, num_rows: int) -> dict[str, Any]:
    """Mean and sd of every parameter by NumPyro's NUTS, with its worst R-hat."""
    from models import MODELS, data_of, nuts
    from numpyro.diagnostics import summary

    mcmc = nuts(name, data_of(name, num_rows))
    wanted = MODELS[name].identified
    samples = mcmc.get_samples(group_by_chain=True)
    found = summary({k: draws for k, draws in samples.items() if k in wanted or not wanted})
    parameters = {}
    for parameter, numbers in found.items():
        means, sds = np.asarray(numbers["mean"]), np.asarray(numbers["std"])
        for index in np.ndindex(means.shape):
            place = f"[{','.join(map(str, index))}]" if index else ""
            parameters[parameter + place] = [float(means[index]), float(sds[index])]
    r_hat = max(float(np.max(numbers["r_hat"])) for numbers in found.values())
    ess = min(float(np.min(numbers["n_eff"])) for numbers in found.values())
    return {"num_rows": num_rows, "r_hat": r_hat, "ess": ess, "parameters": parameters}


def command(name: str, data: Path, results: Path, overrides: list[str]) -> list[str]:
    """What a user would type."""
    from models import MODELS

    constants = [f"+model.kwargs.{key}={value}" for key, value in MODELS[name].kwargs.items()]
    return [
        "model=numpyro",
        f"model.target={HERE / 'models.py'}:{name}",
        f"model.data={data}",
        *constants,
        f"model.name={name}",
        f"results_dir={results}",
        "ground_truth=none",
        *overrides,
    ]


def compare(parameters: Path, reference: dict[str, Any]) -> tuple[float, float, str]:
    """Worst distance of means in sds and worst relative error of sds, and of which parameter."""
    distance, error, worst = 0.0, 0.0, ""
    with parameters.open() as file:
        rows = {row["parameter"]: row for row in csv.DictReader(file)}
    for name, (mean, sd) in reference["parameters"].items():
        here = abs(float(rows[name]["mean"]) - mean) / sd
        if here > distance:
            distance, worst = here, name
        error = max(error, abs(float(rows[name]["sd"]) / sd - 1))
    return distance, error, worst


def main() -> None:
    sys.path.insert(0, str(HERE))
    from models import MODELS, data_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--results", type=Path, default=Path("results/ten_models"))
    parser.add_argument("--reference", action="store_true", help="run NUTS again")
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("overrides", nargs="*", help="of mamba-run, after --")
    asked = parser.parse_args()
    known = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    print(f"{'model':18} {'mean, sds':>10} {'sd, %':>7}  worst        h       n")
    for name in asked.only:
        if asked.reference or known.get(name, {}).get("num_rows") != asked.rows:
            known[name] = reference_of(name, asked.rows)
            REFERENCE.write_text(json.dumps(known, indent=1) + "\n")
        data = asked.results / "data" / f"{name}.npz"
        data.parent.mkdir(parents=True, exist_ok=True)
        np.savez(data, **data_of(name, asked.rows))
        run = Path(sys.executable).parent / "mamba-run"
        line = [str(run), *command(name, data, asked.results, asked.overrides)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name:18} exit {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
            continue
        (folder,) = (asked.results / "runs" / name).glob("*/*/*")
        distance, error, worst = compare(folder / "parameters.csv", known[name])
        best = json.loads((folder / "best.json").read_text())
        print(
            f"{name:18} {distance:10.2f} {100 * error:7.1f}  {worst:12} {best['step_size']:.2g} "
            f"{best['batch_size']}  (NUTS R-hat {known[name]['r_hat']:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
