"""How often does the set that a tuning reports with 95 % contain the arm that is truly the best?

    python -m experiments.reward_study.coverage [--repetitions 500] [--out results/reward_study]

Each repetition is a whole tuning as ``tuner=mamba`` does it: 27 arms of SGLD (nine step sizes,
three batch sizes) in three rungs, on a small posterior. The arm that is truly the best has the
least mean true error over independent chains as long as those of an arm that reaches the end.
Chains are measured in steps, of which one costs ``1 + n / 100`` units for n rows.

``coverage.csv``, one row a posterior and length of the longest arm: ``covered``, the share of sets
with the best arm; ``covered_std_error`` of that share; ``within_10_percent``, the share of sets
with an arm whose true error is within 10 % of the best; ``mean_size`` and ``median_size`` of the
sets; ``best_arm``, ``best_error`` and ``next_error``, of the second best, with the standard error
of their difference; ``won``, how often the best arm is the winner, ``regret_median`` and
``regret_max`` of the winners.
``coverage_sets.csv`` has every repetition. What is in ``coverage.csv`` is not run again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pandas as pd

from experiments.reward_study import options, targets
from experiments.reward_study.bandit import Costs, Estimate, Stage
from experiments.reward_study.tables import joined, read, write
from mamba_cli.console import Console
from mamba_cli.tuners.confidence import arms_of_best_set
from mamba_cli.types import Hyperparameters, Reporter, SilentReporter

NUM_ROWS = 1_000
BATCH_SIZES = (1_000, 100, 10)
STEPS = 10.0 ** (-0.5 * np.arange(9))
"""h lambda_max / 40, from ten times the largest stable step downwards, as in the study."""

LONGEST_ARMS = (4_000.0, 20_000.0)
"""Units of cost of an arm that reaches the end: what can be told apart grows with it."""

NUM_TRUTH_CHAINS = 200

QUICK = {
    "repetitions": 5,
    "truth_chains": 4,
    "posteriors": ["skewed"],
    "lengths": [4_000.0],
}


def cost(batch_size: int) -> float:
    """Of a gradient step, in units."""
    return 1.0 + batch_size / 100.0


PROBLEMS: dict[str, Callable[[], targets.Target]] = {
    "gaussian": lambda: targets.gaussian(NUM_ROWS, dim=4, condition=100.0),
    "skewed": lambda: targets.skewed(NUM_ROWS, dim=3),
}


def stage_of(name: str) -> tuple[Stage, list[Hyperparameters]]:
    """A posterior with its arms."""
    stage = Stage(name, PROBLEMS[name](), "sgld")
    largest = max(arm.step_size for arm in stage.problem.arms())
    arms = [Hyperparameters(float(largest * s), n, 1) for n in BATCH_SIZES for s in STEPS]
    stage.pace(Costs({n: cost(n) for n in BATCH_SIZES}), [1])
    stage.bench.compile(BATCH_SIZES)
    return stage, arms


def true_errors(
    stage: Stage, arms: list[Hyperparameters], longest_arm: float, num_chains: int
) -> list[Estimate]:
    """Mean error of every arm over chains with keys of their own."""
    key = jax.random.key(2**31 - 1)
    return [
        stage.true_error(arm, longest_arm, num_chains, jax.random.fold_in(key, index))
        for index, arm in enumerate(arms)
    ]


def repeat(
    stage: Stage,
    arms: list[Hyperparameters],
    longest_arm: float,
    repetitions: int,
    reporter: Reporter | None = None,
) -> pd.DataFrame:
    """One row a tuning: its seed, winner (-1: none) and set, as text."""
    reporter = reporter or SilentReporter()
    reporter.start(f"{stage.problem.name}: {repetitions} tunings", repetitions, "tuning")
    rows = []
    for seed in range(repetitions):
        tuning = stage.tune(arms, longest_arm, seed)
        inside = arms_of_best_set(tuning.records, stage.scorer.sign)
        winner = -1 if tuning.winner is None else tuning.winner.arm
        rows.append({"seed": seed, "winner": winner, "members": " ".join(map(str, inside))})
        reporter.update(1)
    reporter.finish()
    return pd.DataFrame(rows)


def summary(sets: pd.DataFrame, errors: list[Estimate]) -> dict[str, float]:
    """What ``coverage.csv`` says of some tunings on one posterior, of one length."""
    values = np.array([estimate.value for estimate in errors])
    best, following = (int(index) for index in np.argsort(values)[:2])
    near = set(np.flatnonzero(values <= 1.1 * values[best]).tolist())
    members = [set(map(int, str(text).split())) for text in sets.members.fillna("")]
    covered = float(np.mean([best in own for own in members]))
    sizes = [len(own) for own in members]
    regrets = np.where(sets.winner < 0, np.inf, values[sets.winner] / values[best])
    return {
        "arms": len(errors),
        "repetitions": len(sets),
        "covered": covered,
        "covered_std_error": math.sqrt(covered * (1 - covered) / len(sets)),
        "within_10_percent": float(np.mean([bool(near & own) for own in members])),
        "mean_size": float(np.mean(sizes)),
        "median_size": float(np.median(sizes)),
        "best_arm": best,
        "best_error": values[best],
        "next_error": values[following],
        "difference_std_error": math.hypot(errors[best].std_error, errors[following].std_error),
        "won": float(np.mean(sets.winner == best)),
        "regret_median": float(np.median(regrets)),
        "regret_max": float(np.max(regrets)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=500)
    parser.add_argument("--truth-chains", type=int, default=NUM_TRUTH_CHAINS)
    parser.add_argument("--posteriors", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--lengths", nargs="+", type=float, default=list(LONGEST_ARMS))
    arguments = options.parse(parser, argv, QUICK)
    paths = [arguments.out / "coverage.csv", arguments.out / "coverage_sets.csv"]
    table, sets = (read(path, ["posterior", "longest_arm"]) for path in paths)
    with Console() as console:
        for name in arguments.posteriors:
            there = set(table[table.posterior == name].longest_arm)
            missing = [length for length in arguments.lengths if length not in there]
            if not missing:
                continue
            stage, arms = stage_of(name)
            for length in missing:
                errors = true_errors(stage, arms, length, arguments.truth_chains)
                own = repeat(stage, arms, length, arguments.repetitions, console)
                of_both = {"posterior": name, "longest_arm": length}
                row = pd.DataFrame([of_both | summary(own, errors)])
                table, sets = joined(table, row), joined(sets, own.assign(**of_both))
                for path, made in zip(paths, (table, sets), strict=True):
                    write(made, path)
                print(row.to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
