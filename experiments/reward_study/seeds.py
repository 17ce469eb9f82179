"""Does a tuning choose the same arm whatever its seed, or one that is as good?

    python -m experiments.reward_study.seeds [--targets ...] [--samplers ...] [--out ...]

``tuner=mamba`` with ten seeds over the study's grid of arms, for each posterior, sampler and length
of the longest arm, by steps at the costs in ``costs.csv``. The true error of every arm that won is
the mean over independent chains as long as those of an arm that reaches the end. A seed *agrees* if
its winner is the one that won most often, or if the true errors of both differ by 10 % at most.

``seeds_runs.csv``: one row a tuning, with its winner and the true error of that and its standard
error. ``seeds.csv``: one row a posterior, sampler and length: ``same``, seeds with the arm that won
most often; ``agree``; ``error_ratio``, the largest over the smallest true error of a winner. What
is in ``seeds_runs.csv`` is not run again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pandas as pd

from experiments.reward_study import options, targets
from experiments.reward_study.bandit import Costs, Stage
from experiments.reward_study.study import costs_of
from experiments.reward_study.tables import joined, read, write
from mamba_cli.console import Console
from mamba_cli.types import Reporter, SilentReporter

SAMPLERS = ("sgld", "sgld_cv", "sghmc")
NUM_SEEDS = 10
LONGEST_ARMS_S = (0.2, 1.0)
KEYS = ["target", "sampler", "longest_arm_s"]

NUM_TRUTH_CHAINS = 16
WITHIN = 0.10

QUICK = {
    "targets": ["skewed"],
    "samplers": ["sgld"],
    "seeds": 3,
    "longest_arm_s": [0.02],
    "truth_chains": 4,
}


def runs(
    stage: Stage,
    longest_arm_s: float,
    num_seeds: int,
    num_truth_chains: int,
    reporter: Reporter | None = None,
) -> pd.DataFrame:
    """One row a seed: the arm that won (-1: none) and its true error."""
    reporter = reporter or SilentReporter()
    arms = stage.problem.arms()
    stage.bench.compile(arm.batch_size for arm in arms)
    reporter.start(f"{stage.problem.name}, {stage.problem.sampler}", num_seeds, "tuning")
    rows = []
    for seed in range(num_seeds):
        winner = stage.tune(arms, longest_arm_s, seed).winner
        rows.append({"seed": seed, "winner": -1 if winner is None else winner.arm})
        reporter.update(1)
    reporter.finish()
    key = jax.random.key(2**31 - 1)
    for row in rows:
        index = row["winner"]
        known = [other for other in rows if other["winner"] == index and "error" in other]
        if known:
            row |= {name: known[0][name] for name in ("error", "error_std_error")}
        elif index >= 0:
            key_arm = jax.random.fold_in(key, index)
            found = stage.true_error(arms[index], longest_arm_s, num_truth_chains, key_arm)
            row |= {"error": found.value, "error_std_error": found.std_error}
        else:
            row |= {"error": math.inf, "error_std_error": math.nan}
        row |= arms[index]._asdict() if index >= 0 else {}
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a posterior, sampler and length; see the module's docstring."""
    rows = []
    for (name, sampler, longest_arm_s), group in table.groupby(KEYS, sort=False):
        errors = group.groupby("winner").error.first()
        counts = group.winner.value_counts()
        most = [arm for arm in counts.index if counts[arm] == counts.max()]
        # No winner is no arm to agree with, as long as there is another.
        usual = min(most, key=lambda arm: (arm < 0, errors[arm]))
        reference, agree = errors[usual], 0
        if usual >= 0:
            near = np.abs(group.error / reference - 1) <= WITHIN
            agree = int(np.sum((group.winner == usual) | near))
        rows.append(
            {
                "target": name,
                "sampler": sampler,
                "longest_arm_s": longest_arm_s,
                "seeds": len(group),
                "usual_winner": usual,
                "same": int(counts[usual]),
                "agree": agree,
                "error": reference,
                "error_ratio": errors.max() / errors.min() if usual >= 0 else math.inf,
            }
        )
    return pd.DataFrame(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(targets.NAMES), choices=targets.NAMES)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="how many")
    parser.add_argument("--longest-arm-s", nargs="+", type=float, default=list(LONGEST_ARMS_S))
    parser.add_argument("--truth-chains", type=int, default=NUM_TRUTH_CHAINS)
    parser.add_argument("--ground-truth", type=Path, default=Path("results/ground_truth"))
    arguments = options.parse(parser, argv, QUICK)
    path = arguments.out / "seeds_runs.csv"
    table = read(path, KEYS)
    with Console() as console:
        for name in arguments.targets:
            there = set(table[KEYS].itertuples(index=False, name=None))
            wanted = targets.cells([name], arguments.samplers, arguments.longest_arm_s)
            missing = [cell for cell in wanted if cell not in there]
            if not missing:
                continue
            target = targets.available(name, arguments.out, arguments.ground_truth, console)
            if target is None:
                continue
            for sampler in dict.fromkeys(cell[1] for cell in missing):
                stage = Stage(name, target, sampler)
                steps = {arm.num_integration_steps for arm in stage.problem.arms()}
                stage.pace(Costs(costs_of(stage.problem, arguments.out / "costs.csv")), steps)
                for longest_arm_s in (cell[2] for cell in missing if cell[1] == sampler):
                    made = runs(
                        stage, longest_arm_s, arguments.seeds, arguments.truth_chains, console
                    )
                    cell = dict(zip(KEYS, (name, sampler, longest_arm_s), strict=True))
                    table = joined(table, made.assign(**cell))
                    write(table, path)
                    print(summary(table).tail(1).to_string(index=False), flush=True)
    if len(table):
        write(summary(table), arguments.out / "seeds.csv")


if __name__ == "__main__":
    main()
