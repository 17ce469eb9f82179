"""NUTS whitened by the Laplace approximation against the same potential as it stands.

Effective draws per second of both, on the logistic regression of the paper. Target: whitened gives
at least twice as many. Both run in one process, one after the other, on the same compiled-in-blocks
potential; compilation is outside the seconds. The ratio hardly depends on the rows: a tenth of the
paper's are enough. What NUTS takes on all of them is in ``accuracy.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

from experiments.benchmarks import cells
from experiments.benchmarks.cells import QUICK, Table
from mamba_cli.ground_truth import NutsSettings, Samples, bulk_and_tail_ess, sample
from mamba_cli.map_estimate import find_map
from mamba_cli.models.logreg import logistic_regression

TARGET = 2.0


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    coordinates: str
    step_size: float
    accept: float
    leapfrogs: float
    warmup_s: float
    sampling_s: float
    compile_s: float
    min_ess: float

    @property
    def ess_per_s(self) -> float:
        """Smallest bulk ESS over the seconds after warm-up."""
        return self.min_ess / self.sampling_s

    @property
    def ess_per_s_with_warmup(self) -> float:
        return self.min_ess / (self.sampling_s + self.warmup_s)


def row(coordinates: str, samples: Samples, num_draws: int) -> Row:
    bulk, _ = bulk_and_tail_ess(samples.draws)
    return Row(
        coordinates,
        step_size=float(np.mean(samples.step_sizes)),
        accept=samples.mean_accept,
        leapfrogs=samples.num_leapfrogs / num_draws,
        warmup_s=samples.warmup_s,
        sampling_s=samples.elapsed_s - samples.warmup_s,
        compile_s=samples.compile_s,
        min_ess=float(np.min(bulk)),
    )


def table(rows: Sequence[Row]) -> str:
    header = (
        f"{'coordinates':<12} {'step size':>9} {'accept':>6} {'leapfrogs':>9} {'compile s':>9} "
        f"{'warm-up s':>9} {'sampling s':>10} {'min ESS':>8} {'ESS/s':>8} {'with warm-up':>12}"
    )
    lines = [
        f"{r.coordinates:<12} {r.step_size:>9.2g} {r.accept:>6.2f} {r.leapfrogs:>9.1f} "
        f"{r.compile_s:>9.1f} {r.warmup_s:>9.1f} {r.sampling_s:>10.1f} {r.min_ess:>8.0f} "
        f"{r.ess_per_s:>8.2f} {r.ess_per_s_with_warmup:>12.2f}"
        for r in rows
    ]
    return "\n".join([header, *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-train", type=int, default=2_000 if QUICK else 100_000)
    parser.add_argument("--dim", type=int, default=10)
    parser.add_argument(
        "--num-draws", type=int, default=100 if QUICK else 800, help="over all chains"
    )
    parser.add_argument(
        "--num-warmup", type=int, default=50 if QUICK else 200, help="of each chain"
    )
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=cells.FOLDER)
    chosen = parser.parse_args(arguments)
    columns = (*(name for name in Row.__dataclass_fields__ if name != "coordinates"), "ess_per_s")
    kept = Table(chosen.out / "nuts.csv", ("coordinates", "num_train", "num_draws"), columns)
    if kept.has("whitened", chosen.num_train, chosen.num_draws):
        return

    model = logistic_regression(num_train=chosen.num_train, num_test=1, dim=chosen.dim)
    centre = find_map(model, rng_key=jax.random.key(chosen.seed)).position
    rows = []
    for coordinates, whiten in (("whitened", True), ("as it stands", False)):
        settings = NutsSettings(
            num_draws=chosen.num_draws,
            num_warmup=chosen.num_warmup,
            num_chains=chosen.num_chains,
            seed=chosen.seed,
            whiten=whiten,
        )
        samples = sample(model, centre, settings)
        rows.append(row(coordinates, samples, settings.num_chains * settings.draws_per_chain))
    for one in rows:
        sizes = {"num_train": chosen.num_train, "num_draws": chosen.num_draws}
        kept.add(**asdict(one), **sizes, ess_per_s=one.ess_per_s)
    print(f"NUTS, logistic regression, {chosen.num_train:,} x {chosen.dim}")
    print(table(rows))
    ratio = rows[0].ess_per_s / rows[1].ess_per_s
    print(f"whitened / as it stands: {ratio:.1f} in ESS per second (target: at least {TARGET:g})")


if __name__ == "__main__":
    main()
